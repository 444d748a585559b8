"""A chunk of records → documents, and what was left out and why: what every process of `prepare` does.

Here: the rules for one record, whatever the others are. Not here: copies, hold-out, totals (`prepare`),
rendering itself (`chat`), what a record means (`records`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from slipstream.config import PrepareConfig, UserError
from slipstream.data.chat import ChatTemplate, Script
from slipstream.data.filters import Evaluations
from slipstream.data.records import ChatError, Document, read_messages, read_tokens, read_tools
from slipstream.data.sources import Chunk, Record
from slipstream.data.tokenizer import load_generation_config, load_tokenizer, stop_ids, vocabulary_size

SAMPLE_CHARACTERS = 300


@dataclass(frozen=True)
class Kept:
    """A record of use. `counts` are of what was done to its documents."""

    where: str
    digest: int
    """64 bits of all its tokens and masks."""
    prompt: int
    """64 bits of its first prompt."""
    lengths: list[int]
    """Tokens of each of its documents."""
    counts: dict[str, int]


@dataclass
class Batch:
    """What a chunk became. Documents of the kept records lie one behind the other in `tokens` and
    `supervised`.
    """

    records: int = 0
    at_byte: int = 0
    kept: list[Kept] = field(default_factory=list)
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    supervised: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """By reason: the first record that was left out for it, and more about why."""
    sample: str = ""
    """The beginning of the first record as the model is given it."""

    def documents(self) -> Iterator[tuple[Kept, list[Document]]]:
        """Kept records with their documents, whose ids are uint32."""
        at = 0
        for record in self.kept:
            documents = []
            for n in record.lengths:
                documents.append(Document(self.tokens[at : at + n], self.supervised[at : at + n]))
                at += n
            yield record, documents

    def skip(self, where: str, error: ChatError) -> None:
        self.skipped[error.reason] += 1
        self.examples.setdefault(error.reason, f"{where}: {error}")


class Renderer:
    """Called with a chunk, it makes the `Batch`. A pickle of it holds the settings only: another process
    loads its own tokenizer.
    """

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.eos_ids = sorted(stop_ids(load_generation_config(config.tokenizer), self.tokenizer))
        self.vocab_size = vocabulary_size(self.tokenizer)
        self.chat = ChatTemplate(self.tokenizer, config.thinking, self.eos_ids)
        files = config.decontaminate
        self.evaluations = Evaluations(files, config.decontaminate_words, self.tokenizer) if files else None

    def __reduce__(self) -> tuple[type[Renderer], tuple[PrepareConfig]]:
        return Renderer, (self.config,)

    def __call__(self, chunk: Chunk) -> Batch:
        batch = Batch(at_byte=chunk.at_byte)
        read: list[tuple[Record, Document | Script]] = []
        for record in chunk.records():
            batch.records += 1
            try:
                read.append((record, self._read(record, batch)))
            except ChatError as e:
                batch.skip(record.where, e)
        rendered = iter(self.chat.tokenise([s for _, s in read if isinstance(s, Script)]))
        out: list[Document] = []
        for record, found in read:
            try:
                if isinstance(found, Document):
                    documents = [found]
                else:
                    result = next(rendered)
                    if isinstance(result, ChatError):
                        raise result
                    documents = result.documents
                    batch.counts["unfinished"] += record.value.get("finished") is False
                    batch.counts["one_document_per_turn"] += result.by_turn
                    batch.counts["trailing_messages_left_out"] += result.trailing_messages
                    batch.counts["answers_with_empty_thinking_by_the_template"] += result.empty_thinking
                    batch.counts["tools_ignored_by_the_template"] += result.tools_ignored
                if not any(d.supervised.any() for d in documents):
                    raise ChatError("no supervised token", "nothing in it is the model's")
                kept, counts = self._fit(documents)
            except ChatError as e:
                batch.skip(record.where, e)
                continue
            lengths = [len(d.ids) for d in kept]
            prompt = documents[0].prompt_hash()
            batch.kept.append(Kept(record.where, _digest(documents), prompt, lengths, counts))
            out += kept
        if out:
            batch.tokens = np.concatenate([d.ids for d in out]).astype(np.uint32)
            batch.supervised = np.concatenate([d.supervised for d in out])
        return batch

    def _read(self, record: Record, batch: Batch) -> Document | Script:
        value, where = record.value, record.where
        if not any(
            value.get(k) is not None for k in ("prompt_ids", "input_ids", "messages", "conversations")
        ):
            found = ", ".join(map(str, value))[:80] or "nothing"
            raise UserError(
                f"{where}: messages: missing (found {found}); a record holds messages, conversations, "
                "prompt_ids + response_ids, or input_ids + loss_mask"
            )
        if value.get("prompt_ids") is None and value.get("input_ids") is None:
            return self._script(record, batch)
        document = read_tokens(value, where)
        if len(document.ids) and document.ids.max() >= self.vocab_size:
            raise UserError(
                f"{where}: token id {document.ids.max()} is beyond the tokenizer's vocabulary of "
                f"{self.vocab_size}; set --tokenizer to the one that made these ids"
            )
        batch.sample = batch.sample or str(self.tokenizer.decode(document.ids[:SAMPLE_CHARACTERS]))
        if self.evaluations is not None:
            self.evaluations.check([str(self.tokenizer.decode(document.ids))])
        return document

    def _script(self, record: Record, batch: Batch) -> Script:
        value, where = record.value, record.where
        finished, tools = value.get("finished"), read_tools(value, where)
        if not isinstance(finished, bool | None):
            raise UserError(f"{where}: finished: expected true or false, found {str(finished)[:40]!r}")
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"{where}: {self.config.tokenizer} has no chat template to render messages with; "
                "name a tokenizer that has one, or give prompt_ids + response_ids"
            )
        messages = read_messages(value, where)
        batch.sample = batch.sample or self.chat.shown(messages)
        if self.evaluations is not None:
            self.evaluations.check(m["content"] for m in messages)
        return self.chat.script(messages, finished is not False, tools)

    def _fit(self, documents: list[Document]) -> tuple[list[Document], dict[str, int]]:
        """Documents of at most `max_length` tokens that have something supervised, and what was done."""
        size, on_long = self.config.max_length, self.config.on_long
        out: list[Document] = []
        counts: Counter[str] = Counter()
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
        if len(out) > len(kept):
            counts["unsupervised_documents_left_out"] += len(out) - len(kept)
        return kept, dict(counts)


def _digest(documents: list[Document]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for d in documents:
        digest.update(len(d.ids).to_bytes(8, "little") + d.ids.tobytes() + d.supervised.tobytes())
    return int.from_bytes(digest.digest(), "little")
