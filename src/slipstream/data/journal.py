"""The files of `slipstream regenerate`: what was answered, what was left out, how it stands.

`answers.jsonl` is only ever appended to, a conversation at a time: what a kill cut off is dropped by the
next run. `left_out.log` names every prompt without an answer, an object a line; `regenerate.json` holds the
settings and the counts. Not here: what is asked and what an end means (`regenerate`).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from slipstream.config import UserError
from slipstream.data.shards import write_atomic

ANSWERS, LEFT_OUT, STATE = "answers.jsonl", "left_out.log", "regenerate.json"
SYNC_SECONDS = 5.0
_HEAD = re.compile(rb'\{"id": "([^"]+)", "part": (\d+), "parts": (\d+), "finished": (true|false), .*\}\n')


@dataclass(frozen=True)
class Line:
    """A record for `prepare`, and whether the target ended its last answer itself."""

    finished: bool
    record: dict[str, Any]


class LeftOut(Exception):
    """A prompt without an answer: `outcome` is failed (tried again by a rerun) or skipped (of no use)."""

    def __init__(self, outcome: str, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.outcome, self.reason, self.detail = outcome, reason, detail


class Journal:
    """The output folder, held by one process at a time. `done` and `skipped` are what earlier runs and this
    one have ended, `truncated` how many of the done ones were cut off at a length limit.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        self._claim()
        self._answers = FileIO(folder / ANSWERS, "a+")
        self._left_out = FileIO(folder / LEFT_OUT, "a+")
        try:
            fcntl.flock(self._answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is writing into it; wait for it to end") from None
        self.done: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.truncated = 0
        self._synced = time.monotonic()
        self._read_answers()
        self._read_left_out()

    def knows(self, key: str) -> bool:
        return key in self.done or key in self.skipped

    def write(self, key: str, lines: list[Line]) -> None:
        """A conversation's lines, in one piece. Each key is written once."""
        assert key not in self.done
        data = ""
        for part, line in enumerate(lines, 1):
            head = {"id": key, "part": part, "parts": len(lines), "finished": line.finished}
            data += json.dumps({**head, **line.record}) + "\n"
        _append(self._answers, data.encode())
        self.done.add(key)
        self.truncated += not lines[-1].finished
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._answers.fileno())
            self._synced = time.monotonic()

    def leave_out(self, key: str, where: str, why: LeftOut) -> None:
        line = {"id": key, "outcome": why.outcome, "reason": why.reason, "where": where, "detail": why.detail}
        _append(self._left_out, (json.dumps(line) + "\n").encode())
        if why.outcome == "skipped":
            self.skipped[key] = why.reason

    def close(self, counts: dict[str, Any]) -> None:
        """Sync the answers and write how it stands."""
        os.fsync(self._answers.fileno())
        self._write_state(counts)
        self._answers.close()
        self._left_out.close()

    def _claim(self) -> None:
        state = self.folder / STATE
        if self.folder.is_dir() and not state.exists() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder}: holds other files; choose a new or empty --output-dir")
        if not state.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_state({})
            return
        try:
            before = json.loads(state.read_text())["settings"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{state}: not what regenerate writes; choose another --output-dir") from None
        for name, value in self.settings.items():
            if before.get(name) != value:
                raise UserError(
                    f"--{name.replace('_', '-')} {value}: {self.folder} holds answers made with "
                    f"{before.get(name)}; choose another --output-dir"
                )

    def _write_state(self, counts: dict[str, Any]) -> None:
        state = {"settings": self.settings, "counts": counts}
        write_atomic(self.folder / STATE, (json.dumps(state, indent=2) + "\n").encode())

    def _read_answers(self) -> None:
        """Whole conversations; what follows the last of them is cut off."""
        self._answers.seek(0)
        end = whole = 0
        with open(self._answers.fileno(), "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                end += len(line)
                head = _HEAD.fullmatch(line)
                if head is None:
                    if line.endswith(b"\n"):
                        where = f"{self.folder / ANSWERS}:{number}"
                        raise UserError(f"{where}: not a line that regenerate wrote; remove it")
                    break
                if head[2] == head[3]:
                    self.done.add(head[1].decode())
                    self.truncated += head[4] == b"false"
                    whole = end
        self._answers.truncate(whole)

    def _read_left_out(self) -> None:
        self._left_out.seek(0)
        lines = self._left_out.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._left_out.truncate(sum(map(len, lines)) - len(lines.pop()))
        for line in map(json.loads, lines):
            if line["outcome"] == "skipped":
                self.skipped[line["id"]] = line["reason"]


def _append(file: FileIO, data: bytes) -> None:
    written = file.write(data)
    if written != len(data):  # a full disk takes a part
        raise OSError(28, "No space left on device", file.name)
