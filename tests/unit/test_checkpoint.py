"""A checkpoint is complete or it is none: what is written, found, verified, refused, dropped."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from slipstream.config import UserError
from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.training import checkpoint as room
from slipstream.training.checkpoint import (
    Position,
    clear_leftovers,
    complete_checkpoints,
    disk_full,
    load_checkpoint,
    load_masters,
    newest_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)

FILES = ["drafter.json", "drafter.safetensors", "manifest.json", "optimizer.safetensors", "position.json"]


def position(step: int) -> Position:
    return Position(step=step, seconds=1.5 * step, labels=7 * step, fingerprint="f")


class Trainee:
    """A tiny drafter and its optimiser, and steps that change both."""

    def __init__(self, seed: int = 0) -> None:
        geometry = {"hidden_size": 16, "vocab_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
        block = {"head_dim": 8, "intermediate_size": 16, "block_size": 4, "mask_token_id": 3}
        target = {"target_layer_ids": (0, 2), "num_target_layers": 4, "rope_theta": 1e4}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.drafter = Drafter(DrafterConfig(**geometry, **block, **target))  # type: ignore[arg-type]
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-2, foreach=True)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for p in self.drafter.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        self.optimizer.step()

    def save(self, run: Path, number: int, keep: int = 2) -> Path:
        return save_checkpoint(run, self.drafter, self.optimizer, position(number), keep)

    def load(self, checkpoint: Path, fingerprint: str = "f") -> Position:
        return load_checkpoint(checkpoint, self.drafter, self.optimizer, fingerprint)

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.drafter.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def trainee() -> Trainee:
    made = Trainee()
    made.step(1)
    return made


def test_what_is_loaded_goes_on_to_the_last_bit_as_if_nothing_had_happened(tmp_path, trainee):
    saved = trainee.save(tmp_path, 1)
    assert sorted(p.name for p in saved.iterdir()) == FILES
    other = Trainee(seed=5)
    assert other.load(saved) == position(1)
    for number in (2, 3):
        trainee.step(number)
        other.step(number)
    assert equal(trainee.weights(), other.weights())
    # without the moments or with another count of steps it would not be so
    for forget in ("exp_avg", "exp_avg_sq", "step"):
        less = Trainee(seed=5)
        less.load(saved)
        for state in less.optimizer.state.values():
            state[forget] = torch.zeros_like(state[forget])
        less.step(2)
        less.step(3)
        assert not equal(trainee.weights(), less.weights()), forget


def test_masters_are_kept_in_fp32_with_the_geometry_they_belong_to(tmp_path, trainee):
    geometry, weights = load_masters(trainee.save(tmp_path, 1))
    assert geometry["block_size"] == 4
    assert {w.dtype for w in weights.values()} == {torch.float32}
    assert weights.keys() == trainee.drafter.state_dict().keys()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept_and_there_is_always_one(tmp_path, trainee, keep, monkeypatch):
    existing = []
    replace = os.replace

    def watched(a, b):
        replace(a, b)
        existing.append(len(complete_checkpoints(tmp_path)))

    monkeypatch.setattr(room.os, "replace", watched)
    for number in range(1, 6):
        trainee.save(tmp_path, number, keep)
    assert [p.name for p in complete_checkpoints(tmp_path)] == [f"step_{n:08d}" for n in range(6 - keep, 6)]
    assert min(existing) >= 1, "the old one goes only when the new one stands"
    assert len(os.listdir(tmp_path / "checkpoints")) == keep


def test_checkpoints_are_ordered_by_step_and_a_manifest_tells_sizes_and_hashes(tmp_path, trainee):
    for number in (9, 10, 100):
        trainee.save(tmp_path, number, keep=9)
    found = complete_checkpoints(tmp_path)
    assert [p.name for p in found] == ["step_00000009", "step_00000010", "step_00000100"]
    assert newest_checkpoint(tmp_path) == (found[-1], [])
    files = json.loads((found[0] / "manifest.json").read_text())["files"]
    assert sorted(files) == [n for n in FILES if n != "manifest.json"]
    assert files["position.json"]["bytes"] == (found[0] / "position.json").stat().st_size
    assert len(files["position.json"]["sha256"]) == 64


def test_a_new_run_has_none(tmp_path):
    assert complete_checkpoints(tmp_path) == []
    assert newest_checkpoint(tmp_path) == (None, [])
    clear_leftovers(tmp_path)


# ---- damage ----


@pytest.mark.parametrize("name", [n for n in FILES if n != "manifest.json"])
@pytest.mark.parametrize("how", ["gone", "cut", "longer"])
def test_a_file_that_is_gone_cut_or_longer_makes_it_no_complete_checkpoint(tmp_path, trainee, name, how):
    first, second = trainee.save(tmp_path, 1), trainee.save(tmp_path, 2)
    path = second / name
    if how == "gone":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.write_bytes(path.read_bytes() + b"x")
    assert complete_checkpoints(tmp_path) == [first]
    assert newest_checkpoint(tmp_path) == (first, [second.name])
    with pytest.raises(UserError, match=f"{name}: damaged"):
        verify_checkpoint(second)


@pytest.mark.parametrize("name", [n for n in FILES if n != "manifest.json"])
def test_one_flipped_bit_in_any_file_is_refused_by_the_files_name(tmp_path, trainee, name):
    saved = trainee.save(tmp_path, 1)
    data = bytearray((saved / name).read_bytes())
    data[len(data) // 2] ^= 4
    (saved / name).write_bytes(data)
    before = trainee.weights()
    for use in (trainee.load, load_masters, verify_checkpoint):
        with pytest.raises(UserError, match=f"{name}: damaged .*delete that folder"):
            use(saved)
    assert equal(trainee.weights(), before), "nothing of it was taken over"


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"files": 3}', b'{"files": {"a": 1}}', b'{"files": {"a": {}}}'],
)
def test_a_broken_manifest_makes_it_no_complete_checkpoint(tmp_path, trainee, text):
    first, second = trainee.save(tmp_path, 1), trainee.save(tmp_path, 2)
    (second / "manifest.json").write_bytes(text)
    assert newest_checkpoint(tmp_path) == (first, [second.name])
    with pytest.raises(UserError, match=r"manifest\.json: damaged"):
        load_masters(second)
    (second / "manifest.json").unlink()
    assert newest_checkpoint(tmp_path) == (first, [second.name])
    with pytest.raises(UserError, match=r"step_00000002: not a complete checkpoint \(no manifest\.json\)"):
        load_masters(second)


def test_where_none_is_complete_nothing_is_silently_begun_again(tmp_path, trainee):
    for number in (1, 2):
        (trainee.save(tmp_path, number) / "drafter.safetensors").unlink()
    with pytest.raises(UserError, match=r"step_00000002: not a complete checkpoint .* to start again"):
        newest_checkpoint(tmp_path)


def test_another_runs_checkpoint_is_refused_and_changes_nothing(tmp_path, trainee):
    saved = trainee.save(tmp_path, 1)
    other = Trainee(seed=5)
    before = other.weights()
    with pytest.raises(UserError, match="made with another configuration, data or target"):
        other.load(saved, "another")
    assert equal(other.weights(), before)
    assert not other.optimizer.state


# ---- writing ----


def test_a_partial_folder_is_never_a_checkpoint_and_is_cleared(tmp_path, trainee):
    saved = trainee.save(tmp_path, 1)
    for name in (".step_00000002.partial", ".step_00000001.old.partial"):
        shutil.copytree(saved, tmp_path / "checkpoints" / name)
    assert newest_checkpoint(tmp_path) == (saved, [])
    clear_leftovers(tmp_path)
    assert os.listdir(tmp_path / "checkpoints") == [saved.name]


class Killed(BaseException):
    """The process is gone at this call."""


def test_killed_at_any_write_a_complete_checkpoint_is_left_and_the_next_save_works(tmp_path, monkeypatch):
    """Every call that changes the disk, one after another, is the last one made."""
    calls = ("save_file", "fsync", "_file_facts")
    reached = 0
    for last in range(1, 60):
        run = tmp_path / str(last)
        trainee = Trainee()
        trainee.step(1)
        for number in (1, 2):
            trainee.save(run, number, keep=1)
        (run / "checkpoints" / "step_00000003").mkdir()  # a damaged one of the step to come
        made = []

        def dying(function, made=made, last=last):
            def call(*given, **named):
                made.append(1)
                if len(made) == last:
                    raise Killed
                return function(*given, **named)

            return call

        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(room, name, dying(vars(room)[name]))
            patch.setattr(room.os, "replace", dying(os.replace))
            patch.setattr(room.shutil, "rmtree", dying(shutil.rmtree))
            try:
                trainee.save(run, 3, keep=1)
            except Killed:
                reached = last
            else:
                break
        found, _ = newest_checkpoint(run)
        assert found is not None
        verify_checkpoint(found)
        clear_leftovers(run)
        trainee.save(run, 4, keep=1)
        assert complete_checkpoints(run)[-1].name == "step_00000004"
        assert not [n for n in os.listdir(run / "checkpoints") if n.endswith(".partial")]
    assert reached > 15, "every place was met"


def full_text(*_: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def full_number(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def over_quota(*_: object) -> None:
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.parametrize(
    ("where", "how"),
    [("save_file", full_text), ("fsync", full_number), ("_file_facts", over_quota), ("fsync", over_quota)],
)
def test_a_full_disk_is_a_user_error_no_partial_stays_and_the_last_one_is_kept(
    tmp_path, trainee, monkeypatch, where, how
):
    saved = trainee.save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(room, where, how)
        with pytest.raises(UserError, match=r"checkpoints: the disk is full: free space .*is kept"):
            trainee.save(tmp_path, 2, keep=1)
    assert os.listdir(tmp_path / "checkpoints") == [saved.name]
    verify_checkpoint(saved)
    assert trainee.save(tmp_path, 2, keep=1).is_dir()


def test_another_failure_of_the_disk_is_not_called_full(tmp_path, trainee, monkeypatch):
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(room, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        trainee.save(tmp_path, 1)
    assert os.listdir(tmp_path / "checkpoints") == []
    assert not disk_full(SafetensorError("Error while serializing: I/O error: File too large (os error 27)"))
