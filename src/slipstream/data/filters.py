"""Questions of evaluation files, found again in training records: `prepare --decontaminate`.

Here: reading such files, n-grams of words, the match. Not here: counting what was left out (`prepare`).

Texts are compared as lower-case words (a Chinese or Japanese character is one), so layout and punctuation do
not matter. A run of n words in common is an overlap; a question of fewer words is met only by a message of
the same words. Runs that more than ten questions of a file share are its wrapping, and match nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config import UserError
from slipstream.data.records import ChatError, read_messages
from slipstream.data.sources import Record, iter_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
_WRAPPING = 10  # questions of one file that may share a run of words
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: no word's share of a sum mod 2^64 is lost


class Evaluations:
    """The questions of `files`, by runs of `words` words. Small enough to be copied to every process."""

    def __init__(self, files: Iterable[str], words: int, tokenizer: PreTrainedTokenizerBase):
        self.words = words
        self.files = [Path(f) for f in files]
        self._ids: dict[str, int] = {}  # of the words in questions; every other word is 0
        self._whole: dict[tuple[str, ...], int] = {}  # short questions → index of their file
        found: dict[int, int] = {}  # hash of a run → index of its file
        for k, path in enumerate(self.files):
            texts = (t for r in iter_records(path) for t in _questions(r, tokenizer))
            questions = {tuple(_split(t)) for t in texts} - {()}
            if not questions:
                raise UserError(f"{path}: no questions in it; name files that hold some with --decontaminate")
            shared: Counter[int] = Counter()
            for question in questions:
                for word in question:
                    self._ids.setdefault(word, len(self._ids) + 1)
                if len(question) < words:
                    self._whole[question] = k
                shared.update(set(self._runs(question).tolist()))
            for run, times in shared.items():
                if times <= _WRAPPING:
                    found.setdefault(run, k)
        self._found = np.array(sorted(found), np.uint64)
        self._file_of = np.array([found[h] for h in self._found.tolist()], np.int64)

    def check(self, texts: Iterable[str]) -> None:
        """`ChatError`, whose reason names the file, if one of a record's texts holds a question."""
        for text in texts:
            words = _split(text)
            if len(words) < self.words or not len(self._found):
                file = self._whole.get(tuple(words))
                if file is not None:
                    raise ChatError(f"overlaps {self.files[file].name}", f"the same words: {text[:120]!r}")
                continue
            runs = self._runs(words)
            at = np.searchsorted(self._found, runs)
            hits = np.flatnonzero(self._found[np.minimum(at, len(self._found) - 1)] == runs)
            if len(hits):
                first = int(hits[0])
                same = " ".join(words[first : first + self.words])
                name = self.files[self._file_of[at[first]]].name
                raise ChatError(f"overlaps {name}", f"{self.words} words in a row: {same[:120]!r}")

    def _runs(self, words: Iterable[str]) -> np.ndarray:
        """Hashes [len(words) − n + 1] uint64 of all runs of n words."""
        ids = np.array([self._ids.get(w, 0) for w in words], np.uint64)
        count = len(ids) - self.words + 1
        out = np.zeros(max(count, 0), np.uint64)
        for k in range(self.words if count > 0 else 0):
            out = (out + ids[k : k + count]) * _MULTIPLIER
        return out


def _split(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _questions(record: Record, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    value: dict[str, Any] = record.value
    if value.get("prompt_ids") is not None:
        texts = [tokenizer.decode(value["prompt_ids"], skip_special_tokens=True)]
    elif value.get("messages") is not None or value.get("conversations") is not None:
        texts = [m["content"] for m in read_messages(value, record.where) if m["role"] == "user"]
    else:
        turns = value.get("turns")
        texts = turns if isinstance(turns, list) else [value.get("prompt")]
    for text in texts:
        if not isinstance(text, str):
            raise UserError(
                f"{record.where}: turns: missing; a record of an evaluation file holds turns, prompt, "
                "messages or prompt_ids"
            )
        yield text
