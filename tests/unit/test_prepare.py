"""`prepare` keeps what is useful, counts the rest, names what is broken, and never leaves half a dataset."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from transformers import GenerationConfig

from slipstream.config import PrepareConfig, UserError
from slipstream.data import prepare as room
from slipstream.data import sources
from slipstream.data.prepare import prepare
from slipstream.data.shards import check_tokenizer, open_dataset
from tests.fixtures_data import CHATML, THINKING, byte_tokenizer, chat, supervised_texts, write_jsonl

CHATS = [{"messages": chat(f"What is {i}?", f"It is {i}.")} for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(CHATML).save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path, tokenizer_dir):
    return PrepareConfig(
        input=(str(write_jsonl(tmp_path / "chats.jsonl", CHATS)),),
        output_dir=str(tmp_path / "out"),
        tokenizer=str(tokenizer_dir),
        max_length=64,
        holdout=0.1,
    )


def run(config, records=None, report=None, **changes):
    if records is not None:
        write_jsonl(room.Path(config.input[0]), records)
    return prepare(dataclasses.replace(config, **changes), report)


def refused(config, told, records=None, **changes):
    """A one-line `UserError` with `told` in it, and no output folder left behind."""
    existed = os.path.exists(config.output_dir)
    with pytest.raises(UserError, match=told) as e:
        run(config, records, **changes)
    assert "\n" not in str(e.value)
    assert os.path.exists(config.output_dir) == existed
    return str(e.value)


def answers(config, split="train"):
    data, tokenizer = open_dataset(config.output_dir, split), byte_tokenizer(CHATML)
    documents = [room.Document(*data.document(i)) for i in range(len(data))]
    return [text for d in documents for text in supervised_texts(tokenizer, d)]


def test_every_conversation_lands_on_one_side_and_the_manifest_tells_all(config):
    summary = run(config, shard_tokens=300)
    both = answers(config) + answers(config, "heldout")
    assert sorted(both) == sorted(f"It is {i}.<|im_end|>" for i in range(60))
    assert 0 < summary["splits"]["heldout"]["documents"] < 20
    assert summary["splits"]["train"]["shards"] > 1
    manifest = json.loads((room.Path(config.output_dir) / "manifest.json").read_text())
    assert manifest["counts"] == summary["counts"]
    assert (manifest["counts"]["records"], manifest["counts"]["kept"]) == (60, 60)
    assert manifest["settings"]["max_length"] == 64
    assert manifest["sources"][0]["path"] == config.input[0]
    assert len(manifest["sources"][0]["sha256"]) == 64
    data = open_dataset(config.output_dir, "train")
    check_tokenizer(data, byte_tokenizer(CHATML))
    assert data.eos_ids == (byte_tokenizer(CHATML).eos_token_id,)


def test_preparing_again_gives_the_same_bytes(config, tmp_path):
    run(config)
    run(config, output_dir=str(tmp_path / "again"))
    for split in ("train", "heldout"):
        a, b = (open_dataset(tmp_path / name, split).fingerprint for name in ("out", "again"))
        assert a == b


def test_any_number_of_processes_gives_the_same_files_counts_and_examples(config, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 900)
    more = [
        CHATS[3],
        {"messages": []},
        *CHATS[20:30],
        {"messages": chat("only a question")},
        {"messages": []},
    ]
    found, seen = [], []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        changes = {"output_dir": str(out), "processes": processes}
        counts = run(config, [*CHATS, *more], lambda *x: seen.append(x), **changes)["counts"]
        files = {p.name: p.read_bytes() for p in out.glob("*.safetensors")}
        found.append((counts, files, json.loads((out / "manifest.json").read_text())["splits"]))
    assert found[0] == found[1]
    assert found[0][0]["skipped"] == {"duplicate": 11, "no messages": 2, "no assistant turn": 1}
    assert "chats.jsonl:61" in found[0][0]["skipped_examples"]["duplicate"]
    assert len(seen) > 2 * 8, "of more chunks than are worked on without processes"


def test_copies_are_known_however_many_batches_lie_between():
    seen, rng = room.Seen(), np.random.default_rng(0)
    digests = rng.integers(0, 2000, 5000, np.uint64)
    known: set[int] = set()
    for batch in np.split(digests, np.sort(rng.integers(0, 5000, 60))):
        expected = []
        for digest in batch.tolist():
            expected.append(digest not in known)
            known.add(digest)
        assert seen.add(batch).tolist() == expected


def test_other_answers_to_a_held_out_prompt_are_held_out_too(config):
    more = [{"messages": chat(f"What is {i}?", f"Is it {i}?")} for i in range(60)]
    run(config, CHATS + more)
    held = answers(config, "heldout")
    assert held
    assert len(held) == 2 * len({a.split()[2].split(".")[0].split("?")[0] for a in held})


@pytest.mark.parametrize("holdout", [1e-9, 0.0])
def test_a_hold_out_that_chance_leaves_empty_takes_one_prompt_and_zero_takes_none(config, holdout):
    more = [{"messages": chat(f"What is {i}?", f"Is it {i}?")} for i in range(60)]
    run(config, CHATS + more, holdout=holdout)
    assert len(answers(config, "heldout")) == (2 if holdout else 0), "both answers to one prompt"
    assert len(answers(config)) == (118 if holdout else 120)


def test_a_single_conversation_is_for_training(config):
    run(config, CHATS[:1])
    assert len(answers(config)) == 1


def test_reasons_are_counted_and_add_up(config):
    records = [
        *CHATS[:5],
        CHATS[0],
        {"messages": []},
        {"messages": chat("only a question")},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": chat("a", "b")[1:]},
        {"input_ids": [1, 2], "loss_mask": [0, 0]},
        {"messages": chat("long " * 100, "b")},
    ]
    counts = run(config, records)["counts"]
    assert counts["skipped"] == {
        "duplicate": 1,
        "no messages": 1,
        "no assistant turn": 1,
        "unknown role": 1,
        "assistant turn first": 1,
        "no supervised token": 1,
        "too long": 1,
    }
    assert counts["records"] == counts["kept"] + sum(counts["skipped"].values())
    assert set(counts["skipped_examples"]) == set(counts["skipped"])
    assert "chats.jsonl:6" in counts["skipped_examples"]["duplicate"]


@pytest.mark.parametrize("on_long", ["truncate", "split", "reject"])
def test_long_documents_are_cut_split_or_rejected_as_told(config, on_long):
    long = {"messages": chat("Hello?", "word " * 150)}
    counts = run(config, [*CHATS[:5], long], on_long=on_long)["counts"]
    data = [open_dataset(config.output_dir, s) for s in ("train", "heldout")]
    lengths = [n for d in data for n in d.lengths.tolist()]
    assert max(lengths) <= 64
    if on_long == "truncate":
        assert (counts["truncated_documents"], counts["kept"], lengths.count(64)) == (1, 6, 1)
        assert counts["truncated_tokens"] > 0
    elif on_long == "split":
        assert (counts["split_documents"], counts["kept"]) == (1, 6)
        assert counts["documents"] == len(lengths) > 6
    else:
        assert counts["skipped"] == {"too long": 1}


def test_finished_false_leaves_the_end_of_turn_out(config):
    counts = run(config, [{"messages": chat("q", "cut"), "finished": False}, *CHATS[:3]])["counts"]
    assert "cut" in answers(config) + answers(config, "heldout")
    assert counts["unfinished"] == 1


def test_ready_ids_gz_and_conversations_are_read(config, tmp_path):
    path = tmp_path / "more.jsonl.gz"
    with gzip.open(path, "wt") as f:
        f.write(json.dumps({"prompt_ids": [9, 10], "response_ids": [11, 12]}) + "\n\n")
        f.write(
            json.dumps({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]})
        )
    seen = []
    both = (config.input[0], str(path))
    counts = run(config, CHATS[:3], report=lambda *x: seen.append(x), input=both)["counts"]
    assert counts["kept"] == 5
    total = sum(os.path.getsize(p) for p in both)
    assert seen[-1] == (total, total)
    assert "a<|im_end|>" in answers(config) + answers(config, "heldout")


def test_limit_reads_only_so_many(config):
    assert run(config, limit=7)["counts"]["records"] == 7


def test_thinking_reaches_the_template(config, tmp_path):
    byte_tokenizer(THINKING).save_pretrained(tmp_path / "thinking")
    run(config, CHATS[:4], tokenizer=str(tmp_path / "thinking"), thinking=False)
    assert all(a.startswith("It is") for a in answers(config) + answers(config, "heldout"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"messages": [', r"chats.jsonl:3: broken JSON at column 15"),
        ("[1]", r"chats.jsonl:3: expected an object"),
        ('{"text": "x"}', r"chats.jsonl:3: messages: missing \(found text\)"),
        ('{"messages": [{"content": "x"}]}', r"chats.jsonl:3: messages\[0\].role: missing"),
        (
            '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}',
            r"chats.jsonl:3: messages\[1\].content: empty assistant turn",
        ),
        ('{"prompt_ids": [1]}', r"chats.jsonl:3: response_ids: missing"),
        ('{"prompt_ids": [1], "response_ids": [5000]}', r"chats.jsonl:3: token id 5000 .* --tokenizer"),
        ('{"messages": [], "finished": "no"}', r"chats.jsonl:3: finished: expected true or false"),
        ('{"messages": [], "tools": [5]}', r"chats.jsonl:3: tools: expected a list of tool descriptions"),
    ],
)
def test_broken_input_is_told_with_file_line_and_field_and_nothing_is_written(config, line, told):
    good = "".join(json.dumps(r) + "\n" for r in CHATS[:2])
    room.Path(config.input[0]).write_text(good + line + "\n")
    refused(config, told, max_length=40, shard_tokens=40)  # a shard is on disk by then


def test_bytes_that_are_not_utf8_and_broken_gzip_are_told(config, tmp_path):
    room.Path(config.input[0]).write_bytes(b'{"messages": "\xff\xfe"}\n')
    refused(config, "chats.jsonl:1: not UTF-8")
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(CHATS[0]).encode() * 99)[:-30])
    refused(config, "x.jsonl.gz: broken gzip", input=(str(path),))


def test_all_masked_data_is_refused_with_a_sample(config):
    masked = [{"input_ids": byte_tokenizer()("Hello there!")["input_ids"], "loss_mask": [0] * 99}]
    masked[0]["loss_mask"] = [0] * len(masked[0]["input_ids"])
    told = refused(config, "no supervised token in 1 records", masked)
    assert "Hello there!" in told
    told = refused(config, "no supervised token in 2 records", [{"messages": chat("Hello?")}] * 2)
    assert "2 no assistant turn" in told
    assert "<|im_start|>user" in told
    refused(config, "no records in it", [])


def test_settings_that_cannot_work_are_told_by_name(config, tmp_path):
    refused(config, "--shard-tokens 10", shard_tokens=10)
    refused(config, "nothing.jsonl: no such file", input=(str(tmp_path / "nothing.jsonl"),))
    (tmp_path / "a.txt").write_text("x")
    refused(config, "a.txt: unknown kind of file", input=(str(tmp_path / "a.txt"),))
    refused(config, "no tokenizer can be loaded from it", tokenizer=str(tmp_path))
    byte_tokenizer(None).save_pretrained(tmp_path / "bare")
    refused(config, "no chat template", tokenizer=str(tmp_path / "bare"))
    refused(config, "all 1 conversations are held out", CHATS[:1], holdout=0.999999)


def test_a_share_or_length_that_nobody_checked_is_an_assertion_not_a_dataset(config):
    for changes in ({"holdout": -0.1}, {"holdout": 1.0}, {"max_length": 1}):
        with pytest.raises(AssertionError):
            run(config, **changes)
    assert not os.path.exists(config.output_dir)


def test_every_token_that_the_target_stops_at_is_in_the_manifest(config, tmp_path):
    target = tmp_path / "target"
    byte_tokenizer(CHATML).save_pretrained(target)
    for eos, told in ((0, (0, 2)), ([6, 0], (0, 2, 6)), ([], (2,))):
        GenerationConfig(eos_token_id=eos).save_pretrained(target)
        run(config, tokenizer=str(target), output_dir=str(tmp_path / f"out-{eos}"))
        assert open_dataset(tmp_path / f"out-{eos}", "train").eos_ids == told


def test_a_conversation_that_breaks_the_template_is_counted_with_its_line_and_the_templates_words(
    config, tmp_path
):
    words = "{{- m.stop and m.content.split(m.stop[1:]) -}}"
    template = CHATML.replace("{%- endfor -%}", words + "{%- endfor -%}", 1)
    byte_tokenizer(template).save_pretrained(tmp_path / "target")
    broken = {"messages": [{"role": "user", "content": "q", "stop": "x"}, *chat("q", "a")[1:]]}
    counts = run(config, [*CHATS[:3], broken], tokenizer=str(tmp_path / "target"))["counts"]
    assert counts["skipped"] == {"refused by the template": 1}
    told = counts["skipped_examples"]["refused by the template"]
    assert "chats.jsonl:4: refused by the template: empty separator" in told


def test_a_finished_or_foreign_folder_is_left_alone(config):
    run(config)
    before = sorted(os.listdir(config.output_dir))
    refused(config, "holds a finished dataset")
    assert sorted(os.listdir(config.output_dir)) == before
    os.unlink(os.path.join(config.output_dir, "manifest.json"))
    (room.Path(config.output_dir) / "notes.txt").write_text("mine")
    refused(config, r"holds other files \(notes.txt")
    assert "train-00000.safetensors" in os.listdir(config.output_dir)


def test_a_full_disk_leaves_the_folder_as_it_was(config, monkeypatch):
    def full(*_):
        raise UserError("out/train-00000.safetensors: disk full")

    monkeypatch.setattr(room, "write_manifest", full)
    os.mkdir(config.output_dir)
    refused(config, "disk full")
    assert os.listdir(config.output_dir) == []


def test_a_killed_prepare_is_no_dataset_and_the_next_one_starts_over(config, tmp_path):
    program = (
        "import os, signal, sys\n"
        "from slipstream.config import PrepareConfig\n"
        "from slipstream.data import prepare\n"
        "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare.write_manifest = die\n"
        "config = PrepareConfig(input=(sys.argv[1],), output_dir=sys.argv[2], tokenizer=sys.argv[3])\n"
        "prepare.prepare(config)\n"
    )
    arguments = [config.input[0], config.output_dir, config.tokenizer]
    died = subprocess.run([sys.executable, "-c", program, *arguments], check=False)
    assert died.returncode == -signal.SIGKILL
    assert "train-00000.safetensors" in os.listdir(config.output_dir)
    (tmp_path / "out" / "train-00007.safetensors.tmp").write_bytes(b"half")
    with pytest.raises(UserError, match=r"manifest\.json"):
        open_dataset(config.output_dir, "train")
    run(config, CHATS[:20])
    assert len(answers(config)) + len(answers(config, "heldout")) == 20
    assert not [n for n in os.listdir(config.output_dir) if n.endswith(".tmp")]
