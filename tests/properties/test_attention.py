"""What a block sees: the mask predicate token by token, three attentions of it, nothing of the future."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from slipstream.config import UserError
from slipstream.data.pack import Row
from slipstream.models.drafter import FULL, SLIDING, Attend, Drafter, DrafterConfig
from slipstream.models.target import Head, Target
from slipstream.training import attention as attention_module
from slipstream.training import loop
from slipstream.training.attention import (
    dense_attend,
    dense_mask,
    documents_attend,
    flex_attend,
    flex_mask,
    fused_only,
    loud_fallbacks,
    make_attend,
    tile_counts,
)
from slipstream.training.blocks import Blocks, decay_weights, draw_anchors, make_blocks
from slipstream.training.loss import SlotWeights, block_loss
from tests.tiny import random_row, tiny_target
from tests.training import (
    DEVICE,
    LAYOUTS,
    MASK,
    all_blocks,
    assert_close,
    compiled_flex,
    documents,
    drafter_config,
    gradients,
    make_drafter,
    run_of,
    supervised_row,
)

CAUSALITIES = (None, True, False)
LAYERS = (FULL, SLIDING)


@pytest.fixture(autouse=True)
def _uncompiled_tile_counts(monkeypatch):
    """Rows of many shapes: a GPU would compile each, and stop at the limit."""
    monkeypatch.setattr(attention_module, "compiled_tile_counts", lambda: attention_module.tile_counts)


def config_of(causal: bool | None, block_size: int = 4, window: int = 6) -> DrafterConfig:
    """One full and one sliding-window layer."""
    return drafter_config(layer_types=LAYERS, sliding_window=window, is_causal=causal, block_size=block_size)


def literally_seen(row: Row, blocks: Blocks, window: int | None, causal: bool) -> Tensor:
    """[Q, S+Q], block by block, slot by slot, key by key."""
    size, context, anchors = blocks.block_size, len(row.input_ids), blocks.anchors_N.tolist()
    owner = row.documents.tolist()
    seen = torch.zeros(len(anchors) * size, context + len(anchors) * size, dtype=torch.bool)
    for b, anchor in enumerate(anchors):
        for slot in range(size):
            q_pos = anchor + slot
            for j in range(context):
                near = window is None or q_pos - j < window
                seen[b * size + slot, j] = owner[j] == owner[anchor] and j < anchor and near
            for other in range(size):
                near = window is None or slot - other < window
                key = context + b * size + other
                seen[b * size + slot, key] = near and (other <= slot or not causal)
    return seen


def causal_of(causal: bool | None, layer_type: str) -> bool:
    return {None: layer_type == SLIDING, True: True, False: False}[causal]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(documents, st.integers(0, 4), st.integers(2, 5), st.integers(0, 6), st.sampled_from(CAUSALITIES))
def test_the_mask_is_that_of_a_walk_over_every_query_and_key(masks, padding, block_size, wider, causal):
    row = supervised_row(masks, padding)
    config = config_of(causal, block_size, window=block_size + wider)
    blocks = all_blocks(row, block_size, spare=1)
    for layer_type in LAYERS:
        window = config.sliding_window if layer_type == SLIDING else None
        expected = literally_seen(row, blocks, window, causal_of(causal, layer_type))
        assert torch.equal(dense_mask(blocks, config, layer_type).cpu(), expected)
        # flex's block mask skips tiles: none that holds a seen key
        tiles = flex_mask(blocks, config, layer_type).to_dense()[0, 0].bool().cpu()
        q, k = expected.nonzero().T
        assert tiles[q // 128, k // 128].all()


def test_a_window_is_measured_from_the_slot_and_not_from_the_anchor():
    row = supervised_row([[True] * 12])
    blocks = make_blocks(row, torch.tensor([8]), 1, 4, MASK)
    seen = dense_mask(blocks, config_of(False, 4, window=5), SLIDING)[:, :12]
    assert [s.nonzero().flatten().tolist() for s in seen] == [[4, 5, 6, 7], [5, 6, 7], [6, 7], [7]]


def test_the_anchor_s_own_context_feature_is_not_seen():
    """The bonus token's target state does not exist when a block is drafted."""
    row = supervised_row([[True] * 3, [True] * 5])
    blocks = make_blocks(row, torch.tensor([3, 5]), 2, 2, MASK)
    seen = dense_mask(blocks, config_of(False, 2), FULL)[::2, :8]
    assert [s.nonzero().flatten().tolist() for s in seen] == [[], [3, 4]]


def test_padding_is_never_seen_and_no_query_is_left_without_a_key():
    for masks in LAYOUTS.values():
        blocks = all_blocks(supervised_row(masks, padding=4), 4, spare=2)
        for causal, layer_type in product(CAUSALITIES, LAYERS):
            seen = dense_mask(blocks, config_of(causal), layer_type)
            assert seen.any(dim=1).all()
            assert not seen[:, : len(blocks.context_documents_S)][:, blocks.context_documents_S < 0].any()


