"""The command line: verbs, flags that stay, who wins over whom, and that help costs nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch
from tyro.extras import get_parser

from slipstream import __version__, cli
from slipstream.config import EvalConfig, TrainConfig, UserError

FLAGS = {
    "regenerate": "--output-dir --input --self-prompt --target-model --server --served-name --temperature "
    "--top-p --max-new-tokens --turns --thinking --seed --limit --concurrency --timeout --retries "
    "--batch-size --device --dtype",
    "prepare": "--input --output-dir --tokenizer --max-length --on-long --holdout --thinking --shard-tokens "
    "--limit --processes --decontaminate --decontaminate-words --show",
    "data": "--task --data-dir --json --no-json --png",
    "cache": "--target-model --data-dir --data-cache --data-cache-gib --output-dir --taps --target-layer-ids "
    "--token-budget --on-long --limit-rows --heldout-rows --device --dtype --target-pass --target-fp8 "
    "--no-target-fp8",
    "train": "--target-model --data-dir --data-cache --data-cache-gib --output-dir --taps-dir --layers "
    "--heads --kv-heads --head-dim --intermediate-size --taps --target-layer-ids --block-size "
    "--mask-token-id --sliding-window "
    "--full-layers --rope-theta --token-budget --max-anchors --anchor-share --on-long --loss --gamma "
    "--dpace-floor --noise --noise-kind --epochs --max-steps --max-minutes --rows-per-step --anchor-draws "
    "--lr --warmup "
    "--weight-decay --betas --clip --seed "
    "--device --dtype --target-pass --target-fp8 --no-target-fp8 --attention --compile --no-compile "
    "--activation-checkpointing --no-activation-checkpointing --ranks --dp-pairs --target-ranks "
    "--drafter-ranks --link-credits --drafter-sharding --no-drafter-sharding --target-sharding "
    "--no-target-sharding --max-restarts --log-interval --save-interval "
    "--keep-checkpoints --eval-interval --eval-rows --decode-prompts --decode-tokens --plan --no-plan "
    "--probe --no-probe",
    "eval": "--target-model --drafter --prompts --max-prompts --thinking --max-new-tokens --temperature "
    "--block-size --control --no-control --ngram-data --lossless-tokens --output --device --dtype --seed",
    "export": "--checkpoint --output-dir",
}
FLAGS["doctor"] = f"{FLAGS['train']} --json --no-json --facts --record"
"""What users' scripts hold: a flag that goes or changes its name breaks them. New ones are added here."""

NEEDED = ["--target-model", "T", "--data-dir", "D", "--output-dir", "O"]


def test_the_flags_of_every_verb_are_frozen():
    assert list(cli.VERBS) == list(FLAGS)
    for verb, (cls, _) in cli.VERBS.items():
        actions = get_parser(cls)._actions
        flags = [option for action in actions for option in action.option_strings]
        assert flags[:2] == ["-h", "--help"]
        assert flags[2:] == FLAGS[verb].split(), verb


def test_every_verb_has_a_line_in_the_usage():
    for verb in cli.VERBS:
        assert f"\n  {verb} " in cli.USAGE


def test_flags_win_over_the_recipe_and_the_recipe_over_defaults(tmp_path):
    (tmp_path / "r.yaml").write_text("layers: 3\nmax_anchors: 9\ncompile: false\ntarget_model: FROM\n")
    arguments = ["--config", str(tmp_path / "r.yaml"), *NEEDED[2:], "--max-anchors", "11"]
    config = cli.parse(TrainConfig, "train", arguments)
    assert (config.layers, config.max_anchors, config.compile) == (3, 11, False)
    assert (config.target_model, config.block_size) == ("FROM", TrainConfig().block_size)
    joined = cli.parse(TrainConfig, "train", [f"--config={tmp_path / 'r.yaml'}", *NEEDED, "--compile"])
    assert (joined.target_model, joined.compile) == ("T", True)


def test_a_later_recipe_wins_over_an_earlier_one(tmp_path):
    (tmp_path / "a.yaml").write_text("layers: 3\nblock_size: 8\n")
    (tmp_path / "b.yaml").write_text("layers: 4\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    config = cli.parse(TrainConfig, "train", [*files, *NEEDED])
    assert (config.layers, config.block_size) == (4, 8)


def test_lists_and_pairs_are_flags_too():
    given = ["--target-layer-ids", "1", "3", "--betas", "0.8", "0.9"]
    config = cli.parse(TrainConfig, "train", [*NEEDED, *given])
    assert config.target_layer_ids == (1, 3)
    assert config.betas == (0.8, 0.9)
    arguments = ["--target-model", "T", "--drafter", "D", "--prompts", "a.jsonl", "b.jsonl"]
    assert cli.parse(EvalConfig, "eval", arguments).prompts == ("a.jsonl", "b.jsonl")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_verb_the_usage_is_shown(capsys, arguments):
    assert cli.main(arguments) == 0
    assert "usage: slipstream VERB" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"slipstream {__version__}\n"


def one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 2) -> str:
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.strip()


