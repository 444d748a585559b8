"""The probe on a CPU, on one rank and between two: every rank gets the same positive times, nothing is left
behind, and what is said follows from them.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from slipstream.cli import parse
from slipstream.config import TrainConfig
from slipstream.distributed.crew import make_crew
from slipstream.distributed.placement import placement_of, rows_of_a_step
from slipstream.distributed.world import World
from slipstream.system.probe import probe, say_probe
from slipstream.system.scaling import Measured
from slipstream.training.metrics import Display
from slipstream.training.setup import open_run
from tests.ranks import run_ranks


def recipe(world, run: Path, *flags: str) -> TrainConfig:
    return parse(TrainConfig, "train", world.train(run, *flags)[1:])


def probed(rank: int, ranks: int, config: TrainConfig, hosts: list[str]) -> tuple[Measured, str, bool]:
    """What a rank measures and says, and whether its weights are what they were."""
    place = placement_of(config, ranks)
    config = replace(config, rows_per_step=rows_of_a_step(config, place))
    crew = make_crew(World(rank, ranks, rank, hosts[rank]), place, config.target_sharding)
    said = io.StringIO()
    display = Display(Console(file=said, width=500))
    run = open_run(config, display, crew)
    before = {name: p.detach().clone() for name, p in run.drafter.named_parameters()}
    found = probe(run, display)
    same = all(torch.equal(before[name], p) for name, p in run.drafter.named_parameters())
    if crew.first:
        say_probe(run, found, display)
    return found, said.getvalue(), same


def test_one_rank_measures_its_parts_and_says_that_it_is_a_cpu(world, tmp_path):
    found, said, same = probed(0, 1, recipe(world, tmp_path / "run"), ["here"])
    assert same
    assert min(found.read, found.draft, found.update) > 0
    assert 0 <= found.backward < found.draft  # a difference, 0 where other work disturbs it
    assert found.wires.link is None
    assert "a CPU's times" in said
    assert re.search(r"here, colocated: [\d,]+ tokens/s, [\d.]+ ms a step of 1 rows", said)
    assert said.rstrip().endswith("recommended: colocated, 1 rows a step (the fastest)")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--ranks", "2"),
        ("--dp-pairs", "1"),
        ("--ranks", "2", "--drafter-sharding"),
        ("--ranks", "2", "--target-sharding"),
    ],
)
def test_two_ranks_measure_together_and_agree(world, tmp_path, flags):
    config = recipe(world, tmp_path / "run", *flags)
    (found, said, same), other = run_ranks(2, probed, config, ["one", "one"])
    assert other == (found, other[1], True)
    assert same
    assert min(found.read, found.draft, found.update) > 0
    assert found.wires.link is not None
    split = "--dp-pairs" in flags
    assert ("gradients are summed at" in said) is not split
    assert f"here, {'split 1:1' if split else 'colocated'}" in said
    assert "recommended: " in said
    assert not (tmp_path / "run").exists()


def test_sums_between_hosts_are_the_networks_and_inside_one_the_nodes(world, tmp_path):
    config = recipe(world, tmp_path / "run", "--ranks", "2")
    datasheet = probed(0, 1, recipe(world, tmp_path / "run"), ["here"])[0].wires
    inside, across = (run_ranks(2, probed, config, hosts)[0][0].wires for hosts in (["a", "a"], ["a", "b"]))
    assert inside.across == datasheet.across
    assert inside.inside != datasheet.inside
    assert across.inside == datasheet.inside
    assert across.across != datasheet.across
    assert (inside.node, across.node) == (8, 1)


def test_recorded_taps_are_read_from_disk_and_no_split_is_advised(world, tmp_path):
    from slipstream import cli

    assert cli.main(world.cache(tmp_path / "taps")) == 0
    config = recipe(world, tmp_path / "run", "--taps-dir", str(tmp_path / "taps"), "--ranks", "2")
    (found, said, _), _ = run_ranks(2, probed, config, ["one", "one"])
    assert found.read > 0
    assert "split" not in said
