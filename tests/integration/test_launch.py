"""Ranks are started, asked to save, started again, and ended with all that is theirs: real torchrun, gloo.

What sentinels do in every kind of death is test_sentinel.py's; here are ranks that wait in a collective.
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

from slipstream.distributed.launch import children

LIMIT_S = 30.0
HOST = re.escape(socket.gethostname())
LAUNCHER = """
import sys
from pathlib import Path
from slipstream.distributed.launch import start_ranks
folder, how, restarts = sys.argv[1:]
sys.exit(start_ranks([folder + "/rank.py", folder, how], 2, Path(folder), int(restarts)))
"""
RANK = """
import os, signal, sys, time
from pathlib import Path

folder, how, attempt = Path(sys.argv[1]), sys.argv[2], int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def there():
    path = folder / f"{os.environ['RANK']}.there{attempt}"
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)


if how == "unready":
    there()
    time.sleep(60)

import torch
import torch.distributed as dist
from slipstream.config import UserError
from slipstream.distributed.world import is_of_peer, joined

asked = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: asked.append(number))
try:
    with joined("cpu") as world:
        dist.barrier()
        there()
        while attempt == 0:
            stop_go = torch.tensor([len(asked) > 0, (folder / "go").exists()]).float()
            dist.all_reduce(stop_go)
            if stop_go[1] and how == "blame":
                if world.rank == 0:
                    raise RuntimeError("gloo/transport: connection closed by peer")
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            if stop_go[1] and world.rank == 1:
                if how == "raise":
                    raise UserError("data: not there: name another")
                (folder / "waiting").touch()
                time.sleep(60)  # rank 0 is in its next all-reduce
            if stop_go[0]:
                time.sleep(0.5)  # a save
                (folder / f"{world.rank}.saved").write_text(f"asked {len(asked)}")
                break
            time.sleep(0.02)
except UserError:
    sys.exit(2)
except RuntimeError as e:
    (folder / "of_peer").write_text(str(is_of_peer(e)))
    sys.exit(1)
