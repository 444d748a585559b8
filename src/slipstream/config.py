"""Settings of every verb: frozen dataclasses, read from a YAML recipe and flags, checked once.

One flat dataclass a verb: the flag `--max-anchors`, the YAML key `max_anchors` and the field are one name.
Flags win over YAML, YAML over defaults. This is the only module that reads YAML or environment variables; it
imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from slipstream.config_data import CacheConfig as CacheConfig
from slipstream.config_data import DataConfig as DataConfig
from slipstream.config_data import PrepareConfig as PrepareConfig
from slipstream.config_data import RegenerateConfig as RegenerateConfig
from slipstream.system.caches import INDUCTOR_CACHE, TRITON_CACHE, place_caches

C = TypeVar("C")


class UserError(ValueError):
    """Something the user can mend. The message is one line: what, where, how to mend it. Exit code 2."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a drafter for a frozen target."""

    # what goes in, where it goes
    target_model: str = ""
    """Folder or hub name of the target (a transformers causal LM)."""
    data_dir: str = ""
    """Prepared shards, or a folder of tokenised completions (Arrow, Parquet, JSONL); may be a URL (`s3://…`)."""
    data_cache: str = "~/.cache/slipstream/data"
    """Local folder for shards of a URL; several runs and ranks may share it."""
    data_cache_gib: float = 64.0
    """GiB it may hold: shards beyond that are read by ranges, a row's documents at once, each time."""
    output_dir: str = ""
    """The run's folder: configuration, metrics, checkpoints, export. An interrupted run in it is resumed."""
    taps_dir: str | None = None
    """Taps recorded by `slipstream cache`; unset runs the target online."""

    # the drafter's own geometry; only hidden size and vocabulary come from the target
    layers: int = 5
    """Decoder layers of the drafter."""
    heads: int | None = None
    """Query heads (default: 32 for hidden sizes from 2048, else hidden/64)."""
    kv_heads: int | None = None
    """Key/value heads (default: 8 for hidden sizes from 2048, else a third of the heads)."""
    head_dim: int | None = None
    """Width of a head (default: 128 for hidden sizes from 2048, else 64)."""
    intermediate_size: int | None = None
    """Width of the MLP (default: 3 × hidden size, rounded up to 256)."""
    taps: int = 5
    """How many target layers are read, spread evenly; ignored when `target_layer_ids` is given."""
    target_layer_ids: tuple[int, ...] | None = None
    """0-based target layers whose output is read; never the last layer."""
    block_size: int = 16
    """Tokens a block holds, its anchor included: a pass drafts one fewer."""
    mask_token_id: int | None = None
    """An unused row of the target's embedding (default: the family's, else an unused special token)."""
    sliding_window: int | None = None
    """Context window of the drafter's layers in tokens (default: unlimited)."""
    full_layers: int = 0
    """With a sliding window: how many layers, the last ones, see the whole context all the same."""
    rope_theta: float | None = None
    """Base of the drafter's rotary embedding (default: the target's)."""

    # rows, blocks, loss
    token_budget: int = 8192
    """Tokens in a packed row."""
    max_anchors: int = 512
    """Most anchors drawn in a packed row."""
    anchor_share: float | None = None
    """Anchors a row draws, as a share of those it could: coverage is then the same at any `token_budget`."""
    on_long: Literal["truncate", "split", "reject"] = "truncate"
    """What to do with a document longer than the token budget."""
    loss: Literal["decay", "dpace"] = "decay"
    """Slot weights: exponential decay exp(−(k−1)/γ), or D-PACE (docs/training.md)."""
    gamma: float | None = None
    """γ of the decay (default: 7, 5, 4 for blocks of 16, 10, 8; else block/2 − 1, at least 1)."""
    dpace_floor: float = 0.5
    """The floor `a` of D-PACE: s = (1−a)·q + a."""
    noise: float = 0.0
    """Noise added to the tapped features in training: half-width (uniform) or deviation (gaussian); 0.05 is
    usual.
    """
    noise_kind: Literal["uniform", "gaussian"] = "uniform"
    """Shape of that noise."""

    # optimisation
    epochs: float = 6.0
    """Passes over the rows; `max_steps` and `max_minutes` may end the run earlier."""
    max_steps: int | None = None
    """Optimiser steps in all, whatever the epochs say."""
    max_minutes: float | None = None
    """Training time after which the run ends in order; where it is nearer the schedule follows the clock."""
    rows_per_step: int | None = None
    """Packed rows an optimiser step sums over, all ranks together (default: one a drafter rank)."""
    anchor_draws: int = 1
    """Optimiser steps on each row's taps, every one with fresh anchors: saves target passes."""
    lr: float = 6e-4
    """Peak learning rate of AdamW."""
    warmup: float = 0.04
    """Share of the steps spent warming up; a cosine to zero follows."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moments."""
    clip: float = 1.0
    """Global gradient norm above which gradients are scaled down."""
    seed: int = 0
    """Seed of weights, row order, anchors and noise."""

    # machine
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the target and of the drafter's matrix work; masters, reductions and losses are always
    fp32.
    """
    target_pass: Literal["auto", "fused", "stock"] = "auto"
    """How the target reads rows: fused (on CUDA, where the family allows) or its stock layers."""
    target_fp8: bool = False
    """The fused target's matrix products in FP8: faster, taps a few percent off (GPUs from sm_89)."""
    attention: Literal["auto", "flex", "documents", "dense"] = "auto"
    """Block attention: compiled flex (CUDA), dense one document at a time (CPU), or dense (the oracle)."""
    compile: bool = True
    """Compiled layers, loss and flex attention on CUDA; `--no-compile` debugs with dense attention one
    document at a time and the target's stock layers.
    """
    activation_checkpointing: bool = False
    """Compute each drafter layer again in the backward pass: less memory, more time."""

    # ranks: processes with a device each
    ranks: int | None = None
    """Ranks with target and drafter each, started on this machine (under torchrun: as many as it started)."""
    dp_pairs: int = 0
    """Pairs of a target rank and a drafter rank, in place of `ranks`."""
    target_ranks: int = 0
    """The same in another ratio: ranks that read the target …"""
    drafter_ranks: int = 0
    """… and ranks that train the drafter."""
    link_credits: int = 2
    """Rows of taps that may wait at a drafter rank in a split run: each takes a row's taps of memory."""
    drafter_sharding: bool = False
    """Masters, gradients and moments in shards over the drafter ranks (FSDP2), not a copy on each."""
    target_sharding: bool = False
    """The target's layers in shards over the target ranks, for targets that do not fit on one device."""
    max_restarts: int = 0
    """How often ranks started here are started again from the last checkpoint after one has died."""

    # watching
    log_interval: int = 10
    """Optimiser steps between two lines of metrics."""
    save_interval: int = 500
    """Optimiser steps between two checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest complete checkpoints kept."""
    eval_interval: int = 500
    """Optimiser steps between two validations; the last step is always validated."""
    eval_rows: int = 8
    """Packed held-out rows a validation reads."""
    decode_prompts: int = 8
    """Held-out prompts decoded with the exported drafter at the end; 0 leaves that out."""
    decode_tokens: int = 64
    """New tokens per decoded prompt."""
    plan: bool = False
    """Print placement, rows and steps, memory by part and the expected time, and exit."""
    probe: bool = False
    """With `plan`: load target and drafter, measure the parts of a step, and recommend a placement."""


