"""How long a step takes on many ranks, from the times of its parts on one, and which placement is fastest.

Pure formulas, with docs/scaling.md as their long form. What is measured is probe.py's, memory is memory.py's.

n ranks, a of them readers and b drafters where split · R rows a step · t_T target's pass and t_D drafter's
step of a row, t_U update of a step · G bytes of gradients · A bytes of a row's taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slipstream.config import TrainConfig
from slipstream.distributed.placement import Placement
from slipstream.models.drafter import DrafterConfig
from slipstream.system.memory import TargetShape, drafter_parameters
from slipstream.training.flops import RowFlops, expected_seconds

REACHED = 0.75
"""Share of a datasheet's figure that is reached: a guess, measured where the thing is (`--probe`)."""
COPYING = 0.12
"""Share of its speed that a GPU loses while a row's taps come or go: 16 of 132 multiprocessors. A guess."""
MARGIN = 0.02
"""A placement that is faster by less than this is not worth a change: the formula is no better."""
UPDATE = 42
"""Bytes an update moves for each parameter: norm and scaling of gradients (4 + 8), AdamW on fp32 (28), the
bf16 copy that is written (2).
"""
FLEETS = (1, 8, 64)
"""Numbers of GPUs that are worked out where others than those at hand are asked about."""
NIC = 50e9
"""Bytes/s one way of a 400 Gb/s network card."""


@dataclass(frozen=True)
class Wires:
    """Between GPUs, in bytes/s one way."""

    inside: float
    """Of a GPU, inside a node."""
    across: float
    """Of a node, all of its GPUs together."""
    node: int = 8
    """Ranks on a node."""
    link: float | None = None
    """From a reader to a drafter where that was measured; else as above."""

    def bus(self, ranks: int) -> float:
        """The slowest stretch of a ring over so many ranks on neighbouring places."""
        return self.inside if ranks <= self.node else min(self.inside, self.across)


@dataclass(frozen=True)
class Card:
    """A kind of GPU, by its datasheet: GiB as torch sees them, TFLOP/s dense in bf16 with fp32 sums, TB/s of
    its memory, GB/s one way to its neighbours, 400 Gb/s cards in a usual node of eight.
    """

    size: int
    tflops: float
    memory: float
    wire: float
    nics: int

    @property
    def wires(self) -> Wires:
        return Wires(1e9 * REACHED * self.wire, REACHED * NIC * self.nics)


CARDS = {
    "B200": Card(178, 2250, 8.0, 900, 8),
    "H200": Card(139, 989, 4.8, 450, 8),
    "H100": Card(79, 989, 3.35, 450, 8),
    "A100": Card(79, 312, 2.0, 300, 8),
    "RTX PRO 6000": Card(94, 503, 1.8, 64, 1),
    "L40S": Card(44, 362, 0.86, 32, 1),
    "RTX 5090": Card(31, 209, 1.8, 64, 1),
    "RTX 4090": Card(23, 165, 1.0, 32, 1),
}
"""NVLink 5, 4 and 3: 900, 450 and 300 GB/s each way; PCIe 5.0 and 4.0 by 16 lanes: 64 and 32."""
UNKNOWN = Card(0, 0, 1.0, 64, 1)
"""What connects a GPU that is not in the table."""


def card_named(name: str) -> Card:
    """By the name that the driver gives it."""
    return next((card for key, card in CARDS.items() if key in name), UNKNOWN)


@dataclass(frozen=True)
class Measured:
    """Seconds of the parts of a step on one rank, measured (probe.py) or guessed."""

    read: float
    """t_T: the target's pass over a row; 0 where taps are recorded and cost nothing."""
    draft: float
    """t_D: the drafter over a row, forward and backward."""
    backward: float
    """Of that the backward, beside which gradients are summed over ranks."""
    update: float
    """t_U: clipping and AdamW over all parameters."""
    wires: Wires


@dataclass(frozen=True)
class Sizes:
    """What a step works on, in bytes where nothing else is said."""

    tokens: int
    """Of a row, but for padding."""
    rows: int
    """R: asked for a step; a placement with more drafters takes one each."""
    gradients: int
    """G: 4 a parameter."""
    last: int
    """Of these the gradient that comes last, fc's: its sum finds no backward to hide behind."""
    taps: int
    """A."""
    draws: int = 1
    """Steps that a row's taps serve."""
    drafter_gathers: int = 0
    """Weights gathered twice a row by a drafter in shards; 0: replicas."""
    target_gathers: int = 0
    """Weights gathered in each pass of a target in shards; 0: whole."""


