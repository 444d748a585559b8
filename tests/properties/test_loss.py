"""The chunked head and its weighted cross-entropy against plain ones, in fp64 and by autograd."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from slipstream.models.target import Head
from slipstream.training import loss as loss_module
from slipstream.training.blocks import Blocks, decay_weights, dpace_weights
from slipstream.training.loss import BlockLoss, SlotWeights, block_loss
from tests.training import DEVICE, LAYOUTS, all_blocks, assert_close, supervised_row

H, V, B = 24, 131, 5
HEADS = {
    "plain": {},
    "multiplier": {"multiplier": 0.4},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": True},
    "all three": {"bias": True, "multiplier": 0.7, "softcap": 3.0},
}
WEIGHTS = {
    "decay": SlotWeights(decay_weights(B, 2.0).to(DEVICE)),
    "dpace": SlotWeights(None, 0.5),
    "dpace with another floor": SlotWeights(None, 0.3),
}
ONE_BLOCK = 4 * V * (B - 1)
"""Bytes of the logits of one block's slots."""


def make_head(bias: bool = False, multiplier: float = 1.0, softcap: float | None = None) -> Head:
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(V, H, generator=generator) * 0.6).to(DEVICE)
    bias_V = torch.randn(V, generator=generator).to(DEVICE) if bias else None
    return Head(weight, bias_V, multiplier, softcap)


def some_blocks(spare: int = 3) -> Blocks:
    masks = LAYOUTS["holes"] + LAYOUTS["supervision touches the border"] + [[True] * 9]
    return all_blocks(supervised_row(masks, padding=2), B, spare)