"""


class Job:
    """Launchers or torchruns over ranks that have met."""

    def __init__(self, folder: Path, commands: list[list[str]]) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(RANK)
        with (folder / "err").open("w") as err:
            self.commands = [
                subprocess.Popen([sys.executable, *c], stderr=err, process_group=0) for c in commands
            ]
        wait_for(lambda: self.ended() or all((folder / f"{rank}.there0").exists() for rank in (0, 1)))
        assert not self.ended(), self.said()
        self.ranks = [self.pid(rank) for rank in (0, 1)]
        self.pids = {pid for command in self.commands for pid in below(command.pid)}

    def pid(self, rank: int, attempt: int = 0) -> int:
        return int((self.folder / f"{rank}.there{attempt}").read_text())

    def ended(self) -> bool:
        return any(command.poll() is not None for command in self.commands)

    def kill_rank_1_in_an_all_reduce(self) -> None:
        (self.folder / "go").touch()
        wait_for((self.folder / "waiting").exists)
        os.kill(self.ranks[1], signal.SIGKILL)

    def said(self) -> list[str]:
        return (self.folder / "err").read_text().splitlines()

    def nothing_is_left(self) -> None:
        wait_for(lambda: not any(map(runs, self.pids)), 8)

    def kill(self) -> None:
        for pid in {*self.pids, *(pid for command in self.commands for pid in below(command.pid))}:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        for command in self.commands:
            command.wait()


def below(pid: int) -> set[int]:
    """A process and all that it started."""
    return {pid}.union(*(below(child) for child in children(pid)))


def wait_for(what: Callable[[], bool], seconds: float = LIMIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(*commands: list[str]) -> Job:
        jobs.append(Job(tmp_path, list(commands)))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    """A launcher of two ranks that do `how`."""
    return lambda how="wait", restarts=0: start(["-c", LAUNCHER, str(tmp_path), how, str(restarts)])


def test_a_rank_killed_while_another_is_in_a_collective_is_named_in_the_last_line(launch):
    job = launch()
    job.kill_rank_1_in_an_all_reduce()
    began = time.monotonic()
    assert job.commands[0].wait(LIMIT_S) == 1
    assert time.monotonic() - began < 10
    job.nothing_is_left()
    line = f"slipstream: rank 1 on {HOST} ended: killed or crashed without a word .*; logs: {job.folder}/logs"
    assert re.fullmatch(line, job.said()[-1])
    assert not [said for said in job.said() if "elastic" in said]  # torchrun's words are elsewhere
    assert "ChildFailedError" not in "".join(job.said())
    assert "SIGKILL" in (job.folder / "logs/torchrun.log").read_text()
    assert (job.folder / "of_peer").read_text() == "True"  # what gloo raised in rank 0


def test_the_dead_rank_is_named_and_not_the_one_whose_connection_broke(launch):
    job = launch("blame")
    (job.folder / "go").touch()
    assert job.commands[0].wait(LIMIT_S) == 1
    job.nothing_is_left()
    assert f"slipstream: rank 1 on {socket.gethostname()} ended: killed" in job.said()[-1]


def test_a_rank_that_raises_is_named_with_its_cause_and_a_users_error_gives_exit_code_2(launch):
    job = launch("raise")
    (job.folder / "go").touch()
    assert job.commands[0].wait(LIMIT_S) == 2
    job.nothing_is_left()
    line = (
        rf"slipstream: rank 1 on {HOST} ended: error: data: not there: name another; logs: {job.folder}/logs"
    )
    assert re.fullmatch(line, job.said()[-1])


@pytest.mark.parametrize("how", ["SIGTERM to the launcher and to torchrun", "a terminal that is closed"])
def test_a_request_to_stop_reaches_every_rank_once_and_they_save_and_exit_0(launch, how):
    job = launch(restarts=3)
    if "SIGTERM" in how:
        (torchrun,) = children(job.commands[0].pid)
        os.kill(torchrun, signal.SIGTERM)
        job.commands[0].send_signal(signal.SIGTERM)
    else:
        os.killpg(job.commands[0].pid, signal.SIGHUP)
    assert job.commands[0].wait(LIMIT_S) == 0
    assert [(job.folder / f"{rank}.saved").read_text() for rank in (0, 1)] == ["asked 1"] * 2
    job.nothing_is_left()
    assert [line for line in job.said() if "slipstream" in line] == []


def test_a_request_to_stop_ends_ranks_that_cannot_save_yet_for_good(launch):
    job = launch("unready", restarts=3)
    job.commands[0].send_signal(signal.SIGTERM)
    assert job.commands[0].wait(LIMIT_S) == 128 + signal.SIGTERM
    job.nothing_is_left()
    assert not (job.folder / "0.there2").exists()


def test_a_second_request_ends_all_at_once(launch):
    job = launch()
    (job.folder / "go").touch()
    wait_for((job.folder / "waiting").exists)  # no rank can save now
    job.commands[0].send_signal(signal.SIGINT)
    time.sleep(1)
    assert job.commands[0].poll() is None
    job.commands[0].send_signal(signal.SIGINT)
    assert job.commands[0].wait(5) == 128 + signal.SIGINT
    job.nothing_is_left()


def test_ranks_start_again_after_a_death(launch):
    job = launch(restarts=1)
    job.kill_rank_1_in_an_all_reduce()
    assert job.commands[0].wait(LIMIT_S) == 0
    job.nothing_is_left()
    assert not {job.pid(0, 1), job.pid(1, 1)} & set(job.ranks)


def test_the_launchers_own_death_leaves_nothing(launch):
    job = launch("unready")
    job.commands[0].kill()
    job.nothing_is_left()


def test_torchruns_death_ends_its_ranks_and_is_told(launch):
    job = launch()
    (torchrun,) = children(job.commands[0].pid)
    os.kill(torchrun, signal.SIGKILL)
    assert job.commands[0].wait(LIMIT_S) == 128 + signal.SIGKILL
    job.nothing_is_left()
    assert f"slipstream: torchrun was ended by signal 9; logs: {job.folder}/logs" in job.said()
    assert [line for line in job.said() if "ended: its launcher was killed" in line]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_node_that_is_gone_with_its_torchrun_ends_the_ranks_of_the_other(start, tmp_path, dead):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command = ["-m", "torch.distributed.run", *options, "--local-addr=127.0.0.1", f"{tmp_path}/rank.py"]
    job = start(*[[*command, str(tmp_path), "wait"]] * 2)
    node = {
        rank: next(c for c in job.commands if pid in children(c.pid)) for rank, pid in enumerate(job.ranks)
    }
    for pid in below(node[dead].pid):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not runs(job.ranks[1 - dead]), 10)
    assert node[1 - dead].wait(LIMIT_S) == 1
    job.nothing_is_left()
    line = rf"slipstream: rank {dead} on {HOST} ended: its node or its sentinel is gone; this rank"
    assert [said for said in job.said() if re.match(line, said)]
