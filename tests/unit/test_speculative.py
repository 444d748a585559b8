"""Speculative decoding changes nothing but the number of passes: greedy, sampled, after every refusal."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from slipstream.config import UserError
from slipstream.decoding import rollback
from slipstream.decoding.baselines import lookup_guess, ngram_table, walk_lookup, walk_ngram
from slipstream.decoding.rollback import TargetReader
from slipstream.decoding.speculative import (
    DrafterProposer,
    Drafts,
    count_slots,
    generate_plain,
    generate_speculative,
    speculate,
)
from slipstream.models.drafter import Drafter
from slipstream.models.target import Target
from tests.decoding import BLOCK, TAPS, drafter_of, prompt_of, target_of
from tests.tiny import FAMILIES, tiny_target

EOS = 2


@pytest.fixture(autouse=True)
def _one_thread():
    """Passes this small cost ten times more on threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def transformers_greedy(target: Target, prompt: list[int], max_new: int) -> list[int]:
    """The independent answer: transformers' own loop."""
    out = target.model.generate(torch.tensor([prompt]), max_new_tokens=max_new, do_sample=False)
    return out[0, len(prompt) :].tolist()


class Scripted:
    """A proposer that knows the answer: right in the first `right[i]` slots of pass i, wrong behind."""

    def __init__(self, answer: list[int], right: list[int], vocab_size: int, block_size: int = BLOCK) -> None:
        self.answer, self.right, self.vocab_size = answer, right, vocab_size
        self.block_size = block_size
        self.taps: list[Tensor] = []
        self.passes = 0

    def extend(self, taps_nTH: Tensor) -> None:
        self.taps.append(taps_nTH.clone())

    def propose(self, tokens: list[int], count: int) -> Drafts:
        right = self.right[self.passes % len(self.right)]
        self.passes += 1
        known = len(tokens)
        drafts = [self.answer[known + i] if known + i < len(self.answer) else 3 for i in range(count)]
        wrong = [(t + 1) % self.vocab_size for t in drafts]
        return Drafts(torch.tensor(drafts[:right] + wrong[right:], dtype=torch.int64), None)


class FromGuess:
    """A proposer made of a baseline's guesses: the decoding that a walk along the answer claims to equal."""

    def __init__(self, make_guess, prompt: list[int], block_size: int) -> None:
        self.make_guess, self.prompt, self.block_size = make_guess, prompt, block_size

    def extend(self, taps_nTH: Tensor) -> None: ...

    def propose(self, tokens: list[int], count: int) -> Drafts:
        known = [*self.prompt, *tokens]
        drafts = self.make_guess(known, self.block_size - 1)(len(known))[:count]
        return Drafts(torch.tensor(drafts, dtype=torch.int64), None)


# ---- greedy ----


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_with_a_random_drafter_equals_transformers_generate(family):
    target = target_of(family)
    drafter = drafter_of(target)
    for seed, length in (
        (0, 1),
        (1, 3),
        (2, 21),
    ):  # shorter than a convolution's tail; past Gemma's window of 8
        prompt = prompt_of(length, seed)
        decoded = generate_speculative(target, drafter, prompt, 24, 0.0, {EOS})
        assert decoded.tokens == transformers_greedy(target, prompt, 24)
        assert generate_plain(target, prompt, 24, 0.0, {EOS}).tokens == decoded.tokens
        assert sum(decoded.produced) == len(decoded.tokens) - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_survives_every_acceptance_length_and_counts_it(family):
    target = target_of(family)
    prompt = prompt_of(13, seed=5)
    answer = transformers_greedy(target, prompt, 60)
    right = [0, 5, 1, 0, 4, 2, 5, 3, 0, 0, 5]
    proposer = Scripted(answer, right, target.vocab_size)
    decoded = speculate(target, proposer, prompt, len(answer), 0.0, {EOS})
    assert decoded.tokens == answer
    whole = decoded.produced[:-1]  # the last pass may be cut short
    assert whole == [r + 1 for r in right * 9][: len(whole)]
    assert {n - 1 for n in whole} == set(range(BLOCK))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_survives_seeded_random_refusals(family):
    target = target_of(family)
    for seed in range(3):
        prompt = prompt_of(4 + 3 * seed, seed)
        answer = transformers_greedy(target, prompt, 40)
        rng = random.Random(seed)
        proposer = Scripted(answer, [rng.randrange(BLOCK) for _ in range(50)], target.vocab_size)
        assert speculate(target, proposer, prompt, len(answer), 0.0, {EOS}).tokens == answer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafter_is_given_the_taps_of_exactly_the_kept_text(family):
    """A tap too many, too few, or of a refused draft would leave the output right and acceptance ruined."""
    target = target_of(family)
    prompt = prompt_of(11, seed=3)
    answer = transformers_greedy(target, prompt, 40)
    proposer = Scripted(answer, [0, 3, 5, 1, 0, 2], target.vocab_size)
    decoded = speculate(target, proposer, prompt, len(answer), 0.0, {EOS})
    given = torch.cat(proposer.taps)
    kept = prompt + decoded.tokens[: -1 - decoded.produced[-1]]  # the last pass's tokens lead nowhere
    _, fresh = target.decode_step(torch.tensor(kept), target.new_cache(), 0)
    assert given.shape == fresh.shape
    torch.testing.assert_close(given, fresh, atol=1e-4, rtol=1e-4)


