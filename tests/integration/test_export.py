"""An export is done when an independent reader gives the same: PyPI `dflash` 0.1.0 reads what we write.

The reader finds everything it needs in the exported folder (taps, mask token, block size, scale, causality,
window, rotary base), so a wrong field shows as a wrong hidden state. Its `return_stats=True` wants a CUDA
device: passes are counted in a hook on the target.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from slipstream.cli import main
from slipstream.config import UserError
from slipstream.decoding.speculative import DrafterProposer, generate_speculative
from slipstream.export import zlab
from slipstream.export.zlab import config_from_zlab, export_run, export_zlab, load_drafter, zlab_config
from slipstream.models.drafter import FULL, SLIDING, Drafter, DrafterConfig
from slipstream.models.target import Target
from slipstream.training.checkpoint import Position, save_checkpoint
from tests.decoding import prompt_of
from tests.tiny import tiny_target

CPU = torch.device("cpu")
TOLERANCE = 2e-5
"""Largest difference relative to the largest value that fp32 rounding makes here (seen: 8e-7)."""

needs_reader = pytest.mark.skipif(
    importlib.util.find_spec("dflash") is None or Version(transformers.__version__) < Version("5.24"),
    reason="PyPI dflash 0.1.0 (pip install --no-deps dflash==0.1.0) crops caches as transformers 5.24 does",
)

BASE = DrafterConfig(
    hidden_size=64,
    vocab_size=131,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    block_size=6,
    mask_token_id=130,
    target_layer_ids=(0, 2, 4),
    num_target_layers=6,
    rope_theta=10000.0,
)
SLIDE_FIRST = {"num_layers": 3, "layer_types": (SLIDING, FULL, SLIDING), "sliding_window": 9}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "more taps than layers": {"num_layers": 1, "target_layer_ids": (0, 1, 2, 3, 4)},
    "fewer taps than layers": {"num_layers": 3, "target_layer_ids": (3,)},
    "heads unlike the target's": {"num_heads": 6, "num_kv_heads": 1, "head_dim": 32},
    "another rotary base, scale and eps": {
        "rope_theta": 1e6,
        "input_embedding_scale": 8.0,
        "rms_norm_eps": 1e-5,
    },
    "full, causal": {"is_causal": True},
    "full, causality unknown": {"is_causal": None},
    "sliding, bidirectional": {**SLIDE_FIRST, "is_causal": False},
    "sliding, causal": {**SLIDE_FIRST, "is_causal": True},
    "sliding, causality unknown": {**SLIDE_FIRST, "is_causal": None},
    "all sliding": {"sliding_window": 6, "layer_types": (SLIDING, SLIDING)},
}


def random_drafter(seed: int = 0, **changes: Any) -> Drafter:
    """Weights that bf16 rounds, norms that are not flat."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drafter = Drafter(dataclasses.replace(BASE, **{"layer_types": (), **changes}))
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return drafter.requires_grad_(False)


def export(drafter: Drafter, folder: Path) -> Path:
    export_zlab(drafter.config, drafter.state_dict(), folder, {"slipstream": "test"}, replace=False)
    return folder


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target("qwen3"), (0,))


TEXT = torch.tensor(prompt_of(40, seed=3))
STEPS = (21, 24, 30)
"""Context tokens known at each drafting; the text goes on as if so many tokens had been accepted."""


def reader_states(folder: Path, target: Target) -> list[torch.Tensor]:
    """Hidden states [B, H] of three drafts in a row by the reader, all facts taken from the folder."""
    from dflash import DFlashDraftModel, extract_context_feature
    from dflash.model import _crop_to, _draft_value, _make_cache, _raw_input_embeddings

    model = DFlashDraftModel.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    cache = _make_cache(model.config)
    states = target.model(TEXT[None], output_hidden_states=True).hidden_states
    features = extract_context_feature(states, model.target_layer_ids)
    scale = float(_draft_value(model.config, "input_embedding_scale", 1.0))
    out, known = [], 0
    for length in STEPS:
        block = torch.full((1, model.block_size), model.mask_token_id)
        block[0, 0] = TEXT[length]
        hidden = model(
            target_hidden=features[:, known:length],
            noise_embedding=_raw_input_embeddings(target.model, block, scale),
            position_ids=torch.arange(known, length + model.block_size)[None],
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, length)
        out.append(hidden[0])
        known = length
    return out


