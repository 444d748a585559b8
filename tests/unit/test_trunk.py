"""The fused pass gives what stock layers give each document alone; what would break it is caught at start."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from slipstream.config import UserError
from slipstream.data.pack import Row
from slipstream.models import documents, fused, trunk
from slipstream.models.documents import CHUNK, Layout
from slipstream.models.families import TABLE, TrunkFacts
from slipstream.models.selfcheck import FP8_LIMIT, self_check
from slipstream.models.target import Target
from tests.tiny import random_row, tiny_config, tiny_target

TAPS = (0, 2, 4)
FAMILIES = ("llama", "qwen3", "hybrid")
CPU = torch.device("cpu")


@functools.cache
def fused_target(family: str, fp8: bool = False) -> Target:
    return Target(tiny_target(family), TAPS, "fused", fp8)


@functools.cache
def stock_model(family: str):
    return tiny_target(family)


def alone(model, document: Tensor) -> Tensor:
    """Taps of a document by transformers alone."""
    states = model(input_ids=document[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i + 1][0] for i in TAPS], dim=-1)


def worst_token(taps_SC: Tensor, model, row: Row) -> float:
    """Largest difference of a token's taps to those its document has alone, relative to their length."""
    worst = 0.0
    for start, end in row.spans():
        reference = alone(model, row.input_ids[start:end])
        errors = (taps_SC[start:end] - reference).norm(dim=-1) / reference.norm(dim=-1)
        worst = max(worst, float(errors.max()))
    return worst


def test_the_tiny_targets_have_grouped_heads_partial_rotary_and_offset_norms():
    config = tiny_config("hybrid").to_dict()
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"]
    assert config["linear_num_value_heads"] == 2 * config["linear_num_key_heads"]
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert {"linear_attention", "full_attention"} == set(config["layer_types"][: TAPS[-1] + 1])
    norms = [p for name, p in stock_model("hybrid").named_parameters() if "norm.weight" in name]
    assert all(p.std() > 0.1 for p in norms)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ((40,), 40),
        ((30,), 48),
        ((2,), 2),
        ((1,), 64),
        ((21, 27), 48),
        ((3, 20, 1, 30), 64),
        ((1, 2, 3, 90), 97),
    ],
)
def test_fused_taps_are_those_of_each_document_alone_and_zero_at_padding(family, lengths, size):
    row = random_row(lengths, size, seed=size)
    taps_SC = fused_target(family).taps(row)
    assert worst_token(taps_SC, stock_model(family), row) <= 1e-5
    assert not taps_SC[row.documents < 0].any()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_of_one_document_moves_no_bit_of_the_others(family, fp8):
    row, target = random_row((20, 3, 25), 64), fused_target(family, fp8)
    before = target.taps(row)
    for changed, (start, end) in enumerate(row.spans()):
        row.input_ids[end - 1] = (row.input_ids[end - 1] + 7) % 128
        row.input_ids[start] = (row.input_ids[start] + 7) % 128
        after = target.taps(row)
        for other, (s, e) in enumerate(row.spans()):
            assert torch.equal(before[s:e], after[s:e]) == (other != changed)
        before = after


