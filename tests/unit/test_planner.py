"""What a run needs: predictions against what was measured, what was traced, what was counted.

Figures of the true shape were measured on one NVIDIA H200 with torch 2.11 (a drafter of 1.73 B parameters for
a hybrid target of 27 B; docs/performance.md).
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig

from slipstream import cli
from slipstream.config import TrainConfig, UserError
from slipstream.models.drafter import Drafter, DrafterConfig, Layer
from slipstream.models.parts import rotary
from slipstream.models.sketch import sketch_target
from slipstream.models.target import Head, Target, default_target_layer_ids, load_target
from slipstream.system import planner
from slipstream.system.facts import GIB
from slipstream.system.memory import (
    Need,
    TargetShape,
    drafter_parameters,
    kept_by_layer,
    need_of,
    predict,
    roles,
    shape_of_ends,
    target_shape,
    what_fits,
)
from slipstream.system.planner import say_memory, say_out_of_memory
from slipstream.system.scaling import sizes_of
from slipstream.training import loss
from slipstream.training.attention import make_attend
from slipstream.training.blocks import decay_weights, draw_anchors, make_blocks
from slipstream.training.flops import (
    RowFlops,
    expected_seconds,
    matmul_ceiling,
    row_flops,
    step_flops,
    target_layers,
)
from slipstream.training.loss import SlotWeights, block_loss
from tests import training
from tests.fixtures_data import byte_tokenizer, chat, write_jsonl
from tests.fp8_files import quantization, set_config
from tests.tiny import random_row, tiny_target

CPU = torch.device("cpu")
TRUE = DrafterConfig(
    hidden_size=5120, vocab_size=248320, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=17408, block_size=16, mask_token_id=248070, target_layer_ids=(1, 16, 31, 46, 61),
    num_target_layers=64, rope_theta=1e7,
)  # fmt: skip
HEAD_ONLY = TargetShape(2 * 2 * 248320 * 5120, (0,))
"""An embedding and a head of the true shape, with nothing between: what a benchmark of the drafter holds."""


@pytest.fixture(scope="module")
def true_target() -> TargetShape:
    config = Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
        num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return target_shape(Target(model, default_target_layer_ids(64, 5)), 2)


# ---- memory: against measurements ----


@pytest.mark.parametrize(("tiles", "measured"), [(13, 8.57), (26, 9.47), (39, 10.2)])
def test_activations_and_head_chunk_of_the_true_shape_are_the_measured_ones(monkeypatch, tiles, measured):
    monkeypatch.setattr(loss, "CHUNK_TILES", tiles)
    need = predict(TrainConfig(), TRUE, HEAD_ONLY)
    assert need.peak == "the head"
    assert need.parts["activations"] + need.parts["head chunk"] == pytest.approx(measured * GIB, rel=0.04)


def test_a_whole_step_of_the_true_drafter_is_the_measured_one():
    need = predict(TrainConfig(), TRUE, HEAD_ONLY)
    assert need.total - need.parts["reserve"] == pytest.approx(36.5 * GIB, rel=0.03)


def test_the_whole_true_pair_is_predicted_to_stay_under_90_gib(true_target):
    need = predict(TrainConfig(), TRUE, true_target)
    assert need.parts["target weights"] == pytest.approx(50.1 * GIB, rel=0.01)
    assert 80 * GIB < need.total < 90 * GIB


def test_the_target_pass_of_the_true_shape_is_bounded_above_what_stock_layers_took(true_target):
    """2.0 GiB were measured above the weights, taps included, with stock layers; fused ones take less."""
    need = predict(TrainConfig(), TRUE, true_target)
    at_rest = ("target weights", "drafter masters", "drafter working copies", "optimiser's moments")
    above = need.phases["the target's pass"] - sum(need.parts[part] for part in at_rest)
    assert 2.0 * GIB < above < 2.5 * GIB


# ---- memory: against the program ----


def test_what_a_layer_keeps_is_what_its_compiled_graph_saves():
    """Traced with the partitioner that compiled layers use; attention is an operator that keeps what flex
    attention keeps: its inputs, its output, one fp32 number a query and head.
    """

    @torch.library.custom_op("planner_test::attend", mutates_args=())
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)

    @torch.library.custom_op("planner_test::attend_back", mutates_args=())
    def back(
        d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    @attend.register_fake
    def _(q, k, v):
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    @back.register_fake
    def _(d_out, q, k, v, out, lse):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    attend.register_autograd(
        lambda ctx, d_out, d_lse: back(d_out, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    )

    def attention(kind: str, q: Tensor, k: Tensor, v: Tensor, k_blk: Tensor, v_blk: Tensor) -> Tensor:
        return attend(q, torch.cat((k, k_blk), dim=1), torch.cat((v, v_blk), dim=1))[0]

    s, q = 192, 256
    config = training.drafter_config(
        hidden_size=320, num_heads=8, num_kv_heads=2, head_dim=32, intermediate_size=1088, num_layers=1
    )
    drafter = Drafter(config)
    drafter.use_gpu(torch.bfloat16, compiled=False)
    x, ctx = (torch.randn(n, 320, dtype=torch.bfloat16, requires_grad=True) for n in (q, s))
    ropes = [rotary(torch.arange(n), config.head_dim, 1e4) for n in (q, s)]
    not_kept = [*drafter.parameters(), *(w.copy for w in drafter.linears()), ctx, *ropes[0], *ropes[1]]
    known = {t.untyped_storage().data_ptr() for t in not_kept if t is not None}
    saved: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    forward = torch.compile(Layer.forward, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = forward(drafter.layers[0], x, ctx, *ropes, attention)
    kept = sum(size for at, size in saved.items() if at not in known)
    assert out.shape == x.shape
    assert kept == pytest.approx(kept_by_layer(config, s, q, 2), rel=0.01)


def test_the_count_of_parameters_is_that_of_the_drafter():
    with torch.device("meta"):
        assert drafter_parameters(TRUE) == sum(p.numel() for p in Drafter(TRUE).parameters())


# ---- memory: properties ----

sizes = st.fixed_dictionaries(
    {
        "token_budget": st.integers(16, 20000),
        "max_anchors": st.integers(1, 4096),
        "rows_per_step": st.integers(1, 4),
        "anchor_draws": st.integers(1, 3),
        "noise": st.sampled_from([0.0, 0.05]),
        "activation_checkpointing": st.booleans(),
        "target_fp8": st.booleans(),
        "dtype": st.sampled_from(["auto", "float32"]),
        "taps_dir": st.sampled_from([None, "taps"]),
    }
)
ranks = st.fixed_dictionaries(
    {
        "link_credits": st.integers(1, 3),
        "drafter_sharding": st.booleans(),
        "target_sharding": st.booleans(),
    }
).flatmap(
    lambda shared: st.sampled_from(
        [{}, {"ranks": 2}, {"ranks": 4}, {"dp_pairs": 2}, {"target_ranks": 3, "drafter_ranks": 1}]
    ).map(lambda place: shared | place)
)
"""Placements of up to four ranks, for recipes of twelve rows a step or a multiple."""


def on_ranks(recipe: dict[str, Any], place: dict[str, Any]) -> TrainConfig:
    """A recipe that those ranks accept: no recorded taps in a split run, rows for all."""
    placed = recipe | place | {"rows_per_step": recipe["rows_per_step"] * (12 if place else 1)}
    split = "dp_pairs" in place or "target_ranks" in place
    return TrainConfig(**placed | ({"taps_dir": None} if split else {}))


drafters = st.builds(
    lambda layers, block, width, mlp: replace(
        TRUE, num_layers=layers, layer_types=("full_attention",) * layers, block_size=block,
        hidden_size=width, intermediate_size=mlp,
    ),
    st.integers(1, 12), st.integers(2, 32), st.sampled_from([64, 576, 5120]), st.integers(64, 20000),
)  # fmt: skip
targets = st.builds(
    lambda weights, ends, layers: TargetShape(weights + ends, layers, ends, weights // max(len(layers), 2)),
    st.integers(0, 10**11), st.integers(0, 10**10),
    st.lists(st.integers(0, 10**9), min_size=1).map(tuple),
)  # fmt: skip


@given(sizes, ranks, drafters, targets)
@settings(max_examples=80, deadline=None)
def test_parts_sum_to_the_total_and_more_of_anything_needs_no_less(recipe, place, geometry, target):
    config = on_ranks(recipe, place)
    needs = [need_of(config, geometry, target, role) for role in roles(config)]
    for need in needs:
        assert sum(need.parts.values()) == need.total
        assert min(need.parts.values()) >= 0
        assert need.total - need.parts["reserve"] == max(need.phases.values()) == need.phases[need.peak]
    need = predict(config, geometry, target)
    assert need.total == max(each.total for each in needs)
    more = [
        predict(replace(config, token_budget=config.token_budget + 100), geometry, target),
        predict(replace(config, max_anchors=config.max_anchors + 7), geometry, target),
        predict(config, more_layers(geometry), target),
    ]
    assert all(other.total >= need.total for other in more)
    trained = roles(config)[0]  # a drafter, colocated or not
    one_more = need_of(config, more_layers(geometry), target, trained)
    assert one_more.total > need_of(config, geometry, target, trained).total


def more_layers(geometry: DrafterConfig) -> DrafterConfig:
    return replace(
        geometry, num_layers=geometry.num_layers + 1, layer_types=(*geometry.layer_types, "full_attention")
    )


@given(sizes, ranks, drafters, targets, st.floats(0.3, 0.99))
@settings(max_examples=80, deadline=None)
def test_settings_that_are_offered_really_fit_when_they_are_typed(recipe, place, geometry, target, share):
    config = on_ranks(recipe | {"block_size": geometry.block_size, "layers": geometry.num_layers}, place)
    capacity = int(share * predict(config, geometry, target).total)
    for offer in what_fits(config, geometry, target, capacity):
        flags, said = re.fullmatch(r"(.*) \((.*) GiB\)", offer).groups()  # type: ignore[union-attr]
        typed = typed_recipe(config, flags)
        kinds = geometry.layer_types[: typed.layers]
        need = predict(typed, replace(geometry, num_layers=typed.layers, layer_types=kinds), target)
        assert need.total <= capacity
        assert f"{need.total / GIB:.1f}" == said


def typed_recipe(config: TrainConfig, flags: str) -> TrainConfig:
    flags = flags.replace("with taps of `slipstream cache`", "taps")
    return tyro.cli(TrainConfig, default=config, args=shlex.split(flags))


def test_offers_are_cheapest_first_and_one_change_each(true_target):
    config = TrainConfig(rows_per_step=4, target_fp8=True)
    capacity = predict(config, TRUE, true_target).total - GIB
    offers = [offer.split()[0] for offer in what_fits(config, TRUE, true_target, capacity)]
    assert offers == [
        "--no-target-fp8", "--activation-checkpointing", "--rows-per-step", "--max-anchors", "--layers",
    ]  # fmt: skip


def test_where_no_single_setting_is_enough_several_are_offered_together():
    config = TrainConfig(token_budget=65536, max_anchors=4096, rows_per_step=2)
    geometry = replace(TRUE, num_layers=1, layer_types=("full_attention",))
    target = TargetShape(4 * GIB, (0,))
    (offer,) = what_fits(config, geometry, target, capacity=16 * GIB)
    assert "--activation-checkpointing" in offer
    assert "--max-anchors" in offer
    assert "--token-budget" in offer


# ---- memory: by role ----


def test_a_rank_holds_what_its_role_asks_for(true_target):
    config = TrainConfig(target_ranks=6, drafter_ranks=2, link_credits=3)
    assert roles(config) == ("drafter", "target")
    both = predict(TrainConfig(), TRUE, true_target)
    drafter, target = (need_of(config, TRUE, true_target, role) for role in roles(config))
    row = both.parts["taps"]
    assert drafter.parts["target's embedding and head"] == 2 * 2 * 248320 * 5120
    assert drafter.parts["taps"] == 3 * row
    assert target.parts["taps"] == 4 * row  # three on their way, one that is made
    assert drafter.parts["drafter masters"] == both.parts["drafter masters"]
    assert target.parts["target weights"] == both.parts["target weights"]
    assert "target weights" not in drafter.parts
    assert not {"drafter masters", "optimiser's moments", "drafter working copies"} & {*target.parts}
    assert [*drafter.phases] == ["the head", "the backward pass", "the update"]
    assert [*target.phases] == ["the target's pass"]
    assert predict(config, TRUE, true_target) == target


def test_what_the_rank_of_one_gpu_needs_is_what_it_needed_before_there_were_several(true_target):
    alone, eight = (predict(c, TRUE, true_target) for c in (TrainConfig(), TrainConfig(ranks=8)))
    assert eight.total - alone.total == GIB  # NCCL's
    assert eight.phases == alone.phases


def test_shards_divide_what_lies_still_and_gather_two_layers(true_target):
    alone = predict(TrainConfig(), TRUE, true_target)
    config = TrainConfig(ranks=8, drafter_sharding=True, target_sharding=True)
    parts = predict(config, TRUE, true_target).parts
    layers = true_target.weights - true_target.ends
    assert parts["target weights"] == true_target.ends + layers // 8
    assert parts["target layers gathered"] == 2 * true_target.largest
    for name in ("drafter masters", "optimiser's moments"):
        assert parts[name] == pytest.approx(alone.parts[name] / 8, rel=1e-3)
    assert "drafter working copies" not in parts


def test_gradients_of_earlier_rows_are_whole_in_shards_too(true_target):
    config = TrainConfig(ranks=8, drafter_sharding=True, rows_per_step=16)
    need = predict(config, TRUE, true_target)
    assert need.parts["gradients"] >= 4 * drafter_parameters(TRUE)
    assert need.total - predict(replace(config, rows_per_step=8), TRUE, true_target).total > 5 * GIB


def test_embedding_and_head_that_are_one_matrix_count_once(tmp_path):
    one, two = (Target(tiny_target("llama", tie=tie), (0, 2)).ends for tie in (True, False))
    assert 2 * shape_of_ends(one, 4).ends == shape_of_ends(two, 4).ends == 2 * 4 * one.embedding_VH.numel()


def test_ranks_are_offered_shards_pairs_and_fewer_slots(true_target):
    config = TrainConfig(ranks=8, rows_per_step=16)
    small = predict(config, TRUE, true_target).total - GIB // 10
    offers = " ".join(what_fits(config, TRUE, true_target, small))
    for flags in ("--drafter-sharding", "--rows-per-step 8", "--dp-pairs 4", "--target-sharding"):
        assert flags in offers
    apart = TrainConfig(dp_pairs=4)
    small = predict(apart, TRUE, true_target).total - GIB // 10
    offers = " ".join(what_fits(apart, TRUE, true_target, small))
    assert "--link-credits 1" in offers
    assert "--taps-dir" not in offers
    assert "--rows-per-step" not in offers


def test_a_rank_that_only_drafts_is_explained_without_its_target(monkeypatch):
    target = Target(tiny_target("qwen3"), (0, 2, 4))
    config = training.drafter_config()
    run = training.run_of(target, Drafter(config), token_budget=4096, max_anchors=8192, dp_pairs=1)
    run = replace(run, target=None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 4 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    told = planner.explain_out_of_memory(run)
    needed = need_of(run.config, config, target_shape(target, 4), "drafter").total
    assert f"a step needs about {needed / GIB:.1f} GiB" in told
    assert "would fit: " in told
    offered = told.split("would fit: ")[1]
    assert "--max-anchors" in offered
    assert "--target-sharding" not in offered


def test_shards_are_offered_with_rows_that_all_ranks_have_equally_many_of(true_target):
    config = TrainConfig(ranks=8, rows_per_step=9)
    small = predict(config, TRUE, true_target).total - GIB // 10
    offers = " ".join(what_fits(config, TRUE, true_target, small))
    assert "--drafter-sharding --rows-per-step 16 (" in offers
    assert "--target-sharding --rows-per-step 16 (" in offers
    readers = TrainConfig(target_ranks=3, drafter_ranks=1)
    offers = " ".join(what_fits(readers, TRUE, true_target, 50 * GIB))
    assert "--target-sharding --rows-per-step 3 (" in offers


def test_a_colocated_rank_that_ran_out_is_offered_pairs_and_explained_by_both_parts(true_target):
    told = say_out_of_memory(TrainConfig(ranks=2), TRUE, true_target, 75 * GIB, 79 * GIB)
    assert "--dp-pairs 1 (" in told
    assert "drafter masters" in told
    assert "target weights" in told


def test_each_role_is_held_against_each_card(true_target):
    config = TrainConfig(target_ranks=3, drafter_ranks=1)
    told = say_memory(config, TRUE, true_target, [("a", 50 * GIB, 49 * GIB)])
    assert "memory of a drafter rank: 3" in told
    assert "memory of a drafter rank: a: 50.0 GiB are enough" in told
    assert (
        "memory of a target rank: a: 50.0 GiB are too few; would fit: --target-sharding --rows-per-step 3 ("
        in told
    )


def test_a_card_too_small_for_the_target_alone_is_told_so(true_target):
    told = say_memory(TrainConfig(), TRUE, true_target, [("cuda:0 (small)", 24 * GIB, 23 * GIB)])
    assert "24.0 GiB are too few; no setting is enough (the target alone takes 50.1 GiB)" in told


def test_each_card_is_told_whether_it_is_enough(true_target):
    cards = [("a", 139 * GIB, 138 * GIB), ("b", 139 * GIB, 60 * GIB), ("c", 79 * GIB, 78 * GIB)]
    *_, a, b, c = say_memory(TrainConfig(), TRUE, true_target, cards).splitlines()
    assert a.endswith("139.0 GiB are enough")
    assert b.endswith("139.0 GiB are enough, but only 60.0 GiB are free")
    assert "79.0 GiB are too few; would fit: --layers 4 (" in c


def test_out_of_memory_is_one_line_with_parts_other_processes_and_settings_below_what_failed(true_target):
    told = say_out_of_memory(TrainConfig(), TRUE, true_target, 75 * GIB, 79 * GIB)
    assert "\n" not in told
    assert "other processes hold 4.0 GiB" in told
    assert "target weights 50.1 GiB" in told
    # a prediction that was too low must not offer what has just failed
    told = say_out_of_memory(TrainConfig(), TRUE, true_target, 139 * GIB, 139 * GIB)
    needs = [float(n) for n in re.findall(r"\((\d+\.\d) GiB\)", told.split("would fit")[1])]
    assert needs
    assert max(needs) <= 0.95 * predict(TrainConfig(), TRUE, true_target).total / GIB + 0.05


def test_a_run_that_ran_out_of_memory_is_explained_by_its_own_shapes(monkeypatch):
    target = Target(tiny_target("qwen3"), (0, 2, 4))
    config = training.drafter_config()
    run = training.run_of(target, Drafter(config), token_budget=4096, max_anchors=8192)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 4 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    told = planner.explain_out_of_memory(run)
    needed = predict(run.config, config, target_shape(target, 4)).total
    assert f"a step needs about {needed / GIB:.1f} GiB" in told
    assert "activations" in told
    assert told.startswith("the GPU's 4.0 GiB are too few")


# ---- work ----


def test_a_full_row_of_the_true_shape_is_124_5_tflop_for_the_drafter(true_target):
    work = row_flops(TRUE, sum(true_target.layers))
    assert work.drafter(8192, 512, 512 * 15) == pytest.approx(124.5e12, rel=1e-3)
    # 496 ms were measured for the products of the target's pass, at 785 TFLOP/s
    assert work.target(8192) == pytest.approx(0.496 * 785e12, rel=0.02)


def test_the_formula_counts_the_products_that_a_step_really_makes():
    config = training.drafter_config()
    row = random_row((30, 25), 64, prompt=3)
    anchors = draw_anchors(row, 16, (0,))
    blocks = make_blocks(row, anchors, len(anchors), config.block_size, training.MASK)
    drafter, taps = training.make_drafter(config), torch.randn(64, 3 * 64)
    head = Head(torch.randn(131, 64), None, 1.0, None)
    weights = SlotWeights(decay_weights(config.block_size, 2.0))
    with FlopCounterMode(display=False) as counter:
        x = torch.randn(len(anchors) * config.block_size, 64, requires_grad=True)
        hidden = drafter(
            taps, blocks.context_positions_S, x, blocks.positions_NB.flatten(),
            make_attend("dense", blocks, config),
        )  # fmt: skip
        block_loss(hidden, blocks, head, weights).total.backward()
    products = counter.get_flop_counts()["Global"]
    made = sum(n for op, n in products.items() if "mm" in str(op))
    # padding is multiplied too; of a useful count it is left out
    assert made == row_flops(config, 0).drafter(64, blocks.count, blocks.labels)
    used = row.spans()[-1][1]
    assert used < 64
    assert row_flops(config, 0).drafter(used, blocks.count, blocks.labels) < made


def test_a_step_counts_its_rows_and_its_share_of_the_targets_pass():
    work = RowFlops(token=1, block_token=10, label=100, target_token=1000, block_size=4)
    config = TrainConfig(rows_per_step=3, anchor_draws=2)
    assert step_flops(config, work, 5, 2, 6) == 3 * (5 + 80 + 600 + 5000 / 2)


def test_of_experts_those_a_token_is_sent_to_are_counted():
    config = Qwen3MoeConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=2,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    with torch.device("meta"):
        target = Target(AutoModelForCausalLM.from_config(config), (0, 1))
    attention, router, expert = 32 * 16 * (2 + 1 + 1 + 2), 8 * 32, 3 * 32 * 16
    assert target_layers(target) == [attention + router + 2 * expert] * 2


def test_the_ceilings_are_measured():
    ceiling = matmul_ceiling(CPU, torch.float32, side=128)
    assert 1e8 < ceiling < 1e15
    assert expected_seconds(3e12, 4e12, "cuda") == pytest.approx(1.0)


# ---- --plan ----


@pytest.mark.parametrize("family", ["qwen3", "hybrid", "llama"])
def test_a_sketched_target_has_the_shapes_of_the_loaded_one(tmp_path, family):
    path = tiny_target(family, tmp_path, tie=family == "llama")
    loaded = load_target(path, None, 2, CPU, torch.float32)
    (tmp_path / "model.safetensors").unlink()
    sketch = sketch_target(TrainConfig(target_model=path, taps=2), CPU, torch.float32)
    assert target_shape(sketch, 4) == target_shape(loaded, 4)
    for name in (
        "hidden_size", "vocab_size", "num_layers", "rope_theta", "isolation", "target_layer_ids",
        "input_embedding_scale", "model_type", "dtype",
    ):  # fmt: skip
        assert getattr(sketch, name) == getattr(loaded, name), name


def test_a_sketch_refuses_what_is_no_causal_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit", "num_hidden_layers": 4}')
    with pytest.raises(UserError, match="cannot make this target"):
        sketch_target(TrainConfig(target_model=str(tmp_path), taps=1), CPU, torch.float32)


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("gemma3", {"target_pass": "fused"}),
        ("gemma3", {"target_fp8": True}),
        ("gemma3", {"target_pass": "stock", "target_fp8": True}),
        ("llama", {"target_pass": "stock", "target_fp8": True}),
    ],
)
def test_a_sketch_refuses_a_pass_in_the_words_in_which_loading_does(tmp_path, family, flags):
    path = tiny_target(family, tmp_path)
    config = TrainConfig(target_model=path, taps=2, **flags)
    with pytest.raises(UserError) as loading:
        load_target(path, None, 2, CPU, torch.float32, config.target_pass, config.target_fp8)
    with pytest.raises(UserError) as sketching:
        sketch_target(config, CPU, torch.float32)
    assert str(sketching.value) == str(loading.value)


def test_a_sketch_refuses_an_fp8_checkpoint_that_cannot_be_read(tmp_path):
    path = tiny_target("qwen3", tmp_path)
    set_config(tmp_path, {"quantization_config": {**quantization((32, 32)), "weight_block_size": None}})
    with pytest.raises(UserError, match="FP8 weights of kind"):
        sketch_target(TrainConfig(target_model=path, taps=2), CPU, torch.float32)


@pytest.mark.parametrize(
    ("family", "flags", "isolation", "why"),
    [
        ("qwen3", {}, "fused", None),
        ("qwen3", {"target_pass": "stock"}, "packed", None),
        ("gemma3", {}, "packed", "gemma3_text is not among the families that the fused pass knows"),
    ],
)
def test_a_sketch_for_a_gpu_chooses_the_pass_without_one(tmp_path, family, flags, isolation, why):
    config = TrainConfig(target_model=tiny_target(family, tmp_path), taps=2, **flags)
    sketch = sketch_target(config, torch.device("cuda"), torch.bfloat16)
    assert (sketch.isolation, sketch.why_stock) == (isolation, why)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What `train --plan` says on a CPU, for more flags; the target has a configuration and no weights."""
    root = tmp_path_factory.mktemp("planned")
    target, run = root / "target", root / "run"
    tiny_target("qwen3", target, vocab_size=416)
    byte_tokenizer().save_pretrained(str(target))
    chats = write_jsonl(
        root / "chats.jsonl", [{"messages": chat(f"ask {i}", "answer " * 9)} for i in range(12)]
    )
    prepare = ["prepare", "--input", str(chats), "--tokenizer", str(target)]
    assert cli.main([*prepare, "--output-dir", str(root / "data"), "--holdout", "0"]) == 0
    (target / "model.safetensors").unlink()
    flags = f"--target-model {target} --data-dir {root / 'data'} --output-dir {run} --plan"
    flags += " --device cpu --taps 2 --token-budget 256 --max-anchors 16"

    def plan(more: str) -> str:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert cli.main(["train", *flags.split(), *more.split()]) == 0
        assert not run.exists()
        return said.getvalue()

    return plan


