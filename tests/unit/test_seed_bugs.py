"""The six bugs this project began from, each with the test that would have caught it.

Geometry copied from the target · one document a row · no noise · blocks across documents · positions that run
on · attention that falls back to dense without a word. What these tests only touch is proven at length in
tests/properties.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex_module
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from slipstream.config import TrainConfig, UserError
from slipstream.data.pack import Row, make_row, pack_rows
from slipstream.data.records import Document
from slipstream.models.drafter import Drafter, Layer
from slipstream.models.parts import RMSNorm
from slipstream.models.target import Target
from slipstream.training import attention as attention_module
from slipstream.training import loop, step
from slipstream.training.attention import choose_attention, fused_only, make_attend
from slipstream.training.blocks import Blocks, add_noise, draw_anchors, make_blocks
from slipstream.training.metrics import Display
from slipstream.training.run import Rows
from slipstream.training.setup import drafter_config
from tests.fixtures_data import memory_dataset
from tests.tiny import tiny_target
from tests.training import LAYOUTS, MASK, make_drafter, run_of, supervised_row
from tests.training import drafter_config as tiny_drafter_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@functools.cache
def target_of(family: str) -> Target:
    return Target(tiny_target(family), (0, 2, 4))


def tiny_run(family: str = "qwen3", attention: str = "documents", **settings: Any):
    drafter = make_drafter(tiny_drafter_config(block_size=settings.get("block_size", 5)))
    return run_of(target_of(family), drafter, attention, **settings)


# --- 1: the drafter's geometry is its own


@functools.cache
def large_target() -> Target:
    """Hidden size 5120 with 24/4 heads of 256: heads that no drafter can have. Shapes only."""
    config = Qwen3_5TextConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=4,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=1000,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return Target(model, (0, 2))


def test_bug_1_drafter_geometry_is_its_own_and_not_the_target_s():
    target = large_target()
    attention: Any = target.layers[3].self_attn
    assert (attention.head_dim, attention.k_proj.out_features) == (256, 4 * 256), "the trap is there"
    config = drafter_config(TrainConfig(layers=3), target.ends, mask_token_id=7)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.intermediate_size == 15360
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (5120, 1000, 4)
    with torch.device("meta"):
        layer: Any = Drafter(config).layers[0]
    assert layer.self_attn.q_proj.weight.shape == (32 * 128, 5120)
    assert layer.self_attn.k_proj.weight.shape == (8 * 128, 5120)
    assert layer.mlp.gate_proj.weight.shape == (15360, 5120)


@pytest.mark.parametrize(
    ("settings", "geometry"),
    [
        ({"heads": 16, "head_dim": 96}, (16, 8, 96, 15360)),
        ({"heads": 20, "kv_heads": 5, "intermediate_size": 1000}, (20, 5, 128, 1000)),
        ({"heads": 9}, (9, 3, 128, 15360)),
        ({"intermediate_size": 17408}, (32, 8, 128, 17408)),
    ],
)
def test_bug_1_heads_and_mlp_are_chosen_freely(settings, geometry):
    config = drafter_config(TrainConfig(**settings), large_target().ends, mask_token_id=7)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == geometry
    config.check_against_target(5120, 1000, 4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 4096}, "hidden size is 4096, the target's is 5120"),
        ({"vocab_size": 999}, "vocabulary is 999, the target's is 1000"),
        ({"num_target_layers": 64}, "number of target layers is 64, the target's is 4"),
    ],
)
def test_bug_1_the_check_names_what_must_match_the_target(change, named):
    config = replace(drafter_config(TrainConfig(), large_target().ends, mask_token_id=7), **change)
    with pytest.raises(UserError, match=named) as e:
        config.check_against_target(5120, 1000, 4)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_heads": 24, "num_kv_heads": 4, "head_dim": 256},
        {"num_heads": 6, "num_kv_heads": 1, "head_dim": 32},
        {"intermediate_size": 17},
        {"num_layers": 1, "layer_types": ()},
        {"target_layer_ids": (1,)},
        {"block_size": 7},
        {"rope_theta": 5.0},
    ],
)
def test_bug_1_everything_else_may_differ(change):
    config = replace(drafter_config(TrainConfig(), large_target().ends, mask_token_id=7), **change)
    config.check_against_target(5120, 1000, 4)


# --- 2: packing


def chat_lengths() -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(4.2, 0.7, 400)).astype(int) + 8


def test_bug_2_packing_fills_rows_with_many_whole_documents():
    lengths = chat_lengths()
    packing = pack_rows(lengths, 1024, "reject")
    one_a_row = lengths.sum() / (len(lengths) * 1024)
    assert one_a_row < 0.1, "what a document a row would use"
    assert packing.utilisation > 0.96
    pieces = [packing.pieces(r) for r in range(len(packing))]
    assert np.mean([len(p) for p in pieces]) > 8
    whole = sorted(piece for p in pieces for piece in p)
    assert whole == [(d, 0, int(n)) for d, n in enumerate(lengths)], "each once, from end to end"


def test_bug_2_a_packed_row_trains_on_every_document_it_holds():
    lengths = chat_lengths()[:40]
    ids = [np.arange(n) * 7 % 120 + 3 for n in lengths]
    data = memory_dataset([Document(i, np.arange(len(i)) >= 4) for i in ids])
    packing = pack_rows(lengths, 512, "truncate")
    row = make_row(data, packing, 0)
    held = len(packing.pieces(0))
    assert held > 2
    _, blocks = loop.row_loss(tiny_run(max_anchors=512), row, target_of("qwen3").taps, (0, 0, 0), 0.0)
    assert set(blocks.documents_N[: blocks.count].tolist()) == set(range(held))
    assert blocks.labelled == int(row.supervised.sum()) - held, "all but the first answer token of each"


# --- 3: noise on the taps


def noise_of(kind: str, size: float, row: Row, key: tuple[int, int, int]) -> Tensor:
    return add_noise(torch.zeros(len(row.input_ids), 600), kind, size, row, key)


def test_bug_3_noise_is_uniform_or_gaussian_of_the_size_asked_for():
    row = supervised_row([[True] * 80])
    uniform, gaussian = noise_of("uniform", 0.05, row, (0, 0, 0)), noise_of("gaussian", 0.05, row, (0, 0, 0))
    assert 0.0499 < float(uniform.abs().max()) <= 0.05
    assert float(uniform.std()) == pytest.approx(0.05 / 3**0.5, rel=0.02)
    assert float(gaussian.std()) == pytest.approx(0.05, rel=0.02)
    assert float(gaussian.abs().max()) > 0.15
    assert abs(float(uniform.mean())) < 1e-3
    assert abs(float(gaussian.mean())) < 1e-3


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_bug_3_noise_is_a_function_of_seed_epoch_and_row_alone(kind):
    row = supervised_row([[True] * 10], row_id=3)
    first = noise_of(kind, 0.05, row, (1, 2, 0))
    torch.manual_seed(99)
    noise_of(kind, 0.05, row, (7, 7, 7))
    assert torch.equal(noise_of(kind, 0.05, row, (1, 2, 0)), first)
    others = [noise_of(kind, 0.05, row, key) for key in ((2, 2, 0), (1, 3, 0), (1, 2, 1))]
    others.append(noise_of(kind, 0.05, replace(row, row_id=4), (1, 2, 0)))
    assert not any(torch.equal(first, other) for other in others)
    state = torch.random.get_rng_state()
    noise_of(kind, 0.05, row, (1, 2, 0))
    assert torch.equal(torch.random.get_rng_state(), state), "nobody else's random numbers are used up"


def test_bug_3_noise_falls_on_the_taps_alone_and_zero_is_none_to_the_last_bit(monkeypatch):
    row, run = supervised_row(LAYOUTS["holes"], 2), tiny_run(noise_kind="gaussian")
    given: list[tuple[Tensor, ...]] = []
    run.drafter.register_forward_pre_hook(lambda module, args: given.append(args))
    clean, _ = loop.row_loss(run, row, run.taps, (0, 0, 0), noise=0.0)
    noisy, _ = loop.row_loss(run, row, run.taps, (0, 0, 0), noise=0.5)
    monkeypatch.setattr(step, "add_noise", lambda *args: pytest.fail("noise of size 0 was added"))
    again, _ = loop.row_loss(run, row, run.taps, (0, 0, 0), noise=0.0)
    assert torch.equal(given[0][0], run.taps(row))
    assert torch.equal(given[1][0], add_noise(given[0][0], "gaussian", 0.5, row, (0, 0, 0)))
    assert all(torch.equal(a, b) for a, b in zip(given[0][1:4], given[1][1:4], strict=True))
    assert torch.equal(clean.total, again.total)
    assert not torch.equal(clean.total, noisy.total)


def test_bug_3_training_adds_the_noise_and_validation_none(monkeypatch, tmp_path):
    """A whole run of three steps: which rows' taps reach the drafter changed, and which do not."""
    lengths = [20, 17, 30, 9, 25, 12]
    ids = [np.arange(n) * 7 % 120 + 3 for n in lengths]
    dataset = memory_dataset([Document(i, np.arange(len(i)) >= 2) for i in ids])
    packing = pack_rows(np.array(lengths), 40, "reject")
    rows = Rows(dataset, packing, len(packing))
    run = tiny_run(folder=tmp_path / "run", rows=rows, heldout=rows, steps=3, noise=0.25, eval_interval=2)
    added, given, phase = [], [], []
    monkeypatch.setattr(step, "add_noise", lambda *args: (added.append(args[2:]), add_noise(*args))[1])
    validate = loop.validate

    def watched(run: Any) -> Any:
        phase.append("validation")
        facts = validate(run)
        phase.pop()
        return facts

    monkeypatch.setattr(loop, "validate", watched)
    clean = [run.target.taps(rows.row(i)) for i in range(rows.count)]
    run.drafter.register_forward_pre_hook(
        lambda module, args: given.append((bool(phase), any(torch.equal(args[0], c) for c in clean)))
    )
    run.folder.mkdir()
    loop.train(run, Display(Console(quiet=True)))
    validated = [untouched for validation, untouched in given if validation]
    trained = [untouched for validation, untouched in given if not validation]
    assert len(trained) == 3
    assert not any(trained)
    assert len(validated) == 2 * rows.count, "after two steps and at the end"
    assert all(validated)
    planned = [run.plan.at(i) for i in range(3)]
    assert [(size, row.row_id, key) for size, row, key in added] == [
        (0.25, index, (run.config.seed, epoch, 0)) for epoch, index in planned
    ]


