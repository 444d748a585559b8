"""What a user can get wrong: one line with what, where and how to mend it, exit code 2, nothing written."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from slipstream import cli
from slipstream.config import UserError
from slipstream.export.zlab import export_zlab, load_drafter
from tests.fixtures_data import CHATML, byte_tokenizer, chat, write_jsonl
from tests.integration.conftest import VOCAB, World, counting
from tests.tiny import tiny_target

PROGRESS = (
    "data: ",
    "anchors: ",
    "check: ",
    "drafter: ",
    "plan: ",
    "cache",
    "prepare ",
    "train ",
    "Loading weights",
)


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]):
    def check(arguments: list[str], *told: str, gone: Path | None = None) -> str:
        capfd.readouterr()
        assert cli.main(arguments) == 2
        out, err = capfd.readouterr()
        lines = [line for line in err.replace("\r", "\n").splitlines() if line]
        errors = [line for line in lines if not line.startswith(PROGRESS)]
        assert len(errors) == 1, err
        assert errors[0].startswith("error: ")
        assert errors == lines[-1:], "the error is the last thing said"
        assert "Traceback" not in err + out
        for text in told:
            assert text in errors[0], f"{text!r} is not in {errors[0]!r}"
        if gone is not None:
            assert not gone.exists(), "nothing half-written"
        return errors[0]

    return check


def untouched(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---- prepare ----


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"messages": [', ["chats.jsonl:4", "broken JSON at column 15", "mend or remove the line"]),
        ('{"messages": [{"content": "x"}]}', ["chats.jsonl:4", "messages[0].role", "missing"]),
        (
            json.dumps({"messages": chat("q", "")}),
            ["chats.jsonl:4", "messages[1].content", "empty assistant turn"],
        ),
        ('{"prompt_ids": [1], "response_ids": [99999]}', ["chats.jsonl:4", "token id 99999", "--tokenizer"]),
        ('{"text": "x"}', ["chats.jsonl:4", "messages: missing", "prompt_ids + response_ids"]),
    ],
)
def test_prepare_names_file_line_and_field_of_a_broken_record(world, tmp_path, refused, line, told):
    path = write_jsonl(tmp_path / "chats.jsonl", [counting(i, 9) for i in range(3)])
    path.write_text(path.read_text() + line + "\n")
    arguments = world.prepare(path, tmp_path / "out")
    refused(
        ["prepare", *arguments, "--shard-tokens", "64", "--max-length", "64"], *told, gone=tmp_path / "out"
    )


def test_prepare_refuses_all_masked_data_with_a_sample_and_train_does_too(world, tmp_path, refused):
    masked = [{"input_ids": byte_tokenizer()(f"Hello {i}")["input_ids"]} for i in range(8)]
    masked = [{**m, "loss_mask": [0] * len(m["input_ids"])} for m in masked]
    (tmp_path / "in").mkdir()
    path = write_jsonl(tmp_path / "in" / "masked.jsonl", masked)
    arguments = world.prepare(path, tmp_path / "out")
    refused(["prepare", *arguments], "no supervised token in 8 records", "Hello 0", gone=tmp_path / "out")
    flags = ["--data-dir", str(path.parent)]
    told = [f"{path.parent}: no supervised token in 8 records", "loss_mask must be 1"]
    refused(world.train(tmp_path / "run", *flags), *told, gone=tmp_path / "run")


# ---- data of train and cache ----


def test_a_tokenizer_that_is_not_the_targets_is_refused_by_train_and_cache(world, tmp_path, refused):
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.add_tokens(["unheard-of"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = ["--input", str(world.chats), "--output-dir", str(tmp_path / "data")]
    assert cli.main(["prepare", *arguments, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    told = [f"{tmp_path / 'data'}: prepared with another tokenizer", "slipstream prepare", "--tokenizer"]
    flags = ["--data-dir", str(tmp_path / "data")]
    refused(world.train(tmp_path / "run", *flags), *told, gone=tmp_path / "run")
    refused(world.cache(tmp_path / "taps", *flags), *told, gone=tmp_path / "taps")


def test_ready_ids_beyond_the_targets_vocabulary_are_refused_by_file(world, tmp_path, refused):
    (tmp_path / "data").mkdir()
    rows = [{"prompt_ids": [5, i + 6], "response_ids": [7, 8, 9] * 4} for i in range(9)]
    rows[3]["response_ids"] = [7, VOCAB + 70]
    path = write_jsonl(tmp_path / "data" / "a.jsonl", rows)
    flags = ["--data-dir", str(path.parent)]
    refused(
        world.train(tmp_path / "run", *flags), str(path), str(VOCAB + 70), "target's", gone=tmp_path / "run"
    )


@pytest.mark.parametrize("how", ["truncated", "corrupt", "missing"])
def test_a_damaged_shard_is_refused_by_name(world, tmp_path, refused, how):
    shutil.copytree(world.data, tmp_path / "data")
    shard = tmp_path / "data" / "train-00000.safetensors"
    if how == "truncated":
        os.truncate(shard, shard.stat().st_size // 2)
    elif how == "corrupt":
        data = bytearray(shard.read_bytes())
        data[-9] ^= 1
        shard.write_bytes(data)
    else:
        shard.unlink()
    flags = ["--data-dir", str(tmp_path / "data")]
    told = [f"{shard}: {how}", "prepare the data again, or copy the folder again"]
    refused(world.train(tmp_path / "run", *flags), *told, gone=tmp_path / "run")
    refused(world.cache(tmp_path / "taps", *flags), *told, gone=tmp_path / "taps")


def test_a_data_folder_that_is_not_there_or_holds_nothing_is_refused(world, tmp_path, refused):
    away = str(tmp_path / "away")
    refused(
        world.train(tmp_path / "run", "--data-dir", away), f"{away}: no such folder", "slipstream prepare"
    )
    (tmp_path / "empty").mkdir()
    told = [f"{tmp_path / 'empty'}: neither manifest.json", "prompt_ids + response_ids"]
    refused(
        world.train(tmp_path / "run", "--data-dir", str(tmp_path / "empty")), *told, gone=tmp_path / "run"
    )


# ---- settings that cannot be ----


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--mask-token-id 2", ["--mask-token-id 2", "stop token", "unused row"]),
        (f"--mask-token-id {VOCAB}", [f"--mask-token-id {VOCAB}", f"0 to {VOCAB - 1}", "unused row"]),
        ("--mask-token-id -1", ["--mask-token-id -1", "unused row"]),
        ("--block-size 1", ["--block-size 1", "must be at least 2"]),
        ("--block-size 0", ["--block-size 0", "must be at least 2"]),
        ("--block-size 257", ["--block-size 257", "a row of 256 tokens", "--token-budget"]),
        ("--token-budget 8", ["no row of 8 tokens", "no anchor is possible", "raise --token-budget"]),
        ("--token-budget 0", ["--token-budget 0", "at least 2"]),
        ("--token-budget 8 --on-long reject", ["--token-budget 8", "none of 69 documents fits", "--on-long"]),
        ("--max-anchors 0", ["--max-anchors 0", "must be at least 1"]),
        ("--target-layer-ids 7", ["--target-layer-ids 7", "last layer", "between 0 and 6"]),
        ("--target-layer-ids 9", ["--target-layer-ids 9", "out of range", "between 0 and 6"]),
        ("--target-layer-ids 3 1", ["--target-layer-ids 3 1", "ascending"]),
        ("--taps 7", ["--taps 7", "8 layers", "lower --taps"]),
        ("--heads 4 --kv-heads 3", ["4 heads cannot share 3", "--kv-heads"]),
        ("--head-dim 15", ["head_dim 15", "even --head-dim"]),
        ("--sliding-window 3", ["sliding window 3", "--sliding-window"]),
        ("--device tpu", ["--device tpu", "cpu, cuda or auto"]),
        ("--attention flex", ["flex", "--attention"]),
        ("--dp-pairs 1 --ranks 3", ["--ranks 3", "are 2 ranks", "leave --ranks out"]),
        ("--dp-pairs -1", ["--dp-pairs -1", "at least 0"]),
        ("--max-steps 0", ["--max-steps 0", "at least 1"]),
        ("--rows-per-step 0", ["--rows-per-step 0", "at least 1"]),
        ("--log-interval 0", ["--log-interval 0", "at least 1"]),
        ("--save-interval 0", ["--save-interval 0", "at least 1"]),
        ("--eval-interval 0", ["--eval-interval 0", "at least 1"]),
        ("--keep-checkpoints 0", ["--keep-checkpoints 0", "at least 1"]),
        ("--layers 0", ["--layers 0", "at least 1"]),
        ("--epochs 0", ["--epochs 0", "above 0"]),
        ("--epochs inf", ["--epochs inf", "finite"]),
        ("--lr nan", ["--lr nan", "finite"]),
        ("--lr 0", ["--lr 0", "above 0"]),
        ("--warmup 1", ["--warmup 1", "below 1"]),
        ("--betas 0.9 1.5", ["--betas 1.5", "below 1"]),
        ("--noise -0.1", ["--noise -0.1", "at least 0"]),
        ("--seed -1", ["--seed -1", "at least 0"]),
        ("--target-model /away/at/all", ["/away/at/all", "no such folder", "--target-model"]),
        ("--taps-dir /away/at/all", ["/away/at/all/taps.json", "slipstream cache"]),
    ],
)
def test_a_setting_that_cannot_be_is_told_by_its_name_with_the_mend(world, tmp_path, refused, flags, told):
    refused(world.train(tmp_path / "run", *flags.split()), *told, gone=tmp_path / "run")


def test_a_mask_token_that_is_the_pad_token_is_refused(world, tmp_path, refused):
    shutil.copytree(world.target, tmp_path / "target")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "target")
    flags = ["--target-model", str(tmp_path / "target"), "--mask-token-id", "0"]
    refused(
        world.train(tmp_path / "run", *flags), "--mask-token-id 0 is the pad token", gone=tmp_path / "run"
    )


def test_a_mask_token_that_ends_the_targets_own_answers_is_refused(world, tmp_path, refused):
    shutil.copytree(world.target, tmp_path / "target")
    GenerationConfig(eos_token_id=[0, 9]).save_pretrained(tmp_path / "target")
    flags = ["--target-model", str(tmp_path / "target"), "--mask-token-id", "9"]
    refused(world.train(tmp_path / "run", *flags), "--mask-token-id 9 is a stop token", gone=tmp_path / "run")


def test_a_target_whose_tokenizer_is_gone_or_broken_is_told_and_so_is_one_that_is_no_model(
    world, tmp_path, refused
):
    target = tmp_path / "target"
    shutil.copytree(world.target, target)

    def both(*told: str) -> None:
        for made in (world.train, world.cache):
            refused(made(tmp_path / "out", "--target-model", str(target)), *told, gone=tmp_path / "out")

    (target / "tokenizer.json").write_text("{")
    both(f"{target}: no tokenizer can be loaded from it", "copy the target's own there")
    (target / "tokenizer.json").unlink()
    both(f"{target}: no tokenizer can be loaded from it", "copy the target's own there")
    (target / "config.json").write_text("{")
    both(f"{target}: cannot read this target's configuration")


def test_rows_too_short_to_check_the_target_with_are_told(world, tmp_path, refused):
    (tmp_path / "data").mkdir()
    rows = [{"input_ids": [10 + i, 11, 12, 13], "loss_mask": [1, 1, 1, 1]} for i in range(9)]
    write_jsonl(tmp_path / "data" / "a.jsonl", rows)
    flags = ["--data-dir", str(tmp_path / "data"), "--token-budget", "4"]
    told = [f"{tmp_path / 'data'}: rows of 4 tokens are too few", "raise --token-budget"]
    refused(world.train(tmp_path / "run", *flags), *told, gone=tmp_path / "run")


# ---- recipes ----


def test_an_unknown_recipe_key_names_the_nearest_and_a_wrong_value_its_kind(world, tmp_path, refused):
    recipe = tmp_path / "recipe.yaml"
    arguments = world.train(tmp_path / "run", "--config", str(recipe))
    for text, told in (
        ("max_anchor: 3\n", ["unknown setting 'max_anchor'", "did you mean 'max_anchors'?"]),
        ("layers: many\n", ["layers", "expected int", "'many'"]),
        ("layers: true\n", ["layers", "expected int"]),
        ("lr: fast\n", ["lr", "'fast' is not a number"]),
        ("loss: mse\n", ["loss", "'mse' is not one of decay, dpace"]),
        ("betas: [0.9]\n", ["betas", "expected 2 values, found 1"]),
        ("- layers\n", ["a recipe is a mapping of settings, found a list"]),
        ("layers: [1\n", ["not valid YAML", "line 2"]),
    ):
        recipe.write_text(text)
        refused(arguments, f"{recipe}: ", *told, gone=tmp_path / "run")
    recipe.write_bytes(b"layers: \xff\n")
    refused(arguments, f"{recipe}: not UTF-8 at byte 8")
    refused(world.train(tmp_path / "run", "--config", str(tmp_path / "away.yaml")), "away.yaml: cannot read")
    refused([*world.train(tmp_path / "run"), "--config"], "--config: name a recipe")


# ---- folders that hold something else ----


def test_an_output_folder_that_holds_another_run_is_refused_by_the_setting_that_differs(
    world, tmp_path, refused
):
    run = tmp_path / "run"
    assert cli.main(world.train(run)) == 0
    before = untouched(run)
    for flags, told in (
        ("--lr 1e-3", ["lr is 0.0006", "0.001"]),
        ("--block-size 5", ["block_size is 4", "5"]),
        ("--max-steps 9", ["max_steps is 4", "9"]),
    ):
        refused(world.train(run, *flags.split()), f"{run}: holds another run", *told, "new --output-dir")
    assert untouched(run) == before
    assert cli.main(world.train(run, "--log-interval", "2")) == 0, "what changes no loss may change"


def test_an_output_folder_with_other_files_or_that_is_a_file_is_refused(world, tmp_path, refused):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    file = tmp_path / "file"
    file.write_text("x")
    for made in (world.train, world.cache):
        refused(made(tmp_path / "mine"), f"{tmp_path / 'mine'}: is not empty", "new --output-dir")
    refused(world.train(file), f"{file}: is a file", "new --output-dir")
    assert untouched(tmp_path / "mine") == {tmp_path / "mine" / "thesis.txt": b"mine"}
    refused(
        ["export", "--checkpoint", str(tmp_path / "mine"), "--output-dir", str(tmp_path / "x")], "no complete"
    )


def test_an_output_folder_that_would_lie_in_a_file_is_one_line_of_every_verb(world, tmp_path, refused):
    file = tmp_path / "file"
    file.write_text("x")
    away = file / "sub"
    assert cli.main(world.train(tmp_path / "run", "--max-steps", "1")) == 0
    prepare = ["prepare", "--input", str(world.chats), "--tokenizer", str(world.target)]
    export = ["export", "--checkpoint", str(tmp_path / "run"), "--output-dir", str(away)]
    for arguments in (
        world.train(away), world.cache(away), [*prepare, "--output-dir", str(away)], export,
    ):  # fmt: skip
        refused(arguments, str(file), "Not a directory")
    assert file.read_text() == "x"


def test_a_run_that_was_killed_before_it_wrote_its_configuration_can_be_started_again(world, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "env.json").write_text("{}")
    (tmp_path / "run" / "config.yaml.tmp").write_text("lay")
    assert cli.main(world.train(tmp_path / "run")) == 0
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_taps_recorded_with_other_settings_are_refused_by_the_fact_that_differs(world, tmp_path, refused):
    assert cli.main(world.cache(tmp_path / "taps", "--limit-rows", "3", "--heldout-rows", "2")) == 0
    for flags, told in (
        ("--taps 3", "target_layer_ids"),
        ("--token-budget 128", "token_budget"),
        ("--dtype bfloat16", "dtype"),
        ("--eval-rows 9", "heldout_rows"),
    ):
        arguments = world.train(tmp_path / "run", "--taps-dir", str(tmp_path / "taps"), *flags.split())
        refused(arguments, f"{tmp_path / 'taps'}: taps were recorded with", told, gone=tmp_path / "run")
    refused(
        world.cache(tmp_path / "taps", "--taps", "3"), "taps were recorded with target_layer_ids", "again"
    )
    (tmp_path / "taps" / "taps.json").write_text('{"target": 1}')
    arguments = world.train(tmp_path / "run", "--taps-dir", str(tmp_path / "taps"))
    refused(arguments, "taps.json: not there or broken", "slipstream cache", gone=tmp_path / "run")


def test_a_recorded_row_that_is_cut_ends_the_run_by_its_name(world, tmp_path, refused):
    assert cli.main(world.cache(tmp_path / "taps")) == 0
    for path in (tmp_path / "taps" / "train").iterdir():
        os.truncate(path, path.stat().st_size - 9)
    arguments = world.train(tmp_path / "run", "--taps-dir", str(tmp_path / "taps"))
    refused(arguments, f"{tmp_path / 'taps' / 'train'}/row_00000", "cannot be read", "slipstream cache")


def test_recorded_taps_that_went_dead_end_the_run_by_their_row(world, tmp_path, refused):
    assert cli.main(world.cache(tmp_path / "taps")) == 0
    for path in (tmp_path / "taps" / "train").iterdir():
        taps = load_file(path)["taps"]
        taps[:, 64:] = 0
        save_file({"taps": taps}, path)
    arguments = world.train(tmp_path / "run", "--taps-dir", str(tmp_path / "taps"))
    refused(arguments, "row ", "the target's features are tap 2 of 2 is all zero at")


# ---- a drafter for another target ----


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of half the width, with the same tokenizer."""
    folder = tmp_path_factory.mktemp("narrow")
    tiny_target("qwen3", folder, vocab_size=VOCAB, hidden_size=32, layers=8)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_eval_refuses_a_drafter_of_another_hidden_size_by_name(world: World, narrow, tmp_path, refused):
    assert cli.main(world.train(tmp_path / "run")) == 0
    arguments: list[Any] = ["eval", "--drafter", tmp_path / "run" / "export", "--prompts", world.data]
    arguments += [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--output",
        tmp_path / "eval.json",
        "--target-model",
    ]
    told = ["hidden size", "64", "32", "another target"]
    refused([*map(str, arguments), str(narrow)], *told, gone=tmp_path / "eval.json")
    assert cli.main([*map(str, arguments), str(world.target), "--max-prompts", "1"]) == 0
    # tensors that are not those of its config.json
    export = tmp_path / "run" / "export"
    drafter = load_drafter(export, torch.device("cpu"), torch.float32)
    export_zlab(drafter.config, drafter.state_dict(), tmp_path / "other", {}, replace=False)
    values = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**values, "hidden_size": 32}))
    arguments[2] = tmp_path / "other"
    refused([*map(str, arguments), str(narrow)], str(tmp_path / "other"), "weight", "32")


def test_a_geometry_check_names_what_must_match_the_target(world, tmp_path):
    assert cli.main(world.train(tmp_path / "run")) == 0
    config = load_drafter(tmp_path / "run" / "export", torch.device("cpu"), torch.float32).config
    config.check_against_target(64, VOCAB, 8)
    for wrong in ((32, VOCAB, 8), (64, VOCAB + 1, 8), (64, VOCAB, 9)):
        with pytest.raises(UserError, match="another target"):
            config.check_against_target(*wrong)
    dataclasses.replace(config, intermediate_size=999, num_heads=7, num_kv_heads=1).check_against_target(
        64, VOCAB, 8
    )