def test_plan_tells_memory_and_time_without_reading_a_weight(planned):
    told = planned("")
    assert re.search(r"memory: \d+\.\d GiB at the peak of a step", told)
    assert re.search(r"no GPU in this run: a card needs \d+\.\d GiB", told)
    assert re.search(r"time: about (less than )?[\d.]+ s a step, \d+ steps in", told)
    assert re.search(r"cards: .*\n(  .*\n)*  H200 +a step less than 0.1 s +\| a step", told)


def test_the_cards_table_is_the_advice_for_1_8_and_64_gpus(true_target):
    work = row_flops(TRUE, sum(true_target.layers))
    config = TrainConfig(rows_per_step=1)
    sizes = sizes_of(config, TRUE, true_target, 8192)
    told = planner.say_cards(config, TRUE, true_target, work, sizes, rows=100_000)
    lines = {line.split("  ")[1]: line.split("|") for line in told.splitlines()[1:-1]}
    one, eight, _ = (float(re.search(r"([\d,]+) tokens", c)[1].replace(",", "")) for c in lines["H200"])  # type: ignore
    assert eight / one == pytest.approx(8, rel=0.01)
    assert "too small" in lines["H100"][0]
    assert "split" in lines["H100"][1]
    assert "split" in lines["H100"][2]
    assert re.search(r"too small: .*RTX 4090", told)