def test_the_drafter_drafts_from_its_context_as_if_it_had_read_it_at_once():
    target = target_of("qwen3")
    drafter = drafter_of(target)
    tokens = prompt_of(30, seed=8)
    _, taps = target.decode_step(torch.tensor(tokens[:-1]), target.new_cache(), 0)
    proposers = [DrafterProposer(target, drafter, 40, BLOCK, 0.8, None) for _ in range(2)]
    proposers[0].extend(taps)
    for piece in taps.split([20, 1, 5, 3]):
        proposers[1].extend(piece)
        proposers[1].propose(tokens[:-1], 3)  # drafting leaves nothing behind
    q = [p.propose(tokens, BLOCK - 1).probs_kV for p in proposers]
    assert q[0] is not None
    torch.testing.assert_close(q[0], q[1])


@pytest.mark.parametrize("stop_at", range(1, 13))
def test_a_stop_token_anywhere_in_a_block_ends_the_answer_there(stop_at):
    target = target_of("llama")
    prompt = prompt_of(9, seed=7)
    answer = generate_plain(target, prompt, 20, 0.0, set()).tokens
    stop = answer[stop_at]
    expected = answer[: answer.index(stop) + 1]
    for right in ([5], [0], [2], [3, 1]):
        decoded = speculate(target, Scripted(answer, right, 131), prompt, 20, 0.0, {stop})
        assert decoded.tokens == expected
        assert sum(decoded.produced) == len(expected) - 1
        assert generate_plain(target, prompt, 20, 0.0, {stop}).tokens == expected


def test_an_answer_ended_by_the_prefill_makes_no_pass_and_has_no_tau():
    target = target_of("llama")
    prompt = prompt_of(9, seed=7)
    first = generate_plain(target, prompt, 1, 0.0, set()).tokens
    decoded = generate_speculative(target, drafter_of(target), prompt, 20, 0.0, set(first))
    assert decoded.tokens == first
    assert decoded.passes == 0
    assert decoded.tau is None


@pytest.mark.parametrize("max_new", [1, 2, 3, 6, 7, 8, 13])
def test_the_last_block_is_shortened_to_the_room_left(max_new, monkeypatch):
    target = target_of("qwen3")
    prompt = prompt_of(9, seed=7)
    answer = generate_plain(target, prompt, 30, 0.0, set()).tokens
    lengths = []
    read = TargetReader.read
    monkeypatch.setattr(TargetReader, "read", lambda self, ids: lengths.append(len(ids)) or read(self, ids))
    decoded = speculate(target, Scripted(answer, [5], 131), prompt, max_new, 0.0, set())
    assert decoded.tokens == answer[:max_new]
    whole, rest = divmod(max_new - 1, BLOCK)
    assert lengths == [BLOCK] * whole + [rest] * (rest > 0)
    assert decoded.produced == lengths