@dataclass(frozen=True)
class EvalConfig:
    """Decode prompts with and without the drafter; τ, acceptance by slot, baselines, speed, losslessness."""

    target_model: str = ""
    """Folder or hub name of the target."""
    drafter: str = ""
    """An exported drafter (z-lab layout)."""
    prompts: tuple[str, ...] = ()
    """Prompt files (JSONL with `turns`, `messages`, `prompt_ids` or `prompt`), or a prepared folder: its
    held-out part.
    """
    max_prompts: int = 16
    """Prompts taken from each file, the first ones."""
    thinking: bool | None = None
    """`enable_thinking` for templates that know it, as the training data was prepared; unset leaves the
    template's own default. Prompts of ready ids stay as they are.
    """
    max_new_tokens: int = 128
    """New tokens per prompt."""
    temperature: float = 0.0
    """0 is greedy; above it, rejection sampling."""
    block_size: int | None = None
    """Tokens in a block; at most the trained size, which is the default."""
    control: bool = False
    """Decode also with an untrained drafter of the same geometry."""
    ngram_data: str | None = None
    """Prepared folder whose training answers make the n-gram table baseline."""
    lossless_tokens: int = 64
    """New tokens per prompt compared with plain decoding in fp32; 0 leaves the proof out."""
    output: str | None = None
    """JSON file for the figures."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the timed decoding; the losslessness proof always runs in fp32."""
    seed: int = 0
    """Seed of the sampling and of the control's weights."""


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint as a drafter that serving engines load (z-lab / SGLang layout)."""

    checkpoint: str = ""
    """A run folder (its newest complete checkpoint is taken) or one checkpoint's folder."""
    output_dir: str = ""
    """Folder to write; must be new or empty."""


@dataclass(frozen=True)
class DoctorConfig(TrainConfig):
    """Can this machine train, and how well. Takes what `train` takes, so that a recipe or a whole command
    line can be asked about.
    """

    json: bool = False
    """Findings and facts as JSON."""
    facts: str | None = None
    """Judge the facts of this file, recorded on another machine."""
    record: str | None = None
    """Write this machine's facts to this file too."""


REQUIRED: dict[type, tuple[str, ...]] = {
    PrepareConfig: ("input", "output_dir", "tokenizer"),
    RegenerateConfig: ("output_dir",),
    DataConfig: ("data_dir",),
    TrainConfig: ("target_model", "data_dir", "output_dir"),
    CacheConfig: ("target_model", "data_dir", "output_dir"),
    EvalConfig: ("target_model", "drafter", "prompts"),
    ExportConfig: ("checkpoint", "output_dir"),
    DoctorConfig: (),
}

POSITIONAL: dict[type, tuple[str, ...]] = {DataConfig: ("task", "data-dir")}
"""Flags whose values may stand first on the line, without their names."""

