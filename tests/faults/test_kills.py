"""A rank that is killed -9 at a chosen moment: nothing hangs, nothing is left, nothing is lost."""

from __future__ import annotations

import re

import pytest

from tests.faults.injured import Fault
from tests.faults.jobs import (
    GONE_S,
    HOST,
    PLACES,
    TOLD,
    begins_like,
    command,
    equal_to_the_last_bit,
    listening,
    some,
    whole_command,
)

pytestmark = pytest.mark.faults

LOOP, PARALLEL = "slipstream.training.loop", "slipstream.training.parallel"
SAVING = "slipstream.training.checkpoint"
CHANNEL, WIRE, TARGET = (
    "slipstream.distributed.channel",
    "slipstream.distributed.wire",
    "slipstream.models.target",
)

STEP, TRANSFER, CHECKPOINT = "step", "transfer", "checkpoint"
KILLS: dict[str, list[tuple[str, Fault]]] = {
    "two": [
        (STEP, Fault("kill", f"{LOOP}:row_loss", 1, some(1, 3, 9))),
        (CHECKPOINT, Fault("kill", f"{SAVING}:save_file", 0, some(2, 1, 4), after=True)),
        (STEP, Fault("kill", "torch.distributed:all_reduce", 0, some(3, 30, 60), after=True)),
        (CHECKPOINT, Fault("kill", f"{SAVING}:fsync", 0, some(4, 8, 12), victim=1)),
        (STEP, Fault("kill", f"{PARALLEL}:DrafterRanks.summed", 1, some(5, 4, 6))),
    ],
    "two, sharded": [
        (CHECKPOINT, Fault("kill", f"{SAVING}:_file_facts", 1, some(17, 1, 4))),
        (CHECKPOINT, Fault("kill", f"{SAVING}:save_shards", 0, 2, after=True)),
    ],
    "split 1+1": [
        (TRANSFER, Fault("kill", f"{CHANNEL}:Parcel", 1, some(6, 13, 20))),
        (CHECKPOINT, Fault("kill", f"{SAVING}:fsync", 0, 7)),
        (TRANSFER, Fault("kill", f"{CHANNEL}:Asked", 0, some(7, 13, 20))),
        (CHECKPOINT, Fault("kill", f"{SAVING}:_file_facts", 0, some(8, 5, 8), victim=1)),
        (STEP, Fault("kill", f"{LOOP}:update", 0, some(9, 4, 6))),
    ],
    "split 2+1": [
        (TRANSFER, Fault("kill", f"{WIRE}:Wire.tell", 2, some(10, 10, 20), after=True)),
        (STEP, Fault("kill", f"{TARGET}:Target.taps", 1, some(11, 7, 12))),
        (TRANSFER, Fault("kill", f"{WIRE}:Wire.settle", 0, some(12, 13, 20), victim=2)),
        (CHECKPOINT, Fault("kill", f"{PARALLEL}:save_checkpoint", 0, 2, after=True, victim=1)),
        (TRANSFER, Fault("kill", f"{CHANNEL}:TapSender.send", 1, some(13, 7, 12), victim=0)),
    ],
}


def test_what_is_left_of_a_job_is_seen(new_job):
    """A process whose parents are gone, and the socket that it listens on."""
    job = new_job()
    listens = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(60)"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {listens!r}], process_group=0)"
    job.start(["-c", starts])
    job.started[0].wait()
    job.wait(lambda: bool(listening(job.processes())))
    assert len(job.processes()) == 1
    assert listening(job.processes()) <= listening(None)
    job.kill()
    assert job.end() == [0]


@pytest.mark.parametrize("place", KILLS)
def test_a_killed_rank_ends_all_and_the_same_command_goes_on_to_the_uninterrupted_runs_last_bit(
    world, new_job, uninterrupted, tmp_path, place
):
    """One run, killed several times: each command but the last goes on from what the one before has left."""
    expected, run = uninterrupted(place), tmp_path / "run"
    arguments, at = command(world, run, *PLACES[place].split()), 0
    for kind, fault in KILLS[place]:
        job, dead = new_job(), fault.rank if fault.victim is None else fault.victim
        code = whole_command(job, arguments, fault)
        took = job.wait() - job.fault_time()
        TOLD.append(f"{took:5.1f}  {place}: {kind}: {fault}, from step {at}")
        assert code == 1, job.said()
        assert job.listened, "nobody was seen to listen: it is unknown what is left of that"
        assert took < GONE_S
        line = (
            f"slipstream: rank {dead} on {HOST} ended: killed or crashed without a word .*; logs: {run}/logs"
        )
        assert re.fullmatch(line, job.last_line()), job.said()
        assert (f"resume: {run}/checkpoints/step_{at:08d} " in job.said()) == (at > 0)
        at = begins_like(run, expected)
    job = new_job()
    assert whole_command(job, arguments) == 0, job.said()
    assert f"resume: {run}/checkpoints/step_{at:08d} " in job.said()
    equal_to_the_last_bit(run, expected)


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("two", Fault("kill", f"{PARALLEL}:DrafterRanks.summed", 1, some(14, 5, 25))),
        ("split 1+1", Fault("kill", f"{CHANNEL}:Parcel", 1, some(15, 20, 80))),
        ("split 2+1", Fault("kill", f"{SAVING}:save_file", 0, some(16, 4, 14), after=True)),
    ],
    ids=lambda value: str(value),
)
def test_a_run_that_may_start_again_heals_itself_in_one_command(
    world, new_job, uninterrupted, tmp_path, place, fault
):
    expected, run, job = uninterrupted(place), tmp_path / "run", new_job()
    flags = [*PLACES[place].split(), "--max-restarts", "1"]
    assert whole_command(job, command(world, run, *flags), fault) == 0, job.said()
    took = job.wait() - job.fault_time()
    TOLD.append(f"{took:5.1f}  {place}: {fault}, healed and trained to the end")
    assert re.search(rf"resume: {run}/checkpoints/step_", job.said())
    equal_to_the_last_bit(run, expected)
