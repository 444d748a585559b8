"""Packed = unpacked for the target: each document of a row gets the taps and positions that it has alone."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.data.pack import Row
from slipstream.models.families import TABLE
from slipstream.models.selfcheck import self_check
from slipstream.models.target import Target
from tests.tiny import FAMILIES, random_row, tiny_target
from tests.training import DEVICE

TAPS = (0, 2, 4)
ROW = 64
PACKED = ("qwen3", "llama", "gemma3")
MODES = [(family, "packed") for family in PACKED] + [(family, "unpacked") for family in FAMILIES]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def target_of(family: str) -> Target:
    return Target(tiny_target(family).to(DEVICE), TAPS)


def alone(target: Target, document: Tensor) -> Tensor:
    """Taps of a document by transformers alone, without a line of ours."""
    states = target.model(
        input_ids=document[None].to(DEVICE), output_hidden_states=True, use_cache=False
    ).hidden_states
    return torch.cat([states[i + 1][0] for i in TAPS], dim=-1)


def assert_like_each_alone(target: Target, row: Row) -> None:
    taps_SC = target.taps(row)
    for start, end in row.spans():
        torch.testing.assert_close(
            taps_SC[start:end], alone(target, row.input_ids[start:end]), rtol=1e-4, atol=1e-4
        )
    assert not taps_SC[row.documents < 0].any()


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8).filter(lambda ns: sum(ns) <= ROW)


@pytest.mark.parametrize(("family", "isolation"), MODES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(lengths=lengths, seed=st.integers(0, 99))
def test_documents_of_a_row_have_the_taps_they_have_alone(family, isolation, lengths, seed):
    target = target_of(family)
    target.isolation = isolation
    assert_like_each_alone(target, random_row(tuple(lengths), ROW, seed=seed))


@pytest.mark.parametrize(("family", "isolation"), MODES)
@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (ROW,), (1, ROW - 1), (ROW - 1, 1), (20, 20, 20)])
def test_one_token_documents_and_documents_that_fill_the_row_too(family, isolation, lengths):
    target = target_of(family)
    target.isolation = isolation
    assert_like_each_alone(target, random_row(lengths, ROW))


@pytest.mark.parametrize(("family", "isolation"), MODES)
def test_another_document_s_tokens_change_nothing(family, isolation):
    target = target_of(family)
    target.isolation = isolation
    row = random_row((20, 24, 15), ROW)
    before = target.taps(row)
    for changed, (start, end) in enumerate(row.spans()):
        row.input_ids[start:end] = (row.input_ids[start:end] + 7) % 128
        after = target.taps(row)
        for other, (s, e) in enumerate(row.spans()):
            same = torch.allclose(before[s:e], after[s:e], rtol=1e-4, atol=1e-4)
            assert same == (other != changed)
        before = after


@pytest.mark.parametrize(("family", "isolation"), MODES)
def test_the_positions_given_to_the_rotary_embedding_restart_in_every_document(family, isolation):
    """Rotary attention is relative: positions that run on would give the same outputs."""
    target = target_of(family)
    target.isolation = isolation
    seen: list[Tensor] = []

    def hook(_module, args: tuple, kwargs: dict) -> None:
        seen.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1])

    handle = target.decoder.rotary_emb.register_forward_pre_hook(hook, with_kwargs=True)
    row = random_row((20, 24, 15), ROW)
    target.taps(row)
    handle.remove()
    expected = [list(range(n)) for n in (20, 24, 15)]
    if isolation == "packed":
        assert all(p.flatten().tolist() == [*expected[0], *expected[1], *expected[2]] for p in seen)
    else:
        assert all(
            list(range(p.shape[-1])) == each.tolist() for p in seen for each in p.reshape(-1, p.shape[-1])
        )
    assert seen


def test_restarted_positions_alone_leak_through_linear_attention_and_the_self_check_refuses_them():
    """What a trainer would do that packs a hybrid like any other model: one pass, positions restarted."""
    target = Target(tiny_target("hybrid").to(DEVICE), TAPS)
    target.isolation = "packed"
    target._masks = lambda row, end: None
    row = random_row((30, 30), ROW)
    leaked = target.taps(row)
    difference = (leaked[30:60] - alone(target, row.input_ids[30:60])).abs().max()
    assert difference > 0.1
    torch.testing.assert_close(leaked[:30], alone(target, row.input_ids[:30]), rtol=1e-4, atol=1e-4)
    assert [c.name for c in self_check(target, row) if not c.ok] == ["documents isolated"]


def test_every_family_packed_in_the_table_is_packed_here():
    packed = {model_type for model_type, family in TABLE.items() if family.isolation == "packed"}
    assert packed == {target_of(family).model_type for family in PACKED}
