"""An evaluation as tables for the terminal. The figures are evaluate.py's."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from slipstream.decoding.baselines import Tau
from slipstream.decoding.evaluate import Agreement, Evaluation


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def tau_text(tau: Tau | None, interval: bool = False) -> str:
    if tau is None:
        return "–"
    return f"{tau.mean:.2f} ({tau.low:.2f}–{tau.high:.2f})" if interval else f"{tau.mean:.2f}"


def agreement_text(agreement: Agreement) -> str:
    """One line of verdict, and one for each difference."""
    if agreement.lossless:
        return (
            f"lossless in {agreement.dtype}: {agreement.tokens} tokens of {agreement.requests} requests "
            "equal plain decoding's"
        )
    lines = [
        f"{len(agreement.differences)} of {agreement.requests} requests differ from plain decoding "
        f"in {agreement.dtype}"
    ]
    for d in agreement.differences:
        lines.append(
            f"  {d.where}: new token {d.position} is {d.speculative} instead of {d.plain}, "
            f"whose logit is {d.margin:+.3g} above"
        )
    return "\n".join(lines)


def render_table(evaluation: Evaluation) -> Group:
    """τ, baselines and speed by data set; acceptance by slot; verdicts and warnings below."""
    decoding = "greedy" if evaluation.temperature == 0 else f"T = {evaluation.temperature:g}"
    main = Table(
        title=f"block of {evaluation.block_size}, {decoding}, {evaluation.dtype} on {evaluation.device}",
        caption="τ = new tokens per target pass, bonus included; mean over requests, 95 % bootstrap interval",
    )
    columns = ("data set", "requests", "τ control", "τ", "τ prompt-lookup", "τ n-gram")
    for column in (*columns, "plain tok/s", "drafted tok/s", "speed-up", "distinct 4-grams"):
        main.add_column(column, justify="left" if column == "data set" else "right")
    slots = Table(title="accepted by slot, where every slot before it was")
    slots.add_column("data set")
    for k in range(1, evaluation.block_size):
        slots.add_column(str(k), justify="right")
    for r in evaluation.datasets:
        main.add_row(
            r.name,
            str(r.requests),
            tau_text(r.tau_control),
            tau_text(r.tau, interval=True),
            tau_text(r.tau_lookup),
            tau_text(r.tau_ngram),
            number(r.plain.tokens_per_second, 1),
            number(r.speculative.tokens_per_second, 1),
            number(r.speedup, 2, "×"),
            number(r.distinct_4grams),
        )
        slots.add_row(r.name, *(number(a) for a in r.slot_acceptance))
    notes = [f"warning: {r.name}: {w}" for r in evaluation.datasets for w in r.warnings]
    verdicts = [agreement_text(a) for a in (evaluation.agreement, evaluation.lossless) if a is not None]
    return Group(
        main, slots, *dict.fromkeys(verdicts), *notes
    )  # in fp32 the timed decoding is the proof: said once
