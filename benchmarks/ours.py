"""Our drafter in the benchmarks: the training loop's own loss and update on rows that a benchmark makes."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from benchmarks.workload import SEED, Batch, Shape, System
from slipstream.config import TrainConfig
from slipstream.data.pack import Row
from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.models.target import Head
from slipstream.training.attention import choose_attention
from slipstream.training.blocks import Blocks, decay_weights, draw_anchors, make_blocks
from slipstream.training.loss import BlockLoss, SlotWeights
from slipstream.training.step import drafted_loss, make_optimizer, update


class Drafting:
    """A fresh drafter and its optimiser, beside a target's frozen matrices and in their dtype."""

    def __init__(self, config: DrafterConfig, anchors: int, embedding_VH: Tensor, head: Head) -> None:
        self.device, self.anchors = embedding_VH.device, anchors
        self.embedding_VH, self.head = embedding_VH, head
        self.compiled = self.device.type == "cuda"
        with self.device:
            self.drafter = Drafter(config)
        self.drafter.use_gpu(embedding_VH.dtype, self.compiled)
        self.optimizer = make_optimizer(self.drafter, TrainConfig(), self.device)
        self.weights = SlotWeights(decay_weights(config.block_size, 7.0).to(self.device))
        self.attention = choose_attention("auto", self.device, self.compiled)
        self.draws = itertools.count()

    def loss(self, row: Row, taps_ST: Tensor) -> tuple[BlockLoss, Blocks]:
        """Forward over blocks of fresh anchors."""
        config = self.drafter.config
        anchors = draw_anchors(row, self.anchors, (SEED, 0, next(self.draws)))
        blocks = make_blocks(row, anchors, self.anchors, config.block_size, config.mask_token_id)
        blocks = blocks.to(self.device)
        way = self.attention, self.weights, self.compiled
        return drafted_loss(self.drafter, blocks, taps_ST, self.embedding_VH, self.head, *way), blocks

    def update(self, weight: Tensor) -> Tensor:
        """The optimiser step, clipping included; the gradients' norm."""
        return update(self.drafter, self.optimizer, weight, clip=1.0, lr=1e-5)


def ours(shape: Shape, batch: Batch) -> System:
    head = Head(batch.head_VH, None, 1.0, None)
    drafting = Drafting(shape.geometry(), shape.anchors, batch.embedding_VH, head)
    drafter, one = drafting.drafter, torch.ones((), device=batch.device)
    row, taps_ST = batch.row, batch.taps_ST  # not the rest of the batch

    def step() -> tuple[Tensor, Tensor]:
        drafter.zero_grad(set_to_none=True)
        loss, blocks = drafting.loss(row, taps_ST)
        mean = loss.total / loss.weight
        mean.backward()
        return mean.detach(), blocks.valid_NB.sum()

    return System(
        step,
        trainable=list(drafter.named_parameters()),
        held=[batch.embedding_VH, batch.head_VH, *(x.copy for x in drafter.linears() if x.copy is not None)],
        settings="fp32 masters, bf16 copies, layers compiled, head in chunks of two products",
        update=lambda: drafting.update(one),
        optimizer=drafting.optimizer,
    )
