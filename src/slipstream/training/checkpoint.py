"""Checkpoints: what a run needs to go on exactly, complete or not there at all.

A checkpoint is a folder `step_00000500` with fp32 masters, the optimiser's moments and the run's position.
It is written under a temporary name, every file fsynced; its manifest (sizes and hashes) is written last,
then the folder is renamed. Anchors, noise and row order are functions of the seed and the step, so no random
state has to be kept.

Weights and moments are two safetensors files or, of a drafter that lies in shards on several ranks, a file of
torch.distributed.checkpoint a rank. Each is read at any number of ranks, in shards or not.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, distribute_tensor

from slipstream.config import UserError
from slipstream.models.drafter import Drafter

MANIFEST = "manifest.json"
SHARDS = ".metadata"
"""Which rank's file holds what, where weights and moments are in shards; its name is torch's."""
NAME = re.compile(r"step_(\d{8})")


@dataclass(frozen=True)
class Position:
    """Where a run stands after `step` optimiser steps."""

    step: int
    seconds: float
    """Training time so far."""
    labels: int
    """Slots that carried loss so far."""
    fingerprint: str
    """Hash of everything the losses depend on; a checkpoint of another is refused."""
    window: tuple[float, ...] = ()
    """State of the metrics since the last line of metrics.jsonl."""


def save_checkpoint(
    run_dir: Path,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    position: Position,
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `run_dir/checkpoints/step_…`, then drop all but the newest `keep`. A full disk is a
    `UserError`.

    `group`: the ranks that a sharded drafter lies on. All of them call this and write their parts; the first
    goes on to make a checkpoint of them when the others have returned.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step_{position.step:08d}"
    partial = folder / f".{final.name}.partial"
    try:
        if group is None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            masters = {k: v.detach().cpu() for k, v in drafter.state_dict().items()}
            save_file(masters, partial / "drafter.safetensors")
            moments = {k: v.cpu() for k, v in _moments(drafter, optimizer).items()}
            save_file(moments, partial / "optimizer.safetensors")
            files = {}
        else:
            files = _save_shards(partial, training_state(drafter, optimizer), group)
            if dist.get_rank(group):
                return final
        (partial / "drafter.json").write_text(json.dumps(asdict(drafter.config), indent=2) + "\n")
        (partial / "position.json").write_text(json.dumps(asdict(position), indent=2) + "\n")
        files |= {p.name: _file_facts(p) for p in sorted(partial.iterdir()) if p.name not in files}
        (partial / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n")
        for path in (*partial.iterdir(), partial):
            fsync(path)
        if final.exists():  # a damaged one of this very step: a complete one would have been resumed from
            _discard(final)
        os.replace(partial, final)
        fsync(folder)
    except CheckpointException as e:
        shutil.rmtree(partial, ignore_errors=True)
        rank, (why, _) = min(e.failures.items())
        raise UserError(
            f"{folder}: drafter rank {rank} cannot write its part of a checkpoint "
            f"({' '.join(str(why).split())}): is the disk full? (the last checkpoint is kept)"
        ) from None
    except (OSError, SafetensorError) as e:
        shutil.rmtree(partial, ignore_errors=True)
        if disk_full(e):
            raise UserError(f"{folder}: the disk is full: free space (the last checkpoint is kept)") from None
        raise
    for old in complete_checkpoints(run_dir)[:-keep]:
        _discard(old)
    return final


def _save_shards(
    partial: Path, state: dict[str, Tensor], group: dist.ProcessGroup
) -> dict[str, dict[str, int | str]]:
    """Every rank's part of `state` into a file of its own, hashed by its writer; on the first rank the names,
    sizes and hashes of all. A rank's failure to write is raised on all.
    """
    save_shards(state, storage_writer=FileSystemWriter(partial), process_group=group)
    rank = dist.get_rank(group)
    mine = {path.name: _file_facts(path) for path in partial.glob(f"__{rank}_*")}
    parts = [mine] * dist.get_world_size(group)
    dist.gather_object(mine, parts if rank == 0 else None, group=group, group_dst=0)
    return {name: facts for part in parts for name, facts in part.items()}


def disk_full(error: OSError | SafetensorError) -> bool:
    """Whether a write failed for want of space (or quota); safetensors has the number in its text only."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(f"(os error {number})" in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def newest_checkpoint(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The complete checkpoint to resume from (None in a new run), and the names of newer ones passed over.

    Where there are checkpoints but no complete one, a run that began again at step 0 would throw the old one
    away: that is a `UserError`.
    """
    folder = run_dir / "checkpoints"
    found = complete_checkpoints(run_dir)
    last = found[-1].name if found else ""
    damaged = [n for n in _names(folder) if n > last]
    if damaged and not found:
        raise UserError(
            f"{folder / damaged[-1]}: not a complete checkpoint (a file is missing or cut), and there is no "
            "other: restore it, or remove the run's folder to start again"
        )
    return (found[-1] if found else None), damaged


def clear_leftovers(run_dir: Path) -> None:
    """Remove what a killed process left half-written or half-removed."""
    for leftover in (run_dir / "checkpoints").glob(".step_*.partial"):
        shutil.rmtree(leftover)


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first; completeness is a manifest whose sizes fit."""
    folder = run_dir / "checkpoints"
    return [folder / name for name in _names(folder) if _sizes_fit(folder / name)]