# --- 4: anchors and labels stay in their document


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_bug_4_anchors_and_labels_never_cross_a_document(layout, block_size):
    """More layouts, and every rule of anchors and labels, in tests/properties/test_blocks.py."""
    masks = LAYOUTS[layout]
    for padding in (0, 3):
        row = supervised_row(masks, padding)
        anchors = draw_anchors(row, 99, (0, 0, 0))
        blocks = make_blocks(row, anchors, 99, block_size, MASK)
        within(row, blocks)
        possible = sum(a and b for mask in masks for a, b in itertools.pairwise(mask))
        assert blocks.count == possible, "short documents and tails are not dropped either"


def within(row: Row, blocks: Blocks) -> None:
    for n, k in blocks.valid_NB.nonzero().tolist():
        place = int(blocks.anchors_N[n]) + k
        assert place < len(row.input_ids)
        assert row.documents[place] == row.documents[blocks.anchors_N[n]] >= 0
        assert row.supervised[place]
        assert row.supervised[blocks.anchors_N[n]]


def test_bug_4_the_check_tells_blocks_that_run_into_the_next_document():
    """A row whose documents were forgotten: one long document, as rows without boundaries have it."""
    row = supervised_row(LAYOUTS["supervision touches the border"])
    forgotten = replace(row, documents=torch.zeros_like(row.documents))
    blocks = make_blocks(forgotten, draw_anchors(forgotten, 99, (0, 0, 0)), 99, 5, MASK)
    with pytest.raises(AssertionError):
        within(row, blocks)


