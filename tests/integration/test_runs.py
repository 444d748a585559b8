"""Runs as users meet them: lines that a resume continues, ends by the clock, taps on disk, odd but right
data."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from slipstream import cli
from slipstream.distributed import link
from tests.integration.conftest import losses


def position(run):
    return json.loads((sorted((run / "checkpoints").iterdir())[-1] / "position.json").read_text())


def test_a_resume_inside_a_log_window_writes_the_lines_of_the_uninterrupted_run(world, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = ["--max-steps", "11", "--log-interval", "3", "--save-interval", "4", "--keep-checkpoints", "9"]
    assert cli.main(world.train(whole, *flags)) == 0
    shutil.copytree(whole, resumed)
    for later in sorted((resumed / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    assert position(resumed)["step"] == 4
    assert len(position(resumed)["window"]) > 3
    assert cli.main(world.train(resumed, *flags)) == 0
    assert list(losses(resumed)) == [1, 3, 6, 9, 11]
    assert losses(resumed) == losses(whole)


def test_a_run_ended_by_the_clock_logs_its_last_window(world, tmp_path):
    run = tmp_path / "run"
    flags = ["--max-steps", "100000", "--max-minutes", "0.02", "--log-interval", "100000"]
    assert cli.main(world.train(run, *flags)) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert 1 < train[-1]["step"] == position(run)["step"] < 100000
    assert sum(line["labels"] for line in train) == position(run)["labels"]


def test_a_tokenizer_with_more_ids_than_the_embedding_is_fine_while_no_document_holds_them(world, tmp_path):
    target, data = tmp_path / "target", tmp_path / "data"
    shutil.copytree(world.target, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens([f"<beyond {i}>" for i in range(400)])
    tokenizer.save_pretrained(target)
    assert len(tokenizer) > json.loads((target / "config.json").read_text())["vocab_size"]
    prepare = ["prepare", "--input", str(world.chats), "--output-dir", str(data), "--tokenizer", str(target)]
    assert cli.main(prepare) == 0
    arguments = [
        str(target) if a == str(world.target) else a for a in world.train(tmp_path / "run", "--plan")
    ]
    assert cli.main([str(data) if a == str(world.data) else a for a in arguments]) == 0


def test_no_validation_with_recorded_taps_needs_no_recorded_held_out_rows(world, tmp_path):
    taps = tmp_path / "taps"
    assert cli.main(world.cache(taps)) == 0
    flags = ("--taps-dir", str(taps), "--eval-rows", "0", "--decode-prompts", "1", "--decode-tokens", "4")
    assert cli.main(world.train(tmp_path / "run", *flags)) == 0
    assert not losses(tmp_path / "run", "validation")
    assert (tmp_path / "run" / "decode.json").exists()


def test_an_interrupted_cache_needs_room_for_the_missing_rows_only(world, tmp_path, monkeypatch, capfd):
    taps = tmp_path / "taps"
    assert cli.main(world.cache(taps)) == 0
    gone = taps / "train" / "row_0000001.safetensors"
    size = gone.stat().st_size
    gone.unlink()
    monkeypatch.setattr(link.shutil, "disk_usage", lambda _: SimpleNamespace(free=size))
    assert cli.main(world.cache(taps)) == 0
    assert gone.stat().st_size == size
    monkeypatch.setattr(link.shutil, "disk_usage", lambda _: SimpleNamespace(free=size // 2))
    gone.unlink()
    capfd.readouterr()
    assert cli.main(world.cache(taps)) == 2
    assert "GiB are free" in capfd.readouterr().err


def test_taps_of_another_row_are_refused_by_the_files_name(world, tmp_path, capfd):
    taps = tmp_path / "taps"
    assert cli.main(world.cache(taps)) == 0
    files = sorted((taps / "train").iterdir(), key=lambda p: p.stat().st_size)
    shutil.copy(files[0], files[-1])
    capfd.readouterr()
    assert (
        cli.main(world.train(tmp_path / "run", "--taps-dir", str(taps), "--epochs", "1", "--max-steps", "40"))
        == 2
    )
    assert f"error: {files[-1]}: holds taps of another row" in capfd.readouterr().err


def test_records_left_out_of_tokenised_completions_are_told_and_stored(world, tmp_path, capfd):
    data = tmp_path / "completions"
    data.mkdir()
    records = [
        {"input_ids": [7 + (i * 13 + j * j) % 97 for j in range(60)], "loss_mask": [0] * 30 + [i % 2] * 30}
        for i in range(40)
    ]
    (data / "part.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    run = tmp_path / "run"
    arguments = [str(data) if a == str(world.data) else a for a in world.train(run, "--max-steps", "1")]
    assert cli.main(arguments) == 0
    assert "20 no supervised token" in capfd.readouterr().err
    assert json.loads((run / "env.json").read_text())["records"]["skipped"] == {"no supervised token": 20}


@pytest.mark.parametrize(
    "changed", [("--device", "auto"), ("--attention", "documents"), ("--dtype", "float32")]
)
def test_a_resume_may_name_the_machine_otherwise_when_it_comes_to_the_same(world, tmp_path, changed):
    run = tmp_path / "run"
    assert cli.main(world.train(run)) == 0
    assert cli.main(world.train(run, *changed)) == 0


def test_another_attention_is_another_run(world, tmp_path, capfd):
    run = tmp_path / "run"
    assert cli.main(world.train(run)) == 0
    assert cli.main(world.train(run, "--attention", "dense")) == 2
    assert "another attention" in capfd.readouterr().err


def test_a_run_that_ended_before_its_first_step_may_start_again_with_other_settings(
    world, tmp_path, monkeypatch
):
    """Out of memory in the warm-up: the settings that the error offers are taken by the same command."""
    run = tmp_path / "run"

    def full(*_):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr("slipstream.training.rank.train", full)
        patch.setattr(
            "slipstream.system.planner.explain_out_of_memory", lambda run: "would fit: --max-anchors 8"
        )
        assert cli.main(world.train(run, "--max-steps", "3", "--max-anchors", "16")) == 2
    assert (run / "config.yaml").exists()
    assert cli.main(world.train(run, "--max-steps", "3", "--max-anchors", "8")) == 0
    assert "max_anchors: 8" in (run / "config.yaml").read_text()
    assert cli.main(world.train(run, "--max-steps", "3", "--max-anchors", "16")) == 2, "now it holds a run"
