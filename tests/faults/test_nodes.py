"""Two nodes, each a torchrun of its own, on one machine: they train, one vanishes, both are started again."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.faults.injured import Fault
from tests.faults.jobs import GONE_S, TOLD, Job, command, equal_to_the_last_bit, some

pytestmark = pytest.mark.faults

PARALLEL = "slipstream.training.parallel"
NODES = ("/node-a", "/node-b")


def start_nodes(job: Job, how: str, program: list[str]) -> None:
    """Two torchruns by hand, of a rank each, that meet at a port of the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for number, node in enumerate(NODES):
        meeting = [f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        if how == "c10d":
            meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meeting]
        job.start([*torchrun, *program], node)


def node_of(job: Job, rank: int) -> str:
    for node in NODES:
        for pid in job.processes(node):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return node
    raise AssertionError(f"no rank {rank}")


@pytest.mark.parametrize(("how", "dead"), [("static", 1), ("c10d", 0)])
def test_a_node_that_vanishes_ends_the_other_and_both_started_again_go_on_to_the_last_bit(
    world, new_job, uninterrupted, tmp_path, how, dead
):
    """The node of rank `dead` goes at once, torchrun, rank and sentinel, in a step in which the other waits
    for it.
    """
    expected, run, job = uninterrupted("two"), tmp_path / "run", new_job()
    arguments = command(world, run)
    moment = f"{PARALLEL}:DrafterRanks.summed", dead, some(31 + dead, 8, 20)
    fault = Fault("hold", *moment, note=str(job.note))
    start_nodes(job, how, [*fault.arguments(), *arguments])
    job.wait(job.note.exists)
    time.sleep(0.2)
    survivor = node_of(job, 1 - dead)
    job.kill(node_of(job, dead))
    began = time.monotonic()
    codes = job.end()
    TOLD.append(f"{job.wait() - began:5.1f}  two nodes, {how}: the one with rank {dead} vanishes")
    assert time.monotonic() - began < GONE_S, job.said()
    assert codes[NODES.index(survivor)] == 1, job.said()
    cause = "its node or its sentinel is gone"
    line = f"slipstream: rank {dead} on {socket.gethostname()} ended: {cause}; this rank ({1 - dead}) stops"
    assert line in job.said().splitlines()

    job = new_job()
    start_nodes(job, how, ["-m", "slipstream.cli", *arguments])
    assert job.end() == [0, 0], job.said()
    assert "resume: " in job.said()
    equal_to_the_last_bit(run, expected)
