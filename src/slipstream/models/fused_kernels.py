"""The GPU's way of what is dear in fused.py: Triton kernels that read a row once and hold it in registers.

Formulas, signatures and results are those of fused.py, the CPU's way and the oracle. A compiler makes its
functions as quick where nothing is reduced over a row; for a norm or an FP8 scale it reads the row twice.
trunk.py takes these kernels where `fits_row`, `fits_heads` and `fits_delta` say so. Imported only where CUDA
is used. Nothing is tuned at run time: sizes of tiles are the constants below.

A row is two pieces, both powers of two: the largest one below its width, and what covers the rest. Thus
17408 = 16384 + 1024, 5120 = 4096 + 1024 and 48 heads = 32 + 16 leave no lane idle.

Shapes as in fused.py. Offsets of rows are int64, within a row int32.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.fp8 import E4M3, E4M3_MAX, SMALLEST
from slipstream.models.fused import L2_EPS, Operand

WIDEST = 2**15
"""Elements of a row that 16 warps hold in registers."""
TOKENS = 32
"""Of a program of the convolution: 3 more are read for those before it."""

MAX8, LEAST, EPS = tl.constexpr(E4M3_MAX), tl.constexpr(SMALLEST), tl.constexpr(L2_EPS)
LOG2_E = tl.constexpr(math.log2(math.e))


def fits_row(width: int) -> bool:
    """Whether `add_norm` (a row of H) or `swiglu` (a row of F) takes rows of this width."""
    return 2 <= width <= WIDEST


def fits_heads(heads: int, head_dim: int) -> bool:
    """Whether `gated_norm` takes such heads."""
    return heads >= 2 and head_dim == _power_of_2(head_dim) and fits_row(heads * head_dim)


def fits_delta(key_dim: int, value_dim: int) -> bool:
    """Whether `delta_inputs` takes such heads: of one width, which is a tile's."""
    return key_dim == value_dim == _power_of_2(key_dim) and 16 <= key_dim <= 256


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def pieces(width: int) -> tuple[int, int]:
    """Two powers of two, the first below `width`, that together cover it."""
    main = _power_of_2(width) // 2
    return main, _power_of_2(width - main)


