"""What a drafter's layers are put together from: norm, product of an fp32 master, rotary embedding.

The layers are in drafter.py. Shapes: P tokens · I, O features of a product · D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + eps) · w, in fp32, back in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Linear(nn.Module):
    """x Wᵀ without bias, computed in x's dtype from an fp32 master; starts with deviation 1/√width_in, which
    keeps the scale of what passes through.
    """

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in).normal_(std=width_in**-0.5))
        self.copy: Tensor | None = None
        """The master in the working dtype (`Drafter.use_gpu`): cast once an update, not in every product."""

    def forward(self, x: Tensor) -> Tensor:
        if self.copy is None:
            return F.linear(x, self.weight.to(x.dtype))
        return MasterProduct.apply(x, self.copy, self.weight, None)  # type: ignore[return-value]


class MasterProduct(torch.autograd.Function):
    """x Wᵀ of a working copy; gradients go to its master, or to the two that lie below one another in it, in
    fp32 straight out of one product.

    No `*masters`: without gradients torch 2.11 counts a forward's parameters to see whether it wants `ctx`.
    """

    @staticmethod
    def forward(ctx: Any, x_PI: Tensor, copy_OI: Tensor, master: Tensor, below: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_PI, copy_OI)
        ctx.rows = len(master)
        return x_PI @ copy_OI.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d_PO,), (x_PI, copy_OI) = grads, ctx.saved_tensors
        d_x = d_PO @ copy_OI if ctx.needs_input_grad[0] else None
        d_OI = product_fp32(d_PO.T, x_PI)
        if ctx.rows == len(d_OI):
            return d_x, None, d_OI, None
        return d_x, None, d_OI[: ctx.rows], d_OI[ctx.rows :]


def product_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a b with an fp32 result; on CUDA nothing is rounded on the way."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else (a @ b).float()


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., D] in fp32 for integer positions [...]: plain one-dimensional RoPE, whatever the
    target's.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[..., None] * theta ** (-steps / head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_nPD: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
    x = x_nPD.float()
    low, high = x.chunk(2, dim=-1)
    return (x * cos_PD + torch.cat((-high, low), dim=-1) * sin_PD).to(x_nPD.dtype)
