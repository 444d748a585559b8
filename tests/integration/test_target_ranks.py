"""A target's ends read alone, and its layers in parts on several ranks, are those of the whole target."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
)

from slipstream.config import UserError
from slipstream.distributed.link import target_fingerprint
from slipstream.models.families import family_of
from slipstream.models.selfcheck import self_check
from slipstream.models.target import Target, TargetEnds, choose_pass, load_ends, load_target
from tests.fp8_files import quantization, write_fp8
from tests.ranks import run_ranks
from tests.tiny import FAMILIES, random_row, tiny_config, tiny_target

CPU = torch.device("cpu")
TAPS = (0, 2, 4)
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ends


def assert_ends_of(folder: Path, dtype: torch.dtype = FP32) -> TargetEnds:
    """The ends of the folder read alone are those of the target read whole."""
    alone = load_ends(str(folder), TAPS, 3, CPU, dtype)
    whole = load_target(str(folder), TAPS, 3, CPU, dtype).ends
    for part in (alone, alone.head):
        for field in dataclasses.fields(part):
            ours, theirs = (getattr(e if part is alone else e.head, field.name) for e in (alone, whole))
            if isinstance(ours, torch.Tensor):
                assert torch.equal(ours, theirs), field.name
                assert (ours.dtype, ours.requires_grad) == (dtype, False)
            elif field.name == "generation_config":
                assert ours.to_dict() == theirs.to_dict()
            elif field.name != "head":
                assert ours == theirs, field.name
    return alone


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "granite"])
def test_ends_read_alone_are_those_of_the_target_read_whole(family, tie, tmp_path):
    tiny_target(family, tmp_path / "target", tie=tie)
    path = tmp_path / "target" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 7]}))
    ends = assert_ends_of(tmp_path / "target")
    assert (ends.embedding_VH is ends.head.weight_VH) == tie
    assert ends.generation_config is not None
    assert ends.generation_config.eos_token_id == [2, 7]


def test_ends_are_found_in_the_dtype_asked_for_and_with_the_default_taps(tmp_path):
    tiny_target("gemma3", tmp_path / "target")
    assert_ends_of(tmp_path / "target", BF16)
    assert load_ends(str(tmp_path / "target"), None, 3, CPU, FP32).target_layer_ids == (1, 2, 3)


def test_no_layer_is_looked_at_in_the_many_files_of_a_checkpoint(tmp_path):
    model = tiny_target("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    files = [*tmp_path.glob("model-*.safetensors")]
    assert len(files) > 3
    assert_ends_of(tmp_path)
    before = load_ends(str(tmp_path), TAPS, 3, CPU, FP32)
    for file in files:
        tensors = {n: w if ".layers." not in n else torch.zeros(3) for n, w in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="cannot load"):
        load_target(str(tmp_path), TAPS, 3, CPU, FP32)
    assert torch.equal(load_ends(str(tmp_path), TAPS, 3, CPU, FP32).head.weight_VH, before.head.weight_VH)


def test_ends_are_found_under_the_names_of_a_model_that_sees_images(tmp_path):
    tiny_target("hybrid", tmp_path)
    tensors = {
        n.replace("model.", "model.language_model.", 1): w
        for n, w in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    composite = Qwen3_5Config(text_config=tiny_config("hybrid").to_dict()).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(composite))
    assert assert_ends_of(tmp_path).model_type == "qwen3_5_text"


def test_ends_are_found_in_a_model_whose_class_has_a_tower_for_images(tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(
        text_config=tiny_config("gemma3", tie=True).to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=True,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert assert_ends_of(tmp_path).input_embedding_scale == 8.0


@pytest.mark.parametrize("composite", [False, True])
def test_ends_of_an_fp8_checkpoint_are_read_when_they_are_plain(composite, tmp_path):
    tiny_target("hybrid", tmp_path / "plain", dtype=BF16)
    prefix = "model.language_model." if composite else "model."
    write_fp8(tmp_path / "plain", tmp_path / "fp8", (32, 32), prefix=prefix)
    if composite:
        config = Qwen3_5Config(text_config=tiny_config("hybrid").to_dict()).to_dict()
        config["quantization_config"] = quantization((32, 32))
        (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    assert_ends_of(tmp_path / "fp8", BF16)


def test_an_fp8_head_is_refused_not_read_without_its_scales(tmp_path):
    tiny_target("qwen3", tmp_path / "plain", dtype=BF16)
    write_fp8(tmp_path / "plain", tmp_path / "fp8", (32, 32))
    for file in (tmp_path / "fp8").glob("*.safetensors"):
        tensors = load_file(file)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
            tensors["lm_head.weight_scale_inv"] = torch.ones(5, 2, dtype=BF16)
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head\.weight_scale_inv: an embedding or a head in FP8"):
        load_ends(str(tmp_path / "fp8"), TAPS, 3, CPU, BF16)


def test_what_is_refused_of_a_target_is_refused_of_its_ends_in_the_same_words(tmp_path):
    def refusal(load, *args) -> str:
        with pytest.raises(UserError) as refused:
            load(*args, CPU, FP32)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    for name in ("cut", "empty", "headless"):
        tiny_target("qwen3", tmp_path / name)
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    (tmp_path / "empty" / "model.safetensors").unlink()
    tensors = load_file(tmp_path / "headless" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "headless" / "model.safetensors", metadata={"format": "pt"})
    for name in ("cut", "empty", "headless", "missing"):
        args = (str(tmp_path / name), TAPS, 3)
        assert refusal(load_ends, *args) == refusal(load_target, *args)
    args = (str(tmp_path / "headless"), (2, 99), 3)
    assert refusal(load_ends, *args) == refusal(load_target, *args)


def peak_mib(rank: int, ranks: int, load, other: str, folder: str, in_parts: bool) -> float:
    """Memory of this process's host at its highest while it loads, above what it was."""
    group = {"group": dist.group.WORLD} if in_parts else {}
    load(other, TAPS, 3, CPU, BF16, **group)  # what is loaded once, of code
    gc.collect()

    def status(key: str) -> float:
        text = Path("/proc/self/status").read_text()
        return int(text.partition(key + ":")[2].split()[0]) / 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    load(folder, TAPS, 3, CPU, BF16, **group)
    return status("VmHWM") - before


