"""How taps reach the drafter's step: straight from the target (`Target.taps`) or from disk (`TapCache`).

A link is a function row → taps [S, T·H]. The disk link records every packed row once: for small targets and
many epochs the target then costs nothing. The link between ranks is in channel.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.config import UserError
from slipstream.data.pack import Row
from slipstream.data.shards import write_atomic
from slipstream.models.target import Target

TapLink = Callable[[Row], Tensor]
FACTS = "taps.json"


@dataclass(frozen=True)
class TapFacts:
    """What recorded taps belong to; a training run with any other is refused."""

    target: str
    target_layer_ids: tuple[int, ...]
    width: int
    """T·H features a token."""
    dtype: str
    token_budget: int
    packing: str
    """Fingerprint of the packed training rows."""
    heldout_packing: str
    rows: int
    heldout_rows: int


def target_fingerprint(target: Target) -> str:
    """Hash of the names, shapes and a sample of the values of all weights; independent of where they were
    loaded from, and whether they are in parts: then all ranks of the group call it together.
    """
    digest = hashlib.sha256()
    for name, weight in target.model.named_parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        sample = whole.detach().flatten()[:: max(1, whole.numel() // 64)][:64]
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(sample.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class TapCache:
    """Taps on disk: one safetensors file a packed row, padding left out."""

    def __init__(self, folder: Path, facts: TapFacts) -> None:
        self.folder, self.facts = folder, facts

    @staticmethod
    def open(folder: str | Path) -> TapCache:
        folder = Path(folder)
        try:
            values = json.loads((folder / FACTS).read_text())
            values["target_layer_ids"] = tuple(values["target_layer_ids"])
            return TapCache(folder, TapFacts(**values))
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{folder / FACTS}: not there or broken: record taps with `slipstream cache`"
            ) from None

    @staticmethod
    def create(folder: str | Path, facts: TapFacts) -> TapCache:
        """A new cache, or an unfinished one of the same facts. Another's folder is a `UserError`."""
        folder = Path(folder)
        if (folder / FACTS).exists():
            cache = TapCache.open(folder)
            cache.check(facts)
            return cache
        unfinished = {f"{FACTS}.tmp"}
        if folder.exists() and {p.name for p in folder.iterdir()} - unfinished:
            raise UserError(f"{folder}: is not empty and holds no taps: give a new --output-dir")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / FACTS, json.dumps(asdict(facts), indent=2).encode())
        return TapCache(folder, facts)

    def check(self, wanted: TapFacts) -> None:
        """Every fact must be the wanted one; more recorded rows than wanted are fine."""
        mine, theirs = asdict(self.facts), asdict(wanted)
        if not wanted.heldout_rows:  # nothing is validated: any held-out part will do
            theirs["heldout_packing"] = mine["heldout_packing"]
        for name, value in mine.items():
            fits = value >= theirs[name] if name in ("rows", "heldout_rows") else value == theirs[name]
            if not fits:
                raise UserError(
                    f"{self.folder}: taps were recorded with {name} = {value}, this run has {theirs[name]}: "
                    "record them again or give the same settings"
                )

    def path(self, split: str, row_id: int) -> Path:
        return self.folder / split / f"row_{row_id:07d}.safetensors"

    def has(self, split: str, row_id: int, tokens: int) -> bool:
        """Whether the row's file is there and whole: one that was cut is recorded again."""
        try:
            with safe_open(self.path(split, row_id), "pt") as f:
                return f.get_slice("taps").get_shape() == [tokens, self.facts.width]
        except (OSError, SafetensorError):
            return False

    def check_recorded(self, split: str, count: int) -> None:
        """`UserError` now, not in the middle of a run, when the first `count` rows are not all there."""
        for row_id in range(count):
            if not (path := self.path(split, row_id)).exists():
                raise UserError(f"{path}: missing, the cache is unfinished: run `slipstream cache` again")

    def write(self, split: str, row: Row, taps_ST: Tensor) -> None:
        path, used = self.path(split, row.row_id), row.spans()[-1][1]
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(exist_ok=True)
            save_file({"taps": taps_ST[:used].contiguous().cpu()}, partial)
            with partial.open("rb") as f:
                os.fsync(f.fileno())
            os.replace(partial, path)
        except (OSError, SafetensorError) as e:
            partial.unlink(missing_ok=True)
            raise UserError(
                f"{path}: cannot be written ({e}): free space and run `slipstream cache` again"
            ) from None

    def link(self, split: str, device: torch.device) -> TapLink:
        """Row → its recorded taps on `device`. Whether they are sound was seen when they were recorded."""

        def read(row: Row) -> Tensor:
            path = self.path(split, row.row_id)
            try:
                taps = load_file(path)["taps"]
            except (OSError, SafetensorError) as e:
                raise UserError(f"{path}: cannot be read ({e}): run `slipstream cache` again") from None
            if list(taps.shape) != [row.spans()[-1][1], self.facts.width]:
                raise UserError(f"{path}: holds taps of another row: run `slipstream cache` again")
            out_SC = torch.zeros(len(row.input_ids), taps.shape[1], dtype=taps.dtype, device=device)
            # only from pinned memory does a copy to a GPU keep nobody waiting
            out_SC[: len(taps)].copy_(taps.pin_memory() if out_SC.is_cuda else taps, non_blocking=True)
            return out_SC

        return read


def holding(link: TapLink, rows: int) -> TapLink:
    """The link with the taps of the last `rows` rows kept on their device, for further draws of anchors."""
    kept: dict[int, Tensor] = {}

    def read(row: Row) -> Tensor:
        if row.row_id not in kept:
            while len(kept) >= rows:
                del kept[next(iter(kept))]  # before the next pass needs its memory
            kept[row.row_id] = link(row)
        return kept[row.row_id]

    return read


def check_disk(folder: Path, needed: int) -> None:
    """Refuse before the first byte what cannot fit. `needed` in bytes."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"{folder}: the taps need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: "
            "free space, record fewer rows (--limit-rows) or train online"
        )
