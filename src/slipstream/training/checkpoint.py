"""Checkpoints: what a run needs to go on exactly, complete or not there at all.

A checkpoint is a folder `step_00000500` with fp32 masters, the optimiser's moments and the run's position.
It is written under a temporary name, every file fsynced; its manifest (sizes and hashes) is written last,
then the folder is renamed. Anchors, noise and row order are functions of the seed and the step, so no random
state has to be kept.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.config import UserError
from slipstream.models.drafter import Drafter

MANIFEST = "manifest.json"
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


def save_checkpoint(
    run_dir: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, position: Position, keep: int
) -> Path:
    """Write `run_dir/checkpoints/step_…`, then drop all but the newest `keep`. A full disk is a
    `UserError`.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step_{position.step:08d}"
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        masters = {k: v.detach().cpu() for k, v in drafter.state_dict().items()}
        save_file(masters, partial / "drafter.safetensors")
        save_file(_moments(drafter, optimizer), partial / "optimizer.safetensors")
        (partial / "drafter.json").write_text(json.dumps(asdict(drafter.config), indent=2) + "\n")
        (partial / "position.json").write_text(json.dumps(asdict(position), indent=2) + "\n")
        files = {p.name: _file_facts(p) for p in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n")
        for path in (*partial.iterdir(), partial):
            _fsync(path)
        if final.exists():  # an incomplete or older one of this very step
            shutil.rmtree(final)
        os.replace(partial, final)
        _fsync(folder)
    except OSError as e:
        shutil.rmtree(partial, ignore_errors=True)
        if e.errno == errno.ENOSPC:
            raise UserError(f"{folder}: the disk is full: free space (the last checkpoint is kept)") from None
        raise
    for old in complete_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)
    return final


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first; completeness is a manifest whose sizes fit."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if NAME.fullmatch(p.name) and _sizes_fit(p)]
    return sorted(found, key=lambda p: p.name)


def load_checkpoint(
    checkpoint: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, fingerprint: str
) -> Position:
    """Masters and moments into `drafter` and `optimizer`; the position they stand at. Raises `UserError`."""
    verify_checkpoint(checkpoint)
    position = Position(**json.loads((checkpoint / "position.json").read_text()))
    if position.fingerprint != fingerprint:
        raise UserError(
            f"{checkpoint}: made with another configuration, data or target: give the settings of its run "
            "(config.yaml beside it) or another --output-dir"
        )
    drafter.load_state_dict(load_file(checkpoint / "drafter.safetensors"))
    moments = load_file(checkpoint / "optimizer.safetensors")
    for name, parameter in drafter.named_parameters():
        optimizer.state[parameter] = {
            "step": moments["step"].clone(),
            "exp_avg": moments[f"exp_avg.{name}"].to(parameter.device),
            "exp_avg_sq": moments[f"exp_avg_sq.{name}"].to(parameter.device),
        }
    return position


def load_masters(checkpoint: Path) -> tuple[dict, dict[str, Tensor]]:
    """Geometry (as written from `DrafterConfig`) and fp32 weights of a checkpoint: what an export needs."""
    verify_checkpoint(checkpoint)
    geometry = json.loads((checkpoint / "drafter.json").read_text())
    return geometry, load_file(checkpoint / "drafter.safetensors")


def verify_checkpoint(checkpoint: Path) -> None:
    """Sizes and hashes of every file against the manifest. Raises `UserError` naming the file."""
    if not (checkpoint / MANIFEST).is_file():
        raise UserError(f"{checkpoint}: not a complete checkpoint (no {MANIFEST}): take another")
    for name, facts in json.loads((checkpoint / MANIFEST).read_text())["files"].items():
        if not (checkpoint / name).is_file() or _file_facts(checkpoint / name) != facts:
            raise UserError(
                f"{checkpoint / name}: damaged (size or hash is not the manifest's): delete that folder"
            )


def _moments(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, parameter in drafter.named_parameters():
        state = optimizer.state[parameter]
        out["step"] = state["step"].cpu()
        out[f"exp_avg.{name}"] = state["exp_avg"].cpu()
        out[f"exp_avg_sq.{name}"] = state["exp_avg_sq"].cpu()
    return out


def _sizes_fit(checkpoint: Path) -> bool:
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        return all((checkpoint / name).stat().st_size == facts["bytes"] for name, facts in files.items())
    except (OSError, json.JSONDecodeError):
        return False


def _file_facts(path: Path) -> dict[str, int | str]:
    with path.open("rb") as f:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
