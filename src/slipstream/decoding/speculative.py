"""Decoding one request, plainly and speculatively, with the same output distribution.

Lives here: the two loops and the rule of acceptance. Not here: the target's cache and its way back
(rollback.py), what prompts are read and what is made of the counts (evaluate.py).

Shapes: n tokens of a pass · B block size · k drafts of a block (at most B−1) · V vocabulary · T taps · H
hidden size.

A pass reads the anchor (the newest token, already chosen) and k drafts; the target's logits behind each of
them judge the next:
    T = 0:  draft i is right iff it is the argmax of row i
    T > 0:  draft i is right iff u·q_i(draft) < p_i(draft), u uniform in [0, 1); the first wrong one is
            replaced by a draw from max(p_i − q_i, 0), normalised (arXiv 2211.17192, algorithm 1). The
            output's distribution is p, exactly.
A wrong draft ends the block; when none is wrong the last row gives a token for free. Either way a pass with a
right drafts produces a+1 tokens. τ of a request = tokens produced / passes: the prefill and its token are not
counted, a short last pass is.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.config import UserError
from slipstream.decoding.rollback import TargetReader
from slipstream.models.drafter import Drafter
from slipstream.models.target import Target


@dataclass(frozen=True)
class Decoded:
    """One decoded request."""

    tokens: list[int]
    """New tokens, the stop token included."""
    produced: list[int]
    """Tokens each target pass after the prefill produced; their sum is len(tokens) − 1."""
    slots_reached: list[int]
    """At k−1: passes whose draft in slot k was judged, all drafts before it being right (k from 1 to B−1)."""
    slots_accepted: list[int]
    """At k−1: those of them whose draft in slot k was right."""
    catch_up_passes: int
    """Target passes that produced nothing: a hybrid target reading accepted tokens again (rollback.py). Not
    in τ, but in the time.
    """
    prefill_seconds: float
    decode_seconds: float

    @property
    def passes(self) -> int:
        """Target passes after the prefill."""
        return len(self.produced)

    @property
    def tau(self) -> float | None:
        """Acceptance length, bonus included; None when the prefill's token ended the request."""
        return sum(self.produced) / len(self.produced) if self.produced else None


@dataclass(frozen=True)
class Drafts:
    """Drafts of one block, on the target's device."""

    ids_k: Tensor
    probs_kV: Tensor | None
    """fp32 distribution each draft was drawn from; None when T = 0."""


class Proposer(Protocol):
    """Whoever drafts. It is told the taps of every token the target has kept, in order."""

    block_size: int

    def extend(self, taps_nTH: Tensor) -> None: ...

    def propose(self, tokens: list[int], count: int) -> Drafts:
        """`count` drafts (at most B−1, maybe 0) to follow `tokens`, the new tokens so far; the last is the
        anchor.
        """
        ...


class DrafterProposer:
    """A DFlash drafter for one request of at most `max_tokens` tokens, prompt included."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        max_tokens: int,
        block_size: int,
        temperature: float,
        generator: torch.Generator | None,
    ):
        config = drafter.config
        self.block_size = block_size
        self.target, self.drafter = target, drafter
        self.temperature, self.generator = temperature, generator
        self.context = drafter.new_context(max_tokens)
        self.scale = config.input_embedding_scale
        self.embeds_BH = (target.embedding_VH[config.mask_token_id] * self.scale).repeat(block_size, 1)

    def extend(self, taps_nTH: Tensor) -> None:
        self.drafter.extend_context(self.context, taps_nTH)

    def propose(self, tokens: list[int], count: int) -> Drafts:
        if count == 0:
            return Drafts(torch.empty(0, dtype=torch.int64, device=self.target.device), None)
        self.embeds_BH[0] = self.target.embedding_VH[tokens[-1]] * self.scale
        # The block is always whole, as in training; near the end fewer of its slots are used.
        hidden_BH = self.drafter.draft(self.context, self.embeds_BH)
        logits_kV = self.target.head.logits(hidden_BH[1 : count + 1].to(self.target.dtype))
        if self.temperature == 0:
            return Drafts(logits_kV.argmax(-1), None)
        probs_kV = distribution(logits_kV, self.temperature)
        return Drafts(torch.multinomial(probs_kV, 1, generator=self.generator)[:, 0], probs_kV)


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / T) in fp32, over the last dimension; T > 0."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def choose(logits_V: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """The next token of plain decoding."""
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(distribution(logits_V, temperature), 1, generator=generator))


def accept_greedy(ids_k: Tensor, logits_nV: Tensor) -> list[int]:
    """Right drafts and the target's own next token, from logits behind the anchor and the k drafts (n =
    k+1).
    """
    both = torch.cat([ids_k, logits_nV.argmax(-1)]).tolist()  # the pass's one wait for the device
    k = len(ids_k)
    drafts, choices = both[:k], both[k:]
    right = next((i for i in range(k) if drafts[i] != choices[i]), k)
    return choices[: right + 1]


def accept_sampled(ids_k: Tensor, q_kV: Tensor, p_nV: Tensor, generator: torch.Generator | None) -> list[int]:
    """Right drafts and one token more, by rejection sampling; q and p are fp32 distributions, n = k+1."""
    k = len(ids_k)
    rows = torch.arange(k, device=ids_k.device)
    u_k = torch.rand(k, device=ids_k.device, generator=generator)
    right_k = u_k * q_kV[rows, ids_k] < p_nV[rows, ids_k]
    right = right_k.cumprod(0).sum()  # stays on the device: the pass waits once, at the end
    p_V = p_nV[right]
    # Behind the last draft there is nothing to subtract: q = 0 leaves p.
    q_V = torch.cat([q_kV, q_kV.new_zeros(1, q_kV.shape[1])])[right]
    residual_V = (p_V - q_V).clamp(min=0)
    # p = q up to rounding refuses with probability of a rounding error; then any draw from p is right.
    residual_V = torch.where(residual_V.sum() > 0, residual_V, p_V)
    token = torch.multinomial(residual_V, 1, generator=generator)
    *drafts, last, count = torch.cat([ids_k, token, right[None]]).tolist()
    return [*drafts[:count], last]


def cut_at_stop(tokens: list[int], stop_ids: Collection[int]) -> list[int]:
    """Tokens up to the first stop token, included."""
    return tokens[: next((i + 1 for i, t in enumerate(tokens) if t in stop_ids), len(tokens))]


def count_slots(reached: list[int], accepted: list[int], drafts: int, right: int, produced: int) -> None:
    """Adds one pass's verdicts. Behind a stop token (`produced` < right + 1) nothing was judged."""
    for k in range(min(right, produced)):
        reached[k] += 1
        accepted[k] += 1
    if right < drafts and produced > right:
        reached[right] += 1