# --- 5: positions


def given_positions(family: str, isolation: str, row: Row) -> tuple[list[Tensor], Tensor, Tensor, Blocks]:
    """What the loop gives: positions of the target's passes, of the drafter's context and of its blocks."""
    run = tiny_run(family)
    target, drafter = run.target, run.drafter
    before, target.isolation = target.isolation, isolation
    passes, args = [], []

    def hook(module: nn.Module, positional: Any, named: dict[str, Any]) -> None:
        passes.append(named["position_ids"])

    handle = target.decoder.register_forward_pre_hook(hook, with_kwargs=True)
    drafter.register_forward_pre_hook(lambda module, positional: args.append(positional))
    _, blocks = loop.row_loss(run, row, target.taps, (0, 0, 0), noise=0.0)
    handle.remove()
    target.isolation = before
    return passes, args[0][1], args[0][3], blocks


def check_positions(family: str, isolation: str) -> None:
    documents = [Document(np.arange(n) + 3, np.ones(n, bool)) for n in (9, 14, 1, 11)]
    packing = pack_rows(np.array([9, 14, 1, 11]), 40, "reject")
    row, lengths = make_row(memory_dataset(documents), packing, 0), [end for _, _, end in packing.pieces(0)]
    assert sorted(lengths) == [1, 9, 11, 14], "one row of four documents"
    passes, context, block, blocks = given_positions(family, isolation, row)
    restarting = [p for n in lengths for p in range(n)]
    if isolation == "packed":
        assert [p.tolist() for p in passes] == [[restarting]]
    else:
        for each in passes:
            assert all(line == list(range(each.shape[1])) for line in each.tolist())
        assert sorted({each.shape[1] for each in passes})[-1] == 14
    assert context.tolist()[:35] == restarting
    expected = [
        restarting[anchor] + slot for anchor in blocks.anchors_N[: blocks.count].tolist() for slot in range(5)
    ]
    assert block.tolist()[: len(expected)] == expected
    assert len(block) == len(blocks.anchors_N) * 5


