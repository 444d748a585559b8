"""`slipstream eval`: what a drafter is worth on real requests, and that it changes nothing.

Lives here: decoding of prompts with and without a drafter, the figures made of it, the proof of losslessness,
the verb. Not here: the decoding loops (speculative.py), prompts (prompts.py), drafters that need no model
(baselines.py), tables (table.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slipstream.config import EvalConfig, UserError
from slipstream.data.shards import open_dataset, write_atomic
from slipstream.decoding.baselines import (
    NgramTable,
    Tau,
    distinct_4gram_ratio,
    ngram_table,
    tau_of,
    walk_lookup,
    walk_ngram,
)
from slipstream.decoding.prompts import Prompt, read_prompts
from slipstream.decoding.speculative import Decoded, generate_plain, generate_speculative
from slipstream.export.zlab import load_drafter
from slipstream.models.drafter import Drafter
from slipstream.models.target import Target, load_target
from slipstream.training.setup import choose_device, choose_dtype

DEGENERATE_RATIO = 0.5
"""Distinct-4-gram ratio below which the target's answers repeat themselves."""
LOOKUP_ADVANTAGE = 1.25
"""Prompt-lookup this many times better than the drafter says more about the answers than about the
drafter.
"""


@dataclass(frozen=True)
class Difference:
    """Where a greedy speculative answer leaves the plain one."""

    where: str
    position: int
    """Index among the new tokens."""
    plain: int
    speculative: int
    margin: float
    """Target's logit of the plain token minus that of the speculative one, in a fresh pass over the common
    text.
    """


@dataclass(frozen=True)
class Agreement:
    """Greedy speculative answers beside plain ones, token by token up to each first difference."""

    dtype: str
    requests: int
    tokens: int
    """Tokens compared and found equal."""
    differences: list[Difference]

    @property
    def lossless(self) -> bool:
        return not self.differences


@dataclass(frozen=True)
class Speed:
    """Decoding of one way over the requests of a data set; the prefill is kept apart."""

    tokens: int
    """Tokens after the prefill's."""
    passes: int
    catch_up_passes: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.decode_seconds if self.tokens else None


@dataclass(frozen=True)
class DatasetResult:
    """Figures of one set of prompts. τ is None where no request made a pass."""

    name: str
    requests: int
    tau: Tau | None
    tau_control: Tau | None
    """An untrained drafter of the same geometry; None when not asked for."""
    tau_lookup: Tau | None
    tau_ngram: Tau | None
    """None when there is no table."""
    slot_acceptance: list[float | None]
    """At k−1: share of drafts in slot k that were right, where all before them were; None where none was
    judged.
    """
    slots_reached: list[int]
    produced: dict[int, int]
    """Passes by how many tokens they produced."""
    plain: Speed
    speculative: Speed
    speedup: float | None
    distinct_4grams: float | None
    warnings: list[str]


@dataclass(frozen=True)
class Evaluation:
    """All data sets, and how they were decoded."""

    block_size: int
    max_new_tokens: int
    temperature: float
    dtype: str
    device: str
    datasets: list[DatasetResult]
    agreement: Agreement | None
    """Speculative beside plain answers of the timed decoding; None when sampled, where the two differ by
    chance.
    """
    lossless: Agreement | None
    """The proof in fp32; None when left out."""


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
    progress: Callable[[str], None] | None = None,
) -> Evaluation:
    """Decodes every prompt plainly and with the drafter (and the control), and walks the baselines along the
    plain answers.

    `progress` gets a line before each request. Raises `UserError` for settings and prompts that do not fit.
    """
    if temperature < 0:
        raise UserError(f"--temperature {temperature}: must be 0 (greedy) or above")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: must be at least 1")
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
    generate_speculative(target, drafter, warm_up.ids, min(2 * size, max_new_tokens), 0, stop_ids, size)
    results, compared = [], []
    for name, prompts in prompts_by_name.items():
        plain, drafted, controlled = [], [], []
        for i, prompt in enumerate(prompts, 1):
            if progress is not None:
                progress(f"{name}: {i}/{len(prompts)}")
            plain.append(generate_plain(target, prompt.ids, max_new_tokens, temperature, stop_ids, generator))
            drafted.append(speculative(drafter, prompt))
            if control is not None:
                controlled.append(speculative(control, prompt))
        results.append(_summarise(name, prompts, plain, drafted, controlled, size, table, seed))
        compared += list(zip(prompts, plain, drafted, strict=True))
    dtype = str(target.dtype).removeprefix("torch.")
    return Evaluation(
        block_size=size,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype,
        device=device_name(target.device),
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


def compare(target: Target, requests: Sequence[tuple[Prompt, Decoded, Decoded]]) -> Agreement:
    """Greedy answers, plain (second) and speculative (third), token by token."""
    tokens, differences = 0, []
    for prompt, plain, drafted in requests:
        both = zip(plain.tokens, drafted.tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(both) if a != b), None)
        if same is None:
            # The same stop rule ends both: of two equal beginnings neither can be longer.
            assert len(plain.tokens) == len(drafted.tokens)
            tokens += len(plain.tokens)
            continue
        tokens += same
        a, b = plain.tokens[same], drafted.tokens[same]
        margin = _margin(target, prompt.ids + plain.tokens[:same], a, b)
        differences.append(Difference(prompt.where, same, a, b, margin))
    dtype = str(target.dtype).removeprefix("torch.")
    return Agreement(dtype, len(requests), tokens, differences)


