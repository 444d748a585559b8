"""The training loop, top to bottom: rows → taps → blocks → loss → update, with validation, checkpoints and
metrics.

This is what a rank does that drafts; one that only reads the target is in reading.py. What a run is made of
(data, target, drafter, links) is put together in setup.py; here is what happens every step. Nothing in a step
reads the device except at log, validation and save steps.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.config import UserError
from slipstream.data.pack import Row
from slipstream.distributed.channel import TapReceiver
from slipstream.distributed.link import TapLink, holding
from slipstream.distributed.pace import Pace, StopSignal, Told
from slipstream.distributed.placement import Share
from slipstream.distributed.wire import Traffic
from slipstream.training.blocks import Blocks, anchors_cut
from slipstream.training.checkpoint import Position
from slipstream.training.metrics import Display, MetricsFile, SlotMeter, Stillness
from slipstream.training.parallel import DrafterRanks
from slipstream.training.reading import (
    Start,
    coming,
    find_start,
    heldout_shares,
    open_channel,
    open_pace,
    validates,
)
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


class Window:
    """The work of this rank since the last line of metrics."""

    def __init__(self, seconds: float) -> None:
        self.began, self.told = seconds, Told(False, seconds)
        self.tokens, self.drafted, self.read = 0, 0.0, 0.0  # the last two: useful FLOP

    def add(self, run: Run, row: Row, blocks: Blocks, share: Share) -> None:
        used = row.spans()[-1][1]
        self.tokens += used
        self.drafted += run.flops.drafter(used, blocks.count, blocks.labels)
        self.read += run.flops.target(used) if share.draw == 0 else 0.0

    def close(self, run: Run, seconds: float, warm: Warm | None, now: Told) -> dict[str, float]:
        """The speed of all ranks up to `seconds` of training, and a fresh start."""
        took, before = seconds - self.began, self.told
        tokens, drafted, read = run.crew.summed([self.tokens, self.drafted, self.read])
        facts: dict[str, float] = {"tokens_per_second": tokens / took}
        if warm is not None:
            work = drafted / warm.ceiling + read / warm.target_ceiling
            facts["mfu"] = work / took / run.crew.place.ranks
            facts["recompiled"] = graphs_compiled() - warm.graphs
        if (
            run.crew.place.split
        ):  # a waiting rank's clock goes on in a validation or a save, the run's does not
            lasted = max(now.seconds - before.seconds, 1e-9)
            facts["target_waits"] = min(1.0, (now.readers_waited - before.readers_waited) / lasted)
            facts["drafter_waits"] = min(1.0, (now.drafters_waited - before.drafters_waited) / lasted)
        self.tokens, self.drafted, self.read = 0, 0.0, 0.0
        self.began, self.told = seconds, now
        return facts


def train(run: Run, display: Display) -> Trained:
    """Train `run.drafter` to the end of its plan, or to the first SIGTERM/SIGINT on any rank; every step made
    is in the checkpoint it leaves.
    """
    config, crew, drafter, device = run.config, run.crew, run.drafter, run.device
    optimizer = make_optimizer(drafter, config, device)
    ranks = DrafterRanks(drafter, crew.drafters)
    start = resume(run, optimizer, ranks, display)
    position = start.position
    metrics = MetricsFile(run.folder / "metrics.jsonl" if crew.first else None, position.step)
    meter = SlotMeter(config.block_size, device)
    if crew.first:
        meter.load(position.window)
    stillness = Stillness(drafter)
    first_bad = torch.full((), -1, device=device)
    saved_step, validated_step = position.step, start.validated
    labels = 0  # on this rank, since the last sum over ranks
    window = Window(position.seconds)

    warm: Warm | None = None
    pace = open_pace(run, position)
    with StopSignal() as stop:
        pace.begin(position.step, Told(stop.requested, position.seconds))
        if device.type == "cuda" and pace.makes(position.step):
            warm = warm_up(run, optimizer, display)
        with open_link(run, pace, start) as (run, traffic):
            began = time.monotonic() - position.seconds  # as if the run had never paused
            display.start("train", 100, int(100 * pace.progress(position.step)), percent=True)
            while pace.makes(step := position.step):
                # one optimiser step: sums over the rows of the step, on all ranks, divided once
                weight = torch.zeros((), device=device)
                learning_rate = config.lr * schedule(pace.progress(step), config.warmup)
                check_taps = device.type == "cpu" or step % config.log_interval == 0
                mine = [s for s in run.plan.shares(step) if s.drafter == crew.world.rank]
                for share in mine:
                    row = run.rows.row(share.index)
                    key = (config.seed, share.epoch, share.draw)
                    documents = run.rows.documents(share.index)
                    loss, blocks = row_loss(run, row, run.taps, key, config.noise, check_taps, documents)
                    ranks.backward(loss.total, last=share is mine[-1])
                    weight += loss.weight
                    cut = anchors_cut(row, blocks.count, config.anchor_share)
                    meter.add(loss, blocks, int(row.supervised.sum()), cut)
                    labels += blocks.labels
                    window.add(run, row, blocks, share)
                norm = update(drafter, optimizer, weight, config.clip, learning_rate, ranks)
                first_bad = torch.where((first_bad < 0) & ~norm.isfinite(), step, first_bad)
                position = replace(position, step=step + 1, seconds=time.monotonic() - began)
                pace.begin(position.step, tell(run, stop.requested, position.seconds, traffic()))
                ends = not pace.makes(position.step)

                log = position.step % config.log_interval == 0 or position.step == 1
                log = log or (ends and pace.finished)
                save_due = position.step % config.save_interval == 0 or ends
                if log or save_due or device.type == "cpu":
                    refuse_non_finite(run, int(first_bad))
                if save_due:
                    (more,) = crew.summed([labels])
                    position, labels = replace(position, labels=position.labels + int(more)), 0
                done = int(100 * pace.progress(position.step))
                if log:
                    facts = meter.read(crew.summed) | {"lr": learning_rate, "grad_norm": float(norm)}
                    now = pace.told(position.step)
                    facts |= window.close(run, time.monotonic() - began, warm, now)
                    metrics.write("train", position.step, **facts, **memory(device))
                    display.advance(done, describe_step(position.step, facts), line=True)
                    made = position.step - start.position.step
                    alarm_still(stillness, made, position.step, metrics, display)
                else:
                    display.advance(done, f"step {position.step}")

                paused = time.monotonic()  # the run's clock counts training only
                if not ends and validates(run, pace, position.step, validated_step):
                    validated_step = validate_and_tell(run, position.step, metrics, display)
                if save_due and position.step > saved_step:
                    saved_step = save(run, optimizer, ranks, position, meter)
                began += time.monotonic() - paused
            display.stop()
            if validates(run, pace, position.step, validated_step):
                validate_and_tell(run, position.step, metrics, display)
    pace.close()
    return Trained(position, interrupted=not pace.finished)


@contextlib.contextmanager
def open_link(run: Run, pace: Pace, start: Start) -> Iterator[tuple[Run, Callable[[], Traffic]]]:
    """The run with the links that its steps read from, and a function that says what has come over them."""
    crew, config = run.crew, run.config
    nothing = Traffic(0, 0, 0.0)
    if crew.reads:
        yield run, lambda: nothing
        return
    sources, rows = crew.place.partners(crew.world.rank), coming(run, pace, start)
    with TapReceiver(rows, sources, config.token_budget, open_channel(run)) as receiver:
        taps: TapLink = receiver
        if config.anchor_draws > 1:  # what the link gives is valid until the next row
            taps = holding(lambda row: receiver(row).clone(), run.plan.rows_a_rank)
        yield replace(run, taps=taps, heldout_taps=receiver), lambda: receiver.traffic


def tell(run: Run, stop: bool, seconds: float, traffic: Traffic) -> Told:
    """What this drafter tells the others before a step; the clock is the first rank's."""
    return Told(stop, seconds if run.crew.first else 0.0, 0.0, traffic.waited)