def sizes_of(config: TrainConfig, geometry: DrafterConfig, target: TargetShape, tokens: int) -> Sizes:
    """Of a recipe with a number of rows a step."""
    assert config.rows_per_step is not None
    parameters, width = drafter_parameters(geometry), len(geometry.target_layer_ids) * geometry.hidden_size
    e = 4 if config.dtype == "float32" else 2
    return Sizes(
        tokens=tokens,
        rows=config.rows_per_step,
        gradients=4 * parameters,
        last=4 * width * geometry.hidden_size,
        taps=e * tokens * width,
        draws=config.anchor_draws,
        drafter_gathers=e * parameters if config.drafter_sharding else 0,
        target_gathers=target.weights - target.ends if config.target_sharding else 0,
    )


@dataclass(frozen=True)
class Estimate:
    """A step of so many rows on a placement."""

    place: Placement
    rows: int
    tokens: int
    """Of a row."""
    parts: dict[str, float]
    """Seconds on the rank that works longest. Split, readers and drafters work at the same time."""
    seconds: float
    """Of the whole step."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.rows * self.tokens / self.seconds

    @property
    def readers_wait(self) -> float:
        """Share of the time in which target ranks of a split run stand still."""
        return 1 - self.parts["target"] / self.seconds

    @property
    def drafters_wait(self) -> float:
        return 1 - sum(self.parts[part] for part in ("drafter", "update", "sum")) / self.seconds


def estimate(m: Measured, sizes: Sizes, place: Placement) -> Estimate:
    """Colocated: ⌈R/n⌉·(t_T + t_D) + t_U + sum. Split: max(R/a · t_T, ⌈R/b⌉·t_D + t_U + sum) + link.

    - sum: gradients over drafters in a ring, 2(b−1)/b · G / bus, as far as it sticks out behind the last
      row's backward, and at least for the gradient that comes last; half of it with shards, which are not
      sent back;
    - link: A for each row, beside the work; what it takes longer than that, and COPYING of its time;
    - weights in shards are gathered beside the work: a pass takes no less than that.

    Readers run ahead over the ends of steps, so those of a group are filled evenly (`rows_of_a_reader`);
    drafters wait for one another.
    """
    drafters, readers = len(place.drafters), len(place.readers)
    sharded = drafters if sizes.drafter_gathers or sizes.target_gathers else 1
    even = math.lcm(sharded, readers if sizes.target_gathers else 1)  # as placement.py's `evenly`
    rows = even * math.ceil(max(sizes.rows, drafters) / even)
    ring = 1 - 1 / drafters
    bus = m.wires.bus(place.ranks)
    read = max(m.read, sizes.target_gathers * (1 - 1 / readers) / bus) / sizes.draws
    draft = max(m.draft, 2 * sizes.drafter_gathers * ring / bus)
    update = m.update / drafters if sizes.drafter_gathers else m.update
    ways = 1 if sizes.drafter_gathers else 2
    whole = ways * ring * sizes.gradients / bus
    least = ways * ring * sizes.last / bus
    a_drafter = math.ceil(rows / drafters)
    parts = {
        "target": read * (rows_of_a_reader(place, rows) if place.split else a_drafter),
        "drafter": a_drafter * draft,
        "update": update,
        "sum": max(whole - m.backward, least),
        "link": 0.0,
    }
    if not place.split:
        return Estimate(place, rows, sizes.tokens, parts, sum(parts.values()))
    busiest = max(parts["target"], parts["drafter"] + parts["update"] + parts["sum"])
    copy = copying(m.wires, sizes, place, rows)
    parts["link"] = max(0.0, copy - busiest) + COPYING * copy
    return Estimate(place, rows, sizes.tokens, parts, busiest + parts["link"])


def rows_of_a_reader(place: Placement, rows: int) -> float:
    """In the mean over steps, in the group that has most: rows that are left over when all drafters have
    equally many fall to the first ones, if all are equally long.
    """
    group = place.drafters_a_group
    equal, over = divmod(rows, len(place.drafters))
    return (group * equal + min(over, group)) / place.readers_a_group


def copying(wires: Wires, sizes: Sizes, place: Placement, rows: int) -> float:
    """Seconds in which the busiest end of a link copies taps, each step: a rank's own end or, where groups
    reach over nodes, the node's.
    """
    sent = sizes.taps * rows / sizes.draws
    busiest = sent / min(len(place.drafters), len(place.readers)) / (wires.link or wires.inside)
    group = place.ranks // place.groups
    if place.ranks <= wires.node or wires.node % group == 0:
        return busiest
    return max(busiest, sent / (place.ranks / wires.node) / wires.across)


def placements(ranks: int, colocated_only: bool = False) -> list[Placement]:
    """All ways to use so many ranks: colocated, then 1 : n−1 … n−1 : 1 target to drafter ranks."""
    out = [Placement(groups=ranks)]
    for readers in range(1, 1 if colocated_only else ranks):
        groups = math.gcd(readers, ranks - readers)
        out.append(Placement((ranks - readers) // groups, readers // groups, groups))
    return out


@dataclass(frozen=True)
class Advice:
    """What the formula says of so many ranks."""

    best: Estimate | None
    """None: nothing fits."""
    fitting: list[Estimate]
    """Fastest first."""
    refused: list[tuple[Placement, str]]
    """With why."""


def recommend(
    measured: Measured,
    sizes: Sizes,
    ranks: int,
    memory: Callable[[Placement, int], str | None],
    colocated_only: bool = False,
) -> Advice:
    """The fastest placement that fits, or as good as that (`choose`). `memory` says why one does not fit with
    so many rows a step, or None.
    """
    fitting, refused = [], []
    for place in placements(ranks, colocated_only):
        made = estimate(measured, sizes, place)
        if (why := memory(place, made.rows)) is None:
            fitting.append(made)
        else:
            refused.append((place, why))
    fitting.sort(key=lambda e: -e.rate)
    return Advice(choose(fitting), fitting, refused)


def choose(estimates: Sequence[Estimate]) -> Estimate | None:
    """Of those that are within `MARGIN` of the fastest, colocated if it is among them: it has no link and no
    ratio to be wrong about. Else the split into most groups, whose links are the shortest. (Colocated, each
    rank is a group.)
    """
    fastest = max((e.rate for e in estimates), default=0.0)
    as_fast = [e for e in estimates if fastest <= (1 + MARGIN) * e.rate]
    return max(as_fast, key=lambda e: (e.place.groups, e.rate), default=None)


def guess(
    work: RowFlops,
    row: tuple[int, int, int],
    parameters: int,
    ceilings: tuple[float, float],
    memory: float,
    wires: Wires,
    device_type: str = "cuda",
) -> Measured:
    """The parts' times from counted work: `row` has so many tokens, blocks and labels; a device multiplies at
    `ceilings` FLOP/s (target's, drafter's) and moves `memory` bytes/s.
    """
    tokens, blocks, labels = row
    read, draft = work.target(tokens), work.drafter(tokens, blocks, labels)
    # of three products of a matrix two are the backward's, of fc's two one; the head's two are the forward's
    backward = work.token * tokens // 2 + 2 * (draft - work.drafter(tokens, 0, labels)) // 3
    return Measured(
        read=expected_seconds(read, ceilings[0], device_type),
        draft=expected_seconds(draft, ceilings[1], device_type),
        backward=expected_seconds(backward, ceilings[1], device_type),
        update=UPDATE * parameters / memory,
        wires=wires,
    )


def say_place(place: Placement) -> str:
    """Colocated, or target to drafter ranks."""
    return f"split {len(place.readers)}:{len(place.drafters)}" if place.split else "colocated"


def say_estimate(e: Estimate) -> str:
    """One line: how fast, what it is made of, who waits."""
    parts = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in e.parts.items() if s)
    waits = ""
    if e.place.split:
        waits = f"; target ranks wait {e.readers_wait:.0%}, drafter ranks {e.drafters_wait:.0%}"
    return (
        f"{say_place(e.place)}: {e.rate:,.0f} tokens/s, {1e3 * e.seconds:.1f} ms a step of {e.rows} rows "
        f"({parts}{waits})"
    )


def say_advice(advice: Advice, ranks: int, shown: Iterable[Placement] = ()) -> list[str]:
    """The recommendation for so many ranks; before it the estimates of `shown`, colocated and the best
    splits.
    """
    splits = [e for e in advice.fitting if e.place.split]
    wanted = {*shown, Placement(groups=ranks), *(e.place for e in splits[:3])}
    lines = [say_estimate(e) for e in advice.fitting if e.place in wanted]
    for place, why in advice.refused:
        if place in wanted:
            lines.append(f"{say_place(place)}: {why}")
    others = len(advice.refused) - sum(place in wanted for place, _ in advice.refused)
    if others:
        lines.append(f"{others} other ratios do not fit either")
    if advice.best is None:
        return [*lines, f"recommended: none of the placements of {ranks} ranks fits"]
    best, fastest = advice.best, advice.fitting[0]
    why = "the fastest that fits" if advice.refused else "the fastest"
    if best is not fastest:
        why = f"as fast as {say_place(fastest.place)} within {MARGIN:.0%}, and simpler"
    return [*lines, f"recommended: {say_place(best.place)}, {best.rows} rows a step ({why})"]
