"""The training loop, top to bottom: rows → taps → blocks → loss → update, with validation, checkpoints and
metrics.

One process, one device. What a run is made of (data, target, drafter, links) is put together in setup.py;
here is what happens every step. Nothing in a step reads the device except at log, validation and save steps.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.config import TrainConfig, UserError
from slipstream.data.pack import Row
from slipstream.distributed.link import TapLink
from slipstream.models.selfcheck import tap_health
from slipstream.training.attention import make_attend
from slipstream.training.blocks import Blocks, add_noise, draw_anchors, make_blocks
from slipstream.training.checkpoint import (
    Position,
    clear_leftovers,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from slipstream.training.loss import BlockLoss, block_loss
from slipstream.training.metrics import Display, MetricsFile, SlotMeter, Stillness
from slipstream.training.run import Run

VALIDATION_SEED = 7_777_777
"""Anchors of the validation: fixed, so that two evaluations differ only by the weights."""
STILL_AFTER = 20
"""Steps after which every trainable tensor must have moved."""


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    position: Position
    interrupted: bool


def train(run: Run, display: Display) -> Trained:
    """Train `run.drafter` to the end of its plan, or to the first SIGTERM/SIGINT; every step made is in the
    checkpoint it leaves.
    """
    config, drafter, device = run.config, run.drafter, run.device
    parameters = list(drafter.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=1e-8, weight_decay=config.weight_decay, foreach=True
    )
    position = resume(run, optimizer, display)
    metrics = MetricsFile(run.folder / "metrics.jsonl", position.step)
    meter = SlotMeter(config.block_size, device)
    meter.load(position.window)
    stillness = Stillness(drafter)
    first_bad = torch.full((), -1, device=device)
    first_step = saved_step = position.step
    validated_step = metrics.last_step("validation")
    if device.type == "cuda":
        compile_kernels(run, display)
    began = time.monotonic() - position.seconds  # as if the run had never paused
    tokens, window_began = 0, position.seconds

    display.start("train", 100, int(100 * progress(position, run)), percent=True)
    with StopSignal() as stop:
        while not finished(position, run) and not stop.requested:
            # one optimiser step: sums over the rows of the step, divided once
            step = position.step
            weight = torch.zeros((), device=device)
            learning_rate = config.lr * schedule(progress(position, run), config.warmup)
            check_taps = device.type == "cpu" or step % config.log_interval == 0
            for epoch, index in run.plan.step_rows(step):
                row = run.rows.row(index)
                key = (config.seed, epoch, 0)
                loss, blocks = row_loss(run, row, run.taps, key, config.noise, check_taps)
                loss.total.backward()
                weight += loss.weight
                meter.add(loss, blocks, int(row.supervised.sum()))
                position = replace(position, labels=position.labels + blocks.labels)
                tokens += int((row.documents >= 0).sum())
            norm = update(parameters, optimizer, weight, config, learning_rate)
            first_bad = torch.where((first_bad < 0) & ~norm.isfinite(), step, first_bad)
            position = replace(position, step=step + 1, seconds=time.monotonic() - began)

            log = position.step % config.log_interval == 0 or position.step == 1 or finished(position, run)
            validation_due = position.step % config.eval_interval == 0 and run.heldout is not None
            save_due = position.step % config.save_interval == 0
            share = int(100 * progress(position, run))
            if log or save_due or device.type == "cpu":
                refuse_non_finite(run, int(first_bad))
            if log:
                facts = meter.read() | {"lr": learning_rate, "grad_norm": float(norm)}
                facts["tokens_per_second"] = tokens / (time.monotonic() - began - window_began)
                tokens, window_began = 0, time.monotonic() - began
                metrics.write("train", position.step, **facts, **memory(device))
                display.advance(share, describe_step(position.step, facts), line=True)
                alarm_still(stillness, position.step - first_step, position.step, metrics, display)
            else:
                display.advance(share, f"step {position.step}")

            paused = time.monotonic()  # the run's clock counts training only
            if validation_due:
                validated_step = validate_and_tell(run, position.step, metrics, display)
            if save_due:
                saved_step = save(run, optimizer, position, meter)
            began += time.monotonic() - paused

        if position.step > saved_step:
            refuse_non_finite(run, int(first_bad))
            save(run, optimizer, position, meter)
    display.stop()
    interrupted = not finished(position, run)
    if run.heldout is not None and not interrupted and validated_step < position.step:
        validate_and_tell(run, position.step, metrics, display)
    return Trained(position, interrupted)


def resume(run: Run, optimizer: torch.optim.Optimizer, display: Display) -> Position:
    """Where the newest complete checkpoint stands, loaded into drafter and optimiser; else the start."""
    clear_leftovers(run.folder)
    newest, damaged = newest_checkpoint(run.folder)
    if newest is None:
        return Position(step=0, seconds=0.0, labels=0, fingerprint=run.fingerprint)
    position = load_checkpoint(newest, run.drafter, optimizer, run.fingerprint)
    passed_over = f"; passed over, incomplete: {', '.join(damaged)}" if damaged else ""
    display.say(f"resume: {newest} (step {position.step}){passed_over}")
    return position


def compile_kernels(run: Run, display: Display) -> None:
    """One row forward and backward, thrown away: compilation is announced and kept out of the run's clock."""
    display.say("compile: the first row compiles its kernels, up to a few minutes without a cache")
    began = time.monotonic()
    loss, _ = row_loss(run, run.rows.row(0), run.taps, (run.config.seed, 0, 0), run.config.noise)
    loss.total.backward()
    run.drafter.zero_grad(set_to_none=True)
    torch.cuda.synchronize(run.device)
    display.say(f"compile: {time.monotonic() - began:.0f} s")


