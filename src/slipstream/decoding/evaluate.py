"""`slipstream eval`: what a drafter is worth on real requests, and that it changes nothing.

Lives here: decoding of prompts with and without a drafter, the figures made of it, the proof of losslessness,
the verb. Not here: the decoding loops (speculative.py), prompts (prompts.py), drafters that need no model
(baselines.py), tables (table.py).
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from slipstream.config import EvalConfig, UserError
from slipstream.data.chat import ChatTemplate
from slipstream.data.shards import TokenDataset, open_dataset, write_atomic
from slipstream.data.tokenizer import load_tokenizer, stop_ids
from slipstream.decoding.baselines import (
    NgramTable,
    Tau,
    distinct_4gram_ratio,
    ngram_table,
    tau_of,
    walk_lookup,
    walk_ngram,
)
from slipstream.decoding.lossless import Agreement, compare, prove_lossless
from slipstream.decoding.prompts import Prompt, heldout_prompts, read_prompts
from slipstream.decoding.speculative import Decoded, generate_plain, generate_speculative
from slipstream.decoding.table import DatasetResult, Evaluation, Speed, render_table, to_json
from slipstream.export.zlab import load_drafter
from slipstream.models.drafter import Drafter
from slipstream.models.target import Target, load_target
from slipstream.system.kernels import prepare_kernels
from slipstream.training.metrics import Display
from slipstream.training.run import Run, device_name
from slipstream.training.setup import choose_device, choose_dtype

DEGENERATE_RATIO = 0.5
"""Distinct-4-gram ratio below which the target's answers repeat themselves."""
NGRAM_TOKENS = 4_000_000
"""Training tokens that the n-gram table is made of at most: seconds to count, some 100 MB."""
LOOKUP_ADVANTAGE = 1.25
"""Prompt-lookup this many times better than the drafter says more about the answers than about the
drafter.
"""


