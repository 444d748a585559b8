"""Ranks agree on the last step, whoever hears of the end and whoever reads ahead."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from slipstream.distributed.pace import Pace, Told
from tests.ranks import run_ranks


def walk(rank: int, ranks: int, lag: int, stopper: int, at: int, delays: tuple[float, ...]) -> list[int]:
    """Steps that this rank makes; `stopper` hears a signal during step `at`."""
    pace = Pace(5, 40, 0.0, None, dist.new_group(backend="gloo"), lag)
    made, step = [], 5
    pace.begin(step, Told(False, 0.0))
    while pace.makes(step):
        time.sleep(delays[rank])
        made.append(step)
        step += 1
        pace.begin(step, Told(rank == stopper and step > at, 0.0))
        if lag > 1:
            pace.makes(step + lag - 2)  # a link reads ahead
    pace.close()
    assert not pace.finished
    return made


@pytest.mark.parametrize(
    ("lag", "stopper", "delays"), [(1, 0, (0.0, 0.02)), (1, 1, (0.02, 0.0)), (3, 2, (0, 0.01, 0))]
)
def test_a_signal_on_one_rank_ends_all_after_the_same_step(lag, stopper, delays):
    made = run_ranks(len(delays), walk, lag, stopper, 9, delays, timeout=30)
    assert all(steps == made[0] for steps in made)
    assert made[0] == list(range(5, 10 + lag))


def clocks(rank: int, ranks: int) -> tuple[int, float, bool]:
    """The first rank's clock gains a second a step; the other's says nothing."""
    pace = Pace(0, 1000, 30.0, 1.0, dist.new_group(backend="gloo"), 2)
    step = 0
    pace.begin(0, Told(False, 30.0 if rank == 0 else 0.0))
    while pace.makes(step):
        step += 1
        pace.begin(step, Told(False, 30.0 + step if rank == 0 else 0.0))
    pace.close()
    return step, pace.progress(step), pace.finished


def test_the_first_ranks_clock_ends_the_run_and_sets_the_schedule_on_all():
    ended = run_ranks(2, clocks, timeout=30)
    assert ended == [(32, 1.0, True)] * 2, "60 s are told before step 30 and count two steps later"


def test_one_rank_hears_itself_at_once():
    pace = Pace(0, 3, 0.0, None)
    pace.begin(0, Told(False, 0.0))
    assert pace.makes(0)
    pace.begin(1, Told(True, 0.0))
    assert not pace.makes(1)
    assert not pace.finished


def test_a_run_ends_with_its_plan_without_a_clock():
    pace = Pace(0, 2, 0.0, None)
    for step in range(3):
        pace.begin(step, Told(False, 0.0))
        assert pace.makes(step) == (step < 2)
    assert pace.finished