def test_sliding_layers_see_their_window_and_no_other_document():
    config = tiny_config("qwen3").to_dict()
    kinds = ["sliding_attention", "full_attention"] * 3
    config = Qwen3Config(**{**config, "use_sliding_window": True, "sliding_window": 5, "layer_types": kinds})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    row = random_row((20, 3, 25), 64)
    reference = [alone(model, row.input_ids[start:end]) for start, end in row.spans()]
    target = Target(model, TAPS, "fused")
    windows = [isinstance(m.mixer, trunk.TrunkAttention) and m.mixer.window for m in target.trunk.layers]
    assert windows[:2] == [5, None]
    taps_SC = target.taps(row)
    for (start, end), expected in zip(row.spans(), reference, strict=True):
        assert (taps_SC[start:end] - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_hold_nothing_twice_and_leave_the_stock_model_as_it_was(family):
    model, row = tiny_target(family), random_row((30,), 30)

    def stored() -> int:
        return sum(
            {
                p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
            }.values()
        )

    before, logits = stored(), model(input_ids=row.input_ids[None]).logits
    target = Target(model, TAPS, "fused")
    assert target.trunk is not None
    owned = {
        w.plain_OI.untyped_storage().data_ptr() for layer in target.trunk.layers for w in layer.weights()
    }
    assert owned <= {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert stored() == before
    assert torch.equal(model(input_ids=row.input_ids[None]).logits, logits)
    ours, taps_nC = target.decode_step(row.input_ids, target.new_cache(), 0)
    assert torch.allclose(ours, logits[0], rtol=1e-4, atol=1e-4)
    assert torch.allclose(taps_nC, target.taps(row), rtol=1e-4, atol=1e-4)


def test_no_layer_after_the_last_tap_is_held_or_run():
    target = fused_target("hybrid")
    assert len(target.trunk.layers) == TAPS[-1] + 1 < target.num_layers


def test_the_layout_names_every_chunk_of_every_document_and_padding_is_a_document():
    layout = Layout.of(random_row((1, CHUNK, CHUNK + 1, 2 * CHUNK), 5 * CHUNK), CPU)
    assert layout.starts.tolist() == [0, 1, CHUNK + 1, 2 * CHUNK + 2, 4 * CHUNK + 2, 5 * CHUNK]
    assert layout.chunks_N2.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [4, 0]]
    assert layout.longest == 2 * CHUNK
    assert Layout.of(random_row((), 8), CPU).spans == [(0, 8)]
    assert not fused_target("hybrid").taps(random_row((), 8)).any()


def test_the_recurrence_forgets_by_its_decay_and_overwrites_by_its_key():
    """One head of width 1: M₁ = β₁k₁v₁, M₂ = e^g₂ M₁ + β₂k₂(v₂ − e^g₂ M₁ k₂), out = M q."""
    q, k = torch.tensor([[1.0], [2.0]])[:, None], torch.tensor([[1.0], [0.5]])[:, None]
    v, g, beta = (
        torch.tensor([[4.0], [6.0]])[:, None],
        torch.tensor([[0.0], [-1.0]]),
        torch.tensor([[0.5], [0.25]]),
    )
    out = documents.delta_by_document(q, k, v, g, beta, Layout.of(random_row((2,), 2), CPU))
    first = 0.5 * 1 * 4
    kept = first * torch.tensor(-1.0).exp()
    second = kept + 0.25 * 0.5 * (6 - kept * 0.5)
    assert torch.allclose(out.flatten(), torch.stack((torch.tensor(first), second * 2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_fused_target_passes_every_self_check(family):
    target = fused_target(family)
    for sample in (random_row((30, 40, 20), 100), random_row((12,), 12)):
        checks = self_check(target, sample)
        assert all(check.ok for check in checks), checks
    assert any(" fused, " in check.detail for check in checks)


def failed(target: Target) -> set[str]:
    return {check.name for check in self_check(target, random_row((30, 40, 20), 100)) if not check.ok}


def test_a_convolution_that_runs_over_document_starts_is_caught(monkeypatch):
    sound = fused.causal_conv
    monkeypatch.setattr(fused, "causal_conv", lambda x, w, p: sound(x, w, torch.arange(len(p))))
    assert failed(fused_target("hybrid")) == {"documents isolated"}


@pytest.mark.parametrize(
    ("family", "operation"), [("hybrid", "delta_by_document"), ("qwen3", "attend_by_document")]
)
def test_an_operation_that_ignores_where_documents_start_is_caught(family, operation, monkeypatch):
    sound = getattr(documents, operation)

    def leaking(*args):
        layout = next(a for a in args if isinstance(a, Layout))
        end = layout.spans[-1][1]
        whole = replace(layout, spans=[(0, end)])
        return sound(*(whole if a is layout else a for a in args))

    monkeypatch.setattr(trunk, operation, leaking)
    assert failed(fused_target(family)) == {"documents isolated"}


def test_positions_that_run_on_are_caught(monkeypatch):
    sound = Layout.of
    run_on = classmethod(lambda cls, row, device: replace(sound(row, device), positions_S=torch.arange(100)))
    monkeypatch.setattr(Layout, "of", run_on)
    assert "positions restart" in failed(fused_target("qwen3"))


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("hybrid", TrunkFacts(norm_offset=0.0, head_norm=True, query_gate=True, position_axes=3)),
        ("qwen3", TrunkFacts(norm_offset=1.0, head_norm=True)),
        ("qwen3", TrunkFacts(head_norm=False)),
    ],
)
def test_wrong_facts_of_a_family_are_caught(family, wrong, monkeypatch):
    name = {"hybrid": "qwen3_5_text", "qwen3": "qwen3"}[family]
    monkeypatch.setitem(TABLE, name, replace(TABLE[name], trunk=wrong))
    assert "taps are layer outputs" in failed(Target(tiny_target(family), TAPS, "fused"))


def test_a_cpu_reads_unpacked_unless_fused_is_asked_for():
    target = Target(tiny_target("hybrid"), TAPS)
    assert (target.isolation, target.trunk, target.why_stock) == ("unpacked", None, None)


def test_a_fused_pass_that_is_impossible_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"--target-pass fused: .* gemma3_text is not among the families"):
        Target(tiny_target("gemma3"), TAPS, "fused")
    with pytest.raises(UserError, match=r"--target-fp8: .* leave out --target-pass stock"):
        Target(tiny_target("llama"), TAPS, "stock", fp8=True)
    plain = tiny_config("llama").to_dict()

    def refused(**changes: object) -> Target:
        config = LlamaConfig(**{**plain, **changes})
        return Target(AutoModelForCausalLM.from_config(config), TAPS, "fused")

    with pytest.raises(UserError, match=r"self_attn.q_proj is no plain projection without bias"):
        refused(attention_bias=True)
    with pytest.raises(UserError, match="gelu are unknown to it"):
        refused(hidden_act="gelu")
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match="type dynamic change with the longest document"):
        refused(rope_parameters=rope)
    odd = AutoModelForCausalLM.from_config(LlamaConfig(**{**plain, "intermediate_size": 120}))
    with pytest.raises(
        UserError, match=r"--target-fp8: .* multiples of 16, layers.0.mlp.gate_proj is \(120, 64\)"
    ):
        Target(odd, TAPS, fp8=True)


