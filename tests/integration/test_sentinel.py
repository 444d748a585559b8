"""A rank's death ends every rank, with a line that names rank, host and cause; an orderly end disturbs none.

Ranks here are small processes without torch: what a sentinel does must not depend on what its rank is busy
with.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.distributed.sentinel import Sentinel

SILENCE_S = 3.0
LIMIT_S = 12.0
"""A rank is gone at the latest 30 s after a death; with beats missed after 3 s instead of 15, after this."""
RANK = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
from slipstream.distributed.sentinel import Sentinel

rank, size, folder, how = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]


def exchange(text):
    path = folder / "address"
    if text is not None:
        (folder / "address.tmp").write_text(text)
        (folder / "address.tmp").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


sentinel = Sentinel.start(rank, size, f"host{{rank}}", "127.0.0.1", exchange, {SILENCE_S})
(folder / f"{{rank}}.sentinel").write_text(str(sentinel._child.pid))
(folder / f"{{rank}}.there").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
if how == "done":
    sentinel.done()
elif how == "raise":
    sentinel.fail("ValueError: no such\\n thing")
    sys.exit(1)
elif how == "blame":  # what another's death looks like from here, often before the other's own news
    sentinel.fail("RuntimeError: connection reset by peer", by_peer=True)
    sys.exit(1)
elif how == "fail and hang":
    sentinel.fail("ValueError: no such thing")
    del sentinel
    time.sleep(60)
elif how == "help":
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / "helper.tmp").write_text(str(helper.pid))
    (folder / "helper.tmp").rename(folder / "helper")
    time.sleep(60)
elif how == "fork":  # the child holds the rank's end of the pipe
    if fork := os.fork():
        (folder / "fork").write_text(str(fork))
        while not (folder / "helper").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
else:
    time.sleep(60)
"""


