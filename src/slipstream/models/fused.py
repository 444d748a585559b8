"""What a decoder does between its matrix products, as pure functions that one kernel or two can be made of.

trunk.py calls them as they are on a CPU; on a GPU it compiles them, or takes their equals in
fused_kernels.py. Each ends in what the next matrix product reads (`Operand`), so that a change of number
format costs no kernel of its own. Work is done in fp32, values are rounded once, when they are stored. Matrix
products, attention and the recurrence are in trunk.py.

Shapes: S tokens of a packed row · H hidden size · F MLP width · n heads (nq query, nkv key/value) · D head
width · R rotated part of it · C convolved columns · W width of the convolution · A value heads of a linear
layer · I input features of a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.fp8 import quantize_rows

L2_EPS = 1e-6  # of the linear layers' queries and keys


class Operand(NamedTuple):
    """Rows that a matrix product reads: in the pass's dtype, in 8 bits with a scale a row, or both."""

    plain_SI: Tensor | None
    rows8_SI: Tensor | None
    scale_S: Tensor | None


def operand(x_SI: Tensor, dtype: torch.dtype, plain: bool, fp8: bool) -> Operand:
    rows8_SI, scale_S = quantize_rows(x_SI) if fp8 else (None, None)
    return Operand(x_SI.to(dtype) if plain else None, rows8_SI, scale_S)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x²) + eps) over the last dimension, kept as 1, fp32."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def rms(x: Tensor, eps: float) -> Tensor:
    return x.float() * inverse_rms(x, eps)


def add_norm(
    residual_SH: Tensor, delta_SH: Tensor | None, weight_H: Tensor, eps: float, plain: bool, fp8: bool
) -> Operand:
    """Adds `delta_SH` to the residual in place, then rms norm times a fp32 weight."""
    if delta_SH is not None:
        residual_SH.add_(delta_SH)
    return operand(rms(residual_SH, eps) * weight_H, residual_SH.dtype, plain, fp8)


def swiglu(gate_up_S2F: Tensor, fp8: bool) -> Operand:
    """silu(gate) · up of the product [S, gate | up]."""
    gate, up = gate_up_S2F.float().chunk(2, dim=-1)
    return operand(F.silu(gate) * up, gate_up_S2F.dtype, not fp8, fp8)


def rotated_heads(x_SnD: Tensor, norm_D: Tensor | None, eps: float, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Queries or keys: rms norm by head if there is a weight, rotary embedding of the first R features.

    The norm is applied to each part anew: as one tensor with three readers a compiler would store it.
    """
    half, rotated = cos_SR.shape[-1] // 2, cos_SR.shape[-1]
    inverse = inverse_rms(x_SnD, eps)  # nobody reads it where there is no weight

    def part(start: int, end: int) -> Tensor:
        x = x_SnD[..., start:end].float()
        return x if norm_D is None else x * inverse * norm_D[start:end]

    cos, sin = cos_SR.float()[:, None], sin_SR.float()[:, None]
    low, high = part(0, half), part(half, rotated)
    parts = (
        low * cos[..., :half] - high * sin[..., :half],
        high * cos[..., half:] + low * sin[..., half:],
        part(rotated, x_SnD.shape[-1]),
    )
    return torch.cat([x.to(x_SnD.dtype) for x in parts], dim=-1)


def attention_inputs(
    q_SnD: Tensor,
    k_SnD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    cos_SR: Tensor,
    sin_SR: Tensor,
) -> tuple[Tensor, Tensor]:
    """Normed and rotated queries [S, nq, D] and keys [S, nkv, D], contiguous."""
    q = rotated_heads(q_SnD, q_norm_D, eps, cos_SR, sin_SR)
    return q, rotated_heads(k_SnD, k_norm_D, eps, cos_SR, sin_SR)


def gated_heads(out_SnD: Tensor, gate_SnD: Tensor | None, fp8: bool) -> Operand:
    """Attention's output [S, n·D], times sigmoid(gate) in families that gate it."""
    out = out_SnD.float()
    if gate_SnD is not None:
        out = out * gate_SnD.float().sigmoid()
    return operand(out.flatten(1), out_SnD.dtype, not fp8, fp8)


def causal_conv(x_SC: Tensor, weight_WC: Tensor, positions_S: Tensor) -> Tensor:
    """silu(Σⱼ weight[W−1−j] · x[s−j]) over the tokens of s's own document: j ≤ its position there. fp32."""
    tokens, width = len(x_SC), len(weight_WC)
    before = F.pad(x_SC, (0, 0, width - 1, 0))
    out = x_SC.float() * weight_WC[-1]
    for j in range(1, width):
        back = before[width - 1 - j : width - 1 - j + tokens].float()
        out = out + torch.where((positions_S >= j)[:, None], back, 0.0) * weight_WC[width - 1 - j]
    return F.silu(out)


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
    """What the gated delta rule reads, from a product's columns q | k | v and gates b | a.

    Queries and keys [S, nk, D] of length 1, values [S, A, Dv], log decays g = decay · softplus(a + dt_bias)
    with decay = −exp(A_log), and β = sigmoid(b) [S, A], both fp32; all contiguous.
    """
    width, dtype = key_heads * key_dim, mixed_SC.dtype

    def columns(start: int, end: int, heads: int) -> Tensor:
        x_SC = causal_conv(mixed_SC[:, start:end], conv_WC[:, start:end], positions_S)
        return x_SC.unflatten(1, (heads, -1))

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)

    b_SA, a_SA = gates_S2A.float().chunk(2, dim=-1)
    return (
        unit(columns(0, width, key_heads)).to(dtype),
        unit(columns(width, 2 * width, key_heads)).to(dtype),
        columns(2 * width, mixed_SC.shape[1], len(decay_A)).to(dtype),
        decay_A * F.softplus(a_SA + dt_bias_A),
        b_SA.sigmoid(),
    )


def gated_norm(out_SAD: Tensor, z_SAD: Tensor, weight_D: Tensor, eps: float, fp8: bool) -> Operand:
    """rms norm by head · weight · silu(z), heads side by side [S, A·D]."""
    y = rms(out_SAD, eps) * weight_D * F.silu(z_SAD.float())
    return operand(y.flatten(1), out_SAD.dtype, not fp8, fp8)
