"""What every system of the drafter benchmark is given: the shape, one packed row's data, the floors.

Here: `Shape` and its count of matrix work, random rows, `Batch` (the same data for all), `System` (what is
timed), the sustained ceiling. Not here: how a system is built (ours.py, peers.py for the others).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.data.pack import Row
from slipstream.models.drafter import DrafterConfig
from slipstream.training.flops import row_flops, times_ms

SEED = 1234
SQUARE = 8192
"""Side of the square bf16 product whose speed is called the ceiling."""


@dataclass(frozen=True)
class Shape:
    """One drafter step: a row of `tokens` in equal documents, and the drafter's geometry."""

    tokens: int = 8192
    documents: int = 4
    anchors: int = 512
    block_size: int = 16
    layers: int = 5
    sliding_layers: int = 0
    """The first so many layers see a window; the rest see the whole document."""
    window: int = 2048
    hidden: int = 5120
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 17408
    vocab: int = 248320
    taps: int = 5
    rope_theta: float = 1e7

    @property
    def layer_types(self) -> tuple[str, ...]:
        full = self.layers - self.sliding_layers
        return ("sliding_attention",) * self.sliding_layers + ("full_attention",) * full

    @property
    def mask_token_id(self) -> int:
        return self.vocab - 1

    def geometry(self) -> DrafterConfig:
        """The drafter, with taps of the first layers of a target of 64."""
        return DrafterConfig(
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=tuple(range(self.taps)),
            num_target_layers=64,
            rope_theta=self.rope_theta,
            layer_types=self.layer_types,
            sliding_window=self.window if self.sliding_layers else None,
        )

    def matrix_flop(self) -> int:
        """Useful matrix work of forward and backward (training/flops.py) where every slot has a label."""
        labels = self.anchors * (self.block_size - 1)
        return row_flops(self.geometry(), 0).drafter(self.tokens, self.anchors, labels)


TINY = Shape(
    tokens=64, documents=2, anchors=8, block_size=4, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16,
    intermediate=64, vocab=131, taps=2,
)  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """One packed row with bf16 taps, and the target's frozen bf16 matrices, on the device."""

    row: Row
    """Ids, positions, documents and the supervised mask (every token) on the host."""
    taps_ST: Tensor
    last_SH: Tensor
    """The target's last hidden states, for who computes a teacher's logits."""
    embedding_VH: Tensor
    head_VH: Tensor

    @property
    def device(self) -> torch.device:
        return self.taps_ST.device


def random_row(lengths: list[int], tokens: int, vocab: int, source: torch.Generator) -> Row:
    """Documents of these lengths, random ids but the mask's (the last), all supervised; then padding."""
    used = sum(lengths)
    padding = (0, tokens - used)
    positions = torch.cat([torch.arange(length) for length in lengths])
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return Row(
        row_id=0,
        input_ids=F.pad(torch.randint(vocab - 1, (used,), generator=source), padding),
        positions=F.pad(positions, padding),
        documents=F.pad(documents, padding, value=-1),
        supervised=torch.arange(tokens) < used,
    )


def equal_documents(tokens: int, documents: int, vocab: int) -> Row:
    """A full row of equal documents, the same in every process."""
    assert tokens % documents == 0, "documents are equal"
    source = torch.Generator().manual_seed(SEED)
    return random_row([tokens // documents] * documents, tokens, vocab, source)


def make_batch(shape: Shape, device: torch.device) -> Batch:
    """Random data, never zero or constant (those run faster), the same for every system."""
    source = torch.Generator(device).manual_seed(SEED)

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0.0, std, generator=source)

    return Batch(
        equal_documents(shape.tokens, shape.documents, shape.vocab),
        taps_ST=normal(shape.tokens, shape.taps * shape.hidden),
        last_SH=normal(shape.tokens, shape.hidden),
        embedding_VH=normal(shape.vocab, shape.hidden),
        head_VH=normal(shape.vocab, shape.hidden, std=shape.hidden**-0.5),
    )


@dataclass(frozen=True)
class System:
    """What is timed. `step` runs forward and backward of one row with fresh anchors, leaves one gradient per
    parameter, and returns the loss and the number of slots in it, unread scalars on the device.
    """

    step: Callable[[], tuple[Tensor, Tensor]]
    trainable: list[tuple[str, Tensor]]
    held: list[Tensor]
    """All weights, trainable and frozen, and copies of them that persist between steps."""
    settings: str
    update: Callable[[], Tensor] | None = None
    """The optimiser step, clipping included; where it is timed too."""
    optimizer: torch.optim.Optimizer | None = None

    def steady_bytes(self) -> int:
        """Weights, persistent copies, moments (once they exist) and one gradient per parameter."""
        kept = [*self.held, *(p for _, p in self.trainable)]
        if self.optimizer is not None:
            kept += [t for state in self.optimizer.state.values() for t in state.values()]
        unique = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        return sum(unique.values()) + sum(p.numel() * p.element_size() for _, p in self.trainable)


def sustained_flops(device: torch.device, tiny: bool) -> float:
    """FLOP/s of a square bf16 product (training/flops.py measures it in a burst) after two seconds without a
    pause, where a GPU meets its power limit.
    """
    side = 256 if tiny else SQUARE
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    times_ms(lambda: a @ b, 5, device)
    took = times_ms(lambda: a @ b, 20 if tiny else 1200, device)
    return 1e3 * 2 * side**3 / statistics.median(took[-200:])
