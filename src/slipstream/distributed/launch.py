"""How `slipstream train` starts ranks of its own on one node: torchrun below it, their logs, their end.

With torchrun started by hand, on one node or several, nothing of this is used but `is_rank`. What a rank then
does is world.py's. Without torch, so that the process that only waits stays small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from slipstream.config import read_environment, share_threads
from slipstream.distributed.watch import MARK

POLL_S = 0.2
USER_ERROR = "error: "
"""How the cause of a death begins when the user can mend it."""


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return read_environment("TORCHELASTIC_RUN_ID")["TORCHELASTIC_RUN_ID"] is not None


def start_ranks(argv: list[str], ranks: int, folder: Path, max_restarts: int) -> int:
    """Run `python ARGV…` as `ranks` ranks on this node; their exit code.

    Rank 0 has this process's console, the others write into `folder`/logs, torchrun too. The first SIGTERM or
    SIGINT goes to every rank once, which may take its time to save; the second ends them all. Nothing is left
    running, whatever way this ends.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    share_threads(ranks)
    silent = ",".join(f"{rank}:3" for rank in range(1, ranks))
    options = {
        "nnodes": 1,
        "nproc-per-node": ranks,
        "max-restarts": max_restarts,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "127.0.0.1:0",
        "rdzv-id": time.strftime("%Y%m%d-%H%M%S"),
        "local-addr": "127.0.0.1",
        "log-dir": logs,
        "redirects": silent or "0",
        "signals-to-handle": "SIGHUP",
    }
    torchrun = [f"--{name}={value}" for name, value in options.items()]
    with Requests() as requests:
        agent = subprocess.Popen(
            [sys.executable, "-m", "slipstream.distributed.launch", str(logs), *torchrun, *argv],
            process_group=0,  # what a terminal sends reaches this process alone
        )
        try:
            code = _follow(agent, requests)
        finally:
            if agent.poll() is None:
                agent.send_signal(signal.SIGHUP)
                agent.wait()
    if requests.first is not None and code != 0:
        return 128 + requests.first
    if code < 0:
        print(f"slipstream: torchrun was ended by signal {-code}; logs: {logs}", file=sys.stderr)
    return code if code >= 0 else 128 - code


class Requests:
    """SIGTERM, SIGINT and SIGHUP noted instead of obeyed."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.again = False

    def __enter__(self) -> Requests:
        wanted = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        before = {number: signal.getsignal(number) for number in wanted}
        self._before = {n: handler for n, handler in before.items() if handler != signal.SIG_IGN}  # nohup
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.again = self.first is not None
        self.first = self.first or number

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _follow(agent: subprocess.Popen, requests: Requests) -> int:
    """The agent's exit code; meanwhile requests are passed on."""
    asked: set[int] | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return agent.wait(timeout=POLL_S)
        if requests.first is None:
            continue
        ranks = children(agent.pid)
        if asked is None and ranks:
            asked = ranks
            number = signal.SIGTERM if requests.first == signal.SIGHUP else requests.first
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        elif requests.again or asked is None or ranks - asked:  # none yet to be asked, or started anew since
            agent.send_signal(signal.SIGHUP)
            return agent.wait()


def children(pid: int) -> set[int]:
    out = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                out.add(int(stat.parent.name))
    return out


def _agent(logs: Path, arguments: list[str]) -> int:
    """torchrun in a process of its own, its words in a file, its exit code 2 for what the user can mend, else
    the first dead rank's.

    Python's stderr is moved, the descriptor is not: that is rank 0's console.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    ctypes.CDLL(None).prctl(1, signal.SIGHUP)  # PR_SET_PDEATHSIG: the launcher's end is this one's
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # ranks that are asked to save are given the time
    try:
        main(arguments)
    except ChildFailedError as e:
        print(e, file=sys.stderr)
        rank, failure = e.get_first_failure()
        what = f"exit code {failure.exitcode}" if failure.exitcode > 0 else failure.signal_name()
        line = said_of_death(logs) or f"{MARK}{rank} on {socket.gethostname()} ended: {what}"
        os.write(2, f"{line}; logs: {logs}\n".encode())
        # the dead rank's own code may be lost: torchrun ends it when another follows faster
        return 2 if f" ended: {USER_ERROR}" in line else max(failure.exitcode, 1)
    return 0


def said_of_death(logs: Path) -> str | None:
    """What a sentinel said in the newest logs."""
    found = sorted(logs.glob("*/attempt_*/*/stderr.log"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith(MARK)]
        if lines and path.parents[1] == found[-1].parents[1]:
            return re.sub("; (this rank .*|the job) stops?$", "", lines[-1])
    return None


if __name__ == "__main__":
    with open(Path(sys.argv[1]) / "torchrun.log", "a", buffering=1) as log, contextlib.redirect_stderr(log):
        code = _agent(Path(sys.argv[1]), sys.argv[2:])
    sys.exit(code)
