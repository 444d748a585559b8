"""Work in many processes: the order is kept, errors come at their place, and nothing is left running."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.config import UserError
from slipstream.data import workers
from slipstream.data.workers import in_order


@pytest.fixture(autouse=True)
def tests_are_importable_in_the_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, sys.path)))


def uneven(k: int) -> tuple[int, int]:
    time.sleep(0.02 * (k % 3))
    return k, os.getpid()


def broken(k: int) -> int:
    if k == 13:
        raise UserError("thirteen: broken: mend it")
    if k == 17:
        raise KeyError("ours")
    return k


def deadly(k: int) -> int:
    if k == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    return k


def large(data: bytes) -> bytes:
    return data * 2


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_results_come_in_the_order_of_the_chunks_from_several_processes_that_end_with_the_work():
    before = children()
    found = list(in_order(uneven, range(40), 3))
    assert [k for k, _ in found] == list(range(40))
    assert len({pid for _, pid in found}) == 3
    assert children() == before


@pytest.mark.parametrize(("processes", "chunks"), [(1, 40), (3, workers.FEW)])
def test_one_process_or_few_chunks_are_worked_on_right_here(processes, chunks):
    assert list(in_order(uneven, range(chunks), processes)) == [(k, os.getpid()) for k in range(chunks)]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_comes_after_the_results_before_it(processes):
    before = children()
    work, found = in_order(broken, range(40), processes), []
    with pytest.raises(UserError, match="thirteen: broken: mend it"):
        found.extend(work)
    assert found == list(range(13))
    with pytest.raises((KeyError, RuntimeError), match="ours"):
        list(in_order(broken, range(14, 40), processes))
    assert children() == before


@pytest.mark.parametrize(("processes", "good"), [(1, 30), (2, 30), (2, 3)])
def test_an_error_in_reading_comes_after_the_results_of_what_was_read(processes, good):
    def reading() -> Iterator[int]:
        yield from range(good)
        raise UserError("file: broken: mend it")

    found = []
    with pytest.raises(UserError, match="file: broken: mend it"):
        found.extend(in_order(abs, reading(), processes))
    assert found == list(range(good))


def test_a_process_that_dies_is_told_with_what_to_do():
    before = children()
    with pytest.raises(UserError, match=r"a process of it died \(exit code -9.*--processes"):
        list(in_order(deadly, range(40), 2))
    assert children() == before


def test_results_larger_than_a_pipe_holds_and_work_that_is_given_up_block_nothing():
    before = children()
    chunks = [bytes([k]) * 2**20 for k in range(20)]
    found = in_order(large, chunks, 2)
    assert [next(found)[0] for _ in range(3)] == [0, 1, 2]
    found.close()
    assert children() == before


def test_reading_is_no_further_ahead_than_the_processes_can_hold():
    read = itertools.count()
    found = in_order(uneven, (next(read) for _ in range(1000)), 2)
    next(found)
    assert next(read) <= 4 * 2 + workers.FEW + 2
    found.close()


PARENT = """
import os, sys, time
from slipstream.data.workers import in_order
from tests.unit.test_workers import uneven
for k, pid in in_order(uneven, range(10**6), 2):
    print(pid, flush=True)
"""


def test_processes_end_when_their_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = {int(parent.stdout.readline()) for _ in range(12)}
    finally:
        parent.kill()
        parent.wait()
    assert len(pids) == 2
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() and "State:\tZ" not in status(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "State:\tZ"
