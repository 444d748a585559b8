"""The drafter: names and sizes of released checkpoints, training = decoding, fp32 where it matters."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from slipstream.config import TrainConfig, UserError, default_gamma
from slipstream.models import drafter as drafter_module
from slipstream.models.drafter import (
    FULL,
    SLIDING,
    Drafter,
    DrafterConfig,
    Layer,
    default_heads,
    default_intermediate,
)
from slipstream.models.parts import RMSNorm, rotary, rotate
from slipstream.models.target import Target
from slipstream.training.attention import make_attend
from slipstream.training.blocks import make_blocks
from slipstream.training.step import make_optimizer, row_loss, update
from tests.tiny import tiny_target
from tests.training import (
    MASK,
    all_blocks,
    assert_close,
    drafter_config,
    gradients,
    make_drafter,
    run_of,
    supervised_row,
)

PIECES = (Drafter.context, Layer.forward, RMSNorm.forward)


def released(hidden_size: int, intermediate_size: int, vocab_size: int, target_layers: int) -> DrafterConfig:
    return drafter_config(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        target_layer_ids=(1, 9, 17, 25, 33) if target_layers == 36 else (1, 16, 31, 46, 61),
        num_target_layers=target_layers,
    )


@pytest.mark.parametrize(
    ("config", "billions"),
    [(released(4096, 12288, 151936, 36), 1.0486), (released(5120, 17408, 248320, 64), 1.7302)],
    ids=["Qwen3-8B", "Qwen3.6-27B"],
)
def test_parameter_counts_are_those_of_the_released_drafters(config, billions):
    with torch.device("meta"):
        drafter = Drafter(config)
    assert sum(p.numel() for p in drafter.parameters()) / 1e9 == pytest.approx(billions, abs=5e-5)


def test_tensor_names_and_shapes_are_those_of_released_checkpoints():
    config = drafter_config(num_layers=3)
    h, q, kv, f, d = 64, 6 * 8, 2 * 8, 96, 8
    expected = {"fc.weight": (h, 3 * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for i in range(3):
        expected |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
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
            }.items()
        }
    state = Drafter(config).state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == expected
    assert len(state) == 11 * 3 + 3
    assert all(t.dtype == torch.float32 for t in state.values()), "masters are fp32"


@pytest.mark.parametrize(
    ("hidden_size", "heads"),
    [(5120, (32, 8, 128)), (4096, (32, 8, 128)), (2048, (32, 8, 128)), (2047, (32, 8, 64)), (576, (9, 3, 64)),
     (1024, (16, 4, 64)), (64, (1, 1, 64)), (16, (1, 1, 64))],
)  # fmt: skip
def test_default_heads(hidden_size, heads):
    assert default_heads(hidden_size) == heads
    assert heads[0] % heads[1] == 0


@pytest.mark.parametrize(("hidden_size", "width"), [(4096, 12288), (5120, 15360), (576, 1792), (64, 256)])
def test_the_default_mlp_is_three_times_as_wide_rounded_up_to_256(hidden_size, width):
    assert default_intermediate(hidden_size) == width


@pytest.mark.parametrize(("block", "gamma"), [(16, 7), (10, 5), (8, 4), (12, 5), (4, 1), (3, 1), (2, 1)])
def test_default_gamma(block, gamma):
    assert default_gamma(block) == gamma


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, "--kv-heads"),
        ({"head_dim": 7}, "--head-dim"),
        ({"block_size": 1}, "--block-size"),
        ({"layer_types": (FULL,)}, "layer types"),
        ({"sliding_window": 4}, "--sliding-window"),
        ({"layer_types": (FULL, SLIDING)}, "--sliding-window"),
        ({"mask_token_id": 131}, "--mask-token-id"),
        ({"mask_token_id": -1}, "--mask-token-id"),
        ({"target_layer_ids": (0, 5)}, "--target-layer-ids"),
        ({"target_layer_ids": (2, 0)}, "ascending"),
        ({"target_layer_ids": ()}, "taps"),
    ],
)
def test_geometry_that_cannot_be_is_refused_in_one_line(change, named):
    with pytest.raises(UserError, match=named) as e:
        drafter_config(**change)
    assert "\n" not in str(e.value)


@torch.no_grad()
@pytest.mark.parametrize("causal", [None, True, False])
@pytest.mark.parametrize(
    ("layer_types", "window"), [((FULL, FULL), None), ((SLIDING, FULL), 6), ((SLIDING,) * 2, 9)]
)
def test_a_block_in_training_is_the_cached_draft_of_decoding(layer_types, window, causal):
    """Every anchor of a packed row against a cache that holds the anchor's document up to the anchor."""
    drafter = make_drafter(drafter_config(layer_types=layer_types, sliding_window=window, is_causal=causal))
    generator = torch.Generator().manual_seed(0)
    row = supervised_row([[True] * 14, [True] * 12], padding=2)
    taps = torch.randn(28, 3 * 64, generator=generator)
    embedding = torch.randn(131, 64, generator=generator)
    anchors = torch.tensor([0, 1, 5, 12, 14, 20, 24])
    blocks = make_blocks(row, anchors, len(anchors), 5, MASK)
    x_NBH = embedding[blocks.input_ids_NB]
    for attention in ("dense", "documents"):
        attend = make_attend(attention, blocks, drafter.config)
        trained = drafter(taps, row.positions, x_NBH.flatten(0, 1), blocks.positions_NB.flatten(), attend)
        for b, anchor in enumerate(anchors.tolist()):
            start = 0 if anchor < 14 else 14
            cache = drafter.new_context(20)
            middle = start + (anchor - start) // 3  # a prefill, then what was accepted
            drafter.extend_context(cache, taps[start:middle])
            drafter.extend_context(cache, taps[middle:anchor])
            assert cache.length == anchor - start
            drafted = drafter.draft(cache, x_NBH[b])
            assert_close(drafted, trained.unflatten(0, (-1, 5))[b], 2e-5)
            assert torch.equal(drafter.draft(cache, x_NBH[b]), drafted), (
                "a draft leaves no trace in the cache"
            )