def resume(run: Run, optimizer: torch.optim.Optimizer, ranks: DrafterRanks, display: Display) -> Start:
    """Where the newest complete checkpoint stands, loaded into drafter and optimiser; else the start."""
    start = find_start(run)
    if start.checkpoint is None:
        ranks.share(optimizer)
        return start
    position = ranks.load(start.checkpoint, optimizer, run.fingerprint)
    passed_over = f"; passed over, incomplete: {', '.join(start.damaged)}" if start.damaged else ""
    display.say(f"resume: {start.checkpoint} (step {position.step}){passed_over}")
    return start


@torch.no_grad()
def validate(run: Run) -> dict[str, Any]:
    """τ by teacher-forced prefix, per-slot accuracy and coverage on held-out rows with fixed anchors, no
    noise; over the rows of all ranks.
    """
    assert run.heldout is not None
    meter = SlotMeter(run.config.block_size, run.device)
    for share in heldout_shares(run):
        if share.drafter == run.crew.world.rank:
            row = run.heldout.row(share.index)
            loss, blocks = row_loss(
                run,
                row,
                run.heldout_taps,
                (VALIDATION_SEED, 0, 0),
                noise=0.0,
                documents=run.heldout.documents(share.index),
            )
            cut = anchors_cut(row, blocks.count, run.config.anchor_share)
            meter.add(loss, blocks, int(row.supervised.sum()), cut)
    return meter.read(run.crew.summed)


def schedule(done: float, warmup: float) -> float:
    """Linear warm-up over the first `warmup` share of the run, then a cosine to zero; never exactly 0."""
    if done < warmup:
        return max(done / warmup, 0.02)
    return max(0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup))), 1e-4)


def save(
    run: Run, optimizer: torch.optim.Optimizer, ranks: DrafterRanks, position: Position, meter: SlotMeter
) -> int:
    """A checkpoint of this position; its step."""
    position = replace(position, window=tuple(run.crew.summed(meter.state())))
    ranks.save(run.folder, optimizer, position, run.config.keep_checkpoints)
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
        + (f"  {cut:,} ANCHORS CUT by --max-anchors" if (cut := facts["anchors_cut"]) else "")
        + waits(facts)
        + (
            f"  {facts['recompiled']} RECOMPILED: see TORCH_LOGS=recompiles"
            if facts.get("recompiled")
            else ""
        )
    )


def waits(facts: dict[str, Any]) -> str:
    """Of a split run: shares of the time in which a side stands still for the other."""
    if "target_waits" not in facts:
        return ""
    return f"  target waits {facts['target_waits']:.0%}, drafter {facts['drafter_waits']:.0%}"


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
