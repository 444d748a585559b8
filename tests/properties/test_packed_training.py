"""Packed = unpacked: documents in a row train as each would alone, through the target and the drafter."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.data.pack import Row
from slipstream.models.drafter import FULL, SLIDING, Drafter
from slipstream.models.target import Target
from slipstream.training import attention as attention_module
from slipstream.training import loop
from slipstream.training.blocks import Blocks, decay_weights
from slipstream.training.loss import BlockLoss, SlotWeights
from tests.tiny import tiny_target
from tests.training import (
    DEVICE,
    assert_close,
    drafter_config,
    gradients,
    make_drafter,
    run_of,
    supervised_row,
)

TAPS = (0, 2, 4)
WEIGHTS = {"decay": SlotWeights(decay_weights(5, 2.0).to(DEVICE)), "dpace": SlotWeights(None, 0.5)}
MODES = [("qwen3", "packed"), ("qwen3", "unpacked"), ("hybrid", "unpacked")]
MASKS = [
    [False, False] + [True] * 9,
    [True] * 7,
    [True],
    [False] + [True] * 3 + [False] + [True] * 4,
    [True] * 2,
]


@functools.cache
def target_of(family: str) -> Target:
    return Target(tiny_target(family).to(DEVICE), TAPS)


def mixed_drafter() -> Drafter:
    """A full layer and a sliding one, causal in the block where a released checkpoint is."""
    return make_drafter(drafter_config(layer_types=(FULL, SLIDING), sliding_window=7, is_causal=None))


def documents_of(row: Row) -> list[Row]:
    """One row for each document, made without the packing."""
    return [
        Row(
            row_id=i,
            input_ids=row.input_ids[a:b].clone(),
            positions=torch.arange(b - a),
            documents=torch.zeros(b - a, dtype=torch.int64),
            supervised=row.supervised[a:b].clone(),
        )
        for i, (a, b) in enumerate(row.spans())
    ]


def trained_on(
    rows: list[Row], target: Target, drafter: Drafter, attention: str, weights: SlotWeights
) -> tuple[list[tuple[BlockLoss, Blocks]], dict[str, Tensor], list[Tensor]]:
    """Loss, blocks and taps of each row, every anchor taken, and the gradient summed over the rows."""
    drafter.zero_grad()
    taps, results = [], []
    run = run_of(target, drafter, attention, weights)

    def link(row: Row) -> Tensor:
        taps.append(target.taps(row))
        return taps[-1]

    for row in rows:
        loss, blocks = loop.row_loss(run, row, link, (0, 0, 0), noise=0.0)
        loss.total.backward()
        results.append((loss, blocks))
    return results, gradients(drafter), taps


def assert_packed_is_unpacked(row: Row, target: Target, attention: str, weights: SlotWeights) -> None:
    drafter = mixed_drafter()
    [(packed, blocks)], grads, [taps] = trained_on([row], target, drafter, attention, weights)
    apart, grads_apart, taps_apart = trained_on(documents_of(row), target, drafter, attention, weights)
    assert_close(taps[: row.spans()[-1][1]], torch.cat(taps_apart), 1e-5)
    assert blocks.count == sum(b.count for _, b in apart)
    assert blocks.labelled == sum(b.labelled for _, b in apart)
    ce = torch.cat([loss.ce[: b.count] for loss, b in apart])
    correct = torch.cat([loss.correct[: b.count] for loss, b in apart])
    if len(ce):
        assert_close(packed.ce[: blocks.count], ce, 1e-5)
    assert torch.equal(packed.correct[: blocks.count], correct)
    assert_close(
        packed.total.detach(),
        sum((loss.total.detach() for loss, _ in apart), torch.zeros((), device=DEVICE)),
        1e-5,
    )
    assert_close(packed.weight, sum((loss.weight for loss, _ in apart), torch.zeros((), device=DEVICE)), 1e-6)
    largest = max(float(g.abs().max()) for g in grads_apart.values())
    for name, grad in grads_apart.items():
        assert (grads[name] - grad).abs().max() <= 2e-5 * float(grad.abs().max()) + 1e-7 * largest, name


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("attention", ["documents", "dense"])
@pytest.mark.parametrize(("family", "isolation"), MODES)
def test_a_packed_row_has_the_taps_loss_and_gradients_of_its_documents_one_a_row(
    family, isolation, attention, weights, monkeypatch
):
    target = target_of(family)
    monkeypatch.setattr(target, "isolation", isolation)
    assert_packed_is_unpacked(supervised_row(MASKS, padding=3), target, attention, WEIGHTS[weights])


masks = st.lists(
    st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=10), min_size=1, max_size=4
)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(masks)
@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_the_same_for_any_documents(family, masks):
    assert_packed_is_unpacked(supervised_row(masks, 2), target_of(family), "documents", WEIGHTS["decay"])


def test_the_comparison_tells_a_drafter_mask_without_documents(monkeypatch):
    predicate = attention_module.visibility

    def leaky(blocks: Blocks, window: int | None, causal: bool):
        everyone = torch.zeros_like(blocks.documents_N), torch.zeros_like(blocks.context_documents_S)
        return predicate(
            replace(blocks, documents_N=everyone[0], context_documents_S=everyone[1]), window, causal
        )

    monkeypatch.setattr(attention_module, "visibility", leaky)
    with pytest.raises(AssertionError):
        assert_packed_is_unpacked(supervised_row(MASKS), target_of("qwen3"), "dense", WEIGHTS["decay"])


def test_the_comparison_tells_a_hybrid_target_that_runs_its_documents_together(monkeypatch):
    monkeypatch.setattr(target_of("hybrid"), "isolation", "packed")
    with pytest.raises(AssertionError):
        assert_packed_is_unpacked(supervised_row(MASKS), target_of("hybrid"), "dense", WEIGHTS["decay"])


def test_the_comparison_tells_a_mean_of_the_documents_means():
    """The sums are what adds up; the documents' own averages do not."""
    apart, _, _ = trained_on(
        documents_of(supervised_row(MASKS)), target_of("qwen3"), mixed_drafter(), "dense", WEIGHTS["decay"]
    )
    some = [loss for loss, _ in apart if loss.weight > 0]
    means = sum(loss.total.item() / loss.weight.item() for loss in some) / len(some)
    assert means != pytest.approx(
        sum(x.total.item() for x in some) / sum(x.weight.item() for x in some), rel=1e-3
    )


def test_padding_changes_nothing():
    drafter = mixed_drafter()
    row, padded = supervised_row(MASKS), supervised_row(MASKS, padding=9)
    for attention in ("documents", "dense"):
        results = [
            trained_on([r], target_of("qwen3"), drafter, attention, WEIGHTS["decay"]) for r in (row, padded)
        ]
        (([(a, _)], grads_a, _), ([(b, _)], grads_b, _)) = results
        assert_close(b.total.detach(), a.total.detach(), 1e-6)
        for name, grad in grads_a.items():
            assert_close(grads_b[name], grad, 1e-5)