def check_prompts(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Raises `UserError` for a prompt that the target cannot read or has no room to answer."""
    context = target.config.max_position_embeddings
    for prompt in prompts:
        if len(prompt.ids) + max_new_tokens > context:
            raise UserError(
                f"{prompt.where}: {len(prompt.ids)} prompt tokens and {max_new_tokens} new ones exceed the "
                f"target's context of {context}: shorten it or lower --max-new-tokens"
            )
        if max(prompt.ids) >= target.vocab_size:
            raise UserError(
                f"{prompt.where}: token {max(prompt.ids)} is outside the target's vocabulary of "
                f"{target.vocab_size}: were these ids made by another tokenizer?"
            )


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts_by_name: Mapping[str, Sequence[Prompt]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    temperature: float = 0.0,
    block_size: int | None = None,
    control: Drafter | None = None,
    table: NgramTable | None = None,
    seed: int = 0,
    progress: Callable[[int, str], None] | None = None,
) -> Evaluation:
    """Decodes every prompt plainly and with the drafter (and the control), and walks the baselines along the
    plain answers.

    `progress` gets the number of requests done and their data set. Raises `UserError` for a drafter and
    prompts that do not fit.
    """
    assert temperature >= 0
    assert max_new_tokens >= 1
    drafter.config.check_against_target(target.hidden_size, target.vocab_size, target.num_layers)
    for prompts in prompts_by_name.values():
        check_prompts(target, prompts, max_new_tokens)
    size = drafter.config.block_size if block_size is None else block_size
    generator = torch.Generator(target.device).manual_seed(seed)

    def speculative(model: Drafter, prompt: Prompt) -> Decoded:
        return generate_speculative(
            target, model, prompt.ids, max_new_tokens, temperature, stop_ids, size, generator
        )

    warm_up = next(iter(prompts_by_name.values()))[0]
    generate_speculative(target, drafter, warm_up.ids, min(size + 1, max_new_tokens), 0, stop_ids, size)
    results, compared, done = [], [], 0
    for name, prompts in prompts_by_name.items():
        plain, drafted, controlled = [], [], []
        for prompt in prompts:
            plain.append(generate_plain(target, prompt.ids, max_new_tokens, temperature, stop_ids, generator))
            drafted.append(speculative(drafter, prompt))
            if control is not None:
                controlled.append(speculative(control, prompt))
            done += 1
            if progress is not None:
                progress(done, name)
        results.append(_summarise(name, prompts, plain, drafted, controlled, size, table, seed))
        compared += list(zip(prompts, plain, drafted, strict=True))
    dtype = str(target.dtype).removeprefix("torch.")
    return Evaluation(
        block_size=size,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype,
        device=device_name(target.device),
        ngram_tokens=table.tokens if table else None,
        datasets=results,
        agreement=compare(target, compared) if temperature == 0 else None,
        lossless=None,
    )


def _summarise(
    name: str,
    prompts: Sequence[Prompt],
    plain: list[Decoded],
    drafted: list[Decoded],
    controlled: list[Decoded],
    size: int,
    table: NgramTable | None,
    seed: int,
) -> DatasetResult:
    answers = [d.tokens for d in plain]
    pairs = [(p.ids, answer) for p, answer in zip(prompts, answers, strict=True)]
    reached = [sum(d.slots_reached[k] for d in drafted) for k in range(size - 1)]
    accepted = [sum(d.slots_accepted[k] for d in drafted) for k in range(size - 1)]
    tau = tau_of([d.produced for d in drafted], seed)
    tau_lookup = tau_of([walk_lookup(ids, answer, size) for ids, answer in pairs], seed)
    tau_ngram = table and tau_of([walk_ngram(ids, answer, size, table) for ids, answer in pairs], seed)
    plain_speed, speculative_speed = _speed(plain), _speed(drafted)
    rates = plain_speed.tokens_per_second, speculative_speed.tokens_per_second
    distinct = distinct_4gram_ratio(answers)
    return DatasetResult(
        name=name,
        requests=len(prompts),
        tau=tau,
        tau_control=tau_of([d.produced for d in controlled], seed),
        tau_lookup=tau_lookup,
        tau_ngram=tau_ngram,
        slot_acceptance=[a / r if r else None for a, r in zip(accepted, reached, strict=True)],
        slots_reached=reached,
        produced=dict(sorted(Counter(n for d in drafted for n in d.produced).items())),
        plain=plain_speed,
        speculative=speculative_speed,
        speedup=rates[1] / rates[0] if rates[0] and rates[1] else None,
        distinct_4grams=distinct,
        warnings=degenerate_warnings(tau, tau_lookup, distinct),
    )


def _speed(decoded: Sequence[Decoded]) -> Speed:
    return Speed(
        tokens=sum(len(d.tokens) - 1 for d in decoded),
        passes=sum(d.passes for d in decoded),
        catch_up_passes=sum(d.catch_up_passes for d in decoded),
        prefill_seconds=sum(d.prefill_seconds for d in decoded),
        decode_seconds=sum(d.decode_seconds for d in decoded),
    )


def degenerate_warnings(tau: Tau | None, lookup: Tau | None, distinct: float | None) -> list[str]:
    """Reasons not to trust τ: answers that repeat themselves are easy to draft by copying."""
    warnings = []
    if distinct is not None and distinct < DEGENERATE_RATIO:
        warnings.append(
            f"the target's answers repeat themselves ({distinct:.0%} of their 4-grams are distinct): "
            "τ means little here"
        )
    if tau and lookup and lookup.mean > LOOKUP_ADVANTAGE * tau.mean:
        warnings.append(
            f"prompt-lookup (τ {lookup.mean:.2f}) beats the drafter (τ {tau.mean:.2f}) by far: "
            "the answers mostly copy, or the drafter is not for this target"
        )
    return warnings


def untrained(drafter: Drafter, seed: int) -> Drafter:
    """A fresh drafter of the same geometry, device and dtype: what τ looks like without training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = Drafter(drafter.config)
    weight = drafter.fc.weight
    return fresh.to(device=weight.device, dtype=weight.dtype).requires_grad_(False)


def run_eval(config: EvalConfig, display: Display, console: Console | None = None) -> dict[str, Any]:
    """The verb: prints the tables (on standard output, unless told where), writes `config.output`, returns
    what it wrote. Raises `UserError`.
    """
    assert config.lossless_tokens >= 0
    console = console or Console()
    if config.output is not None and not Path(config.output).resolve().parent.is_dir():
        raise UserError(f"--output {config.output}: no such folder: make it first")
    if config.output is not None and Path(config.output).is_dir():
        raise UserError(f"--output {config.output}: is a folder: name a file in it")
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    # The drafter first: small, and its taps say what is read of the target.
    drafter = load_drafter(config.drafter, device, dtype)
    tokenizer = load_tokenizer(config.target_model)
    chat = ChatTemplate(tokenizer, config.thinking)
    prompts = {
        name: read_prompts(path, chat, config.max_prompts)
        for name, path in dataset_names(config.prompts).items()
    }
    table = None if config.ngram_data is None else training_table(open_dataset(config.ngram_data, "train"))
    if device.type == "cuda":
        for line in prepare_kernels():
            display.say(line)
    target = load_target(config.target_model, drafter.config.target_layer_ids, 0, device, dtype, "stock")
    ends = stop_ids(target.model.generation_config, tokenizer)
    requests = [p for group in prompts.values() for p in group]
    display.start("decode", len(requests))
    evaluation = evaluate(
        target,
        drafter,
        prompts,
        max_new_tokens=config.max_new_tokens,
        stop_ids=ends,
        temperature=config.temperature,
        block_size=config.block_size,
        control=untrained(drafter, config.seed) if config.control else None,
        table=table,
        seed=config.seed,
        progress=display.advance,
    )
    display.stop()
    lossless = evaluation.agreement
    if config.lossless_tokens == 0:
        lossless = None
    elif lossless is None or dtype != torch.float32 or config.lossless_tokens > config.max_new_tokens:
        # The fp32 copies may need the memory; a target and its hooks hold each other, so `del` frees nothing.
        del target, drafter
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        lossless = _prove_from_files(config, device, requests, ends, display)
    evaluation = dataclasses.replace(evaluation, lossless=lossless)
    console.print(render_table(evaluation))
    out = to_json(evaluation)
    if config.output is not None:
        write_atomic(Path(config.output), (json.dumps(out, indent=1) + "\n").encode())
    return out


def _prove_from_files(
    config: EvalConfig,
    device: torch.device,
    prompts: Sequence[Prompt],
    stop_ids: Collection[int],
    display: Display,
) -> Agreement:
    drafter = load_drafter(config.drafter, device, torch.float32)
    taps = drafter.config.target_layer_ids
    target = load_target(config.target_model, taps, 0, device, torch.float32, "stock")
    check_prompts(target, prompts, config.lossless_tokens)
    tokens, size = config.lossless_tokens, config.block_size
    display.start("prove in fp32", len(prompts))
    agreement = prove_lossless(target, drafter, prompts, tokens, stop_ids, size, display.advance)
    display.stop()
    return agreement


def decode_after_training(run: Run, exported: Path, display: Display) -> dict[str, Any] | None:
    """A run's last act: held-out prompts decoded with the drafter as exported, in the run's precision, on its
    target.

    Prints the tables and writes `decode.json` into the run's folder. None when there is no held-out prompt
    that fits the target's context, which is said: a finished training must not end in an error for that.
    """
    tokens = run.config.decode_tokens
    prompts = heldout_prompts(run.heldout_data, run.config.data_dir, run.config.decode_prompts)
    fitting = [p for p in prompts if len(p.ids) + tokens <= run.ends.max_position_embeddings]
    if len(fitting) < len(prompts):
        left_out = len(prompts) - len(fitting)
        display.say(f"decode: {left_out} held-out prompts left out: longer than the target's context")
    if not fitting:
        return None
    tokenizer = load_tokenizer(run.config.target_model)
    target = run.target
    if target is None:  # this rank has drafted only
        taps = run.ends.target_layer_ids
        target = load_target(run.config.target_model, taps, 0, run.device, run.dtype, "stock")
    display.start("decode", len(fitting))
    evaluation = evaluate(
        target,
        load_drafter(exported, run.device, run.dtype),
        {"held-out": fitting},
        max_new_tokens=tokens,
        stop_ids=stop_ids(run.ends.generation_config, tokenizer),
        table=training_table(run.rows.dataset),
        seed=run.config.seed,
        progress=display.advance,
    )
    display.stop()
    if run.dtype == torch.float32:
        evaluation = dataclasses.replace(evaluation, lossless=evaluation.agreement)
    display.console.print(render_table(evaluation))
    out = to_json(evaluation)
    write_atomic(run.folder / "decode.json", (json.dumps(out, indent=1) + "\n").encode())
    return out


def dataset_names(paths: Sequence[str]) -> dict[str, str]:
    """Short names of prompt files → their paths; whole paths as names where short ones collide."""
    stems = [Path(p).name.removesuffix(".gz").removesuffix(".jsonl") for p in paths]
    return {p if stems.count(stem) > 1 else stem: p for stem, p in zip(stems, paths, strict=True)}


def training_table(train: TokenDataset) -> NgramTable:
    """The n-gram table of a training split's first documents, `NGRAM_TOKENS` tokens of them."""
    whole = int(np.searchsorted(train.lengths.cumsum(), NGRAM_TOKENS, side="right"))
    return ngram_table([train.document(i) for i in range(whole)])
