"""Runs on a tiny target: what they learn, write, repeat to the last bit, and ring the alarm about."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import signal
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

from slipstream import cli
from slipstream.config import TrainConfig, UserError, from_dict
from slipstream.data.pack import Row
from slipstream.data.shards import open_dataset
from slipstream.distributed.link import holding
from slipstream.distributed.placement import Plan
from slipstream.export.zlab import load_drafter
from slipstream.training import loop, parallel
from slipstream.training.checkpoint import complete_checkpoints, load_masters
from slipstream.training.metrics import Display, Stillness
from slipstream.training.run import Run, write_run_facts
from slipstream.training.setup import open_run
from tests.fixtures_data import write_jsonl
from tests.integration.conftest import World, losses

QUIET = Display(Console(quiet=True))
CPU = torch.device("cpu")


def config_of(arguments: list[str]) -> TrainConfig:
    return cli.parse(TrainConfig, "train", arguments[1:])


def run_of(world: World, folder: Path, *flags: str) -> Run:
    run = open_run(config_of(world.train(folder, *flags)), QUIET)
    run.folder.mkdir(exist_ok=True)
    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_masters(complete_checkpoints(folder)[-1])[1]


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = weights(a), weights(b)
    return ours.keys() == theirs.keys() and all(torch.equal(w, theirs[n]) for n, w in ours.items())


# ---- the main job ----


def test_train_learns_and_leaves_configuration_metrics_checkpoints_export_and_decoding(
    world, tmp_path, capfd
):
    run = tmp_path / "run"
    size = "--layers 2 --intermediate-size 128 --max-anchors 32 --lr 3e-3 --max-steps 120 --eval-rows 4"
    watch = "--save-interval 40 --eval-interval 40 --log-interval 10 --decode-prompts 2 --decode-tokens 6"
    arguments = world.train(run, *size.split(), *watch.split())
    assert cli.main(arguments) == 0
    told = capfd.readouterr()

    config = from_dict(TrainConfig, yaml.safe_load((run / "config.yaml").read_text()), "config.yaml")
    assert config == dataclasses.replace(config_of(arguments), rows_per_step=1), "resolved"
    env = json.loads((run / "env.json").read_text())
    assert {"slipstream", "torch", "device", "git", "target", "data", "packing", "drafter"} <= env.keys()
    assert env["data"] == open_dataset(world.data, "train").fingerprint

    trained = losses(run)
    assert list(trained) == [1, *range(10, 121, 10)]
    assert trained[120]["loss"] < 0.5 * trained[1]["loss"], "a predictable text is learned"
    validated = losses(run, "validation")
    assert list(validated) == [40, 80, 120]
    taus = [v["tau"] for v in validated.values()]
    assert taus == sorted(taus)
    assert taus[-1] > 1.4, "blocks of held-out text are accepted further and further"

    assert [p.name for p in complete_checkpoints(run)] == ["step_00000080", "step_00000120"]
    drafter = load_drafter(run / "export", CPU, torch.float32)
    for name, weight in weights(run).items():
        assert torch.equal(drafter.state_dict()[name], weight.to(torch.bfloat16).float()), name
    decoded = json.loads((run / "decode.json").read_text())
    assert decoded["lossless"]["lossless"] is True
    assert decoded["datasets"][0]["requests"] == 2
    assert sorted(p.name for p in run.iterdir()) == [
        "checkpoints", "config.yaml", "decode.json", "env.json", "export", "metrics.jsonl",
    ]  # fmt: skip
    assert "validation at step 120" in told.err

    # the same command again: finished, nothing is trained or written twice, the export is made anew
    before = (run / "metrics.jsonl").read_text()
    shutil.rmtree(run / "export")
    assert cli.main(arguments) == 0
    assert (run / "metrics.jsonl").read_text() == before
    assert (run / "export" / "model.safetensors").is_file()


def test_the_same_command_gives_the_same_losses_and_another_seed_others(world, tmp_path):
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert cli.main(world.train(tmp_path / name, "--seed", seed, "--noise", "0.05")) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert losses(tmp_path / "a")[1]["loss"] != losses(tmp_path / "c")[1]["loss"]


LAUNCH = (
    "slipstream train --target-model MODEL --data-dir DIR --output-dir DIR --epochs 6 --lr 6e-4 "
    "--max-anchors 512 --token-budget 8192 --block-size 16 --dp-pairs 2 --log-interval 50 "
    "--save-interval 5000"
)


@pytest.fixture
def completions(world: World, tmp_path: Path) -> dict[str, Path]:
    """The chats as a folder of tokenised completions, in the forms that one may come in."""
    data = open_dataset(world.data, "train")
    rows = []
    for ids, supervised in (data.document(i) for i in range(20)):
        cut = int(supervised.argmax())
        rows.append({"prompt_ids": ids[:cut].tolist(), "response_ids": ids[cut:].tolist()})
    masked = [
        {"input_ids": r["prompt_ids"] + r["response_ids"],
         "loss_mask": [0] * len(r["prompt_ids"]) + [1] * len(r["response_ids"])}
        for r in rows
    ]  # fmt: skip
    folders = {name: tmp_path / name for name in ("jsonl", "parquet", "masked")}
    for folder in folders.values():
        folder.mkdir()
    write_jsonl(folders["jsonl"] / "completions.jsonl", rows)
    write_jsonl(folders["masked"] / "completions.jsonl", masked)
    pq.write_table(pa.Table.from_pylist(rows), str(folders["parquet"] / "completions.parquet"))
    return folders


@pytest.mark.parametrize("compiled", ["", " --compile"])
def test_the_launch_line_the_project_began_from_parses_word_for_word(compiled):
    program, verb, *words = shlex.split(LAUNCH + compiled)
    assert (program, verb) == ("slipstream", "train")
    config = cli.parse(TrainConfig, verb, words)
    assert config == TrainConfig(
        target_model="MODEL", data_dir="DIR", output_dir="DIR", epochs=6, lr=6e-4, max_anchors=512,
        token_budget=8192, block_size=16, dp_pairs=2, log_interval=50, save_interval=5000, compile=True,
    )  # fmt: skip


@pytest.mark.parametrize("data", ["shards", "jsonl", "parquet", "masked"])
def test_the_launch_line_runs_on_one_device_from_shards_and_from_tokenised_completions(
    world, completions, tmp_path, data
):
    folder = world.data if data == "shards" else completions[data]
    line = LAUNCH.replace("MODEL", str(world.target)).replace("--dp-pairs 2", "--dp-pairs 0")
    line = line.replace("--data-dir DIR", f"--data-dir {folder}")
    line = line.replace("--output-dir DIR", f"--output-dir {tmp_path / 'run'}")
    words = shlex.split(line)[1:]
    if data != "shards":  # the whole line once; elsewhere its data only, in less time
        words += ["--layers", "1", "--max-anchors", "32", "--epochs", "1", "--decode-tokens", "2"]
    assert cli.main([*words, "--decode-prompts", "1", "--device", "cpu"]) == 0
    assert max(losses(tmp_path / "run")) == (6 if data == "shards" else 1)
    assert (tmp_path / "run" / "export" / "config.json").is_file()


def test_plan_prints_placement_and_steps_and_writes_nothing(world, tmp_path, capfd):
    assert cli.main(world.train(tmp_path / "run", "--plan")) == 0
    assert "4 steps of 1 × 256 tokens" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_data_without_a_held_out_part_trains_and_says_that_validation_is_left_out(world, tmp_path, capfd):
    arguments = ["--input", str(world.chats), "--tokenizer", str(world.target), "--holdout", "0"]
    assert cli.main(["prepare", *arguments, "--output-dir", str(tmp_path / "data")]) == 0
    flags = ["--data-dir", str(tmp_path / "data"), "--decode-prompts", "4", "--eval-interval", "2"]
    assert cli.main(world.train(tmp_path / "run", *flags)) == 0
    assert "no held-out documents: validation and the last decoding are left out" in capfd.readouterr().err
    assert losses(tmp_path / "run", "validation") == {}
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


def test_max_minutes_ends_a_run_in_order_and_its_schedule_reaches_the_end(world, tmp_path):
    flags = ["--max-steps", "100000", "--max-minutes", "0.005"]
    assert cli.main(world.train(tmp_path / "run", *flags)) == 0
    trained = losses(tmp_path / "run")
    last = max(trained)
    assert 1 < last < 2000
    assert trained[last]["lr"] < 0.2 * max(v["lr"] for v in trained.values())
    assert complete_checkpoints(tmp_path / "run")[-1].name == f"step_{last:08d}"
    assert list(losses(tmp_path / "run", "validation")) == [last]
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


# ---- online = cached ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_from_recorded_taps_gives_the_losses_of_online_training_to_the_last_bit(
    world, tmp_path, dtype
):
    flags = ["--dtype", dtype, "--noise", "0.05", "--max-steps", "6", "--eval-interval", "3"]
    cached = [*flags, "--taps-dir", str(tmp_path / "taps")]
    assert cli.main(world.cache(tmp_path / "taps", "--dtype", dtype)) == 0
    assert cli.main(world.train(tmp_path / "online", *flags)) == 0
    assert cli.main(world.train(tmp_path / "cached", *cached)) == 0
    for kind in ("train", "validation"):
        assert losses(tmp_path / "online", kind) == losses(tmp_path / "cached", kind)
    assert same_weights(tmp_path / "online", tmp_path / "cached")
    # what the equality is worth: one changed number in one row's taps is seen
    _, row = Plan(0, 28, 1).at(0)
    path = tmp_path / "taps" / "train" / f"row_{row:07d}.safetensors"
    taps = load_file(path)["taps"]
    taps[0, 0] += 1
    save_file({"taps": taps}, path)
    assert cli.main(world.train(tmp_path / "other", *cached)) == 0
    assert losses(tmp_path / "online")[1]["loss"] != losses(tmp_path / "other")[1]["loss"]


def test_an_interrupted_cache_goes_on_and_a_cut_row_is_recorded_again(world, tmp_path, monkeypatch):
    from slipstream.distributed.link import TapCache

    assert cli.main(world.cache(tmp_path / "whole")) == 0
    write, written = TapCache.write, []

    def stop_at_the_sixth(self, split, row, taps):
        if len(written) == 5:
            raise KeyboardInterrupt
        written.append((split, row.row_id))
        write(self, split, row, taps)

    monkeypatch.setattr(TapCache, "write", stop_at_the_sixth)
    assert cli.main(world.cache(tmp_path / "taps")) == 130
    folder = tmp_path / "taps" / "train"
    cut = folder / "row_0000002.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    monkeypatch.setattr(TapCache, "write", lambda *a: (written.append((a[1], a[2].row_id)), write(*a)))
    del written[:]
    assert cli.main(world.cache(tmp_path / "taps")) == 0
    train = [row for split, row in written if split == "train"]
    assert train == [2, *range(5, 28)], "the cut row again, no whole one"
    for path in (tmp_path / "whole").rglob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "taps" / path.relative_to(tmp_path / "whole")).read_bytes()
    assert not list((tmp_path / "taps").rglob("*.partial"))


# ---- rows of a step and plan ----


def gradients(
    run: Run, rows: list[Row], per_step: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.Tensor], float]:
    """The gradients that the loop hands to the optimiser in its first step over `rows`, and their norm."""

    class Given:
        count = len(rows)

        def row(self, index: int) -> Row:
            return rows[index]

        def used(self, index: int) -> int:
            return rows[index].spans()[-1][1]

        def documents(self, index: int) -> list[int]:
            return list(range(len(rows[index].spans())))

    taken: list[list[torch.Tensor]] = []
    norms: list[float] = []
    update = loop.update

    class NoStep(torch.optim.SGD):
        def step(self, closure=None):
            taken.append([p.grad.clone() for g in self.param_groups for p in g["params"]])

    def watched(drafter, _optimizer, *rest):
        norms.append(float(update(drafter, NoStep(drafter.parameters(), lr=0.1), *rest)))
        return torch.tensor(norms[-1])

    given = dataclasses.replace(
        run,
        config=dataclasses.replace(run.config, rows_per_step=per_step, clip=1e9, noise=0.0),
        rows=Given(),  # type: ignore[arg-type]
        heldout=None,
        plan=Plan(0, len(rows), per_step),
        steps=1,
    )
    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", watched)
        patch.setattr(parallel, "save_checkpoint", lambda *_: None)
        loop.train(given, QUIET)
    (grads,), (norm,) = taken, norms
    return grads, norm


def joined(rows: list[Row]) -> Row:
    """One row that holds the documents of all of these, in order."""
    parts, documents = [], 0
    for row in rows:
        end = row.spans()[-1][1]
        parts.append(
            (row.input_ids[:end], row.positions[:end], row.documents[:end] + documents, row.supervised[:end])
        )
        documents += len(row.spans())
    pad = torch.zeros(7, dtype=torch.int64)
    columns = list(zip(*parts, strict=True))
    return Row(
        99,
        torch.cat([*columns[0], pad]),
        torch.cat([*columns[1], pad]),
        torch.cat([*columns[2], pad - 1]),
        torch.cat([*columns[3], pad.bool()]),
    )


def test_four_rows_accumulated_give_the_gradients_of_one_row_that_holds_all_their_documents(
    world, tmp_path, monkeypatch
):
    run = run_of(world, tmp_path / "run", "--max-anchors", "1024")  # every candidate is an anchor
    rows = [run.rows.row(i) for i in range(4)]
    # rows of unequal weight, so that a mean of means would show
    rows[0] = dataclasses.replace(rows[0], supervised=rows[0].supervised & (torch.arange(256) < 120))
    apart, norm_apart = gradients(run, rows, 4, monkeypatch)
    together, norm_together = gradients(run, [joined(rows)], 1, monkeypatch)
    loss, _ = loop.row_loss(run, joined(rows), run.taps, (0, 0, 0), 0.0)
    plain = torch.autograd.grad(loss.total / loss.weight, list(run.drafter.parameters()))
    assert norm_apart == pytest.approx(norm_together, rel=1e-5)
    for a, b, c in zip(apart, together, plain, strict=True):
        assert float((a - b).abs().max()) <= 1e-6 * max(1.0, float(b.abs().max()))
        assert float((c - b).abs().max()) <= 1e-6 * max(1.0, float(b.abs().max()))
    # a mean of the rows' means, the usual mistake, is far outside that
    means = [gradients(run, [row], 1, monkeypatch)[0] for row in rows]
    mean = [torch.stack(g).mean(0) for g in zip(*means, strict=True)]
    worst = max(float((a - b).abs().max()) for a, b in zip(mean, together, strict=True))
    assert worst > 1e-3


@pytest.mark.parametrize(("rows", "per_step"), [(7, 3), (28, 4), (5, 8), (1, 1)])
def test_the_plan_takes_every_row_once_an_epoch_whatever_a_steps_rows(rows, per_step):
    plan = Plan(3, rows, per_step)
    epochs = 3 * per_step
    taken = [place for step in range(plan.steps(epochs)) for place in plan.step_rows(step)]
    assert Counter(taken) == {(e, r, 0): 1 for e in range(epochs) for r in range(rows)}
    assert taken == [
        pair for step in range(plan.steps(epochs)) for pair in Plan(3, rows, per_step).step_rows(step)
    ]
    if rows > 4:
        orders = [[r for e, r, _ in taken if e == epoch] for epoch in range(2)]
        assert orders[0] != orders[1], "a fresh order every epoch"
        assert taken != [
            pair for step in range(plan.steps(epochs)) for pair in Plan(4, rows, per_step).step_rows(step)
        ]


def test_draws_of_anchors_repeat_the_rows_of_a_step_and_reach_every_row_as_often():
    plan, drawn = Plan(3, 7, 3), Plan(3, 7, 3, draws=2)
    assert drawn.steps(6) == 2 * plan.steps(6)
    for step in range(drawn.steps(6)):
        same = plan.step_rows(step // 2)
        assert drawn.step_rows(step) == [(epoch, row, step % 2) for epoch, row, _ in same]


def test_draws_of_anchors_share_a_target_pass_train_on_other_anchors_and_resume_exactly(world, tmp_path):
    flags = ("--anchor-draws", "3", "--rows-per-step", "2", "--max-steps", "8", "--log-interval", "1")
    whole = run_of(world, tmp_path / "whole", *flags)
    passes, taps = [], whole.target.taps
    whole.target.taps = lambda row: passes.append(row.row_id) or taps(row)  # type: ignore[method-assign]
    counted = dataclasses.replace(whole, taps=holding(whole.target.taps, 2), heldout=None)
    loop.train(counted, QUIET)
    assert passes == [row for step in (0, 3, 6) for _, row, _ in whole.plan.step_rows(step)]
    distinct = {value["loss"] for value in losses(tmp_path / "whole").values()}
    assert len(distinct) == 8, "every draw has its own anchors"

    cut = dataclasses.replace(run_of(world, tmp_path / "cut", *flags), heldout=None)
    write_run_facts(cut)
    with pytest.MonkeyPatch.context() as patch:
        update, calls = loop.update, []
        stop = lambda *a: (calls.append(1), len(calls) == 4 and signal.raise_signal(signal.SIGTERM))  # noqa: E731
        patch.setattr(loop, "update", lambda *a: (stop(), update(*a))[1])
        assert loop.train(cut, QUIET).position.step == 4, "in the middle of a row's draws"
    loop.train(dataclasses.replace(run_of(world, tmp_path / "cut", *flags), heldout=None), QUIET)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_the_plan_asked_in_any_order_answers_the_same():
    plan = Plan(0, 11, 3)
    forwards = [plan.step_rows(s) for s in range(40)]
    backwards = [Plan(0, 11, 3).step_rows(s) for s in reversed(range(40))]
    assert forwards == backwards[::-1]


def test_a_run_reads_exactly_the_rows_of_its_plan_and_none_is_lost_at_an_epochs_end(
    world, tmp_path, monkeypatch
):
    seen = []
    row_loss = loop.row_loss

    def watched(run, row, link, key, noise, *check, **documents):
        if key[0] != loop.VALIDATION_SEED:
            seen.append((key[1], row.row_id, key[2]))
        return row_loss(run, row, link, key, noise, *check, **documents)

    monkeypatch.setattr(loop, "row_loss", watched)
    run = run_of(world, tmp_path / "run", "--rows-per-step", "3", "--epochs", "3", "--max-steps", "28")
    assert run.rows.count % 3 == 1
    loop.train(run, QUIET)
    assert seen == [pair for step in range(28) for pair in run.plan.step_rows(step)]
    assert Counter(seen) == {(e, r, 0): 1 for e in range(3) for r in range(28)}


# ---- resume ----

RESUME = (
    "--max-steps 7 --save-interval 3 --eval-interval 2 --rows-per-step 2 --noise 0.05 --keep-checkpoints 1"
)


@pytest.fixture(scope="module")
def uninterrupted(world, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert cli.main(world.train(folder, *RESUME.split())) == 0
    return folder


@pytest.mark.parametrize(
    ("step", "number"), [*((s, signal.SIGTERM) for s in range(1, 8)), (1, signal.SIGINT), (4, signal.SIGINT)]
)
def test_interrupted_at_any_step_and_resumed_equals_uninterrupted_to_the_last_bit(
    world, tmp_path, monkeypatch, capfd, uninterrupted, step, number
):
    arguments = world.train(tmp_path / "a run", *RESUME.split())
    update, calls = loop.update, []

    def interrupted(*given):
        calls.append(1)
        if len(calls) == step:
            signal.raise_signal(number)  # in the middle of the step: it is finished and saved
        return update(*given)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", interrupted)
        assert cli.main(arguments) == 0
    told = capfd.readouterr().err
    assert max(losses(tmp_path / "a run")) == step
    if step < 7:
        assert not (tmp_path / "a run" / "export").exists()
        (again,) = [line for line in told.splitlines() if line.startswith("stopped at")]
        said, _, command = again.partition(" Resume with: ")
        assert said == f"stopped at step {step}, saved."
        assert shlex.split(command)[0] == "slipstream"
        assert cli.main(shlex.split(command)[1:]) == 0, "the command that was printed resumes"
        assert f"(step {step})" in capfd.readouterr().err
    for kind in ("train", "validation"):
        assert losses(tmp_path / "a run", kind) == losses(uninterrupted, kind)
    assert same_weights(tmp_path / "a run", uninterrupted)


def test_resume_would_show_a_moment_that_was_lost(world, tmp_path, monkeypatch, uninterrupted):
    """What the equality above is worth: an optimiser without its moments gives other losses."""
    arguments = world.train(tmp_path / "run", *RESUME.split())
    update = loop.update
    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", lambda *a: (signal.raise_signal(signal.SIGTERM), update(*a))[1])
        assert cli.main(arguments) == 0
    load = parallel.load_checkpoint

    def forgetful(checkpoint, drafter, optimizer, fingerprint):
        position = load(checkpoint, drafter, optimizer, fingerprint)
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        return position

    monkeypatch.setattr(parallel, "load_checkpoint", forgetful)
    assert cli.main(arguments) == 0
    assert losses(tmp_path / "run")[1] == losses(uninterrupted)[1]
    assert losses(tmp_path / "run")[7]["loss"] != losses(uninterrupted)[7]["loss"]


def test_stopped_before_its_first_step_a_run_ends_in_order_and_starts_later(
    world, tmp_path, monkeypatch, capfd
):
    enter = loop.StopSignal.__enter__

    def at_once(self):
        enter(self)
        signal.raise_signal(signal.SIGTERM)
        return self

    arguments = world.train(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(loop.StopSignal, "__enter__", at_once)
        assert cli.main(arguments) == 0
    assert "stopped before the first step" in capfd.readouterr().err
    assert complete_checkpoints(tmp_path / "run") == []
    assert cli.main(arguments) == 0
    assert max(losses(tmp_path / "run")) == 4


def test_the_signal_handlers_are_given_back_and_a_second_interrupt_ends_at_once():
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with loop.StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before


# ---- alarms ----


@pytest.mark.parametrize("interval", ["10", "50", "7"])
def test_a_trainable_tensor_that_does_not_move_is_named_whatever_the_log_interval(
    world, tmp_path, monkeypatch, capfd, interval
):
    update = loop.update
    frozen = "layers.0.self_attn.k_norm.weight"

    def without(drafter, *rest):
        drafter.get_parameter(frozen).grad.zero_()
        return update(drafter, *rest)

    monkeypatch.setattr(loop, "update", without)
    run = run_of(world, tmp_path / "run", "--max-steps", "50", "--log-interval", interval)
    loop.train(run, Display())
    told = [line for line in capfd.readouterr().err.splitlines() if "ALARM" in line]
    assert len(told) == 1
    assert "1 trainable tensors have not moved" in told[0]
    assert frozen in told[0]
    kinds = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [k["unmoved"] for k in kinds if k["kind"] == "alarm"] == [[frozen]]


def test_no_alarm_rings_in_a_healthy_run(world, tmp_path):
    run = run_of(world, tmp_path / "run", "--max-steps", "25")
    stillness = Stillness(run.drafter)
    assert len(stillness.unmoved()) == len(list(run.drafter.parameters()))
    loop.train(run, QUIET)
    assert stillness.unmoved() == []
    assert "alarm" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_ends_the_run_naming_its_rows_and_keeps_the_checkpoint_before(
    world, tmp_path, monkeypatch, value
):
    update, calls = loop.update, []

    def poisoned(drafter, *rest):
        calls.append(1)
        if len(calls) == 4:
            next(drafter.parameters()).grad[0, 0] = value
        return update(drafter, *rest)

    monkeypatch.setattr(loop, "update", poisoned)
    run = run_of(world, tmp_path / "run", "--max-steps", "9", "--save-interval", "2", "--log-interval", "50")
    (_, row, _), *_ = run.plan.step_rows(3)
    with pytest.raises(
        UserError, match=rf"step 4: the gradient is not finite: look at row {row} \(documents"
    ):
        loop.train(run, QUIET)
    assert [p.name for p in complete_checkpoints(tmp_path / "run")] == ["step_00000002"]
    assert all(w.isfinite().all() for w in weights(tmp_path / "run").values())


@pytest.mark.parametrize("how", ["zero", "constant", "nan"])
def test_dead_taps_are_refused_by_the_row_they_came_with(world, tmp_path, how):
    run = run_of(world, tmp_path / "run")

    def dead(row: Row) -> torch.Tensor:
        taps = run.target.taps(row).clone()
        if row.row_id == run.plan.step_rows(2)[0][1]:
            taps[:, 64:] = {"zero": 0.0, "constant": 1.0, "nan": float("nan")}[how]
        return taps

    row = run.plan.step_rows(2)[0][1]
    said = rf"row {row}, documents \[[\d, ]+\]: the target's features are tap 2 of 2 "
    with pytest.raises(UserError, match=said):
        loop.train(dataclasses.replace(run, taps=dead), QUIET)
    assert max(losses(tmp_path / "run")) == 2
