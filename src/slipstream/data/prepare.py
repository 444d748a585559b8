"""`slipstream prepare`: records → rendered, filtered, held out, written as token shards.

Here: the order of these steps, the reasons for which a record is left out, and their counts. Not here:
rendering and masks (`chat`), reading files (`sources`), the file format (`shards`).

What stops the work: input that is broken (JSON, missing fields, an empty answer), with file, line and field.
What is counted and left out: conversations that are whole but of no use. Counts are of records unless named
otherwise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import PrepareConfig, UserError
from slipstream.data.chat import ChatError, ChatTemplate, Document, read_messages, read_tokens, read_tools
from slipstream.data.shards import (
    FORMAT,
    MANIFEST,
    SPLITS,
    Manifest,
    ShardFile,
    ShardWriter,
    Split,
    tokenizer_fingerprint,
    vocabulary_size,
    write_manifest,
)
from slipstream.data.sources import Record, check_source, file_sha256, iter_records
from slipstream.data.tokenizer import load_generation_config, load_tokenizer, stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OURS = re.compile(rf"(({'|'.join(SPLITS)})-\d{{5}}\.safetensors|{re.escape(MANIFEST)})(\.tmp)?")
SAMPLE_CHARACTERS = 300


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
    inputs = [Path(p) for p in config.input]
    for path in inputs:
        check_source(path)
    folder = Path(config.output_dir)
    existed = _claim(folder)
    done = False
    try:
        tokenizer = load_tokenizer(config.tokenizer)
        eos_ids = sorted(stop_ids(load_generation_config(config.tokenizer), tokenizer))
        chat = ChatTemplate(tokenizer, config.thinking, eos_ids)
        work = _Work(config, chat, vocabulary_size(tokenizer), folder)
        _read_all(work, inputs, config.limit, report)
        splits = work.finish()
        manifest = Manifest(
            format=FORMAT,
            splits=splits,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            template_fingerprint=_template_fingerprint(tokenizer, config.thinking),
            vocab_size=vocabulary_size(tokenizer),
            eos_ids=eos_ids,
            counts=work.all_counts(),
            sources=[{"path": str(p), "bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in inputs],
            settings=dataclasses.asdict(config),
        )
        write_manifest(folder, manifest)
        done = True
    finally:
        if not done:
            _clear(folder)
            if not existed:
                folder.rmdir()
    return {
        "output_dir": str(folder),
        "counts": manifest.counts,
        "splits": {s: _sizes(f) for s, f in splits.items()},
    }


class _Work:
    """Takes records one by one; holds the writers, the counts, and what tells copies and splits apart."""

    def __init__(self, config: PrepareConfig, chat: ChatTemplate, vocab_size: int, folder: Path):
        self.config, self.chat, self.vocab_size = config, chat, vocab_size
        self.writers: dict[Split, ShardWriter] = {
            s: ShardWriter(folder, s, config.shard_tokens) for s in SPLITS
        }
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.examples: dict[str, str] = {}  # reason → its first record and why
        self.sample = ""
        self._seen: set[int] = set()
        # the training conversations of the lowest prompt hash: held out at the end if chance held out none
        self._lowest: tuple[int, list[Document]] | None = None

    def take(self, record: Record) -> None:
        self.counts["records"] += 1
        try:
            documents = self._documents(record)
            digest = hashlib.blake2b(digest_size=8)
            for d in documents:
                digest.update(len(d.ids).to_bytes(8, "little") + d.ids.tobytes() + d.supervised.tobytes())
            copy = int.from_bytes(digest.digest(), "little")
            if copy in self._seen:
                raise ChatError("duplicate", "the same tokens were seen before")
            prompt = documents[0].prompt_hash()
            documents = self._fit(documents)
        except ChatError as e:
            self.skipped[e.reason] += 1
            self.examples.setdefault(e.reason, f"{record.where}: {e}")
            return
        self._seen.add(copy)
        self.counts["kept"] += 1
        self.counts["documents"] += len(documents)
        self._place(prompt, documents)

    def _documents(self, record: Record) -> list[Document]:
        value, where = record.value, record.where
        if not any(
            value.get(k) is not None for k in ("prompt_ids", "input_ids", "messages", "conversations")
        ):
            found = ", ".join(map(str, value))[:80] or "nothing"
            raise UserError(
                f"{where}: messages: missing (found {found}); a record holds messages, conversations, "
                "prompt_ids + response_ids, or input_ids + loss_mask"
            )
        if value.get("prompt_ids") is not None or value.get("input_ids") is not None:
            document = read_tokens(value, where)
            if len(document.ids) and document.ids.max() >= self.vocab_size:
                raise UserError(
                    f"{where}: token id {document.ids.max()} is beyond the tokenizer's vocabulary of "
                    f"{self.vocab_size}; set --tokenizer to the one that made these ids"
                )
            self.sample = self.sample or self.chat.tokenizer.decode(document.ids[:SAMPLE_CHARACTERS])
            documents = [document]
        else:
            documents = self._render(record)
        if not any(d.supervised.any() for d in documents):
            raise ChatError("no supervised token", "nothing in it is the model's")
        return documents

    def _render(self, record: Record) -> list[Document]:
        value, where = record.value, record.where
        finished, tools = value.get("finished"), read_tools(value, where)
        if not isinstance(finished, bool | None):
            raise UserError(f"{where}: finished: expected true or false, found {str(finished)[:40]!r}")
        if self.chat.tokenizer.chat_template is None:
            raise UserError(
                f"{where}: {self.config.tokenizer} has no chat template to render messages with; "
                "name a tokenizer that has one, or give prompt_ids + response_ids"
            )
        messages = read_messages(value, where)
        self.sample = self.sample or self.chat.shown(messages)
        rendered = self.chat.render(messages, finished is not False, tools)
        self.counts["unfinished"] += finished is False
        self.counts["one_document_per_turn"] += rendered.by_turn
        self.counts["trailing_messages_left_out"] += rendered.trailing_messages
        self.counts["answers_with_empty_thinking_by_the_template"] += rendered.empty_thinking
        return rendered.documents

    def _fit(self, documents: list[Document]) -> list[Document]:
        """Documents of at most `max_length` tokens that have something supervised."""
        size, on_long = self.config.max_length, self.config.on_long
        out, counts = [], Counter()
        for d in documents:
            if len(d.ids) <= size:
                out.append(d)
            elif on_long == "split":
                counts["split_documents"] += 1
                out += [
                    Document(d.ids[s : s + size], d.supervised[s : s + size])
                    for s in range(0, len(d.ids), size)
                ]
            elif on_long == "truncate":
                counts["truncated_documents"] += 1
                counts["truncated_tokens"] += len(d.ids) - size
                out.append(Document(d.ids[:size], d.supervised[:size]))
            else:
                counts["rejected_documents"] += 1
                counts["rejected_tokens"] += len(d.ids)
        kept = [d for d in out if d.supervised.any()]
        if not kept:
            raise ChatError("too long", f"no supervised token within {size} tokens (on_long is {on_long})")
        counts["unsupervised_documents_left_out"] += len(out) - len(kept)
        self.counts += counts
        return kept

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


def _read_all(
    work: _Work, inputs: list[Path], limit: int | None, report: Callable[[int, int | None], None] | None
) -> None:
    sizes = [p.stat().st_size for p in inputs]
    for k, path in enumerate(inputs):
        for record in iter_records(path):
            if limit is not None and work.counts["records"] >= limit:
                return
            work.take(record)
            if report is not None and work.counts["records"] % 64 == 0:
                report(sum(sizes[:k]) + record.at_byte, sum(sizes))
    if report is not None:
        report(sum(sizes), sum(sizes))


def _claim(folder: Path) -> bool:
    """Make the folder ready, or refuse it: a finished or foreign one is left alone, our own leftovers go."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; choose another --output-dir")
    existed = folder.is_dir()
    if existed:
        if (folder / MANIFEST).exists():
            raise UserError(f"{folder}: holds a finished dataset; choose another --output-dir or remove it")
        foreign = sorted(p.name for p in folder.iterdir() if not _OURS.fullmatch(p.name))
        if foreign:
            raise UserError(
                f"{folder}: holds other files ({foreign[0]}, …); choose a new or empty --output-dir"
            )
        _clear(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"{folder}: cannot make this folder: {e.strerror}; choose another --output-dir"
        ) from None
    return existed


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()


def _template_fingerprint(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> str:
    return hashlib.sha256(json.dumps([tokenizer.chat_template, thinking]).encode()).hexdigest()


def _sizes(files: list[ShardFile]) -> dict[str, int]:
    names = ("documents", "tokens", "supervised_tokens")
    return {n: sum(dataclasses.asdict(f)[n] for f in files) for n in names} | {"shards": len(files)}
