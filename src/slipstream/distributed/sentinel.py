"""A rank's death is told to all other ranks, also to those that wait in a collective and run no Python.

Here is a rank's side: it starts a small process beside it, its sentinel (watch.py), and tells it how it ends.
Who starts ranks is in launch.py, what their errors mean in world.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from slipstream.distributed.watch import BEAT_S, SILENCE_S


class Sentinel:
    """The rank's hold on its sentinel. Whoever ends without `done` has died, with or without `fail`."""

    def __init__(self, child: subprocess.Popen[bytes], pipe: int) -> None:
        self._child = child
        self._pipe = pipe
        """A bare descriptor, which the end of the process closes and no garbage collection before."""

    @staticmethod
    def start(
        rank: int,
        size: int,
        host: str,
        rank0: str,
        exchange: Callable[[str | None], str],
        silence_s: float = SILENCE_S,
    ) -> Sentinel:
        """On all ranks at once. `host` is how this one's machine is called in messages, `rank0` the name or
        address by which the others reach rank 0's. `exchange` is called once: rank 0 gives a text, the others
        None, and all get that text. `ConnectionError` where rank 0's sentinel cannot be reached.
        """
        facts = [rank, size, host, rank0, silence_s, os.getpid(), os.getppid()]
        script = str(Path(__file__).resolve().with_name("watch.py"))
        inlet, pipe = os.pipe()
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", script, json.dumps(facts)],
            stdin=inlet,
            stdout=subprocess.PIPE,
            start_new_session=True,  # what ends the rank's own group leaves its sentinel to tell of it
        )
        os.close(inlet)
        assert child.stdout is not None
        if rank == 0:
            exchange(child.stdout.readline().decode().strip())
        else:
            os.write(pipe, exchange(None).encode() + b"\n")
            answer = child.stdout.readline().decode().strip()
            if answer != "ok":
                raise ConnectionError(answer)
        child.stdout.close()
        return Sentinel(child, pipe)

    def fail(self, cause: str, by_peer: bool = False) -> None:
        """This rank is about to die of `cause`. `by_peer`: of another's death, as far as it can tell (a
        broken connection, say), so that the other's own news goes before.
        """
        self._say(["fail", " ".join(cause.split())[:500], by_peer])

    def done(self) -> None:
        """This rank has ended in order; the others go on."""
        self._say(["done"])
        os.close(self._pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):  # rank 0's stays for the others
            self._child.wait(timeout=BEAT_S)

    def _say(self, message: list) -> None:
        with contextlib.suppress(OSError):  # the news was faster
            os.write(self._pipe, json.dumps(message).encode() + b"\n")