def warps(elements: int) -> int:
    """For a row held in registers, of a power of two: 32 elements a thread, 64 where 16 warps are too few."""
    return min(16, max(4, elements // 1024))


def _outputs(like: Tensor, width: int, plain: bool, fp8: bool) -> Operand:
    rows, device = len(like), like.device
    return Operand(
        torch.empty(rows, width, dtype=like.dtype, device=device) if plain else None,
        torch.empty(rows, width, dtype=E4M3, device=device) if fp8 else None,
        torch.empty(rows, dtype=torch.float32, device=device) if fp8 else None,
    )


def add_norm(
    residual_SH: Tensor, delta_SH: Tensor | None, weight_H: Tensor, eps: float, plain: bool, fp8: bool
) -> Operand:
    """As `fused.add_norm`."""
    assert residual_SH.is_contiguous()
    assert delta_SH is None or (delta_SH.is_contiguous() and delta_SH.shape == residual_SH.shape)
    rows, width = residual_SH.shape
    out = _outputs(residual_SH, width, plain, fp8)
    main, tail = pieces(width)
    _add_norm[(rows,)](
        residual_SH, delta_SH, weight_H, *out, eps, width, main, tail,
        num_warps=warps(2 * main),  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return out


def swiglu(gate_up_S2F: Tensor, fp8: bool) -> Operand:
    """As `fused.swiglu`."""
    assert gate_up_S2F.is_contiguous()
    rows, width = gate_up_S2F.shape[0], gate_up_S2F.shape[1] // 2
    out = _outputs(gate_up_S2F, width, not fp8, fp8)
    main, tail = pieces(width)
    _swiglu[(rows,)](
        gate_up_S2F, *out, width, main, tail,
        num_warps=warps(2 * main),  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return out


def gated_norm(out_SAD: Tensor, z_SAD: Tensor, weight_D: Tensor, eps: float, fp8: bool) -> Operand:
    """As `fused.gated_norm`; `z_SAD` may be columns of a wider matrix."""
    rows, heads, head_dim = out_SAD.shape
    assert out_SAD.is_contiguous()
    assert z_SAD.stride()[1:] == (head_dim, 1)
    out = _outputs(out_SAD, heads * head_dim, not fp8, fp8)
    main, tail = pieces(heads)
    _gated_norm[(rows,)](
        out_SAD, z_SAD, weight_D, *out, z_SAD.stride(0), eps, heads, head_dim, main, tail,
        num_warps=warps(2 * main * head_dim),  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return out


def delta_inputs(
    mixed_SC: Tensor,
    gates_S2A: Tensor,
    positions_S: Tensor,
    conv_WC: Tensor,
    decay_A: Tensor,
    dt_bias_A: Tensor,
    key_heads: int,
    key_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `fused.delta_inputs`; `mixed_SC` and `gates_S2A` may be columns of a wider matrix."""
    tokens, value_heads = len(mixed_SC), len(decay_A)
    heads = 2 * key_heads + value_heads
    assert mixed_SC.shape[1] == heads * key_dim
    assert mixed_SC.stride(1) == gates_S2A.stride(1) == 1
    assert conv_WC.is_contiguous()
    mixed = mixed_SC.new_empty(tokens * heads * key_dim)
    q, k, v = (
        part.view(tokens, -1, key_dim)
        for part in mixed.split([tokens * n * key_dim for n in (key_heads, key_heads, value_heads)])
    )
    g, beta = (torch.empty(tokens, value_heads, dtype=torch.float32, device=mixed.device) for _ in range(2))
    _delta_inputs[(heads + 1, triton.cdiv(tokens, TOKENS))](
        mixed_SC, gates_S2A, positions_S, conv_WC, decay_A, dt_bias_A, mixed, g, beta,
        tokens, mixed_SC.stride(0), gates_S2A.stride(0),
        key_heads, value_heads, _power_of_2(value_heads), key_dim, len(conv_WC), TOKENS,
        num_warps=8,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return q, k, v, g, beta


@triton.jit
def _lanes(first, N: tl.constexpr):
    """`N` places of a row, 8 side by side a thread: 16 bytes in bf16. As many for 16 bytes in FP8 would leave
    gaps between the threads' loads.
    """
    return first + tl.max_contiguous(tl.arange(0, N), 8)


@triton.jit
def _silu(x):
    """x / (1 + e⁻ˣ); the square of a reciprocal root is as exact as a division and takes fewer steps."""
    root = tl.rsqrt(1 + tl.exp2(x * -LOG2_E))
    return x * (root * root)


@triton.jit
def _softplus(x):
    """log(1 + e) of e = eˣ, exact where e is small too: log(u) · e / (u − 1) for u = 1 + e as rounded."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1 + e
    log1p = tl.where(u == 1, e, tl.log(u) * (e / tl.where(u == 1, 1.0, u - 1)))
    return tl.where(x > 20, x, log1p)


@triton.jit
def _magnitude(y):
    """The largest |y|, as the bits of a float: ordered as its value is, and a NaN is above them all."""
    return tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _store(y, at, inside, plain, rows8, inverse):
    if plain is not None:
        tl.store(plain + at, y.to(plain.dtype.element_ty), mask=inside)
    if rows8 is not None:
        tl.store(rows8 + at, (y * inverse).to(rows8.dtype.element_ty), mask=inside)


@triton.jit
def _store_row(
    row, start, y0, at0, inside0, y1, at1, inside1, plain, rows8, scale
):  # fmt: skip
    """Both pieces of a row from `start` on: as they are, in 8 bits (`fp8.quantize_rows`), or both."""
    inverse = 1.0
    if plain is not None:
        plain += start
    if rows8 is not None:
        rows8 += start
        largest = tl.maximum(_magnitude(y0), _magnitude(y1)).to(tl.float32, bitcast=True)
        s = tl.where(largest < LEAST, 1.0, tl.div_rn(largest, MAX8))
        tl.store(scale + row, s)
        inverse = tl.div_rn(1.0, s)
    _store(y0, at0, inside0, plain, rows8, inverse)
    _store(y1, at1, inside1, plain, rows8, inverse)


@triton.jit
def _residual(residual, delta, at, inside):
    x = tl.load(residual + at, mask=inside, other=0.0)
    if delta is not None:
        added = x.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        x = added.to(x.dtype)
        tl.store(residual + at, x, mask=inside)
    return x.to(tl.float32)


@triton.jit
def _add_norm(
    residual, delta, weight, plain, rows8, scale, eps,
    H: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    residual += row * H
    if delta is not None:
        delta += row * H
    at0, at1 = _lanes(0, MAIN), _lanes(MAIN, TAIL)
    in0, in1 = at0 < H, at1 < H
    x0 = _residual(residual, delta, at0, in0)
    x1 = _residual(residual, delta, at1, in1)
    inverse = tl.rsqrt((tl.sum(x0 * x0) + tl.sum(x1 * x1)) / H + eps)
    y0 = x0 * inverse * tl.load(weight + at0, mask=in0, other=0.0)
    y1 = x1 * inverse * tl.load(weight + at1, mask=in1, other=0.0)
    _store_row(row, row * H, y0, at0, in0, y1, at1, in1, plain, rows8, scale)


@triton.jit
def _gated(gate_up, at, inside, F: tl.constexpr):
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    return _silu(gate) * tl.load(gate_up + F + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _swiglu(
    gate_up, plain, rows8, scale, F: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    gate_up += row * (2 * F)
    at0, at1 = _lanes(0, MAIN), _lanes(MAIN, TAIL)
    in0, in1 = at0 < F, at1 < F
    y0, y1 = _gated(gate_up, at0, in0, F), _gated(gate_up, at1, in1, F)
    _store_row(row, row * F, y0, at0, in0, y1, at1, in1, plain, rows8, scale)


@triton.jit
def _normed_head(out, z, w, at, inside, eps, D: tl.constexpr):
    x = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    return x * inverse[:, None] * w * _silu(tl.load(z + at, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def _gated_norm(
    out, z, weight, plain, rows8, scale, z_stride, eps,
    A: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    out += row * (A * D)
    z += row * z_stride
    d = tl.arange(0, D)[None]
    w = tl.load(weight + d)
    a0, a1 = tl.arange(0, MAIN)[:, None], MAIN + tl.arange(0, TAIL)[:, None]
    at0, at1 = a0 * D + d, a1 * D + d
    in0, in1 = at0 < A * D, at1 < A * D
    y0 = _normed_head(out, z, w, at0, in0, eps, D)
    y1 = _normed_head(out, z, w, at1, in1, eps, D)
    _store_row(row, row * (A * D), y0, at0, in0, y1, at1, in1, plain, rows8, scale)


@triton.jit
def _mixed_head(
    mixed, positions, conv, out, head, first, S, mixed_stride,
    NK: tl.constexpr, A: tl.constexpr, D: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    t, d = tl.arange(0, T), tl.arange(0, D)[None]
    s, start = first + t, first.to(tl.int64)
    position = tl.load(positions + s, mask=s < S, other=0)
    mixed += start * mixed_stride + head * D
    conv += head * D
    y = tl.zeros((T, D), tl.float32)
    for j in tl.static_range(W):  # pyright: ignore[reportGeneralTypeIssues]
        mine = (s < S) & (s >= j) & (position >= j)
        x = tl.load(mixed + (t - j)[:, None] * mixed_stride + d, mask=mine[:, None], other=0.0)
        y += x.to(tl.float32) * tl.load(conv + (W - 1 - j) * ((2 * NK + A) * D) + d)
    y = _silu(y)
    part = tl.minimum(head // NK, 2)  # of q | k | v, which lie behind one another, each [S, its heads, D]
    if part < 2:
        y *= tl.rsqrt(tl.sum(y * y, 1) + EPS)[:, None]
    heads = tl.where(part < 2, NK, A)
    out += (part.to(tl.int64) * S * NK + start * heads + (head - part * NK)) * D
    tl.store(out + t[:, None] * (heads * D) + d, y.to(out.dtype.element_ty), mask=(s < S)[:, None])


@triton.jit
def _gates(
    gates, decay, dt_bias, g, beta, first, S, gates_stride,
    A: tl.constexpr, A2: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    t, a = tl.arange(0, T)[:, None], tl.arange(0, A2)[None]
    start = first.to(tl.int64)
    inside = (first + t < S) & (a < A)
    gates += start * gates_stride + t * gates_stride + a
    b = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gates + A, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + a, mask=a < A, other=0.0)
    at = start * A + t * A + a
    tl.store(g + at, tl.load(decay + a, mask=a < A, other=0.0) * _softplus(x), mask=inside)
    tl.store(beta + at, tl.sigmoid(b), mask=inside)


@triton.jit
def _delta_inputs(
    mixed, gates, positions, conv, decay, dt_bias, out, g, beta, S, mixed_stride, gates_stride,
    NK: tl.constexpr, A: tl.constexpr, A2: tl.constexpr, D: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A program is a head of T tokens, or after the last head the gates of T tokens."""
    head, first = tl.program_id(0), tl.program_id(1) * T
    if head < 2 * NK + A:
        _mixed_head(mixed, positions, conv, out, head, first, S, mixed_stride, NK, A, D, W, T)
    else:
        _gates(gates, decay, dt_bias, g, beta, first, S, gates_stride, A, A2, T)