@pytest.mark.parametrize(
    ("family", "isolation"), [("qwen3", "packed"), ("qwen3", "unpacked"), ("hybrid", "unpacked")]
)
def test_bug_5_positions_given_to_target_and_drafter_restart_in_every_document(family, isolation):
    """Rotary attention is relative: outputs cannot show this bug, the tensors that are handed over can."""
    check_positions(family, isolation)


def run_on(row: Row, *rest: Any) -> Blocks:
    return make_blocks(replace(row, positions=torch.arange(len(row.positions))), *rest)


def from_the_anchor(*args: Any) -> Blocks:
    blocks = make_blocks(*args)
    return replace(blocks, positions_NB=torch.arange(blocks.block_size).expand_as(blocks.positions_NB))


@pytest.mark.parametrize("fault", [run_on, from_the_anchor])
def test_bug_5_the_check_tells_positions_that_run_on_or_start_at_the_anchor(
    fault: Callable[..., Blocks], monkeypatch
):
    monkeypatch.setattr(step, "make_blocks", fault)
    with pytest.raises(AssertionError):
        check_positions("qwen3", "unpacked")


def test_bug_5_the_check_tells_a_target_whose_positions_run_on(monkeypatch):
    taps = Target.taps

    def running_on(self: Target, row: Row) -> Tensor:
        return taps(self, replace(row, positions=torch.arange(len(row.positions))))

    monkeypatch.setattr(Target, "taps", running_on)
    with pytest.raises(AssertionError):
        check_positions("qwen3", "packed")


# --- 6: attention is fused, or it is an error


def test_bug_6_attention_is_compiled_flex_on_a_gpu_and_never_dense():
    assert choose_attention("auto", CUDA) == choose_attention("flex", CUDA) == "flex"
    with pytest.raises(UserError, match=r"--attention dense.*use flex") as e:
        choose_attention("dense", CUDA)
    assert "\n" not in str(e.value)


def test_bug_6_without_a_compiler_a_gpu_attends_by_document_and_never_runs_flex_uncompiled():
    assert choose_attention("auto", CUDA, compiled=False) == "documents"
    with pytest.raises(UserError, match=r"--attention flex.*leave out --no-compile"):
        choose_attention("flex", CUDA, compiled=False)


def test_bug_6_attention_on_a_cpu_is_what_can_train_there():
    assert choose_attention("auto", CPU) == choose_attention("documents", CPU) == "documents"
    assert choose_attention("dense", CPU) == "dense"
    with pytest.raises(UserError, match=r"--attention flex.*no backward on a CPU.*use auto") as e:
        choose_attention("flex", CPU)
    assert "\n" not in str(e.value)


def test_bug_6_flex_runs_through_the_compiled_kernel(monkeypatch):
    used = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        used.append(options["block_mask"])
        return q

    monkeypatch.setattr(attention_module, "fused_only", kernel)
    run = tiny_run(attention="flex")
    loop.row_loss(run, supervised_row(LAYOUTS["holes"], 3), run.taps, (0, 0, 0), 0.0)
    assert len(used) == run.drafter.config.num_layers


def test_bug_6_layers_are_compiled_whole_and_for_fixed_shapes(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: asked.append((f, options)) or f)
    tiny_run().drafter.use_gpu(torch.float32, compiled=True)
    assert [f for f, _ in asked] == [Drafter.context, Layer.forward, RMSNorm.forward]
    assert all(options == {"fullgraph": True, "dynamic": False} for _, options in asked)


def some_qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)


def test_bug_6_the_drafter_s_flex_never_runs_dense_even_where_torch_has_ceased_to_warn(monkeypatch):
    monkeypatch.setattr(flex_module, "_WARNINGS_SHOWN", {"flex_attention_performance"})
    run = tiny_run(attention="flex")
    row = supervised_row(LAYOUTS["holes"], 3)
    blocks = make_blocks(row, draw_anchors(row, 8, (0, 0, 0)), 8, 5, MASK)
    attend = make_attend("flex", blocks, run.drafter.config)
    q, k = torch.randn(6, 40, 8), torch.randn(2, len(row.input_ids) + 40, 8)
    s = len(row.input_ids)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(UserError, match=r"would run dense.*unset TORCH_COMPILE_DISABLE") as e,
    ):
        attend("full_attention", q, k[:, :s], k[:, :s], k[:, s:], k[:, s:])
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="would run dense"):
        fused_only(
            *some_qkv(),
            block_mask=attention_module.flex_mask(blocks, run.drafter.config, "full_attention"),
            enable_gqa=True,
        )
