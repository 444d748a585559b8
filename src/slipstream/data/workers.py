"""One function over many chunks, in many processes, with the results in the order of the chunks.

Here: starting the processes, handing out and collecting; what they compute is the caller's. A process is this
module run by the same Python, with one pipe: it ends when the pipe does, so whatever ends the parent ends
them all.
"""

from __future__ import annotations

import gc
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Generic, TypeVar

from slipstream.config import UserError

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 2
"""Chunks a process holds: it works on one while the other waits."""
FEW = 8
"""Chunks that are not worth the seconds in which a process starts."""


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def in_order(work: Callable[[T], R], chunks: Iterable[T], processes: int) -> Generator[R, None, None]:
    """`work(chunk)` of every chunk, in order, whatever the number of processes.

    All three travel as pickles. Where one process is asked for, or there are few chunks, the work is done
    right here. An error, be it of a chunk or of `chunks` itself, comes after the results before it.
    """
    chunks = iter(chunks)
    first: list[T] = []
    failed: list[Exception] = []  # what `chunks` raised while the first ones were taken
    try:
        for _ in range(FEW + 1 if processes > 1 else 0):
            first += itertools.islice(chunks, 1)
    except UserError as e:
        failed.append(e)
    if len(first) > FEW:
        with _Pool(work, processes) as pool:
            yield from pool.map(itertools.chain(first, chunks))
        return
    yield from map(work, first)
    if failed:
        raise failed[0]
    yield from map(work, chunks)


class _Pool(Generic[T, R]):
    def __init__(self, work: Callable[[T], R], processes: int):
        self._children: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        for _ in range(processes):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, "-m", "slipstream.data.workers", str(theirs.fileno())]
                self._children.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            self._pipes.append(ours)
            ours.send(work)

    def __enter__(self) -> _Pool[T, R]:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.terminate()  # it may be in the middle of a chunk that nobody wants any more
            child.wait()

    def map(self, chunks: Iterator[T]) -> Iterator[R]:
        numbered = enumerate(chunks)
        held = dict.fromkeys(self._pipes, 0)
        done: dict[int, tuple[bool, Any]] = {}
        given = wanted = 0
        end: Exception | None = None
        ended = False
        while True:
            for _ in range(AHEAD):
                for pipe in self._pipes:
                    # far ahead of the slowest, results would pile up
                    if ended or held[pipe] == AHEAD or given - wanted >= 4 * len(self._pipes):
                        continue
                    try:
                        item = next(numbered, None)
                    except UserError as e:
                        item, end = None, e
                    if item is None:
                        ended = True
                        continue
                    self._send(pipe, item)
                    held[pipe] += 1
                    given += 1
            while wanted in done:
                right, value = done.pop(wanted)
                if not right:
                    raise value
                wanted += 1
                yield value
            if wanted < given:
                for pipe in wait(self._pipes):
                    assert isinstance(pipe, Connection)
                    number, right, value = self._receive(pipe)
                    held[pipe] -= 1
                    done[number] = (right, value)
            elif ended:
                break
        if end is not None:
            raise end

    def _send(self, pipe: Connection, item: tuple[int, T]) -> None:
        try:
            pipe.send(item)
        except OSError:
            raise self._died(pipe) from None

    def _receive(self, pipe: Connection) -> tuple[int, bool, Any]:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise self._died(pipe) from None

    def _died(self, pipe: Connection) -> UserError:
        code = self._children[self._pipes.index(pipe)].wait()
        return UserError(
            f"slipstream prepare: a process of it died (exit code {code}, −9 where memory ran out): "
            "run it again, with fewer --processes if memory is short"
        )


def serve(pipe: Connection) -> None:
    """A process's whole life. Chunks are taken off the pipe by a thread, so that the parent's sending never
    waits for a result to be read.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    work = pipe.recv()
    # lists of millions of ids make collections in the middle of a chunk a tenth of its time
    gc.freeze()
    gc.disable()

    def read() -> None:
        try:
            while True:
                inbox.put(pipe.recv())
        except (EOFError, OSError):
            inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (item := inbox.get()) is not None:
        number, chunk = item
        try:
            result = (number, True, work(chunk))
        except UserError as e:
            result = (number, False, e)
        except Exception:  # a fault of ours: the parent shows it
            result = (number, False, RuntimeError(traceback.format_exc()))
        try:
            pipe.send(result)
        except (BrokenPipeError, ConnectionResetError):
            return
        del item, chunk, result
        gc.collect()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    serve(Connection(int(sys.argv[1])))
