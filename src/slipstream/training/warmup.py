"""Before the first step on a GPU: the fullest row forward and backward, twice. Kernels compile outside the
run's clock, memory that is short is short now and not after an hour, and attention shows that it is fused.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.config import UserError
from slipstream.models.parts import rotary
from slipstream.training.attention import make_attend
from slipstream.training.blocks import Blocks, draw_anchors, make_blocks
from slipstream.training.flops import fp8_ceiling, matmul_ceiling
from slipstream.training.metrics import Display
from slipstream.training.run import Run
from slipstream.training.step import row_loss

TELLING = 64 * 2**20
"""Bytes of dense scores from which a layer's memory says whether they existed."""


@dataclass(frozen=True)
class Warm:
    """What the warm-up found."""

    graphs: int
    """Graphs that torch has compiled in this process so far."""
    ceiling: float
    """FLOP/s of a large matrix product in the working dtype: what MFU is a share of."""
    target_ceiling: float
    """The same for the target's products, which may be in FP8."""


def warm_up(run: Run, optimizer: torch.optim.Optimizer, display: Display) -> Warm:
    """Forward and backward of the fullest row, thrown away, with the optimiser's memory taken meanwhile."""
    display.say("compile: the fullest row compiles its kernels, up to a few minutes without a cache")
    began = time.monotonic()
    row = run.rows.row(max(range(run.rows.count), key=run.rows.used))
    parameters = list(run.drafter.parameters())
    # AdamW makes its two moments in the first update; a resumed run has them
    moments = [] if optimizer.state else [torch.empty_like(p) for p in parameters for _ in range(2)]
    key = (run.config.seed, 0, 0)
    if run.config.anchor_draws > 1:  # the link holds the taps of all rows of a step
        for i in range(run.plan.rows_a_rank):
            run.taps(run.rows.row(i % run.rows.count))
    for _ in range(2):  # the second time is a step's time
        if run.plan.rows_a_rank == 1:  # with more rows a step holds gradients while it reads the next
            run.drafter.zero_grad(set_to_none=True)
        torch.cuda.synchronize(run.device)
        torch.cuda.reset_peak_memory_stats(run.device)
        second = time.monotonic()
        loss, _ = row_loss(run, row, run.taps, key, run.config.noise)
        loss.total.backward()
        torch.cuda.synchronize(run.device)
        seconds = time.monotonic() - second
    held = " on taps that are held" if run.config.anchor_draws > 1 else ""
    peak, whole = torch.cuda.max_memory_allocated(run.device), torch.cuda.mem_get_info(run.device)[1]
    if run.heldout is not None:
        with torch.no_grad():  # validation has graphs of its own
            row_loss(run, run.heldout.row(0), run.heldout_taps, key, noise=0.0)
    if run.attention == "flex":
        anchors = draw_anchors(row, run.config.max_anchors, key, run.config.anchor_share)
        mask_token_id = run.drafter.config.mask_token_id
        blocks = make_blocks(row, anchors, run.config.max_anchors, run.config.block_size, mask_token_id)
        display.say(f"attention: {probe_attention(run, blocks.to(run.device))}")
    run.drafter.zero_grad(set_to_none=True)
    del moments
    ceiling = target_ceiling = matmul_ceiling(run.device, run.dtype)
    if run.config.target_fp8:
        target_ceiling = fp8_ceiling(run.device)
    display.say(
        f"compile: {time.monotonic() - began:.0f} s; the fullest row takes {1000 * seconds:.0f} ms forward "
        f"and backward{held}, peak {peak / 2**30:.1f} of {whole / 2**30:.1f} GiB; matrix products reach "
        f"{ceiling / 1e12:.0f} TFLOP/s"
    )
    return Warm(graphs_compiled(), ceiling, target_ceiling)


def probe_attention(run: Run, blocks: Blocks) -> str:
    """One compiled layer of each type, forward and backward at the run's shape, must not hold a score for
    every query and key: what it took, in words. Raises `UserError` when it does.
    """
    config, said = run.drafter.config, []
    attend = make_attend("flex", blocks, config)
    tokens = blocks.context_documents_S.shape[0]
    queries = blocks.anchors_N.shape[0] * blocks.block_size

    def random(rows: int) -> Tensor:
        made = torch.randn(rows, config.hidden_size, device=run.device, dtype=run.dtype)
        return made.requires_grad_()

    ropes = [
        rotary(positions, config.head_dim, config.rope_theta)
        for positions in (blocks.positions_NB.flatten(), blocks.context_positions_S)
    ]
    for kind in dict.fromkeys(config.layer_types):
        layer = next(layer for layer in run.drafter.stack() if layer.layer_type == kind)
        x_QH, ctx_SH = random(queries), random(tokens)
        milliseconds, before = 0.0, 0
        for _ in range(2):  # a first layer whose input needs a gradient may be a graph of its own
            layer.zero_grad(set_to_none=True)
            torch.cuda.synchronize(run.device)
            before = torch.cuda.memory_allocated(run.device)
            torch.cuda.reset_peak_memory_stats(run.device)
            began = time.monotonic()
            run.drafter.run_layer(layer, x_QH, ctx_SH, ropes[0], ropes[1], attend).sum().backward()
            torch.cuda.synchronize(run.device)
            milliseconds = 1000 * (time.monotonic() - began)
        gradients = sum(p.numel() * p.element_size() for p in layer.parameters())
        peak = torch.cuda.max_memory_allocated(run.device) - before - gradients
        said.append(judge(kind, config.num_heads, queries, tokens + queries, peak, milliseconds))
    return "; ".join(said)


def judge(kind: str, heads: int, queries: int, keys: int, peak: int, milliseconds: float) -> str:
    """Whether `peak` bytes of a layer, its gradients left out, hold scores of all its queries and keys.

    Dense attention was seen to take 24 bytes a score forward and backward (6 × fp32); what a fused layer
    keeps, 2·Q·(4H + 4·heads·D + 3F), is under one fp32 score for every pair in any geometry with more than a
    few hundred keys. In between lies 3 × fp32.
    """
    dense = 4 * heads * queries * keys
    if dense > TELLING and peak > 3 * dense:
        raise UserError(
            f"attention: a {kind} layer took {peak / 2**30:.1f} GiB, as if it kept scores of all queries and "
            f"keys ({dense / 2**30:.1f} GiB in fp32): it ran dense; see TORCH_LOGS=recompiles, or use "
            "--attention documents"
        )
    what = "fused" if dense > TELLING else "fused (too small to tell by its memory)"
    return (
        f"{kind} {what}: a layer forward and backward {milliseconds:.1f} ms, {peak / 2**30:.2f} GiB, "
        f"a score for every pair would be {dense / 2**30:.1f} GiB"
    )


def graphs_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
