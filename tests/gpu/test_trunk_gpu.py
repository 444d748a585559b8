"""The fused pass on a GPU: as near to exact as the stock layers are, isolated, and never compiling again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from slipstream.data.pack import Row
from slipstream.models import fused
from slipstream.models.selfcheck import self_check
from slipstream.models.target import Target
from tests import fused_cases as cases
from tests.tiny import random_row, tiny_config

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TAPS = (0, 2, 4)
FAMILIES = ("llama", "qwen3", "hybrid")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def model_of(family: str, dtype: torch.dtype):
    """Random weights, the same in every dtype but for rounding; heads that suit the kernels."""
    config = tiny_config(family, hidden_size=256)
    config.head_dim = 64
    if isinstance(config, Qwen3_5TextConfig):
        config.linear_key_head_dim = config.linear_value_head_dim = 64
        config.rope_parameters["mrope_section"] = [8, 4, 4]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "conv" not in name:
            parameter.data.normal_(std=0.06)
        elif "norm" in name:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model.bfloat16().to(dtype).eval().to(CUDA)


def alone(target: Target, row: Row) -> Tensor:
    """Taps of the documents by transformers alone, one after another."""
    parts = []
    for start, end in row.spans():
        states = target.model(
            input_ids=row.input_ids[None, start:end].to(CUDA), output_hidden_states=True, use_cache=False
        ).hidden_states
        parts.append(torch.cat([states[i + 1][0] for i in TAPS], dim=-1))
    return torch.cat(parts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(200,), (130, 1, 2, 3, 64, 40)])
def test_fused_taps_are_as_near_to_fp32_as_those_of_stock_layers(family, lengths):
    row = random_row(lengths, 256)
    used = sum(lengths)
    exact = alone(Target(model_of(family, torch.float32), TAPS, "stock"), row).float()
    target = Target(model_of(family, torch.bfloat16), TAPS)
    assert target.isolation == "fused", target.why_stock
    stock, taps_SC = alone(target, row).float(), target.taps(row).float()
    assert not taps_SC[used:].any()
    noise = (stock - exact).norm(dim=-1) / exact.norm(dim=-1)
    ours = (taps_SC[:used] - exact).norm(dim=-1) / exact.norm(dim=-1)
    print(f"{family} {lengths}: stock {float(noise.mean()):.2%}, fused {float(ours.mean()):.2%} from fp32")
    assert ours.mean() <= 1.25 * noise.mean()
    assert ours.max() <= 2 * noise.max()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_of_one_document_moves_no_bit_of_the_others(family, fp8):
    target = Target(model_of(family, torch.bfloat16), TAPS, fp8=fp8)
    row = random_row((100, 3, 120), 256)
    before = target.taps(row)
    for changed, (start, end) in enumerate(row.spans()):
        row.input_ids[end - 1] = (row.input_ids[end - 1] + 7) % 128
        row.input_ids[start] = (row.input_ids[start] + 7) % 128
        after = target.taps(row)
        for other, (s, e) in enumerate(row.spans()):
            assert torch.equal(before[s:e], after[s:e]) == (other != changed)
        before = after


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_target_passes_its_self_check(family):
    for check in self_check(Target(model_of(family, torch.bfloat16), TAPS), random_row((300, 150), 512)):
        assert check.ok, f"{check.name}: {check.detail}"


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_other_lengths_neither_compile_again_nor_wait_for_the_device(family, fp8):
    target = Target(model_of(family, torch.bfloat16), TAPS, fp8=fp8)
    rows = [random_row((1 + 7 * i, 200 - 9 * i, *([11] * (i % 3))), 256, seed=i) for i in range(20)]
    target.taps(rows[0])
    torch.cuda.synchronize()
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for row in rows:
                target.taps(row)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_fp8_products_change_taps_a_little():
    row = random_row((130, 100), 256)
    plain = Target(model_of("hybrid", torch.bfloat16), TAPS).taps(row).float()
    taps_SC = Target(model_of("hybrid", torch.bfloat16), TAPS, fp8=True).taps(row).float()
    change = float((taps_SC - plain).norm() / plain.norm())
    print(f"FP8 changes taps by {change:.1%}")
    assert 1e-3 < change < 0.4


def test_merging_weights_takes_no_memory_that_lasts():
    model = model_of("hybrid", torch.bfloat16)
    before = torch.cuda.memory_allocated()
    target = Target(model, TAPS)
    norms = 2**20  # fp32 copies of norm weights, and blocks of the allocator
    assert target.isolation == "fused"
    assert torch.cuda.memory_allocated() - before <= norms


def both_ways(name: str, case: Callable[..., cases.Tensors], *args: object) -> None:
    """The kernel's results are those of the function as it stands. Compiled it would be no oracle: a compiler
    leaves out the rounding of a sum that it reads again.
    """
    from slipstream.models import fused_kernels

    cases.assert_near(*(case(vars(way)[name], *args) for way in (fused_kernels, fused)))


BOTH = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])


@BOTH
@pytest.mark.parametrize("width", [17408, 12288, 1000])
def test_the_swiglu_kernel_is_the_function(width, fp8):
    both_ways("swiglu", cases.swiglu, torch.bfloat16, CUDA, width, fp8)


@BOTH
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("width", [5120, 4096, 1000])
def test_the_norm_kernel_is_the_function(width, delta, fp8):
    both_ways("add_norm", cases.add_norm, torch.bfloat16, CUDA, width, delta, True, fp8)


@BOTH
@pytest.mark.parametrize(("heads", "head_dim"), [(48, 128), (32, 128), (6, 64)])
def test_the_gated_norm_kernel_is_the_function(heads, head_dim, fp8):
    both_ways("gated_norm", cases.gated_norm, torch.bfloat16, CUDA, heads, head_dim, fp8)


@pytest.mark.parametrize("lengths", [(1000,), (1, 2, 3, 70, 501)])
@pytest.mark.parametrize(("key_heads", "heads"), [(16, 48), (2, 2)])
def test_the_kernel_before_the_recurrence_is_the_function(lengths, key_heads, heads):
    both_ways("delta_inputs", cases.delta_inputs, torch.bfloat16, CUDA, lengths, 7, key_heads, heads, 128)


def test_the_fused_pass_runs_its_kernels():
    trunk = Target(model_of("hybrid", torch.bfloat16), TAPS).trunk
    taken = (trunk._add_norm, trunk._swiglu, trunk._gated_norm, trunk._delta_inputs)
    assert [f.__module__ for f in taken] == 4 * ["slipstream.models.fused_kernels"]