def our_states(drafter: Drafter, model: Any) -> list[torch.Tensor]:
    """The same drafts by our cached pass."""
    config = drafter.config
    target = Target(model, config.target_layer_ids)
    _, taps = target.decode_step(TEXT, target.new_cache(), 0)
    cache = drafter.new_context(len(TEXT) + config.block_size)
    out = []
    for length in STEPS:
        drafter.extend_context(cache, taps[cache.length : length])
        ids = torch.full((config.block_size,), config.mask_token_id)
        ids[0] = TEXT[length]
        out.append(drafter.draft(cache, target.embedding_VH[ids] * config.input_embedding_scale))
    return out


def worst(theirs: list[torch.Tensor], ours: list[torch.Tensor], head_VH: torch.Tensor) -> float:
    """Largest difference of hidden states and logits, relative to the largest value; inf for other shapes."""
    if [t.shape for t in theirs] != [o.shape for o in ours]:
        return float("inf")
    pairs = [(t, o) for t, o in zip(theirs, ours, strict=True)]
    pairs += [(t @ head_VH.T, o @ head_VH.T) for t, o in pairs]
    return max(float((t - o).abs().max() / o.abs().max()) for t, o in pairs)


# ---- the reader sees what we see ----


@needs_reader
@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_an_independent_reader_gives_the_same_hidden_states_and_logits(name, tmp_path, target):
    folder = export(random_drafter(**GEOMETRIES[name]), tmp_path / "export")
    ours = our_states(load_drafter(folder, CPU, torch.float32), target.model)
    assert worst(reader_states(folder, target), ours, target.head.weight_VH) <= TOLERANCE


FAULTS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "causality flipped": ("plain", lambda c: c.update(is_causal=True)),
    "causality lost": ("sliding, bidirectional", lambda c: c.pop("is_causal")),
    "causality flipped in sliding layers": ("sliding, causal", lambda c: c.update(is_causal=False)),
    "taps shifted by one": ("plain", lambda c: c["dflash_config"].update(target_layer_ids=[1, 3, 5])),
    "mask token changed": ("plain", lambda c: c["dflash_config"].update(mask_token_id=129)),
    "block size changed": ("plain", lambda c: c["dflash_config"].update(block_size=5)),
    "rotary base changed": ("plain", lambda c: c["rope_parameters"].update(rope_theta=20000.0)),
    "eps changed": ("plain", lambda c: c.update(rms_norm_eps=1e-2)),
    "embedding scale lost": (
        "another rotary base, scale and eps",
        lambda c: c["dflash_config"].pop("input_embedding_scale"),
    ),
    "window changed": ("sliding, bidirectional", lambda c: c.update(sliding_window=10)),
    "layer types swapped": (
        "sliding, bidirectional",
        lambda c: c.update(layer_types=[FULL, SLIDING, SLIDING]),
    ),
}


@needs_reader
@pytest.mark.parametrize("fault", FAULTS)
@torch.no_grad()
def test_a_wrong_export_is_seen_by_the_reader(fault, tmp_path, target):
    geometry, change = FAULTS[fault]
    folder = export(random_drafter(**GEOMETRIES[geometry]), tmp_path / "export")
    ours = our_states(load_drafter(folder, CPU, torch.float32), target.model)
    edit_config(folder, change)
    assert worst(reader_states(folder, target), ours, target.head.weight_VH) > 50 * TOLERANCE


@needs_reader
@torch.no_grad()
def test_swapped_weights_are_seen_by_the_reader(tmp_path, target):
    folder = export(random_drafter(), tmp_path / "export")
    ours = our_states(load_drafter(folder, CPU, torch.float32), target.model)
    a, b = (f"layers.0.self_attn.{n}_norm.weight" for n in "qk")
    edit_weights(folder, lambda s: s.update({a: s[b].clone(), b: s[a].clone()}))
    assert worst(reader_states(folder, target), ours, target.head.weight_VH) > 50 * TOLERANCE


