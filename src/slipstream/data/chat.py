"""Conversations → token ids and the mask of what the model itself generates.

Here: normalising a record's messages, rendering them with the tokenizer's chat template, ready token ids.
Not here: reading files (`sources`), filters, hold-out and counting (`prepare`), files (`shards`).

What is supervised: everything between the generation prompt, as a server would send it, and the end-of-turn
token, that token included. A turn is rendered twice: the messages before it with the generation prompt, and
the messages up to it. The first text must begin the second, else the model would learn from a prompt that is
never served. A template with `{% generation %}` marks may exclude more of the answer, never add to it.

Texts are cut where a server cuts them, at the end of a prompt, and the pieces are tokenised apart: a token
never straddles prompt and answer, and the mask needs no character offsets.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
TOKEN_COLUMNS = ("prompt_ids", "response_ids", "input_ids", "loss_mask")
_EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Document:
    """Token ids of one document: `ids` [n] int64, `supervised` [n] bool."""

    ids: np.ndarray
    supervised: np.ndarray

    def prompt_hash(self) -> int:
        """64 bits of the ids before the first supervised token (of all of them where that is the first)."""
        prompt = int(self.supervised.argmax()) or len(self.ids)
        return int.from_bytes(hashlib.blake2b(self.ids[:prompt].tobytes(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Rendered:
    """The documents of one conversation, and what the counts want to know about it."""

    documents: list[Document]
    by_turn: bool  # the template rewrites earlier turns, so every assistant turn is a document of its own
    trailing_messages: int  # messages after the last assistant turn, left out
    empty_thinking: (
        int  # answers before which the template wrote an empty thinking block that no prompt holds
    )


class ChatError(ValueError):
    """A chat that cannot be rendered rightly: `reason` is short, to count by; the message says more."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class _Segment:
    text: str
    supervised: bool
    carry: str = (
        ""  # the end-of-turn token before `text`: tokenised with it, since some swallow the blanks after them
    )


@dataclass(frozen=True)
class _Turn:
    prompt: str
    answer: str  # after the prompt, up to the end-of-turn token
    end: str  # the end-of-turn token
    spans: tuple[tuple[int, int], ...]  # the parts of `answer` the model generates, in characters


