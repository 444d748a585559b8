"""FP8: how far rows and weights move, products of exactly the stored values, block-scaled checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3_5Config

from benchmarks.fp8_effect import TapChange
from slipstream.config import UserError
from slipstream.models import fp8
from slipstream.models.fp8 import (
    E4M3,
    dequantise,
    dequantised_weights,
    fits_fp8,
    fp8_blocks,
    fp8_matmul,
    load_fp8_checkpoint,
    quantize_rows,
    quantize_weight,
    supports_fp8,
)
from slipstream.models.target import load_target
from tests.fp8_files import quantization, set_config, write_fp8
from tests.tiny import random_row, tiny_config, tiny_target

CPU = torch.device("cpu")


def dequantised_rows(x8, scale_M):
    return x8.double() * scale_M.double()[:, None]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    exponent=st.integers(-100, 118),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_an_element_moves_by_a_sixteenth_of_itself_or_a_step_of_its_rows_scale(seed, exponent, spread, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 48, generator=generator)
    x = (x * torch.exp(spread * torch.randn(7, 48, generator=generator)) / 2**20).clamp(-1, 1)
    x = (x * 2.0**exponent).to(dtype)
    x8, scale = quantize_rows(x)
    moved = (dequantised_rows(x8, scale) - x.double()).abs()
    allowed = torch.maximum(x.double().abs() * 2.0**-4, scale.double()[:, None] * 2.0**-10)
    assert (moved <= allowed * (1 + 1e-6)).all()
    largest = x.abs().float().amax(-1) >= fp8.SMALLEST
    assert (x8[largest].float().abs().amax(-1) == 448).all(), "the whole range is used"


def test_rows_of_zeros_and_of_nothing_but_dust_get_scale_one():
    x = torch.zeros(3, 16)
    x[1, 3] = 1e-40
    x[2, 5] = -1.0
    x8, scale = quantize_rows(x)
    assert scale[:2].tolist() == [1.0, 1.0]
    assert not x8[:2].float().any()
    assert dequantised_rows(x8, scale)[2, 5] == pytest.approx(-1.0, rel=1e-6)


def test_the_largest_values_a_float_holds_stay_finite():
    top = torch.finfo(torch.float32).max
    x = torch.tensor([[top, -top, top / 2, 0.0]])
    x8, scale = quantize_rows(x)
    assert torch.allclose(dequantised_rows(x8, scale), x.double(), rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_row_is_not_hidden_and_spoils_no_other(bad):
    x = torch.ones(2, 16)
    x[0, 4] = bad
    out = fp8_matmul(*quantize_rows(x), quantize_weight(torch.ones(16, 16)), torch.float32)
    assert out[0].isnan().all()
    assert torch.allclose(out[1], torch.full((16,), 16.0))


def test_a_weight_in_slices_is_the_weight_at_once(monkeypatch):
    w = torch.randn(48, 32, dtype=torch.bfloat16)
    whole = quantize_weight(w)
    monkeypatch.setattr(fp8, "SLICE", 47 * 32)
    sliced = quantize_weight(w)
    assert torch.equal(whole.data_OI.view(torch.uint8), sliced.data_OI.view(torch.uint8))
    assert torch.equal(whole.scale_O, sliced.scale_O)
    assert (whole.data_OI.dtype, whole.scale_O.dtype) == (E4M3, torch.float32)


def test_a_view_of_a_merged_weight_is_quantised_into_whole_tensors():
    w = torch.randn(32, 64)[:, :32]
    weight = quantize_weight(w)
    assert weight.data_OI.is_contiguous()
    assert torch.equal(weight.scale_O, quantize_weight(w.clone()).scale_O)


def operands():
    """Rows and weight rows of very different sizes, so that a scale on the wrong axis cannot go unseen."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 64, generator=generator) * torch.logspace(-3, 3, 32)[:, None]
    w = torch.randn(32, 64, generator=generator) * torch.logspace(4, -4, 32)[:, None]
    return x, w


def test_the_product_is_that_of_the_stored_values():
    x, w = operands()
    (x8, scale), weight = quantize_rows(x), quantize_weight(w)
    exact = dequantised_rows(x8, scale) @ dequantised_rows(weight.data_OI, weight.scale_O).T
    out = fp8_matmul(x8, scale, weight, torch.float32)
    assert ((out - exact).abs() <= 1e-5 * exact.abs().amax()).all()
    assert ((out - exact).norm(dim=1) <= 1e-5 * exact.norm(dim=1)).all()
    assert fp8_matmul(x8, scale, weight).dtype == torch.bfloat16