# ---- the reader decodes as we decode ----


def reader_decodes(
    folder: Path, target: Target, prompt: list[int], max_new: int
) -> tuple[list[int], list[int]]:
    """New tokens, and where each target pass after the prefill begins, of the reader's own loop."""
    from dflash import DFlashDraftModel
    from dflash.model import dflash_generate

    model = DFlashDraftModel.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    starts: list[int] = []

    def count(_module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        starts.append(int(kwargs["position_ids"][0, 0]))

    handle = target.model.register_forward_hook(count, with_kwargs=True)
    try:
        out = dflash_generate(model, target.model, torch.tensor([prompt]), max_new, None)
    finally:
        handle.remove()
    return out[0, len(prompt) :].tolist(), starts[1:]


def whole_blocks(starts: list[int], end: int, block: int) -> list[int]:
    """Passes up to the one behind the last whole block: near the end the reader drafts a shorter block, which
    a bidirectional drafter reads differently; ours is always whole."""
    return starts[: sum(start + block <= end for start in starts) + 1]


@needs_reader
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("name", ["plain", "sliding, causality unknown"])
def test_the_readers_loop_gives_our_tokens_in_our_passes(family, name, tmp_path):
    # So few words that an untrained drafter is right now and then.
    changes = {**GEOMETRIES[name], "vocab_size": 6, "mask_token_id": 5}
    accepted, disturbed = 0, 0
    target = Target(tiny_target(family, vocab_size=6), BASE.target_layer_ids)
    for seed in range(8):
        folder = export(random_drafter(seed, **changes), tmp_path / str(seed))
        prompt, new = prompt_of(12 + seed, seed, 6), 40
        theirs, their_starts = reader_decodes(folder, target, prompt, new)
        ours = generate_speculative(target, load_drafter(folder, CPU, torch.float32), prompt, new, 0.0, set())
        starts = [len(prompt) + sum(ours.produced[:i]) for i in range(ours.passes)]
        assert theirs == ours.tokens
        end, block = len(prompt) + new, BASE.block_size
        assert whole_blocks(their_starts, end, block) == whole_blocks(starts, end, block)
        accepted += sum(ours.slots_accepted)

        edit_config(folder, lambda c: c["dflash_config"].update(target_layer_ids=[1, 3, 5]))
        theirs, their_starts = reader_decodes(folder, target, prompt, new)
        assert theirs == ours.tokens  # lossless whatever drafts: only the passes can show a wrong export
        disturbed += whole_blocks(their_starts, end, block) != whole_blocks(starts, end, block)
    assert accepted > 5
    assert disturbed >= 2


# ---- the folder ----


def test_config_holds_every_field_where_readers_look_for_it():
    values = zlab_config(random_drafter(**GEOMETRIES["sliding, bidirectional"]).config)
    assert values["architectures"] == ["DFlashDraftModel"]
    assert values["model_type"] == "qwen3"
    assert values["block_size"] == values["dflash_config"]["block_size"] == 6
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 10000.0
    assert values["rope_parameters"]["rope_type"] == "default"
    assert values["is_causal"] is False
    assert values["layer_types"] == [SLIDING, FULL, SLIDING]
    assert values["use_sliding_window"] is True
    assert values["sliding_window"] == 9
    assert values["max_window_layers"] == 0
    assert values["num_target_layers"] == 6
    assert values["dflash_config"]["mask_token_id"] == 130
    assert values["dflash_config"]["target_layer_ids"] == [0, 2, 4]
    assert values["head_dim"] == 16
    assert values["tie_word_embeddings"] is False


def test_config_of_full_attention_has_no_window_and_unknown_causality_stays_unwritten():
    values = zlab_config(dataclasses.replace(BASE, is_causal=None))
    assert values["use_sliding_window"] is False
    assert values["sliding_window"] is None
    assert values["max_window_layers"] == BASE.num_layers
    assert "is_causal" not in values
    assert zlab_config(dataclasses.replace(BASE, is_causal=True))["is_causal"] is True


@pytest.mark.parametrize("name", GEOMETRIES)
def test_weights_are_bf16_under_released_names_without_embedding_head_or_buffers(name, tmp_path):
    drafter = random_drafter(**GEOMETRIES[name])
    state = load_file(export(drafter, tmp_path / "export") / "model.safetensors")
    c = drafter.config
    h, f, d = c.hidden_size, c.intermediate_size, c.head_dim
    q, kv = c.num_heads * d, c.num_kv_heads * d
    shapes = {"fc.weight": (h, len(c.target_layer_ids) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for i in range(c.num_layers):
        for part, shape in {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,),
            "mlp.gate_proj": (f, h),
            "mlp.up_proj": (f, h),
            "mlp.down_proj": (h, f),
        }.items():
            shapes[f"layers.{i}.{part}.weight"] = shape
    assert {n: tuple(w.shape) for n, w in state.items()} == shapes
    assert len(state) == 11 * c.num_layers + 3
    assert all(w.dtype == torch.bfloat16 for w in state.values())


@pytest.mark.parametrize("name", GEOMETRIES)
def test_round_trip_gives_the_same_geometry_and_bf16_equal_weights(name, tmp_path):
    drafter = random_drafter(**GEOMETRIES[name])
    loaded = load_drafter(export(drafter, tmp_path / "export"), CPU, torch.float32)
    assert loaded.config == drafter.config
    rounded = 0
    for key, weight in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], weight.bfloat16().float())
        rounded += not torch.equal(loaded.state_dict()[key], weight)
    assert rounded == len(drafter.state_dict())  # else nothing was rounded and fp32 would pass unseen
    assert not any(p.requires_grad for p in loaded.parameters())
    again = load_drafter(export(loaded, tmp_path / "again"), CPU, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), loaded.parameters(), strict=True))


