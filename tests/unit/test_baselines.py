"""Prompt-lookup and n-gram baselines, their walk along an answer, and the figures made of many requests."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.decoding.baselines import (
    distinct_4gram_ratio,
    lookup_guess,
    ngram_table,
    tau_of,
    walk,
    walk_lookup,
    walk_ngram,
)


def slow_lookup(known: list[int], count: int) -> list[int]:
    """Prompt-lookup as its definition reads: scan back for the last 3 tokens, else the last 2."""
    for order in (3, 2):
        key = known[-order:]
        for end in range(len(known) - 1, order - 1, -1):
            if known[end - order : end] == key:
                copied = list(known)
                for i in range(count):
                    copied.append(copied[end + i])
                return copied[len(known) :]
    return []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7))
def test_lookup_equals_its_definition_at_every_length(tokens, count):
    guess = lookup_guess(tokens, count)
    for n in range(1, len(tokens) + 1):
        assert guess(n) == slow_lookup(tokens[:n], count)


def test_lookup_takes_three_tokens_before_two_and_the_most_recent_occurrence():
    assert lookup_guess([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1)(10) == [9]  # three tokens, far away
    assert lookup_guess([2, 3, 9, 2, 3, 8, 7, 2, 3], 2)(9) == [8, 7]  # only two known: the nearer one
    assert lookup_guess([1, 2, 3, 4], 3)(4) == []


def test_walk_counts_right_drafts_and_the_bonus_and_sums_to_the_answer():
    answer = [5, 6, 7, 8, 9, 4, 2]
    drafts = {3: [6, 7, 0], 6: [9, 4, 2], 2: []}  # by known tokens, prompt of two
    # passes: 6 7 right + bonus 8 · 9 4 right, room left is 3: 2 right too, no room for a bonus
    assert walk([1, 1], answer, 4, lambda n: drafts[n]) == [3, 3]
    assert walk([1, 1], answer, 4, lambda n: []) == [1] * 6
    assert walk([1, 1], [5], 4, lambda n: [1]) == []


def test_walk_uses_no_more_drafts_than_a_block_holds():
    answer = list(range(20))
    assert walk([0], answer, 4, lambda n: answer[n - 1 : n + 18]) == [4, 4, 4, 4, 3]


def test_repetition_is_drafted_in_full_blocks():
    assert walk_lookup([1], [7] * 40, 8) == [1, 1, 8, 8, 8, 8, 5]
    assert max(walk_lookup([1], [7, 8] * 20, 8)) == 8


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30),
        max_size=4,
    )
)
def test_ngram_table_holds_the_most_frequent_supervised_next(documents):
    counts = defaultdict(Counter)
    for document in documents:
        ids = [t for t, _ in document]
        for i in range(3, len(ids)):
            if document[i][1]:
                counts[tuple(ids[i - 3 : i])][ids[i]] += 1
    expected = {key: min(c, key=lambda t: (-c[t], t)) for key, c in counts.items()}
    arrays = [
        (np.array([t for t, _ in d], dtype=np.int32), np.array([s for _, s in d], dtype=bool))
        for d in documents
    ]
    assert ngram_table(arrays).next_of == expected


def test_ngram_table_keeps_large_ids_apart():
    ids = np.array([200_000, 151_669, 248_319, 7, 200_000, 151_669, 248_319, 7, 248_319])
    table = ngram_table([(ids, np.ones(len(ids), dtype=bool))])
    assert table.next_of[(200_000, 151_669, 248_319)] == 7
    assert table.next_of[(151_669, 248_319, 7)] == 200_000


def test_ngram_drafts_are_chained_until_the_table_knows_no_more():
    ids = np.array([1, 2, 3, 4, 5, 6])
    table = ngram_table([(ids, np.ones(6, dtype=bool))])
    assert table.guess([1, 2, 3], 7)(3) == [4, 5, 6]
    assert table.guess([1, 2, 3], 2)(3) == [4, 5]
    assert table.guess([2, 3], 2)(2) == []
    assert walk_ngram([1, 2], [3, 4, 5, 6, 9], 4, table) == [4]


def test_distinct_4grams_fall_when_text_repeats():
    assert distinct_4gram_ratio([[1, 2, 3, 4, 5]]) == 1.0
    assert distinct_4gram_ratio([[1] * 103]) == pytest.approx(0.01)
    assert distinct_4gram_ratio([[1, 2, 3]]) is None
    # the same answer to two requests is no repetition
    assert distinct_4gram_ratio([[1, 2, 3, 4], [1, 2, 3, 4]]) == 1.0


def test_tau_is_the_mean_over_requests_not_over_passes():
    tau = tau_of([[4], [1, 1, 1, 1]])
    assert tau is not None
    assert tau.mean == 2.5
    assert tau.requests == 2
    assert tau_of([[], []]) is None


def test_tau_interval_is_seeded_and_covers_the_mean():
    requests = [[k, k + 1] for k in range(1, 9)]
    tau = tau_of(requests, seed=3)
    assert tau == tau_of(requests, seed=3)
    assert tau != tau_of(requests, seed=4)
    assert tau is not None
    assert tau.low < tau.mean < tau.high