AT_LEAST: dict[str, int] = {
    "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 2, "intermediate_size": 1, "sliding_window": 1,
    "token_budget": 2, "noise": 0, "max_steps": 1, "rows_per_step": 1, "anchor_draws": 1, "full_layers": 0,
    "weight_decay": 0, "seed": 0,
    "log_interval": 1, "save_interval": 1, "keep_checkpoints": 1, "eval_interval": 1, "eval_rows": 0,
    "decode_prompts": 0, "decode_tokens": 1, "dp_pairs": 0, "ranks": 1, "target_ranks": 0, "drafter_ranks": 0,
    "link_credits": 1, "max_restarts": 0, "limit_rows": 1, "heldout_rows": 0,
    "max_length": 2, "limit": 1, "block_size": 2, "max_anchors": 1, "max_prompts": 1, "max_new_tokens": 1,
    "temperature": 0, "lossless_tokens": 0, "self_prompt": 1, "turns": 1, "concurrency": 1, "retries": 0,
    "batch_size": 1, "processes": 1, "decontaminate_words": 1, "show": 1,
}  # fmt: skip
AT_MOST: dict[str, int] = {"seed": 2**63 - 1, "max_anchors": 2**24, "token_budget": 2**24, "anchor_share": 1}
POSITIVE = (
    "timeout",
    "data_cache_gib",
    "gamma",
    "rope_theta",
    "epochs",
    "max_minutes",
    "lr",
    "clip",
    "anchor_share",
)
SHARES = ("warmup", "betas", "dpace_floor", "holdout")


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}: cannot read this recipe: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 at byte {e.start}: a recipe is a YAML text file") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(e).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a mapping of settings, found a {type(values).__name__}")
    return values


def from_dict(cls: type[C], values: dict[str, Any], where: str) -> C:
    """A config of `cls` from plain values; unknown keys and wrong types are `UserError`s that name
    `where`.
    """
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    out = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UserError(f"{where}: unknown setting {key!r}{nearest(name, known)}")
        out[name] = _coerce(value, hints[name], f"{where}: {key}")
    return cls(**out)


def _coerce(value: Any, hint: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _coerce(value, next(a for a in args if a is not type(None)), where)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where}: {value!r} is not one of {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        if args[-1] is not Ellipsis and len(items) != len(args):
            raise UserError(f"{where}: expected {len(args)} values, found {len(items)}")
        return tuple(_coerce(v, args[0], where) for v in items)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 6e-4 as text
        try:
            return float(value)
        except ValueError:
            raise UserError(f"{where}: {value!r} is not a number") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{where}: expected {hint.__name__}, found {value!r}")
    return value


def to_yaml(config: Any) -> str:
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}
    return yaml.safe_dump(values, sort_keys=False)


def check_required(config: Any, how: str) -> None:
    values = dataclasses.asdict(config)
    for name in REQUIRED[type(config)]:
        if not values[name] and not (name == "output_dir" and values.get("show")):
            raise UserError(f"{how}: --{name.replace('_', '-')} is missing: give it, or {name} in a --config")


def check_ranges(config: Any) -> None:
    """Numbers that can mean nothing are refused by their flag's name before any work."""
    for name, value in dataclasses.asdict(config).items():
        values = [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, int | float)]
        least = AT_LEAST.get(name)
        for v in values:
            what = "finite" if not math.isfinite(v) else None
            if name in POSITIVE and v <= 0:
                what = "above 0"
            elif least is not None and v < least:
                what = f"at least {least}"
            elif name in AT_MOST and v > AT_MOST[name]:
                what = f"at most {AT_MOST[name]}"
            elif name in SHARES and not 0 <= v < 1:
                what = "at least 0 and below 1"
            if what:
                raise UserError(f"--{name.replace('_', '-')} {v}: must be {what}")


def set_process_environment() -> list[str]:
    """Defaults that must stand before torch is imported; a user's own setting is left alone.

    Returns lines for the user: where kernels are kept, if that is not the usual place.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # taps on their way hold thread blocks of both GPUs: few channels carry a row in a small part of a step
    os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", "4")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # links have streams of their own
    caches = place_caches(os.environ)
    os.environ.update(caches.variables)
    return list(caches.notes)


def share_threads(ranks: int) -> None:
    """This machine's cores for so many ranks: torchrun gives each one thread where nothing is said."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))


def kernel_cache_folders() -> tuple[Path | None, Path | None]:
    """Triton's and inductor's folders as this process uses them; None where no variable says."""
    triton, inductor = os.environ.get(TRITON_CACHE), os.environ.get(INDUCTOR_CACHE)
    return Path(triton) if triton else None, Path(inductor) if inductor else None


def read_environment(*names: str) -> dict[str, str | None]:
    """Environment variables as they stand, for what reports on them."""
    return {name: os.environ.get(name) for name in names}


def default_gamma(block_size: int) -> float:
    """γ of the decay by block size (arXiv 2602.06036: 7, 5, 4 for 16, 10, 8)."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(1.0, block_size / 2 - 1))
