"""Prompts to decode, as token ids: from JSONL files of several shapes, or a prepared folder's held-out part.

What is decoded from them is evaluate.py's; training data is read in data/.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from slipstream.config import UserError
from slipstream.data.shards import TokenDataset, check_tokenizer, open_dataset


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the target's answer begins, and where they were read, for messages."""

    ids: list[int]
    where: str


def read_prompts(path: str | Path, tokenizer: PreTrainedTokenizerBase, max_prompts: int) -> list[Prompt]:
    """The first `max_prompts` prompts of a JSONL file (`.gz` too), or of a prepared folder's held-out
    documents.

    A line holds `prompt_ids` (used as they are), `messages` (up to the last user turn), `turns` (the first
    one) or `prompt` (text); the last three are rendered by the chat template, with the opening of the answer.
    Raises `UserError`.
    """
    path = Path(path)
    if max_prompts < 1:
        raise UserError(f"--max-prompts {max_prompts}: at least one prompt is needed")
    if not path.exists():
        raise UserError(f"{path}: no such prompt file or prepared folder: mend --prompts")
    prompts = (
        _from_folder(path, tokenizer, max_prompts)
        if path.is_dir()
        else _from_lines(path, tokenizer, max_prompts)
    )
    if not prompts:
        raise UserError(f"{path}: no prompts in it: give a file or folder that holds some with --prompts")
    return prompts


def heldout_prompts(heldout: TokenDataset, where: str | Path, max_prompts: int) -> list[Prompt]:
    """The first held-out documents, each up to its first supervised token: where the target's answer
    begins.
    """
    prompts = []
    for i in range(min(max_prompts, len(heldout))):
        ids, supervised = heldout.document(i)
        # A document supervised from its first token still needs one token to start from.
        begin = max(1, int(supervised.argmax()) if supervised.any() else len(ids))
        prompts.append(Prompt(ids[:begin].tolist(), f"{where}: held-out document {i}"))
    return prompts


def _from_folder(path: Path, tokenizer: PreTrainedTokenizerBase, max_prompts: int) -> list[Prompt]:
    heldout = open_dataset(path, "heldout")
    check_tokenizer(heldout, tokenizer)
    return heldout_prompts(heldout, path, max_prompts)


def _from_lines(path: Path, tokenizer: PreTrainedTokenizerBase, max_prompts: int) -> list[Prompt]:
    prompts: list[Prompt] = []
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as e:
                    raise UserError(f"{where}: not valid JSON ({e.msg}): mend or remove this line") from None
                prompts.append(Prompt(_ids_of(value, where, tokenizer), where))
                if len(prompts) == max_prompts:
                    break
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot read this prompt file as UTF-8 JSONL: {e}") from None
    return prompts


def _ids_of(value: Any, where: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object with prompt_ids, messages, turns or prompt")
    if "prompt_ids" in value:
        ids = value["prompt_ids"]
        if not isinstance(ids, list) or not ids or not all(type(t) is int and t >= 0 for t in ids):
            raise UserError(f"{where}: prompt_ids must be a list of token ids, at least one")
        return ids
    if "messages" in value:
        return _render(_up_to_user(value["messages"], where), where, tokenizer)
    if "turns" in value:
        turns = value["turns"]
        text = turns[0] if isinstance(turns, list) and turns else None
        field = "turns"
    else:
        text, field = value.get("prompt"), "prompt"
    if not isinstance(text, str) or not text:
        known = "no prompt_ids, messages, turns or prompt" if field not in value else f"{field} holds no text"
        raise UserError(f"{where}: {known}: give the line one of them")
    if tokenizer.chat_template is None:
        return _encode(text, where, tokenizer, special=True)
    return _render([{"role": "user", "content": text}], where, tokenizer)


def _up_to_user(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages
    ):
        raise UserError(f"{where}: messages must be a list of objects with role and content")
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    if not users:
        raise UserError(f"{where}: messages without a user turn: there is nothing to answer")
    return messages[: users[-1] + 1]


def _render(messages: list[dict[str, Any]], where: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template is None:
        raise UserError(
            f"{where}: the target's tokenizer has no chat template for messages: use prompt_ids or prompt"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as e:
        raise UserError(f"{where}: the target's chat template refuses these messages: {e}") from None
    assert isinstance(text, str)
    return _encode(text, where, tokenizer, special=False)  # the template writes its own special tokens


def _encode(text: str, where: str, tokenizer: PreTrainedTokenizerBase, special: bool) -> list[int]:
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    assert isinstance(ids, list)
    if not ids:
        raise UserError(f"{where}: this prompt is empty once tokenised: mend or remove this line")
    return ids
