"""Processes that are killed, disks that are full, checkpoints that are damaged: what is left is whole."""

from __future__ import annotations

import errno
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from slipstream import cli
from slipstream.data import shards
from slipstream.distributed import link
from slipstream.training import checkpoint
from slipstream.training.checkpoint import complete_checkpoints, load_masters, verify_checkpoint
from slipstream.training.metrics import MetricsFile
from tests.fixtures_data import byte_tokenizer
from tests.integration.conftest import VOCAB, Forks, World, losses
from tests.tiny import tiny_target

LONG = "--max-steps 150 --save-interval 3 --eval-interval 50 --noise 0.05 --rows-per-step 2"
SHORT = "--max-steps 40 --save-interval 4 --eval-interval 50 --noise 0.05"
KILLS = 10
IN_A_WRITE = 2
AS_PROGRAMS = (3, 6)
"""Of the kills, those of a program started anew, `python -m slipstream.cli`."""


@pytest.fixture(scope="module")
def uninterrupted(world: World, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert forks.run(world.train(folder / "run", *LONG.split()), folder / "log") == 0
    return folder / "run"


@pytest.fixture(scope="module")
def short(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short") / "run"
    assert cli.main(world.train(folder, *SHORT.split())) == 0
    return folder


def equal_to_the_last_bit(run: Path, other: Path) -> None:
    for kind in ("train", "validation"):
        assert losses(run, kind) == losses(other, kind)
    for a, b in zip(
        *(load_masters(complete_checkpoints(r)[-1])[1].items() for r in (run, other)), strict=True
    ):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1]), a[0]


def step_of(run: Path) -> int:
    """The step of the last whole line of metrics."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"kind": "train"') if path.exists() else 0


def until(true: Callable[[], bool], alive: Callable[[], bool]) -> bool:
    """Wait, polling hard, until it is true; False when the process ends or a minute passes before."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if true():
            return True
        if not alive():
            return False
    return False


def writes(run: Path) -> list[str]:
    folder = run / "checkpoints"
    return [n for n in os.listdir(folder) if n.endswith(".partial")] if folder.exists() else []