def test_an_unknown_verb_names_the_nearest(capsys):
    told = one_line(capsys, ["trian"])
    assert told.startswith("error: slipstream trian: no such verb (did you mean 'train'?)")
    assert "prepare, data, cache, train, eval, export" in told


@pytest.mark.parametrize("missing", range(3))
def test_a_missing_required_flag_is_one_line(capsys, missing):
    given = NEEDED[: 2 * missing] + NEEDED[2 * missing + 2 :]
    told = one_line(capsys, ["train", *given])
    assert told.startswith(f"error: slipstream train: {NEEDED[2 * missing]} is missing")


@pytest.mark.parametrize(
    "arguments", [["--max-anchor", "3"], ["--layers", "two"], ["--loss", "mse"], ["stray"]]
)
def test_flags_that_no_verb_knows_end_with_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *NEEDED, *arguments])
    assert ended.value.code == 2
    assert arguments[0].lstrip("-").split("=")[0] in capsys.readouterr().err


def test_ranks_that_contradict_each_other_are_refused_before_any_is_started(capsys):
    told = one_line(capsys, ["train", *NEEDED, "--dp-pairs", "2", "--ranks", "3"])
    assert told.startswith("error: --ranks 3: 2 target and 2 drafter ranks are 4 ranks")


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    def run(_config: object) -> None:
        raise error

    monkeypatch.setitem(cli.VERBS, "train", (TrainConfig, run))
    return ["train", *NEEDED]


def test_debug_shows_the_traceback_anywhere_on_the_line(monkeypatch, capsys):
    arguments = raising(monkeypatch, UserError("here: wrong: mend it"))
    assert one_line(capsys, arguments) == "error: here: wrong: mend it"
    for debugged in (["--debug", *arguments], [*arguments, "--debug"]):
        with pytest.raises(UserError, match="mend it"):
            cli.main(debugged)


def test_a_message_of_several_lines_is_told_in_one(monkeypatch, capsys):
    assert one_line(capsys, raising(monkeypatch, UserError("a\nb"))) == "error: a b"


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.ENOSPC, "free space"), (errno.EDQUOT, "free space"), (errno.EACCES, "written to"),
     (errno.EROFS, "written to")],
)  # fmt: skip
def test_what_the_machine_refuses_is_one_line_with_the_mend(monkeypatch, capsys, number, told):
    why = os.strerror(number)
    line = one_line(capsys, raising(monkeypatch, OSError(number, why, "/some/file")))
    assert line.startswith(f"error: /some/file: {why}: ")
    assert told in line
    line = one_line(capsys, raising(monkeypatch, OSError(number, why)))
    assert line.startswith(f"error: slipstream train: {why}: ")


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.ENOTDIR, "is a file: name a folder"), (errno.EISDIR, "name a file in this folder"),
     (errno.ENOENT, "check this path"), (errno.EIO, "the disk under it")],
)  # fmt: skip
def test_what_the_machine_refuses_of_a_file_is_one_line_and_debug_shows_where(
    monkeypatch, capsys, number, told
):
    why = os.strerror(number)
    arguments = raising(monkeypatch, OSError(number, why, "/some/file"))
    line = one_line(capsys, arguments)
    assert line.startswith(f"error: /some/file: {why}: ")
    assert told in line
    with pytest.raises(OSError, match="/some/file"):
        cli.main([*arguments, "--debug"])
    with pytest.raises(OSError, match=why):
        cli.main(raising(monkeypatch, OSError(number, why)))


def test_a_path_through_a_file_is_one_line_from_the_verb_itself(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "chats.jsonl").write_text("{}\n")
    arguments = ["--input", str(tmp_path / "chats.jsonl"), "--tokenizer", "T", "--output-dir"]
    told = one_line(capsys, ["prepare", *arguments, str(tmp_path / "file" / "sub")])
    assert told.startswith(f"error: {tmp_path / 'file' / 'sub'}: ")
    assert "Not a directory" in told


