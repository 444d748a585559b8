"""Token shards, local or at a URL: atomic writing, the manifest, random access to the documents of a split.

Here: the file format, checks when a dataset is opened and a document read, fingerprints of tokenizers. Not
here: what goes into a document (`chat`, `prepare`), rows (`pack`), how a URL is read and cached (`remote`).

A dataset is a folder of safetensors files (`tokens` uint32 [n], `supervised` uint8 [n], `offsets` int64
[documents + 1], `checks` uint32 [documents]) and `manifest.json`, which is written last: without it the
folder is no dataset. A document's check is the CRC-32 of its tokens, then its mask. A folder of tokenised
completions (see `sources`) opens as a dataset too; it is read into memory, five bytes a token.
"""

from __future__ import annotations

import bisect
import dataclasses
import errno
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy

from slipstream.config import CacheConfig, TrainConfig, UserError
from slipstream.data.completions import read_completions
from slipstream.data.layout import (
    MANIFEST,
    MEND,
    SPLITS,
    Shard,
    ShardFile,
    Split,
    document_check,
    open_shard,
)
from slipstream.data.records import Document
from slipstream.data.remote import Cache, Range, RemoteFolder, is_url, local_path
from slipstream.data.remote_shards import RemoteShard, open_remote_shards
from slipstream.data.tokenizer import tokenizer_fingerprint, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 2
HASH_WHOLE_BELOW = (
    256 * 2**20
)  # bytes of a split: a second of hashing at most; above it size, header and offsets


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`. `counts` and `settings` are plain JSON; `sources` hold path, bytes and sha256
    (of URLs: the store's version).
    """

    format: int
    splits: dict[Split, list[ShardFile]]
    tokenizer_fingerprint: str
    template_fingerprint: str
    vocab_size: int
    eos_ids: list[int]
    counts: dict[str, Any]
    sources: list[dict[str, Any]]
    settings: dict[str, Any]


@dataclass(frozen=True)
class TokenDataset:
    """Documents of one split. `lengths` [documents] int64 in tokens; `counts` what became of every record."""

    split: Split
    lengths: np.ndarray
    fingerprint: str  # of the tokens and masks of this split
    tokenizer_fingerprint: str | None  # None: ready ids, whose tokenizer nobody wrote down
    vocab_size: int | None
    eos_ids: tuple[int, ...]
    counts: dict[str, Any]
    shards: tuple[Shard | RemoteShard, ...]
    first_documents: tuple[int, ...]  # of each shard

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def where(self) -> str:
        """The folder or URL, for messages."""
        return str(self.shards[0].path).rpartition("/")[0] if self.shards else "the data"

    @property
    def largest_id(self) -> int:
        """The highest token id, 0 where there is no document."""
        known = (int(s.tokens.max()) if s.largest_id is None else s.largest_id for s in self.shards)
        return max(known, default=0)

    def document(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids [n] int64, supervised [n] bool) of document `i`."""
        return self.documents([i])[0]

    def documents(self, wanted: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """`document` of several: those that must be read from afar are asked for at once.

        `UserError` names the shard of a document that is not what was written.
        """
        spans = [self._span(i) for i in wanted]
        raw = _read_spans(spans)
        for k, span in enumerate(spans):
            shard = span[0]
            if not _intact(span, raw[k]) and isinstance(shard, RemoteShard):
                shard.forget()
                raw[k] = _read_spans([span])[0]
            if not _intact(span, raw[k]):
                raise UserError(f"{shard.path}: corrupt: document {span[1]} is not what was written; {MEND}")
        return [(tokens.astype(np.int64), supervised != 0) for tokens, supervised in raw]

    def _span(self, i: int) -> Span:
        assert 0 <= i < len(self)
        s = bisect.bisect_right(self.first_documents, i) - 1
        number = i - self.first_documents[s]
        start, end = self.shards[s].offsets[number : number + 2].tolist()
        return self.shards[s], number, start, end


Span = tuple[Shard | RemoteShard, int, int, int]
"""A document: its shard, its number in it, where its tokens start and end there."""


def _read_spans(spans: list[Span]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, supervised) as they are stored."""
    out: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    far: list[tuple[int, RemoteShard, list[Range]]] = []
    for k, (shard, _, start, end) in enumerate(spans):
        here = shard.local() if isinstance(shard, RemoteShard) else shard
        if here is not None:
            out[k] = here.tokens[start:end], here.supervised[start:end]
        elif isinstance(shard, RemoteShard):
            far.append((k, shard, shard.ranges(start, end)))
    if far:
        data = iter(far[0][1].split.ranges([r for _, _, ranges in far for r in ranges]))
        for k, _, _ in far:
            out[k] = np.frombuffer(next(data), "<u4"), np.frombuffer(next(data), "<u1")
    return [out[k] for k in range(len(spans))]


def _intact(span: Span, found: tuple[np.ndarray, np.ndarray]) -> bool:
    checks = span[0].checks
    return checks is None or document_check(*found) == checks[span[1]]


class ShardWriter:
    """Collects documents of one split and writes a shard before the next one would exceed `shard_tokens`."""

    def __init__(self, folder: Path | RemoteFolder, split: Split, shard_tokens: int):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.files: list[ShardFile] = []
        self._documents: list[Document] = []
        self._tokens = 0

    @property
    def started(self) -> bool:
        return bool(self._documents or self.files)

    def add(self, document: Document) -> None:
        if self._documents and self._tokens + len(document.ids) > self.shard_tokens:
            self._flush()
        self._documents.append(document)
        self._tokens += len(document.ids)

    def close(self) -> list[ShardFile]:
        if self._documents:
            self._flush()
        return self.files

    def _flush(self) -> None:
        name = f"{self.split}-{len(self.files):05d}.safetensors"
        tokens = np.concatenate([d.ids for d in self._documents], dtype="<u4", casting="unsafe")
        supervised = np.concatenate([d.supervised for d in self._documents], dtype="<u1", casting="unsafe")
        offsets = np.cumsum([0, *(len(d.ids) for d in self._documents)])
        self._documents, self._tokens = [], 0  # their memory is needed for what follows
        checks = [
            document_check(tokens[a:b], supervised[a:b]) for a, b in itertools.pairwise(offsets.tolist())
        ]
        counts = (len(checks), len(tokens), int(supervised.sum()), int(tokens.max()))
        data = safetensors.numpy.save(
            {
                "tokens": tokens,
                "supervised": supervised,
                "offsets": offsets.astype("<i8"),
                "checks": np.array(checks, "<u4"),
            }
        )
        del tokens, supervised
        write_file(self.folder, name, data)
        self.files.append(ShardFile(name, len(data), hashlib.sha256(data).hexdigest(), *counts))


def write_file(folder: Path | RemoteFolder, name: str, data: bytes) -> None:
    """A file of a dataset, whole or not at all."""
    if isinstance(folder, RemoteFolder):
        folder.write(name, data)
    else:
        write_atomic(folder / name, data)


def write_atomic(path: Path, data: bytes) -> None:
    """`path` holds all of `data` or is not there. `UserError` if the disk refuses; nothing partial stays."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        partial.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as e:
        partial.unlink(missing_ok=True)
        what = "disk full" if e.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot write ({e.strerror})"
        raise UserError(
            f"{path}: {what}; free {len(data) >> 20} MiB or more, or choose another folder"
        ) from None


def write_manifest(folder: Path | RemoteFolder, manifest: Manifest) -> None:
    data = json.dumps(dataclasses.asdict(manifest), indent=1) + "\n"
    write_file(folder, MANIFEST, data.encode())


def read_manifest(folder: Path | RemoteFolder) -> Manifest:
    path = f"{folder}/{MANIFEST}"
    data = folder.read(MANIFEST) if isinstance(folder, RemoteFolder) else Path(path).read_bytes()
    try:
        values = json.loads(data)
        if values["format"] != FORMAT:
            raise UserError(
                f"{path}: format {values['format']}, this version reads {FORMAT}; prepare the data again"
            )
        values["splits"] = {s: [ShardFile(**f) for f in values["splits"][s]] for s in SPLITS}
        return Manifest(**values)
    except OSError as e:
        raise UserError(f"{path}: cannot read: {e.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as e:
        raise UserError(
            f"{path}: broken manifest ({type(e).__name__}: {e}); prepare the data again"
        ) from None


def shard_cache(config: TrainConfig | CacheConfig) -> Cache:
    return Cache(Path(config.data_cache).expanduser(), int(config.data_cache_gib * 2**30))


DEFAULT_CACHE = shard_cache(TrainConfig())
"""For what has no settings of its own."""


def open_dataset(data_dir: str | Path, split: Split, cache: Cache = DEFAULT_CACHE) -> TokenDataset:
    """The documents of a prepared folder, or of a folder of tokenised completions, local or at a URL.

    Of completions, 2 % are held out by a hash of the prompt. `cache` is for shards at a URL. `UserError`
    names the file that is missing, truncated or corrupt.
    """
    if is_url(data_dir):
        folder = RemoteFolder(str(data_dir))
        sizes = folder.sizes()
        names = sorted(sizes)
    else:
        folder = local_path(data_dir)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; make it with `slipstream prepare`")
        sizes = {}
        names = sorted(p.name for p in folder.iterdir() if p.is_file())
    if MANIFEST not in names:
        found = read_completions(str(folder), [f"{folder}/{name}" for name in names], split)
        return _dataset(folder, split, *found)
    manifest = read_manifest(folder)
    files = manifest.splits[split]
    if isinstance(folder, RemoteFolder):
        ordered = [*manifest.splits["heldout"], *manifest.splits["train"]]
        fits = np.cumsum([f.bytes for f in ordered]) <= cache.limit
        kept = [f for f, fit in zip(ordered, fits.tolist(), strict=True) if fit and f in files]
        shards = open_remote_shards(folder, sizes, files, cache, kept)
    else:
        whole = sum(f.bytes for f in files) <= HASH_WHOLE_BELOW
        shards = [open_shard(folder / f.name, f, whole) for f in files]
    digest = hashlib.sha256("".join(f.sha256 for f in files).encode()).hexdigest()
    return _dataset(
        folder,
        split,
        shards,
        digest,
        manifest.counts,
        manifest.tokenizer_fingerprint,
        manifest.vocab_size,
        tuple(manifest.eos_ids),
    )


def _dataset(
    folder: Path | RemoteFolder,
    split: Split,
    shards: Sequence[Shard | RemoteShard],
    fingerprint: str,
    counts: dict[str, Any],
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    eos_ids: tuple[int, ...] = (),
) -> TokenDataset:
    lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(s.offsets) for s in shards)])
    if split == "train" and not len(lengths):
        raise UserError(f"{folder}: no training documents; prepare more conversations or a smaller hold-out")
    first = np.cumsum([0, *(len(s.offsets) - 1 for s in shards)])[:-1]
    firsts = tuple(first.tolist())
    return TokenDataset(
        split, lengths, fingerprint, tokenizer, vocab_size, eos_ids, counts, tuple(shards), firsts
    )


def check_tokenizer(dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """`UserError` if the shards were made with another tokenizer, or ready ids lie beyond its vocabulary."""
    if not dataset.shards:
        return
    where = dataset.where
    found = tokenizer_fingerprint(tokenizer)
    if dataset.tokenizer_fingerprint is None:
        size = vocabulary_size(tokenizer)
        for shard in dataset.shards:
            if shard.tokens.max() >= size:
                raise UserError(
                    f"{shard.path}: token id {shard.tokens.max()} is beyond the target's vocabulary of "
                    f"{size}; tokenise the completions with the target's tokenizer"
                )
    elif found != dataset.tokenizer_fingerprint:
        raise UserError(
            f"{where}: prepared with another tokenizer ({dataset.tokenizer_fingerprint[:8]}) than the "
            f"target's ({found[:8]}); run `slipstream prepare` with --tokenizer set to the target"
        )
