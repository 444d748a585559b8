"""When a run ends: every rank must make the same steps, though a signal or the clock reaches one of them.

Before each step all ranks tell one another what they know, without waiting: a small Gloo all-reduce under
way. What was told before step s counts from step s + `lag` on. A rank that reads rows ahead can so foresee
the next steps, and every row of taps that is sent is also received.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Told:
    """What all ranks know together; seconds since the run's first start, and those that ranks stood still."""

    stop: bool
    seconds: float
    """By the first rank's clock."""
    readers_waited: float = 0.0
    """Of the target rank that has waited longest for drafters."""
    drafters_waited: float = 0.0
    """Of the drafter rank that has waited longest for taps."""


class Pace:
    """Which steps are made, from `first` to at most `steps`; the same answers on every rank.

    A group of None is a run on one rank: what it tells counts at once.
    """

    def __init__(
        self,
        first: int,
        steps: int,
        seconds: float,
        max_minutes: float | None,
        group: dist.ProcessGroup | None = None,
        lag: int = 1,
    ) -> None:
        self.first, self.steps, self.max_minutes, self.group = first, steps, max_minutes, group
        self.lag = 0 if group is None else lag
        self.start = Told(False, seconds)
        self.under_way: dict[int, tuple[Tensor, dist.Work | None]] = {}
        self.known: dict[int, Told] = {}
        """By the step before which it was told."""
        self.ended: int | None = None
        """The first step that is not made, once it is known."""
        self.decided = first - 1

    def begin(self, step: int, mine: Told) -> None:
        """Every rank, before each step that may be made, in turn."""
        values = torch.tensor(
            [mine.stop, mine.seconds, mine.readers_waited, mine.drafters_waited], dtype=torch.float64
        )
        work = None
        if self.group is not None:
            work = dist.all_reduce(values, dist.ReduceOp.MAX, self.group, async_op=True)
        self.under_way[step] = values, work

    def told(self, step: int) -> Told:
        """What counts in this step. Waits for what was told `lag` steps before it."""
        source = step - self.lag
        if source < self.first:
            return self.start
        if source not in self.known:
            values, work = self.under_way.pop(source)
            if work is not None:
                work.wait()
            stop, *seconds = values.tolist()
            self.known = {k: v for k, v in self.known.items() if k > source - 2 * self.lag - 2}
            self.known[source] = Told(bool(stop), *seconds)
        return self.known[source]

    def progress(self, step: int) -> float:
        """Share of the run that is done before this step, by steps or by the clock, whichever comes first."""
        by_steps = step / self.steps
        if self.max_minutes is None:
            return by_steps
        return max(by_steps, self.told(step).seconds / (60 * self.max_minutes))

    def makes(self, step: int) -> bool:
        """Whether this step is made."""
        while self.ended is None and self.decided < step:
            self.decided += 1
            if self.progress(self.decided) >= 1 or self.told(self.decided).stop:
                self.ended = self.decided
        return self.ended is None or step < self.ended

    @property
    def finished(self) -> bool:
        """Of a run that has ended: at its end, or because it was stopped."""
        assert self.ended is not None
        return self.progress(self.ended) >= 1

    def close(self) -> None:
        """What is still under way, before the group goes."""
        for _, work in self.under_way.values():
            if work is not None:
                work.wait()
        self.under_way.clear()


class StopSignal:
    """SIGTERM and SIGINT ask for an orderly end: the step is finished and saved. A second SIGINT ends at
    once.
    """

    def __enter__(self) -> StopSignal:
        self.requested = False
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
