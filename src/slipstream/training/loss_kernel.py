"""The GPU's way between the two products of the head: cross-entropy and its slope in one Triton kernel.

The formula, and the oracle of this kernel, is `ce_and_slope` in training/loss.py. One program reads a row of
the vocabulary twice and writes it once; logits become slopes in place. Imported only where CUDA is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.target import Head

BLOCK, WARPS = 2048, 8
"""The fastest on an H200 (benchmarks/kernels.py: 0.85 ms for 1650 rows of 248320; 4096 and 8: 1.16)."""
NEVER = tl.constexpr(-1.0e30)
"""A logit that weighs nothing; finite, so that a difference of two of them is no NaN."""


def ce_and_slope_kernel(
    raw_MV: Tensor, labels_M: Tensor, head: Head, block: int = BLOCK, warps: int = WARPS
) -> tuple[Tensor, Tensor]:
    """As `ce_and_slope`; scale and cap are computed in fp32 here, in the dtype of `raw_MV` there."""
    rows, vocab = raw_MV.shape
    assert raw_MV.is_contiguous()
    assert labels_M.is_contiguous()
    ce = torch.empty(rows, dtype=torch.float32, device=raw_MV.device)
    correct = torch.empty(rows, dtype=torch.bool, device=raw_MV.device)
    cap = head.softcap or 0.0
    _ce_and_slope[(rows,)](
        raw_MV, labels_M, ce, correct, vocab, head.multiplier, cap, cap > 0, block,
        num_warps=warps,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return ce, correct


@triton.jit
def _scaled(raw, multiplier, cap, CAPPED: tl.constexpr):
    x = raw.to(tl.float32) * multiplier
    if CAPPED:
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # cap·tanh(x/cap)
    return x


@triton.jit
def _ce_and_slope(
    raw, labels, ce, correct, vocab, multiplier, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    raw += row * vocab
    label = tl.load(labels + row)
    x_label = _scaled(tl.load(raw + label), multiplier, cap, CAPPED)

    # One running maximum and sum a lane, put together after the row: no exchange between threads on the way.
    top = tl.full((BLOCK,), NEVER, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    beaten = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _scaled(tl.load(raw + at, mask=at < vocab, other=0.0), multiplier, cap, CAPPED)
        x = tl.where(at < vocab, x, NEVER)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        # argmax is the label unless another is above it, or equal and before it
        beaten |= ((x > x_label) | ((x == x_label) & (at < label))).to(tl.int32)
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(ce + row, lse - x_label)
    tl.store(correct + row, tl.max(beaten, 0) == 0)

    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _scaled(tl.load(raw + at, mask=at < vocab, other=0.0), multiplier, cap, CAPPED)
        slope = (tl.exp(x - lse) - (at == label).to(tl.float32)) * multiplier
        if CAPPED:
            slope *= 1 - (x / cap) * (x / cap)
        tl.store(raw + at, slope.to(raw.dtype.element_ty), mask=at < vocab)
