"""The two halves of an optimiser step: the loss of a packed row, and the update. Which rows, and when, is
loop.py's.

Nothing here reads the device, but for `check_taps`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.config import TrainConfig
from slipstream.data.pack import Row
from slipstream.distributed.link import TapLink
from slipstream.models.drafter import Drafter
from slipstream.models.selfcheck import refuse_unhealthy
from slipstream.models.target import Head
from slipstream.system.kernels import only_launching_thread
from slipstream.training.attention import loud_fallbacks, make_attend
from slipstream.training.blocks import Blocks, add_noise, draw_anchors, make_blocks
from slipstream.training.loss import BlockLoss, SlotWeights, block_loss
from slipstream.training.parallel import DrafterRanks
from slipstream.training.run import Run


@only_launching_thread
def row_loss(
    run: Run,
    row: Row,
    link: TapLink,
    key: tuple[int, int, int],
    noise: float,
    check_taps: bool = True,
    documents: Sequence[int] = (),
) -> tuple[BlockLoss, Blocks]:
    """Taps, blocks and loss of one packed row; `key` is (seed, epoch, draw) and fixes anchors and noise.
    `check_taps` reads the device: on a GPU not in every step. `documents` are the dataset's numbers of the
    row's, for the error.
    """
    config, drafter = run.config, run.drafter
    anchors = draw_anchors(row, config.max_anchors, key, config.anchor_share)
    blocks = make_blocks(row, anchors, config.max_anchors, config.block_size, drafter.config.mask_token_id)
    blocks = blocks.to(run.device)
    taps_ST = link(row).to(run.dtype)
    used, layers = row.spans()[-1][1], len(run.ends.target_layer_ids)
    if check_taps:
        refuse_unhealthy(row, taps_ST[:used], layers, documents)
    if noise:
        taps_ST = add_noise(taps_ST, config.noise_kind, noise, row, key)
    way = run.attention, run.slot_weights, run.compiled
    return drafted_loss(drafter, blocks, taps_ST, run.ends.embedding_VH, run.ends.head, *way), blocks


def drafted_loss(
    drafter: Drafter,
    blocks: Blocks,
    taps_ST: Tensor,
    embedding_VH: Tensor,
    head: Head,
    attention: str,
    weights: SlotWeights,
    compiled: bool,
) -> BlockLoss:
    """The drafter over blocks on their device, and its loss, in the dtype of the taps.

    Blocks start from raw rows of the target's frozen embedding times the drafter's explicit scale.
    """
    x_QH = F.embedding(blocks.input_ids_NB.flatten(), embedding_VH).to(taps_ST.dtype)
    with loud_fallbacks():
        hidden_QH = drafter(
            taps_ST,
            blocks.context_positions_S,
            x_QH * drafter.config.input_embedding_scale,
            blocks.positions_NB.flatten(),
            make_attend(attention, blocks, drafter.config),
        )
    return block_loss(hidden_QH, blocks, head, weights, compiled)


def make_optimizer(drafter: Drafter, config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the fp32 masters; on a GPU one fused kernel over all of them (one over shards, one over what
    is whole).
    """
    fused = device.type == "cuda"
    parts = [[p for p in drafter.parameters() if isinstance(p, DTensor) is part] for part in (True, False)]
    return torch.optim.AdamW(
        [{"params": part} for part in parts if part],
        lr=config.lr,
        betas=config.betas,
        eps=1e-8,
        weight_decay=config.weight_decay,
        fused=fused,
        foreach=not fused,
    )


def update(
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    weight: Tensor,
    clip: float,
    lr: float,
    ranks: DrafterRanks | None = None,
) -> Tensor:
    """Sum gradients and weight over `ranks`, divide the one by the other, clip by the global norm, step; the
    norm before clipping, equal on all ranks.

    Rows without a valid slot add nothing to either sum; a step of only such rows leaves gradients of zero.
    """
    ranks = ranks or DrafterRanks(drafter)
    grads, weight = ranks.summed(weight)
    weight = weight.clamp(min=torch.finfo(torch.float32).tiny)
    norm = ranks.norm(grads) / weight
    torch._foreach_mul_(grads, (clip / (norm + 1e-6)).clamp(max=1.0) / weight)  # pyright: ignore
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    drafter.refresh()
    return norm
