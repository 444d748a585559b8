"""How much matrix work a row is, and how fast a device multiplies: what MFU and predicted times are made of.

Counted is useful work in FLOP, a multiplication and an addition each: tokens that are not padding, blocks
that were drawn, slots that carry loss. Left out: attention's products (a tenth of a drafter's step at 8192
tokens and 512 blocks), norms, the optimiser. The counts are pure; `matmul_ceiling` measures.

Shapes: S tokens of a row · N blocks · B block size · H hidden size · V vocabulary · T taps.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.config import TrainConfig
from slipstream.models.drafter import DrafterConfig
from slipstream.models.fp8 import fp8_matmul, quantize_rows, quantize_weight
from slipstream.models.target import Target

EFFICIENCY = {"cuda": 0.75, "cpu": 0.4}
"""Share of the ceiling that the matrix work of a whole step is expected to reach, by kind of device."""


@dataclass(frozen=True)
class RowFlops:
    """FLOP of one packed row, forward and backward, by what is counted in it; plain integers."""

    token: int
    """A token of context, through fc and all layers' key and value matrices."""
    block_token: int
    """A token of a block, through all matrices of all layers."""
    label: int
    """A slot with a label, through the target's head."""
    target_token: int
    """A token read by the target; 0 with recorded taps."""
    block_size: int

    def drafter(self, tokens: int, blocks: int, labels: int) -> int:
        """The drafter's step on a row of so many tokens, blocks (`Blocks.count`) and labelled slots."""
        return self.token * tokens + self.block_token * blocks * self.block_size + self.label * labels

    def target(self, tokens: int) -> int:
        """The target's pass to its last tap."""
        return self.target_token * tokens


def row_flops(geometry: DrafterConfig, target_elements: int) -> RowFlops:
    """Formulas: a product of an [n, I] and an [I, O] matrix is 2·n·I·O FLOP. A trained matrix takes part in
    three (output, gradient of its input, gradient of the weight); fc in two, for no gradient goes into the
    taps; the frozen head in two, for it has no gradient of its own; the target's matrices in one.

    `target_elements` are the matrix elements that a token meets in the target (`target_layers`), 0 where taps
    are recorded.
    """
    g = geometry
    keys_values = 2 * g.hidden_size * g.num_kv_heads * g.head_dim
    fc = len(g.target_layer_ids) * g.hidden_size**2
    return RowFlops(
        token=2 * (2 * fc + 3 * g.num_layers * keys_values),
        block_token=2 * 3 * g.num_layers * layer_elements(g),
        label=2 * 2 * g.hidden_size * g.vocab_size,
        target_token=2 * target_elements,
        block_size=g.block_size,
    )


def layer_elements(geometry: DrafterConfig) -> int:
    """Elements of the matrices of one drafter layer."""
    g = geometry
    attention = 2 * g.hidden_size * (g.num_heads + g.num_kv_heads) * g.head_dim
    return attention + 3 * g.hidden_size * g.intermediate_size


def target_layers(target: Target) -> list[int]:
    """Matrix elements that a token meets in each layer up to the last tap: of experts, those it is sent to.

    Convolutions, norms and the embedding are left out.
    """
    facts = target.config.to_dict()
    experts = facts.get("num_experts") or facts.get("num_local_experts")
    out = []
    for layer in target.layers[: target.target_layer_ids[-1] + 1]:
        shapes = [p.shape for p in layer.parameters()]
        dense = sum(shape.numel() for shape in shapes if len(shape) == 2)
        mixed = sum(shape.numel() for shape in shapes if len(shape) == 3 and shape[0] == experts)
        out.append(dense + (mixed // experts * facts["num_experts_per_tok"] if experts else 0))
    return out


def step_flops(config: TrainConfig, work: RowFlops, tokens: int, blocks: int, labels: int) -> float:
    """FLOP of an optimiser step on rows of so many tokens, blocks and labelled slots, on all ranks together;
    of the target's pass its share where several steps use its taps.
    """
    assert config.rows_per_step is not None
    row = work.drafter(tokens, blocks, labels) + work.target(tokens) / config.anchor_draws
    return config.rows_per_step * row


def expected_seconds(flop: float, ceiling: float, device_type: str) -> float:
    """Seconds of a step with so much matrix work, at a ceiling of so many FLOP/s."""
    return flop / (EFFICIENCY[device_type] * ceiling)


def matmul_ceiling(device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int = 8192) -> float:
    """FLOP/s of a square product of random matrices in `dtype`, the median of 20 (30 ms and 0.4 GiB on an
    H200 with side 8192): what counts as this device's ceiling of matrix work.
    """
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return _speed(lambda: a @ b, side, device)


def fp8_ceiling(device: torch.device, side: int = 8192) -> float:
    """The same of the FP8 product that `--target-fp8` makes."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    (rows8, scale), weight = quantize_rows(a), quantize_weight(b)
    return _speed(lambda: fp8_matmul(rows8, scale, weight), side, device)


def _speed(square_product: Callable[[], object], side: int, device: torch.device) -> float:
    times_ms(square_product, 5, device)
    return 1e3 * 2 * side**3 / statistics.median(times_ms(square_product, 20, device))


def times_ms(call: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `count` calls; on a GPU by events, queued without a wait between them."""
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    times = [time.perf_counter()]
    for _ in range(count):
        call()
        times.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in itertools.pairwise(times)]