def row_loss(
    run: Run, row: Row, link: TapLink, key: tuple[int, int, int], noise: float, check_taps: bool = True
) -> tuple[BlockLoss, Blocks]:
    """Taps, blocks and loss of one packed row; `key` is (seed, epoch, draw) and fixes anchors and noise.
    `check_taps` reads the device: on a GPU not in every step.
    """
    config, drafter = run.config, run.drafter
    anchors = draw_anchors(row, config.max_anchors, key)
    blocks = make_blocks(row, anchors, config.max_anchors, config.block_size, drafter.config.mask_token_id)
    blocks = blocks.to(run.device)
    taps_ST = link(row).to(run.dtype)
    used, layers = row.spans()[-1][1], len(run.target.target_layer_ids)
    if check_taps and (trouble := tap_health(taps_ST[:used], layers)):
        raise UserError(
            f"row {row.row_id}: the target's features are {trouble}: training on them teaches nothing"
        )
    if noise:
        taps_ST = add_noise(taps_ST, config.noise_kind, noise, row, key)
    hidden_QH = drafter(
        taps_ST,
        blocks.context_positions_S,
        embed(run, blocks.input_ids_NB.flatten()),
        blocks.positions_NB.flatten(),
        make_attend(run.attention, blocks, drafter.config),
    )
    return block_loss(hidden_QH, blocks, run.target.head, run.slot_weights), blocks


def embed(run: Run, ids: Tensor) -> Tensor:
    """Raw rows of the target's frozen embedding times the drafter's explicit scale, in the run's dtype."""
    return F.embedding(ids, run.target.embedding_VH).to(run.dtype) * run.drafter.config.input_embedding_scale


def update(
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    weight: Tensor,
    config: TrainConfig,
    lr: float,
) -> Tensor:
    """Divide the summed gradients by the summed weight, clip by the global norm, step; the norm before
    clipping.

    Rows without a valid slot add nothing to either sum; a step of only such rows leaves gradients of zero.
    """
    grads = []
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        grads.append(p.grad)
    torch._foreach_div_(grads, weight.clamp(min=torch.finfo(torch.float32).tiny))  # pyright: ignore
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip, foreach=True)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def validate(run: Run) -> dict[str, Any]:
    """τ by teacher-forced prefix, per-slot accuracy and coverage on held-out rows with fixed anchors, no
    noise.
    """
    assert run.heldout is not None
    meter = SlotMeter(run.config.block_size, run.device)
    for index in range(run.heldout.count):
        row = run.heldout.row(index)
        loss, blocks = row_loss(run, row, run.heldout_taps, (VALIDATION_SEED, 0, 0), noise=0.0)
        meter.add(loss, blocks, int(row.supervised.sum()))
    return meter.read()


def progress(position: Position, run: Run) -> float:
    """Share of the run that is done, by steps or by the clock where `max_minutes` comes first."""
    by_steps = position.step / run.steps
    if run.config.max_minutes is None:
        return by_steps
    return max(by_steps, position.seconds / (60 * run.config.max_minutes))


def finished(position: Position, run: Run) -> bool:
    return progress(position, run) >= 1


def schedule(done: float, warmup: float) -> float:
    """Linear warm-up over the first `warmup` share of the run, then a cosine to zero; never exactly 0."""
    if done < warmup:
        return max(done / warmup, 0.02)
    return max(0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup))), 1e-4)


def save(run: Run, optimizer: torch.optim.Optimizer, position: Position, meter: SlotMeter) -> int:
    """A checkpoint of this position; its step."""
    position = replace(position, window=meter.state())
    save_checkpoint(run.folder, run.drafter, optimizer, position, run.config.keep_checkpoints)
    return position.step


def refuse_non_finite(run: Run, step: int) -> None:
    """End the run with the rows of the first step that went wrong (−1: none did); the last checkpoint is from
    before it.
    """
    if step < 0:
        return
    rows = ", ".join(f"row {i} (documents {run.rows.documents(i)})" for _, i in run.plan.step_rows(step))
    raise UserError(
        f"step {step + 1}: the gradient is not finite: look at {rows}; a lower --lr or --clip may help; "
        "the last checkpoint is from before this step"
    )


def alarm_still(stillness: Stillness, steps: int, step: int, metrics: MetricsFile, display: Display) -> None:
    if steps < STILL_AFTER or stillness.told:
        return
    stillness.told = True
    if unmoved := stillness.unmoved():
        metrics.write("alarm", step, unmoved=unmoved)
        display.say(
            f"ALARM: {len(unmoved)} trainable tensors have not moved in {steps} steps ({unmoved[0]}, …): "
            "their gradient is zero or below the resolution of their dtype"
        )


def describe_step(step: int, facts: dict[str, Any]) -> str:
    return (
        f"step {step}  loss {facts['loss']:.4f}  τ {facts['tau']:.3f}  lr {facts['lr']:.1e}  "
        f"{facts['tokens_per_second']:,.0f} tok/s"
    )


def validate_and_tell(run: Run, step: int, metrics: MetricsFile, display: Display) -> int:
    facts = validate(run)
    metrics.write("validation", step, **facts)
    slots = " ".join(f"{a:.2f}" for a in facts["slot_accuracy"])
    display.say(
        f"validation at step {step}: τ {facts['tau']:.3f}  loss {facts['loss']:.4f}  "
        f"accuracy by slot {slots}  "
        f"({facts['blocks']} blocks, {facts['blocks_short']} short, coverage {facts['coverage']:.0%})"
    )
    return step


def memory(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    return {"memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}


class StopSignal:
    """SIGTERM and SIGINT ask for an orderly end: the step is finished and saved. A second SIGINT ends at
    once.
    """

    def __enter__(self) -> StopSignal:
        self.requested = False
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
