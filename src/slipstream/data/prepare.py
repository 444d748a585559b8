"""`slipstream prepare`: records → rendered, filtered, held out, written as token shards.

Here: what needs all records in their order: copies, hold-out, totals, the output folder. Not here: what
becomes of one record (`render`), processes (`workers`), reading files (`sources`), the file format
(`shards`).

What stops the work: input that is broken (JSON, missing fields, an empty answer), with file, line and field.
What is counted and left out: conversations that are whole but of no use. Counts are of records unless named
otherwise. The result is the same whatever the number of processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config import PrepareConfig, UserError
from slipstream.data.records import ChatError, Document
from slipstream.data.remote import RemoteFolder, is_url, local_path
from slipstream.data.render import SAMPLE_CHARACTERS, Batch, Kept, Renderer
from slipstream.data.shards import (
    FORMAT,
    MANIFEST,
    SPLITS,
    Manifest,
    ShardFile,
    ShardWriter,
    Split,
    write_manifest,
)
from slipstream.data.sources import Chunk, describe_source, find_sources, iter_chunks, source_bytes
from slipstream.data.tokenizer import tokenizer_fingerprint
from slipstream.data.workers import cores, in_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OURS = re.compile(rf"(({'|'.join(SPLITS)})-\d{{5}}\.safetensors|{re.escape(MANIFEST)})(\.tmp)?")


def prepare(config: PrepareConfig, report: Callable[[int, int | None], None] | None = None) -> dict[str, Any]:
    """Write `config.output_dir`; the summary holds the counts, the splits' sizes and the folder.

    `report(done, total)` is called now and then with bytes of input read and bytes of input in all. Every
    failure but a kill leaves the folder as it was found.
    """
    assert 0 <= config.holdout < 1
    assert config.max_length >= 2
    if config.shard_tokens < config.max_length:
        raise UserError(
            f"--shard-tokens {config.shard_tokens}: below --max-length {config.max_length}; raise it"
        )
    inputs = [path for given in config.input for path in find_sources(given)]
    sizes = [source_bytes(path) for path in inputs]
    folder = _open_folder(config.output_dir)
    existed = _claim(folder)
    done = False
    try:
        renderer = Renderer(config)
        totals = _Totals(config, folder)
        chunks = _read_all(inputs, sizes, config.limit)
        with closing(in_order(renderer, chunks, config.processes or cores())) as batches:
            for batch in batches:
                totals.take(batch)
                if report is not None:
                    report(batch.at_byte, sum(sizes))
        splits = totals.finish()
        manifest = Manifest(
            format=FORMAT,
            splits=splits,
            tokenizer_fingerprint=tokenizer_fingerprint(renderer.tokenizer),
            template_fingerprint=_template_fingerprint(renderer.tokenizer, config.thinking),
            vocab_size=renderer.vocab_size,
            eos_ids=renderer.eos_ids,
            counts=totals.all_counts(),
            sources=[describe_source(path) for path in inputs],
            settings=dataclasses.asdict(config),
        )
        write_manifest(folder, manifest)
        done = True
    finally:
        if not done:
            _clear(folder)
            if not existed and isinstance(folder, Path):
                folder.rmdir()
    if report is not None:
        report(sum(sizes), sum(sizes))
    return {
        "output_dir": str(folder),
        "counts": manifest.counts,
        "splits": {s: _sizes(f) for s, f in splits.items()},
    }


class _Totals:
    """Takes batches in their order; holds the writers, the counts, and what tells copies and splits apart."""

    def __init__(self, config: PrepareConfig, folder: Path | RemoteFolder):
        self.config = config
        self.writers: dict[Split, ShardWriter] = {
            s: ShardWriter(folder, s, config.shard_tokens) for s in SPLITS
        }
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.examples: dict[str, str] = {}  # reason → its first record and why
        self.sample = ""
        self._seen = Seen()
        # the training conversations of the lowest prompt hash: held out at the end if chance held out none
        self._lowest: tuple[int, list[Document]] | None = None

    def take(self, batch: Batch) -> None:
        new = self._seen.add(np.array([k.digest for k in batch.kept], np.uint64))
        for (record, documents), is_new in zip(batch.documents(), new.tolist(), strict=True):
            if is_new:
                self._keep(record, documents)
            else:
                batch.skip(record.where, ChatError("duplicate", "the same tokens were seen before"))
        self.counts["records"] += batch.records
        self.counts += batch.counts
        self.skipped += batch.skipped
        self.examples = batch.examples | self.examples
        self.sample = self.sample or batch.sample

    def _keep(self, record: Kept, documents: list[Document]) -> None:
        self.counts["kept"] += 1
        self.counts["documents"] += len(documents)
        if record.counts:
            self.counts.update(record.counts)
        self._place(record.prompt, documents)

    def _place(self, prompt: int, documents: list[Document]) -> None:
        """Hold-out by prompt, so that no prompt is on both sides whatever its answers."""
        if prompt < self.config.holdout * 2**64:
            self._write("heldout", documents)
        elif (
            self.config.holdout == 0
            or self.writers["heldout"].started
            or (self._lowest and prompt > self._lowest[0])
        ):
            self._write("train", documents)
        elif self._lowest is not None and prompt == self._lowest[0]:
            self._lowest[1].extend(documents)
        else:
            if self._lowest is not None:
                self._write("train", self._lowest[1])
            self._lowest = (prompt, list(documents))

    def _write(self, split: Split, documents: list[Document]) -> None:
        for d in documents:
            self.writers[split].add(d)

    def finish(self) -> dict[Split, list[ShardFile]]:
        if not self.counts["kept"]:
            raise UserError(self._nothing())
        if self._lowest is not None:
            alone = self.writers["train"].started and not self.writers["heldout"].started
            self._write("heldout" if alone else "train", self._lowest[1])
        if not self.writers["train"].started:
            raise UserError(
                f"--holdout {self.config.holdout}: all {self.counts['kept']} conversations are held out, "
                "none is left to train on; prepare more of them or lower it"
            )
        return {s: w.close() for s, w in self.writers.items()}

    def all_counts(self) -> dict[str, Any]:
        return {
            **{k: v for k, v in self.counts.items() if v},
            "skipped": dict(self.skipped.most_common()),
            "skipped_examples": self.examples,
        }

    def _nothing(self) -> str:
        where = ", ".join(self.config.input)
        if not self.counts["records"]:
            return f"{where}: no records in it; check the input files"
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.skipped.most_common())
        reason = self.skipped.most_common(1)[0][0]
        return (
            f"{where}: no supervised token in {self.counts['records']} records ({reasons}); first: "
            f"{self.examples[reason][:SAMPLE_CHARACTERS]}; "
            f"rendered sample: {self.sample[:SAMPLE_CHARACTERS]!r}"
        )


class Seen:
    """64-bit digests seen so far, eight bytes each: sorted runs, each longer than the next one."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def add(self, digests: np.ndarray) -> np.ndarray:
        """[n] bool: which of these come for the first time."""
        unique, first = np.unique(digests, return_index=True)
        known = np.zeros(len(unique), bool)
        for run in self._runs:
            known |= run[np.minimum(np.searchsorted(run, unique), len(run) - 1)] == unique
        new = np.zeros(len(digests), bool)
        new[first[~known]] = True
        if new.any():
            self._runs.append(unique[~known])
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            merged = np.concatenate((self._runs.pop(), self._runs.pop()))
            merged.sort()
            self._runs.append(merged)
        return new