def test_kill_9_at_ten_moments_and_in_a_checkpoints_write_resumes_to_the_uninterrupted_runs_last_bit(
    world, forks, tmp_path, uninterrupted
):
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = world.train(run, *LONG.split())
    chance = random.Random(20260)
    kills = half_written = 0
    newest, starting = None, False
    while kills < KILLS or half_written < IN_A_WRITE:
        assert kills < 3 * KILLS, "no kill met a checkpoint's write"
        before = step_of(run)
        if kills in AS_PROGRAMS:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            with log.open("w") as out:
                program = subprocess.Popen(
                    [sys.executable, "-m", "slipstream.cli", *arguments],
                    stderr=out,
                    stdout=out,
                    env=environment,
                )
            pid, alive = program.pid, lambda p=program: p.poll() is None
        else:
            program, pid = None, forks.start(arguments, log)
            alive = lambda p=pid: Path(f"/proc/{p}/stat").read_text().split()[2] != "Z"  # noqa: E731

        # Three kinds of moment: while starting, in or between two steps, in a checkpoint's write.
        starting = kills == 1
        if starting:
            time.sleep(chance.uniform(0.0, 0.2))
        else:
            wanted = before + (chance.randint(1, 8) if kills < KILLS else 1)
            assert until(lambda w=wanted: step_of(run) >= w, alive), log.read_text()
            if (kills % 2 == 0 or kills >= KILLS) and half_written < IN_A_WRITE:
                assert until(lambda: bool(writes(run)), alive), log.read_text()
            else:
                time.sleep(chance.uniform(0.0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert (program.wait() if program else forks.wait(pid)) == -signal.SIGKILL
        kills += 1
        half_written += bool([n for n in writes(run) if ".old." not in n])

        # whatever was hit, what counts as complete is whole, and never older than what was there before
        found = complete_checkpoints(run)
        for each in found:
            verify_checkpoint(each)
        if newest is not None:
            assert found, "the newest checkpoint is gone"
            assert found[-1].name >= newest
            if not starting:
                assert f"resume: {run / 'checkpoints' / newest} " in log.read_text()
        newest = found[-1].name if found else None
    assert 0 < step_of(run) < 150
    assert forks.run(arguments, log) == 0, log.read_text()
    assert f"resume: {run / 'checkpoints' / str(newest)} " in log.read_text()
    equal_to_the_last_bit(run, uninterrupted)
    left = [p for p in run.rglob("*") if p.name.endswith((".partial", ".tmp"))]
    assert not left, "what the kills left is cleaned up"
    assert len(complete_checkpoints(run)) == 2


def test_a_kill_test_would_see_a_checkpoint_that_is_behind_its_metrics(world, tmp_path, short):
    """What the equality is worth: weights of one step more or less give other losses."""
    arguments = world.train(tmp_path / "run", *SHORT.split())
    shutil.copytree(short, tmp_path / "run")
    first, second = complete_checkpoints(tmp_path / "run")
    a, b = load_masters(first)[1], load_masters(second)[1]
    assert any(not torch.equal(w, b[n]) for n, w in a.items())
    shutil.rmtree(second)
    with pytest.raises(AssertionError):
        equal_to_the_last_bit(tmp_path / "run", short)
    assert cli.main(arguments) == 0
    equal_to_the_last_bit(tmp_path / "run", short)


def test_what_a_killed_run_left_half_written_is_cleaned_up_by_the_next_whatever_its_step(
    world, tmp_path, short
):
    shutil.copytree(short, tmp_path / "run")
    first, second = complete_checkpoints(tmp_path / "run")
    shutil.rmtree(second)
    for name in (".step_00000039.partial", ".step_00000005.old.partial"):
        shutil.copytree(first, first.parent / name)
    for name in ("config.yaml.tmp", "env.json.tmp", "metrics.jsonl.tmp"):
        (tmp_path / "run" / name).write_text("half")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as f:
        f.write('{"kind": "train", "st')
    assert cli.main(world.train(tmp_path / "run", *SHORT.split())) == 0
    assert not [p for p in (tmp_path / "run").rglob("*") if p.name.endswith((".partial", ".tmp"))]
    equal_to_the_last_bit(tmp_path / "run", short)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_running_program_ends_it_in_order_with_the_command_to_resume(
    world, forks, tmp_path, short, number
):
    run, log = tmp_path / "run", tmp_path / "log"
    pid = forks.start(world.train(run, *SHORT.split()), log)
    assert until(lambda: step_of(run) >= 7, lambda: True)
    os.kill(pid, number)
    assert forks.wait(pid) == 0
    told = log.read_text()
    assert "Traceback" not in told
    stopped = step_of(run)
    assert complete_checkpoints(run)[-1].name == f"step_{stopped:08d}"
    command = told[told.index("Resume with: ") :].removeprefix("Resume with: ").splitlines()[0]
    assert command == f"slipstream train --config {run / 'config.yaml'}"
    assert forks.run(shlex.split(command)[1:], log) == 0
    equal_to_the_last_bit(run, short)


# ---- full disks ----


def refused(arguments: list[str], capfd: pytest.CaptureFixture[str], *told: str) -> str:
    capfd.readouterr()
    assert cli.main(arguments) == 2
    lines = capfd.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == lines[-1:], lines
    for text in told:
        assert text in errors[0]
    return errors[0]


REAL = {"save_file": checkpoint.save_file, "fsync": checkpoint.fsync}


def to_a_full_disk(*_: object) -> None:
    """What safetensors raises on a full disk: the number stands in the text alone."""
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def after(calls: int, function: Callable, then: Callable) -> Callable:
    """`function`, but from the call `calls` + 1 on `then`."""
    made: list[int] = []

    def call(*given, **named):
        made.append(1)
        return (function if len(made) <= calls else then)(*given, **named)

    return call


@pytest.mark.parametrize(
    ("what", "calls", "then"),
    [
        ("save_file", 2, to_a_full_disk),  # the second checkpoint's masters
        ("save_file", 3, to_a_full_disk),  # its moments
        ("fsync", 8, refuse),  # its first file: seven make the first checkpoint
    ],
)
def test_a_disk_full_at_a_checkpoint_is_told_in_one_line_and_the_last_one_is_kept(
    world, tmp_path, monkeypatch, capfd, short, what, calls, then
):
    arguments = world.train(tmp_path / "run", *SHORT.split())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, what, after(calls, REAL[what], then))
        refused(arguments, capfd, f"{tmp_path / 'run' / 'checkpoints'}: the disk is full: free space")
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step_00000004"]
    assert cli.main(arguments) == 0
    equal_to_the_last_bit(tmp_path / "run", short)


def test_a_disk_full_at_a_line_of_metrics_is_told_in_one_line(world, tmp_path, monkeypatch, capfd, short):
    arguments = world.train(tmp_path / "run", *SHORT.split())
    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "write", after(6, MetricsFile.write, refuse))
        refused(arguments, capfd, "No space left on device: free space and run the same command again")
        with pytest.raises(OSError, match="No space left"):
            cli.main([*arguments, "--debug"])
    assert cli.main(arguments) == 0
    equal_to_the_last_bit(tmp_path / "run", short)


