"""Prompts to decode, as token ids: from JSONL files of several shapes, or a prepared folder's held-out part.

What is decoded from them is evaluate.py's; training data is read in data/.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import UserError
from slipstream.data.chat import ChatTemplate
from slipstream.data.records import ChatError, Message, read_messages, read_tools
from slipstream.data.shards import TokenDataset, check_tokenizer, open_dataset


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the target's answer begins, and where they were read, for messages."""

    ids: list[int]
    where: str


def read_prompts(path: str | Path, chat: ChatTemplate, max_prompts: int) -> list[Prompt]:
    """The first `max_prompts` prompts of a JSONL file (`.gz` too), or of a prepared folder's held-out
    documents.

    A line holds `prompt_ids` (used as they are), `messages` (up to the last user turn), `turns` (the first
    one) or `prompt` (text); the last three are rendered as in training, with the line's `tools` if it has
    any, up to the opening of the answer. Raises `UserError`.
    """
    assert max_prompts >= 1
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such prompt file or prepared folder: mend --prompts")
    read = _from_folder if path.is_dir() else _from_lines
    prompts = read(path, chat, max_prompts)
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


def _from_folder(path: Path, chat: ChatTemplate, max_prompts: int) -> list[Prompt]:
    heldout = open_dataset(path, "heldout")
    check_tokenizer(heldout, chat.tokenizer)
    return heldout_prompts(heldout, path, max_prompts)


def _from_lines(path: Path, chat: ChatTemplate, max_prompts: int) -> list[Prompt]:
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
                prompts.append(Prompt(_ids_of(value, where, chat), where))
                if len(prompts) == max_prompts:
                    break
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot read this prompt file as UTF-8 JSONL: {e}") from None
    return prompts


def _ids_of(value: Any, where: str, chat: ChatTemplate) -> list[int]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object with prompt_ids, messages, turns or prompt")
    if "prompt_ids" in value:
        ids = value["prompt_ids"]
        if not isinstance(ids, list) or not ids or not all(type(t) is int and t >= 0 for t in ids):
            raise UserError(f"{where}: prompt_ids must be a list of token ids, at least one")
        return ids
    tokenizer = chat.tokenizer
    if "messages" in value and tokenizer.chat_template is None:
        raise UserError(
            f"{where}: the target's tokenizer has no chat template for messages: use prompt_ids or prompt"
        )
    try:
        if "messages" in value:
            ids = chat.prompt_ids(_up_to_user(value, where), read_tools(value, where))
        elif tokenizer.chat_template is not None:
            question = {"role": "user", "content": _text_of(value, where)}
            ids = chat.prompt_ids([question], read_tools(value, where))
        else:
            ids = list(tokenizer(_text_of(value, where))["input_ids"])
    except ChatError as e:
        raise UserError(f"{where}: {e}: mend or remove this line") from None
    if not ids:
        raise UserError(f"{where}: this prompt is empty once tokenised: mend or remove this line")
    return ids


def _text_of(value: dict[str, Any], where: str) -> str:
    if "turns" in value:
        field, turns = "turns", value["turns"]
        text = turns[0] if isinstance(turns, list) and turns else None
    else:
        field, text = "prompt", value.get("prompt")
    if not isinstance(text, str) or not text:
        known = f"{field} holds no text" if field in value else "no prompt_ids, messages, turns or prompt"
        raise UserError(f"{where}: {known}: give the line one of them")
    return text


def _up_to_user(value: dict[str, Any], where: str) -> list[Message]:
    messages = read_messages(value, where)
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    if not users:
        raise UserError(f"{where}: messages without a user turn: there is nothing to answer")
    return messages[: users[-1] + 1]