def test_slots_behind_a_stop_token_are_not_counted():
    reached, accepted = [0] * 5, [0] * 5
    count_slots(reached, accepted, drafts=5, right=2, produced=3)  # two right, the third wrong
    assert (reached, accepted) == ([1, 1, 1, 0, 0], [1, 1, 0, 0, 0])
    count_slots(reached, accepted, drafts=5, right=4, produced=2)  # the second draft was the stop token
    assert (reached, accepted) == ([2, 2, 1, 0, 0], [2, 2, 0, 0, 0])
    count_slots(reached, accepted, drafts=5, right=5, produced=6)  # all right, and the bonus
    assert (reached, accepted) == ([3, 3, 2, 1, 1], [3, 3, 1, 1, 1])


def test_a_smaller_block_decodes_and_a_larger_one_than_trained_is_refused():
    target = target_of("qwen3")
    drafter = drafter_of(target)
    prompt = prompt_of(9)
    decoded = generate_speculative(target, drafter, prompt, 12, 0.0, set(), block_size=3)
    assert decoded.tokens == generate_plain(target, prompt, 12, 0.0, set()).tokens
    assert len(decoded.slots_reached) == 2
    for size in (1, BLOCK + 1):
        with pytest.raises(UserError, match="--block-size"):
            generate_speculative(target, drafter, prompt, 12, 0.0, set(), block_size=size)


# ---- rolling back ----