@torch.inference_mode()
def generate_plain(
    target: Target,
    prompt_ids: list[int],
    max_new: int,
    temperature: float,
    stop_ids: Collection[int],
    generator: torch.Generator | None = None,
) -> Decoded:
    """One token a pass. `generator` lives on the target's device and is used for T > 0 only."""
    start = time.perf_counter()
    cache = target.new_cache()
    logits_nV, _ = target.decode_step(_tensor(prompt_ids, target), cache, 0, last=1)
    tokens = [choose(logits_nV[-1], temperature, generator)]
    prefilled = time.perf_counter()
    while len(tokens) < max_new and tokens[-1] not in stop_ids:
        position = len(prompt_ids) + len(tokens) - 1
        logits_nV, _ = target.decode_step(_tensor(tokens[-1:], target), cache, position)
        tokens.append(choose(logits_nV[-1], temperature, generator))
    seconds = time.perf_counter() - prefilled
    return Decoded(tokens, [1] * (len(tokens) - 1), [], [], 0, prefilled - start, seconds)


def generate_speculative(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    max_new: int,
    temperature: float,
    stop_ids: Collection[int],
    block_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Decodes with a drafter. `block_size` defaults to the trained one and cannot exceed it (`UserError`)."""
    trained = drafter.config.block_size
    size = trained if block_size is None else block_size
    if not 2 <= size <= trained:
        raise UserError(f"block size {size}: this drafter was trained for 2 to {trained}: mend --block-size")
    with torch.inference_mode():
        room = len(prompt_ids) + max_new
        proposer = DrafterProposer(target, drafter, room, size, temperature, generator)
        return speculate(target, proposer, prompt_ids, max_new, temperature, stop_ids, generator)


@torch.inference_mode()
def speculate(
    target: Target,
    proposer: Proposer,
    prompt_ids: list[int],
    max_new: int,
    temperature: float,
    stop_ids: Collection[int],
    generator: torch.Generator | None = None,
) -> Decoded:
    """The speculative loop with any proposer; `generate_speculative` is the usual entrance."""
    assert len(prompt_ids) >= 1
    assert max_new >= 1
    assert temperature >= 0
    start = time.perf_counter()
    reader = TargetReader(target)
    logits_V, taps = reader.prefill(_tensor(prompt_ids, target))
    tokens = [choose(logits_V, temperature, generator)]
    proposer.extend(taps)
    prefilled = time.perf_counter()
    counts: list[int] = []
    reached, accepted = [0] * (proposer.block_size - 1), [0] * (proposer.block_size - 1)
    while len(tokens) < max_new and tokens[-1] not in stop_ids:
        drafts = proposer.propose(tokens, min(proposer.block_size, max_new - len(tokens)) - 1)
        logits_nV, taps = reader.read(torch.cat([_tensor(tokens[-1:], target), drafts.ids_k]))
        if drafts.probs_kV is not None:
            p_nV = distribution(logits_nV, temperature)
            found = accept_sampled(drafts.ids_k, drafts.probs_kV, p_nV, generator)
        elif temperature == 0:
            found = accept_greedy(drafts.ids_k, logits_nV)
        else:  # the last token of the room: nothing was drafted
            assert len(drafts.ids_k) == 0
            found = [choose(logits_nV[0], temperature, generator)]
        produced = cut_at_stop(found, stop_ids)
        count_slots(reached, accepted, len(drafts.ids_k), len(found) - 1, len(produced))
        counts.append(len(produced))
        tokens += produced
        if len(tokens) < max_new and tokens[-1] not in stop_ids:
            # The cache ends with the anchor and the right drafts; the newest token is the next pass's anchor.
            reader.keep(len(produced))
            proposer.extend(taps[: len(produced)])
    seconds = time.perf_counter() - prefilled
    return Decoded(tokens, counts, reached, accepted, reader.catch_up_passes, prefilled - start, seconds)


def _tensor(ids: list[int], target: Target) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=target.device)
