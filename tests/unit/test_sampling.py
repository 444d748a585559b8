"""Sampled speculative decoding has the target's own distribution, and the test that shows it can fail."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import Tensor

from slipstream.decoding import speculative
from slipstream.decoding.speculative import (
    accept_sampled,
    generate_speculative,
)
from slipstream.models.drafter import Drafter
from slipstream.models.target import Target
from tests.decoding import drafter_of
from tests.tiny import tiny_target


@pytest.fixture(autouse=True)
def _one_thread():
    """Passes this small cost ten times more on threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


TEMPERATURE = 0.8
SMALL = 7


@functools.cache
def small() -> tuple[Target, Drafter]:
    target = Target(tiny_target("qwen3", vocab_size=SMALL, layers=2), (0,))
    return target, drafter_of(target, block_size=4, layers=1)


@functools.cache
def exact_law(prompt: tuple[int, ...]) -> Tensor:
    """P(first three new tokens) [V, V, V] at T = 0.8, by transformers' own logits of every prefix."""
    target, _ = small()
    pairs = torch.cartesian_prod(torch.arange(SMALL), torch.arange(SMALL))
    ids = torch.cat([torch.tensor(prompt).expand(len(pairs), -1), pairs], dim=1)
    logits = target.model(ids).logits[:, len(prompt) - 1 :].double() / TEMPERATURE
    p = logits.softmax(-1).view(SMALL, SMALL, 3, SMALL)
    return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


def chi_square_p_value(counts: Counter, law: Tensor, draws: int) -> float:
    """P(a χ² this large | the law); cells expected fewer than five times are thrown together."""
    expected = (law * draws).flatten()
    seen = torch.zeros_like(expected)
    for cell, n in counts.items():
        seen[(cell[0] * SMALL + cell[1]) * SMALL + cell[2]] = n
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None].clamp(min=1e-9)])
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    assert len(expected) > 20
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def sample_first_three(draws: int, seed: int) -> tuple[Counter, list[int]]:
    """Counts of the first three new tokens, and right drafts by slot, of `draws` decodings of five tokens."""
    target, drafter = small()
    generator = torch.Generator().manual_seed(seed)
    prompt = list(range(SMALL))
    counts, accepted = Counter(), [0, 0, 0]
    for _ in range(draws):
        decoded = generate_speculative(target, drafter, prompt, 5, TEMPERATURE, set(), None, generator)
        counts[tuple(decoded.tokens[:3])] += 1
        accepted = [a + b for a, b in zip(accepted, decoded.slots_accepted, strict=True)]
    return counts, accepted


def test_sampling_follows_the_targets_distribution():
    counts, accepted = sample_first_three(2000, seed=0)
    assert chi_square_p_value(counts, exact_law(tuple(range(SMALL))), 2000) > 1e-3
    assert min(accepted) > 50  # every slot had its say


def accepts_too_much(ids_k, q_kV, p_nV, generator):
    """Wrong on purpose: u·q < 1.5·p."""
    return accept_sampled(ids_k, q_kV, 1.5 * p_nV, generator)


def replaces_from_p(ids_k, q_kV, p_nV, generator):
    """Wrong on purpose: a refused draft is replaced by a draw from p, not from max(p − q, 0)."""
    tokens = accept_sampled(ids_k, q_kV, p_nV, generator)
    return [*tokens[:-1], int(torch.multinomial(p_nV[len(tokens) - 1], 1, generator=generator))]


def shifts_the_rows(ids_k, q_kV, p_nV, generator):
    """Wrong on purpose: every draft is judged by its neighbour's row."""
    return accept_sampled(ids_k, q_kV, p_nV.roll(1, 0), generator)


@pytest.mark.parametrize("wrong", [accepts_too_much, replaces_from_p, shifts_the_rows])
def test_a_wrong_rule_of_acceptance_is_caught(wrong, monkeypatch):
    monkeypatch.setattr(speculative, "accept_sampled", wrong)
    counts, _ = sample_first_three(1000, seed=0)
    assert chi_square_p_value(counts, exact_law(tuple(range(SMALL))), 1000) < 1e-6


def test_a_draft_is_always_right_when_drafter_and_target_agree():
    p = torch.softmax(torch.randn(4, 9, generator=torch.Generator().manual_seed(0)), -1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        ids = torch.multinomial(p[:3], 1, generator=generator)[:, 0]
        assert accept_sampled(ids, p[:3], p, generator)[:3] == ids.tolist()


def test_a_draft_that_the_target_never_says_is_never_right():
    q = torch.tensor([[0.5, 0.5, 0.0]])
    p = torch.tensor([[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]])
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        tokens = accept_sampled(torch.tensor([0]), q, p, generator)
        assert tokens == [2]  # p − q leaves only the third


def test_sampling_is_a_function_of_the_seed():
    target, drafter = small()
    prompt = list(range(SMALL))

    def tokens(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return generate_speculative(target, drafter, prompt, 30, TEMPERATURE, set(), None, generator).tokens

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)