def drafted(
    drafter: Drafter, row: Row, blocks: Blocks, make: Callable[[Blocks, DrafterConfig], Attend]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Hidden states, gradient of the taps and of the weights, of random taps and embeddings."""
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(len(row.input_ids), 3 * 64, generator=generator).to(DEVICE).requires_grad_()
    x = torch.randn(blocks.valid_NB.numel(), 64, generator=generator).to(DEVICE)
    hidden = drafter(
        taps, blocks.context_positions_S, x, blocks.positions_NB.flatten(), make(blocks, drafter.config)
    )
    if not torch.is_grad_enabled():
        return hidden, taps, {}
    drafter.zero_grad()
    (hidden * torch.randn(hidden.shape, generator=generator).to(DEVICE)).sum().backward()
    assert taps.grad is not None
    return hidden.detach(), taps.grad, gradients(drafter)


@pytest.mark.parametrize("causal", CAUSALITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_apart_are_dense_attention_in_output_and_in_every_gradient(layout, causal):
    row = supervised_row(LAYOUTS[layout], padding=3)
    blocks = all_blocks(row, 4, spare=2)
    drafter = make_drafter(config_of(causal))
    dense, dense_taps, dense_grads = drafted(drafter, row, blocks, dense_attend)
    apart, apart_taps, apart_grads = drafted(drafter, row, blocks, documents_attend)
    assert_close(apart, dense, 1e-5)
    assert (apart_taps - dense_taps).abs().max() <= 1e-5 * max(1.0, float(dense_taps.abs().max()))
    for name, grad in dense_grads.items():
        assert (apart_grads[name] - grad).abs().max() <= 1e-5 * max(1.0, float(grad.abs().max())), name


def eager_flex(blocks: Blocks, config: DrafterConfig) -> Attend:
    """Flex with its graph captured as on a GPU, and run without a kernel."""
    return flex_attend(blocks, config, captured())


@functools.cache
def captured() -> Callable[..., Tensor]:
    return torch.compile(fused_only, fullgraph=True, dynamic=False, backend="eager")


@torch.no_grad()
@pytest.mark.parametrize("causal", CAUSALITIES)
@pytest.mark.parametrize("layout", ["holes", "one-token documents", "nothing supervised"])
def test_flex_is_dense_attention_on_full_and_sliding_layers(layout, causal):
    torch._dynamo.reset()
    captured.cache_clear()
    row = supervised_row(LAYOUTS[layout], padding=3)
    blocks = all_blocks(row, 4, spare=2)
    drafter = make_drafter(config_of(causal))
    dense, _, _ = drafted(drafter, row, blocks, dense_attend)
    assert_close(drafted(drafter, row, blocks, eager_flex)[0], dense, 1e-5)


@torch.no_grad()
def test_the_comparisons_tell_a_mask_that_lets_the_anchor_s_feature_or_another_document_in(monkeypatch):
    row = supervised_row(LAYOUTS["holes"], padding=3)
    blocks = all_blocks(row, 4)
    drafter = make_drafter(config_of(False))
    dense, _, _ = drafted(drafter, row, blocks, dense_attend)
    for leaky in (leak_anchor, leak_documents):
        monkeypatch.setattr(attention_module, "visibility", leaky(attention_module.visibility))
        leaked, _, _ = drafted(drafter, row, blocks, dense_attend)
        monkeypatch.undo()
        assert (leaked - dense).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="heads of 8 have no GPU kernel; tests/gpu has wider ones")
def test_the_compiled_kernel_is_dense_attention():
    """flex, compiled to machine code, with two layer types of one predicate."""
    row = supervised_row(LAYOUTS["holes"] + [[True] * 12], padding=3)
    blocks = all_blocks(row, 4, spare=2)
    drafter = make_drafter(config_of(None))
    dense, _, _ = drafted(drafter, row, blocks, dense_attend)
    fused, _, _ = drafted(drafter, row, blocks, lambda b, c: flex_attend(b, c, compiled_flex()))
    assert_close(fused, dense, 1e-5)


@pytest.mark.parametrize("causal", CAUSALITIES)
@pytest.mark.parametrize("layer_type", LAYERS)
@pytest.mark.parametrize(
    ("lengths", "anchors", "block"), [((300, 150, 40), 40, 8), ((60,), 9, 5), ((200,) * 3, 64, 16)]
)
def test_the_block_mask_is_torch_s_own_of_the_same_predicate(lengths, anchors, block, layer_type, causal):
    """Also where queries and keys fill no whole tile."""
    config = config_of(causal, block, window=70)
    row = random_row(lengths, sum(lengths) + 27)
    blocks = make_blocks(row, draw_anchors(row, anchors, (0, 0, 0)), anchors, block, MASK)
    ours = attention_module.flex_mask(blocks, config, layer_type)
    queries = blocks.valid_NB.numel()
    assert ours.mask_mod is not None
    theirs = create_block_mask(ours.mask_mod, None, None, queries, len(row.input_ids) + queries, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for part in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(vars(ours)[part], vars(theirs)[part]), part
    for number, index in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        for i, n in enumerate(vars(ours)[number][0, 0].tolist()):
            assert torch.equal(vars(ours)[index][0, 0, i, :n], vars(theirs)[index][0, 0, i, :n])


def test_more_shapes_than_torch_compiles_end_in_one_line_not_in_dense_attention():
    torch._dynamo.reset()
    once = torch.compile(fused_only, fullgraph=True, dynamic=False, backend=CompileCounter())
    config = config_of(None)
    limit = pytest.raises(UserError, match=r"^attention: torch compiled its limit.*--max-anchors")
    with torch.no_grad(), limit as e:
        for n in range(1, 12):
            row = random_row((40,), 48)
            blocks = make_blocks(row, draw_anchors(row, n, (0, 0, 0)), n, 4, MASK)
            q, k = torch.randn(6, 4 * n, 8), torch.randn(2, 48 + 4 * n, 8)
            with loud_fallbacks():
                flex_attend(blocks, config, once)(FULL, q, k[:, :48], k[:, :48], k[:, 48:], k[:, 48:])
    assert 8 <= n <= 10
    assert "\n" not in str(e.value)


@torch.no_grad()
def test_new_rows_anchors_and_masks_compile_nothing_new():
    """One graph for each layer type: a graph a row would end at the recompile limit."""
    torch._dynamo.reset()
    kernel, count = CompileCounter(), CompileCounter()
    attend_once = torch.compile(fused_only, fullgraph=True, dynamic=False, backend=kernel)
    count_once = torch.compile(tile_counts, fullgraph=True, dynamic=False, backend=count)
    config = config_of(None)
    for epoch in range(12):
        row = random_row((9, 14 - epoch, 1, 11), 48, seed=epoch, prompt=epoch % 3)
        blocks = make_blocks(row, draw_anchors(row, 8, (0, epoch, 0)), 8, 4, MASK)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_module, "tile_counts", count_once)
            attend = flex_attend(blocks, config, attend_once)
        for layer_type in LAYERS:
            q, k = torch.randn(6, 32, 8), torch.randn(2, 80, 8)
            out = attend(layer_type, q, k[:, :48], k[:, :48], k[:, 48:], k[:, 48:])
            expected = attention_module.sdpa(q, k, k, dense_mask(blocks, config, layer_type))
            assert_close(out, expected, 1e-5)
    assert kernel.frame_count == count.frame_count == 2


@pytest.mark.parametrize("attention", ["documents", "dense"])
@pytest.mark.parametrize("causal", CAUSALITIES)
@pytest.mark.parametrize("layout", ["nothing supervised", "never two in a row", "one-token documents"])
def test_unused_anchor_places_carry_no_weight_and_finite_gradients(layout, causal, attention):
    row = supervised_row(LAYOUTS[layout], padding=2)
    drafter = make_drafter(config_of(causal))
    blocks = all_blocks(row, 4, spare=5)
    torch.manual_seed(0)
    found = blocks.count
    head = Head(torch.randn(131, 64).to(DEVICE), None, 1.0, None)
    taps = torch.randn(len(row.input_ids), 3 * 64).to(DEVICE)
    x = torch.randn(blocks.valid_NB.numel(), 64).to(DEVICE)
    results = []
    for garbage in (0.0, 100.0):  # what stands in unused places makes no difference
        noisy = (
            x + garbage * torch.randn_like(x) * (torch.arange(len(x), device=DEVICE) >= found * 4)[:, None]
        )
        drafter.zero_grad()
        attend = make_attend(attention, blocks, drafter.config)
        hidden = drafter(taps, blocks.context_positions_S, noisy, blocks.positions_NB.flatten(), attend)
        loss = block_loss(hidden, blocks, head, SlotWeights(decay_weights(4, 2.0).to(DEVICE)))
        loss.total.backward()
        grads = gradients(drafter)
        assert all(g.isfinite().all() for g in grads.values())
        results.append((loss.total.detach(), loss.weight, grads))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    for name, grad in results[0][2].items():
        assert_close(results[1][2][name], grad, 1e-6)
        assert grad.any() == (found > 0), name
    assert (float(results[0][1]) == 0) == (found == 0)


# --- nothing of the future, nothing of another document, through the real target and the drafter


@functools.cache
def target_of(family: str) -> Target:
    return Target(tiny_target(family).to(DEVICE), (0, 2, 4))


def leak_anchor(visibility: Callable[..., Callable[[Tensor, Tensor], Tensor]]):
    """Context up to and with the anchor's own feature."""

    def leaky(blocks: Blocks, window: int | None, causal: bool):
        seen, anchors, size = visibility(blocks, window, causal), blocks.anchors_N, blocks.block_size
        return lambda q, k: seen(q, k) | (k == anchors[q // size])

    return leaky


def leak_future(visibility: Callable[..., Callable[[Tensor, Tensor], Tensor]]):
    """The feature behind the anchor too."""

    def leaky(blocks: Blocks, window: int | None, causal: bool):
        seen, anchors, size = visibility(blocks, window, causal), blocks.anchors_N, blocks.block_size
        return lambda q, k: seen(q, k) | (k == anchors[q // size] + 1)

    return leaky


def leak_documents(visibility: Callable[..., Callable[[Tensor, Tensor], Tensor]]):
    """Every earlier token of the row."""

    def leaky(blocks: Blocks, window: int | None, causal: bool):
        seen, anchors, size = visibility(blocks, window, causal), blocks.anchors_N, blocks.block_size
        return lambda q, k: seen(q, k) | (k < anchors[q // size])

    return leaky


PERTURBED = supervised_row([[False] + [True] * 7, [True] * 6, [True], [True] * 5], padding=2)


def logits_of(target: Target, drafter: Drafter, row: Row, attention: str) -> Tensor:
    """[N, B, V] of every block of the row, as the loop makes them."""
    caught = []
    handle = drafter.register_forward_hook(lambda module, args, out: caught.append(out.detach()))
    run = run_of(target, drafter, attention, max_anchors=15)
    _, blocks = loop.row_loss(run, row, run.taps, (0, 0, 0), noise=0.0)
    handle.remove()
    assert blocks.count == 15, "every anchor of the row has its block"
    return target.head.logits(caught[0]).unflatten(0, (15, -1))


def influence(target: Target, drafter: Drafter, attention: str) -> tuple[Tensor, Tensor]:
    """[S, N]: whether changing the token at t changes any logit of block n; and the anchors [N]."""
    before = logits_of(target, drafter, PERTURBED, attention)
    anchors = draw_anchors(PERTURBED, 15, (0, 0, 0))
    changed = torch.zeros(len(PERTURBED.input_ids), 15, dtype=torch.bool)
    for t in range(PERTURBED.spans()[-1][1]):
        kept = int(PERTURBED.input_ids[t])
        PERTURBED.input_ids[t] = (kept + 50) % 127 + 3
        after = logits_of(target, drafter, PERTURBED, attention)
        PERTURBED.input_ids[t] = kept
        changed[t] = ((after - before).abs().amax(dim=(1, 2)) > 1e-6 * before.abs().max()).cpu()
    return changed, anchors


def expected_influence(anchors: Tensor) -> Tensor:
    at, owner = torch.arange(len(PERTURBED.input_ids))[:, None], PERTURBED.documents
    return (owner[:, None] == owner[anchors]) & (at <= anchors)


@pytest.mark.parametrize(
    ("family", "isolation", "attention", "causal"),
    [
        ("qwen3", "packed", "documents", False),
        ("qwen3", "packed", "dense", None),
        ("qwen3", "unpacked", "documents", None),
        ("hybrid", "unpacked", "documents", False),
        ("hybrid", "unpacked", "dense", True),
    ],
)
def test_a_block_s_logits_hang_on_its_document_up_to_the_anchor_and_on_no_other_token(
    family, isolation, attention, causal, monkeypatch
):
    """Every token of the row is changed in turn, every block of the row looked at."""
    target = target_of(family)
    monkeypatch.setattr(target, "isolation", isolation)
    drafter = make_drafter(config_of(causal, window=8))
    changed, anchors = influence(target, drafter, attention)
    assert torch.equal(changed, expected_influence(anchors))


@pytest.mark.parametrize("leak", [leak_future, leak_documents])
def test_the_perturbation_tells_a_leak(leak, monkeypatch):
    monkeypatch.setattr(attention_module, "visibility", leak(attention_module.visibility))
    changed, anchors = influence(target_of("qwen3"), make_drafter(config_of(False)), "dense")
    assert (changed & ~expected_influence(anchors)).any()


def test_the_perturbation_tells_a_target_that_runs_its_documents_together(monkeypatch):
    target = target_of("hybrid")
    monkeypatch.setattr(target, "isolation", "packed")  # a mask does not isolate linear attention
    changed, anchors = influence(target, make_drafter(config_of(False)), "documents")
    assert (changed & ~expected_influence(anchors)).any()