def test_ends_take_no_memory_for_layers_and_a_part_never_that_of_the_whole(tmp_path):
    other = tiny_target("llama", tmp_path / "other")
    folder = tiny_target("llama", tmp_path / "target", hidden_size=768, layers=8)
    layers = os.path.getsize(tmp_path / "target" / "model.safetensors") / 2**20 / 2  # in bf16
    (ends,) = run_ranks(1, peak_mib, load_ends, other, folder, False)
    (whole,) = run_ranks(1, peak_mib, load_target, other, folder, False)
    loads, takes = run_ranks(2, peak_mib, load_target, other, folder, True)
    assert layers > 50
    assert ends < layers / 4
    assert whole > layers
    assert loads > layers
    assert takes < 0.9 * layers  # its half, and one layer of eight at a time


# parts


def rows_of(rank: int) -> list:
    """Other rows on every rank; documents apart they take 2 and 1, 1 and 4, or 4 and 2 passes."""
    shapes = [((30, 20, 90, 7), 160), ((20,), 40), ((5, 66, 70, 100, 140), 400)]
    return [random_row(*shapes[(rank + i) % 3], seed=10 * rank + i) for i in range(2)]


def put_away(target: Target) -> bool:
    return all(isinstance(p, DTensor) for layer in target.layers for p in layer.parameters())