def test_a_disk_full_in_a_cache_is_told_in_one_line_and_the_next_call_goes_on(
    world, tmp_path, monkeypatch, capfd
):
    arguments = world.cache(tmp_path / "taps")
    with monkeypatch.context() as patch:
        patch.setattr(link, "save_file", after(3, link.save_file, to_a_full_disk))
        refused(arguments, capfd, "row_0000003.safetensors", "No space left", "free space")
    assert sorted(p.name for p in (tmp_path / "taps").rglob("*")) == [
        *(f"row_{i:07d}.safetensors" for i in range(3)), "taps.json", "train",
    ]  # fmt: skip
    flags = ["--taps-dir", str(tmp_path / "taps")]
    refused(
        world.train(tmp_path / "run", *flags), capfd, "row_0000003.safetensors: missing", "slipstream cache"
    )
    assert not (tmp_path / "run").exists()
    assert cli.main(arguments) == 0
    assert cli.main(world.train(tmp_path / "run", *flags)) == 0


def test_a_cache_that_cannot_fit_is_refused_before_its_first_byte(world, tmp_path, monkeypatch, capfd):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(link.shutil, "disk_usage", lambda _: usage)
    refused(world.cache(tmp_path / "taps"), capfd, f"{tmp_path / 'taps'}: the taps need", "--limit-rows")
    assert not (tmp_path / "taps").exists()


@pytest.mark.parametrize("calls", [0, 2])
def test_a_disk_full_in_prepare_is_told_in_one_line_and_nothing_stays(
    world, tmp_path, monkeypatch, capfd, calls
):
    arguments = ["--input", str(world.chats), "--output-dir", str(tmp_path / "data"), "--tokenizer"]
    monkeypatch.setattr(shards.os, "fsync", after(calls, os.fsync, refuse))
    refused(["prepare", *arguments, str(world.target)], capfd, f"{tmp_path / 'data'}/", "disk full", "free")
    assert not (tmp_path / "data").exists()


# ---- damaged checkpoints ----


def copy_of(short: Path, run: Path) -> list[Path]:
    shutil.copytree(short, run)
    return complete_checkpoints(run)


@pytest.mark.parametrize("how", ["cut", "no manifest", "broken manifest", "a file less"])
def test_an_incomplete_newest_checkpoint_is_passed_over_by_name_for_the_one_before(
    world, tmp_path, capfd, short, how
):
    _, newest = copy_of(short, tmp_path / "run")
    weights, manifest = newest / "drafter.safetensors", newest / "manifest.json"
    if how == "cut":
        os.truncate(weights, weights.stat().st_size - 1)
    elif how == "broken manifest":
        manifest.write_bytes(b"\xff" + manifest.read_bytes()[1:])
    else:
        (manifest if how == "no manifest" else weights).unlink()
    assert cli.main(world.train(tmp_path / "run", *SHORT.split())) == 0
    told = capfd.readouterr().err
    assert "step_00000036 (step 36); passed over, incomplete: step_00000040" in told
    equal_to_the_last_bit(tmp_path / "run", short)


def test_a_run_whose_only_checkpoints_are_incomplete_is_not_silently_begun_again(
    world, tmp_path, capfd, short
):
    for found in copy_of(short, tmp_path / "run"):
        (found / "optimizer.safetensors").unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    refused(
        world.train(tmp_path / "run", *SHORT.split()),
        capfd,
        "step_00000040: not a complete checkpoint",
        "remove",
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_flipped_byte_in_the_newest_checkpoint_is_refused_by_the_files_name(world, tmp_path, capfd, short):
    _, newest = copy_of(short, tmp_path / "run")
    path = newest / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    arguments = world.train(tmp_path / "run", *SHORT.split())
    refused(arguments, capfd, f"{path}: damaged (size or hash is not the manifest's): delete that folder")
    shutil.rmtree(newest)
    assert cli.main(arguments) == 0, "what the message says helps"
    equal_to_the_last_bit(tmp_path / "run", short)


@pytest.mark.parametrize("changed", ["data", "target"])
def test_a_checkpoint_of_other_data_or_of_another_target_behind_the_same_path_is_refused_by_name(
    world, tmp_path, capfd, changed
):
    for name in ("data", "target"):
        shutil.copytree(world.root / name, tmp_path / name)
    places = ["--data-dir", str(tmp_path / "data"), "--target-model", str(tmp_path / "target")]
    arguments = world.train(tmp_path / "run", *places)
    assert cli.main(arguments) == 0
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    shutil.rmtree(tmp_path / changed)
    if changed == "data":
        words = ["--input", str(world.chats), "--output-dir", str(tmp_path / "data"), "--limit", "50"]
        assert cli.main(["prepare", *words, "--tokenizer", str(world.target), "--holdout", "0.1"]) == 0
        capfd.readouterr()
    else:
        tiny_target("qwen3", tmp_path / "target", vocab_size=VOCAB, layers=8, seed=1)
        byte_tokenizer().save_pretrained(tmp_path / "target")
    told = refused(arguments, capfd, "step_00000004: made with another", "--output-dir")
    named = told.partition("made with another ")[2].partition(" (see")[0]
    assert named == {"data": "data, packing", "target": "target"}[changed]
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