@torch.inference_mode()
def _margin(target: Target, ids: list[int], plain: int, speculative: int) -> float:
    logits_nV, _ = target.decode_step(torch.tensor(ids, device=target.device), target.new_cache(), 0)
    return float(logits_nV[-1, plain].float() - logits_nV[-1, speculative].float())


def prove_lossless(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    stop_ids: Collection[int],
    block_size: int | None = None,
) -> Agreement:
    """Greedy decoding in fp32, plainly and with the drafter, compared token by token. Both models must be
    fp32 copies.
    """
    assert target.dtype == torch.float32
    assert drafter.fc.weight.dtype == torch.float32
    requests = []
    for prompt in prompts:
        plain = generate_plain(target, prompt.ids, max_new_tokens, 0, stop_ids)
        drafted = generate_speculative(target, drafter, prompt.ids, max_new_tokens, 0, stop_ids, block_size)
        requests.append((prompt, plain, drafted))
    return compare(target, requests)


def untrained(drafter: Drafter, seed: int) -> Drafter:
    """A fresh drafter of the same geometry, device and dtype: what τ looks like without training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = Drafter(drafter.config)
    weight = drafter.fc.weight
    return fresh.to(device=weight.device, dtype=weight.dtype).requires_grad_(False)


def stop_ids_of(target: Target, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end an answer: those of the target's generation settings, and the tokenizer's end token."""
    settings = target.model.generation_config
    assert settings is not None
    return frozenset(_listed(settings.eos_token_id) + _listed(tokenizer.eos_token_id))


def _listed(ids: Any) -> list[int]:
    """An id, a list of ids or None: transformers' types allow all three."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def device_name(device: torch.device) -> str:
    """The processor's name, for tables."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "CPU")
    return f"{model}, {torch.get_num_threads()} threads"


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Plain values, with the derived figures (rates, `lossless`) beside their parts."""
    out = dataclasses.asdict(evaluation)
    for plain, result in zip(out["datasets"], evaluation.datasets, strict=True):
        for way, speed in (("plain", result.plain), ("speculative", result.speculative)):
            plain[way]["tokens_per_second"] = speed.tokens_per_second
    for name, agreement in (("agreement", evaluation.agreement), ("lossless", evaluation.lossless)):
        if agreement is not None:
            out[name]["lossless"] = agreement.lossless
    return out


def run_eval(config: EvalConfig, console: Console | None = None) -> dict[str, Any]:
    """The verb: prints the tables, writes `config.output`, returns what it wrote. Raises `UserError`."""
    from slipstream.decoding.table import render_table

    console = console or Console()
    if config.output is not None and not Path(config.output).resolve().parent.is_dir():
        raise UserError(f"--output {config.output}: no such folder: make it first")
    if config.lossless_tokens < 0:
        raise UserError(f"--lossless-tokens {config.lossless_tokens}: must be 0 (no proof) or above")
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    # The drafter first: small, and its taps say what is read of the target.
    drafter = load_drafter(config.drafter, device, dtype)
    tokenizer = load_tokenizer(config.target_model)
    prompts = {
        name: read_prompts(path, tokenizer, config.max_prompts)
        for name, path in _dataset_names(config.prompts).items()
    }
    table = None if config.ngram_data is None else _table_of(config.ngram_data)
    target = load_target(config.target_model, drafter.config.target_layer_ids, 0, device, dtype)
    stop_ids = stop_ids_of(target, tokenizer)
    with console.status("decoding") as status:
        evaluation = evaluate(
            target,
            drafter,
            prompts,
            max_new_tokens=config.max_new_tokens,
            stop_ids=stop_ids,
            temperature=config.temperature,
            block_size=config.block_size,
            control=untrained(drafter, config.seed) if config.control else None,
            table=table,
            seed=config.seed,
            progress=status.update,
        )
        if config.lossless_tokens:
            agreement = evaluation.agreement
            if agreement is None or dtype != torch.float32 or config.lossless_tokens > config.max_new_tokens:
                status.update("proving losslessness in fp32")
                del target, drafter  # the fp32 copies may need their memory
                reference = load_drafter(config.drafter, device, torch.float32)
                exact = load_target(
                    config.target_model, reference.config.target_layer_ids, 0, device, torch.float32
                )
                requests = [p for group in prompts.values() for p in group]
                check_prompts(exact, requests, config.lossless_tokens)
                agreement = prove_lossless(
                    exact, reference, requests, config.lossless_tokens, stop_ids, config.block_size
                )
            evaluation = dataclasses.replace(evaluation, lossless=agreement)
    console.print(render_table(evaluation))
    out = to_json(evaluation)
    if config.output is not None:
        write_atomic(Path(config.output), (json.dumps(out, indent=1) + "\n").encode())
    return out


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise UserError(
            f"{path}: cannot load a tokenizer from here: {' '.join(str(e).split())[:200]}"
        ) from None


def _dataset_names(paths: Sequence[str]) -> dict[str, str]:
    """Short names of prompt files; whole paths where short ones collide."""
    stems = [Path(p).name.removesuffix(".gz").removesuffix(".jsonl") for p in paths]
    return {p if stems.count(stem) > 1 else stem: p for stem, p in zip(stems, paths, strict=True)}


def _table_of(data_dir: str) -> NgramTable:
    train = open_dataset(data_dir, "train")
    return ngram_table([train.document(i) for i in range(len(train))])
