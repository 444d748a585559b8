"""The frozen head and the weighted cross-entropy, a chunk of blocks at a time; the full logits never exist.

Two matrix products a slot: the logits, and the gradient of the hidden state, taken in the forward pass while
the softmax is at hand (the head is frozen, so nothing else is needed). What comes back is a *sum* over slots
and the sum to divide by; the loop divides once, after all rows, accumulation steps and ranks are added up.

Shapes: N blocks · B block size · M slots of a chunk · H hidden size · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.models.target import Head
from slipstream.training.blocks import Blocks, dpace_weights

LOGITS_BYTES = 256 * 2**20
"""fp32 logits that exist at a time on a CPU: large enough for full products, small beside everything else."""
CHUNK_TILES = 13
"""Rows of a chunk on a GPU, in tiles of 128. Measured at V = 248320, H = 5120: 13 × (5120/256) tiles of the
second product fill 132 multiprocessors almost exactly twice.
"""


@dataclass(frozen=True)
class SlotWeights:
    """How slots 1 … B−1 are weighted: exponential decay (`decay_B` given), or D-PACE with floor
    `dpace_floor`.
    """

    decay_B: Tensor | None
    dpace_floor: float = 0.5

    def weigh(self, ce: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [n, B−1] and their share of the denominator: Σw with decay, the count of slots with
        D-PACE.
        """
        if self.decay_B is None:
            return dpace_weights(ce, valid, self.dpace_floor), valid.sum().float()
        weights = self.decay_B * valid
        return weights, weights.sum()


@dataclass(frozen=True)
class BlockLoss:
    """Sums of one row; `total / weight` is its loss, but only sums may be added across rows and ranks."""

    total: Tensor
    """Σ w·CE, differentiable in the hidden states."""
    weight: Tensor
    """What `total` is to be divided by."""
    ce: Tensor
    """[N, B−1] fp32, 0 at invalid slots."""
    correct: Tensor
    """[N, B−1] bool: the most likely token is the label; False at invalid slots."""


def block_loss(
    hidden_QH: Tensor, blocks: Blocks, head: Head, weights: SlotWeights, compiled: bool = False
) -> BlockLoss:
    """Weighted CE of normed hidden states [N·B, H] under the target's frozen head; slot 0 is not
    projected. `compiled`: one Triton kernel for what lies between the two products.
    """
    hidden = hidden_QH.unflatten(0, (-1, blocks.block_size))[:, 1:]
    labels, valid = blocks.labels_NB[:, 1:], blocks.valid_NB[:, 1:]
    if compiled:
        from slipstream.training.loss_kernel import ce_and_slope_kernel as slopes
    else:
        slopes = ce_and_slope
    # inside a custom forward gradients always look switched off
    outs = _HeadLoss.apply(hidden, labels, valid, head, weights, slopes, torch.is_grad_enabled())
    return BlockLoss(*outs)  # type: ignore[misc]


def compacts(device: torch.device) -> bool:
    """Whether invalid slots are left out of the matrix products; a GPU wants fixed shapes and no wait."""
    return device.type == "cpu"


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        valid: Tensor,
        head: Head,
        weights: SlotWeights,
        slopes: Slopes,
        wanted: bool,
    ) -> tuple[Tensor, ...]:
        blocks, slots = labels.shape
        step = blocks_of_chunk(slots, head.weight_VH)
        ce = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
        correct = torch.zeros_like(valid)
        grad = torch.zeros_like(hidden) if wanted else None
        total, weight = ce.new_zeros(()), ce.new_zeros(())
        compact = compacts(hidden.device)
        for b in range(0, blocks, step):
            chunk = slice(b, b + step)
            seen = valid[chunk]
            rows = seen.flatten().nonzero().flatten() if compact else slice(None)
            h = hidden[chunk].flatten(0, 1)[rows].to(head.weight_VH.dtype)
            chunk_ce, chunk_correct, slope = _head_ce(h, labels[chunk].flatten()[rows], head, slopes)
            ce[chunk].view(-1)[rows] = chunk_ce
            correct[chunk].view(-1)[rows] = chunk_correct
            ce[chunk] *= seen
            correct[chunk] &= seen
            w, share = weights.weigh(ce[chunk], seen)
            total += (w * ce[chunk]).sum()
            weight += share
            if grad is not None:
                d_h = slope @ head.weight_VH
                grad[chunk].view(-1, hidden.shape[-1])[rows] = (d_h * w.flatten()[rows, None]).to(grad.dtype)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(weight, ce, correct)
        return total, weight, ce, correct

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * d_total.to(grad.dtype), *(None,) * 6


def blocks_of_chunk(slots: int, weight_VH: Tensor) -> int:
    rows = 128 * CHUNK_TILES if weight_VH.is_cuda else LOGITS_BYTES // (4 * weight_VH.shape[0])
    return max(1, rows // slots)


def _head_ce(h_MH: Tensor, labels_M: Tensor, head: Head, slopes: Slopes) -> tuple[Tensor, Tensor, Tensor]:
    """CE [M], whether the most likely token is the label [M], and dCE/d raw [M, V], of one chunk."""
    raw = h_MH @ head.weight_VH.T if head.bias_V is None else torch.addmm(head.bias_V, h_MH, head.weight_VH.T)
    ce, correct = slopes(raw, labels_M, head)
    return ce, correct, raw


Slopes = Callable[[Tensor, Tensor, Head], tuple[Tensor, Tensor]]


def ce_and_slope(raw_MV: Tensor, labels_M: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """CE [M] in fp32 and whether the most likely token is the label [M], of the head's products; `raw_MV`
    becomes dCE/d raw in place, so that logits and their slopes are one buffer.
    """
    logits = head.scale(raw_MV)
    top, best = logits.max(dim=-1)
    p = torch.softmax(logits, dim=-1, dtype=torch.float32)
    at = labels_M[:, None]
    # log-sum-exp from the likeliest token, whose probability is at least 1/V: exact where p[label] underflows
    lse = top.float() - p.gather(1, best[:, None]).squeeze(1).log()
    ce = lse - logits.gather(1, at).squeeze(1).float()
    slope = p.scatter_add_(1, at, p.new_full((1, 1), -1.0).expand(len(labels_M), 1))
    if head.multiplier != 1.0:
        slope = slope * head.multiplier
    if head.softcap is not None:
        slope = slope * (1 - (logits.float() / head.softcap) ** 2)
    raw_MV.copy_(slope)
    return ce, best == labels_M
