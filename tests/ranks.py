"""Functions of a test run on n ranks: processes of their own, joined by gloo over the loopback.

They are forked from one server process that has imported what they need and never does anything itself: a
rank starts in a tenth of a second. None outlives its timeout, its test, or pytest.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.ranks", "tests.training", "slipstream.training.loop"])
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: what its function returned, or why it did not."""

    value: Any = None
    error: str = ""
    """Its traceback, or how it died; empty when it returned."""


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """`function(rank, ranks, *args)` on each rank of a new process group; what they return, by rank.

    `function` is one of a module's, arguments and results are pickled. The first rank that raises or dies
    ends all the others at once and the test with its traceback; so does the timeout, in seconds.
    """
    return [o.value for o in rank_outcomes(ranks, function, *args, timeout=timeout, fail_fast=True)]


def rank_outcomes(
    ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60, fail_fast: bool = False
) -> list[Outcome]:
    """As `run_ranks`, for ranks that are meant to raise or to be killed: all are waited for."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the server's environment is that of its start
    with tempfile.TemporaryDirectory() as folder:
        pipes = [SERVER.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            SERVER.Process(
                target=_rank, args=(rank, ranks, folder, timeout, sender, function, args), daemon=True
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            readers = {reader: rank for rank, (reader, _) in enumerate(pipes)}
            return _collect(readers, time.monotonic() + timeout, fail_fast)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(readers: dict[Connection, int], deadline: float, fail_fast: bool) -> list[Outcome]:
    outcomes = [Outcome() for _ in readers]
    left = dict(readers)
    while left:
        found = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
        if not found:
            raise AssertionError(
                f"ranks {sorted(left.values())} are not done in time; their stacks are above"
            )
        for reader in found:
            assert isinstance(reader, Connection)
            rank = left.pop(reader)
            try:
                outcomes[rank] = Outcome(*pickle.loads(reader.recv_bytes()))
            except EOFError:
                outcomes[rank] = Outcome(error="killed or crashed without a word")
            if fail_fast and outcomes[rank].error:
                raise AssertionError(f"rank {rank}: {outcomes[rank].error}")
    return outcomes


def _rank(
    rank: int, ranks: int, folder: str, timeout: float, sender: Connection, function: Any, args: Any
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the server ends with pytest, however it ends
    faulthandler.dump_traceback_later(0.9 * timeout)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    value, error = None, ""
    try:
        store = f"file://{Path(folder) / 'rendezvous'}"
        seconds = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=seconds)
        value = function(rank, ranks, *args)
    except BaseException:  # the test's process tells of it
        error = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    sender.send_bytes(pickle.dumps((value, error)))
    while True:  # peers may still need the connection: the test's process ends all ranks together
        signal.pause()
