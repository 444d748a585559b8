"""What only a CUDA device shows: fused attention, its memory, a whole run, targets in bf16."""

import json
from dataclasses import replace

import pytest
import torch

from slipstream.cli import main
from slipstream.config import UserError
from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.models.selfcheck import self_check
from slipstream.models.target import Head, Target, load_target
from slipstream.training.attention import (
    dense_attend,
    flex_attend,
    loud_fallbacks,
    make_attend,
)
from slipstream.training.blocks import decay_weights, draw_anchors, make_blocks
from slipstream.training.loss import SlotWeights, block_loss, ce_and_slope
from slipstream.training.metrics import SlotMeter
from slipstream.training.step import make_optimizer, row_loss, update
from slipstream.training.warmup import graphs_compiled
from tests.tiny import random_row, tiny_target
from tests.training import compiled_flex, run_of

triton = pytest.importorskip("triton")
from slipstream.training.loss_kernel import ce_and_slope_kernel  # noqa: E402

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


GEOMETRY = DrafterConfig(
    hidden_size=256,
    vocab_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    block_size=8,
    mask_token_id=511,
    target_layer_ids=(0, 2),
    num_target_layers=6,
    rope_theta=1e4,
)
WINDOW = replace(GEOMETRY, layer_types=(), sliding_window=64)
CAUSAL = replace(GEOMETRY, is_causal=True)


@pytest.mark.parametrize("config", [GEOMETRY, WINDOW, CAUSAL], ids=["full", "window", "causal"])
def test_fused_attention_equals_the_dense_oracle_forward_and_backward(config):
    row = random_row((300, 150, 40), 512)
    blocks = make_blocks(row, draw_anchors(row, 64, (0, 0, 0)), 64, 8, 511).to(CUDA)
    torch.manual_seed(0)
    drafter = Drafter(config).to(CUDA)
    taps = torch.randn(512, 512, device=CUDA)
    x = torch.randn(64 * 8, 256, device=CUDA)
    grads = []
    for attend in (flex_attend(blocks, config, compiled_flex()), dense_attend(blocks, config)):
        drafter.zero_grad()
        out = drafter(taps, blocks.context_positions_S, x, blocks.positions_NB.flatten(), attend)
        (out * torch.arange(256, device=CUDA)).sum().backward()
        grads.append([out.detach(), *(p.grad.clone() for p in drafter.parameters())])
    for fused, dense in zip(*grads, strict=True):
        assert (fused - dense).norm() <= 5e-3 * dense.norm()


@pytest.mark.parametrize(
    ("config", "anchors"),
    [(GEOMETRY, 64), (WINDOW, 64), (CAUSAL, 64), (replace(GEOMETRY, block_size=10), 25)],
    ids=["full", "window", "causal", "no whole tile"],
)
def test_compiled_layers_and_loss_equal_the_dense_oracle_in_fp32(config, anchors):
    """The whole path of a GPU's step against the predicate's dense mask and the plain formulas: 1e-5."""
    row = random_row((300, 150, 40), 512)
    size = config.block_size
    blocks = make_blocks(row, draw_anchors(row, anchors, (0, 0, 0)), anchors, size, 511).to(CUDA)
    torch.manual_seed(0)
    drafter = Drafter(config).to(CUDA)
    head = Head(torch.randn(512, 256, device=CUDA) / 16, None, 1.0, None)
    weights = SlotWeights(decay_weights(size, 4.0).to(CUDA))
    taps, x = torch.randn(512, 512, device=CUDA), torch.randn(anchors * size, 256, device=CUDA)
    results = []
    for compiled in (False, True):
        drafter.zero_grad()
        if compiled:
            drafter.use_gpu(torch.float32, compiled=True)
        attend = make_attend("flex", blocks, config) if compiled else dense_attend(blocks, config)
        hidden = drafter(taps, blocks.context_positions_S, x, blocks.positions_NB.flatten(), attend)
        loss = block_loss(hidden, blocks, head, weights, compiled)
        loss.total.backward()
        results.append((loss, [p.grad.clone() for p in drafter.parameters()]))
    (plain, plain_grads), (fused, fused_grads) = results
    assert float(fused.total) == pytest.approx(float(plain.total), rel=1e-5)
    assert (fused.ce - plain.ce).abs().max() <= 1e-4
    for ours, oracle in zip(fused_grads, plain_grads, strict=True):
        assert (ours - oracle).norm() <= 1e-4 * oracle.norm()


