"""`slipstream doctor`: each rule on facts of machines that are not here, and the reading of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from slipstream import cli
from slipstream.config import TrainConfig, UserError
from slipstream.distributed.placement import placement_of
from slipstream.models.drafter import Drafter
from slipstream.models.sketch import sketch_target
from slipstream.models.target import Target
from slipstream.system import doctor as doctor_module
from slipstream.system import facts as facts_module
from slipstream.system.caches import machine_key
from slipstream.system.doctor import Finding, diagnose, runs_on, verdict
from slipstream.system.facts import (
    GIB,
    Facts,
    Folder,
    Gpu,
    from_json,
    gather,
    read_folder,
    read_target,
    to_json,
)
from slipstream.system.memory import predict, target_shape
from slipstream.system.planner import say_memory
from slipstream.system.recipe import sketch
from slipstream.training.attention import choose_attention
from slipstream.training.setup import check_settings, choose_device, drafter_config
from tests.tiny import tiny_config, tiny_target

CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")

H200 = Gpu("NVIDIA H200", 9, 0, 140 * GIB, 139 * GIB, 232_448, launch="")
B200 = Gpu("NVIDIA B200", 10, 0, 178 * GIB, 177 * GIB, 232_448, launch="")
B300 = Gpu("NVIDIA B300", 10, 3, 268 * GIB, 267 * GIB, 232_448, launch="")
PRO_6000 = Gpu("NVIDIA RTX PRO 6000 Blackwell", 12, 0, 95 * GIB, 94 * GIB, 101_376, launch="")
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 8, 9, 23 * GIB, 23 * GIB, 101_376, launch="")
RTX_3090 = Gpu("NVIDIA GeForce RTX 3090", 8, 6, 23 * GIB, 23 * GIB, 101_376, launch="")
A100 = Gpu("NVIDIA A100-SXM4-80GB", 8, 0, 79 * GIB, 78 * GIB, 166_912, launch="")
T4 = Gpu("Tesla T4", 7, 5, 15 * GIB, 15 * GIB, 65_536)

DENSE = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151_936,
    "head_dim": 128, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
HYBRID = {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248_320,
    "intermediate_size": 17_408, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip

MACHINE = Facts(
    python="3.12.3", system="Linux", torch="2.11.0+cu130", cuda="13.0", arch=CU130, triton_wanted="3.6.0",
    transformers="5.17.0", triton="3.6.0", fla="0.6.0", fla_core="0.6.0", driver="580.95.05", devices=1,
    gpus=(H200,), cores=16, cpu_bf16=True, ram=128 * GIB, ram_free=120 * GIB, open_files=65536,
    compiler="/usr/bin/gcc", python_headers=True, allocator="expandable_segments:True",
    triton_cache=Folder("/c/triton", 50 * GIB), inductor_cache=Folder("/c/inductor", 50 * GIB),
    output=Folder("/runs", 500 * GIB),
)  # fmt: skip


def judge(facts: Facts, **recipe: object) -> list[Finding]:
    config = TrainConfig(**recipe)
    return diagnose(facts, config, sketch(facts, config))


def bad(facts: Facts, **recipe: object) -> list[str]:
    """The lines that are not ok."""
    return [str(f) for f in judge(facts, **recipe) if f.level != "ok"]


def one(facts: Facts, level: str, *words: str, **recipe: object) -> None:
    """Exactly one line is not ok; it has this level, holds these words and says how to mend it."""
    (line,) = bad(facts, **recipe)
    assert line.startswith(level), line
    assert all(word in line for word in words), line
    assert "→" in line
    told, usable = verdict(facts, judge(facts, **recipe), TrainConfig(**recipe))
    assert usable == (level == "warn")
    assert told.startswith("usable" if usable else "not usable: 1 FAIL, the first")


def on(gpu: Gpu, **others: object) -> Facts:
    return replace(MACHINE, gpus=(gpu,), **others)


# ---- GPUs ----


@pytest.mark.parametrize("gpu", [H200, B200, B300, PRO_6000, RTX_4090, RTX_3090, A100], ids=lambda g: g.name)
def test_a_machine_in_order_is_usable_and_has_no_other_line_than_ok(gpu):
    facts = on(gpu)
    assert bad(facts) == []
    told, usable = verdict(facts, judge(facts), TrainConfig())
    assert usable
    assert told == f"usable: on cuda:0, {gpu.name}"


def test_workstation_blackwell_with_triton_36_and_fla_is_usable_and_told_that_an_upgrade_mends_no_race():
    facts = on(PRO_6000, target=HYBRID)
    assert [line for line in bad(facts) if "memory" not in line and "output" not in line] == []
    (triton,) = [f for f in judge(facts) if f.what == "Triton"]
    assert triton.level == "ok"
    assert "not safe between threads" in triton.detail
    assert "an upgrade mends nothing" in triton.detail


@pytest.mark.parametrize("gpu", [PRO_6000, RTX_4090, RTX_3090], ids=lambda g: g.name)
def test_heads_above_128_fail_where_shared_memory_is_short(gpu):
    assert bad(on(gpu), head_dim=128) == []
    for width in (130, 192, 256):
        one(on(gpu), "FAIL", "101,376", "--head-dim", head_dim=width)
    assert bad(on(gpu), head_dim=256, compile=False) == []
    assert bad(on(gpu), head_dim=256, attention="documents") == []


@pytest.mark.parametrize("gpu", [H200, B200, A100], ids=lambda g: g.name)
def test_heads_above_128_pass_where_shared_memory_is_long(gpu):
    assert bad(on(gpu), head_dim=256) == []


def test_a_gpu_without_bf16_fails():
    one(on(T4), "FAIL", "bf16", "sm_80")


@pytest.mark.parametrize("gpu", [B200, B300, PRO_6000], ids=lambda g: g.name)
def test_a_torch_without_kernels_for_the_gpu_fails_and_names_the_wheel(gpu):
    one(on(gpu, arch=CU126), "FAIL", f"sm_{gpu.major}{gpu.minor}", "cu130", "CUDA 12.8")


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_86", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_100", (10, 3), True),
        ("sm_120", (12, 1), True),
        ("sm_90", (10, 0), False),
        ("compute_90", (12, 0), True),
        ("compute_120", (10, 0), False),
        ("", (9, 0), False),
    ],
)
def test_what_kernels_were_built_for_says_where_they_run(arch, capability, runs):
    assert runs_on((arch,), *capability) is runs


@pytest.mark.parametrize(
    ("gpu", "triton", "fails"),
    [(B200, "3.2.0", True), (B200, "3.3.0", False), (B300, "3.5.1", True), (B300, "3.6.0", False)],
)
def test_a_triton_that_does_not_know_the_gpu_fails(gpu, triton, fails):
    facts = on(gpu, triton=triton, triton_wanted=triton)
    if fails:
        one(facts, "FAIL", f"Triton {triton}", "install the torch")
    else:
        assert bad(facts) == []


def test_a_kernel_that_does_not_run_fails_with_its_reason():
    one(on(replace(H200, launch="OutOfResources: shared memory")), "FAIL", "OutOfResources: shared memory")


def test_memory_that_others_hold_is_a_warning():
    one(on(replace(H200, free=100 * GIB)), "warn", "40.0 GiB", "nvidia-smi")


def test_a_mig_slice_and_the_lack_of_fp8_are_named():
    text = "\n".join(map(str, judge(on(replace(A100, name="NVIDIA A100 MIG 3g.40gb")))))
    assert "a MIG slice" in text
    assert "no FP8 products" in text
    assert "no FP8 products" not in "\n".join(map(str, judge(MACHINE)))


@pytest.mark.parametrize("other", [T4, replace(H200, launch="the launch crashed"), RTX_3090], ids=str)
def test_a_fault_of_a_gpu_that_no_run_uses_is_a_warning_and_of_the_first_a_failure(other):
    head_dim = 256 if other is RTX_3090 else None
    busy = replace(other, free=0)
    one(replace(MACHINE, gpus=(H200, busy)), "warn", "cuda:1", "CUDA_VISIBLE_DEVICES", head_dim=head_dim)
    one(replace(MACHINE, gpus=(other, H200)), "FAIL", "cuda:0", head_dim=head_dim)


def test_a_compiler_is_not_asked_for_by_a_gpu_that_no_run_uses():
    untried = replace(H200, launch=None)
    one(replace(MACHINE, gpus=(H200, untried), compiler=None), "warn", "launcher")
    one(replace(MACHINE, gpus=(untried, H200), compiler=None), "FAIL", "launcher")


# ---- no GPU, driver ----


def test_a_machine_without_gpu_is_usable_with_a_warning_unless_cuda_is_asked_for():
    facts = replace(
        MACHINE, gpus=(), devices=0, driver=None, gpu_error="RuntimeError: Found no NVIDIA driver"
    )
    one(facts, "warn", "none here", "quickstart")
    one(facts, "FAIL", "none here", device="cuda")
    assert bad(facts, device="cpu") == []
    assert verdict(facts, [], TrainConfig(device="cpu")) == ("usable: on the CPU only", True)


@pytest.mark.parametrize(
    ("cuda", "driver", "old"),
    [
        ("13.0", "570.86.15", 580),
        ("12.8", "470.256.02", 525),
        ("13.0", "580.65", None),
        ("12.8", "535.1", None),
    ],
)
def test_a_driver_too_old_for_torchs_cuda_fails_and_others_do_not(cuda, driver, old):
    blind = replace(MACHINE, gpus=(), cuda=cuda, driver=driver, gpu_error="the driver is too old")
    if old is None:
        one(blind, "FAIL", "reaches no GPU", "the driver is too old")
        assert bad(replace(MACHINE, cuda=cuda, driver=driver)) == []
    else:
        one(blind, "FAIL", driver, str(old))
        one(replace(MACHINE, cuda=cuda, driver=driver), "warn", driver, str(old))


def test_a_torch_for_the_cpu_on_a_machine_with_gpus_fails():
    one(replace(MACHINE, gpus=(), cuda=None, arch=()), "FAIL", "built for the CPU", "pip install torch")


def test_hidden_gpus_fail_with_the_variable_that_hides_them():
    one(replace(MACHINE, gpus=(), visible=""), "FAIL", "CUDA_VISIBLE_DEVICES=''")


@pytest.mark.parametrize(
    "words", [{"driver": ""}, {"driver": "unknown"}, {"cuda": ""}, {"cuda": "x", "arch": ("sm_9",)}]
)
def test_recorded_words_that_are_no_version_are_no_traceback(words):
    for gpus in ((H200,), ()):
        facts = replace(MACHINE, gpus=gpus, **words)
        assert not any("too old" in line for line in bad(facts))
        assert all(line.startswith("FAIL") for line in bad(facts, device="cuda"))


# ---- software ----


def test_torch_and_transformers_too_old_or_missing_fail():
    one(replace(MACHINE, torch="2.10.1+cu128"), "FAIL", "2.10.1", "2.11")
    one(replace(MACHINE, transformers="5.9.0"), "FAIL", "5.9.0", "5.17")
    one(replace(MACHINE, transformers=None), "FAIL", "not installed")
    for broken in ({"torch": None}, {"torch_error": "ImportError: libcudart.so.13"}):
        (line,) = bad(replace(MACHINE, gpus=(), **broken))
        assert line.startswith("FAIL  torch:")
    assert "libcudart.so.13" in line


def test_a_triton_of_another_torch_is_a_warning_and_none_fails():
    one(replace(MACHINE, triton="3.7.1"), "warn", "3.7.1", "pip install triton==3.6.0")
    one(replace(MACHINE, triton=None), "FAIL", "pip install triton==3.6.0")
    assert bad(replace(MACHINE, triton="3.7.1", triton_wanted=None)) == []


def test_flash_linear_attention_is_missed_by_hybrid_targets_alone():
    without = replace(MACHINE, fla=None, fla_core=None)
    assert bad(replace(without, target=DENSE)) == []
    one(replace(without, target=HYBRID), "warn", "hybrid", "flash-linear-attention>=0.6")
    one(replace(MACHINE, fla_core="0.5.1"), "warn", "belong together")


@pytest.mark.parametrize("gpu", [B200, B300, PRO_6000], ids=lambda g: g.name)
def test_an_fla_whose_forward_kernels_race_on_blackwell_is_a_warning_there_alone(gpu):
    old = {"fla": "0.5.2", "fla_core": "0.5.2"}
    one(on(gpu, **old), "warn", "can differ from pass to pass", ">=0.6")
    assert bad(on(gpu, **old, triton="3.8.0", triton_wanted="3.8.0")) == []
    assert bad(on(H200, **old)) == []


@pytest.mark.parametrize("missing", [{"compiler": None}, {"python_headers": False}], ids=str)
def test_what_triton_compiles_with_fails_unless_kernels_have_run(missing):
    one(replace(MACHINE, **missing), "warn", "launcher")
    one(on(replace(H200, launch=None), **missing), "FAIL", "launcher")
    assert "launcher" not in str(bad(replace(MACHINE, gpus=(), devices=0, **missing)))


def test_an_allocator_that_fragments_is_a_warning():
    one(replace(MACHINE, allocator="max_split_size_mb:128"), "warn", "max_split_size_mb:128")
    one(replace(MACHINE, allocator=None), "warn", "expandable_segments")
    assert bad(replace(MACHINE, allocator="roundup_power2_divisions:4,expandable_segments:True")) == []


# ---- host, disks, memory ----


def test_caches_on_a_network_full_or_closed():
    for name in ("triton_cache", "inductor_cache"):
        folder = Folder("/home/me/c", 50 * GIB)
        one(replace(MACHINE, **{name: replace(folder, local=False)}), "warn", "/home/me/c", "network")
        one(replace(MACHINE, **{name: replace(folder, free=GIB // 2)}), "warn", "0.5 GiB free")
        one(replace(MACHINE, **{name: replace(folder, fault="cannot be written to")}), "FAIL", "written to")


def test_disk_for_checkpoints_is_counted_from_the_recipes_drafter():
    parameters = sketch(replace(MACHINE, target=DENSE), TrainConfig()).drafter_parameters
    for keep in (1, 4):
        needed = 16 * parameters * (keep + 1)
        enough, short = Folder("/runs", needed), Folder("/runs", needed - 1)
        assert bad(replace(MACHINE, target=DENSE, output=enough), keep_checkpoints=keep) == []
        one(replace(MACHINE, target=DENSE, output=short), "warn", "checkpoints take", keep_checkpoints=keep)
    one(replace(MACHINE, output=Folder("/runs", 9 * GIB)), "warn", "9.0 GiB free")
    one(replace(MACHINE, output=Folder("/runs", 99 * GIB, fault="/runs is a file")), "FAIL", "--output-dir")


def test_a_small_host_is_warned_of():
    one(replace(MACHINE, target=DENSE, ram_free=8 * GIB), "warn", "loaded through it")
    one(replace(MACHINE, open_files=256), "warn", "256", "ulimit")
    assert bad(replace(MACHINE, open_files=-1)) == []


# ---- the recipe ----

WIDE = {"intermediate_size": 17408}  # with HYBRID the true pair: 27B, 1.73 B


def test_memory_for_the_recipe_is_held_against_the_first_gpu():
    facts = replace(MACHINE, target=HYBRID)
    assert bad(facts, **WIDE) == []
    small = replace(A100, total=40 * GIB, free=40 * GIB)
    one(replace(facts, gpus=(small,)), "FAIL", "a step needs 84.0 GiB, of 40.0", "no setting is", **WIDE)
    assert bad(replace(facts, gpus=(H200, small)), **WIDE) == []
    lines = bad(replace(facts, gpus=(replace(H200, free=60 * GIB),)), **WIDE)
    assert [line.split(":")[0] for line in lines] == ["warn  cuda", "warn  memory for the recipe"]
    near = replace(H200, total=79 * GIB, free=78 * GIB)
    one(replace(facts, gpus=(near,)), "FAIL", "a step needs 84.0 GiB", "would fit: --layers 4", **WIDE)


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"dtype": "float32", "layers": 2, "taps": 3, "heads": 4, "block_size": 8},
        {"heads": 6, "kv_heads": 3, "head_dim": 32, "intermediate_size": 96, "target_layer_ids": (1, 3)},
        {"sliding_window": 64, "full_layers": 1, "token_budget": 512, "max_anchors": 32},
    ],
)
def test_doctor_and_plan_say_the_same_memory_and_it_is_that_of_the_real_target_and_drafter(recipe, tmp_path):
    recipe = {"taps": 2, "target_model": tiny_target("qwen3", tmp_path)} | recipe
    config = TrainConfig(**recipe)
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    target = tiny_target("qwen3").to(dtype)
    facts = replace(MACHINE, target=read_target(config.target_model))
    ids = config.target_layer_ids or sketch_target(config, torch.device("cpu"), dtype).target_layer_ids
    real = Target(target, ids)
    geometry, shape = drafter_config(config, real.ends, 3), target_shape(real, dtype.itemsize)
    found = sketch(facts, config)
    assert found.target_bytes == sum(p.numel() * p.element_size() for p in target.parameters())
    assert found.drafter_parameters == sum(p.numel() for p in Drafter(geometry).parameters())
    assert found.need == predict(config, geometry, shape).total
    for capacity in (found.need - 1, found.need):
        facts = replace(facts, gpus=(replace(H200, total=capacity, free=capacity),))
        plan = say_memory(config, geometry, shape, [("cuda:0", capacity, capacity)])
        (line,) = [f for f in judge(facts, **recipe) if f.what == "memory for the recipe"]
        assert (line.level == "ok") == ("are enough" in plan) == (capacity == found.need)
        assert line.level == "ok" or line.mend in plan


CUDA = torch.device("cuda")


def refusal(call, *arguments) -> str:
    with pytest.raises(UserError) as e:
        call(*arguments)
    return str(e.value)


@pytest.mark.parametrize(
    ("recipe", "check"),
    [
        ({"attention": "dense"}, lambda c: choose_attention("dense", CUDA, True)),
        ({"attention": "flex", "compile": False}, lambda c: choose_attention("flex", CUDA, False)),
        ({"attention": "flex", "device": "cpu"}, lambda c: choose_attention("flex", torch.device("cpu"))),
        ({"target_ranks": 2}, placement_of),
        ({"full_layers": 2}, lambda c: check_settings(replace(c, output_dir="/nowhere/run"))),
        ({"device": "gpu"}, lambda c: choose_device("gpu")),
    ],
    ids=str,
)
def test_settings_that_train_refuses_fail_in_its_words(recipe, check):
    assert bad(MACHINE, **recipe) == [f"FAIL  {refusal(check, TrainConfig(**recipe))}"]


def test_a_run_folder_that_train_refuses_fails_in_its_words(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    facts = replace(MACHINE, output=read_folder(tmp_path))
    config = TrainConfig(output_dir=str(tmp_path))
    assert bad(facts, output_dir=str(tmp_path)) == [f"FAIL  {refusal(check_settings, config)}"]
    assert bad(MACHINE, output_dir=str(tmp_path / "new")) == []


@pytest.mark.parametrize("asked", [{"target_fp8": True}, {"target_pass": "fused"}], ids=str)
def test_a_fused_or_fp8_pass_that_cannot_be_fails(asked):
    flag = "--target-fp8" if "target_fp8" in asked else "--target-pass fused"
    facts = replace(MACHINE, target=HYBRID)
    assert bad(facts, **WIDE, **asked) == []
    without = replace(facts, fla=None, fla_core=None)
    failed = [line for line in bad(without, **WIDE, **asked) if line.startswith("FAIL")]
    assert len(failed) == 1
    assert failed[0].startswith(
        f"FAIL  {flag}: the fused pass cannot read this target: linear attention needs"
    )
    small = tiny_config("hybrid").to_dict()
    assert bad(replace(facts, target=small), taps=2, **asked) == []
    (line,) = bad(replace(facts, target=small), taps=2, **asked, dtype="float32")
    assert line.startswith(f"FAIL  {flag}: the fused pass cannot read this target: attention kernels take")
    unknown = tiny_config("gemma3").to_dict()
    (line,) = bad(replace(MACHINE, target=unknown), taps=2, **asked)
    assert line.startswith(f"FAIL  {flag}: the fused pass cannot read this target: gemma3_text is not")


@pytest.mark.parametrize("gpu", [A100, RTX_3090, RTX_4090, H200], ids=lambda g: g.name)
def test_fp8_fails_below_sm_89(gpu):
    lines = bad(on(gpu), target_fp8=True)
    if (gpu.major, gpu.minor) >= (8, 9):
        assert lines == []
    else:
        assert lines == [
            f"FAIL  --target-fp8: needs a GPU of compute capability 8.9 or newer, this one has {gpu.major}."
            f"{gpu.minor}: leave it out"
        ]


@pytest.mark.parametrize(
    ("target", "recipe", "told"),
    [
        (DENSE, {"mask_token_id": 151_936}, "mask token 151936 is not a row"),
        (DENSE, {"taps": 40}, "--taps 40"),
        ({"model_type": "unheard-of"}, {"target_model": "my/model"}, "my/model: cannot read"),
        ({"model_type": "qwen3", "hidden_size": "x"}, {"target_model": "my/model"}, "hidden_size"),
        ({}, {"target_model": "my/model"}, "my/model: cannot read"),
    ],
)
def test_a_target_or_geometry_that_train_refuses_fails(target, recipe, told):
    (line,) = bad(replace(MACHINE, target=target), **recipe)
    assert line.startswith("FAIL")
    assert told in line
    assert "/tmp" not in line


def test_a_target_that_is_not_here_is_said_to_be_unjudged():
    (line,) = bad(MACHINE, target_model="my/model")
    assert line == "warn  recipe: not judged: target and memory: no config.json of my/model here"


# ---- reading, recording ----


@pytest.mark.parametrize(("family", "hybrid"), [("qwen3", False), ("hybrid", True)])
def test_a_targets_files_are_read_without_loading_it(tmp_path, family, hybrid):
    model = tiny_target(family)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    found = sketch(replace(MACHINE, target=read_target(str(tmp_path))), TrainConfig(taps=2))
    assert found.hybrid == hybrid
    assert found.target_bytes == 2 * sum(p.numel() for p in model.parameters())
    for text in ("[]", "{", "\udcff"):
        (tmp_path / "config.json").write_text(text, errors="surrogateescape")
        assert read_target(str(tmp_path)) is None
    assert read_target(str(tmp_path / "nothing")) is None
    assert read_target("no-such-organisation/no-such-model") is None


def test_nvidia_smi_is_asked_once_for_the_kernels_key_and_the_driver(tmp_path, monkeypatch):
    smi, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    smi.write_text(f"#!/bin/sh\necho x >> {asked}\necho NVIDIA L4, 580.65.06\n")
    smi.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine_key(tmp_path / "absent").startswith("NVIDIA_L4-torch")
    monkeypatch.setattr(facts_module, "_text", lambda path: "")  # the driver's own file
    assert facts_module._driver() == "580.65.06"
    assert asked.read_text() == "x\n"


def test_a_file_in_a_folders_place_is_named(tmp_path):
    (tmp_path / "notes").write_text("mine")
    for path in ("notes", "notes/run", "notes/a/b"):
        assert read_folder(tmp_path / path).fault == f"{tmp_path}/notes is a file"
    assert read_folder(tmp_path / "a/b").fault is None


def test_a_folder_below_an_unreadable_one_is_a_fault_and_no_traceback(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    root = os.geteuid() == 0
    if root:  # who may read anything
        os.setresuid(65534, 65534, 0)
    try:
        found = read_folder(tmp_path / "closed" / "runs" / "one")
    finally:
        if root:
            os.setresuid(0, 0, 0)
    assert found.fault == "cannot be written to"
    one(replace(MACHINE, output=found), "FAIL", "closed/runs/one", "--output-dir")


def test_recorded_facts_come_back_as_they_were():
    facts = replace(MACHINE, target=HYBRID, gpus=(H200, RTX_4090), inductor_cache=None)
    assert from_json(json.loads(json.dumps(to_json(facts))), "f.json") == facts


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([], "no recorded facts"),
        ({"torhc": "2"}, "unknown setting 'torhc' (did you mean 'torch'?)"),
        ({"gpus": [{"name": "x"}]}, "another version"),
        ({"gpus": 3}, "another version"),
        ({"target": "qwen3"}, "another version"),
        ({"cores": "many"}, "cores: expected int"),
    ],
)
def test_facts_that_are_none_are_refused_in_one_line(values, told):
    with pytest.raises(UserError) as e:
        from_json(values, "f.json")
    assert str(e.value).startswith("f.json: ")
    assert told in str(e.value)


def test_the_verb_judges_recorded_facts_and_says_usable_or_not_by_its_exit_code(
    tmp_path, capsys, monkeypatch
):
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(to_json(MACHINE)))
    assert cli.main(["doctor", "--facts", str(path)]) == 0
    monkeypatch.setattr(doctor_module, "import_error", lambda: None)  # takes seconds
    assert capsys.readouterr().out.splitlines()[-1] == "usable: on cuda:0, NVIDIA H200"
    path.write_text(json.dumps(to_json(on(RTX_3090))))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("head_dim: 256\n")
    assert cli.main(["doctor", "--facts", str(path), "--config", str(recipe)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("not usable: 1 FAIL, the first: cuda:0")
    assert cli.main(["doctor", "--facts", str(path), "--head-dim", "256", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] is False
    assert "FAIL" in {f["level"] for f in report["findings"]}
    assert from_json(report["facts"], "f") == on(RTX_3090)
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    without = replace(MACHINE, fla=None, fla_core=None)
    path.write_text(json.dumps(to_json(without)))
    here = ["--target-model", str(tmp_path), "--output-dir", str(path)]  # a folder of the other machine
    assert cli.main(["doctor", "--facts", str(path), *here]) == 0
    assert "hybrid target is read by the stock pass" in capsys.readouterr().out
    path.write_text("{")
    assert cli.main(["doctor", "--facts", str(path)]) == 2
    assert "not JSON" in capsys.readouterr().err
    assert cli.main(["doctor", "--facts", str(tmp_path / "none.json")]) == 2


@pytest.fixture
def with_torch(tmp_path, monkeypatch):
    """Puts a module of this source in torch's place, for child processes."""

    def put(source: str) -> None:
        (tmp_path / "stand-in" / "torch").mkdir(parents=True)
        (tmp_path / "stand-in" / "torch" / "__init__.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand-in"))

    return put


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13: cannot open"),
        ("import os; os.abort()", "it ended with -6"),
    ],
)
def test_this_machine_is_read_recorded_and_judged_though_torch_is_broken(tmp_path, with_torch, source, told):
    with_torch(source)
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    record, recorded = tmp_path / "facts.json", tmp_path / "another.json"
    recorded.write_text(json.dumps(to_json(MACHINE)))
    command = [sys.executable, "-m", "slipstream.cli", "doctor", "--target-model", str(tmp_path)]
    for more, code in ((["--record", str(record)], 1), (["--facts", str(recorded)], 0)):
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == code
        assert "Traceback" not in done.stdout + done.stderr
        assert f"warn  recipe: not judged: torch cannot be imported here: {told}" in done.stdout
        assert done.stdout.splitlines()[-1].startswith("not usable" if code else "usable")
    facts = from_json(json.loads(record.read_text()), "f")
    assert (facts.torch_error, facts.target) == (told, HYBRID)