class ChatTemplate:
    """A tokenizer's chat template, ready to use. `thinking`, if set, is passed as `enable_thinking`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None, eos_ids: Sequence[int] = ()
    ):
        self.tokenizer = tokenizer
        self.switches: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        special = {str(t) for t in tokenizer.all_special_tokens}
        special |= {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        ends = [tokenizer.convert_ids_to_tokens(i) for i in eos_ids]
        self.eos = {str(t) for t in ends if t is not None}  # None: the model's row, not the tokenizer's token
        if tokenizer.eos_token is not None:
            self.eos.add(str(tokenizer.eos_token))
        self.special = sorted(special | self.eos, key=len, reverse=True)
        self._cuts_freely = self._decode(self._encode(["y", "x"])) == "yx"
        self._prompts_answers: bool | None = None

    def render(self, messages: list[Message], finished: bool = True, tools: list | None = None) -> Rendered:
        """Documents of a conversation (messages as `read_messages` returns them); `ChatError` if it has none.

        `finished=False`: the last answer was cut at a length limit: its end-of-turn token is not the model's.
        Where the template keeps every earlier turn as it was generated, the conversation is one document;
        where it rewrites them (thinking removed), each assistant turn is a document with the context it is
        served with.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not turns:
            raise ChatError("no assistant turn", "nothing in it is the model's")
        if turns[0] == 0:
            raise ChatError("assistant turn first", "no prompt comes before it")
        rendered = [self._turn(messages, i, tools) for i in turns]
        whole = rendered[-1].prompt + rendered[-1].answer + rendered[-1].end
        one = all(whole.startswith(t.prompt + t.answer + t.end) for t in rendered)
        documents = [rendered] if one else [[t] for t in rendered]
        segments = [_segments(d, finished or d[-1] is not rendered[-1]) for d in documents]
        empty = sum(
            bool(_EMPTY_THINKING.match(t.answer)) and "<think>" not in messages[i]["content"]
            for i, t in zip(turns, rendered, strict=True)
        )
        tokenised = [self._tokenise(s) for s in segments]
        return Rendered(tokenised, not one, len(messages) - 1 - turns[-1], empty)

    def prompt_ids(self, messages: list[Message], tools: list | None = None) -> list[int]:
        """Ids a server would be sent for these messages, generation prompt included."""
        return self._encode([self._render(messages, tools, True)])[0]

    def shown(self, messages: list[Message]) -> str:
        """The whole conversation as the template writes it, for error messages."""
        return self._render(messages, None, False)

    def _turn(self, messages: list[Message], i: int, tools: list | None) -> _Turn:
        prompt = self._render(messages[:i], tools, True)
        done, marks = self._render_marked(messages[: i + 1], tools)
        if not done.startswith(prompt):
            raise ChatError(
                "answer does not follow the generation prompt",
                f"after {prompt[-60:]!r} the template writes {_after_common(prompt, done)!r}; "
                "set --thinking as the answers were made, or give prompt_ids + response_ids",
            )
        self._check_content(messages, i, tools, prompt, done[len(prompt) :])
        answer, end = self._cut_at_end_of_turn(done[len(prompt) :])
        if marks is None:
            return _Turn(prompt, answer, end, ((0, len(answer)),))
        return _Turn(prompt, answer, end, _clip(marks, len(prompt), answer))

    def _cut_at_end_of_turn(self, text: str) -> tuple[str, str]:
        """(answer, end-of-turn token): of the special tokens at the end the first eos, else the first."""
        rest, tail = text.rstrip(), []
        while found := next((s for s in self.special if rest.endswith(s)), None):
            start = len(rest) - len(found)
            tail.append((start, found))
            rest = rest[:start].rstrip()
        if not tail:
            raise ChatError("no end-of-turn token", f"the template ends an answer with {text[-40:]!r}")
        tail.reverse()
        start, token = next((t for t in tail if t[1] in self.eos), tail[0])
        return text[:start], token

    def _check_content(
        self, messages: list[Message], i: int, tools: list | None, prompt: str, text: str
    ) -> None:
        """`ChatError` where `text`, after the prompt, is not what message `i` holds: dropped or rewritten."""
        thought, closed, content = messages[i]["content"].strip().rpartition("</think>")
        thought = messages[i].get("reasoning_content") or thought
        for part in (thought.strip(), closed, content.strip()):
            if part[-32:] not in text:
                raise ChatError("content changed by the template", f"{part[-32:]!r} is not in {text[-60:]!r}")
        if self._prompts_answers is None:
            self._prompts_answers = self._render(messages[:i], tools, False) != prompt
        if self._prompts_answers or self._marked(tools) or messages[i].get("tool_calls"):
            return
        # the template knows no generation prompt: fine for "[/INST] answer", wrong when a role header follows
        if not text.lstrip().startswith(messages[i]["content"].strip()[:16]):
            raise ChatError(
                "no generation prompt",
                f"the template ignores add_generation_prompt and begins an answer with {text[:40]!r}",
            )

    def _render(self, messages: list[Message], tools: list | None, generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools, tokenize=False, add_generation_prompt=generation_prompt, **self.switches
            )
        except (TemplateError, TypeError, ValueError) as e:  # the last two: a value of a kind it cannot write
            raise ChatError("refused by the template", " ".join(str(e).split())) from None
        assert isinstance(text, str)
        return text

    def _render_marked(self, messages: list[Message], tools: list | None) -> tuple[str, list | None]:
        """The text, and the character spans of `{% generation %}` when the template has it.

        The public mask is per token and built from character offsets, which byte-level tokenizers trim; the
        spans are exact. This is the one place that knows transformers' renderer (the same in 5.17 and 5.24).
        """
        if not self._marked(tools):
            return self._render(messages, tools, False), None
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        switches: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.switches}
        try:
            texts, marks = render_jinja_template(
                [messages],
                tools,
                chat_template=self.tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **switches,
            )
        except (TemplateError, TypeError, ValueError) as e:
            raise ChatError("refused by the template", " ".join(str(e).split())) from None
        return texts[0], marks[0]  # type: ignore[return-value]  # its annotation says str

    def _marked(self, tools: list | None) -> bool:
        return _GENERATION.search(self.tokenizer.get_chat_template(tools=tools)) is not None

    def _tokenise(self, segments: list[_Segment]) -> Document:
        if self._cuts_freely:
            parts = self._encode([s.carry + s.text for s in segments])
            parts = [p[1:] if s.carry else p for p, s in zip(parts, segments, strict=True)]
        else:  # such a tokenizer writes a blank before every text: only whole prefixes tokenise as served
            texts = [s.text for s in segments]
            prefixes = self._encode(["".join(texts[: k + 1]) for k in range(len(texts))])
            for shorter, longer in itertools.pairwise(prefixes):
                if longer[: len(shorter)] != shorter:
                    raise ChatError("token across prompt and answer", repr(segments[0].text[-40:]))
            parts = [p[len(q) :] for q, p in zip([[], *prefixes], prefixes, strict=False)]
        flags = [np.full(len(p), s.supervised) for p, s in zip(parts, segments, strict=True)]
        return Document(np.concatenate([np.array(p, np.int64) for p in parts]), np.concatenate(flags))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        ids = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return ids  # type: ignore[return-value]  # annotated as a batch of anything

    def _decode(self, parts: list[list[int]]) -> str:
        ids = [i for p in parts for i in p]
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _clip(marks: list[tuple[int, int]], offset: int, answer: str) -> tuple[tuple[int, int], ...]:
    """Marked spans inside the answer. Blanks between prompt, marks and end of turn are generated too."""
    spans = [(max(0, a - offset), min(len(answer), b - offset)) for a, b in marks]
    spans = [(a, b) for a, b in spans if a < b]
    if not spans:
        raise ChatError("no generation mark", "the template's {% generation %} leaves an assistant turn out")
    if not answer[: spans[0][0]].strip():
        spans[0] = (0, spans[0][1])
    if not answer[spans[-1][1] :].strip():
        spans[-1] = (spans[-1][0], len(answer))
    return tuple(spans)