def test_masters_get_the_gradients_of_plain_layers_through_bf16_copies():
    row = random_row((300, 150, 40), 512)
    blocks = make_blocks(row, draw_anchors(row, 64, (0, 0, 0)), 64, 8, 511).to(CUDA)
    torch.manual_seed(0)
    drafter = Drafter(GEOMETRY).to(CUDA)
    taps, x = torch.randn(512, 512, device=CUDA), torch.randn(64 * 8, 256, device=CUDA)
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter.zero_grad()
        if dtype == torch.bfloat16:
            drafter.use_gpu(dtype, compiled=True)
        attend = make_attend("flex", blocks, GEOMETRY) if grads else dense_attend(blocks, GEOMETRY)
        places = blocks.positions_NB.flatten()
        hidden = drafter(taps.to(dtype), blocks.context_positions_S, x.to(dtype), places, attend)
        (hidden.float() * torch.arange(256, device=CUDA)).sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in drafter.parameters())
        grads.append([p.grad.clone() for p in drafter.parameters()])
    for ours, oracle in zip(*reversed(grads), strict=True):
        assert (ours - oracle).norm() <= 3e-2 * oracle.norm()


@pytest.mark.parametrize(
    ("rows", "vocab", "dtype", "multiplier", "cap"),
    [
        (37, 1000, torch.float32, 1.0, None),
        (37, 1003, torch.float32, 0.3, 5.0),
        (64, 49152, torch.float32, 1.0, None),
        (300, 248320, torch.bfloat16, 1.0, None),
        (300, 248320, torch.bfloat16, 2.0, 30.0),
    ],
)
def test_the_loss_kernel_is_the_formula(rows, vocab, dtype, multiplier, cap):
    """At the true head too; bf16 slopes are rounded once, 2⁻⁹ of their size."""
    torch.manual_seed(0)
    raw = (3 * torch.randn(rows, vocab, device=CUDA)).to(dtype)
    labels = torch.randint(vocab, (rows,), device=CUDA)
    labels[::3] = raw[::3].argmax(-1)
    head = Head(torch.empty(vocab, 1, device=CUDA), None, multiplier, cap)
    formula = raw.float().clone()
    ce, correct = ce_and_slope(formula, labels, head)
    kernel = raw.clone()
    kernel_ce, kernel_correct = ce_and_slope_kernel(kernel, labels, head)
    assert (kernel_ce - ce).abs().max() <= 1e-5 * ce.abs().max()
    assert 0 < correct.sum() < rows
    assert torch.equal(kernel_correct, correct)
    assert (kernel.float() - formula).norm() <= (1e-5 if dtype == torch.float32 else 2**-9) * formula.norm()


