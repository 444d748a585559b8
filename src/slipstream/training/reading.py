"""What a rank does that only reads the target, in a split run; and what it and the drafting loop (loop.py)
must both know of the order of the rows.

All ranks walk one sequence: before each step the validation, if one is due, then the step's rows. Each side
takes its own out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.distributed.channel import Channel, Coming, TapSender
from slipstream.distributed.pace import Pace, StopSignal, Told
from slipstream.distributed.placement import Share
from slipstream.training.checkpoint import (
    Position,
    clear_leftovers,
    newest_checkpoint,
    read_position,
    verify_checkpoint,
)
from slipstream.training.metrics import Display, MetricsFile
from slipstream.training.run import Rows, Run

DEADLINE_S = 12 * 60.0
"""The longest that one end of a link waits for the other: longer than a compilation, a validation, a save."""


@dataclass(frozen=True)
class Start:
    """Where all ranks begin."""

    position: Position
    validated: int
    """The last step that was validated; −1 for none."""
    checkpoint: Path | None
    damaged: list[str]
    """Newer checkpoints that were passed over."""


def find_start(run: Run) -> Start:
    """The newest complete checkpoint, or the beginning: what the first rank finds in the run's folder."""

    def look() -> Start:
        clear_leftovers(run.folder)
        newest, damaged = newest_checkpoint(run.folder)
        position = Position(step=0, seconds=0.0, labels=0, fingerprint=run.fingerprint)
        if newest is not None:
            verify_checkpoint(newest)
            position = read_position(newest)
        validated = MetricsFile(run.folder / "metrics.jsonl", position.step).last_step("validation")
        return Start(position, validated, newest, damaged)

    return run.crew.by_first(look)


def open_pace(run: Run, position: Position) -> Pace:
    """Rows are asked for `link_credits` ahead, so whether their steps are made must be known by then."""
    config, crew = run.config, run.crew
    lag = (config.link_credits + 1) * config.anchor_draws if crew.place.split else 1
    return Pace(position.step, run.steps, position.seconds, config.max_minutes, crew.every, lag)


def open_channel(run: Run) -> Channel:
    """The same on both ends of every link of the run."""
    assert run.crew.notes is not None
    taps = len(run.ends.target_layer_ids)
    width = taps * run.ends.hidden_size
    return Channel(taps, width, run.dtype, run.device, run.crew.notes, DEADLINE_S, run.config.link_credits)


def validates(run: Run, pace: Pace, step: int, validated: int) -> bool:
    """Whether the held-out rows come before this step; the last validation was before `validated`."""
    if run.heldout is None or validated >= step:
        return False
    if step > pace.first and step % run.config.eval_interval == 0:
        return True
    return not pace.makes(step) and pace.finished


def heldout_shares(run: Run) -> list[Share]:
    """The held-out rows, dealt to all ranks."""
    assert run.heldout is not None
    tokens = [run.heldout.used(i) for i in range(run.heldout.count)]
    dealt = run.crew.place.deal(tokens, 0)
    return [Share(0, i, 0, *ranks) for i, ranks in enumerate(dealt)]


def walk(run: Run, pace: Pace, start: Start) -> Iterator[tuple[int, Rows, list[Share]]]:
    """(step, rows, their shares) in the order of all ranks; a step without rows to read is left out.

    Rows of which taps are held are read in the first of their steps, or where the run begins.
    """
    step, validated = start.position.step, start.validated
    while True:
        if validates(run, pace, step, validated):
            assert run.heldout is not None
            validated = step
            yield step, run.heldout, heldout_shares(run)
        if not pace.makes(step):
            return
        anew = step % run.plan.draws == 0 or step == start.position.step
        yield step, run.rows, run.plan.shares(step) if anew else []
        step += 1


def coming(run: Run, pace: Pace, start: Start) -> Iterator[Coming]:
    """Every row that this drafter rank will be sent, in order; read ahead of the steps."""
    for _, rows, shares in walk(run, pace, start):
        for share in shares:
            if share.drafter == run.crew.world.rank:
                yield Coming(share.index, rows.used(share.index), share.reader)


def read_for_drafters(run: Run, display: Display) -> bool:
    """Read this rank's rows and send their taps, to the end of the run; whether it was stopped before."""
    crew, target = run.crew, run.target
    assert target is not None
    start = find_start(run)
    if start.checkpoint is not None:
        display.say(f"resume: {start.checkpoint} (step {start.position.step})")
    pace = open_pace(run, start.position)
    with StopSignal() as stop:
        if run.device.type == "cuda" and pace.makes(start.position.step):
            display.say("compile: the target reads the fullest row")
            target.taps(run.rows.row(max(range(run.rows.count), key=run.rows.used)))
            torch.cuda.synchronize(run.device)
        with TapSender(crew.place.partners(crew.world.rank), open_channel(run)) as sender:
            begun = start.position.step
            pace.begin(begun, Told(stop.requested, 0.0))
            for step, rows, shares in walk(run, pace, start):
                for share in shares:
                    if share.reader == crew.world.rank:
                        row = rows.row(share.index)
                        sender.send(row, target.taps(row), share.drafter, rows.documents(share.index))
                if rows is run.rows:
                    traffic = sender.traffic
                    pace.begin(step + 1, Told(stop.requested, 0.0, traffic.waited))
                    if (step + 1) % run.config.log_interval == 0:
                        display.say(
                            f"read step {step + 1}  {traffic.rows} rows, {traffic.bytes / 2**30:.1f} GiB "
                            f"sent, waited {traffic.waited:.1f} s"
                        )
    pace.close()
    return not pace.finished