def test_a_gpu_needs_16_bits_and_its_kernels_and_a_cpu_nothing():
    facts = TABLE["qwen3_5_text"].trunk

    def why(dtype: torch.dtype, on_gpu: bool, fla: bool) -> str | None:
        model = tiny_target("hybrid", dtype=dtype)
        config, decoder = model.config.to_dict(), model.get_decoder()
        return trunk.why_not_fused(facts, config, decoder, dtype, False, on_gpu, fla)

    assert "16-bit heads" in str(why(torch.float32, True, True))
    expected = "linear attention needs flash-linear-attention: pip install 'slipstream[gpu]'"
    assert why(torch.bfloat16, True, False) == expected
    assert why(torch.bfloat16, True, True) is None
    assert why(torch.float32, False, False) is None


def calm_target(family: str) -> Target:
    """Weights of a size that leaves attention flat, as rounding likes it."""
    model = tiny_target(family)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            parameter.data.mul_(0.3)
    return Target(model, TAPS, fp8=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_change_by_fp8_is_measured_stated_and_refused_when_large(family):
    row = random_row((20, 3, 25), 64)
    stated = []
    for target in (calm_target(family), fused_target(family, fp8=True)):
        check = next(c for c in self_check(target, row) if c.name == "taps are layer outputs")
        assert check.detail.startswith("FP8 products change layers 0 2 4 by ")
        changes = [float(x.rstrip("%")) / 100 for x in check.detail.split(" by ")[1].split()]
        assert check.ok == (max(changes) <= FP8_LIMIT)
        stated.append(changes)
    assert 1e-3 < max(stated[0]) < FP8_LIMIT < max(stated[1]) < 0.4
