"""Conversations → token ids and the mask of what the model itself generates.

Here: rendering messages with the tokenizer's chat template, and tokenising what came of it. Not here: what a
record holds (`records`), filters, hold-out and counting (`prepare`), files (`shards`).

What is supervised: everything between the generation prompt, as a server would send it, and the end-of-turn
token, that token included. A turn is rendered twice: the messages before it with the generation prompt, and
the messages up to it. The first text must begin the second, else the model would learn from a prompt that is
never served; where a template rewrites turns before an answer once that is there, the answer is put after the
prompt all the same. A template with `{% generation %}` marks may exclude more of the answer, never add to it.

Texts are cut where a server cuts them, at the end of a prompt, and the pieces are tokenised apart: a token
never straddles prompt and answer, and the mask needs no character offsets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.data.records import ChatError, Document, Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_EMPTY_THINKING = re.compile(r"\s*(<think>)?\s*</think>")
_STAND_IN: Message = {"role": "assistant", "content": "…"}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """The documents of one conversation, and what the counts want to know about it."""

    documents: list[Document]
    by_turn: bool  # the template rewrites earlier turns, so every assistant turn is a document of its own
    trailing_messages: int  # messages after the last assistant turn, left out
    empty_thinking: (
        int  # answers that open with an empty thinking block of the template's which no prompt holds
    )
    tools_ignored: bool  # the template writes no tool descriptions into its prompts


@dataclass(frozen=True)
class Script:
    """The texts of one conversation before they are tokenised; what else it holds is as in `Rendered`."""

    documents: list[list[_Segment]]
    by_turn: bool
    trailing_messages: int
    empty_thinking: int
    tools_ignored: bool


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
        self.switches: dict[str, Any] = dict(tokenizer.special_tokens_map)
        if thinking is not None:
            self.switches["enable_thinking"] = thinking
        self._templates: dict[bool, tuple[str, bool]] = {}
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
        (rendered,) = self.tokenise([self.script(messages, finished, tools)])
        if isinstance(rendered, ChatError):
            raise rendered
        return rendered

    def script(self, messages: list[Message], finished: bool = True, tools: list | None = None) -> Script:
        """The first half of `render`: all that the template does. `ChatError` as there."""
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not turns:
            raise ChatError("no assistant turn", "nothing in it is the model's")
        if turns[0] == 0:
            raise ChatError("assistant turn first", "no prompt comes before it")
        rendered = [self._turn(messages, i, tools) for i in turns]
        whole = rendered[-1].prompt + rendered[-1].answer + rendered[-1].end
        try:
            whole.encode()
        except UnicodeEncodeError as e:
            raise ChatError("no valid Unicode", f"half a surrogate pair, {e.object[e.start]!r}") from None
        one = all(whole.startswith(t.prompt + t.answer + t.end) for t in rendered)
        documents = [rendered] if one else [[t] for t in rendered]
        segments = [_segments(d, finished or d[-1] is not rendered[-1]) for d in documents]
        empty = sum(
            bool(_EMPTY_THINKING.match(t.answer)) and "</think>" not in messages[i]["content"]
            for i, t in zip(turns, rendered, strict=True)
        )
        before = messages[: turns[0]]
        ignored = tools is not None and self._render(before, None, True) == rendered[0].prompt
        return Script(segments, not one, len(messages) - 1 - turns[-1], empty, ignored)

    def tokenise(self, scripts: Sequence[Script]) -> list[Rendered | ChatError]:
        """The second half of `render`, of many conversations in one call of the tokenizer: faster so."""
        flat = [d for s in scripts for d in s.documents]
        if self._cuts_freely:
            texts = [g.carry + g.text for d in flat for g in d]
        else:  # such a tokenizer writes a blank before every text: only whole prefixes tokenise as served
            texts = ["".join(g.text for g in d[: k + 1]) for d in flat for k in range(len(d))]
        ids = iter(self._encode(texts))
        parts = iter([[next(ids) for _ in d] for d in flat])
        return [self._assemble(s, [next(parts) for _ in s.documents]) for s in scripts]

    def _assemble(self, script: Script, parts: list[list[list[int]]]) -> Rendered | ChatError:
        try:
            documents = [self._document(d, p) for d, p in zip(script.documents, parts, strict=True)]
        except ChatError as e:
            return e
        rest = (script.by_turn, script.trailing_messages, script.empty_thinking, script.tools_ignored)
        return Rendered(documents, *rest)

    def _document(self, segments: list[_Segment], parts: list[list[int]]) -> Document:
        if self._cuts_freely:
            parts = [p[1:] if s.carry else p for p, s in zip(parts, segments, strict=True)]
        else:
            for shorter, longer in itertools.pairwise(parts):
                if longer[: len(shorter)] != shorter:
                    raise ChatError("token across prompt and answer", repr(segments[0].text[-40:]))
            parts = [p[len(q) :] for q, p in zip([[], *parts], parts, strict=False)]
        ids = np.fromiter(itertools.chain.from_iterable(parts), np.int64)
        return Document(ids, np.repeat([s.supervised for s in segments], [len(p) for p in parts]))

    def prompt_ids(self, messages: list[Message], tools: list | None = None) -> list[int]:
        """Ids a server would be sent for these messages, generation prompt included."""
        return self._encode([self._render(messages, tools, True)])[0]

    def shown(self, messages: list[Message]) -> str:
        """The whole conversation as the template writes it, for error messages."""
        return self._render(messages, None, False)

    def _turn(self, messages: list[Message], i: int, tools: list | None) -> _Turn:
        prompt = self._render(messages[:i], tools, True)
        done, marks = self._render_marked(messages[: i + 1], tools)
        start = (
            len(prompt)
            if done.startswith(prompt)
            else self._start_elsewhere(messages[:i], tools, prompt, done)
        )
        self._check_content(messages, i, tools, prompt, done[start:])
        answer, end = self._cut_at_end_of_turn(done[start:])
        if marks is None:
            return _Turn(prompt, answer, end, ((0, len(answer)),))
        return _Turn(prompt, answer, end, _clip(marks, start, answer))

    def _start_elsewhere(self, before: list[Message], tools: list | None, prompt: str, done: str) -> int:
        """Where the answer starts in `done`, which begins otherwise than `prompt`: the template rewrote
        earlier turns, as harmony does with the analysis before calls once their final answer is there.

        A stand-in for the answer makes it begin so too; how that ends is seen where nothing is rewritten.
        `ChatError` where the beginnings differ, or do not end like the prompt.
        """
        question = [{"role": "user", "content": "?"}]
        tail = self._render([*question, _STAND_IN], None, False)
        tail = tail.removeprefix(self._render(question, None, True))
        whole = self._render([*before, _STAND_IN], tools, False)
        start = len(whole) - len(tail)
        begun = whole[:start]
        if whole.endswith(tail) and done.startswith(begun) and begun[-64:] == prompt[-64:]:
            return start
        raise ChatError(
            "answer does not follow the generation prompt",
            f"after {prompt[-60:]!r} the template writes {_after_common(prompt, done)!r}; "
            "set --thinking as the answers were made, or give prompt_ids + response_ids",
        )

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
        for call in messages[i].get("tool_calls", ()):
            name = call.get("function", call).get("name")
            if not isinstance(name, str) or name not in text:
                raise ChatError("tool call dropped by the template", f"{name!r} is not in {text[-60:]!r}")
        if self._prompts_answers is None:
            self._prompts_answers = self._render(messages[:i], tools, False) != prompt
        if self._prompts_answers or self._template(tools is not None)[1] or messages[i].get("tool_calls"):
            return
        # the template knows no generation prompt: fine for "[/INST] answer", wrong when a role header follows
        if not text.lstrip().startswith(messages[i]["content"].strip()[:16]):
            raise ChatError(
                "no generation prompt",
                f"the template ignores add_generation_prompt and begins an answer with {text[:40]!r}",
            )

    def _render(self, messages: list[Message], tools: list | None, generation_prompt: bool) -> str:
        return self._render_marked(messages, tools, generation_prompt)[0]

    def _render_marked(
        self, messages: list[Message], tools: list | None, generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The text, and the character spans of `{% generation %}` when the template has it.

        The public mask is per token and built from character offsets, which byte-level tokenizers trim; the
        spans are exact. This is the one place that knows transformers' renderer (the same in 5.17 and 5.24).
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        template, marked = self._template(tools is not None)
        try:
            texts, spans = render_jinja_template(
                [messages],
                tools,
                chat_template=template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=generation_prompt,
                **self.switches,
            )
        except (TemplateError, TypeError, ValueError) as e:  # the last two: a value of a kind it cannot write
            raise ChatError("refused by the template", " ".join(str(e).split())) from None
        return texts[0], spans[0] if marked else None  # type: ignore[return-value]  # its annotation says str

    def _template(self, tools: bool) -> tuple[str, bool]:
        """The template (a tokenizer may have another for tools), and whether it has generation marks."""
        if tools not in self._templates:
            text = self.tokenizer.get_chat_template(tools=[{}] if tools else None)
            self._templates[tools] = text, _GENERATION.search(text) is not None
        return self._templates[tools]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if self.tokenizer.is_fast:
            # its own batch call also finds the characters of every token, which takes as long again
            backend: Tokenizer = self.tokenizer.backend_tokenizer  # type: ignore[assignment]
            backend.no_truncation()  # a length written in tokenizer.json is another program's
            backend.no_padding()
            return [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]
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