def test_a_step_and_its_update_never_wait_for_the_device():
    """The loop's own calls: taps of a fused target, noise, loss, sums of the metrics, update."""
    model = tiny_target("qwen3", hidden_size=256, vocab_size=512, dtype=torch.bfloat16).to(CUDA)
    target = Target(model, (0, 2))
    assert target.isolation == "fused"
    drafter = Drafter(WINDOW).to(CUDA)
    drafter.use_gpu(torch.bfloat16, compiled=True)
    weights = SlotWeights(decay_weights(8, 4.0).to(CUDA))
    run = run_of(target, drafter, "flex", weights, max_anchors=64, noise=0.05)
    run = replace(run, device=CUDA, dtype=torch.bfloat16)
    optimizer, meter = make_optimizer(drafter, run.config, CUDA), SlotMeter(8, CUDA)

    def step(seed: int) -> None:
        row = random_row((300 - 20 * seed, 150, 40), 512, vocab_size=511, seed=seed)
        loss, blocks = row_loss(run, row, run.taps, (0, 0, seed), run.config.noise, check_taps=False)
        loss.total.backward()
        meter.add(loss, blocks, int(row.supervised.sum()))
        update(drafter, optimizer, loss.weight, clip=1.0, lr=1e-3)

    step(0)
    step(1)
    graphs = graphs_compiled()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(2, 10):
            step(seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert graphs_compiled() == graphs, "other rows compile nothing"
    assert meter.read()["blocks"] > 0


def test_fused_attention_does_not_hold_a_matrix_of_queries_by_keys():
    row = random_row((2048,) * 4, 8192)
    blocks = make_blocks(row, draw_anchors(row, 1024, (0, 0, 0)), 1024, 8, 511).to(CUDA)
    attend = flex_attend(blocks, GEOMETRY, compiled_flex())
    q = torch.randn(4, 8192, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    kv = [torch.randn(2, 8192, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend("full_attention", q, *kv).sum().backward()
    dense_bytes = 4 * 8192 * 16384 * 2  # one bf16 score a head, query and key
    assert torch.cuda.max_memory_allocated() - before < dense_bytes / 4


def test_uncompiled_flex_is_refused_not_run_dense():
    row = random_row((300,), 512)
    blocks = make_blocks(row, draw_anchors(row, 16, (0, 0, 0)), 16, 8, 511).to(CUDA)
    attend = flex_attend(blocks, GEOMETRY, compiled_flex())
    q = torch.randn(4, 128, 64, device=CUDA)
    ctx, blk = torch.randn(2, 512, 64, device=CUDA), torch.randn(2, 128, 64, device=CUDA)
    with torch.compiler.set_stance("force_eager"), pytest.raises(UserError, match="would run dense"):
        attend("full_attention", q, ctx, ctx, blk, blk)


def test_nine_shapes_end_in_one_line_not_in_dense_attention():
    torch._dynamo.reset()
    drafter = Drafter(GEOMETRY).to(CUDA)
    drafter.use_gpu(torch.bfloat16, compiled=True)
    row = random_row((300,), 512)
    taps = torch.randn(512, 512, device=CUDA, dtype=torch.bfloat16)

    def draft(anchors: int) -> None:
        blocks = make_blocks(row, draw_anchors(row, anchors, (0, 0, 0)), anchors, 8, 511).to(CUDA)
        x = torch.randn(8 * anchors, 256, device=CUDA, dtype=torch.bfloat16)
        with loud_fallbacks():
            attend = make_attend("flex", blocks, GEOMETRY)
            drafter(taps, blocks.context_positions_S, x, blocks.positions_NB.flatten(), attend)

    done = []
    with pytest.raises(UserError, match="its limit of shapes"):
        done.extend(draft(n) or n for n in range(8, 20))
    assert len(done) < 12
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["qwen3", "llama", "hybrid", "gemma3"])
def test_the_target_passes_its_self_check_in_bf16(family, tmp_path):
    path = tiny_target(family, tmp_path / family)
    target = load_target(str(path), None, 2, CUDA, torch.bfloat16)
    for check in self_check(target, random_row((100, 60), 192)):
        assert check.ok, f"{check.name}: {check.detail}"


def test_train_and_decode_end_to_end(world, tmp_path):
    run = tmp_path / "run"
    flags = ("--device", "cuda", "--dtype", "bfloat16", "--max-steps", "12", "--decode-prompts", "2")
    assert main(world.train(run, *flags)) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert max(line["recompiled"] for line in lines if line["kind"] == "train") == 0
    assert all(0 < line["mfu"] < 1 for line in lines if line["kind"] == "train")
    assert (run / "export" / "config.json").exists()