def test_the_product_is_near_that_of_the_plain_values_and_a_wrong_axis_is_far():
    x, w = operands()
    (x8, scale), weight = quantize_rows(x), quantize_weight(w)
    plain, size = x @ w.T, x.norm(dim=1)[:, None] * w.norm(dim=1)

    def far(out):  # all rows and columns count alike, whatever their size
        return ((out - plain) / size).norm() / (plain / size).norm()

    assert far(fp8_matmul(x8, scale, weight, torch.float32)) < 0.05
    swapped = fp8_matmul(x8, weight.scale_O, fp8.Fp8Weight(weight.data_OI, scale), torch.float32)
    assert far(swapped) > 1


def test_sides_that_are_no_multiple_of_sixteen_stay_out():
    assert fits_fp8(torch.empty(16480, 5120, device="meta"))
    assert not fits_fp8(torch.empty(40, 64))
    assert not fits_fp8(torch.empty(64, 40))
    with pytest.raises(AssertionError, match="multiples of 16"):
        quantize_weight(torch.ones(40, 64))


def test_gpus_older_than_8_9_are_named_as_the_reason():
    assert [supports_fp8(c) for c in ((8, 9), (9, 0), (10, 0), (12, 0))] == [None] * 4
    assert "this one has 8.6" in (supports_fp8((8, 6)) or "")


def load(folder: Path, dtype=torch.bfloat16):
    config = AutoConfig.from_pretrained(folder)
    block = fp8_blocks(config, str(folder))
    assert block is not None
    return load_fp8_checkpoint(str(folder), config, block, dtype, "sdpa")


# 64 and 128 wide weights: whole blocks, one block larger than a weight, and sides that end in a short block
@pytest.mark.parametrize("block", [(32, 16), (128, 128), (24, 40)])
@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_weights_of_an_fp8_checkpoint_are_their_values_times_their_blocks_scales(family, block, tmp_path):
    tiny_target(family, tmp_path / "plain", dtype=torch.bfloat16)
    values = write_fp8(tmp_path / "plain", tmp_path / "fp8", block)
    model, report = load(tmp_path / "fp8")
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert "quantization_config" not in model.config.to_dict()
    state = model.state_dict()
    assert state.keys() == values.keys()
    for name, w in values.items():
        assert torch.equal(state[name], w), name


def test_the_text_part_of_a_checkpoint_that_sees_images_is_found(tmp_path):
    tiny_target("hybrid", tmp_path / "plain", dtype=torch.bfloat16)
    values = write_fp8(tmp_path / "plain", tmp_path / "fp8", (32, 32), prefix="model.language_model.")
    composite = Qwen3_5Config(text_config=tiny_config("hybrid").to_dict()).to_dict()
    composite["quantization_config"] = quantization((32, 32))
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(composite))
    model, report = load(tmp_path / "fp8")
    assert not report["missing_keys"]
    state = model.state_dict()
    for name, w in values.items():
        assert torch.equal(state[name.replace("model.language_model.", "model.")], w), name


def test_a_target_is_read_from_an_fp8_checkpoint_as_from_its_bf16_values(tmp_path):
    plain = tmp_path / "plain"
    tiny_target("qwen3", plain, dtype=torch.bfloat16)
    settings_file = plain / "generation_config.json"
    settings_file.write_text(json.dumps({**json.loads(settings_file.read_text()), "eos_token_id": [2, 7]}))
    values = write_fp8(plain, tmp_path / "fp8", (24, 40))
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    row = random_row((20, 9), 32)
    of_values, of_fp8 = (
        load_target(str(f), (1, 3), 2, CPU, torch.bfloat16) for f in (plain, tmp_path / "fp8")
    )
    assert torch.equal(of_values.taps(row), of_fp8.taps(row))
    assert of_fp8.model.generation_config.eos_token_id == [2, 7]


