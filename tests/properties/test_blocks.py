"""Anchors, labels and slot counts: what a block may hold, against rules written out token by token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.pack import make_row, pack_rows
from slipstream.data.records import Document
from slipstream.training.blocks import (
    Blocks,
    accepted_prefix,
    anchor_candidates,
    anchors_cut,
    draw_anchors,
    make_blocks,
    wanted_anchors,
)
from slipstream.training.loss import BlockLoss
from slipstream.training.metrics import SlotMeter
from tests.fixtures_data import memory_dataset
from tests.training import DEVICE, LAYOUTS, MASK, all_blocks, documents, supervised_row

SIZES = st.integers(2, 9)
PADDING = st.integers(0, 5)


def literal_candidates(masks: list[list[bool]]) -> list[int]:
    found, start = [], 0
    for mask in masks:
        found += [start + i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]
        start += len(mask)
    return found


def literal_valid(masks: list[list[bool]], anchor: int, block_size: int) -> list[bool]:
    """Slot by slot, by walking from the anchor to the first token that is outside or not supervised."""
    start = 0
    for mask in masks:
        if anchor < start + len(mask):
            break
        start += len(mask)
    else:
        raise AssertionError("no such anchor")
    out = [False] * block_size
    for slot in range(1, block_size):
        place = anchor - start + slot
        if place >= len(mask) or not mask[place]:
            break
        out[slot] = True
    return out


def check_anchors_and_labels(
    masks: list[list[bool]],
    padding: int,
    block_size: int,
    spare: int,
    make: Callable[..., Blocks] = make_blocks,
) -> None:
    row = supervised_row(masks, padding)
    assert anchor_candidates(row).tolist() == literal_candidates(masks)
    anchors = anchor_candidates(row)
    blocks = make(row, anchors, len(anchors) + spare, block_size, MASK)
    assert blocks.count == len(anchors)
    labelled = set()
    for b, anchor in enumerate(anchors.tolist()):
        valid = literal_valid(masks, anchor, block_size)
        assert blocks.valid_NB[b].tolist() == valid
        assert blocks.documents_N[b] == row.documents[anchor] >= 0
        for slot in range(block_size):
            if valid[slot]:
                assert row.documents[anchor + slot] == row.documents[anchor]
                assert blocks.labels_NB[b, slot] == row.input_ids[anchor + slot]
                labelled.add(anchor + slot)
        assert blocks.input_ids_NB[b].tolist() == [row.input_ids[anchor], *[MASK] * (block_size - 1)]
        first = int(row.positions[anchor])
        assert blocks.positions_NB[b].tolist() == list(range(first, first + block_size))
    assert blocks.labelled == len(labelled)
    assert not blocks.labels_NB[~blocks.valid_NB].any()
    assert not blocks.valid_NB[blocks.count :].any(), "unused places carry no loss"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(documents, PADDING, SIZES, st.integers(0, 3))
def test_anchors_and_labels_are_those_of_a_walk_from_the_anchor_to_the_first_unsupervised_token(
    masks, padding, block_size, spare
):
    check_anchors_and_labels(masks, padding, block_size, spare)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [2, 5, 16])
@pytest.mark.parametrize("padding", [0, 4])
def test_the_same_for_layouts_that_have_gone_wrong_in_trainers(layout, block_size, padding):
    check_anchors_and_labels(LAYOUTS[layout], padding, block_size, spare=2)


@pytest.mark.parametrize(
    "fault",
    [
        lambda b: replace(b, valid_NB=b.valid_NB.roll(1, dims=1)),
        lambda b: replace(b, labels_NB=b.labels_NB.roll(-1, dims=1)),
        lambda b: replace(b, positions_NB=b.positions_NB + 1),
        lambda b: replace(b, labelled=b.labelled + 1),
    ],
)
def test_the_walk_tells_a_shifted_label_mask_position_or_coverage(fault):
    check_anchors_and_labels([[True] * 6], 2, 4, 0)
    with pytest.raises(AssertionError):
        check_anchors_and_labels([[True] * 6], 2, 4, 0, lambda *args: fault(make_blocks(*args)))


def test_a_block_that_leaves_the_supervised_span_stays_out():
    masks = [[True, True, False, True, True, True]]
    blocks = all_blocks(supervised_row(masks), 6)
    assert blocks.anchors_N.tolist() == [0, 3, 4]
    assert blocks.valid_NB[0].tolist() == [False, True, False, False, False, False]
    assert blocks.valid_NB[1].tolist() == [False, True, True, False, False, False]


def test_slot_k_predicts_the_token_k_places_after_the_anchor_and_slot_0_nothing():
    row = supervised_row([[True] * 8])
    blocks = make_blocks(row, torch.tensor([2]), 1, 4, MASK)
    assert blocks.labels_NB[0].tolist() == [0, *row.input_ids[3:6].tolist()]
    assert blocks.valid_NB[0].tolist() == [False, True, True, True]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(documents, st.integers(1, 12), st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)))
def test_drawn_anchors_are_sorted_candidates_without_repetition_and_as_many_as_asked(masks, most, key):
    row = supervised_row(masks, 2)
    anchors, candidates = draw_anchors(row, most, key).tolist(), literal_candidates(masks)
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= set(candidates)
    assert len(anchors) == min(most, len(candidates))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(documents, st.integers(1, 12), st.floats(0, 1, exclude_min=True))
def test_a_share_draws_that_share_of_the_candidates_under_the_bound_and_what_is_cut_is_counted(
    masks, most, share
):
    row, candidates = supervised_row(masks, 2), literal_candidates(masks)
    anchors = draw_anchors(row, most, (0, 0, 0), share).tolist()
    asked = draw_anchors(row, 1000, (0, 0, 0), share).tolist()
    assert set(anchors) <= set(candidates)
    assert anchors == sorted(set(anchors))
    exact = share * len(candidates)
    assert abs(len(asked) - exact) <= 0.5 or (len(asked) == 1 and exact < 1)
    assert bool(asked) == bool(candidates), "a row that has candidates is never left out"
    assert len(anchors) == min(most, len(asked))
    assert anchors_cut(row, len(anchors), share) == len(asked) - len(anchors)
    assert anchors_cut(row, len(anchors), None) == 0, "without a share nothing is asked beyond the bound"


def test_the_whole_share_is_every_candidate_and_no_share_leaves_the_draw_as_it_was():
    row = supervised_row([[True] * 200], row_id=3)
    assert draw_anchors(row, 500, (5, 2, 0), 1.0).tolist() == anchor_candidates(row).tolist()
    assert draw_anchors(row, 20, (5, 2, 0), 1.0).tolist() == draw_anchors(row, 20, (5, 2, 0)).tolist()
    assert [wanted_anchors(n, 0.1) for n in (0, 1, 14, 16, 1000)] == [0, 1, 1, 2, 100]


def coverage_at(lengths: np.ndarray, budget: int, most: int, share: float | None) -> tuple[float, float]:
    """Shares of all candidates that are drawn, and of all supervised tokens that are labelled."""
    data = memory_dataset([Document(np.arange(n) % 90 + 1, np.arange(n) >= n // 4) for n in lengths])
    packing = pack_rows(lengths, budget, "truncate")
    drawn = candidates = labelled = supervised = 0
    for r in range(len(packing)):
        row = make_row(data, packing, r)
        anchors = draw_anchors(row, most, (0, 0, 0), share)
        blocks = make_blocks(row, anchors, most, 8, MASK)
        drawn, candidates = drawn + blocks.count, candidates + len(anchor_candidates(row))
        labelled, supervised = labelled + blocks.labelled, supervised + int(row.supervised.sum())
    return drawn / candidates, labelled / supervised


def test_with_a_share_coverage_is_the_same_however_the_documents_are_packed():
    lengths = np.exp(np.random.default_rng(3).normal(5.2, 0.6, 600)).astype(int).clip(20, 1024)
    small, large = (coverage_at(lengths, budget, 4096, 0.1) for budget in (1024, 8192))
    assert small[0] == pytest.approx(0.1, abs=0.5 / 500), "rounding: half an anchor of a row's 600"
    assert large[0] == pytest.approx(0.1, abs=0.5 / 4000)
    assert small[1] == pytest.approx(large[1], abs=0.01), "0.51 with a deviation of 0.002"
    bounded = [coverage_at(lengths, budget, 128, None)[1] for budget in (1024, 8192)]
    assert bounded[0] > bounded[1] + 0.4, "a bound alone covers small rows better"


def test_anchors_are_a_function_of_seed_epoch_draw_and_row_alone():
    row = supervised_row([[True] * 200], row_id=3)
    key = (5, 2, 0)
    first = draw_anchors(row, 20, key).tolist()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    draw_anchors(row, 7, (9, 9, 9))
    assert draw_anchors(row, 20, key).tolist() == first
    others = [(6, 2, 0), (5, 3, 0), (5, 2, 1)]
    drawn = [draw_anchors(row, 20, other).tolist() for other in others]
    drawn.append(draw_anchors(replace(row, row_id=4), 20, key).tolist())
    assert len({tuple(d) for d in [first, *drawn]}) == 5, "seed, epoch, draw and row each matter"


def test_every_candidate_is_drawn_equally_often():
    row = supervised_row([[True] * 31])
    draws = torch.cat([draw_anchors(row, 10, (0, epoch, 0)) for epoch in range(600)])
    counts = torch.bincount(draws, minlength=31)[:30].double()
    assert counts.sum() == 6000
    chi2 = ((counts - 200) ** 2 / (200 * (2 / 3))).sum()
    assert chi2 < 60, "29 degrees of freedom: 0.06 % beyond 60"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(documents, st.integers(1, 6), SIZES)
def test_coverage_counts_each_supervised_token_once_however_many_blocks_label_it(masks, most, block_size):
    row = supervised_row(masks)
    anchors = draw_anchors(row, most, (0, 0, 0))
    blocks = make_blocks(row, anchors, most, block_size, MASK)
    labels = {
        a + k for a in anchors.tolist() for k in range(1, block_size) if literal_valid(masks, a, k + 1)[k]
    }
    assert blocks.labelled == len(labels) <= int(row.supervised.sum())


def literal_accepted(correct: list[bool]) -> int:
    for k, right in enumerate(correct):
        if not right:
            return k
    return len(correct)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=9))
def test_the_accepted_prefix_ends_at_the_first_wrong_slot(correct):
    assert accepted_prefix(torch.tensor(correct)).tolist() == [literal_accepted(c) for c in correct]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(documents, min_size=1, max_size=3), st.integers(2, 6), st.integers(0, 99))
def test_the_meter_says_what_a_count_block_by_block_says(row_masks, block_size, seed):
    """τ over whole blocks only, short ones counted apart; slots averaged over the labels they have."""
    generator = torch.Generator().manual_seed(seed)
    meter = SlotMeter(block_size, DEVICE)
    prefixes, short, total, weight = [], 0, 0.0, 0.0
    right, ces, labelled, supervised = [[[] for _ in range(block_size - 1)] for _ in range(2)] + [0, 0]
    for masks in row_masks:
        row = supervised_row(masks)
        blocks = all_blocks(row, block_size, spare=2)
        valid = blocks.valid_NB[:, 1:]
        correct = (torch.rand(valid.shape, generator=generator) < 0.7).to(DEVICE) & valid
        ce = torch.rand(valid.shape, generator=generator).to(DEVICE) * valid
        loss = BlockLoss(ce.sum() * 2, valid.sum().float(), ce, correct)
        meter.add(loss, blocks, int(row.supervised.sum()))
        total, weight = total + float(loss.total), weight + float(loss.weight)
        labelled, supervised = labelled + blocks.labelled, supervised + sum(map(sum, masks))
        for b in range(blocks.count):
            if all(valid[b].tolist()):
                prefixes.append(literal_accepted(correct[b].tolist()))
            else:
                short += 1
            for k in range(block_size - 1):
                if valid[b, k]:
                    right[k].append(bool(correct[b, k]))
                    ces[k].append(float(ce[b, k]))
    facts = meter.read()
    count = sum(map(len, right))
    assert facts["tau"] == pytest.approx(1 + (np.mean(prefixes) if prefixes else 0))
    assert facts["blocks"] == len(prefixes) + short
    assert facts["blocks_short"] == short
    assert facts["labels"] == count
    assert facts["loss"] == pytest.approx(total / weight if weight else 0)
    assert facts["accuracy"] == pytest.approx(sum(map(sum, right)) / max(count, 1))
    assert facts["slot_accuracy"] == pytest.approx([np.mean(r) if r else 0 for r in right])
    assert facts["slot_ce"] == pytest.approx([np.mean(c) if c else 0 for c in ces], rel=1e-5)
    assert facts["coverage"] == pytest.approx(labelled / max(supervised, 1))
    assert meter.read()["blocks"] == meter.read()["labels"] == 0, "a reading starts afresh"


def test_tau_is_not_the_product_of_batch_mean_accuracies():
    """Two blocks, one all right and one all wrong: τ 2.5 of 4; the product of the means would say 1.875."""
    blocks = all_blocks(supervised_row([[True] * 4, [True] * 4]), 4)
    keep = torch.tensor([0, 3])
    blocks = replace(blocks, valid_NB=blocks.valid_NB[keep], count=2)
    assert blocks.valid_NB[:, 1:].all()
    correct = torch.tensor([[True] * 3, [False] * 3], device=DEVICE)
    zero, nothing = torch.zeros((), device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    meter = SlotMeter(4, DEVICE)
    meter.add(BlockLoss(zero, zero + 1, nothing, correct), blocks, 8)
    facts = meter.read()
    assert facts["tau"] == 2.5
    assert 1 + sum(np.cumprod(facts["slot_accuracy"])) == 1.875