def test_the_table_shows_each_part_and_the_other_phases():
    need = Need({"weights": 3 * GIB, "nothing": 0, "reserve": GIB}, {"a": 3 * GIB, "b": 2 * GIB})
    lines = need.table().splitlines()
    assert lines[0] == "memory: 4.0 GiB at the peak of a step, a:"
    assert [line.split()[:2] for line in lines[1:3]] == [["weights", "3.00"], ["reserve", "1.00"]]
    assert lines[3].endswith("b 2.0 GiB")


@pytest.mark.parametrize(
    ("flags", "who", "how"),
    [
        ("--ranks 2", "target and drafter on each of 2 ranks", "colocated"),
        ("--target-ranks 2 --drafter-ranks 1", "drafter on ranks 0, target on ranks 1, 2", "split 2:1"),
    ],
)
def test_plan_says_who_sits_where_and_what_each_needs(planned, flags, who, how):
    told = planned(flags)
    assert f"plan: {who}" in told
    assert re.search(rf"guessed for \d such ranks: {how}: [\d,]+ tokens/s", told)
    assert told.count("at the peak of a step") == (2 if "split" in how else 1)


def test_durations_are_short():
    assert [planner.span(s) for s in (0.003, 0.8372, 95, 1020, 11520)] == [
        "less than 0.1 s", "0.84 s", "95 s", "17 min", "3.2 h",
    ]  # fmt: skip
