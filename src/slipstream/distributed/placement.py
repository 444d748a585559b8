"""Who works on what: which ranks read the target and which draft, and the plan of rows.

Pure, so that every process computes the same and resume is exact. How ranks meet is world.py's, when a run
ends pace.py's, how taps travel channel.py's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.config import TrainConfig, UserError


@dataclass(frozen=True)
class Placement:
    """Readers run the target, drafters train. Colocated, each rank is both; split, each is one of them.

    A split run is made of equal groups of neighbouring ranks, in each its drafters first: taps stay inside a
    group, which fits on a node where the ratio allows.
    """

    drafters_a_group: int = 1
    readers_a_group: int = 0
    """0: colocated."""
    groups: int = 1

    @property
    def split(self) -> bool:
        return self.readers_a_group > 0

    @property
    def ranks(self) -> int:
        return self.groups * (self.drafters_a_group + self.readers_a_group)

    @property
    def drafters(self) -> tuple[int, ...]:
        size = self.drafters_a_group + self.readers_a_group
        return tuple(g * size + i for g in range(self.groups) for i in range(self.drafters_a_group))

    @property
    def readers(self) -> tuple[int, ...]:
        return tuple(r for r in range(self.ranks) if r not in self.drafters) if self.split else self.drafters

    def partners(self, rank: int) -> tuple[int, ...]:
        """Of a drafter the readers that send it taps, of a reader the drafters that it sends taps to."""
        size = self.drafters_a_group + self.readers_a_group
        others = self.readers if rank in self.drafters else self.drafters
        return tuple(r for r in others if r // size == rank // size)

    def deal(self, tokens: Sequence[int], before: int) -> list[tuple[int, int]]:
        """(drafter, reader) of each row of a step, of so many tokens; `before` steps were dealt.

        To drafters the longest rows first, each to whoever has fewest tokens, and equally many to all where
        the numbers allow; inside a group readers take turns.
        """
        drafters = self.drafters
        most = -(-len(tokens) // len(drafters))
        load, rows, drafter_of = [0] * len(drafters), [0] * len(drafters), [0] * len(tokens)
        for i in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
            free = (d for d in range(len(drafters)) if rows[d] < most)
            d = min(free, key=lambda d: (load[d], rows[d], d))
            load[d], rows[d], drafter_of[i] = load[d] + tokens[i], rows[d] + 1, d
        if not self.split:
            return [(drafters[d], drafters[d]) for d in drafter_of]
        dealt, turn = [], [before * len(tokens) // self.groups] * self.groups
        for d in drafter_of:
            group = d // self.drafters_a_group
            reader = group * self.readers_a_group + turn[group] % self.readers_a_group
            turn[group] += 1
            dealt.append((drafters[d], self.readers[reader]))
        return dealt

    def describe(self) -> str:
        """Who sits where, in words."""
        if self.ranks == 1:
            return "target and drafter on one rank"
        if not self.split:
            return f"target and drafter on each of {self.ranks} ranks"
        drafters, readers = (", ".join(map(str, ranks)) for ranks in (self.drafters, self.readers))
        links = f", taps stay inside each of {self.groups} groups" if self.groups > 1 else ""
        return f"drafter on ranks {drafters}, target on ranks {readers}{links}"


ALONE = Placement()


def placement_of(config: TrainConfig, world_size: int | None = None) -> Placement:
    """What the settings ask for, on so many ranks as there are; None where they are still to be started.

    Raises `UserError` for settings that contradict each other or the number of ranks.
    """
    readers, drafters = config.target_ranks, config.drafter_ranks
    if config.dp_pairs:
        if readers or drafters:
            raise UserError(
                f"--dp-pairs {config.dp_pairs}: says how many ranks read and draft, as --target-ranks and "
                "--drafter-ranks do: give one or the other"
            )
        readers = drafters = config.dp_pairs
    if bool(readers) != bool(drafters):
        raise UserError(
            f"--target-ranks {readers}, --drafter-ranks {drafters}: a split run needs both, or neither"
        )
    if readers:
        asked, flags = readers + drafters, f"{readers} target and {drafters} drafter ranks"
        if config.ranks not in (None, asked):
            raise UserError(f"--ranks {config.ranks}: {flags} are {asked} ranks: leave --ranks out")
        if world_size not in (None, asked):
            raise UserError(f"{flags}: torchrun started {world_size} ranks: start {asked}")
        if config.taps_dir is not None:
            raise UserError("--taps-dir: recorded taps need no target ranks: leave these out, give --ranks")
        groups = math.gcd(readers, drafters)
        return Placement(drafters // groups, readers // groups, groups)
    return Placement(groups=world_size or config.ranks or 1)


def rows_of_a_step(config: TrainConfig, place: Placement) -> int:
    """Rows of an optimiser step, on all ranks together. Raises `UserError` where a rank would have none."""
    drafters = len(place.drafters)
    rows = config.rows_per_step or drafters
    if rows < drafters:
        raise UserError(
            f"--rows-per-step {rows}: {drafters} drafter ranks want at least a row each: give {drafters} or "
            f"more, or at most {rows} ranks"
        )
    if rows % (even := evenly(config, place)):
        raise UserError(
            f"--rows-per-step {rows}: ranks with shards of one model work on equally many rows: give a "
            f"multiple of {even}"
        )
    return rows


def evenly(config: TrainConfig, place: Placement) -> int:
    """What numbers of rows must be a multiple of: ranks that share a model in shards gather it together."""
    drafters = len(place.drafters) if config.drafter_sharding or config.target_sharding else 1
    return math.lcm(drafters, len(place.readers) if config.target_sharding else 1)


@dataclass(frozen=True)
class Share:
    """A row of a step: whose it is, and what makes its anchors."""

    epoch: int
    index: int
    draw: int
    drafter: int
    reader: int


@dataclass(frozen=True)
class Plan:
    """The endless sequence of (epoch, row): every epoch is a fresh permutation of all rows, cut into
    optimiser steps.

    Steps run across epoch borders, so no row is left out when the number of rows is not a multiple of a
    step's. Which rows a step has does not depend on the placement.
    """

    seed: int
    rows: int
    rows_per_step: int
    draws: int = 1
    """Optimiser steps on the same rows, each with fresh anchors: one target pass serves them all."""
    place: Placement = ALONE
    tokens: Callable[[int], int] = lambda index: 1
    """Of a row, by its index: what its share of the work is measured by."""

    def step_rows(self, step: int) -> list[tuple[int, int, int]]:
        """(epoch, row index, draw) of each row of optimiser step `step`, counted from 0."""
        group, draw = divmod(step, self.draws)
        first = group * self.rows_per_step
        return [(*self.at(position), draw) for position in range(first, first + self.rows_per_step)]

    def shares(self, step: int) -> list[Share]:
        """The same rows with whose they are: in all steps that draw from the same rows the same ranks'."""
        rows = self.step_rows(step)
        dealt = self.place.deal([self.tokens(index) for _, index, _ in rows], step // self.draws)
        return [Share(*row, *ranks) for row, ranks in zip(rows, dealt, strict=True)]

    @property
    def rows_a_rank(self) -> int:
        """Most rows of a step that one drafter has."""
        return -(-self.rows_per_step // len(self.place.drafters))

    def at(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, self.rows)
        return epoch, int(epoch_order(self.seed, epoch, self.rows)[place])

    def steps(self, epochs: float) -> int:
        """Optimiser steps in which the target reads every row `epochs` times."""
        return self.draws * max(1, math.ceil(epochs * self.rows / self.rows_per_step))


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)
