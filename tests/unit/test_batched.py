"""Batched decoding says what decoding alone says, whatever the batch, and draws by the distribution."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.config import UserError
from slipstream.decoding import batched, columns
from slipstream.decoding.batched import Batch, Wish, draw
from slipstream.models.target import Target
from tests.tiny import EOS, tiny_target

LENGTHS = (3, 17, 5, 5, 40, 9, 9, 1, 23, 12, 5)


def prompts(seed: int = 0) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(3, 131) for _ in range(n)] for n in LENGTHS]


def target_of(family: str) -> Target:
    return Target(tiny_target(family), (1,), "stock")


def alone(target: Target, ids: list[int], max_new: int, stops: frozenset[int]) -> list[int]:
    """transformers' own greedy decoding of one prompt."""
    made = target.model.generate(
        torch.tensor([ids]), max_new_tokens=max_new, do_sample=False, eos_token_id=list(stops), pad_token_id=0
    )
    return made[0, len(ids) :].tolist()


def decoded(target: Target, wishes: list[Wish], rows: int) -> dict[int, list[int]]:
    """What a batch of so many rows makes of all wishes, each row refilled as soon as it is free."""
    batch, waiting, out = Batch(target, rows), list(wishes), {}
    for _ in range(1000):
        batch.admit([waiting.pop(0) for _ in range(min(batch.free, len(waiting)))])
        batch.decode(batched.PASSES)
        for wish, tokens in batch.harvest():
            assert wish.number not in out
            out[wish.number] = tokens
        if len(out) == len(wishes):
            return out
    raise AssertionError("never done")


@pytest.mark.parametrize("family", ["qwen3", "llama", "hybrid", "gemma3"])
def test_greedy_equals_transformers_generate_for_every_prompt_in_any_batch(family, monkeypatch):
    monkeypatch.setattr(columns, "COLUMNS", 16)
    monkeypatch.setattr(batched, "COLUMNS", 16)  # the cache grows and its columns move many times
    monkeypatch.setitem(batched.PREFILL_TOKENS, "cpu", 64)
    target = target_of(family)
    stops = frozenset({EOS, *range(20, 24)})
    wishes = [Wish(i, ids, 7 + 5 * (i % 5), stops) for i, ids in enumerate(prompts())]
    wanted = {w.number: alone(target, w.ids, w.max_new, stops) for w in wishes}
    assert {tokens[-1] in stops for tokens in wanted.values()} == {True, False}
    for rows in (1, 3, 11):
        assert decoded(target, wishes, rows) == wanted, rows


def test_a_seed_draws_the_same_answer_in_any_batch_and_another_seed_another():
    target = target_of("qwen3")
    wishes = [Wish(i, ids, 12, frozenset(), 0.8, 0.9, 100 + i) for i, ids in enumerate(prompts())]
    first, second = decoded(target, wishes, 3), decoded(target, wishes[::-1], 11)
    assert first == second
    others = [Wish(w.number, w.ids, 12, frozenset(), 0.8, 0.9, w.seed + 1000) for w in wishes]
    assert sum(decoded(target, others, 3)[i] != first[i] for i in first) >= 9


def test_greedy_and_sampled_rows_share_a_batch():
    target = target_of("llama")
    wishes = [Wish(i, ids, 9, frozenset(), 0.9 * (i % 2), 1.0, i) for i, ids in enumerate(prompts())]
    together = decoded(target, wishes, 4)
    for wish in wishes:
        assert together[wish.number] == decoded(target, [wish], 1)[wish.number]
        if wish.temperature == 0:
            assert together[wish.number] == alone(target, wish.ids, 9, frozenset({EOS + 500}))


def test_draws_follow_the_distribution_and_never_leave_the_nucleus():
    logits = torch.tensor([2.0, 0.5, 1.0, -1.0, 0.0])
    n = 20000
    uniform = (torch.arange(n) + 0.5) / n
    for temperature, top_p in ((1.0, 1.0), (0.7, 1.0), (1.0, 0.8), (1.3, 0.5)):
        probs = torch.softmax(logits / temperature, -1)
        order = probs.argsort(descending=True)
        kept = order[: int((probs[order].cumsum(0) - probs[order] < top_p).sum())]
        wanted = torch.zeros(5)
        wanted[kept] = probs[kept] / probs[kept].sum()
        tokens = draw(logits.repeat(n, 1), *(torch.full((n,), x) for x in (temperature, top_p)), uniform)
        assert torch.allclose(torch.bincount(tokens, minlength=5) / n, wanted, atol=2e-4)


def test_the_most_likely_token_is_always_in_the_nucleus():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(64)
    for uniform in (0.0, 0.9999999):
        assert torch.equal(draw(logits, ones, ones * 1e-9, ones * uniform), logits.argmax(-1))


def test_a_target_with_layers_of_an_unknown_cache_is_refused(monkeypatch):
    target = target_of("llama")

    class Strange:
        pass

    cache = target.new_cache()
    cache.layers[2] = Strange()
    monkeypatch.setattr(target, "new_cache", lambda: cache)
    with pytest.raises(UserError, match="llama has layers with a Strange"):
        Batch(target, 2)