GPUS = """
import time
from types import SimpleNamespace as N
__version__ = "2.11.0+cu130"
version = N(cuda="13.0")
def properties(i):
    return N(name=f"GPU {i}", major=9, minor=0, shared_memory_per_block_optin=232448)
def reached():
    REACHED
cuda = N(get_arch_list=lambda: ["sm_90"], init=reached, device_count=lambda: 2,
         get_device_properties=properties, mem_get_info=lambda i: (1, 2))
"""


def test_what_the_child_found_before_it_crashed_is_kept(with_torch):
    with_torch(GPUS.replace("REACHED", "pass"))  # it has no tensors: the first launch raises
    facts = gather(TrainConfig())
    assert (facts.cuda, facts.arch, facts.gpu_error) == ("13.0", ("sm_90",), None)
    assert [gpu.name for gpu in facts.gpus] == ["GPU 0", "GPU 1"]
    first, second = (gpu.launch for gpu in facts.gpus)
    assert first is not None
    assert "Error" in first
    assert second is None


def test_a_driver_that_fails_or_hangs_is_a_fact(with_torch, monkeypatch, tmp_path):
    with_torch(GPUS.replace("REACHED", "raise RuntimeError('the driver is too old')"))
    assert gather(TrainConfig()).gpu_error == "RuntimeError: the driver is too old"
    stand_in = tmp_path / "stand-in" / "torch" / "__init__.py"
    stand_in.write_text(GPUS.replace("REACHED", "time.sleep(60)"))
    monkeypatch.setattr(facts_module, "PROBE_SECONDS", 2)
    facts = gather(TrainConfig())
    assert (facts.torch_error, facts.gpu_error) == (None, "no answer within 2 s")
    assert facts.cuda == "13.0"
