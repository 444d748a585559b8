"""The tables of docs/scaling.md: what many GPUs would cost and yield at the 27B shape, by the formula.

From what was measured on one H200 (docs/performance.md); nothing is measured here, on a CPU it takes seconds.

    python -m benchmarks.scaling
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from benchmarks.target_pass import shape_27b
from benchmarks.workload import Shape
from slipstream.config import TrainConfig
from slipstream.distributed.placement import placement_of
from slipstream.models.target import Target, default_target_layer_ids
from slipstream.system.facts import GIB
from slipstream.system.memory import TargetShape, need_of, roles, target_shape, why_not
from slipstream.system.scaling import (
    CARDS,
    Advice,
    Estimate,
    Measured,
    Sizes,
    choose,
    estimate,
    recommend,
    say_place,
    sizes_of,
)
from slipstream.training.flops import row_flops

SHAPE = Shape()
CARD = "H200"
UPDATE = 0.0207


def backward_share() -> float:
    """Of a full row's products those of the backward: two of a matrix's three, one of fc's two, none of the
    head's.
    """
    work, labels = row_flops(SHAPE.geometry(), 0), SHAPE.anchors * (SHAPE.block_size - 1)
    whole = work.drafter(SHAPE.tokens, SHAPE.anchors, labels)
    fc = 2 * SHAPE.taps * SHAPE.hidden**2 * SHAPE.tokens
    return (2 * (whole - labels * work.label - 2 * fc) / 3 + fc) / whole


def measured(read: float, both: float, nics: int) -> Measured:
    """One H200: seconds of the target's pass, and of target and drafter. Wires by the datasheet."""
    wires = replace(CARDS[CARD], nics=nics).wires
    return Measured(read, both - read, backward_share() * (both - read), UPDATE, wires)


BF16, FP8 = (0.6535, 0.8525), (0.3917, 0.5828)


@functools.cache
def true_target() -> TargetShape:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_27b(64), dtype=torch.bfloat16)
    return target_shape(Target(model, default_target_layer_ids(64, SHAPE.taps)), 2)


def sizes(rows: int) -> Sizes:
    config = TrainConfig(rows_per_step=rows)
    return sizes_of(config, SHAPE.geometry(), true_target(), SHAPE.tokens)


def advice(times: tuple[float, float], ranks: int, rows: int, nics: int, card: str = CARD) -> Advice:
    config = TrainConfig(target_fp8=times == FP8)
    room = functools.partial(why_not, config, SHAPE.geometry(), true_target(), CARDS[card].size * GIB)
    return recommend(measured(*times, nics), sizes(rows), ranks, room)


def memory_table() -> Iterator[str]:
    yield "| ranks | a rank | GiB | of that: target | masters and moments | taps | at its peak |"
    yield "|---|---|---|---|---|---|---|"
    for flags, config in {
        "1": TrainConfig(),
        "8 colocated": TrainConfig(ranks=8),
        "8 colocated, `--drafter-sharding`": TrainConfig(ranks=8, drafter_sharding=True),
        "8 colocated, `--target-sharding`": TrainConfig(ranks=8, target_sharding=True),
        "6 target, 2 drafter": TrainConfig(target_ranks=6, drafter_ranks=2),
    }.items():
        for role in roles(config):
            need = need_of(config, SHAPE.geometry(), true_target(), role)
            groups = (
                ("target weights", "target layers gathered", "target's embedding and head"),
                ("drafter masters", "optimiser's moments"),
                ("taps",),
            )
            parts = [f"{sum(need.parts.get(p, 0) for p in names) / GIB:.1f}" for names in groups]
            yield f"| {flags} | {role} | {need.total / GIB:.1f} | {' | '.join(parts)} | {need.peak} |"


def row(times: tuple[float, float], made: Estimate, what: str) -> str:
    one = estimate(measured(*times, 8), sizes(1), placement_of(TrainConfig()))
    ranks = made.place.ranks
    waits = "–"
    if made.place.split:
        waits = f"{made.readers_wait:.0%}, {made.drafters_wait:.0%}"
    return (
        f"| {ranks} | {what} | {say_place(made.place)} | {made.rows} | {1e3 * made.seconds:,.0f} | "
        f"{1e3 * made.parts['sum']:.0f} | {waits} | {made.rate:,.0f} | {made.rate / one.rate / ranks:.0%} | "
        f"{1e9 / made.rate / 3600 * ranks:.1f} |"
    )


HEAD = (
    "| GPUs | network of a node | placement | rows a step | ms a step | sum that sticks out, ms | target, "
    "drafter ranks wait | tokens/s | of so many single GPUs | GPU-hours for 10⁹ tokens |"
)


def scaling_table(times: tuple[float, float]) -> Iterator[str]:
    """One, two and eight GPUs of a node, and eight nodes with one network card or eight each."""
    yield HEAD
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for ranks, rows, nics, what in (
        (1, 1, 8, "–"),
        (2, 2, 8, "–"),
        (8, 8, 8, "–"),
        (8, 32, 8, "–"),
        (64, 64, 8, "8 × 400 Gb/s"),
        (64, 64, 1, "400 Gb/s"),
        (64, 256, 1, "400 Gb/s"),
    ):
        found = advice(times, ranks, rows, nics)
        splits = [e for e in found.fitting if e.place.split]
        pairs = [e for e in splits if len(e.place.readers) == len(e.place.drafters)]
        chosen = [e for e in found.fitting if not e.place.split]
        if (best := choose(splits)) is not None:
            chosen.append(best)
        for made in chosen + [e for e in pairs if e not in chosen and ranks <= rows <= 8]:
            yield row(times, made, what)


def small_card_table() -> Iterator[str]:
    """Eight GPUs of 79 GiB, on which the pair does not fit."""
    found = advice(BF16, 8, 8, 8, "H100")
    yield "| placement | rows a step | ms a step | tokens/s, if an H100 were as fast as an H200 |"
    yield "|---|---|---|---|"
    for made in found.fitting[:3]:
        yield f"| {say_place(made.place)} | {made.rows} | {1e3 * made.seconds:,.0f} | {made.rate:,.0f} |"
    for place, why in found.refused:
        yield f"| {say_place(place)} | – | – | {why} |"


def tables() -> Iterator[str]:
    yield from memory_table()
    yield ""
    yield from scaling_table(BF16)
    yield ""
    yield from scaling_table(FP8)
    yield ""
    yield from small_card_table()


if __name__ == "__main__":
    print(f"backward: {backward_share():.2f} of the drafter's work, by count")
    for line in tables():
        print(line)
