"""Choices of tiles: attention's and the loss kernel's, timed on this GPU.

    python -m benchmarks.kernels

prints for a drafter's layer at 8192 context tokens in four documents, 512 blocks of 16, 32/8 heads of 128:
milliseconds of fused attention forward, and forward and backward, with torch's own tiles and others
(`SM_90` of training/attention.py is made of the best); and for 1650 rows of 248320 logits those of the loss
kernel by block and warps. What does not compile on a GPU is said and passed over.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.workload import SEED, Shape, equal_documents
from slipstream.models.drafter import FULL
from slipstream.models.target import Head
from slipstream.training.attention import SM_90, flex_mask
from slipstream.training.blocks import draw_anchors, make_blocks
from slipstream.training.flops import times_ms
from slipstream.training.loss_kernel import ce_and_slope_kernel

CUDA = torch.device("cuda")


def forward(m: int, n: int, warps: int, stages: int) -> dict[str, int]:
    return {
        "fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_warps": warps, "fwd_num_stages": stages,
    }  # fmt: skip


def backward(m1: int, n1: int, m2: int, n2: int, warps: int, stages: int) -> dict[str, int]:
    return {
        "bwd_BLOCK_M1": m1, "bwd_BLOCK_N1": n1, "bwd_BLOCK_M2": m2, "bwd_BLOCK_N2": n2,
        "bwd_num_warps": warps, "bwd_num_stages": stages,
    }  # fmt: skip


TILES: dict[str, Any] = {
    "torch's own": {},
    "SM_90": SM_90,
    "forward 64 × 64, 4 warps, 3 stages": forward(64, 64, 4, 3),
    "forward 128 × 64, 8 warps, 3 stages": forward(128, 64, 8, 3),
    "forward 128 × 128, 8 warps, 2 stages": forward(128, 128, 8, 2),
    "backward 64 × 64, 4 warps, 2 stages": backward(64, 64, 64, 64, 4, 2),
    "backward 64 × 64, 4 warps, 3 stages": backward(64, 64, 64, 64, 4, 3),
    "backward 64 × 128, 8 warps, 3 stages": backward(64, 128, 128, 64, 8, 3),
    "backward 128 × 128, 8 warps, 2 stages": backward(128, 128, 128, 128, 8, 2),
}


def median(call: Callable[[], object]) -> float:
    times_ms(call, 3, CUDA)
    return statistics.median(times_ms(call, 12, CUDA))


def attention() -> None:
    shape = Shape()
    config = shape.geometry()
    row = equal_documents(shape.tokens, shape.documents, shape.vocab)
    anchors = draw_anchors(row, shape.anchors, (SEED, 0, 0))
    mask = flex_mask(make_blocks(row, anchors, shape.anchors, shape.block_size, 0).to(CUDA), config, FULL)
    queries = shape.anchors * shape.block_size

    def random(heads: int, rows: int) -> Tensor:
        made = torch.randn(1, heads, rows, shape.head_dim, device=CUDA, dtype=torch.bfloat16)
        return made.requires_grad_()

    q, k, v = random(shape.heads, queries), *(random(shape.kv_heads, shape.tokens + queries) for _ in "kv")
    slope = torch.randn_like(q)
    for name, options in TILES.items():
        torch._dynamo.reset()

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, options: Any = options) -> Tensor:
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
            assert isinstance(out, Tensor)
            return out

        compiled = torch.compile(attend, fullgraph=True, dynamic=False)

        def both(compiled: Callable[..., Tensor] = compiled) -> None:
            q.grad = k.grad = v.grad = None
            compiled(q, k, v, mask).backward(slope)

        try:
            with torch.no_grad():
                once = median(lambda compiled=compiled: compiled(q, k, v, mask))
            print(
                f"attention, {name:<40} {once:7.3f} ms forward {median(both):7.3f} and backward", flush=True
            )
        except RuntimeError as e:  # of a tile that asks for too much shared memory
            print(f"attention, {name:<40} {str(e).splitlines()[-1][:90]}", flush=True)


def loss() -> None:
    vocab = Shape().vocab
    raw = (3 * torch.randn(1650, vocab, device=CUDA)).bfloat16()
    labels, head = torch.randint(vocab, (1650,), device=CUDA), Head(raw[:1], None, 1.0, None)
    choices = ((1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (8192, 16))
    for block, warps in choices:
        took = median(partial(ce_and_slope_kernel, raw, labels, head, block, warps))
        print(f"loss, block {block}, {warps} warps {took:7.3f} ms", flush=True)


if __name__ == "__main__":
    attention()
    loss()