class Job:
    """Ranks with their sentinels; `how` of each is what it does once all are there and `go` was said."""

    def __init__(self, folder: Path, hows: list[str], leader: bool = False) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(RANK)
        self.ranks = []
        for rank, how in enumerate(hows):
            command = [sys.executable, str(folder / "rank.py"), str(rank), str(len(hows)), str(folder), how]
            with (folder / f"{rank}.err").open("w") as err:
                self.ranks.append(subprocess.Popen(command, stderr=err, start_new_session=leader))
        wait_for(lambda: all((folder / f"{r}.there").exists() for r in range(len(hows))))
        self.sentinels = [int((folder / f"{r}.sentinel").read_text()) for r in range(len(hows))]
        (folder / "go").touch()

    def codes(self) -> list[int]:
        deadline = time.monotonic() + LIMIT_S
        return [rank.wait(timeout=max(0.1, deadline - time.monotonic())) for rank in self.ranks]

    def said(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text()

    def kill(self) -> None:
        made = [int(path.read_text()) for name in ("fork", "helper") if (path := self.folder / name).exists()]
        for pid in [*self.sentinels, *(r.pid for r in self.ranks), *made]:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.wait()


def wait_for(what: Callable[[], bool], seconds: float = LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(*hows: str, leader: bool = False) -> Job:
        jobs.append(Job(tmp_path, list(hows), leader))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


def sentinels_end(job: Job) -> None:
    wait_for(lambda: not any(map(runs, job.sentinels)))


def line(rank: int, cause: str, reader: int) -> str:
    what = "the job stops" if rank == reader else rf"this rank \({reader}\) stops"
    return rf"^slipstream: rank {rank} on host{rank} ended: {cause}; {what}$"


def tell_the_same(job: Job, rank: int, cause: str, readers: list[int]) -> None:
    for reader in readers:
        said = re.findall("^slipstream: .*$", job.said(reader), re.MULTILINE)
        assert len(said) == 1, said
        assert re.search(line(rank, cause, reader), said[0]), said


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_killed_with_its_group_ends_all_and_is_named(start, dead):
    job = start("wait", "wait", "wait", leader=True)
    for pid in job.sentinels:
        os.kill(pid, signal.SIGTERM)  # it asks ranks to save; sentinels stay
        os.kill(pid, signal.SIGINT)
    began = time.monotonic()
    os.killpg(job.ranks[dead].pid, signal.SIGKILL)
    assert job.codes() == [-signal.SIGKILL] * 3
    assert time.monotonic() - began < 5
    sentinels_end(job)
    tell_the_same(job, dead, "killed or crashed without a word .*", [0, 1, 2])


def test_a_rank_that_raises_ends_all_with_its_cause_in_one_line_and_by_itself(start):
    job = start("wait", "raise", "wait")
    assert job.codes() == [-signal.SIGKILL, 1, -signal.SIGKILL]
    sentinels_end(job)
    tell_the_same(job, 1, "ValueError: no such thing", [0, 1, 2])


def test_the_dead_rank_is_named_and_not_the_one_that_noticed_first(start):
    job = start("blame", "wait", "blame")
    time.sleep(0.5)
    job.ranks[1].kill()
    assert job.codes() == [1, -signal.SIGKILL, 1]
    sentinels_end(job)
    tell_the_same(job, 1, "killed or crashed without a word .*", [0, 1, 2])


def test_a_broken_connection_that_nobody_explains_ends_all_too(start):
    job = start("wait", "blame")
    assert job.codes() == [-signal.SIGKILL, 1]
    sentinels_end(job)
    tell_the_same(job, 1, "RuntimeError: connection reset by peer", [0, 1])


def test_a_rank_that_hangs_on_its_way_out_is_ended(start):
    job = start("wait", "fail and hang")
    assert job.codes() == [-signal.SIGKILL] * 2
    sentinels_end(job)
    tell_the_same(job, 1, "ValueError: no such thing", [0, 1])


def test_a_death_is_seen_while_a_fork_holds_the_pipe_and_helpers_of_all_ranks_end(start):
    job = start("help", "fork", leader=True)
    assert job.codes() == [-signal.SIGKILL] * 2
    sentinels_end(job)
    assert not runs(int((job.folder / "helper").read_text()))
    assert not runs(int((job.folder / "fork").read_text()))
    tell_the_same(job, 1, "killed or crashed without a word .*", [0, 1])


def test_an_orderly_end_is_no_alarm_and_the_others_stay_guarded_without_rank_0(start):
    job = start("done", "done", "wait", "wait")
    assert [job.ranks[0].wait(5), job.ranks[1].wait(5)] == [0, 0]
    time.sleep(SILENCE_S + 1)  # neither its end nor its silence
    assert [job.ranks[2].poll(), job.ranks[3].poll()] == [None, None]
    job.ranks[3].kill()
    assert job.ranks[2].wait(5) == -signal.SIGKILL
    sentinels_end(job)
    tell_the_same(job, 3, "killed or crashed without a word .*", [2, 3])


def test_when_all_are_done_nothing_is_left_and_nothing_said(start):
    job = start("done", "done", "done")
    assert job.codes() == [0, 0, 0]
    wait_for(lambda: not any(map(runs, job.sentinels)), 2)
    assert [job.said(rank) for rank in range(3)] == [""] * 3


@pytest.mark.parametrize("dead", [0, 1])
def test_a_node_that_is_gone_at_once_ends_the_others(start, dead):
    job = start("wait", "wait", "wait")
    os.kill(job.sentinels[dead], signal.SIGKILL)
    job.ranks[dead].kill()
    assert job.codes() == [-signal.SIGKILL] * 3
    sentinels_end(job)
    for reader in {0, 1, 2} - {dead}:
        assert f"rank {dead} on host{dead} ended: its node or its sentinel is gone" in job.said(reader)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_node_that_stands_still_ends_the_others_and_itself_once_it_goes_on(start, dead):
    job = start("wait", "wait", "wait")
    os.kill(job.sentinels[dead], signal.SIGSTOP)
    os.kill(job.ranks[dead].pid, signal.SIGSTOP)
    began = time.monotonic()
    others = [rank for rank in range(3) if rank != dead]
    assert [job.ranks[rank].wait(LIMIT_S) for rank in others] == [-signal.SIGKILL] * 2
    assert time.monotonic() - began > SILENCE_S - 1.5
    for reader in others:
        assert re.search(
            rf"rank {dead} on host{dead} ended: its node has not been heard of for", job.said(reader)
        )
    os.kill(job.sentinels[dead], signal.SIGCONT)
    assert job.ranks[dead].wait(LIMIT_S) == -signal.SIGKILL
    sentinels_end(job)


def test_a_pause_of_all_nodes_is_no_death(start):
    job = start("wait", "wait")
    waits = iter((0.5, SILENCE_S + 0.5, 0.5, 1.0))  # rank 0's node stops last and goes on first
    for number, order in ((signal.SIGSTOP, (1, 0)), (signal.SIGCONT, (0, 1))):
        for rank in order:
            os.kill(job.sentinels[rank], number)
            time.sleep(next(waits))
    assert [rank.poll() for rank in job.ranks] == [None, None]


def test_a_stranger_at_the_port_is_sent_away(start):
    job = start("wait", "wait")
    port = int((job.folder / "address").read_text().split()[0])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b'["hello", "guess", 1, "host1"]\n["dead", 1, "host1", "a lie", false]\n')
        assert stranger.recv(1) == b""
    time.sleep(1)
    assert [rank.poll() for rank in job.ranks] == [None, None]


def test_who_cannot_reach_rank_0_says_so_and_where(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port}: .*refused"):
        Sentinel.start(1, 2, "host1", "127.0.0.1", lambda text: f"{port} token")
