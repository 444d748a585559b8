"""What only a CUDA device shows: fused attention, its memory, a whole run, targets in bf16."""

import json
from dataclasses import replace

import pytest
import torch

from slipstream.cli import main
from slipstream.config import UserError
from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.models.selfcheck import self_check
from slipstream.models.target import load_target
from slipstream.training.attention import compiled_flex_attention, dense_attend, flex_attend
from slipstream.training.blocks import draw_anchors, make_blocks
from tests.tiny import random_row, tiny_target

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
    for attend in (flex_attend(blocks, config, compiled_flex_attention()), dense_attend(blocks, config)):
        drafter.zero_grad()
        out = drafter(taps, blocks.context_positions_S, x, blocks.positions_NB.flatten(), attend)
        (out * torch.arange(256, device=CUDA)).sum().backward()
        grads.append([out.detach(), *(p.grad.clone() for p in drafter.parameters())])
    for fused, dense in zip(*grads, strict=True):
        assert (fused - dense).norm() <= 5e-3 * dense.norm()


def test_fused_attention_does_not_hold_a_matrix_of_queries_by_keys():
    row = random_row((2048,) * 4, 8192)
    blocks = make_blocks(row, draw_anchors(row, 1024, (0, 0, 0)), 1024, 8, 511).to(CUDA)
    attend = flex_attend(blocks, GEOMETRY, compiled_flex_attention())
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
    attend = flex_attend(blocks, GEOMETRY, compiled_flex_attention())
    q = torch.randn(4, 128, 64, device=CUDA)
    ctx, blk = torch.randn(2, 512, 64, device=CUDA), torch.randn(2, 128, 64, device=CUDA)
    with torch.compiler.set_stance("force_eager"), pytest.raises(UserError, match="would run dense"):
        attend("full_attention", q, ctx, ctx, blk, blk)


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
    assert (run / "decode.json").exists()
