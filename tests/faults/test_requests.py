"""Runs that are asked to stop, go on at another number of ranks, meet bad taps, or wait for a slow rank."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest

from slipstream.training.checkpoint import complete_checkpoints
from slipstream.training.setup import open_rows
from tests.faults.injured import Fault
from tests.faults.jobs import HOST, PLACES, TOLD, command, equal_to_the_last_bit, some, waits, whole_command
from tests.integration.conftest import losses

pytestmark = pytest.mark.faults

LOOP, TARGET = "slipstream.training.loop", "slipstream.models.target"
LAUNCHER = -1


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("two", Fault("stop", f"{LOOP}:row_loss", 1, some(21, 10, 40))),
        ("two", Fault("stop", f"{LOOP}:update", 0, some(22, 8, 22), victim=LAUNCHER)),
        ("split 1+1", Fault("stop", f"{LOOP}:row_loss", 0, some(23, 20, 80))),
        ("split 2+1", Fault("stop", f"{TARGET}:Target.taps", 2, some(24, 10, 40))),
    ],
    ids=lambda value: str(value),
)
def test_a_request_to_stop_to_any_process_saves_one_step_on_all_ranks_and_the_run_can_go_on(
    world, new_job, uninterrupted, tmp_path, place, fault
):
    expected, run, job = uninterrupted(place), tmp_path / "run", new_job()
    assert whole_command(job, command(world, run, *PLACES[place].split()), fault) == 0, job.said()
    TOLD.append(f"{job.wait() - job.fault_time():5.1f}  {place}: {fault}")
    stopped = re.fullmatch(r"stopped at step (\d+), saved\. Resume with: (.*)", job.last_line())
    assert stopped, job.said()
    assert int(stopped[1]) == max(losses(run)) < 30
    assert complete_checkpoints(run)[-1].name == f"step_{int(stopped[1]):08d}"
    assert "ended:" not in job.said()

    job = new_job()
    program, *arguments = shlex.split(stopped[2])
    assert program == "slipstream"
    assert whole_command(job, arguments) == 0, job.said()
    equal_to_the_last_bit(run, expected)


@pytest.mark.parametrize("flags", ["", "--ranks 2", "--ranks 4", "--dp-pairs 1"])
def test_a_checkpoint_of_two_ranks_goes_on_at_any_number_and_at_two_to_the_last_bit(
    world, new_job, uninterrupted, tmp_path, flags
):
    expected, run, job = uninterrupted("two"), tmp_path / "run", new_job()
    shutil.copytree(expected, run)
    for checkpoint in complete_checkpoints(run):
        if checkpoint.name > "step_00000009":
            shutil.rmtree(checkpoint)
    assert whole_command(job, command(world, run, *flags.split())) == 0, job.said()
    assert f"resume: {run}/checkpoints/step_00000009 " in job.said()
    if flags == "--ranks 2":
        equal_to_the_last_bit(run, expected)
    for kind in ("train", "validation"):
        ours, theirs = losses(run, kind), losses(expected, kind)
        assert ours.keys() == theirs.keys()
        for step, line in theirs.items():
            assert ours[step]["loss"] == pytest.approx(line["loss"], rel=1e-5), step
            assert ours[step]["blocks"] == line["blocks"]


@pytest.mark.parametrize(
    ("place", "rank"), [("two", 0), ("two", 1), ("split 1+1", 1), ("split 2+1", 2)], ids=str
)
def test_taps_that_are_not_finite_end_the_run_in_a_line_that_names_their_row_and_document(
    world, new_job, tmp_path, place, rank
):
    run, job = tmp_path / "run", new_job()
    fault = Fault("poison", f"{TARGET}:Target.taps", rank, some(25 + rank, 10, 25))
    assert whole_command(job, command(world, run, *PLACES[place].split()), fault) == 2, job.said()
    row = int(job.note.read_text())
    document = open_rows(str(world.data), "train", 256, "truncate", None).documents(row)[-1]
    line = (
        rf"slipstream: rank \d on {HOST} ended: error: row {row}, documents \[{document}\]: the target's "
        r"features are tap 1 of 7 is not finite at 1 of \d+ tokens: .*: leave these documents out.*"
    )
    assert re.fullmatch(line, job.last_line()), job.said()
    assert "Traceback" not in job.said()


@pytest.mark.parametrize(
    ("slow", "fault"),
    [
        ("drafter", Fault("slow", f"{LOOP}:row_loss", 0)),
        ("target", Fault("slow", f"{TARGET}:Target.taps", 1)),
    ],
    ids=["drafter", "target"],
)
def test_a_run_with_a_slow_side_ends_well_and_says_that_the_other_side_waits(
    world, new_job, uninterrupted, tmp_path, slow, fault
):
    run, job = tmp_path / "run", new_job()
    assert whole_command(job, command(world, run, *PLACES["split 1+1"].split()), fault) == 0, job.said()
    equal_to_the_last_bit(run, uninterrupted("split 1+1"))
    shares = waits(run)
    TOLD.append(f"       slow {slow}: target waits {shares['target']:.0%}, drafter {shares['drafter']:.0%}")
    other = "drafter" if slow == "target" else "target"
    assert shares[other] > 0.5
    assert shares[slow] < shares[other] / 2
    assert re.search(r"tok/s  target waits \d+%, drafter \d+%", job.said())
