"""What `train` would say of a recipe on a machine that is known by its facts alone, for doctor.py.

Nothing is judged here by rules of its own: settings go to what a run's start calls, the target is sketched
and its memory foretold as `train --plan` does it. What those would ask of the GPU at hand comes from the
facts, which may have been recorded elsewhere. Imports torch; reads the recipe's run folder, starts no CUDA.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from slipstream.config import TrainConfig, UserError
from slipstream.distributed.placement import placement_of
from slipstream.models.fp8 import supports_fp8
from slipstream.models.sketch import sketch_target
from slipstream.models.target import Target
from slipstream.models.trunk import LINEAR, why_not_fused
from slipstream.system.facts import Facts, Sketch
from slipstream.system.memory import (
    CONTEXT,
    drafter_parameters,
    fits,
    predict,
    say_offers,
    target_shape,
    what_fits,
)
from slipstream.training import setup
from slipstream.training.attention import choose_attention


def sketch(facts: Facts, recipe: TrainConfig) -> Sketch:
    """The recipe's target and drafter as shapes, and what is refused of them."""
    gpu = facts.gpus[0] if facts.gpus and recipe.device != "cpu" else None
    device = torch.device("cpu" if gpu is None else "cuda")
    dtype = setup.choose_dtype(recipe.dtype, device)
    with TemporaryDirectory() as scratch:
        refused = tuple(_refusals(facts, recipe, device, scratch))
        if facts.target is None:
            name = recipe.target_model
            return Sketch(refused, f"target and memory: no config.json of {name} here" if name else None)
        (Path(scratch) / "config.json").write_text(json.dumps(facts.target), encoding="utf-8")
        try:
            # on a CPU: what the fused pass asks of a GPU follows from the facts
            target = sketch_target(replace(recipe, target_model=scratch), torch.device("cpu"), dtype)
            geometry = setup.drafter_config(recipe, target.ends, recipe.mask_token_id or 0)
        except UserError as e:
            line = str(e).replace(scratch, recipe.target_model or "the recorded target")
            return Sketch((*refused, " ".join(line.split())))
    shape, hybrid = target_shape(target, dtype.itemsize), LINEAR in _layer_types(target)
    known = Sketch(refused, None, hybrid, shape.weights, drafter_parameters(geometry))
    if gpu is None:
        return known
    if (why := _why_not_fused(facts, recipe, target)) is not None:
        refused = *refused, why
    need = predict(recipe, geometry, shape)
    offers = "" if fits(need, gpu.total) else say_offers(what_fits(recipe, geometry, shape, gpu.total), shape)
    return replace(known, refused=refused, need=need.total, need_free=need.total - CONTEXT, offers=offers)


def _refusals(facts: Facts, recipe: TrainConfig, device: torch.device, scratch: str) -> Iterator[str]:
    """Of settings alone."""
    known = recipe.output_dir if facts.output is not None and facts.output.fault is None else ""
    checks: tuple[Callable[[], object], ...] = (
        # whether a GPU is there is judged from the facts
        lambda: setup.choose_device("cpu" if recipe.device in ("auto", "cuda") else recipe.device),
        lambda: choose_attention(recipe.attention, device, recipe.compile),
        lambda: setup.check_settings(
            setup.resolved(replace(recipe, output_dir=known or f"{scratch}/new"), placement_of(recipe))
        ),
    )
    for check in checks:
        try:
            check()
        except UserError as e:
            yield str(e)
    if recipe.target_fp8 and device.type == "cuda":
        gpu = facts.gpus[0]
        if (why := supports_fp8((gpu.major, gpu.minor))) is not None:
            yield f"--target-fp8: {why}: leave it out"


def _layer_types(target: Target) -> list[str]:
    return target.config.to_dict().get("layer_types") or []


def _why_not_fused(facts: Facts, recipe: TrainConfig, target: Target) -> str | None:
    """The refusal where the recipe asks for the fused pass and a GPU with these packages cannot run it."""
    if not (recipe.target_fp8 or recipe.target_pass == "fused"):
        return None
    config, fla = target.config.to_dict(), facts.fla is not None
    # what FP8 asks of the matrices the sketch has said, what it asks of the GPU the settings' check
    why = why_not_fused(target.family.trunk, config, target.decoder, target.dtype, False, True, fla)
    setting = "--target-fp8" if recipe.target_fp8 else "--target-pass fused"
    return None if why is None else f"{setting}: the fused pass cannot read this target: {why}"