def states_of(reader: TargetReader) -> list[Tensor]:
    """Everything the next pass can see of a cache: states of linear layers, and keys and values."""
    out = []
    for layer in reader.cache.layers:
        if layer in reader.linear:
            out += [*layer.conv_states.values(), *layer.recurrent_states.values()]
        else:
            out += [layer.keys, layer.values]
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_after_refusals_the_cache_equals_a_fresh_prefill_of_the_kept_text(family):
    target = target_of(family)
    tokens = prompt_of(60, seed=9)
    reader = TargetReader(target)
    with torch.inference_mode():
        reader.prefill(torch.tensor(tokens[:7]))
        for count in (1, 3, 6, 2, 1, 4, 6, 5):
            block = tokens[reader.length : reader.length + count] + [3] * (BLOCK - count)
            reader.read(torch.tensor(block))
            reader.keep(count)
        reader.catch_up()
        fresh = TargetReader(target)
        fresh.prefill(torch.tensor(tokens[: reader.length]))
    assert reader.length == 35
    for a, b in zip(states_of(reader), states_of(fresh), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1e-5 * max(1.0, b.abs().max())
    assert bool(reader.linear) == (family == "hybrid")


def test_a_hybrid_target_that_is_not_rolled_back_is_seen(monkeypatch):
    """The tests above can fail: without the states put back the same decoding goes wrong."""
    monkeypatch.setattr(rollback, "put_back_linear_state", lambda layer, state: None)
    target = target_of("hybrid")
    prompt = prompt_of(13, seed=5)
    answer = transformers_greedy(target, prompt, 60)
    decoded = speculate(target, Scripted(answer, [0, 3, 1], 131), prompt, len(answer), 0.0, {EOS})
    assert decoded.tokens != answer


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_an_attention_cache_that_is_not_rolled_back_is_seen(family, monkeypatch):
    drop = rollback.drop_attention_tail
    monkeypatch.setattr(rollback, "drop_attention_tail", lambda cache, count: drop(cache, max(0, count - 1)))
    target = target_of(family)
    prompt = prompt_of(13, seed=5)
    answer = transformers_greedy(target, prompt, 60)
    decoded = speculate(target, Scripted(answer, [0, 3, 1], 131), prompt, len(answer), 0.0, {EOS})
    assert decoded.tokens != answer


def test_a_hybrid_target_waits_with_accepted_tokens_and_catches_up_before_they_grow(monkeypatch):
    target = target_of("hybrid")
    prompt = prompt_of(13, seed=5)
    answer = transformers_greedy(target, prompt, 60)
    lengths = []
    step = target.decode_step

    def spy(ids: Tensor, cache, start: int, last: int | None = None):
        lengths.append(len(ids))
        return step(ids, cache, start, last)

    monkeypatch.setattr(target, "decode_step", spy)
    monkeypatch.setattr(rollback, "MAX_WAITING", 10)
    decoded = speculate(target, Scripted(answer, [0], 131), prompt, len(answer), 0.0, {EOS})
    assert decoded.tokens == answer
    assert decoded.catch_up_passes == (len(answer) - 2) // 11
    assert decoded.passes == len(answer) - 1
    assert len(lengths) == 1 + decoded.passes + decoded.catch_up_passes
    assert max(lengths[1:]) == 10 + BLOCK
    # nothing refused: nothing waits
    decoded = speculate(target, Scripted(answer, [5], 131), prompt, len(answer), 0.0, {EOS})
    assert decoded.tokens == answer
    assert decoded.catch_up_passes == 0


# ---- baselines are real decoding ----


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_a_walk_along_the_greedy_answer_equals_decoding_with_that_baseline(block_size):
    # a flat little target that loops: lookups are often right, and often wrong
    target = Target(tiny_target("llama", vocab_size=13, layers=3), (0,))
    table = ngram_table(
        [
            (torch.tensor(generate_plain(target, prompt_of(5, s, 13), 60, 0.0, set()).tokens).numpy(),) * 2
            for s in range(3)
        ]
    )
    for seed in range(4):
        prompt = prompt_of(12, 50 + seed, 13)
        answer = generate_plain(target, prompt, 60, 0.0, set()).tokens
        for walked, make_guess in (
            (walk_lookup(prompt, answer, block_size), lookup_guess),
            (walk_ngram(prompt, answer, block_size, table), table.guess),
        ):
            decoded = speculate(target, FromGuess(make_guess, prompt, block_size), prompt, 60, 0.0, set())
            assert decoded.tokens == answer
            assert decoded.produced == walked
            assert max(walked) > 1
            assert min(walked[:-1]) == 1


# ---- the independent judge ----


def transformers_drafter(drafter: Drafter):
    """The same weights in transformers' own DFlash model (5.24 and later)."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    c = drafter.config
    config = MuseGlimmerAssistantConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        layer_types=list(c.layer_types),
        block_size=c.block_size,
        mask_token_id=c.mask_token_id,
        target_layer_ids=list(c.target_layer_ids),
    )
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    state = {}
    for name, weight in drafter.state_dict().items():
        ours = next((n for n in names if name.startswith(n)), "")
        state[names.get(ours, "") + name.removeprefix(ours)] = weight
    model = MuseGlimmerAssistantModel(config).eval()
    model.load_state_dict(state)
    return model


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="native DFlash decoding came with transformers 5.24",
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_transformers_own_dflash_drafts_and_accepts_the_same_tokens(family, monkeypatch):
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    # So few words that an untrained drafter is right now and then; and no end, which would be among them.
    target = Target(tiny_target(family, vocab_size=6), TAPS)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", None)
    theirs: list[tuple[int, list[int]]] = []  # by pass: text length before it, drafts
    get_candidates = DFlashTokenCandidateGenerator.get_candidates

    def record_theirs(self, input_ids, **inputs):
        out = get_candidates(self, input_ids, **inputs)
        theirs.append((input_ids.shape[1], out[0][0, input_ids.shape[1] :].tolist()))
        return out

    ours: list[tuple[int, list[int]]] = []
    propose = DrafterProposer.propose

    def record_ours(self, tokens, count):
        drafts = propose(self, tokens, count)
        ours.append((len(prompt) + len(tokens), drafts.ids_k.tolist()))
        return drafts

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", record_theirs)
    monkeypatch.setattr(DrafterProposer, "propose", record_ours)
    accepted = 0
    for seed in range(6):
        drafter = drafter_of(target, seed=seed)
        prompt = prompt_of(10 + seed, seed, 6)
        theirs.clear()
        ours.clear()
        out = target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=40,
            do_sample=False,
            assistant_model=transformers_drafter(drafter),
            speculation_type="dflash",
        )
        decoded = generate_speculative(target, drafter, prompt, 40, 0.0, set())
        assert decoded.tokens == out[0, len(prompt) :].tolist()
        # Their first round is the prefill. They always draft whole blocks, ours stops at the room left.
        assert [start for start, _ in theirs[1:]] == [start for start, _ in ours]
        assert all(b == a[: len(b)] for (_, a), (_, b) in zip(theirs[1:], ours, strict=True))
        accepted += sum(decoded.slots_accepted)
    assert accepted > 5
