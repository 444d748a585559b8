"""What a run tells: per-slot sums kept on the device, `metrics.jsonl`, and the display.

Sums are added on the device every step and read only at log steps. τ counts the bonus token and is averaged
over blocks whose B−1 slots are all valid; shorter blocks would look worse than they are and are counted
apart.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn

from slipstream.data.shards import write_atomic
from slipstream.training.blocks import Blocks, accepted_prefix
from slipstream.training.loss import BlockLoss


class SlotMeter:
    """Sums over blocks and slots since the last `read`."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.slots = block_size - 1
        self.sums = torch.zeros(3 * self.slots + 4, dtype=torch.float64, device=device)
        self.labelled = self.supervised = self.blocks = self.cut = 0

    def add(self, loss: BlockLoss, blocks: Blocks, supervised: int, cut: int = 0) -> None:
        """A row with so many supervised tokens, of whose anchors the bound has cut so many."""
        valid = blocks.valid_NB[:, 1:]
        whole = valid.all(dim=1)
        accepted = accepted_prefix(loss.correct)
        parts = [
            valid.sum(0),
            loss.ce.sum(0),
            loss.correct.sum(0),
            torch.stack((whole.sum(), (accepted * whole).sum(), loss.total.detach(), loss.weight)),
        ]
        self.sums += torch.cat([p.double() for p in parts])
        self.labelled += blocks.labelled
        self.supervised += supervised
        self.blocks += blocks.count
        self.cut += cut

    def state(self) -> tuple[float, ...]:
        """All sums, for a checkpoint: a resumed run's next line covers what an uninterrupted run's does."""
        return (*self.sums.tolist(), self.labelled, self.supervised, self.blocks, self.cut)

    def load(self, state: tuple[float, ...]) -> None:
        if not state:
            return
        self.sums.copy_(torch.tensor(state[:-4], dtype=torch.float64))
        self.labelled, self.supervised, self.blocks, self.cut = map(int, state[-4:])

    def read(self, summed: Callable[[Sequence[float]], Sequence[float]] = list) -> dict[str, Any]:
        """Averages since the last read, and a fresh start; `summed` adds up what several ranks have."""
        *values, labelled, supervised, blocks, cut = summed(self.state())
        s = self.slots
        count, ce, correct = values[:s], values[s : 2 * s], values[2 * s : 3 * s]
        whole, accepted, total, weight = values[3 * s :]
        out = {
            "loss": total / max(weight, 1e-12),
            "tau": 1 + accepted / max(whole, 1),
            "accuracy": sum(correct) / max(sum(count), 1),
            "slot_accuracy": [c / max(n, 1) for c, n in zip(correct, count, strict=True)],
            "slot_ce": [c / max(n, 1) for c, n in zip(ce, count, strict=True)],
            "blocks": int(blocks),
            "blocks_short": int(blocks) - int(whole),
            "labels": int(sum(count)),
            "coverage": labelled / max(supervised, 1),
            "anchors_cut": int(cut),
        }
        self.sums.zero_()
        self.labelled = self.supervised = self.blocks = self.cut = 0
        return out


class Stillness:
    """Which trainable tensors have not moved since the start: a strided sample of each is kept in fp32."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.told = False
        self.start = {name: self._sample(p) for name, p in module.named_parameters()}

    @staticmethod
    def _sample(p: Tensor) -> Tensor:
        return p.detach().flatten()[:: max(1, p.numel() // 256)].clone()

    def unmoved(self) -> list[str]:
        return [n for n, p in self.module.named_parameters() if torch.equal(self._sample(p), self.start[n])]


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line; lines after the resumed step are dropped, so a step stands
    once. Without a path, on a rank that does not speak for all, nothing is written.
    """

    def __init__(self, path: Path | None, resumed_step: int) -> None:
        self.path = path
        if path is not None and path.exists():
            lines = path.read_text(errors="replace").splitlines()
            kept = [line for line in lines if _step_of(line) <= resumed_step]
            write_atomic(path, "".join(line + "\n" for line in kept).encode())

    def last_step(self, kind: str) -> int:
        """The step of the newest line of this kind, −1 without one."""
        assert self.path is not None
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return max((v["step"] for v in map(json.loads, lines) if v["kind"] == kind), default=-1)

    def write(self, kind: str, step: int, **values: Any) -> None:
        if self.path is None:
            return
        with self.path.open("a") as f:
            f.write(json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **values}) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")  # a line cut by a crash


class Display:
    """Lines and a progress bar: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console | None = None, log: Path | None = None) -> None:
        """To standard error, or appended to a file."""
        file = sys.stderr
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            file = log.open("a", buffering=1)
        self.console = console or Console(file=file, highlight=False, soft_wrap=True)
        self.progress: Progress | None = None
        self._last = 0.0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()  # a live bar hides the cursor, also when an error ends the work

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def start(self, what: str, total: int, done: int = 0, percent: bool = False) -> None:
        """A piece of work of `total` items, or of 100 percent."""
        self.what, self.total, self.percent = what, total, percent
        self._last = 0.0
        if self.console.is_terminal:
            count = TaskProgressColumn() if percent else MofNCompleteColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), count)
            times = (
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[facts]}"),
            )
            self.progress = Progress(*columns, *times, console=self.console)
            self.progress.start()
            self.task = self.progress.add_task(what, total=total, completed=done, facts="")

    def advance(self, done: int, facts: str = "", line: bool = False) -> None:
        """Show that `done` of the total is reached; elsewhere than on a terminal a line when asked or every
        10 s.
        """
        if self.progress is not None:
            self.progress.update(
                self.task, completed=done, facts=facts or self.progress.tasks[0].fields["facts"]
            )
        elif line or time.monotonic() - self._last > 10:
            self._last = time.monotonic()
            count = f"{done} %" if self.percent else f"{done}/{self.total}"
            self.say(f"{self.what} {count} {facts}".rstrip())

    def stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
