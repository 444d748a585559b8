"""`slipstream regenerate`: which prompts are to be answered, and how each of them ends.

Here: the prompts of the input, or those that the model is to write; which are still missing; the counts. Not
here: a conversation's turns (`conversation`), who answers (`server`, decoding/answering.py), the files
(`journal`), what is learned from an answer (`prepare`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slipstream.config import RegenerateConfig, UserError
from slipstream.data.chat import ChatTemplate
from slipstream.data.conversation import Job, Talk, converse, digest, rounds_of, user_turn
from slipstream.data.journal import Journal, LeftOut
from slipstream.data.records import ChatError, read_tools
from slipstream.data.sources import iter_records
from slipstream.data.tokenizer import load_tokenizer


class Regeneration:
    """One run: which conversations are missing, and what became of each.

    `chat`, the target's template, is there where the target is named. `report(ended, facts)` is called at
    every end.
    """

    def __init__(self, config: RegenerateConfig, report: Callable[[int, str], None]) -> None:
        check(config)
        self.config, self.report = config, report
        self.chat: ChatTemplate | None = None
        if config.target_model:
            self.chat = ChatTemplate(load_tokenizer(config.target_model), config.thinking)
        self.header: list[int] = []
        if config.self_prompt is not None:
            assert self.chat is not None
            self.header, _ = user_turn(self.chat, [])
        self.journal = Journal(Path(config.output_dir), fixed_settings(config))
        self.failed: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.prompts = self.done = self.tokens = 0
        for job in self._jobs():
            self.prompts += 1
            if isinstance(job, LeftOut):
                self._count(job, job.detail)
            elif job.key in self.journal.done:
                self.done += 1
            elif job.key in self.journal.skipped:
                self._count(LeftOut("skipped", self.journal.skipped[job.key], ""), job.where)
        self.began = time.monotonic()
        self.ended_before = self.prompts - self.left

    @property
    def left(self) -> int:
        return self.prompts - self.done - self.failed.total() - self.skipped.total()

    def talks(self) -> Iterator[Talk]:
        """The missing conversations, each waiting for its first answer."""
        for job in self._jobs():
            if not isinstance(job, LeftOut) and not self.journal.knows(job.key):
                talk = Talk(job, converse(job, self.config, self.chat))
                if talk.request is None:
                    self.end(talk)
                else:
                    yield talk

    def end(self, talk: Talk) -> None:
        """Write what a conversation has come to, and count it."""
        assert talk.request is None
        job = talk.job
        if talk.left_out is not None:
            self.journal.leave_out(job.key, job.where, talk.left_out)
            self._count(talk.left_out, f"{job.where}: {talk.left_out}")
        else:
            self.journal.write(job.key, talk.lines)
            self.done += 1
        self.report(self.prompts - self.left, self._facts())

    def close(self) -> dict[str, Any]:
        """What `regenerate.json` then holds: every prompt is done, failed, skipped or left."""
        seconds = time.monotonic() - self.began
        counts = {
            "prompts": self.prompts,
            "done": self.done,
            "truncated": self.journal.truncated,
            "failed": dict(self.failed.most_common()),
            "skipped": dict(self.skipped.most_common()),
            "left": self.left,
            "examples": self.examples,
            "this_run": {
                "tokens": self.tokens,
                "seconds": round(seconds, 1),
                "tokens_per_second": round(self.tokens / max(seconds, 1e-9), 1),
            },
        }
        self.journal.close(counts)
        return counts

    def _jobs(self) -> Iterator[Job | LeftOut]:
        """Every prompt of the input, in order. Equal prompts are told apart by how many came before."""
        config, seen = self.config, Counter[str]()
        if config.self_prompt is not None:
            name = digest(self.header)
            for i in range(config.self_prompt):
                yield Job(f"{name}-{i}", f"self-prompt {i}", [None] * (config.turns or 1), None)
            return
        records = 0
        for path in config.input:
            for record in iter_records(Path(path)):
                if config.limit is not None and records >= config.limit:
                    return
                records += 1
                try:
                    rounds = rounds_of(record)[: config.turns]
                    tools = read_tools(record.value, record.where)
                except ChatError as e:
                    yield LeftOut("skipped", e.reason, f"{record.where}: {e}")
                    continue
                name = digest([rounds, tools])
                yield Job(f"{name}-{seen[name]}", record.where, [*rounds], tools)
                seen[name] += 1

    def _count(self, why: LeftOut, example: str) -> None:
        (self.failed if why.outcome == "failed" else self.skipped)[why.reason] += 1
        self.examples.setdefault(why.reason, example[:300])

    def _facts(self) -> str:
        seconds = time.monotonic() - self.began
        ended = self.prompts - self.left - self.ended_before
        left = seconds / max(ended, 1) * self.left
        rate = self.tokens / max(seconds, 1e-9)
        return f"{self.failed.total()} failed, {self.left} left, {rate:,.0f} tok/s, {left / 60:.0f} min to go"


def summary(counts: dict[str, Any]) -> list[str]:
    """How a run ended, in lines for the user."""
    run = counts["this_run"]
    failed, skipped = sum(counts["failed"].values()), sum(counts["skipped"].values())
    out = [
        f"{counts['prompts']} prompts: {counts['done']} done ({counts['truncated']} of them truncated), "
        f"{failed} failed, {skipped} skipped, {counts['left']} left",
        f"{run['tokens']:,} new tokens in {run['seconds']:g} s: {run['tokens_per_second']:,} tokens/s",
    ]
    for outcome in ("failed", "skipped"):
        for reason, n in counts[outcome].items():
            out.append(f"{n} {outcome}: {reason} (the first: {counts['examples'][reason]})")
    return out


def check(config: RegenerateConfig) -> None:
    """`UserError` where the settings contradict each other."""
    if bool(config.input) == (config.self_prompt is not None):
        raise UserError("slipstream regenerate: give prompts with --input, or --self-prompt N to make them")
    if not config.server and not config.target_model:
        raise UserError(
            "slipstream regenerate: give --server URLs, or --target-model to answer in this process"
        )
    if config.self_prompt is not None and not config.target_model:
        raise UserError("--self-prompt: needs the chat template: name the folder with --target-model")
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top-p {config.top_p}: must be above 0 and at most 1")


def fixed_settings(config: RegenerateConfig) -> dict[str, Any]:
    """What all answers in one output have in common; who answers, and how fast, may change."""
    names = ("temperature", "top_p", "max_new_tokens", "thinking", "turns", "seed")
    return {name: value for name, value in vars(config).items() if name in names}
