"""What speculation gains without a drafter, whether the text is worth drafting, and means over requests.

Lives here: prompt-lookup and an n-gram table, walked along answers that the target has already given. No
model is run here.

A draft without a distribution (q is all on one token) is right iff the target's own next token equals it: at
T = 0 by definition, at T > 0 because u·1 < p(draft) has the same law as "a draw from p equals the draft". So
walking along an answer gives the very passes that decoding with that drafter would have made (T = 0), or
their law (T > 0), for nothing. The walk counts as speculative.py does: the answer's first token comes from
the prefill, every later one from a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LOOKUP_ORDERS = (3, 2)
"""Prompt-lookup compares the last 3 tokens, else the last 2."""

Guess = Callable[[int], list[int]]
"""Drafts that follow the first n tokens of a request, its prompt included."""


def walk(prompt_ids: Sequence[int], answer: Sequence[int], block_size: int, guess: Guess) -> list[int]:
    """Tokens that each pass along `answer` produces with drafts of `guess`; their sum is len(answer) − 1."""
    produced, known = [], 1
    while known < len(answer):
        room = len(answer) - known
        drafts = guess(len(prompt_ids) + known)[: min(block_size - 1, room)]
        right = 0
        while right < len(drafts) and drafts[right] == answer[known + right]:
            right += 1
        produced.append(min(right + 1, room))
        known += produced[-1]
    return produced


def lookup_guess(tokens: Sequence[int], count: int) -> Guess:
    """Prompt-lookup over a request's `tokens` (prompt and answer): `count` drafts copied from behind the most
    recent earlier occurrence of the last 3 tokens, else of the last 2. A copy that reaches the end of what is
    known goes on with its own drafts, so that a repetition is drafted in full. The returned function must be
    asked for growing n.
    """
    seen: dict[int, dict[tuple[int, ...], int]] = {order: {} for order in LOOKUP_ORDERS}
    ends = dict.fromkeys(LOOKUP_ORDERS, 0)

    def guess(n: int) -> list[int]:
        for order in LOOKUP_ORDERS:
            for end in range(max(ends[order], order), n):  # occurrences that end before the last token
                seen[order][tuple(tokens[end - order : end])] = end
            ends[order] = max(ends[order], n)
        for order in LOOKUP_ORDERS:
            source = seen[order].get(tuple(tokens[n - order : n])) if n > order else None
            if source is not None:
                return [tokens[source + i % (n - source)] for i in range(count)]
        return []

    return guess


@dataclass(frozen=True)
class NgramTable:
    """Three tokens → the token that most often follows them in the training answers."""

    next_of: dict[tuple[int, int, int], int]
    tokens: int
    """Training tokens it was counted from, prompts included."""

    def guess(self, tokens: Sequence[int], count: int) -> Guess:
        """`count` drafts, each from the three tokens before it; fewer when three tokens were never seen."""

        def guess(n: int) -> list[int]:
            context, drafts = list(tokens[max(0, n - 3) : n]), []
            while len(drafts) < count and len(context) == 3:
                token = self.next_of.get((context[0], context[1], context[2]))
                if token is None:
                    break
                drafts.append(token)
                context = [*context[1:], token]
            return drafts

        return guess


def ngram_table(documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> NgramTable:
    """Table from (ids [n], supervised [n] bool) of training documents: counted are supervised tokens and the
    three before them in the document. Of equally frequent tokens the lowest id wins.
    """
    grams, tokens = [], sum(len(ids) for ids, _ in documents)
    for ids, supervised in documents:
        if len(ids) > 3:
            windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, dtype=np.int64), 4)
            grams.append(windows[np.asarray(supervised, dtype=bool)[3:]])
    if not grams or not sum(map(len, grams)):
        return NgramTable({}, tokens)
    abcd = np.concatenate(grams)
    low, high = abcd[:, 2] << 32 | abcd[:, 3], abcd[:, 0] << 32 | abcd[:, 1]
    order = np.lexsort((low, high))
    low, high = low[order], high[order]
    first = np.flatnonzero(np.r_[True, (low[1:] != low[:-1]) | (high[1:] != high[:-1])])
    counts = np.diff(np.r_[first, len(low)])
    low, high = low[first], high[first]
    order = np.lexsort(
        (low & 0xFFFFFFFF, -counts, low >> 32, high)
    )  # by context; the most frequent next, lowest id, first
    low, high = low[order], high[order]
    best = np.r_[True, (low[1:] >> 32 != low[:-1] >> 32) | (high[1:] != high[:-1])]
    columns = (x[best] for x in (high >> 32, high & 0xFFFFFFFF, low >> 32, low & 0xFFFFFFFF))
    next_of = {(a, b, c): d for a, b, c, d in zip(*(x.tolist() for x in columns), strict=True)}
    return NgramTable(next_of, tokens)


def walk_lookup(prompt_ids: Sequence[int], answer: Sequence[int], block_size: int) -> list[int]:
    """Tokens per pass of prompt-lookup."""
    tokens = [*prompt_ids, *answer]
    return walk(prompt_ids, answer, block_size, lookup_guess(tokens, block_size - 1))


def walk_ngram(
    prompt_ids: Sequence[int], answer: Sequence[int], block_size: int, table: NgramTable
) -> list[int]:
    """Tokens per pass of the n-gram table."""
    tokens = [*prompt_ids, *answer]
    return walk(prompt_ids, answer, block_size, table.guess(tokens, block_size - 1))


def distinct_4gram_ratio(answers: Sequence[Sequence[int]]) -> float | None:
    """Different 4-grams / all 4-grams, counted within each answer; None when no answer has four tokens.

    About 0.9 and more in ordinary text; a target stuck in a loop falls far below.
    """
    total = distinct = 0
    for answer in answers:
        grams = [tuple(answer[i : i + 4]) for i in range(len(answer) - 3)]
        total += len(grams)
        distinct += len(set(grams))
    return distinct / total if total else None


@dataclass(frozen=True)
class Tau:
    """Acceptance length over requests: the mean of (tokens produced / passes), with a 95 % bootstrap
    interval.
    """

    mean: float
    low: float
    high: float
    requests: int
    """Requests in the mean; those that the prefill's token ended have no τ."""


def tau_of(produced_by_request: Sequence[Sequence[int]], seed: int = 0, resamples: int = 2000) -> Tau | None:
    """τ over requests, from the tokens each pass of each request produced. None when no request made a
    pass.
    """
    taus = np.array([sum(p) / len(p) for p in produced_by_request if p])
    if not len(taus):
        return None
    draws = np.random.default_rng(seed).integers(0, len(taus), (resamples, len(taus)))
    low, high = np.quantile(taus[draws].mean(axis=1), (0.025, 0.975))
    return Tau(float(taus.mean()), float(low), float(high), len(taus))
