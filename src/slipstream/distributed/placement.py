"""Who works on what: the plan of rows. Pure, so that every process computes the same one and resume is exact.

Who sits on which device comes with more than one; here is only the order of the work.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Plan:
    """The endless sequence of (epoch, row): every epoch is a fresh permutation of all rows, cut into
    optimiser steps.

    Steps run across epoch borders, so no row is left out when the number of rows is not a multiple of a
    step's.
    """

    seed: int
    rows: int
    rows_per_step: int
    draws: int = 1
    """Optimiser steps on the same rows, each with fresh anchors: one target pass serves them all."""

    def step_rows(self, step: int) -> list[tuple[int, int, int]]:
        """(epoch, row index, draw) of each row of optimiser step `step`, counted from 0."""
        group, draw = divmod(step, self.draws)
        first = group * self.rows_per_step
        return [(*self.at(position), draw) for position in range(first, first + self.rows_per_step)]

    def at(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, self.rows)
        return epoch, int(epoch_order(self.seed, epoch, self.rows)[place])

    def steps(self, epochs: float) -> int:
        """Optimiser steps in which the target reads every row `epochs` times."""
        return self.draws * max(1, math.ceil(epochs * self.rows / self.rows_per_step))


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)
