"""What every system of the drafter benchmark is given: the shape, one packed row's data, the floors.

Here: `Shape` and its count of matrix work, `Batch` (the same random data for all), `System` (what is timed),
the matrix ceiling. Not here: how a system is built (drafter_step.py for ours, peers.py for the others).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.data.pack import Row

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

    def drafter_parameters(self) -> int:
        """Elements of the trainable matrices; norms left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.taps * self.hidden**2 + self.layers * layer

    def matrix_flop(self) -> float:
        """Useful matrix work of forward and backward, attention not counted.

        Three products for every matrix (the output, the gradients of input and weight) but: the taps need no
        gradient, and the head is frozen, so both have two. Slot 0 has no label and is not projected.
        """
        queries = self.anchors * self.block_size
        keys_values = 2 * self.hidden * self.kv_heads * self.head_dim
        queries_out = 2 * self.hidden * self.heads * self.head_dim
        block = queries * (queries_out + keys_values + 3 * self.hidden * self.intermediate)
        layers = 3 * self.layers * (block + self.tokens * keys_values)
        taps = 2 * self.tokens * self.taps * self.hidden**2
        head = 2 * self.anchors * (self.block_size - 1) * self.hidden * self.vocab
        return 2.0 * (layers + taps + head)


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


def make_batch(shape: Shape, device: torch.device) -> Batch:
    """Random data, never zero or constant (those run faster), the same for every system."""
    source = torch.Generator(device).manual_seed(SEED)

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0.0, std, generator=source)

    assert shape.tokens % shape.documents == 0, "documents are equal"
    span = shape.tokens // shape.documents
    host = torch.Generator().manual_seed(SEED)
    row = Row(
        row_id=0,
        input_ids=torch.randint(shape.vocab - 1, (shape.tokens,), generator=host),
        positions=torch.arange(span).repeat(shape.documents),
        documents=torch.arange(shape.documents).repeat_interleave(span),
        supervised=torch.ones(shape.tokens, dtype=torch.bool),
    )
    return Batch(
        row,
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


def times_ms(step: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `count` steps, queued without a wait between them, by CUDA events."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def sustained_flops(device: torch.device, tiny: bool) -> float:
    """FLOP/s of a square bf16 product (training/flops.py measures it in a burst) after two seconds without a
    pause, where a GPU meets its power limit.
    """
    side = 256 if tiny else SQUARE
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    times_ms(lambda: a @ b, 5, device)
    return (
        2 * side**3 / (1e-3 * statistics.median(times_ms(lambda: a @ b, 20 if tiny else 1200, device)[-200:]))
    )