def read_in_parts(rank: int, ranks: int, folder: str, dtype: torch.dtype, isolation: str) -> str:
    if dtype == BF16:  # as released models of other families have it
        Qwen3_5ForCausalLM._keep_in_fp32_modules_strict = ["A_log"]
    whole = load_target(folder, TAPS, 3, CPU, dtype)
    if rank:  # only the first rank loads what it is given a part of
        AutoModelForCausalLM.from_pretrained = None
    target = load_target(folder, TAPS, 3, CPU, dtype, group=dist.group.WORLD)
    target.isolation = whole.isolation = isolation
    assert (target.trunk, target.why_stock) == (None, None)

    ours, theirs = (t.model.state_dict() | dict(t.model.named_buffers()) for t in (target, whole))
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(t, theirs[n]) for n, t in ours.items() if not isinstance(t, DTensor))
    for layer in target.layers:
        for p in layer.parameters():
            assert isinstance(p, DTensor)
            assert p.to_local().untyped_storage().nbytes() <= -(-len(p) // ranks) * p[0].numel() * p.itemsize

    for row in rows_of(rank):
        assert torch.equal(target.taps(row), whole.taps(row))
        assert put_away(target)
    ids, cache = rows_of(0)[0].input_ids[:40], target.new_cache()
    reference, start = whole.new_cache(), 0
    for n in (23, 1, 16):
        ours = target.decode_step(ids[start : start + n], cache, start)
        theirs = whole.decode_step(ids[start : start + n], reference, start)
        assert all(map(torch.equal, ours, theirs))
        assert put_away(target)
        start += n
    assert [c.detail for c in self_check(target, random_row((70, 30), 110)) if not c.ok] == []
    for row in rows_of(rank + 1):
        assert torch.equal(target.taps(row), whole.taps(row))
    assert target_fingerprint(target) == target_fingerprint(whole)
    return target_fingerprint(target)


@pytest.mark.parametrize(
    ("family", "dtype", "isolation"),
    [
        ("qwen3", FP32, "unpacked"),
        ("qwen3", FP32, "packed"),
        ("llama", BF16, "unpacked"),
        ("hybrid", FP32, "unpacked"),
        ("hybrid", BF16, "unpacked"),
        ("gemma3", FP32, "unpacked"),
        ("gemma3", BF16, "packed"),
    ],
)
def test_a_target_in_parts_gives_every_bit_of_the_whole(family, dtype, isolation, tmp_path):
    folder = tiny_target(family, tmp_path, tie=family == "llama", dtype=dtype)
    prints = run_ranks(2, read_in_parts, folder, dtype, isolation)
    assert len({*prints}) == 1


def read_beside_others(rank: int, ranks: int, folder: str) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:  # it drafts
        return
    assert group is not None
    target, whole = (
        load_target(folder, TAPS, 3, CPU, FP32, group=group),
        load_target(folder, TAPS, 3, CPU, FP32),
    )
    for row in rows_of(rank):
        assert torch.equal(target.taps(row), whole.taps(row))
        assert put_away(target)


def test_ranks_outside_the_group_take_no_part(tmp_path):
    run_ranks(3, read_beside_others, tiny_target("hybrid", tmp_path))


def read_fp8(rank: int, ranks: int, folder: str) -> bool:
    target = load_target(folder, TAPS, 3, CPU, BF16, group=dist.group.WORLD)
    whole, row = load_target(folder, TAPS, 3, CPU, BF16), rows_of(rank)[0]
    return torch.equal(target.taps(row), whole.taps(row))


def test_an_fp8_checkpoint_is_read_in_parts(tmp_path):
    tiny_target("hybrid", tmp_path / "plain", dtype=BF16)
    write_fp8(tmp_path / "plain", tmp_path / "fp8", (32, 32), prefix="model.language_model.")
    config = Qwen3_5Config(text_config=tiny_config("hybrid").to_dict()).to_dict()
    config["quantization_config"] = quantization((32, 32))
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    assert run_ranks(2, read_fp8, str(tmp_path / "fp8")) == [True, True]


def refused(rank: int, ranks: int, folder: str) -> list[str]:
    said = []
    for pass_, path in (("auto", folder + "/cut"), ("fused", folder + "/sound")):
        try:
            load_target(path, TAPS, 3, CPU, FP32, pass_, group=dist.group.WORLD)
        except UserError as e:
            said.append(str(e))
    return said


def test_what_the_first_rank_is_refused_is_told_by_all(tmp_path):
    for name in ("cut", "sound"):
        tiny_target("qwen3", tmp_path / name)
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    (tmp_path / "sound" / "model.safetensors").unlink()  # the fused pass is refused before it is looked for
    first, second = run_ranks(2, refused, str(tmp_path))
    assert first == second
    assert "cut: cannot load this target" in first[0]
    assert "--target-pass fused: the fused pass cannot read this target: its layers are in parts" in first[1]


def test_a_gpu_reads_parts_by_stock_layers_and_says_why():
    args = family_of("qwen3"), {}, nn.Module(), torch.device("cuda"), BF16
    why = "its layers are in parts on several GPUs"
    assert choose_pass(*args, "auto", False, sharded=True) == (
        "packed",
        "its layers are in parts on several GPUs",
    )
    assert choose_pass(*args, "stock", False, sharded=True) == ("packed", None)
    with pytest.raises(UserError, match=f"--target-fp8: the fused pass cannot read this target: {why}"):
        choose_pass(*args, "auto", True, sharded=True)
