"""The target is read rightly, refuses what a user can get wrong, and its self-checks catch silent faults."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

from slipstream.config import UserError
from slipstream.models.families import choose_mask_token
from slipstream.models.selfcheck import self_check, tap_health
from slipstream.models.target import Target, check_vocab, default_target_layer_ids, group_spans, load_target
from tests.tiny import FAMILIES, random_row, tiny_target

CPU = torch.device("cpu")
TAPS = (0, 2, 4)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def target_of(family: str) -> Target:
    return Target(tiny_target(family), TAPS)


def fresh(family: str) -> Target:
    """A target of its own, to be broken."""
    return Target(tiny_target(family), TAPS)


def failed(target: Target) -> list[str]:
    return [check.name for check in self_check(target, random_row((40, 30), 80)) if not check.ok]


# tap ids


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)), (30, 5, (1, 8, 14, 20, 27)), (36, 1, (18,))],
)
def test_default_tap_ids_are_those_of_released_drafters(layers, taps, ids):
    assert default_target_layer_ids(layers, taps) == ids


@pytest.mark.parametrize("taps", [1, 2, 3, 5, 8])
def test_default_tap_ids_are_distinct_and_before_the_last_layer_or_refused(taps):
    for layers in range(1, 80):
        try:
            ids = default_target_layer_ids(layers, taps)
        except UserError:
            assert layers < taps + 4
        else:
            assert list(ids) == sorted(set(ids))
            assert len(ids) == taps
            assert set(ids) <= set(range(layers - 1))


@pytest.mark.parametrize("ids", [(0, 5), (-1,), (2, 99), (2, 1), (1, 1), ()])
def test_tap_ids_out_of_range_or_out_of_order_or_of_the_last_layer_are_refused(ids, tmp_path):
    folder = tiny_target("llama", tmp_path / "target")
    with pytest.raises(UserError, match="--target-layer-ids") as refusal:
        load_target(folder, ids, 3, CPU, torch.float32)
    assert "\n" not in str(refusal.value)
    if ids and max(ids) >= 5:
        assert str(max(ids)) in str(refusal.value)
        assert "between 0 and 4" in str(refusal.value)


# reading


@pytest.mark.parametrize("family", [*FAMILIES, "granite"])
@pytest.mark.parametrize("isolation", ["packed", "unpacked"])
def test_taps_of_a_document_are_the_hidden_states_after_the_tapped_layers(family, isolation):
    target = target_of(family)
    row = random_row((50,), 64)
    target.isolation = isolation
    taps_SC = target.taps(row)
    states = target.model(input_ids=row.input_ids[None, :50], output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps_SC[:50], torch.cat([states[i + 1][0] for i in TAPS], dim=-1))
    assert not taps_SC[50:].any()
    assert not torch.allclose(taps_SC[:50, :64], states[TAPS[0]][0], atol=0.1)  # the layer before is no match


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pass_stops_at_the_last_tap_and_makes_no_logits(family):
    target = target_of(family)
    calls: list[str] = []

    def count(name: str):
        return lambda *_: calls.append(name)

    watched = [(f"layer {i}", layer) for i, layer in enumerate(target.layers)]
    watched += [("norm", target.decoder.norm), ("head", target.model.get_output_embeddings())]
    handles = [module.register_forward_pre_hook(count(name)) for name, module in watched]
    target.taps(random_row((30,), 30))
    for handle in handles:
        handle.remove()
    assert calls == [f"layer {i}" for i in range(TAPS[-1] + 1)]


def test_the_model_can_be_used_beside_its_target_and_after_a_failed_pass():
    target = fresh("qwen3")
    row = random_row((20,), 20)
    before = target.taps(row)
    too_large = dataclasses.replace(row, input_ids=row.input_ids + 1000)
    with pytest.raises(IndexError):
        target.taps(too_large)
    logits = target.model(input_ids=row.input_ids[None]).logits
    assert logits.shape == (1, 20, target.vocab_size)
    assert torch.equal(target.taps(row), before)


def test_the_target_is_frozen_and_its_taps_can_be_trained_on():
    target = target_of("llama")
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training
    taps = target.taps(random_row((20, 9), 32))
    weight = torch.ones(taps.shape[1], requires_grad=True)
    (taps @ weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("family", [*FAMILIES, "granite"])
def test_decoding_in_pieces_gives_the_logits_and_taps_of_one_pass(family):
    target = target_of(family)
    row = random_row((40,), 40)
    cache, logits, taps, start = target.new_cache(), [], [], 0
    for n in (23, 1, 7, 1, 8):
        step = target.decode_step(row.input_ids[start : start + n], cache, start)
        logits.append(step[0])
        taps.append(step[1])
        start += n
    whole = target.model(input_ids=row.input_ids[None]).logits[0]
    torch.testing.assert_close(torch.cat(logits), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(taps), target.taps(row), rtol=1e-4, atol=1e-4)


def test_embedding_and_head_carry_what_the_family_does_to_them():
    gemma, granite, llama = target_of("gemma3"), target_of("granite"), target_of("llama")
    assert (gemma.input_embedding_scale, gemma.head.softcap, gemma.head.multiplier) == (8.0, 5.0, 1.0)
    assert (granite.input_embedding_scale, granite.head.softcap) == (5.0, None)
    assert granite.head.multiplier == pytest.approx(1 / 3)
    assert (llama.input_embedding_scale, llama.head.softcap, llama.head.multiplier) == (1.0, None, 1.0)
    assert gemma.embedding_VH is gemma.model.get_input_embeddings().weight
    assert llama.rope_theta == 10000.0
    assert gemma.rope_theta == 1_000_000.0  # that of the full-attention layers
    assert target_of("hybrid").rope_theta == 10000.0


# documents into sub-batches


def test_sub_batches_hold_every_document_once_and_little_padding():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 900, (12,), generator=generator).tolist()
        ends = torch.tensor(lengths).cumsum(0).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        groups = group_spans(spans, 2048)
        assert sorted(span for group in groups for span in group) == spans
        for group in groups:
            sizes = [end - start for start, end in group]
            padded = len(sizes) * max(sizes)
            assert padded <= 2048 or len(sizes) == 1
            assert max(sizes) <= 64 or padded - sum(sizes) <= 0.1 * padded


# loading


def test_a_saved_target_loads_as_it_was(tmp_path):
    folder = tiny_target("gemma3", tmp_path / "target")
    target = load_target(folder, None, 3, CPU, torch.float32)
    assert target.target_layer_ids == default_target_layer_ids(6, 3)
    assert target.model_type == "gemma3_text"
    assert torch.equal(target.embedding_VH, target_of("gemma3").embedding_VH)
    assert load_target(folder, (1,), 3, CPU, torch.bfloat16).taps(random_row((9,), 9)).dtype == torch.bfloat16


def refusal_of(path: object) -> str:
    with pytest.raises(UserError) as refusal:
        load_target(str(path), (1,), 1, CPU, torch.float32)
    assert "\n" not in str(refusal.value)
    assert str(path) in str(refusal.value)
    return str(refusal.value)


def test_folders_that_hold_no_target_are_refused_in_one_line(tmp_path):
    assert "no such folder" in refusal_of(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal_of(tmp_path / "empty")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "nothing-known"}))
    assert "configuration" in refusal_of(tmp_path / "odd")
    tiny_target("qwen3", tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    assert "cannot load" in refusal_of(tmp_path / "bare")


def test_a_truncated_weight_file_is_refused_in_one_line(tmp_path):
    folder = tmp_path / "target"
    tiny_target("qwen3", folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cannot load" in refusal_of(folder)


def test_weights_of_another_shape_or_missing_from_the_files_are_refused_not_made_up(tmp_path):
    folder = tmp_path / "target"
    tiny_target("qwen3", folder)
    config = json.loads((folder / "config.json").read_text())
    deeper = {**config, "num_hidden_layers": 8, "layer_types": ["full_attention"] * 8}
    (folder / "config.json").write_text(json.dumps(deeper))
    assert "not in the files" in refusal_of(folder)
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    assert "cannot load" in refusal_of(folder)


def test_a_model_without_a_causal_head_is_refused(tmp_path):
    bert = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16
    )
    AutoModel.from_config(bert).save_pretrained(tmp_path / "bert")
    refusal_of(tmp_path / "bert")


def test_token_ids_beyond_the_embedding_are_refused():
    check_vocab(target_of("qwen3"), 130)
    with pytest.raises(UserError, match="token id 131 is beyond the target's 131"):
        check_vocab(target_of("qwen3"), 131)


# mask token

SPECIALS = [
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "<|user|>",
    "<|system|>",
    "<|end|>",
    "<file_sep>",
    "<|reserved_9|>",
]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


def tokenizer_of(specials: list[str], text_tokens: int = 20, template: str | None = TEMPLATE):
    vocab = {name: i for i, name in enumerate(specials)}
    vocab |= {f"w{i}": len(specials) + i for i in range(text_tokens)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": specials[4:]})
    tokenizer.chat_template = template
    return tokenizer


def test_an_explicit_mask_token_comes_first():
    assert choose_mask_token(5, "qwen3", 151936, tokenizer_of(SPECIALS)) == (5, "given")


@pytest.mark.parametrize(
    ("explicit", "why"), [(2, "stop"), (3, "pad"), (-1, "row"), (29, "row"), (6, "stop")]
)
def test_pad_stop_tokens_and_ids_out_of_range_are_refused_as_mask(explicit, why):
    with pytest.raises(UserError, match=why) as refusal:
        choose_mask_token(explicit, "llama", 29, tokenizer_of(SPECIALS), stop_ids=(6,))
    assert str(explicit) in str(refusal.value)


def test_the_family_s_known_mask_token_is_taken_when_no_text_can_hold_it():
    token, source = choose_mask_token(None, "qwen3", 151936, tokenizer_of(SPECIALS))
    assert token == 151669
    assert "qwen3" in source
    for family, known in (("qwen3_5_text", 248070), ("llama", 128002), ("gpt_oss", 200000)):
        assert choose_mask_token(None, family, 250000, tokenizer_of(SPECIALS))[0] == known


def test_the_family_s_known_id_is_not_taken_where_it_is_an_ordinary_token_or_no_row():
    tokenizer = tokenizer_of(SPECIALS, text_tokens=151700)
    assert choose_mask_token(None, "qwen3", 151936, tokenizer)[0] == 8
    assert choose_mask_token(None, "llama", 29, tokenizer_of(SPECIALS))[0] == 8


def test_a_reserved_name_wins_else_the_lowest_special_token_without_a_role():
    token, source = choose_mask_token(None, "unknown", 29, tokenizer_of(SPECIALS))
    assert (token, "<|reserved_9|>" in source) == (8, True)
    token, source = choose_mask_token(None, "unknown", 28, tokenizer_of(SPECIALS[:-1]))
    assert (token, "<file_sep>" in source) == (7, True)


def test_template_tokens_and_rows_beyond_the_embedding_are_never_chosen_and_nothing_is_made_up():
    # <|user|> and <|system|> are nowhere in the template's source: it puts them together from the roles.
    with pytest.raises(UserError, match="--mask-token-id"):
        choose_mask_token(None, "unknown", 27, tokenizer_of(SPECIALS[:-2]))
    with pytest.raises(UserError, match="--mask-token-id"):
        choose_mask_token(None, "unknown", 7, tokenizer_of(SPECIALS))
    bare = tokenizer_of(SPECIALS, template=None)
    assert choose_mask_token(None, "unknown", 7, bare)[0] == 4


# self-checks


@pytest.mark.parametrize("family", [*FAMILIES, "granite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isolation", ["family", "unpacked"])
def test_a_sound_target_passes_every_self_check(family, dtype, isolation):
    target = Target(tiny_target(family, dtype=dtype), TAPS)
    target.isolation = target.family.isolation if isolation == "family" else "unpacked"
    checks = self_check(target, random_row((70, 30), 110))
    assert [c.detail for c in checks if not c.ok] == []
    assert len({c.name for c in checks}) == 6
    assert all("\n" not in f"{c.name}{c.detail}{c.mend}" for c in checks)


@pytest.mark.parametrize(
    "change", [{"multiplier": 0.5}, {"softcap": 3.0}, {"bias_V": torch.ones(131).cumsum(0)}]
)
def test_the_self_check_catches_a_head_that_is_not_the_model_s(change):
    target = fresh("qwen3")
    target.head = dataclasses.replace(target.head, **change)
    assert failed(target) == ["greedy tokens"]


def test_the_self_check_catches_a_softcap_that_is_left_out():
    target = fresh("gemma3")
    target.head = dataclasses.replace(target.head, softcap=None)
    assert failed(target) == ["greedy tokens"]


def test_the_self_check_catches_a_final_norm_read_with_w_for_one_plus_w():
    target = fresh("gemma3")

    def plain_norm(_module, args: tuple[Tensor], _output: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(args[0], (64,), target.decoder.norm.weight, 1e-6)

    inputs = random_row((40, 30), 80)
    run = target.decode_step

    def broken_step(*args):
        handle = target.decoder.norm.register_forward_hook(plain_norm)
        try:
            return run(*args)
        finally:
            handle.remove()

    target.decode_step = broken_step
    assert [c.name for c in self_check(target, inputs) if not c.ok] == ["greedy tokens"]


def test_the_self_check_catches_an_embedding_scale_that_the_drafter_is_not_told():
    target = fresh("gemma3")
    target.input_embedding_scale = 1.0
    assert failed(target) == ["embedding scale"]


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_the_self_check_catches_zero_constant_and_non_finite_taps(value):
    target = fresh("llama")
    target.layers[2].forward = lambda hidden_states, **_: torch.full_like(hidden_states, value)
    assert "taps healthy" in failed(target)


def test_the_self_check_catches_taps_of_another_layer():
    target = fresh("qwen3")
    target.target_layer_ids = (0, 1, 4)  # the hooks still read 0, 2, 4
    assert "taps are layer outputs" in failed(target)


def test_the_self_check_catches_a_layer_that_is_skipped():
    target = fresh("qwen3")
    for i in (3, 4):
        target.layers[i].forward = lambda hidden_states, **_: hidden_states
    assert failed(target) == ["taps healthy"]


def test_the_self_check_catches_documents_that_see_each_other():
    target = fresh("llama")
    target.isolation = "packed"
    full = target._masks
    target._masks = lambda row, end: torch.ones_like(full(row, end)).tril()
    assert failed(target) == ["documents isolated"]


def test_the_self_check_catches_positions_that_run_on():
    target = fresh("llama")
    target.isolation = "packed"
    read = target._pass_to_last_tap

    def run_on(ids: Tensor, positions: Tensor, mask):
        return read(ids, torch.arange(ids.shape[1])[None], mask)

    target._pass_to_last_tap = run_on
    assert failed(target) == ["positions restart"]


def test_tap_health_names_the_tap_and_what_is_wrong():
    generator = torch.Generator().manual_seed(0)
    sound = torch.randn(30, 24, generator=generator)
    sound[25:] = 0  # padding
    assert tap_health(sound, 3) is None
    assert tap_health(sound.bfloat16(), 3) is None
    assert tap_health(torch.zeros(30, 24), 3) == "all taps are zero"
    for change, words in (
        (0.0, "tap 2 of 3 is all zero at 25 of 25 tokens"),
        (2.0, "tap 2 of 3 is the same at all 25 tokens"),
        (float("inf"), "tap 2 of 3 is not finite at 25 of 25 tokens"),
    ):
        broken = sound.clone()
        broken[:25, 8:16] = change
        assert tap_health(broken, 3) == words
    one_token = sound.clone()
    one_token[7, 16:] = 0
    assert tap_health(one_token, 3) == "tap 3 of 3 is all zero at 1 of 25 tokens"
    equal_lengths = torch.eye(8).repeat(1, 3)
    assert tap_health(equal_lengths, 3) is None


def test_a_head_that_is_no_matrix_of_the_embedding_s_shape_is_refused():
    model = tiny_target("llama")
    model.set_output_embeddings(torch.nn.Linear(64, 99, bias=False))
    with pytest.raises(UserError, match=r"\(131, 64\) and head \(99, 64\)"):
        Target(model, TAPS)
    model.set_output_embeddings(torch.nn.Sequential())
    with pytest.raises(UserError, match="no plain embedding and head"):
        Target(model, TAPS)
