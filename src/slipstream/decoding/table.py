"""What an evaluation found, and how it is shown: on a terminal, and as plain values for JSON.

Not here: how the figures are made (evaluate.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slipstream.decoding.baselines import Tau
from slipstream.decoding.lossless import Agreement


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
    ngram_tokens: int | None
    """Training tokens the n-gram table was made of; None without a table."""
    datasets: list[DatasetResult]
    agreement: Agreement | None
    """Speculative beside plain answers of the timed decoding; None when sampled, where the two differ by
    chance.
    """
    lossless: Agreement | None
    """The proof in fp32; None when left out."""


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


SHOWN_DIFFERENCES = 5
"""Differences named on the terminal; the JSON has all."""


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def tau_text(tau: Tau | None) -> str:
    return number(tau.mean if tau else None)


def agreement_text(agreement: Agreement) -> str:
    """One line of verdict, and one for each of the first differences."""
    if agreement.lossless:
        verdict = "lossless" if agreement.dtype == "float32" else "no difference"
        return (
            f"{verdict} in {agreement.dtype}: {agreement.tokens} tokens of {agreement.requests} requests "
            "equal plain decoding's"
        )
    count = len(agreement.differences)
    lines = [f"{count} of {agreement.requests} requests differ from plain decoding in {agreement.dtype}"]
    if agreement.dtype != "float32":
        lines.append(f"({agreement.dtype} rounds a pass over a block otherwise than a pass over one token:")
        lines.append(" near-ties fall either way, see the margins; the proof is the one in float32)")
    for d in agreement.differences[:SHOWN_DIFFERENCES]:
        lines.append(
            f"  {d.where}: new token {d.position} is {d.speculative}, plainly {d.plain} "
            f"(logit margin {d.margin:.3g})"
        )
    if count > SHOWN_DIFFERENCES:
        lines.append(f"  and {count - SHOWN_DIFFERENCES} more")
    return "\n".join(lines)


def render_table(evaluation: Evaluation) -> Group:
    """τ beside its baselines, speed, acceptance by slot; verdicts and warnings below. Fits 80 columns."""
    decoding = "greedy" if evaluation.temperature == 0 else f"T = {evaluation.temperature:g}"
    where = f"block of {evaluation.block_size}, {decoding}, {evaluation.dtype} on {evaluation.device}"
    gain = Table(title="τ: new tokens per target pass, bonus included; mean over requests")
    for column in ("data set", "requests", "untrained", "drafter", "95 %", "lookup", "n-gram"):
        gain.add_column(column, justify="left" if column == "data set" else "right")
    speed = Table(title="decoding speed, and how varied the answers are")
    for column in ("data set", "plain tok/s", "drafted tok/s", "speed-up", "distinct 4-grams"):
        speed.add_column(column, justify="left" if column == "data set" else "right")
    slots = Table(title="accepted by slot, where every slot before it was")
    slots.add_column("slot", justify="right")
    for r in evaluation.datasets:
        interval = f"{r.tau.low:.2f}–{r.tau.high:.2f}" if r.tau else "–"
        baselines = tau_text(r.tau_lookup), tau_text(r.tau_ngram)
        gain.add_row(r.name, str(r.requests), tau_text(r.tau_control), tau_text(r.tau), interval, *baselines)
        rates = number(r.plain.tokens_per_second, 1), number(r.speculative.tokens_per_second, 1)
        speed.add_row(escape(r.name), *rates, number(r.speedup, 2, "×"), number(r.distinct_4grams))
        slots.add_column(escape(r.name), justify="right")
    for k in range(evaluation.block_size - 1):
        slots.add_row(str(k + 1), *(number(r.slot_acceptance[k]) for r in evaluation.datasets))
    notes = [f"warning: {r.name}: {w}" for r in evaluation.datasets for w in r.warnings]
    verdicts = [agreement_text(a) for a in (evaluation.agreement, evaluation.lossless) if a is not None]
    # In fp32 the timed decoding is the proof itself, and said once. Text: file names are no markup.
    said = [Text(t) for t in (*dict.fromkeys(verdicts), *notes)]
    return Group(Text(where), gain, speed, slots, *said)
