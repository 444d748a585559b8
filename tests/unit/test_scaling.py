"""Times of a step on many ranks: the formula by hand, against a run played row by row, and its advice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import scaling as tables
from slipstream.config import TrainConfig
from slipstream.distributed.placement import Placement, Plan, placement_of
from slipstream.system.facts import GIB
from slipstream.system.memory import TargetShape, why_not
from slipstream.system.scaling import (
    CARDS,
    COPYING,
    MARGIN,
    UNKNOWN,
    Measured,
    Sizes,
    Wires,
    card_named,
    estimate,
    guess,
    placements,
    recommend,
    say_advice,
    say_place,
)
from slipstream.training.flops import row_flops
from tests.unit.test_docs import ROOT
from tests.unit.test_planner import TRUE

FAST = Wires(inside=400e9, across=40e9)
H200 = Measured(0.6535, 0.199, 0.09, 0.0207, FAST)
SIZES = Sizes(tokens=8192, rows=8, gradients=6_920_000_000, last=524_000_000, taps=419_000_000)
FREE = replace(SIZES, gradients=0, last=0, taps=0)
"""Nothing that travels."""


def fits(place: Placement, rows: int) -> None:
    return None


def split(readers: int, drafters: int) -> Placement:
    return placement_of(TrainConfig(target_ranks=readers, drafter_ranks=drafters))


def colocated(ranks: int) -> Placement:
    return Placement(groups=ranks)


# ---- the formula ----


def test_one_rank_takes_the_sum_of_its_parts():
    made = estimate(H200, replace(SIZES, rows=3), colocated(1))
    assert made.seconds == pytest.approx(3 * (0.6535 + 0.199) + 0.0207)
    assert made.rate == pytest.approx(3 * 8192 / made.seconds)


def test_colocated_ranks_sum_what_does_not_hide_behind_the_backward():
    eight = estimate(H200, SIZES, colocated(8))
    ring = 2 * 7 / 8 * 6.92 / 400
    assert ring < H200.backward
    assert eight.parts["sum"] == pytest.approx(2 * 7 / 8 * 0.524 / 400)  # the last gradient alone
    slow = replace(H200, wires=Wires(inside=20e9, across=20e9))
    assert estimate(slow, SIZES, colocated(8)).parts["sum"] == pytest.approx(20 * ring - 0.09)


def test_over_several_nodes_the_slowest_stretch_counts():
    eight, sixty_four = (estimate(H200, replace(SIZES, rows=n), colocated(n)) for n in (8, 64))
    assert sixty_four.parts["sum"] == pytest.approx(2 * 63 / 64 * 6.92 / 40 - 0.09)
    assert sixty_four.parts["sum"] > 50 * eight.parts["sum"]


@pytest.mark.parametrize(
    ("readers", "drafters", "rows", "seconds"),
    [
        (6, 2, 8, 8 / 6 * 0.6535),  # the target is full
        (7, 1, 8, 8 * 0.199 + 0.0207),  # the drafter is
        (4, 4, 8, 2 * 0.6535),
        (1, 7, 8, 8 * 0.6535),
        (2, 6, 8, 5 * 0.6535),  # a group of 1:3 has five of eight rows
    ],
)
def test_a_split_step_is_as_long_as_its_fuller_side(readers, drafters, rows, seconds):
    made = estimate(H200, replace(FREE, rows=rows), split(readers, drafters))
    assert made.seconds == pytest.approx(seconds)
    assert 0 <= min(made.readers_wait, made.drafters_wait) < 1e-9 < max(made.readers_wait, made.drafters_wait)


def test_a_link_costs_a_share_of_its_time_until_it_is_slower_than_the_work():
    made = estimate(H200, SIZES, split(6, 2))
    copy = SIZES.taps * 4 / 400e9
    assert made.parts["link"] == pytest.approx(COPYING * copy)
    wires = replace(FAST, link=1e9)
    slow = estimate(replace(H200, wires=wires), SIZES, split(6, 2))
    copy = SIZES.taps * 4 / 1e9
    assert slow.seconds == pytest.approx((1 + COPYING) * copy)


def test_groups_that_reach_over_nodes_send_taps_through_the_network():
    wires = Wires(inside=400e9, across=1e9)
    inside, over = (
        estimate(replace(H200, wires=wires), replace(FREE, taps=SIZES.taps, rows=48), place)
        for place in (split(12, 4), split(11, 5))  # groups of 4, one group of 16
    )
    assert inside.parts["link"] == pytest.approx(COPYING * 12 * SIZES.taps / 400e9)
    copy = 24 * SIZES.taps / 1e9
    assert over.seconds == pytest.approx((1 + COPYING) * copy)


def test_weights_in_shards_are_gathered_beside_the_work_and_gradients_travel_once():
    whole = estimate(H200, SIZES, colocated(8))
    shards = replace(SIZES, drafter_gathers=5_000_000_000, target_gathers=48 * GIB)
    near = estimate(H200, shards, colocated(8))
    assert near.parts["target"] == whole.parts["target"]
    assert near.parts["sum"] == pytest.approx(whole.parts["sum"] / 2)
    assert near.parts["update"] == pytest.approx(H200.update / 8)
    far = estimate(H200, replace(shards, rows=64), colocated(64))
    assert far.parts["target"] == pytest.approx(48 * GIB * 63 / 64 / 40e9)
    assert far.parts["drafter"] == pytest.approx(2 * 5 * 63 / 64 / 40)
    assert estimate(H200, replace(shards, rows=9), colocated(8)).rows == 16
    assert estimate(H200, replace(shards, rows=1), split(3, 2)).rows == 6  # equally many for readers too


def test_taps_that_serve_several_steps_cost_a_share_of_a_pass():
    made = estimate(H200, replace(FREE, draws=4), colocated(8))
    assert made.parts["target"] == pytest.approx(0.6535 / 4)


times = st.floats(0.001, 2.0)


@given(times, times, st.integers(1, 24), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_no_placement_makes_more_of_a_gpu_than_target_and_drafter_in_turn(read, draft, ranks, rows):
    """With nothing to send and no update a split is at best equal: at a ratio of the two times."""
    m, sizes = Measured(read, draft, 0.0, 0.0, FAST), replace(FREE, rows=rows * ranks)
    bound = ranks * 8192 / (read + draft)
    assert estimate(m, sizes, colocated(ranks)).rate == pytest.approx(bound)
    assert all(estimate(m, sizes, place).rate <= bound * (1 + 1e-9) for place in placements(ranks))


@pytest.mark.parametrize(("readers", "drafters"), [(1, 1), (3, 1), (6, 2), (2, 3)])
def test_a_split_is_equal_where_the_ratio_is_that_of_the_times(readers, drafters):
    m = Measured(0.1 * readers, 0.1 * drafters, 0.0, 0.0, FAST)
    sizes = replace(FREE, rows=readers * drafters * (readers + drafters))
    one, other = (estimate(m, sizes, p) for p in (split(readers, drafters), colocated(readers + drafters)))
    assert one.rate == pytest.approx(other.rate)


def played(m: Measured, sizes: Sizes, place: Placement, credits: int = 2, steps: int = 120) -> float:
    """Seconds a step of a split run, row by row: a reader makes a row and waits until its drafter has a slot;
    a drafter waits for taps, and at a step's end for the other drafters. Nothing but these rules.
    """
    made = estimate(m, sizes, place)
    plan = Plan(0, 10**6, made.rows, 1, place)
    free = dict.fromkeys(place.readers, 0.0)
    calls = {drafter: [0.0] for drafter in place.drafters}  # when it asks for its next row
    ends = []
    for step in range(steps):
        for share in plan.shares(step):
            mine = calls[share.drafter]
            slot = mine[-credits] if len(mine) > credits - 1 else 0.0
            free[share.reader] = there = max(free[share.reader] + m.read, slot)
            mine.append(max(mine[-1], there) + m.draft)
        end = max(mine[-1] for mine in calls.values()) + m.update
        for mine in calls.values():
            mine[-1] = end
        ends.append(end)
    return (ends[-1] - ends[steps // 2 - 1]) / (steps - steps // 2)


@pytest.mark.parametrize(
    "m", [H200, Measured(0.392, 0.191, 0, 0.02, FAST), Measured(0.05, 0.4, 0, 0.02, FAST)]
)
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_the_formula_is_what_a_run_played_row_by_row_takes(m, ranks, rows):
    for place in placements(ranks)[1:]:
        sizes = replace(FREE, rows=rows)
        # where both sides are nearly full each is now and then late for the other: 2.2 % were seen
        assert played(m, sizes, place) == pytest.approx(estimate(m, sizes, place).seconds, rel=0.025), place


def test_without_double_buffering_the_play_is_slower_than_the_formula():
    """So the play above can tell."""
    place, sizes = split(5, 2), replace(FREE, rows=2)
    assert played(H200, sizes, place, credits=1) > 1.05 * estimate(H200, sizes, place).seconds


# ---- advice ----


def test_every_ratio_of_the_ranks_is_considered():
    found = placements(8)
    assert [say_place(p) for p in found] == ["colocated", *(f"split {a}:{8 - a}" for a in range(1, 8))]
    assert all(p.ranks == 8 for p in found)
    assert found[6] == split(6, 2)
    assert placements(1) == placements(1, colocated_only=True) == [colocated(1)]


def test_a_split_that_is_no_faster_than_the_margin_gives_way_to_colocated():
    found = recommend(H200, SIZES, 8, fits)
    assert found.best is not None
    assert say_place(found.fitting[0].place) == "split 6:2"
    assert found.fitting[0].rate < (1 + MARGIN) * found.best.rate
    assert found.best.place == colocated(8)
    assert "as fast as split 6:2 within 2%" in say_advice(found, 8)[-1]


def test_a_slow_network_makes_the_split_faster_which_hides_the_sum_behind_the_target():
    found = recommend(H200, replace(SIZES, rows=64), 64, fits)
    assert found.best is not None
    assert found.best.place.split
    assert found.best.rate > 1.05 * estimate(H200, replace(SIZES, rows=64), colocated(64)).rate


def test_where_both_do_not_fit_on_a_gpu_the_best_ratio_is_advised_and_the_rest_is_told():
    found = recommend(H200, SIZES, 8, lambda place, rows: None if place.split else "too large")
    assert found.best is not None
    assert found.best.place == split(6, 2)
    lines = say_advice(found, 8)
    assert "colocated: too large" in lines
    assert lines[-1] == "recommended: split 6:2, 8 rows a step (the fastest that fits)"


def test_where_nothing_fits_nothing_is_advised():
    found = recommend(H200, SIZES, 4, lambda place, rows: "too large")
    assert found.best is None
    assert say_advice(found, 4)[-1] == "recommended: none of the placements of 4 ranks fits"


@pytest.mark.parametrize(
    ("colocated_fits", "rows", "best"),
    [
        # a drafter eight times as dear as its target: nine ranks
        (True, 9, "colocated"),
        (False, 8, "split 1:8"),
        # sixteen rows leave two of nine colocated ranks idle half of the time
        (True, 16, "split 1:8"),
    ],
)
def test_where_the_drafter_is_dear_the_advice_has_more_drafters_or_none_apart(colocated_fits, rows, best):
    m = Measured(0.05, 0.4, 0.2, 0.01, FAST)
    room = fits if colocated_fits else (lambda place, rows: None if place.split else "too large")
    sizes = replace(SIZES, rows=rows)
    found = recommend(m, sizes, 9, room)
    assert found.best is not None
    assert say_place(found.best.place) == best
    rates = [estimate(m, sizes, p).rate for p in placements(9) if colocated_fits or p.split]
    assert found.best.rate >= max(rates) / (1 + MARGIN)


def test_recorded_taps_leave_only_colocated_ranks():
    found = recommend(replace(H200, read=0.0), SIZES, 8, fits, colocated_only=True)
    assert [e.place for e in found.fitting] == [colocated(8)]


def test_memory_decides_by_role():
    """27B on 79 GiB: target and drafter do not fit together, each alone does."""
    target = TargetShape(50 * GIB, (0,), 5 * GIB, GIB)
    room = [why_not(TrainConfig(), TRUE, target, 79 * GIB, p, 8) for p in (colocated(8), split(6, 2))]
    assert room[0] is not None
    assert room[0].startswith("a colocated rank needs 8")
    assert room[1] is None
    tight = why_not(TrainConfig(), TRUE, target, 50 * GIB, split(6, 2), 8)
    assert tight is not None
    assert tight.startswith("a target rank needs 5")


# ---- guesses ----


def test_a_guess_counts_the_work_and_the_bytes():
    work = row_flops(TRUE, 10**9)
    made = guess(work, (8192, 512, 512 * 15), 10**9, (2e14, 1e14), 1e12, FAST)
    assert made.read == pytest.approx(2e9 * 8192 / (0.75 * 2e14))
    assert made.draft == pytest.approx(124.5e12 / (0.75 * 1e14), rel=1e-3)
    assert made.backward / made.draft == pytest.approx(tables.backward_share(), abs=0.02)
    assert made.update == pytest.approx(0.042)


def test_the_guess_of_an_h200_is_near_what_was_measured():
    """Target 653.5 ms, drafter 199, update 20.7: docs/performance.md."""
    card = CARDS["H200"]
    ceilings = (1e12 * 0.75 * card.tflops,) * 2
    work = row_flops(TRUE, sum(tables.true_target().layers))
    made = guess(work, (8192, 512, 512 * 15), 1_730_000_000, ceilings, 0.75e12 * card.memory, card.wires)
    assert made.read == pytest.approx(0.6535, rel=0.15)
    assert made.draft == pytest.approx(0.199, rel=0.15)
    assert made.update == pytest.approx(0.0207, rel=0.15)


def test_a_card_is_known_by_the_name_that_its_driver_gives_it():
    assert card_named("NVIDIA H200") is CARDS["H200"]
    assert card_named("NVIDIA RTX PRO 6000 Blackwell Server Edition") is CARDS["RTX PRO 6000"]
    assert card_named("some other") is UNKNOWN


def test_the_tables_of_the_documentation_are_the_scripts():
    page = (ROOT / "docs/scaling.md").read_text().splitlines()
    assert [line for line in tables.tables() if line and line not in page] == []