def load_checkpoint(
    checkpoint: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, fingerprint: str
) -> Position:
    """Masters and moments into `drafter` and `optimizer`; the position they stand at. Raises `UserError`."""
    verify_checkpoint(checkpoint)
    position = read_position(checkpoint)
    if position.fingerprint != fingerprint:
        raise UserError(
            f"{checkpoint}: made with another configuration, data or target: give the settings of its run "
            "(config.yaml beside it) or another --output-dir"
        )
    make_moments(drafter, optimizer)
    state = training_state(drafter, optimizer)
    if (checkpoint / SHARDS).is_file():
        _load_shards(checkpoint, state)
    else:
        kept = load_file(checkpoint / "optimizer.safetensors")
        kept |= {f"master.{k}": v for k, v in load_file(checkpoint / "drafter.safetensors").items()}
        assert kept.keys() == state.keys()
        for name, tensor in state.items():
            whole = kept[name]
            if isinstance(tensor, DTensor):
                whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            local(tensor).copy_(local(whole))
    set_steps(optimizer, state["step"])
    drafter.refresh()
    return position


def read_position(checkpoint: Path) -> Position:
    """Where a verified checkpoint stands."""
    values = json.loads((checkpoint / "position.json").read_text())
    return Position(**{**values, "window": tuple(values["window"])})


def load_masters(checkpoint: Path) -> tuple[dict, dict[str, Tensor]]:
    """Geometry (as written from `DrafterConfig`) and fp32 weights of a checkpoint: what an export needs."""
    verify_checkpoint(checkpoint)
    geometry = json.loads((checkpoint / "drafter.json").read_text())
    if not (checkpoint / SHARDS).is_file():
        return geometry, load_file(checkpoint / "drafter.safetensors")
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    masters = {
        name: torch.empty(facts.size)
        for name, facts in stored.items()
        if name.startswith("master.") and isinstance(facts, TensorStorageMetadata)
    }
    _load_shards(checkpoint, masters)
    return geometry, {name.removeprefix("master."): w for name, w in masters.items()}


def verify_checkpoint(checkpoint: Path) -> None:
    """Sizes and hashes of every file against the manifest. Raises `UserError` naming the file."""
    if not (checkpoint / MANIFEST).is_file():
        raise UserError(f"{checkpoint}: not a complete checkpoint (no {MANIFEST}): take another")
    for name, facts in _files(checkpoint).items():
        if not (checkpoint / name).is_file() or _file_facts(checkpoint / name) != facts:
            raise UserError(
                f"{checkpoint / name}: damaged (size or hash is not the manifest's): delete that folder"
            )


def _load_shards(checkpoint: Path, state: dict[str, Tensor]) -> None:
    """Fill tensors, whole or sharded in whatever way, from the files of all ranks; each rank reads for
    itself.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load_shards(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)


def training_state(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What a run needs to go on, by name: the masters and moments themselves, not copies."""
    masters = {f"master.{name}": p.detach() for name, p in drafter.named_parameters()}
    return masters | _moments(drafter, optimizer)


def make_moments(drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
    """AdamW's state as it is before a first step, to be filled."""
    for p in drafter.parameters():
        moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.zeros((), device=p.device), **moments}


def set_steps(optimizer: torch.optim.Optimizer, step: Tensor) -> None:
    """AdamW counts its steps for every tensor apart; `training_state` has one count, as all are equal."""
    for moments in optimizer.state.values():
        moments["step"].copy_(step)


def _moments(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, parameter in drafter.named_parameters():
        state = optimizer.state[parameter]
        out["step"] = state["step"]
        out[f"exp_avg.{name}"] = state["exp_avg"]
        out[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
    return out


def local(tensor: Tensor) -> Tensor:
    """What lies on this rank of a tensor: its part of a sharded one, else all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if NAME.fullmatch(p.name)) if folder.is_dir() else []


def _files(checkpoint: Path) -> dict[str, dict[str, int | str]]:
    """The manifest's files: name → size and hash. Raises `UserError` when it is missing or broken."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        return {name: {"bytes": facts["bytes"], "sha256": facts["sha256"]} for name, facts in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(
            f"{checkpoint / MANIFEST}: damaged ({type(e).__name__}): delete that checkpoint's folder"
        ) from None


def _sizes_fit(checkpoint: Path) -> bool:
    try:
        files = _files(checkpoint)
        return all((checkpoint / name).stat().st_size == facts["bytes"] for name, facts in files.items())
    except (OSError, UserError):
        return False


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint under a leftover's name: killed on the way, it is no checkpoint any more."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.old.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed)


def _file_facts(path: Path) -> dict[str, int | str]:
    with path.open("rb") as f:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
