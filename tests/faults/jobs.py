"""Whole runs on several ranks, started as a user starts them; what is left of them when they end."""

from __future__ import annotations

import filecmp
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slipstream.training.checkpoint import complete_checkpoints, verify_checkpoint
from tests.faults.injured import Fault
from tests.integration.conftest import World, losses

PLACES = {
    "two": "--ranks 2",
    "two, sharded": "--ranks 2 --drafter-sharding",
    "split 1+1": "--dp-pairs 1",
    "split 2+1": "--target-ranks 2 --drafter-ranks 1",
}
SETTINGS = (
    "--target-layer-ids 0 1 2 3 4 5 6 --rows-per-step 4 --max-steps 30 --save-interval 3 "
    "--keep-checkpoints 20 --eval-interval 7 --noise 0.05"
)
GONE_S = 30.0
"""After a death every process is gone."""
LIMIT_S = 240.0
HOST = re.escape(socket.gethostname())
TOLD: list[str] = []
"""Seconds that were measured, for the end of the tests' output."""


def command(world: World, run: Path, *flags: str) -> list[str]:
    """Arguments of `slipstream` for one and the same run, however it is placed."""
    return world.train(run, *SETTINGS.split(), *flags)


class Job:
    """Processes that belong together, known by a mark in their environment, whatever becomes of their
    parents; and the sockets that they listen on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.id = folder, f"fault-test-{uuid.uuid4().hex}"
        self.started: list[subprocess.Popen[bytes]] = []
        self.listened: set[str] = set()
        self.log, self.note = folder / "output", folder / "note"
        self.note.unlink(missing_ok=True)
        self.log.write_bytes(b"")

    def start(self, arguments: list[str], mark: str = "") -> None:
        """`python ARGUMENTS…`, all of its output in one file."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLIPSTREAM_TEST": f"{self.id}{mark}"}
        with self.log.open("ab") as log:
            self.started.append(
                subprocess.Popen(
                    [sys.executable, *arguments], stdout=log, stderr=log, env=environment, process_group=0
                )
            )

    def processes(self, mark: str = "") -> list[int]:
        """Those that run: a zombie has no environment."""
        wanted, found = f"{self.id}{mark}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if wanted in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def wait(self, done: Callable[[], bool] | None = None) -> float:
        """Until all processes are gone, or `done`; the time then."""
        deadline, until = time.monotonic() + LIMIT_S, done or (lambda: not self.processes())
        while not until():
            ended_badly = [process for process in self.started if process.poll()]
            assert done is None or not ended_badly, self.said()
            assert time.monotonic() < deadline, f"still there: {self.commands()}\n{self.said()}"
            self.listened |= listening(self.processes())
            time.sleep(0.1)
        return time.monotonic()

    def end(self) -> list[int]:
        """Exit codes, once nothing is left of the job: no process, no socket."""
        self.wait()
        codes = [process.wait(1) for process in self.started]
        assert not self.listened & listening(None)
        folder = str(self.folder).encode()
        named = [p.parent.name for p in Path("/proc").glob("[0-9]*/cmdline") if folder in read(p)]
        assert not named, f"processes that name the run: {named}"
        return codes

    def commands(self) -> list[bytes]:
        return [read(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ") for pid in self.processes()]

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def last_line(self) -> str:
        return self.said().splitlines()[-1]

    def fault_time(self) -> float:
        assert self.note.exists(), f"the fault did not happen\n{self.said()}"
        return float(self.note.read_text())

    def kill(self, mark: str = "") -> None:
        for pid in self.processes(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def listening(pids: list[int] | None) -> set[str]:
    """Inodes of listening TCP sockets, of these processes or of the whole machine."""
    there = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        fields = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        there |= {f[9] for f in fields if f[3] == "0A"}
    if pids is None:
        return there
    held = set()
    for pid in pids:
        try:
            links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        held |= {link[8:-1] for link in links if link.startswith("socket:[")}
    return there & held


def whole_command(job: Job, arguments: list[str], fault: Fault | None = None) -> int:
    """`slipstream ARGUMENTS…`, with a fault in it or without one; its exit code."""
    program = ["-m", "slipstream.cli"]
    if fault is not None:
        program = replace(fault, note=str(job.note)).arguments()
    job.start([*program, *arguments])
    (code,) = job.end()
    return code


def equal_to_the_last_bit(run: Path, other: Path) -> None:
    for kind in ("train", "validation"):
        assert losses(run, kind) == losses(other, kind)
    last, expected = (complete_checkpoints(r)[-1] for r in (run, other))
    assert last.name == expected.name
    verify_checkpoint(last)
    files = sorted(p.name for p in expected.iterdir() if p.suffix in (".safetensors", ".distcp"))
    assert len(files) == 2
    assert filecmp.cmpfiles(last, expected, files, shallow=False)[0] == files
    positions = [json.loads((r / "position.json").read_text()) | {"seconds": 0} for r in (last, expected)]
    assert positions[0] == positions[1]
    left = [p for p in run.rglob("*") if p.name.endswith((".partial", ".tmp"))]
    assert not left, "what was left half-written is cleaned up"


def begins_like(run: Path, other: Path) -> int:
    """What a run has written so far is what the other has written; the step of its newest checkpoint."""
    if (run / "metrics.jsonl").exists():
        whole = (run / "metrics.jsonl").read_bytes()
        (run / "metrics.jsonl").write_bytes(whole[: whole.rfind(b"\n") + 1])
        expected = losses(other)
        assert {step: line for step, line in losses(run).items() if expected[step] != line} == {}
    found = complete_checkpoints(run)
    for checkpoint in found:
        verify_checkpoint(checkpoint)
    return int(found[-1].name.removeprefix("step_")) if found else 0


def some(seed: int, lowest: int, highest: int) -> int:
    return random.Random(seed).randint(lowest, highest)


def waits(run: Path) -> dict[str, float]:
    """Shares of the time in which each side of a split run waited, over all steps of which it is known."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in found if line["kind"] == "train"][5:]
    assert all(0 <= line[f"{side}_waits"] <= 1 for line in lines for side in ("target", "drafter"))
    return {side: sum(line[f"{side}_waits"] for line in lines) / len(lines) for side in ("target", "drafter")}