def test_a_run_is_exported_from_its_newest_checkpoint_with_where_it_came_from(tmp_path):
    drafter = random_drafter().requires_grad_(True)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.1)
    for step in (1, 2):
        for p in drafter.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        save_checkpoint(tmp_path / "run", drafter, optimizer, Position(step, 1.0, 5, "f"), keep=2)
    code = main(["export", "--checkpoint", str(tmp_path / "run"), "--output-dir", str(tmp_path / "out")])
    assert code == 0
    loaded = load_drafter(tmp_path / "out", CPU, torch.float32)
    assert loaded.config == drafter.config
    assert torch.equal(loaded.fc.weight, drafter.fc.weight.bfloat16().float())
    facts = json.loads((tmp_path / "out" / "slipstream.json").read_text())
    assert facts["checkpoint"] == "step_00000002"
    assert facts["position"]["step"] == 2
    older = export_run(tmp_path / "run" / "checkpoints" / "step_00000001", tmp_path / "older", replace=False)
    assert not torch.equal(load_drafter(older, CPU, torch.float32).fc.weight, loaded.fc.weight)


# ---- files that are not what they should be ----


def drop(*names: str) -> Callable[[dict[str, Any]], Any]:
    def change(values: dict[str, Any]) -> None:
        for name in names:
            values.pop(name, None)
            values["dflash_config"].pop(name, None)

    return change


