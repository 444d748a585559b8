"""A run on several ranks is the run on one: losses, checkpoints, stopping and going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import parse
from slipstream.config import TrainConfig
from slipstream.distributed.world import World
from slipstream.training.metrics import Display
from slipstream.training.rank import open_rank, work
from tests.integration.conftest import World as Small
from tests.ranks import run_ranks

STEPS = "--rows-per-step 4 --max-steps 20 --eval-interval 8 --eval-rows 3 --save-interval 9 --noise 0.05"
PLACES = {
    "one": (1, []),
    "two": (2, []),
    "three": (3, []),
    "split 1+1": (2, ["--dp-pairs", "1"]),
    "split 2+1": (3, ["--target-ranks", "2", "--drafter-ranks", "1"]),
    "split 1+2": (3, ["--target-ranks", "1", "--drafter-ranks", "2"]),
}


def rank_of_a_run(rank: int, ranks: int, flags: list[str]) -> int | None:
    """The step at which this rank's training ended."""
    config = parse(TrainConfig, "train", list(flags))
    log = Path(config.output_dir) / "logs" / f"rank{rank}.log"
    with Display(log=log) as display:
        trained = work(open_rank(config, World(rank, ranks, rank, "here"), display), display)
    return None if trained is None else trained.position.step


def lines(run: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def train(world: Small, run: Path, place: str, *flags: str) -> list[dict]:
    ranks, placed = PLACES[place]
    run_ranks(ranks, rank_of_a_run, world.train(run, *STEPS.split(), *placed, *flags)[1:], timeout=120)
    return lines(run, "train")


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    train(world, run, "one")
    return run


@pytest.mark.parametrize("place", [name for name in PLACES if name != "one"])
def test_losses_of_any_placement_are_those_of_one_rank(world, alone, tmp_path, place):
    """fp32: 1e-6 at the first step, 1e-5 at the twentieth; validation and counts as well."""
    ours, reference = train(world, tmp_path / "run", place), lines(alone, "train")
    assert len(ours) == len(reference) == 20
    for line, expected in zip(ours, reference, strict=True):
        tolerance = 1e-6 if line["step"] == 1 else 1e-5
        for name in ("loss", "grad_norm", "tau", "lr"):
            assert line[name] == pytest.approx(expected[name], rel=tolerance), (line["step"], name)
        for name in ("blocks", "labels", "coverage"):
            assert line[name] == expected[name]
    for line, expected in zip(lines(tmp_path / "run", "validation"), lines(alone, "validation"), strict=True):
        assert line["step"] == expected["step"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("place", "flags"),
    [
        ("two", ["--target-sharding"]),
        ("two", ["--drafter-sharding"]),
        ("two", ["--target-sharding", "--drafter-sharding"]),
        ("split 2+1", ["--target-sharding"]),
    ],
    ids=str,
)
def test_shards_train_as_whole_models_do(world, alone, tmp_path, place, flags):
    ours, reference = train(world, tmp_path / "run", place, *flags), lines(alone, "train")
    for line, expected in zip(ours, reference, strict=True):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-5), (line["step"], name)


def test_taps_that_serve_several_draws_travel_once(world, tmp_path):
    draws = ["--anchor-draws", "3"]
    ours, reference = (
        train(world, tmp_path / name.replace(" ", ""), name, *draws) for name in ("split 2+1", "one")
    )
    for line, expected in zip(ours, reference, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    "places", [("two", "two"), ("two", "one"), ("two", "split 1+1"), ("split 2+1", "three")], ids=str
)
def test_a_run_goes_on_at_another_world_size(world, alone, tmp_path, places):
    run = tmp_path / "run"
    first, second = places
    train(world, run, first, "--max-minutes", "1000")  # another schedule is another run: ended by its steps
    (run / "checkpoints" / "step_00000020").rename(tmp_path / "gone")
    losses_before = [line["loss"] for line in lines(run, "train")]
    ours = train(world, run, second, "--max-minutes", "1000")
    if second != "one":
        assert "step_00000018 (step 18)" in (run / "logs" / "rank1.log").read_text()
    same = first == second
    for line, loss in zip(ours, losses_before, strict=True):
        assert line["loss"] == (loss if same else pytest.approx(loss, rel=1e-5))