@torch.no_grad()
def test_the_draft_comparison_tells_one_context_token_more_or_another_causality():
    drafter = make_drafter(drafter_config())
    causal = make_drafter(drafter_config(is_causal=True))
    row = supervised_row([[True] * 14])
    taps, x = torch.randn(14, 3 * 64), torch.randn(5, 64)
    blocks = make_blocks(row, torch.tensor([8]), 1, 5, MASK)
    trained = drafter(
        taps, row.positions, x, blocks.positions_NB.flatten(), make_attend("dense", blocks, drafter.config)
    )
    for other, tokens in ((drafter, 9), (drafter, 7), (causal, 8)):
        cache = other.new_context(20)
        other.extend_context(cache, taps[:tokens])
        assert (other.draft(cache, x) - trained).abs().max() > 1e-3


def test_the_context_skips_the_layers_norm_and_is_shared_by_all_layers(monkeypatch):
    drafter = make_drafter(drafter_config())
    taps = torch.randn(9, 3 * 64)
    row = supervised_row([[True] * 9])
    blocks = make_blocks(row, torch.tensor([4]), 1, 5, MASK)
    seen = []
    keys_values = drafter_module.Attention.keys_values
    monkeypatch.setattr(
        drafter_module.Attention,
        "keys_values",
        lambda self, x, *r: (seen.append(x), keys_values(self, x, *r))[1],
    )
    attend = make_attend("dense", blocks, drafter.config)
    drafter(taps, row.positions, torch.randn(5, 64), blocks.positions_NB.flatten(), attend)
    contexts = [x for x in seen if len(x) == 9]
    assert len(contexts) == 2
    assert all(torch.equal(c, drafter.hidden_norm(drafter.fc(taps))) for c in contexts)


@pytest.mark.parametrize("position", [0, 1, 1000, 40_000])
def test_rotary_angles_are_fp32_whatever_the_weights_are(position):
    drafter = make_drafter(drafter_config()).bfloat16()
    cos, sin = rotary(torch.tensor([position]), 8, 1e6)
    assert cos.dtype == sin.dtype == torch.float32
    angles = position * 1e6 ** (-torch.arange(0, 8, 2).double() / 8)
    expected = torch.cat((angles, angles)).cos()
    assert (cos[0] - expected).abs().max() < 5e-3
    if position == 1000:  # what a frequency table cast with the weights would do
        cast = 1000 * (1e6 ** (-torch.arange(0, 8, 2).double() / 8)).bfloat16().double()
        assert (torch.cat((cast, cast)).cos() - expected).abs().max() > 0.02
    assert not list(drafter.buffers()), "no frequency table that a cast could round"


