"""The evaluation end to end on a tiny target: prompts in, figures, proof and errors out."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import GenerationConfig

from slipstream import cli
from slipstream.config import EvalConfig, PrepareConfig, TrainConfig, UserError
from slipstream.data.chat import ChatTemplate
from slipstream.data.prepare import prepare
from slipstream.decoding import evaluate as evaluation_module
from slipstream.decoding.baselines import tau_of
from slipstream.decoding.evaluate import (
    decode_after_training,
    degenerate_warnings,
    evaluate,
    run_eval,
    untrained,
)
from slipstream.decoding.lossless import compare, prove_lossless
from slipstream.decoding.prompts import Prompt, read_prompts
from slipstream.decoding.speculative import generate_plain
from slipstream.decoding.table import render_table, to_json
from slipstream.export.zlab import export_zlab
from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.models.target import Target, load_target
from slipstream.training.metrics import Display
from slipstream.training.run import write_run_facts
from slipstream.training.setup import open_run
from tests.fixtures_data import CHATML, THINKING, byte_tokenizer, chat, write_jsonl
from tests.tiny import tiny_target

TAPS = (0, 2)
VOCAB = 512
CHATML_TOOLS = (
    r"{%- for t in tools or [] -%}"
    r"{{- 'tool ' + t.name + '\n' if t.name else 'x'.split(t.stop) -}}"
    r"{%- endfor -%}" + CHATML
)
QUIET = Console(quiet=True)


def quietly() -> Display:
    return Display(QUIET)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """A saved target with tokenizer, an exported drafter, a prompt file, a prepared folder."""
    root = tmp_path_factory.mktemp("eval")
    tokenizer = byte_tokenizer()
    tiny_target("qwen3", root / "target", vocab_size=VOCAB, layers=4)
    tokenizer.save_pretrained(root / "target")
    drafter = drafter_of()
    export_zlab(drafter.config, drafter.state_dict(), root / "drafter", {}, replace=False)
    lines = [
        {"turns": ["What is two and two?", "And three?"]},
        {"messages": chat("Hello there!", "Hello.", "Yes or no?", "No.")},
        {"prompt": "maybe?"},
        {"prompt_ids": [5, 6, 7]},
    ]
    write_jsonl(root / "questions.jsonl", lines)
    chats = [{"messages": chat(f"question {i}", f"answer {i}, word by word")} for i in range(40)]
    write_jsonl(root / "chats.jsonl", chats)
    prepare(
        PrepareConfig(
            input=(str(root / "chats.jsonl"),),
            output_dir=str(root / "data"),
            tokenizer=str(root / "target"),
            holdout=0.3,
        )
    )
    return {name: root / name for name in ("target", "drafter", "questions.jsonl", "data")} | {"root": root}


def drafter_of(seed: int = 0, block_size: int = 4) -> Drafter:
    config = DrafterConfig(
        hidden_size=64,
        vocab_size=VOCAB,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=64,
        block_size=block_size,
        mask_token_id=500,
        target_layer_ids=TAPS,
        num_target_layers=4,
        rope_theta=10000.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Drafter(config).requires_grad_(False)


def config_of(places: dict[str, Path], **changes) -> EvalConfig:
    config = EvalConfig(
        target_model=str(places["target"]),
        drafter=str(places["drafter"]),
        prompts=(str(places["questions.jsonl"]),),
        max_new_tokens=10,
        lossless_tokens=10,
        device="cpu",
        dtype="float32",
    )
    return dataclasses.replace(config, **changes)


# ---- prompts ----


def test_prompts_are_read_up_to_where_the_answer_begins(places):
    tokenizer = byte_tokenizer()
    chats = ChatTemplate(tokenizer)
    prompts = read_prompts(places["questions.jsonl"], chats, 10)
    texts = [tokenizer.decode(p.ids) for p in prompts]
    opening = "<|im_start|>assistant\n"
    assert texts[0] == "<|im_start|>user\nWhat is two and two?<|im_end|>\n" + opening
    assert texts[1].endswith("<|im_start|>user\nYes or no?<|im_end|>\n" + opening)
    assert "Hello there!" in texts[1]
    assert "No." not in texts[1]
    assert texts[2] == "<|im_start|>user\nmaybe?<|im_end|>\n" + opening
    assert prompts[3] == Prompt([5, 6, 7], f"{places['questions.jsonl']}:4")
    assert len(read_prompts(places["questions.jsonl"], chats, 2)) == 2


def test_prompts_of_a_prepared_folder_are_its_heldout_documents_up_to_the_answer(places):
    tokenizer = byte_tokenizer()
    prompts = read_prompts(places["data"], ChatTemplate(tokenizer), 1000)
    assert 2 <= len(prompts) < 40
    for prompt in prompts:
        text = tokenizer.decode(prompt.ids)
        assert text.startswith("<|im_start|>user\nquestion ")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["a"', r"questions\.jsonl:2: not valid JSON"),
        ("[1, 2]", r":2: expected an object"),
        ('{"text": "a"}', r":2: no prompt_ids, messages, turns or prompt"),
        ('{"turns": []}', r":2: turns holds no text"),
        ('{"prompt_ids": []}', r":2: prompt_ids must be"),
        ('{"prompt_ids": [1, true]}', r":2: prompt_ids must be"),
        ('{"messages": "a"}', r":2: messages: expected a list"),
        ('{"messages": [{"content": "a"}]}', r":2: messages\[0\]\.role: missing"),
        ('{"messages": [{"role": "user", "content": 5}]}', r":2: messages\[0\]\.content: a int"),
        ('{"messages": [{"role": "narrator", "content": "a"}]}', r":2: unknown role: .*narrator"),
        ('{"messages": []}', r":2: no messages"),
        ('{"prompt": "a", "tools": [5]}', r":2: tools: expected a list of tool descriptions"),
        ('{"prompt": "a", "tools": [{"stop": ""}]}', r":2: refused by the template: empty separator"),
        ('{"messages": [{"role": "system", "content": "a"}]}', r":2: messages without a user turn"),
    ],
)
def test_a_broken_prompt_line_is_named_with_file_and_line(tmp_path, line, message):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message) as error:
        read_prompts(path, ChatTemplate(byte_tokenizer(CHATML_TOOLS)), 10)
    assert "\n" not in str(error.value)


def test_missing_and_empty_prompt_files_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="no such prompt file"):
        read_prompts(tmp_path / "absent.jsonl", ChatTemplate(byte_tokenizer()), 10)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="no prompts in it"):
        read_prompts(tmp_path / "empty.jsonl", ChatTemplate(byte_tokenizer()), 10)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_prompts_are_rendered_in_the_thinking_mode_that_training_saw(tmp_path, thinking):
    tokenizer = byte_tokenizer(THINKING)
    chats = ChatTemplate(tokenizer, thinking)
    answer = "<think>\nhm\n</think>\n\nYes." if thinking else "Yes."
    (document,) = chats.render(chat("Hello?", answer)).documents
    trained = document.ids[: int(document.supervised.argmax())].tolist()
    lines = [{"prompt": "Hello?"}, {"turns": ["Hello?"]}, {"messages": chat("Hello?", "Yes.")}]
    path = write_jsonl(tmp_path / "questions.jsonl", lines)
    prompts = read_prompts(path, chats, 10)
    assert [p.ids for p in prompts] == [trained] * 3
    assert ("<think>" in tokenizer.decode(trained)) == (thinking is False)


def test_a_lines_tools_reach_the_template(tmp_path):
    tools = [{"name": "add"}]
    lines = [{"prompt": "Hello?", "tools": tools}, {"messages": chat("Hello?"), "tools": tools}]
    path = write_jsonl(tmp_path / "questions.jsonl", [*lines, {"prompt": "Hello?", "tools": None}])
    tokenizer = byte_tokenizer(CHATML_TOOLS)
    texts = [tokenizer.decode(p.ids) for p in read_prompts(path, ChatTemplate(tokenizer), 10)]
    assert [t.startswith("tool add\n") for t in texts] == [True, True, False]


def test_without_a_chat_template_text_is_a_prompt_and_messages_are_refused(tmp_path):
    tokenizer = byte_tokenizer(None)
    path = write_jsonl(tmp_path / "questions.jsonl", [{"prompt": "Hello?"}])
    (prompt,) = read_prompts(path, ChatTemplate(tokenizer), 10)
    assert tokenizer.decode(prompt.ids) == "Hello?"
    write_jsonl(path, [{"messages": chat("Hello?")}])
    with pytest.raises(UserError, match=r"questions\.jsonl:1: .*no chat template"):
        read_prompts(path, ChatTemplate(tokenizer), 10)


# ---- the verb ----


def test_eval_writes_figures_that_agree_with_each_other_and_prints_them(places):
    output = places["root"] / "eval.json"
    console = Console(record=True, width=200, file=io.StringIO())
    config = config_of(places, control=True, ngram_data=str(places["data"]), output=str(output))
    config = dataclasses.replace(config, prompts=(*config.prompts, str(places["data"])), max_prompts=3)
    out = run_eval(config, quietly(), console)
    assert json.loads(output.read_text()) == json.loads(json.dumps(out))
    assert out["lossless"]["lossless"] is True
    assert out["lossless"]["dtype"] == "float32"
    assert out["block_size"] == 4
    assert [d["name"] for d in out["datasets"]] == ["questions", "data"]
    for d in out["datasets"]:
        assert d["requests"] == 3
        assert d["tau"]["low"] <= d["tau"]["mean"] <= d["tau"]["high"]
        assert all(d[f"tau_{name}"]["mean"] >= 1 for name in ("control", "lookup", "ngram"))
        tokens = sum(n * passes for n, passes in d["produced"].items())
        assert tokens == d["speculative"]["tokens"] == d["plain"]["tokens"]
        assert sum(d["produced"].values()) == d["speculative"]["passes"]
        assert len(d["slot_acceptance"]) == 3
        assert d["speedup"] == pytest.approx(
            d["speculative"]["tokens_per_second"] / d["plain"]["tokens_per_second"]
        )
    text = console.export_text()
    assert "questions" in text
    assert "lossless in float32" in text


def test_sampled_eval_has_no_timed_comparison_but_still_the_greedy_proof(places):
    out = run_eval(config_of(places, temperature=0.7, max_prompts=2), quietly(), QUIET)
    assert out["agreement"] is None
    assert out["lossless"]["lossless"] is True
    assert out["lossless"]["requests"] == 2


def test_bf16_eval_proves_in_fp32_and_reports_its_own_agreement_apart(places):
    out = run_eval(config_of(places, dtype="bfloat16", lossless_tokens=6), quietly(), QUIET)
    assert out["dtype"] == out["agreement"]["dtype"] == "bfloat16"
    assert out["lossless"]["dtype"] == "float32"
    assert out["lossless"]["lossless"] is True
    assert out["lossless"]["tokens"] <= 6 * 4


def test_the_proof_can_be_left_out(places):
    assert run_eval(config_of(places, lossless_tokens=0), quietly(), QUIET)["lossless"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 5}, "--block-size"),
        ({"max_new_tokens": 4096}, "context of 4096"),
        ({"target_model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"drafter": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"prompts": ("/nowhere/at/all",)}, "/nowhere/at/all"),
        ({"ngram_data": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"output": "/nowhere/at/all.json"}, "--output"),
    ],
)
def test_bad_settings_are_one_line_errors_that_name_the_mend(places, changes, message):
    with pytest.raises(UserError, match=message) as error:
        run_eval(config_of(places, **changes), quietly(), QUIET)
    assert "\n" not in str(error.value)


def test_an_output_that_is_a_folder_is_refused_before_anything_is_loaded(places, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_module, "load_drafter", None)  # would not come back from a call
    with pytest.raises(UserError, match=f"--output {tmp_path}: is a folder: name a file in it"):
        run_eval(config_of(places, output=str(tmp_path)), quietly(), QUIET)


@pytest.mark.parametrize("collects", [True, False])
def test_the_first_target_is_gone_before_the_proof_loads_its_own(places, monkeypatch, collects):
    loaded, alive = [], []

    def load(*arguments):
        alive.append(sum(model() is not None for model in loaded))
        target = load_target(*arguments)
        loaded.append(weakref.ref(target.model))
        return target

    monkeypatch.setattr(evaluation_module, "load_target", load)
    if not collects:
        monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.disable()  # or chance collects
    try:
        run_eval(config_of(places, dtype="bfloat16", max_prompts=1, control=True), quietly(), QUIET)
    finally:
        gc.enable()
    assert alive == [0, 0 if collects else 1], "its hooks hold it: only the collection frees it"


def test_eval_shows_its_bars_on_the_terminal_and_its_tables_on_standard_output(places, capsys):
    arguments = ["eval", "--target-model", places["target"], "--drafter", places["drafter"]]
    arguments += ["--prompts", places["questions.jsonl"], "--max-new-tokens", 4, "--lossless-tokens", 5]
    assert cli.main([str(a) for a in (*arguments, "--device", "cpu", "--dtype", "float32")]) == 0
    out, err = capsys.readouterr()
    assert "lossless in float32" in out
    assert "decode 1/4 questions" in err
    assert "decode" not in out
    terminal = Console(force_terminal=True, width=200, file=io.StringIO())
    with Display(terminal) as display:
        run_eval(config_of(places, lossless_tokens=11), display, QUIET)
    shown = terminal.file.getvalue()
    assert shown.index("decode") < shown.index("4/4") < shown.index("prove in fp32") < shown.rindex("4/4")


def test_decoding_and_proof_count_requests_one_by_one(places, target):
    prompts = {"a": [Prompt([7, 8], "a:1"), Prompt([9], "a:2")], "b": [Prompt([10, 11], "b:1")]}
    seen = []
    say = lambda done, facts: seen.append((done, facts))  # noqa: E731
    evaluate(target, drafter_of(), prompts, max_new_tokens=3, stop_ids=set(), progress=say)
    prove_lossless(target, drafter_of(), prompts["a"], 3, set(), progress=say)
    assert seen == [(1, "a"), (2, "a"), (3, "b"), (1, ""), (2, "")]


def test_eval_stops_where_the_generation_config_or_the_tokenizer_says(places, tmp_path, monkeypatch):
    target = shutil.copytree(places["target"], tmp_path / "target")
    GenerationConfig(eos_token_id=[9, 11]).save_pretrained(target)
    given = []

    def stopped(*_, stop_ids, **__):
        given.append(stop_ids)
        raise UserError("enough")

    monkeypatch.setattr(evaluation_module, "evaluate", stopped)
    with pytest.raises(UserError, match="enough"):
        run_eval(config_of(places, target_model=str(target)), quietly(), QUIET)
    assert given == [{9, 11, byte_tokenizer().eos_token_id}]


@pytest.mark.parametrize("thinking", [None, False])
def test_eval_takes_the_thinking_mode_from_its_setting(places, tmp_path, monkeypatch, thinking):
    target = shutil.copytree(places["target"], tmp_path / "target")
    tokenizer = byte_tokenizer(THINKING)
    tokenizer.save_pretrained(target)
    given = []

    def stopped(_target, _drafter, prompts, **_):
        given.extend(prompts["questions"])
        raise UserError("enough")

    monkeypatch.setattr(evaluation_module, "evaluate", stopped)
    with pytest.raises(UserError, match="enough"):
        run_eval(config_of(places, target_model=str(target), thinking=thinking), quietly(), QUIET)
    for prompt in given[:3]:
        assert ("<think>" in tokenizer.decode(prompt.ids)) == (thinking is False)
    assert given[3].ids == [5, 6, 7]


def test_prompt_ids_of_another_tokenizer_are_refused(places):
    path = write_jsonl(places["root"] / "foreign.jsonl", [{"prompt_ids": [VOCAB]}])
    with pytest.raises(UserError, match=r"foreign\.jsonl:1: token 512 is outside"):
        run_eval(config_of(places, prompts=(str(path),)), quietly(), QUIET)


def test_a_runs_last_decoding_needs_held_out_documents_not_validation_rows(places, tmp_path):
    arguments = ["train", "--target-model", places["target"], "--data-dir", places["data"]]
    small = "--layers 1 --block-size 4 --mask-token-id 500 --token-budget 256 --max-anchors 16 --max-steps 1 "
    small += "--target-layer-ids 0 2 --device cpu --dtype float32 --decode-tokens 4 --eval-rows 0"
    for count in (2, 0):
        run = tmp_path / f"run-{count}"
        flags = [*arguments, *small.split(), "--decode-prompts", count, "--output-dir", run]
        assert cli.main([str(a) for a in flags]) == 0
        assert (run / "decode.json").exists() == bool(count)
    decoded = json.loads((tmp_path / "run-2" / "decode.json").read_text())
    assert decoded["datasets"][0]["requests"] == 2


def test_a_runs_last_decoding_leaves_out_prompts_that_do_not_fit_and_says_so(places, tmp_path, monkeypatch):
    config = TrainConfig(
        target_model=str(places["target"]),
        data_dir=str(places["data"]),
        output_dir=str(tmp_path / "run"),
        layers=1,
        target_layer_ids=TAPS,
        block_size=4,
        mask_token_id=500,
        token_budget=256,
        max_anchors=16,
        max_steps=1,
        decode_prompts=4,
        decode_tokens=6,
        device="cpu",
        dtype="float32",
    )
    run = open_run(config, quietly())
    write_run_facts(run)
    export_zlab(run.drafter.config, run.drafter.state_dict(), tmp_path / "export", {}, replace=False)
    given = []
    decode = evaluation_module.evaluate
    monkeypatch.setattr(
        evaluation_module, "evaluate", lambda *a, **k: (given.append(k["stop_ids"]), decode(*a, **k))[1]
    )
    run.target.model.generation_config.eos_token_id = [9]
    terminal = Console(force_terminal=True, width=200, file=io.StringIO())
    out = decode_after_training(run, tmp_path / "export", Display(terminal))
    shown = terminal.file.getvalue()
    assert shown.index("decode") < shown.index("4/4") < shown.index("τ")
    assert given == [{9, byte_tokenizer().eos_token_id}]
    assert out is not None
    assert out["lossless"]["lossless"] is True
    assert out["datasets"][0]["requests"] == 4
    assert out["datasets"][0]["tau_ngram"]["mean"] >= 1
    assert json.loads((tmp_path / "run" / "decode.json").read_text())["block_size"] == 4
    run = dataclasses.replace(run, ends=dataclasses.replace(run.ends, max_position_embeddings=8))
    console = Console(record=True, width=200, file=io.StringIO())
    assert decode_after_training(run, tmp_path / "export", Display(console)) is None
    assert "4 held-out prompts left out" in console.export_text()


# ---- figures and proof ----


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target("qwen3", vocab_size=VOCAB, layers=4), TAPS)


def test_a_difference_is_reported_with_its_position_and_margin(target):
    prompt = Prompt([7, 8, 9], "here:1")
    plain = generate_plain(target, prompt.ids, 8, 0.0, set())
    other = list(plain.tokens)
    other[5] = (other[5] + 1) % VOCAB
    agreement = compare(
        target, [(prompt, plain, dataclasses.replace(plain, tokens=other)), (prompt, plain, plain)]
    )
    assert not agreement.lossless
    assert agreement.tokens == 5 + 8
    (difference,) = agreement.differences
    assert (difference.where, difference.position) == ("here:1", 5)
    logits = target.model(torch.tensor([prompt.ids + plain.tokens[:5]])).logits[0, -1]
    assert difference.margin == pytest.approx(float(logits[plain.tokens[5]] - logits[other[5]]), abs=1e-4)
    assert difference.margin > 0


def test_the_proof_fails_when_the_speculative_loop_is_wrong(target, monkeypatch):
    from slipstream.decoding import speculative

    prompts = [Prompt([7, 8, 9, 10 + i], f"here:{i}") for i in range(3)]
    assert prove_lossless(target, drafter_of(), prompts, 12, set()).lossless
    monkeypatch.setattr(
        speculative, "accept_greedy", lambda ids, logits: [*ids[:1].tolist(), int(logits[-1].argmax())]
    )
    assert not prove_lossless(target, drafter_of(), prompts, 12, set()).lossless


def test_a_target_in_a_loop_is_warned_of():
    good, bad = tau_of([[2, 2]]), tau_of([[4, 4]])
    assert degenerate_warnings(good, good, 0.95) == []
    assert "repeat themselves" in degenerate_warnings(good, good, 0.2)[0]
    assert "prompt-lookup" in degenerate_warnings(good, bad, 0.95)[0]
    assert degenerate_warnings(None, None, None) == []


def test_the_control_is_another_drafter_of_the_same_geometry_and_seeded():
    drafter = drafter_of(seed=0)
    control = untrained(drafter, seed=1)
    assert control.config == drafter.config
    assert not torch.equal(control.fc.weight, drafter.fc.weight)
    assert torch.equal(control.fc.weight, untrained(drafter, seed=1).fc.weight)
    assert not torch.equal(control.fc.weight, untrained(drafter, seed=2).fc.weight)


def test_an_answer_that_ends_with_the_prefill_counts_as_a_request_without_tau(target):
    prompt = Prompt([7, 8, 9], "here:1")
    first = generate_plain(target, prompt.ids, 1, 0.0, set()).tokens
    evaluation = evaluate(target, drafter_of(), {"one": [prompt]}, max_new_tokens=8, stop_ids=set(first))
    (result,) = evaluation.datasets
    assert result.tau is None
    assert result.requests == 1
    assert result.speedup is None
    Console(quiet=True).print(render_table(evaluation))
    json.dumps(to_json(evaluation))


def test_a_drafter_of_another_target_is_refused(target):
    drafter = drafter_of()
    wrong = Drafter(dataclasses.replace(drafter.config, vocab_size=VOCAB + 1))
    with pytest.raises(UserError, match="another target"):
        evaluate(target, wrong, {"one": [Prompt([7], "here")]}, max_new_tokens=4, stop_ids=set())


def test_the_ngram_table_is_bounded_and_says_what_it_was_made_of(places, monkeypatch):
    from slipstream.data.shards import open_dataset

    train = open_dataset(places["data"], "train")
    whole = evaluation_module.training_table(train)
    assert whole.tokens == int(train.lengths.sum())
    monkeypatch.setattr(evaluation_module, "NGRAM_TOKENS", 100)
    part = evaluation_module.training_table(train)
    assert 0 < part.tokens <= 100
