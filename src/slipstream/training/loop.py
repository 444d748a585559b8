"""The training loop, top to bottom: rows → taps → blocks → loss → update, with validation, checkpoints and
metrics.

One process, one device. What a run is made of (data, target, drafter, links) is put together in setup.py;
here is what happens every step. Nothing in a step reads the device except at log, validation and save steps.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from slipstream.config import UserError
from slipstream.training.checkpoint import (
    Position,
    clear_leftovers,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from slipstream.training.metrics import Display, MetricsFile, SlotMeter, Stillness
from slipstream.training.run import Run
from slipstream.training.step import make_optimizer, row_loss, update
from slipstream.training.warmup import Warm, graphs_compiled, warm_up

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
    optimizer = make_optimizer(drafter, config, device)
    position = resume(run, optimizer, display)
    metrics = MetricsFile(run.folder / "metrics.jsonl", position.step)
    meter = SlotMeter(config.block_size, device)
    meter.load(position.window)
    stillness = Stillness(drafter)
    first_bad = torch.full((), -1, device=device)
    first_step = saved_step = position.step
    validated_step = metrics.last_step("validation")
    tokens, drafted, read, window_began = 0, 0, 0, position.seconds  # drafted and read: useful FLOP

    warm: Warm | None = None
    with StopSignal() as stop:
        if device.type == "cuda" and not finished(position, run):
            warm = warm_up(run, optimizer, display)
        began = time.monotonic() - position.seconds  # as if the run had never paused
        display.start("train", 100, int(100 * progress(position, run)), percent=True)
        while not finished(position, run) and not stop.requested:
            # one optimiser step: sums over the rows of the step, divided once
            step = position.step
            weight = torch.zeros((), device=device)
            learning_rate = config.lr * schedule(progress(position, run), config.warmup)
            check_taps = device.type == "cpu" or step % config.log_interval == 0
            for epoch, index, draw in run.plan.step_rows(step):
                row = run.rows.row(index)
                key = (config.seed, epoch, draw)
                loss, blocks = row_loss(run, row, run.taps, key, config.noise, check_taps)
                loss.total.backward()
                weight += loss.weight
                meter.add(loss, blocks, int(row.supervised.sum()))
                position = replace(position, labels=position.labels + blocks.labels)
                used = int((row.documents >= 0).sum())
                tokens += used
                drafted += run.flops.drafter(used, blocks.count, blocks.labels)
                read += run.flops.target(used) if draw == 0 else 0
            norm = update(drafter, optimizer, weight, config.clip, learning_rate)
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
                took = time.monotonic() - began - window_began
                facts["tokens_per_second"] = tokens / took
                if warm is not None:
                    facts["mfu"] = (drafted / warm.ceiling + read / warm.target_ceiling) / took
                    facts["recompiled"] = graphs_compiled() - warm.graphs
                tokens, drafted, read, window_began = 0, 0, 0, time.monotonic() - began
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
    rows = ", ".join(f"row {i} (documents {run.rows.documents(i)})" for _, i, _ in run.plan.step_rows(step))
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
        + (f"  MFU {facts['mfu']:.0%}" if "mfu" in facts else "")
        + (
            f"  {facts['recompiled']} RECOMPILED: see TORCH_LOGS=recompiles"
            if facts.get("recompiled")
            else ""
        )
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
