"""Who works on what: dealt evenly, inside groups, the same whatever the order of asking."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import TrainConfig, UserError
from slipstream.distributed.placement import ALONE, Placement, Plan, placement_of, rows_of_a_step

SPLIT = [Placement(1, 1, 3), Placement(1, 2, 2), Placement(3, 1), Placement(2, 3)]
PLACES = [ALONE, Placement(groups=4), *SPLIT]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_rank_has_a_role_and_partners_stay_in_a_group(place):
    drafters, readers = place.drafters, place.readers
    assert sorted({*drafters, *readers}) == list(range(place.ranks))
    assert place.drafters[0] == 0, "the first rank writes checkpoints, so it drafts"
    if place.split:
        assert not {*drafters} & {*readers}
        for d in drafters:
            assert len(place.partners(d)) == place.readers_a_group
            assert all(d in place.partners(r) for r in place.partners(d))
            assert max(abs(d - r) for r in place.partners(d)) < place.ranks // place.groups


@given(st.sampled_from(PLACES), st.lists(st.integers(1, 8192), min_size=1, max_size=24), st.integers(0, 99))
def test_rows_are_dealt_evenly_by_number_and_by_tokens(place, tokens, before):
    dealt = place.deal(tokens, before)
    assert dealt == place.deal(tokens, before)
    rows = Counter(drafter for drafter, _ in dealt)
    assert set(rows) <= set(place.drafters)
    counts = [rows[d] for d in place.drafters]
    assert max(counts) <= -(-len(tokens) // len(place.drafters))
    if len(tokens) >= len(place.drafters):
        assert min(counts) >= 1, "no rank without a row"
    if len(tokens) % len(place.drafters) == 0:
        assert len(set(counts)) == 1, "ranks with shards must work equally often"
    for drafter, reader in dealt:
        assert reader in place.partners(drafter) if place.split else reader == drafter


@given(st.lists(st.integers(1, 8192), min_size=8, max_size=8))
def test_no_rank_has_more_tokens_than_another_by_more_than_the_longest_row(tokens):
    dealt = Placement(groups=2).deal(tokens, 0)
    load = [sum(t for t, (d, _) in zip(tokens, dealt, strict=True) if d == rank) for rank in (0, 1)]
    assert abs(load[0] - load[1]) <= max(tokens)


def test_readers_take_turns_over_the_steps():
    place = Placement(1, 2)
    assert [place.deal([100], step)[0][1] for step in range(6)] == [1, 2, 1, 2, 1, 2]
    two = Placement(1, 2, 2)
    for step in range(4):
        assert {reader for _, reader in two.deal([9, 7], step)} == {1 + step % 2, 4 + step % 2}
    assert Counter(r for s in range(6) for _, r in Placement(2, 3).deal([5, 5], s)) == {2: 4, 3: 4, 4: 4}


def test_a_plans_rows_are_the_same_at_any_world_size_and_every_draws_share_the_same_ranks():
    def tokens(index: int) -> int:
        return 100 + 37 * index % 91

    alone = Plan(3, 11, 4, 2)
    for place in PLACES:
        plan = Plan(3, 11, 4, 2, place, tokens)
        for step in range(0, 20, 2):
            first, second = plan.shares(step), plan.shares(step + 1)
            assert [(s.epoch, s.index, s.draw) for s in first] == alone.step_rows(step)
            assert [(s.index, s.drafter, s.reader) for s in first] == [
                (s.index, s.drafter, s.reader) for s in second
            ]


@pytest.mark.parametrize(
    ("settings", "world", "place"),
    [
        ({}, None, ALONE),
        ({"ranks": 3}, None, Placement(groups=3)),
        ({"ranks": 3}, 4, Placement(groups=4)),  # torchrun's number is the one that is there
        ({"dp_pairs": 2}, None, Placement(1, 1, 2)),
        ({"target_ranks": 2, "drafter_ranks": 1}, 3, Placement(1, 2)),
        ({"target_ranks": 6, "drafter_ranks": 2}, None, Placement(1, 3, 2)),
    ],
)
def test_settings_make_a_placement(settings, world, place):
    assert placement_of(TrainConfig(**settings), world) == place


@pytest.mark.parametrize(
    ("settings", "world", "said"),
    [
        ({"dp_pairs": 1, "target_ranks": 1}, None, "give one or the other"),
        ({"target_ranks": 1}, None, "needs both"),
        ({"dp_pairs": 1, "ranks": 3}, None, "leave --ranks out"),
        ({"dp_pairs": 2}, 3, "torchrun started 3 ranks: start 4"),
        ({"dp_pairs": 1, "taps_dir": "taps"}, None, "recorded taps need no target ranks"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, world, said):
    with pytest.raises(UserError, match=said):
        placement_of(TrainConfig(**settings), world)


def test_a_step_has_a_row_for_every_drafter_or_is_refused():
    four = Placement(groups=4)
    assert rows_of_a_step(TrainConfig(), four) == 4
    assert rows_of_a_step(TrainConfig(rows_per_step=6), four) == 6
    with pytest.raises(UserError, match="want at least a row each"):
        rows_of_a_step(TrainConfig(rows_per_step=3), four)
    with pytest.raises(UserError, match="multiple of 4"):
        rows_of_a_step(TrainConfig(rows_per_step=6, target_sharding=True), four)
