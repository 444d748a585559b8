"""Token shards on disk: atomic writing, the manifest, and random access to the documents of a split.

Here: the file format, checks when a dataset is opened, fingerprints of tokenizers. Not here: what goes into a
document (`chat`, `prepare`), rows (`pack`).

A dataset is a folder of safetensors files (`tokens` uint32 [n], `supervised` uint8 [n], `offsets` int64
[documents + 1]) and `manifest.json`, which is written last: without it the folder is no dataset. A folder of
tokenised completions (see `sources`) opens as a dataset too; it is read into memory, five bytes a token.
"""

from __future__ import annotations

import bisect
import dataclasses
import errno
import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import safetensors.numpy

from slipstream.config import UserError
from slipstream.data.chat import Document, read_tokens
from slipstream.data.sources import file_sha256, is_source, iter_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
MANIFEST = "manifest.json"
FORMAT = 1
COMPLETIONS_HOLDOUT = 0.02
HASH_WHOLE_BELOW = (
    256 * 2**20
)  # bytes of a split: a second of hashing at most; above it size, header and offsets
_TENSORS = {"tokens": ("U32", "<u4"), "supervised": ("U8", "<u1"), "offsets": ("I64", "<i8")}


@dataclass(frozen=True)
class ShardFile:
    """What the manifest knows of one shard."""

    name: str
    bytes: int
    sha256: str
    documents: int
    tokens: int
    supervised_tokens: int


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`. `counts` and `settings` are plain JSON; `sources` hold {path, bytes, sha256}."""

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
class Shard:
    path: Path
    tokens: np.ndarray
    supervised: np.ndarray
    offsets: np.ndarray


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
    shards: tuple[Shard, ...]
    first_documents: tuple[int, ...]  # of each shard

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids [n] int64, supervised [n] bool) of document `i`."""
        assert 0 <= i < len(self)
        s = bisect.bisect_right(self.first_documents, i) - 1
        shard = self.shards[s]
        start, end = (
            shard.offsets[i - self.first_documents[s]],
            shard.offsets[i - self.first_documents[s] + 1],
        )
        ids = shard.tokens[start:end].astype(np.int64)
        if self.vocab_size is not None and ids.max() >= self.vocab_size:
            raise UserError(
                f"{shard.path}: corrupt: token id {ids.max()} in a vocabulary of {self.vocab_size}; "
                "prepare the data again"
            )
        return ids, shard.supervised[start:end] != 0


class ShardWriter:
    """Collects documents of one split and writes a shard before the next one would exceed `shard_tokens`."""

    def __init__(self, folder: Path, split: Split, shard_tokens: int):
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
        path = self.folder / f"{self.split}-{len(self.files):05d}.safetensors"
        supervised = np.concatenate([d.supervised for d in self._documents])
        offsets = np.cumsum([0, *(len(d.ids) for d in self._documents)])
        data = safetensors.numpy.save(
            {
                "tokens": np.concatenate([d.ids for d in self._documents]).astype("<u4"),
                "supervised": supervised.astype("<u1"),
                "offsets": offsets.astype("<i8"),
            }
        )
        write_atomic(path, data)
        sha = hashlib.sha256(data).hexdigest()
        counts = (len(self._documents), self._tokens, int(supervised.sum()))
        self.files.append(ShardFile(path.name, len(data), sha, *counts))
        self._documents, self._tokens = [], 0


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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_atomic(folder / MANIFEST, (json.dumps(dataclasses.asdict(manifest), indent=1) + "\n").encode())


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_bytes())
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


def open_dataset(data_dir: str | Path, split: Split) -> TokenDataset:
    """The documents of a prepared folder, or of a folder of tokenised completions.

    Of completions, 2 % are held out by a hash of the prompt. `UserError` names the file that is missing,
    truncated or corrupt.
    """
    folder = Path(data_dir)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; make it with `slipstream prepare`")
    if not (folder / MANIFEST).exists():
        return _open_completions(folder, split)
    manifest = read_manifest(folder)
    files = manifest.splits[split]
    whole = sum(f.bytes for f in files) <= HASH_WHOLE_BELOW
    shards = [_open_shard(folder / f.name, f, whole) for f in files]
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
    folder: Path,
    split: Split,
    shards: list[Shard],
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


def _open_shard(path: Path, known: ShardFile, whole: bool) -> Shard:
    mend = "prepare the data again, or copy the folder again"
    if not path.exists():
        raise UserError(f"{path}: missing, though the manifest lists it; {mend}")
    size = path.stat().st_size
    if size != known.bytes:
        kind = "truncated" if size < known.bytes else "corrupt"
        raise UserError(f"{path}: {kind}: {size} bytes, the manifest says {known.bytes}; {mend}")
    if whole and file_sha256(path) != known.sha256:
        raise UserError(f"{path}: corrupt: its sha256 is not the manifest's; {mend}")
    with path.open("rb") as f:  # the safetensors layout: header length (8 bytes), JSON header, tensors
        length = int.from_bytes(f.read(8), "little")
        header = f.read(length) if length < size else b""
    try:
        entries = json.loads(header)
        arrays = {}
        for name, (dtype, numpy_dtype) in _TENSORS.items():
            entry = entries[name]
            start, end = entry["data_offsets"]
            if entry["dtype"] != dtype or not 0 <= start < end <= size - 8 - length:
                raise KeyError(name)
            arrays[name] = np.memmap(path, numpy_dtype, "r", 8 + length + start, tuple(entry["shape"]))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path}: corrupt: not a token shard's header; {mend}") from None
    offsets = np.array(arrays["offsets"])
    right = len(offsets) == known.documents + 1 and offsets[0] == 0 and offsets[-1] == known.tokens
    if (
        not right
        or (np.diff(offsets) < 1).any()
        or any(len(arrays[n]) != known.tokens for n in ("tokens", "supervised"))
    ):
        raise UserError(
            f"{path}: corrupt: its documents do not add up to the manifest's {known.tokens} tokens; {mend}"
        )
    return Shard(path, arrays["tokens"], arrays["supervised"], offsets)


def _open_completions(folder: Path, split: Split) -> TokenDataset:
    files = sorted(p for p in folder.iterdir() if p.is_file() and is_source(p))
    if not files:
        raise UserError(
            f"{folder}: neither {MANIFEST} (a finished `slipstream prepare`) nor Arrow, Parquet or JSONL "
            "files with prompt_ids + response_ids or input_ids + loss_mask"
        )
    counts: dict[str, Any] = {"records": 0, "kept": 0, "skipped": Counter()}
    hashes, shards = [], []
    for path in files:
        documents = []
        for record in iter_records(path):
            counts["records"] += 1
            document = read_tokens(record.value, record.where)
            if not document.supervised.any():
                counts["skipped"]["no supervised token"] += 1
                continue
            hashes.append(document.prompt_hash())
            documents.append(document)
        shards.append((path, documents))
    counts |= {"kept": len(hashes), "skipped": dict(counts["skipped"])}
    if not hashes:
        raise UserError(
            f"{folder}: no supervised token in {counts['records']} records: loss_mask must be 1 where the "
            "model answered, or response_ids hold its answer"
        )
    cut = _hold_out(np.array(hashes, np.uint64))
    digest = hashlib.sha256()
    chosen = []
    for path, documents in shards:
        mine = [d for d in documents if (d.prompt_hash() < cut) == (split == "heldout")]
        if mine:
            chosen.append(_in_memory(path, mine))
            digest.update(
                chosen[-1].tokens.tobytes() + chosen[-1].supervised.tobytes() + chosen[-1].offsets.tobytes()
            )
    return _dataset(folder, split, chosen, digest.hexdigest(), counts)


def _hold_out(hashes: np.ndarray) -> int:
    """Documents whose prompt hash is below this are held out: at least one, unless all share one prompt."""
    ordered = np.sort(hashes)
    share = max(1, round(COMPLETIONS_HOLDOUT * len(ordered)))
    above = ordered[share:][ordered[share:] > ordered[share - 1]] if len(ordered) > share else ordered[:0]
    return int(above[0]) if len(above) else 0


def _in_memory(path: Path, documents: list[Document]) -> Shard:
    tokens = np.concatenate([d.ids for d in documents]).astype(np.uint32)
    supervised = np.concatenate([d.supervised for d in documents]).astype(np.uint8)
    return Shard(path, tokens, supervised, np.cumsum([0, *(len(d.ids) for d in documents)]))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary (token → id) and of the begin and end tokens.

    Not of the padding token: training tools change it freely, and it changes no id.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    facts = [vocabulary, str(tokenizer.bos_token), str(tokenizer.eos_token)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id: a vocabulary may have holes."""
    return max(tokenizer.get_vocab().values()) + 1


def check_tokenizer(dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """`UserError` if the shards were made with another tokenizer, or ready ids lie beyond its vocabulary."""
    if not dataset.shards:
        return
    where = dataset.shards[0].path.parent
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
