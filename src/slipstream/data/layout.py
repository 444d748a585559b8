"""A token shard's file: what lies where in it, and whether that is what the manifest knows of it.

Here: the layout and its checks, for files on the local disk and for the first bytes of others. Not here:
writing, the manifest, datasets (`shards`), what is at a URL (`remote_shards`).
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from slipstream.config import UserError
from slipstream.data.remote import MEND, KnownFile, corrupt
from slipstream.data.sources import file_sha256

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
MANIFEST = "manifest.json"
TENSORS = {
    "offsets": ("I64", "<i8"),
    "checks": ("U32", "<u4"),
    "tokens": ("U32", "<u4"),
    "supervised": ("U8", "<u1"),
}
"""In the order in which safetensors lays them out: all but the last two are read when a dataset is opened."""
HEADER_AT_MOST = 1024
"""Bytes; ours have about 300."""


@dataclass(frozen=True)
class ShardFile(KnownFile):
    """What the manifest knows of one shard."""

    documents: int
    tokens: int
    supervised_tokens: int
    largest_id: int


@dataclass(frozen=True)
class Shard:
    """A shard on the local disk, memory-mapped, or in memory."""

    path: Path
    tokens: np.ndarray
    supervised: np.ndarray
    offsets: np.ndarray
    checks: np.ndarray | None = None
    """None for what no file of ours holds."""
    largest_id: int | None = None


def document_check(tokens: np.ndarray, supervised: np.ndarray) -> int:
    """CRC-32 of a document as it is stored: uint32 tokens, then its mask in bytes."""
    return zlib.crc32(supervised.data, zlib.crc32(tokens.data))


def check_size(path: str | Path, size: int | None, known: ShardFile) -> None:
    if size is None:
        raise UserError(f"{path}: missing, though the manifest lists it; {MEND}")
    if size != known.bytes:
        kind = "truncated" if size < known.bytes else "corrupt"
        raise UserError(f"{path}: {kind}: {size} bytes, the manifest says {known.bytes}; {MEND}")


def open_shard(path: Path, known: ShardFile, whole: bool) -> Shard:
    """A local shard, mapped; with `whole` its hash is checked too."""
    check_size(path, path.stat().st_size if path.exists() else None, known)
    if whole and file_sha256(path) != known.sha256:
        raise corrupt(str(path))
    return map_shard(path, known)


def map_shard(path: Path, known: ShardFile) -> Shard:
    with path.open("rb") as f:
        start = f.read(8 + HEADER_AT_MOST)
    offsets, *rest = (
        np.memmap(path, dtype, "r", at, (count,)) for dtype, at, count in read_layout(path, known, start)
    )
    checks, tokens, supervised = rest
    check_index(path, known, offsets)
    return Shard(path, tokens, supervised, np.array(offsets), np.array(checks), known.largest_id)


def read_layout(path: str | Path, known: ShardFile, start: bytes) -> list[tuple[str, int, int]]:
    """(dtype, first byte, length) of each of `TENSORS`, from the first bytes of a safetensors file: length of
    the header (8 bytes), JSON header, tensors.
    """
    length = int.from_bytes(start[:8], "little")
    counts = {"offsets": known.documents + 1, "checks": known.documents}
    out = []
    try:
        entries = json.loads(start[8 : 8 + length])
        for name, (dtype, numpy_dtype) in TENSORS.items():
            count = counts.get(name, known.tokens)
            begin, end = entries[name]["data_offsets"]
            facts = (entries[name]["dtype"], entries[name]["shape"], end - begin)
            if facts != (dtype, [count], count * np.dtype(numpy_dtype).itemsize):
                raise KeyError(name)
            if not 0 <= begin <= known.bytes - 8 - length - (end - begin):
                raise KeyError(name)
            out.append((numpy_dtype, 8 + length + begin, count))
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: corrupt: not the header of the manifest's token shard; {MEND}") from None
    return out


def check_index(path: str | Path, known: ShardFile, offsets: np.ndarray) -> None:
    if offsets[0] != 0 or offsets[-1] != known.tokens or (np.diff(offsets) < 1).any():
        raise UserError(
            f"{path}: corrupt: its documents do not add up to the manifest's {known.tokens} tokens; {MEND}"
        )