@pytest.mark.parametrize(("verb", "told"), [("train", "--token-budget"), ("eval", "--lossless-tokens 0")])
def test_a_device_out_of_memory_is_one_line_with_what_to_lower_and_other_runtime_errors_are_not(
    monkeypatch, capsys, verb, told
):
    def run(_config: object) -> None:
        raise errors[0]

    errors = [torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")]
    monkeypatch.setitem(cli.VERBS, verb, (TrainConfig, run))
    line = one_line(capsys, [verb, *NEEDED])
    assert line.startswith(f"error: slipstream {verb}: the device is out of memory: ")
    assert told in line
    with pytest.raises(torch.OutOfMemoryError):
        cli.main([verb, *NEEDED, "--debug"])
    errors[0] = RuntimeError("ours")
    with pytest.raises(RuntimeError, match="ours"):
        cli.main([verb, *NEEDED])
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(RuntimeError, match="ours"):
        cli.main([verb, *NEEDED])


EVAL = ["eval", "--target-model", "T", "--drafter", "D", "--prompts", "P"]
PREPARE = ["prepare", "--input", "I", "--output-dir", "O", "--tokenizer", "T"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*EVAL, "--temperature", "-1"], "--temperature -1.0: must be at least 0"),
        ([*EVAL, "--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
        ([*EVAL, "--lossless-tokens", "-1"], "--lossless-tokens -1: must be at least 0"),
        ([*EVAL, "--max-prompts", "0"], "--max-prompts 0: must be at least 1"),
        ([*EVAL, "--block-size", "1"], "--block-size 1: must be at least 2"),
        ([*PREPARE, "--holdout", "1"], "--holdout 1.0: must be at least 0 and below 1"),
        ([*PREPARE, "--max-length", "1"], "--max-length 1: must be at least 2"),
        (["train", *NEEDED, "--anchor-share", "0"], "--anchor-share 0.0: must be above 0"),
        (["train", *NEEDED, "--anchor-share", "1.5"], "--anchor-share 1.5: must be at most 1"),
        ([*PREPARE, "--limit", "0"], "--limit 0: must be at least 1"),
        ([*PREPARE, "--show", "0"], "--show 0: must be at least 1"),
        ([*PREPARE, "--decontaminate-words", "0"], "--decontaminate-words 0: must be at least 1"),
    ],
)
def test_a_number_that_can_mean_nothing_is_refused_before_the_verb_starts(
    monkeypatch, capsys, arguments, told
):
    def started(_config: object) -> None:
        raise AssertionError("started")

    cls, _ = cli.VERBS[arguments[0]]
    monkeypatch.setitem(cli.VERBS, arguments[0], (cls, started))
    assert one_line(capsys, arguments) == f"error: {told}"


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    for error in (OSError(errno.EIO, "broken"), AssertionError("ours"), ValueError("ours")):
        with pytest.raises(type(error)):
            cli.main(raising(monkeypatch, error))


def test_an_interrupt_ends_with_130_and_one_word(monkeypatch, capsys):
    assert one_line(capsys, raising(monkeypatch, KeyboardInterrupt()), 130) == "stopped"


HELP = """
import sys
from slipstream import cli
try:
    code = cli.main(sys.argv[1:])
except SystemExit as e:
    code = e.code
assert code == 0, code
heavy = ("torch", "transformers", "numpy", "pyarrow", "safetensors", "rich.progress")
print("HEAVY", *(m for m in heavy if m in sys.modules))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    done = subprocess.run(
        [sys.executable, "-c", HELP, *arguments], capture_output=True, text=True, check=True
    )
    *shown, last = done.stdout.splitlines()
    heavy = last.split()[1:]
    assert "torch" not in heavy
    assert "transformers" not in heavy
    if arguments == ["--help"]:
        assert heavy == []
    else:
        text = "\n".join(shown)
        assert "--max-anchors" in text
        assert "Most anchors drawn in a packed row." in text


def test_a_users_own_environment_is_left_alone():
    program = (
        "import os\nfrom slipstream.config import set_process_environment\nset_process_environment()\n"
        "print(os.environ['PYTORCH_CUDA_ALLOC_CONF'], os.environ['TOKENIZERS_PARALLELISM'])"
    )
    ours = {
        k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM")
    }
    for environment, told in (
        (ours, "expandable_segments:True false"),
        ({**ours, "PYTORCH_CUDA_ALLOC_CONF": "mine:1", "TOKENIZERS_PARALLELISM": "true"}, "mine:1 true"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
        )
        assert done.stdout.strip() == told