def _segments(turns: list[_Turn], finished: bool) -> list[_Segment]:
    """Texts of a document whose turns each continue the one before."""
    out: list[_Segment] = []
    cursor, end = 0, ""
    for turn in turns:
        out.append(_Segment(turn.prompt[cursor:], False, end))
        at = 0
        for a, b in turn.spans:
            out += [_Segment(turn.answer[at:a], False), _Segment(turn.answer[a:b], True)]
            at = b
        end = turn.end
        if turn is turns[-1] and not finished:
            out.append(_Segment(turn.answer[at:], False))
        elif at == len(turn.answer):
            out[-1] = _Segment(out[-1].text + end, True)
        else:
            out.append(_Segment(turn.answer[at:] + end, False))
        cursor = len(turn.prompt) + len(turn.answer) + len(end)
    return [s for s in out if s.text]


def _after_common(prompt: str, done: str) -> str:
    n = next((k for k, (a, b) in enumerate(zip(prompt, done, strict=False)) if a != b), len(done))
    return done[max(0, n - 20) : n + 40]


def read_messages(record: dict[str, Any], where: str) -> list[Message]:
    """Messages of a record with `messages` (role/content) or `conversations` (from/value), checked.

    `UserError` names `where` (file:line) and the field. Roles we do not know, and conversations without
    messages, are a `ChatError`: counted, not fatal.
    """
    field = "messages" if "messages" in record else "conversations"
    turns = record[field]
    if not isinstance(turns, list):
        raise UserError(f"{where}: {field}: expected a list of messages, found a {type(turns).__name__}")
    if not turns:
        raise ChatError("no messages", f"{field} is empty")
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
    content = turn.get("content", turn.get("value"))
    says_more = role == "assistant" and (turn.get("tool_calls") or turn.get("reasoning_content"))
    if not isinstance(content, str) and not (content is None and says_more):
        found = "missing" if content is None else f"a {type(content).__name__}"
        raise UserError(f"{where}.content: {found}; write the text as one string")
    if role == "assistant" and not (content or "").strip() and not says_more:
        raise UserError(f"{where}.content: empty assistant turn; give its answer or remove the conversation")
    kept = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value")}
    return {"role": role, "content": content or "", **kept}


def read_tools(record: dict[str, Any], where: str) -> list | None:
    """The tool descriptions of a record, for its template; None where there are none."""
    tools = record.get("tools")
    if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
        raise UserError(f"{where}: tools: expected a list of tool descriptions, found {str(tools)[:40]!r}")
    return tools or None


def read_tokens(record: dict[str, Any], where: str) -> Document:
    """A document of ready ids: `prompt_ids` + `response_ids` (supervised), or `input_ids` + `loss_mask`."""
    first, second = ("prompt_ids", "response_ids") if "prompt_ids" in record else ("input_ids", "loss_mask")
    if first not in record or second not in record:
        absent = second if first in record else first
        raise UserError(
            f"{where}: {absent}: missing; ready ids are prompt_ids + response_ids or input_ids + loss_mask"
        )
    a, b = (_integers(record[name], f"{where}: {name}") for name in (first, second))
    if first == "prompt_ids":
        return Document(np.concatenate([a, b]), np.arange(len(a) + len(b)) >= len(a))
    if len(a) != len(b):
        raise UserError(f"{where}: loss_mask: {len(b)} values for {len(a)} input_ids; they must be as many")
    if len(b) and not np.isin(b, (0, 1)).all():
        raise UserError(f"{where}: loss_mask: only 0 and 1 are allowed")
    return Document(a, b == 1)


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