def _read_all(inputs: list[str], sizes: list[int], limit: int | None) -> Iterator[Chunk]:
    """Chunks of all files, in order, with `at_byte` counted through them."""
    before = 0
    for path, size in zip(inputs, sizes, strict=True):
        for chunk in iter_chunks(path, limit):
            yield dataclasses.replace(chunk, at_byte=before + chunk.at_byte)
            if limit is not None:
                limit -= chunk.count
        if limit == 0:
            return
        before += size


def _open_folder(output_dir: str) -> Path | RemoteFolder:
    return RemoteFolder(output_dir) if is_url(output_dir) else local_path(output_dir)


def _claim(folder: Path | RemoteFolder) -> bool:
    """Make the folder ready, or refuse it: a finished or foreign one is left alone, our own leftovers go.
    Whether it was there.
    """
    if isinstance(folder, Path) and folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; choose another --output-dir")
    names = _names(folder)
    if MANIFEST in names:
        raise UserError(f"{folder}: holds a finished dataset; choose another --output-dir or remove it")
    if foreign := sorted(n for n in names if not _OURS.fullmatch(n)):
        raise UserError(f"{folder}: holds other files ({foreign[0]}, …); choose a new or empty --output-dir")
    _clear(folder)
    if isinstance(folder, RemoteFolder):
        return True
    existed = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"{folder}: cannot make this folder: {e.strerror}; choose another --output-dir"
        ) from None
    return existed


def _names(folder: Path | RemoteFolder) -> list[str]:
    if isinstance(folder, RemoteFolder):
        return list(folder.sizes())
    return [p.name for p in folder.iterdir()] if folder.is_dir() else []


def _clear(folder: Path | RemoteFolder) -> None:
    for name in _names(folder):
        if _OURS.fullmatch(name):
            folder.remove(name) if isinstance(folder, RemoteFolder) else (folder / name).unlink()


def _template_fingerprint(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> str:
    return hashlib.sha256(json.dumps([tokenizer.chat_template, thinking]).encode()).hexdigest()


def _sizes(files: list[ShardFile]) -> dict[str, int]:
    names = ("documents", "tokens", "supervised_tokens")
    return {n: sum(dataclasses.asdict(f)[n] for f in files) for n in names} | {"shards": len(files)}