BROKEN_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no hidden size": (drop("hidden_size"), "'hidden_size' is missing"),
    "no taps": (drop("target_layer_ids"), "'target_layer_ids' is missing"),
    "no mask token": (drop("mask_token_id"), "'mask_token_id' is missing"),
    "no block size": (drop("block_size"), "'block_size' is missing"),
    "no dflash_config": (lambda c: c.pop("dflash_config"), "'dflash_config' is missing"),
    "no rotary base": (lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")), "'rope_theta' is missing"),
    "another model": (lambda c: c.update(architectures=["Qwen3ForCausalLM"]), "Qwen3ForCausalLM"),
    "a later drafter": (lambda c: c.update(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
    "text for a number": (lambda c: c.update(head_dim="16"), "'head_dim' is '16', no int"),
    "a truth for a number": (lambda c: c.update(head_dim=True), "'head_dim' is True, no int"),
    "a number for a truth": (lambda c: c.update(is_causal=0), "'is_causal' is 0, no bool"),
    "no heads at all": (lambda c: c.update(num_key_value_heads=0), "'num_key_value_heads' is 0"),
    "heads that do not divide": (lambda c: c.update(num_key_value_heads=3), "3 key/value heads"),
    "taps of text": (lambda c: c["dflash_config"].update(target_layer_ids=["1"]), "not a list of int"),
    "a tap out of range": (
        lambda c: c["dflash_config"].update(target_layer_ids=[5]),
        "tap 5 is out of range",
    ),
    "mask token out of range": (lambda c: c["dflash_config"].update(mask_token_id=131), "mask token 131"),
    "stretched rotary": (lambda c: c["rope_parameters"].update(rope_type="yarn"), "'yarn'"),
    "unknown layer type": (lambda c: c.update(layer_types=["linear_attention", FULL]), "'linear_attention'"),
    "too few layer types": (lambda c: c.update(layer_types=[FULL]), "1 layer types for 2 layers"),
    "sliding without window": (lambda c: c.update(layer_types=[SLIDING, FULL]), "'use_sliding_window'"),
}


@pytest.mark.parametrize("name", BROKEN_CONFIGS)
def test_a_broken_config_is_refused_with_file_and_field(name, tmp_path):
    folder = export(random_drafter(), tmp_path / "export")
    change, expected = BROKEN_CONFIGS[name]
    edit_config(folder, change)
    with pytest.raises(UserError) as e:
        load_drafter(folder, CPU, torch.float32)
    assert str(folder / "config.json") in str(e.value)
    assert str(e.value).count("config.json") == 1
    assert expected in str(e.value)
    assert "\n" not in str(e.value)


FC = "fc.weight"
BROKEN_WEIGHTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda s: s.pop("norm.weight"), "tensor norm.weight is missing"),
    "extra": (lambda s: s.update({"lm_head.weight": torch.zeros(2, 2)}), "tensor lm_head.weight is none"),
    "wrong shape": (lambda s: s.update({FC: s[FC][:, :-1].clone()}), "tensor fc.weight is (64, 191)"),
    "quantised": (lambda s: s.update({FC: s[FC].to(torch.int8)}), "tensor fc.weight is torch.int8"),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_wrong_tensors_are_refused_with_file_and_tensor(name, tmp_path):
    folder = export(random_drafter(), tmp_path / "export")
    change, expected = BROKEN_WEIGHTS[name]
    edit_weights(folder, change)
    with pytest.raises(UserError) as e:
        load_drafter(folder, CPU, torch.float32)
    assert str(folder / "model.safetensors") in str(e.value)
    assert expected in str(e.value)


@pytest.mark.parametrize(
    ("name", "spoil", "expected"),
    [
        ("model.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-100]), "truncated or damaged"),
        ("model.safetensors", lambda p: p.write_bytes(b"\x01"), "truncated or damaged"),
        ("model.safetensors", Path.unlink, "not found"),
        ("config.json", lambda p: p.write_bytes(p.read_bytes()[:40]), "not valid JSON"),
        ("config.json", lambda p: p.write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
        ("config.json", lambda p: p.write_text("[1]"), "holds a list"),
        ("config.json", Path.unlink, "No such file"),
    ],
)
def test_a_missing_or_cut_file_is_refused_by_name(name, spoil, expected, tmp_path):
    folder = export(random_drafter(), tmp_path / "export")
    spoil(folder / name)
    with pytest.raises(UserError, match=expected) as e:
        load_drafter(folder, CPU, torch.float32)
    assert str(folder / name) in str(e.value)
    assert "\n" not in str(e.value)


def test_a_config_without_layer_types_is_read_as_qwen3_reads_it():
    values = zlab_config(random_drafter(**GEOMETRIES["sliding, causal"]).config)
    del values["layer_types"]
    values["max_window_layers"] = 2
    assert config_from_zlab(values, "c").layer_types == (FULL, FULL, SLIDING)
    values["use_sliding_window"] = False
    assert config_from_zlab(values, "c").layer_types == (FULL, FULL, FULL)
    assert config_from_zlab(values, "c").sliding_window is None


def test_facts_at_the_top_level_only_are_found_and_dflash_config_wins():
    values = zlab_config(BASE)
    values |= {"mask_token_id": 7, "target_layer_ids": [1, 2]}
    assert config_from_zlab(values, "c") == BASE
    del values["dflash_config"]["mask_token_id"], values["dflash_config"]["target_layer_ids"]
    read = config_from_zlab(values, "c")
    assert (read.mask_token_id, read.target_layer_ids) == (7, (1, 2))


# ---- written as a whole or not at all ----


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_folder_that_holds_something_is_left_alone_and_replace_takes_an_earlier_export(tmp_path):
    first, second = random_drafter(0), random_drafter(1)
    folder = export(first, tmp_path / "export")
    with pytest.raises(UserError, match="not empty"):
        export(second, folder)
    assert torch.equal(load_drafter(folder, CPU, torch.float32).fc.weight, first.fc.weight.bfloat16().float())
    export_zlab(second.config, second.state_dict(), folder, {}, replace=True)
    assert torch.equal(
        load_drafter(folder, CPU, torch.float32).fc.weight, second.fc.weight.bfloat16().float()
    )
    assert names(tmp_path) == ["export"]


def test_the_weights_can_be_read_by_a_server_of_another_user(tmp_path):
    folder = export(random_drafter(), tmp_path / "export")
    assert (folder / "model.safetensors").stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("earlier", [False, True])
def test_a_disk_that_refuses_the_weights_leaves_what_was_there(earlier, tmp_path):
    first, second = random_drafter(0), random_drafter(1)
    folder = tmp_path / "export"
    if earlier:
        export(first, folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a real refusal by the system: EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write the export .*File too large") as e:
            export_zlab(second.config, second.state_dict(), folder, {}, replace=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(e.value)
    assert names(tmp_path) == (["export"] if earlier else [])
    if earlier:
        assert torch.equal(
            load_drafter(folder, CPU, torch.float32).fc.weight, first.fc.weight.bfloat16().float()
        )


@pytest.mark.parametrize("call", range(7))
def test_a_disk_full_at_any_later_moment_leaves_a_whole_export_or_none(call, tmp_path, monkeypatch):
    """The n-th sync or rename fails: there must be one whole drafter, the earlier or the new one."""
    first, second = random_drafter(0), random_drafter(1)
    folder = export(first, tmp_path / "export")
    left = call
    failed = False

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any) -> Any:
            nonlocal left, failed
            left -= 1
            if left < 0 and not failed:
                failed = True
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        return do

    monkeypatch.setattr(zlab, "fsync", failing(zlab.fsync))
    monkeypatch.setattr(zlab.os, "replace", failing(os.replace))
    with pytest.raises(UserError, match="No space left on device"):
        export_zlab(second.config, second.state_dict(), folder, {}, replace=True)
    assert failed
    found = load_drafter(folder, CPU, torch.float32).fc.weight
    assert any(torch.equal(found, d.fc.weight.bfloat16().float()) for d in (first, second))
    assert [n for n in names(tmp_path) if not n.endswith(".old")] == ["export"]


def test_leftovers_of_a_killed_export_are_no_hindrance(tmp_path):
    for name in (".export.partial", ".export.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    export(random_drafter(), tmp_path / "export")
    assert names(tmp_path) == ["export"]


def test_errors_of_the_export_verb_are_one_line_and_exit_code_2(tmp_path, capsys):
    for checkpoint, expected in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, "holds no complete checkpoint"),
    ):
        code = main(["export", "--checkpoint", str(checkpoint), "--output-dir", str(tmp_path / "out")])
        assert code == 2
        error = capsys.readouterr().err
        assert expected in error
        assert error.count("\n") == 1
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write the export"):
        export(random_drafter(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_the_proposer_drafts_with_the_exported_scale_and_mask_token(tmp_path, target):
    folder = export(random_drafter(input_embedding_scale=3.0, mask_token_id=9), tmp_path / "export")
    drafter = load_drafter(folder, CPU, torch.float32)
    proposer = DrafterProposer(target, drafter, 8, drafter.config.block_size, 0.0, None)
    assert torch.equal(proposer.embeds_BH[3], target.embedding_VH[9] * 3.0)
