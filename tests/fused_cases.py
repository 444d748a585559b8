"""Inputs that are hard on what lies between matrix products, and how near two ways of it must be.

A case takes a function of fused.py, or another way of it, and gives what it made of the same random inputs.
Rows 0 to 4 of the row-wise cases hold an infinity, a NaN, zeros, very small and large values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.models.fp8 import E4M3

Tensors = Sequence[Tensor | None]
STEP = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, E4M3: 2.0**-3}
"""Of neighbouring numbers; in fp32, of a sum over a row."""


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def hard(x_SI: Tensor) -> Tensor:
    x_SI[0, 1], x_SI[1, 2] = torch.inf, torch.nan
    x_SI[2] = 0.0
    x_SI[3] *= 2.0**-60
    x_SI[4] *= 100.0
    return x_SI


def add_norm(
    function: Callable[..., Tensors], dtype: torch.dtype, device: torch.device, width: int, delta: bool,
    plain: bool, fp8: bool,
) -> Tensors:  # fmt: skip
    """The residual as it is left, and the function's outputs."""
    residual = hard(random(7, width, dtype=dtype, device=device))
    added = random(7, width, dtype=dtype, device=device, seed=1) if delta else None
    weight = random(width, dtype=torch.float32, device=device, seed=2)
    return residual, *function(residual, added, weight, 1e-6, plain, fp8)


def swiglu(
    function: Callable[..., Tensors], dtype: torch.dtype, device: torch.device, width: int, fp8: bool
) -> Tensors:
    gate_up = hard(3 * random(7, 2 * width, dtype=dtype, device=device))
    gate_up[5, :width] = -200.0  # e²⁰⁰ is more than fp32 holds
    return function(gate_up, fp8)


def gated_norm(
    function: Callable[..., Tensors], dtype: torch.dtype, device: torch.device, heads: int, head_dim: int,
    fp8: bool,
) -> Tensors:  # fmt: skip
    """z is a slice of a wider matrix."""
    size = heads * head_dim
    out = hard(random(7, size, dtype=dtype, device=device)).unflatten(1, (heads, head_dim))
    z = random(7, size + 48, dtype=dtype, device=device, seed=1)[:, 16 : 16 + size]
    weight = random(head_dim, dtype=torch.float32, device=device, seed=2)
    return function(out, z.unflatten(1, (heads, head_dim)), weight, 1e-6, fp8)


def delta_inputs(
    function: Callable[..., Tensors], dtype: torch.dtype, device: torch.device, lengths: tuple[int, ...],
    padding: int, key_heads: int, heads: int, head_dim: int, width: int = 4,
) -> Tensors:  # fmt: skip
    """Documents of these lengths, one of them beginning before the row, then padding at position 0."""
    columns = (2 * key_heads + heads) * head_dim
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(padding, dtype=torch.int64)])
    positions[: lengths[0]] += 2
    merged = random(len(positions), columns + 32 + 2 * heads, dtype=dtype, device=device)
    merged[len(positions) // 2, 1] = torch.nan  # seen by its document's next tokens only
    merged[:, -2 * heads :] *= 20
    return function(
        merged[:, :columns],
        merged[:, -2 * heads :],
        positions.to(device),
        random(width, columns, dtype=torch.float32, device=device, seed=1),
        -16 * random(heads, dtype=torch.float32, device=device, seed=2).abs(),
        random(heads, dtype=torch.float32, device=device, seed=3),
        key_heads,
        head_dim,
    )


def assert_near(ours: Tensors, theirs: Tensors, equal: float = 0.98) -> None:
    """Nowhere further apart than neighbours, of 8 or 16 bits nearly all the same, NaN where it is NaN."""
    assert len(ours) == len(theirs)
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine is None) == (other is None), i
        if mine is None or other is None:
            continue
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert mine.is_contiguous()
        step, a, b = STEP[mine.dtype], mine.double(), other.double()
        same = (a == b) | (a.isnan() & b.isnan())
        if mine.dtype != torch.float32:
            assert same.float().mean() >= equal, f"{i}: {float(same.float().mean()):.1%} are equal"
        floor = 2.0**-9 if mine.dtype == E4M3 else 1e-6  # sums of values near 1 may come out near 0
        apart = ((a - b).abs() > floor + step * b.abs()) & ~same | (a.isnan() != b.isnan())
        assert not apart.any(), f"{i}: {a[apart][:4]} and {b[apart][:4]}"
