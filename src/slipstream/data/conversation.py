"""One conversation: what the target is asked, turn by turn, and the lines that become of it.

A conversation is a generator that yields a `Request` and is sent an `Answer`, so that whoever answers may do
so one by one, at once, or in a batch. Its end are lines for `prepare`, or the reason why there are none. Not
here: which conversations there are to make (`regenerate`), who answers (`server`, decoding/answering.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from slipstream.config import RegenerateConfig, UserError
from slipstream.data.chat import ChatTemplate
from slipstream.data.journal import LeftOut, Line
from slipstream.data.records import ChatError, Message, read_messages
from slipstream.data.sources import Record

USER_TURN_TOKENS = 256
"""A user turn that the model has not ended within so many tokens is no prompt."""
USER_TEMPERATURE, USER_TOP_P = 1.0, 0.95
"""User turns are always sampled: it is them that the variety comes from."""
_PLACE = "the-words-of-a-user"  # stands where a user turn's text would be


@dataclass(frozen=True)
class Request:
    """What the target is asked next: an answer to `messages` or, with `ids`, the rest of a user turn."""

    messages: list[Message]
    tools: list | None
    seed: int  # of this turn alone, whatever else is asked
    max_new_tokens: int
    temperature: float
    top_p: float
    ids: list[int] | None = None
    stop_id: int | None = None  # ends a user turn, beside the model's own stop tokens


@dataclass(frozen=True)
class Answer:
    """What came back. Ids where they are known, the stop token included; `tokens` new ones in any case."""

    message: Message
    finish_reason: str  # stop, tool_calls or length
    tokens: int
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason != "length"


@dataclass(frozen=True)
class Job:
    """A conversation to make: `rounds` are the messages put before each answer, None where the model writes
    them.
    """

    key: str
    where: str
    rounds: list[list[Message] | None]
    tools: list | None


class Talk:
    """A conversation under way: `request` is what to answer next, None once it has ended."""

    def __init__(self, job: Job, turns: Generator[Request, Answer, list[Line]]):
        self.job, self._turns = job, turns
        self.lines: list[Line] = []
        self.left_out: LeftOut | None = None
        self.request: Request | None = None
        self._go(lambda: next(turns))

    def reply(self, answer: Answer) -> None:
        self._go(lambda: self._turns.send(answer))

    def give_up(self, why: LeftOut) -> None:
        self._go(lambda: self._turns.throw(why))

    def _go(self, turn: Callable[[], Request]) -> None:
        try:
            self.request = turn()
        except StopIteration as end:
            self.request, self.lines = None, end.value
        except LeftOut as why:
            self.request, self.left_out = None, why
        except ChatError as why:
            self.request, self.left_out = None, LeftOut("skipped", why.reason, str(why))


def digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def rounds_of(record: Record) -> list[list[Message]]:
    """The messages to put before each answer: those of the input without its answers.

    A conversation ends before the first tool result: it belongs to a call that the target may not make
    again. `ChatError` where nobody asks anything, `UserError` for broken input.
    """
    value, where = record.value, record.where
    if value.get("turns") is not None or value.get("prompt") is not None:
        field = "turns" if value.get("turns") is not None else "prompt"
        texts = value[field] if field == "turns" else [value[field]]
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise UserError(f"{where}: {field}: expected the user's words as text")
        messages = [m for t in texts for m in ({"role": "user", "content": t}, {"role": "assistant"})]
    else:
        messages = _without_answers(value, where)
    rounds: list[list[Message]] = []
    waiting: list[Message] = []
    for message in [*messages, {"role": "assistant"}]:
        if message["role"] == "tool":
            break
        if message["role"] != "assistant":
            waiting.append(message)
        elif any(m["role"] == "user" and m["content"].strip() for m in waiting):
            rounds.append(waiting)
            waiting = []
    if not rounds:
        raise ChatError("no user turn", "nothing in it asks for an answer")
    return rounds


def _without_answers(value: dict[str, Any], where: str) -> list[Message]:
    field = "messages" if value.get("messages") is not None else "conversations"
    if value.get(field) is None:
        found = ", ".join(k for k, v in value.items() if v is not None)[:80] or "nothing"
        raise ChatError("no text", f"{found}: expected messages, conversations, turns or prompt")
    turns = value[field]
    if isinstance(turns, list):  # an answer may be anything, even empty: it is dropped
        turns = [{"role": "assistant", "content": "-"} if _is_answer(t) else t for t in turns]
    return read_messages({field: turns}, where)


def _is_answer(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role", turn.get("from")) in ("assistant", "gpt")


def user_turn(chat: ChatTemplate, messages: list[Message]) -> tuple[list[int], int]:
    """(ids up to where a user's words begin after `messages`, the token that ends them)."""
    text = chat.shown([*messages, {"role": "user", "content": _PLACE}])
    before, _, after = text.partition(_PLACE)
    ends = [(at, token) for token in chat.special if (at := after.find(token)) >= 0]
    if not ends:
        raise UserError("--self-prompt: the chat template ends a user turn with no special token")
    end = chat.tokenizer.convert_tokens_to_ids(min(ends)[1])
    ids = chat.tokenizer(before, add_special_tokens=False)["input_ids"]
    assert isinstance(end, int)
    return list(ids), end  # type: ignore[arg-type]  # annotated as a batch of anything


def converse(
    job: Job, config: RegenerateConfig, chat: ChatTemplate | None
) -> Generator[Request, Answer, list[Line]]:
    """Asks for every turn of a conversation; the output's lines. It ends early where an answer was cut off or
    calls a tool: what a user would say then is not known.
    """
    messages: list[Message] = []
    answers: list[Answer] = []
    for turn, given in enumerate(job.rounds):
        seed = int(digest([config.seed, job.key, turn])[:8], 16) >> 1  # 31 bits: any server's seed
        if given is None:
            assert chat is not None
            ids, stop = user_turn(chat, messages)
            said = yield Request(
                messages, None, seed ^ 1, USER_TURN_TOKENS, USER_TEMPERATURE, USER_TOP_P, ids, stop
            )
            text = said.message["content"].strip()
            if not said.finished or not text:
                raise LeftOut("skipped", "user turn not finished" if text else "empty user turn", text[:60])
            given = [{"role": "user", "content": text}]
        messages = [*messages, *given]
        answer = yield Request(
            messages, job.tools, seed, config.max_new_tokens, config.temperature, config.top_p
        )
        answers.append(answer)
        messages = [*messages, answer.message]
        if not answer.finished or answer.message.get("tool_calls"):
            break
    return lines_of(job.key, answers, messages, job.tools)


def lines_of(key: str, answers: list[Answer], messages: list[Message], tools: list | None) -> list[Line]:
    """The conversation as `prepare` reads it: ids wherever the target gave them, else its messages.

    Several turns are one sequence where each prompt begins with all that was said before, token for token.
    Where the template or the tokenizer wrote it otherwise, each turn is a line of its own.
    """
    last = answers[-1]
    ids = [(a.prompt_ids, a.response_ids) for a in answers]
    known = [(p, r) for p, r in ids if p is not None and r is not None]
    if len(known) < len(ids):
        if not messages[-1]["content"].strip() and not messages[-1].keys() - {"role", "content"}:
            raise LeftOut("skipped", "empty answer", "no ids and no text came back")
        return [Line(last.finished, {"messages": messages} | ({"tools": tools} if tools else {}))]
    if len(known) > 1:
        sequence: list[int] = []
        mask: list[int] = []
        for prompt, response in known:
            if prompt[: len(sequence)] != sequence:
                break
            mask += [0] * (len(prompt) - len(sequence)) + [1] * len(response)
            sequence = prompt + response
        else:
            return [Line(last.finished, {"input_ids": sequence, "loss_mask": mask})]
    named = {"conversation": key} if len(known) > 1 else {}  # none of its turns may be held out alone
    pairs = zip(answers, known, strict=True)
    return [Line(a.finished, {**named, "prompt_ids": p, "response_ids": r}) for a, (p, r) in pairs]