def test_scales_that_are_missing_or_of_another_grid_are_refused_by_name(tmp_path):
    tiny_target("qwen3", tmp_path / "plain", dtype=torch.bfloat16)
    write_fp8(tmp_path / "plain", tmp_path / "fp8", (32, 32))
    set_config(tmp_path / "fp8", {"quantization_config": quantization((32, 16))})
    with pytest.raises(UserError, match=r"_proj.weight \[\d+, \d+\]: scales \[.*\] expected, .* fetch"):
        load(tmp_path / "fp8")
    for file in (tmp_path / "fp8").glob("*.safetensors"):
        kept = {k: w for k, w in load_file(file).items() if not k.endswith("mlp.up_proj.weight_scale_inv")}
        save_file(kept, file, metadata={"format": "pt"})
    set_config(tmp_path / "fp8", {"quantization_config": quantization((32, 32))})
    with pytest.raises(UserError, match=r"layers.0.mlp.up_proj.weight .*the files have none"):
        load(tmp_path / "fp8")


@pytest.mark.parametrize("index", ["{}", "[]", "{", "7", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_of_an_fp8_checkpoint_is_refused_in_one_line(index, tmp_path):
    tiny_target("qwen3", tmp_path / "plain", dtype=torch.bfloat16)
    write_fp8(tmp_path / "plain", tmp_path / "fp8", (32, 32))
    (tmp_path / "fp8" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"index\.json: names no files of weights: fetch") as e:
        load_target(str(tmp_path / "fp8"), None, 2, CPU, torch.bfloat16)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("shape", [(), (64,), (2, 64, 64)], ids=str)
def test_an_fp8_tensor_that_is_no_matrix_is_refused_by_name(shape, tmp_path):
    stored = {"a.weight": torch.ones(shape).to(E4M3), "a.weight_scale_inv": torch.ones(2, 2)}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"FP8 tensor a.weight \[.*\]: no matrix, .* in bf16"):
        dequantised_weights(tmp_path, (32, 32), torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [{"fmt": "e5m2"}, {"scale_fmt": "ue8m0"}]
    + [{"weight_block_size": block} for block in (None, [], [32], 128, "32", [0, 32], [-32, 32], [1.5, 2])],
    ids=str,
)
def test_other_kinds_of_fp8_are_refused_in_one_line(change, tmp_path):
    tiny_target("qwen3", tmp_path / "plain")
    set_config(tmp_path / "plain", {"quantization_config": {**quantization((32, 32)), **change}})
    with pytest.raises(UserError, match="FP8 weights of kind") as e:
        load_target(str(tmp_path / "plain"), None, 2, CPU, torch.bfloat16)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "bitsandbytes"])
def test_other_quantisations_are_transformers_to_load_or_to_refuse_in_one_line(method, tmp_path):
    """None of their packages is installed for these tests, so all are refused."""
    tiny_target("qwen3", tmp_path / "plain")
    how = {"quant_method": method, "bits": 4, "group_size": 32, "load_in_4bit": True}
    set_config(tmp_path / "plain", {"quantization_config": how})
    with pytest.raises(UserError, match="cannot load this target") as e:
        load_target(str(tmp_path / "plain"), None, 2, CPU, torch.bfloat16)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_dequantising_multiplies_in_fp32_and_rounds_once(scale_dtype, dtype):
    torch.manual_seed(0)
    w8, scale = torch.randn(40, 70).to(E4M3), torch.rand(2, 3).to(scale_dtype)
    full = scale.double().repeat_interleave(32, 0).repeat_interleave(32, 1)[:40, :70]
    expected = (w8.double() * full).float().to(dtype)
    assert torch.equal(dequantise(w8, scale, (32, 32), dtype), expected)


def test_the_benchmarks_tap_change_over_rows_is_that_of_all_tokens_at_once():
    torch.manual_seed(0)
    plain, moved = torch.randn(30, 2 * 16), torch.zeros(30, 2 * 16)
    moved[:, 16:] = 0.1 * torch.randn(30, 16)
    moved[7, 16:] = -2 * plain[7, 16:]  # one token turned round
    change = TapChange((3, 9))
    for rows in (slice(0, 10), slice(10, 30)):
        change.add(plain[rows], (plain + moved)[rows])
    first, second = change.read()
    assert (first["layer"], first["change"], first["worst"]) == (3, 0.0, pytest.approx(1.0))
    assert second["change"] == pytest.approx(float(moved.norm() / plain[:, 16:].norm()))
    assert second["worst"] == pytest.approx(-1.0)
    others = torch.cosine_similarity(plain[:, 16:], (plain + moved)[:, 16:])
    assert second["cosine"] == pytest.approx(float(others.mean()), abs=1e-6)
