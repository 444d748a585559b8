"""What a record means: its messages, tools or ready token ids, checked and made uniform.

Here: `Document`, the reasons for which a record is of no use (`ChatError`), reading one record's fields. Not
here: rendering messages (`chat`), reading files (`sources`), filters, hold-out and counting (`prepare`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.config import UserError

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
TOKEN_COLUMNS = ("prompt_ids", "response_ids", "input_ids", "loss_mask")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of an answer's thinking: servers write one, templates read another."""


@dataclass(frozen=True)
class Document:
    """Token ids of one document: `ids` [n] int64, `supervised` [n] bool. `conversation` is what turns that
    are records of their own have in common.
    """

    ids: np.ndarray
    supervised: np.ndarray
    conversation: str | None = None

    def prompt_hash(self) -> int:
        """64 bits of the conversation's name or, where it has none, of the ids before the first supervised
        token (of all of them where that is the first).
        """
        prompt = int(self.supervised.argmax()) or len(self.ids)
        name = self.conversation
        content = self.ids[:prompt].tobytes() if name is None else name.encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class ChatError(ValueError):
    """A chat that cannot be used rightly: `reason` is short, to count by; the message says more."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def read_messages(record: dict[str, Any], where: str) -> list[Message]:
    """Messages of a record with `messages` (role/content) or `conversations` (from/value), checked.

    Text parts of a content list are joined by newlines, thinking goes by all its names, and arguments of tool
    calls that are JSON text become objects, as servers do it. `UserError` names `where` (file:line) and the
    field. Roles we do not know, images and the like, and conversations without messages are a `ChatError`:
    counted, not fatal.
    """
    field = "messages" if record.get("messages") is not None else "conversations"
    turns = record.get(field)
    if not isinstance(turns, list):
        raise UserError(f"{where}: {field}: expected a list of messages, found a {type(turns).__name__}")
    if not turns:
        raise ChatError("no messages", f"{field} is empty")
    for name in MEDIA:
        if record.get(name):
            raise ChatError("multimodal", f"the record holds {name}; only text can be prepared")
    return [_read_message(turn, f"{where}: {field}[{i}]") for i, turn in enumerate(turns)]


def _read_message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise UserError(f"{where}: expected an object with role and content, found {str(turn)[:40]!r}")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str):
        raise UserError(f"{where}.role: missing; write one of {', '.join(ROLES)}")
    role = SHAREGPT_ROLES.get(role, role)
    if role not in ROLES:
        raise ChatError("unknown role", f"{role!r} is not one of {', '.join(ROLES)}")
    # null is what Parquet writes for a field that only other messages have; templates ask whether it is there
    kept = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = _join_parts(content, where)
    thought = next((kept[name] for name in THOUGHTS if kept.get(name)), None) if role == "assistant" else None
    if not isinstance(thought, str | None):
        raise UserError(f"{where}.reasoning_content: a {type(thought).__name__}; write it as one string")
    calls = _read_calls(kept.pop("tool_calls", None), where)
    kept = {k: v for k, v in kept.items() if k not in THOUGHTS or v != ""}
    kept |= dict.fromkeys(THOUGHTS, thought) if thought else {}
    kept |= {"tool_calls": calls} if calls else {}
    says_more = role == "assistant" and (calls or thought)
    if not isinstance(content, str) and not (content is None and says_more):
        found = "missing" if content is None else f"a {type(content).__name__}"
        raise UserError(f"{where}.content: {found}; write the text as one string")
    if role == "assistant" and not (content or "").strip() and not says_more:
        raise UserError(f"{where}.content: empty assistant turn; give its answer or remove the conversation")
    return {"role": role, "content": content or "", **kept}


def _join_parts(parts: list, where: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(kind, str) and kind != "text":
            raise ChatError("multimodal", f"a part of type {kind[:40]!r} in {where.rpartition(': ')[2]}")
        else:
            raise UserError(f"{where}.content: a list with {str(part)[:40]!r} in it; a part is type and text")
    return "\n".join(texts)


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | None) or not all(isinstance(call, dict) for call in calls or ()):
        raise UserError(f"{where}: tool_calls: expected a list of calls, found {str(calls)[:40]!r}")
    return [_read_call(call) for call in calls or ()]


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _read_call(inner)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    value = _from_json(arguments)
    if not isinstance(value, dict):
        raise ChatError("tool call without a JSON object", f"its arguments are {arguments[:40]!r}")
    return {**call, "arguments": value}


def _from_json(text: str) -> Any:
    """The value, or None where the text is no JSON (or too deep for any reader)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_tools(record: dict[str, Any], where: str) -> list | None:
    """The tool descriptions of a record (a list, or the list as JSON text); None where there are none."""
    given = record.get("tools")
    tools = _from_json(given) if isinstance(given, str) else given
    if given in (None, ""):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools: expected a list of tool descriptions, found {str(given)[:40]!r}")
    return tools or None


def read_tokens(record: dict[str, Any], where: str) -> Document:
    """A document of ready ids: `prompt_ids` + `response_ids` (supervised), or `input_ids` + `loss_mask`."""
    first, second = ("prompt_ids", "response_ids") if "prompt_ids" in record else ("input_ids", "loss_mask")
    if first not in record or second not in record:
        absent = second if first in record else first
        raise UserError(
            f"{where}: {absent}: missing; ready ids are prompt_ids + response_ids or input_ids + loss_mask"
        )
    a, b = (_integers(record[column], f"{where}: {column}") for column in (first, second))
    name = record.get("conversation")
    if not isinstance(name, str | None):
        raise UserError(f"{where}: conversation: expected its name as text, found {str(name)[:40]!r}")
    if first == "prompt_ids":
        return Document(np.concatenate([a, b]), np.arange(len(a) + len(b)) >= len(a), name)
    if len(a) != len(b):
        raise UserError(f"{where}: loss_mask: {len(b)} values for {len(a)} input_ids; they must be as many")
    if len(b) and not np.isin(b, (0, 1)).all():
        raise UserError(f"{where}: loss_mask: only 0 and 1 are allowed")
    return Document(a, b == 1, name)


def _integers(values: Any, where: str) -> np.ndarray:
    # an empty list has no integer type of its own
    if not isinstance(values, np.ndarray) and not isinstance(values, list):
        raise UserError(f"{where}: expected a list of token ids, found a {type(values).__name__}")
    if isinstance(values, list) and any(not isinstance(v, int) for v in values):
        raise UserError(f"{where}: expected whole numbers only")
    out = np.asarray(values if len(values) else np.zeros(0, np.int64))
    if out.dtype.kind not in "iub" or out.ndim != 1:
        raise UserError(f"{where}: expected a flat list of whole numbers")
    if len(out) and (out.min() < 0 or out.max() > 2**31):
        raise UserError(f"{where}: a token id is below 0 or absurdly large")
    return out.astype(np.int64)