def test_with_bf16_weights_queries_are_turned_and_normed_in_fp32_and_rounded_once(monkeypatch):
    drafter = make_drafter(drafter_config()).bfloat16()
    made = []
    monkeypatch.setattr(drafter_module, "rotate", lambda x, c, s: (made.append((c, s)), rotate(x, c, s))[1])
    row = supervised_row([[True] * 9])
    blocks = make_blocks(row, torch.tensor([4]), 1, 5, MASK)
    attend = make_attend("dense", blocks, drafter.config)
    out = drafter(
        torch.randn(9, 3 * 64).bfloat16(),
        row.positions,
        torch.randn(5, 64).bfloat16(),
        blocks.positions_NB.flatten(),
        attend,
    )
    assert out.dtype == torch.bfloat16
    assert {t.dtype for pair in made for t in pair} == {torch.float32}
    x, (cos, sin) = torch.randn(1, 5, 8).bfloat16(), made[0]
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())
    norm = RMSNorm(8, 1e-6).bfloat16()
    norm.weight.data.fill_(1.25)
    exact = x.double() * (x.double() ** 2).mean(-1, keepdim=True).add(1e-6).rsqrt() * 1.25
    assert (norm(x).double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_norm_weights_multiply_as_w_and_not_as_1_plus_w():
    norm = RMSNorm(4, 0.0)
    norm.weight.data.zero_()
    assert not norm(torch.randn(3, 4)).any()


def test_bf16_matrix_work_leaves_masters_and_their_gradients_in_fp32():
    drafter = make_drafter(drafter_config())
    row = supervised_row([[True] * 9])
    blocks = make_blocks(row, torch.tensor([2, 4]), 2, 5, MASK)
    taps, x = torch.randn(9, 3 * 64), torch.randn(10, 64)
    attend = make_attend("dense", blocks, drafter.config)
    outs, grads = [], []
    for dtype in (torch.float32, torch.bfloat16):
        drafter.zero_grad()
        out = drafter(taps.to(dtype), row.positions, x.to(dtype), blocks.positions_NB.flatten(), attend)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        outs.append(out.float().detach())
        grads.append(gradients(drafter))
    assert all(p.dtype == torch.float32 for p in drafter.parameters())
    assert {g.dtype for g in grads[1].values()} == {torch.float32}
    assert_close(outs[1], outs[0], 0.05)


def test_positions_are_relative_for_the_drafter_too():
    """Why outputs alone cannot show wrong positions: all of them moved alike change nothing."""
    drafter = make_drafter(drafter_config())
    row = supervised_row([[True] * 9])
    blocks = make_blocks(row, torch.tensor([2, 4]), 2, 5, MASK)
    taps, x = torch.randn(9, 3 * 64), torch.randn(10, 64)
    attend = make_attend("dense", blocks, drafter.config)
    at, moved, skewed = (
        drafter(taps, row.positions + a, x, blocks.positions_NB.flatten() + b, attend)
        for a, b in ((0, 0), (500, 500), (0, 1))
    )
    assert_close(moved, at, 1e-4)
    assert (skewed - at).abs().max() > 1e-3


def test_weights_start_with_the_scale_that_keeps_what_passes_through():
    drafter = Drafter(drafter_config(hidden_size=512, intermediate_size=1024))
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            assert float(parameter.detach().std()) == pytest.approx(parameter.shape[1] ** -0.5, rel=0.1), name
        else:
            assert bool((parameter == 1).all()), name


def test_block_embeddings_are_raw_rows_times_the_drafter_s_explicit_scale():
    """The target's embedding layer may scale by itself (Gemma): its raw table is read, not the layer."""
    target = Target(tiny_target("gemma3"), (0, 2, 4))
    assert target.input_embedding_scale == 8.0
    drafter = make_drafter(drafter_config(input_embedding_scale=8.0))
    given = []
    drafter.register_forward_pre_hook(lambda module, args: given.append(args[2]))
    run = run_of(target, drafter)
    _, blocks = row_loss(run, supervised_row([[True] * 9]), run.taps, (0, 0, 0), 0.0)
    assert_close(given[0], 8.0 * target.embedding_VH[blocks.input_ids_NB.flatten()], 1e-6)


def test_layer_types_causality_and_windows_resolve_as_the_fields_say():
    for causal, kind in product((None, True, False), (FULL, SLIDING)):
        config = drafter_config(layer_types=(FULL, SLIDING), sliding_window=8, is_causal=causal)
        assert config.causal(kind) == (kind == SLIDING if causal is None else causal)
        assert config.window(kind) == (8 if kind == SLIDING else None)
    assert drafter_config().layer_types == (FULL, FULL)
    assert drafter_config(sliding_window=8).layer_types == (SLIDING, SLIDING)
    assert drafter_config().is_causal is False


@pytest.mark.parametrize("grad", [True, False], ids=["training", "validation"])
def test_a_compiled_layer_with_bf16_copies_is_the_plain_layer(grad):
    """With gradients and without: torch traces a custom product in two ways."""
    torch._dynamo.reset()
    drafter = make_drafter(drafter_config(num_layers=1))
    copied = make_drafter(drafter_config(num_layers=1))
    copied.use_gpu(torch.bfloat16, compiled=False)
    compiled = torch.compile(Layer.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    config, generator = drafter.config, torch.Generator().manual_seed(0)
    row = supervised_row([[True] * 9, [True] * 7])
    blocks = all_blocks(row, config.block_size)
    attend = make_attend("dense", blocks, config)
    ropes = [rotary(p, config.head_dim, 1e4) for p in (blocks.positions_NB.flatten(), row.positions)]
    x, ctx = (torch.randn(n, 64, generator=generator).bfloat16() for n in (blocks.valid_NB.numel(), 16))
    with torch.set_grad_enabled(grad):
        ours = compiled(copied.layers[0], x, ctx, *ropes, attend)
        plain = Layer.forward(drafter.layers[0], x, ctx, *ropes, attend)
        assert torch.equal(ours, plain)
    if grad:
        ours.float().square().sum().backward()
        plain.float().square().sum().backward()
        for (name, p), q in zip(copied.named_parameters(), drafter.parameters(), strict=True):
            if q.grad is not None:
                assert (p.grad - q.grad).norm() <= 1e-2 * q.grad.norm(), name


@torch.no_grad()
def test_a_block_is_drafted_in_the_dtype_of_the_copies():
    copied, rounded = make_drafter(drafter_config()), make_drafter(drafter_config())
    copied.use_gpu(torch.bfloat16, compiled=False)
    for linear in rounded.linears():
        linear.bfloat16()
    generator = torch.Generator().manual_seed(0)
    taps, x = (torch.randn(n, width, generator=generator) for n, width in ((9, 3 * 64), (5, 64)))
    drafts = []
    for drafter in (copied, rounded):
        cache = drafter.new_context(20)
        for part in taps.split(6):
            drafter.extend_context(cache, part)
        drafts.append(drafter.draft(cache, x))
        assert {t.dtype for t in (*cache.keys, *cache.values, drafts[-1])} == {torch.bfloat16}
    assert torch.equal(*drafts)


def test_copies_follow_an_update_and_a_loaded_checkpoint():
    drafter = make_drafter(drafter_config(num_layers=1))
    drafter.use_gpu(torch.bfloat16, compiled=False)
    other = make_drafter(drafter_config(num_layers=1), seed=2)
    drafter.load_state_dict(other.state_dict())
    assert all(torch.equal(w.copy, w.weight.bfloat16()) for w in drafter.linears())
    attn = drafter.layers[0].self_attn
    assert torch.equal(attn.kv_copy, torch.cat((attn.k_proj.weight, attn.v_proj.weight)).bfloat16())
    optimizer = make_optimizer(drafter, TrainConfig(), torch.device("cpu"))
    for p in drafter.parameters():
        p.grad = torch.randn_like(p)
    before = drafter.fc.copy.clone()
    update(drafter, optimizer, torch.ones(()), clip=1.0, lr=1e-2)
    assert not torch.equal(drafter.fc.copy, before)
    assert all(torch.equal(w.copy, w.weight.bfloat16()) for w in drafter.linears())


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_checkpointed_layers_give_the_same_gradients_to_the_last_bit_and_no_graph_more(compiled):
    config = drafter_config()
    row = supervised_row([[True] * 9, [True] * 7])
    blocks = all_blocks(row, config.block_size)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(blocks.valid_NB.numel(), 64, generator=generator).bfloat16()
    taps = torch.randn(16, 3 * 64, generator=generator).bfloat16()
    found = []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        drafter, counter = make_drafter(config), CompileCounterWithBackend("aot_eager")
        drafter.use_gpu(torch.bfloat16, compiled=False)
        if compiled:
            drafter._compiled = drafter_module._Compiled(
                *(torch.compile(f, fullgraph=True, dynamic=False, backend=counter) for f in PIECES)
            )
        drafter.checkpoint_layers = checkpointed
        for _ in range(2):
            drafter.zero_grad()
            attend = make_attend("dense", blocks, config)
            out = drafter(taps, row.positions, x, blocks.positions_NB.flatten(), attend)
            out.float().square().sum().backward()
        found.append((gradients(drafter), counter.frame_count))
    (plain, graphs), (checkpointed, graphs_too) = found
    assert graphs == graphs_too
    assert all(torch.equal(grad, checkpointed[name]) for name, grad in plain.items())
