"""`slipstream` with one fault in it: `python tests/faults/injured.py FAULT ARGUMENTS…`.

Each rank runs this file in place of `slipstream.cli`, and the rank that the fault names hurts itself, or
another, at a counted call of one function once its training has begun. Only in a rank's first life: started
again, it is well. What tests do with it is in jobs.py.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream import cli
from slipstream.distributed import launch

HOLD_S = 60.0


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where and when."""

    what: str
    """`kill` or `stop` (SIGKILL or SIGTERM to the victim), `hold` (the call does not return for a minute),
    `poison` (the last document of a row gets a NaN among its taps), `slow` (every call from this one on
    takes longer).
    """
    function: str
    """module:name within slipstream, or within torch."""
    rank: int
    """Whose calls are counted."""
    call: int = 1
    after: bool = False
    """Once the call has returned, not before it is made."""
    victim: int | None = None
    """Another rank; −1 is the launcher."""
    note: str = ""
    """A file for when it happened, and for what a test must know."""

    def __str__(self) -> str:
        place = self.function.partition(":")[2]
        victim = "" if self.victim is None else f" at rank {self.rank}'s"
        who = self.rank if self.victim is None else self.victim
        return f"{self.what} rank {who}{victim} {'after' if self.after else 'before'} {place} no. {self.call}"

    def arguments(self) -> list[str]:
        return [__file__, json.dumps(asdict(self))]


class Injury:
    """The fault in the process of the rank that has it."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.calls, self.armed = fault, 0, False
        module, _, path = fault.function.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = vars(owner)[each]
        self.whole: Callable[..., Any] = vars(owner)[name]
        setattr(owner, name, lambda *args, **kwargs: self.call(*args, **kwargs))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += self.armed
        fault, due = self.fault, self.armed and self.calls == self.fault.call
        if fault.what == "slow" and self.armed and self.calls >= fault.call:
            time.sleep(0.03)
        if due and not fault.after:
            self.happen()
        result = self.whole(*args, **kwargs)
        if due and fault.what == "poison":
            row = args[1]
            Path(fault.note).write_text(str(row.row_id))
            result[row.spans()[-1][0] + 1, 0] = float("nan")
        if due and fault.after:
            self.happen()
        return result

    def happen(self) -> None:
        if self.fault.what not in ("kill", "stop", "hold"):
            return
        victim = os.getpid() if self.fault.victim is None else pid_of(self.fault.victim)
        Path(self.fault.note).write_text(str(time.monotonic()))
        if self.fault.what == "hold":
            time.sleep(HOLD_S)
        else:
            os.kill(victim, signal.SIGKILL if self.fault.what == "kill" else signal.SIGTERM)


def pid_of(rank: int) -> int:
    """Of another rank under the same torchrun, or (−1) of who started that."""
    if rank < 0:
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
    for pid in launch.children(os.getppid()):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no rank {rank}")


def be_injured(fault: Fault) -> None:
    """In a rank: torch is imported no sooner than in a well one."""
    well = cli.train_rank

    def train_rank(config: cli.TrainConfig) -> int:
        from slipstream.training import rank

        injury, work = Injury(fault), rank.work

        def injured(*args: Any) -> Any:
            injury.armed = True
            return work(*args)

        rank.work = injured
        return well(config)

    cli.train_rank = train_rank


def main() -> int:
    fault = Fault(**json.loads(sys.argv[1]))
    if launch.is_rank():
        if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (str(fault.rank), "0"):
            be_injured(fault)
    else:
        start = launch.start_ranks
        launch.start_ranks = lambda argv, *rest: start([*fault.arguments(), *argv[2:]], *rest)
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