def hidden_of(blocks: Blocks, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    hidden = scale * torch.randn(blocks.valid_NB.numel(), H, generator=generator)
    return hidden.to(DEVICE).requires_grad_()


def plain_loss(hidden: Tensor, blocks: Blocks, head: Head, weights: SlotWeights) -> tuple[Tensor, ...]:
    """Σw·CE, its divisor, CE and hits, slot by slot from the full logits, in fp64."""
    raw = hidden.double() @ head.weight_VH.double().T + (0.0 if head.bias_V is None else head.bias_V.double())
    logits = raw * head.multiplier
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    ce_NB = F.cross_entropy(logits, blocks.labels_NB.flatten(), reduction="none").view(blocks.valid_NB.shape)
    total, divisor = torch.zeros((), dtype=torch.float64, device=DEVICE), 0.0
    for ce, valid in zip(ce_NB, blocks.valid_NB.tolist(), strict=True):
        if weights.decay_B is None:
            w = literal_dpace(ce[1:].tolist(), valid[1:], weights.dpace_floor)
            divisor += sum(valid)
        else:
            w = [float(weights.decay_B[k]) * valid[k + 1] for k in range(B - 1)]
            divisor += sum(w)
        total = total + sum(w[k] * ce[k + 1] for k in range(B - 1) if valid[k + 1])
    hits = (logits.argmax(-1).view(ce_NB.shape) == blocks.labels_NB) & blocks.valid_NB
    return total, torch.tensor(divisor, device=DEVICE), (ce_NB * blocks.valid_NB)[:, 1:], hits[:, 1:]


def literal_dpace(ce: list[float], valid: list[bool], a: float) -> list[float]:
    """W_k = Σ_{i≥k} P_i·valid_i with P_i = Π_{j≤i} s_j, written out."""
    s = [(1 - a) * math.exp(-c) + a if v else 1.0 for c, v in zip(ce, valid, strict=True)]
    n = len(s)
    return [sum(math.prod(s[: i + 1]) * valid[i] for i in range(k, n)) if valid[k] else 0.0 for k in range(n)]


def check_against_plain(head: Head, weights: SlotWeights, blocks: Blocks, divisor_too: bool = True) -> None:
    hidden = hidden_of(blocks)
    ours = block_loss(hidden, blocks, head, weights)
    (3.0 * ours.total).backward()
    assert hidden.grad is not None
    mine, hidden.grad = hidden.grad, None
    total, divisor, ce, hits = plain_loss(hidden, blocks, head, weights)
    (3.0 * total).backward()
    assert_close(ours.total.detach().double(), total.detach(), 1e-5)
    assert_close(ours.weight.double(), divisor.double(), 1e-5)
    assert_close(ours.ce.double(), ce.detach(), 1e-5)
    assert torch.equal(ours.correct, hits)
    assert_close(mine, hidden.grad, 1e-5)
    assert not mine.view(*blocks.valid_NB.shape, H)[~blocks.valid_NB].any(), "no gradient without a label"


@pytest.mark.parametrize("chunk", [1, 3 * ONE_BLOCK, 2**28], ids=["a block", "three blocks", "all"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("head", HEADS)
def test_the_chunked_head_is_the_plain_head_in_loss_ce_hits_and_gradient(head, weights, chunk, monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", chunk)
    check_against_plain(make_head(**HEADS[head]), WEIGHTS[weights], some_blocks())


@pytest.mark.parametrize("chunk", [3 * ONE_BLOCK, 2**28], ids=["three blocks", "all"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_same_where_invalid_slots_are_not_left_out_of_the_products(weights, chunk, monkeypatch):
    """The fixed shapes of a GPU, and the same numbers."""
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", chunk)
    monkeypatch.setattr(loss_module, "compacts", lambda device: False)
    check_against_plain(make_head(**HEADS["all three"]), WEIGHTS[weights], some_blocks())


@pytest.mark.skipif(DEVICE.type != "cpu", reason="chunks on a GPU are rows of tiles, invalid slots included")
def test_logits_are_made_for_a_chunk_of_valid_slots_at_a_time_and_never_for_all(monkeypatch):
    blocks, rows = some_blocks(), []
    head_ce = loss_module._head_ce
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", 2 * ONE_BLOCK)
    monkeypatch.setattr(loss_module, "_head_ce", lambda h, *rest: (rows.append(len(h)), head_ce(h, *rest))[1])
    block_loss(hidden_of(blocks), blocks, make_head(), WEIGHTS["decay"])
    assert max(rows) <= 2 * (B - 1)
    assert len(rows) == math.ceil(len(blocks.anchors_N) / 2)
    assert sum(rows) == int(blocks.valid_NB.sum())


@pytest.mark.parametrize(
    ("head", "change"),
    [
        ("softcap", {"softcap": None}),
        ("multiplier", {"multiplier": 1.0}),
        ("bias", {"bias_V": None}),
    ],
)
def test_the_comparison_tells_a_head_without_its_softcap_multiplier_or_bias(head, change, monkeypatch):
    blocks, whole = some_blocks(), make_head(**HEADS[head])
    monkeypatch.setattr(
        loss_module,
        "_head_ce",
        lambda h, y, head, slopes, f=loss_module._head_ce: f(h, y, replace(head, **change), slopes),
    )
    with pytest.raises(AssertionError):
        check_against_plain(whole, WEIGHTS["decay"], blocks)


def test_the_loss_of_several_rows_is_the_sum_of_weighted_ce_over_the_sum_of_weights():
    """Sums are added over rows and divided once: not a mean of the rows' means."""
    head, weights = make_head(), WEIGHTS["decay"]
    rows = [supervised_row(LAYOUTS["holes"]), supervised_row([[True] * 20]), supervised_row([[True] * 2])]
    sums, means, numerator, denominator = [], [], 0.0, 0.0
    for row in rows:
        blocks = all_blocks(row, B)
        hidden = hidden_of(blocks)
        ours = block_loss(hidden, blocks, head, weights)
        sums.append((ours.total.item(), ours.weight.item()))
        means.append(sums[-1][0] / sums[-1][1])
        logits = (hidden @ head.weight_VH.T).detach().view(*blocks.valid_NB.shape, V)
        for n, k in blocks.valid_NB.nonzero().tolist():
            w = math.exp(-(k - 1) / 2.0)
            numerator += w * float(F.cross_entropy(logits[n, k], blocks.labels_NB[n, k]))
            denominator += w
    assert sum(s[0] for s in sums) / sum(s[1] for s in sums) == pytest.approx(
        numerator / denominator, rel=1e-5
    )
    assert sum(means) / 3 != pytest.approx(numerator / denominator, rel=1e-2), "the rows tell them apart"


def test_decay_weights_are_exp_of_minus_k_minus_1_over_gamma():
    assert decay_weights(6, 2.5).tolist() == pytest.approx([math.exp(-(k - 1) / 2.5) for k in range(1, 6)])


slots = st.lists(st.tuples(st.floats(0, 8), st.booleans()), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(slots, st.floats(0, 1))
def test_dpace_weights_are_their_formula_written_out(slots, floor):
    ce, valid = [c for c, _ in slots], [v for _, v in slots]
    ours = dpace_weights(torch.tensor([ce], dtype=torch.float64), torch.tensor([valid]), floor)
    assert ours[0].tolist() == pytest.approx(literal_dpace(ce, valid, floor), rel=1e-9, abs=1e-12)


def test_dpace_weights_send_no_gradient_and_its_divisor_is_the_count_of_labels():
    ce = torch.tensor([[1.0, 2.0]], requires_grad=True)
    weights, divisor = SlotWeights(None, 0.5).weigh(ce, torch.tensor([[True, True]]))
    assert not weights.requires_grad
    assert divisor == 2.0 != weights.sum()
    a, swapped = literal_dpace([1.0, 2.0], [True, True], 0.3), literal_dpace([1.0, 2.0], [True, True], 0.7)
    assert a != swapped, "the floor and its complement are told apart"


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("compact", [True, False])
def test_a_row_without_a_label_has_zero_loss_zero_weight_and_zero_finite_gradient(
    weights, compact, monkeypatch
):
    monkeypatch.setattr(loss_module, "compacts", lambda device: compact)
    blocks = all_blocks(supervised_row(LAYOUTS["nothing supervised"]), B, spare=4)
    hidden = hidden_of(blocks)
    loss = block_loss(hidden, blocks, make_head(), WEIGHTS[weights])
    loss.total.backward()
    assert loss.total.item() == loss.weight.item() == 0.0
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize("compact", [True, False])
def test_a_slot_without_a_label_is_never_right_whatever_the_head_says(compact, monkeypatch):
    """Labels are 0 there, and here token 0 is the likeliest everywhere."""
    monkeypatch.setattr(loss_module, "compacts", lambda device: compact)
    blocks, head = some_blocks(), make_head(bias=True)
    assert head.bias_V is not None
    head.bias_V[0] = 100.0
    loss = block_loss(hidden_of(blocks), blocks, head, WEIGHTS["decay"])
    assert not loss.correct.any()
    assert torch.equal(loss.ce > 0, blocks.valid_NB[:, 1:])


@pytest.mark.parametrize("compact", [True, False])
def test_ce_and_gradient_stay_exact_where_the_label_s_probability_underflows(compact, monkeypatch):
    monkeypatch.setattr(loss_module, "compacts", lambda device: compact)
    blocks, head = some_blocks(), make_head()
    hidden = hidden_of(blocks, scale=100.0)
    loss = block_loss(hidden, blocks, head, WEIGHTS["decay"])
    loss.total.backward()
    assert loss.ce.max() > 110, "beyond −log of the smallest fp32 number"
    _, _, ce, _ = plain_loss(hidden.detach(), blocks, head, WEIGHTS["decay"])
    assert_close(loss.ce.double(), ce, 1e-5)
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_in_bf16_the_loss_is_that_of_the_bf16_logits_reduced_in_fp32():
    blocks = some_blocks()
    hidden, head = hidden_of(blocks).detach().bfloat16(), make_head()
    head = replace(head, weight_VH=head.weight_VH.bfloat16())
    loss: BlockLoss = block_loss(hidden.requires_grad_(), blocks, head, WEIGHTS["decay"])
    loss.total.backward()
    assert loss.total.dtype == loss.weight.dtype == loss.ce.dtype == torch.float32
    rounded = (hidden @ head.weight_VH.T).float().detach()
    ce = F.cross_entropy(rounded, blocks.labels_NB.flatten(), reduction="none").view(blocks.valid_NB.shape)
    assert_close(loss.ce, (ce * blocks.valid_NB)[:, 1:], 1e-5)
    reference = hidden.detach().float().requires_grad_()
    plain_loss(reference, blocks, replace(head, weight_VH=head.weight_VH.float()), WEIGHTS["decay"])[
        0
    ].backward()
    assert hidden.grad is not None
    assert reference.grad is not None
    assert_close(hidden.grad.float(), reference.grad, 2e-2)


def test_without_gradients_the_second_product_is_left_out_and_the_loss_is_the_same():
    blocks, head = some_blocks(), make_head()
    with FlopCounterMode(display=False) as training:
        trained = block_loss(hidden_of(blocks), blocks, head, WEIGHTS["decay"])
    with FlopCounterMode(display=False) as validating, torch.no_grad():
        validated = block_loss(hidden_of(blocks), blocks, head, WEIGHTS["decay"])
    assert torch.equal(trained.total.detach(), validated.total)
    assert torch.equal(trained.ce, validated.ce)
    assert training.get_total_flops() == 2 * validating.get_total_flops() > 0
