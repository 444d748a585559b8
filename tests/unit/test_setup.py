"""What is said and counted of anchors: blocks that stay unused, and a bound that cuts a share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.config import TrainConfig
from slipstream.data.pack import pack_rows
from slipstream.data.records import Document
from slipstream.models.target import Target
from slipstream.training import loop, setup
from slipstream.training.blocks import anchor_candidates, wanted_anchors
from slipstream.training.run import Rows
from tests.fixtures_data import memory_dataset
from tests.tiny import tiny_target
from tests.training import drafter_config, make_drafter, run_of


def rows_of(documents: int = 40, length: int = 30, budget: int = 64) -> Rows:
    """Two documents a row, each with `length` − 6 possible anchors."""
    made = [
        Document(np.arange(length) * 7 % 90 + d % 9 + 1, np.arange(length) >= 5) for d in range(documents)
    ]
    data = memory_dataset(made)
    packing = pack_rows(data.lengths, budget, "truncate")
    return Rows(data, packing, len(packing))


@pytest.mark.parametrize(
    ("settings", "told", "advice"),
    [
        ({"max_anchors": 32}, "48 possible anchors and use 32 of 32 blocks (16 rows looked at)", None),
        ({"max_anchors": 50}, "use 48 of 50 blocks", None),
        ({"max_anchors": 512}, "use 48 of 512 blocks", "--max-anchors 48 is enough"),
        ({"max_anchors": 512, "anchor_share": 0.25}, "use 12 of 512 blocks", "--max-anchors 16 is enough"),
        ({"max_anchors": 6, "anchor_share": 0.25}, "6 of 6", "50% of --anchor-share 0.25: --max-anchors 16"),
        ({"max_anchors": 12, "anchor_share": 0.25}, "use 12 of 12", None),
    ],
)  # fmt: skip
def test_the_start_says_how_many_blocks_are_used_and_which_bound_would_fit(settings, told, advice):
    line = setup.describe_anchors(rows_of(), TrainConfig(**settings))
    assert told in line
    assert "\n" not in line
    assert advice in line if advice else "--max-anchors" not in line


def test_anchors_that_the_bound_cuts_are_counted_in_the_metrics_and_said_in_the_log():
    rows = rows_of(documents=7)
    drafter = make_drafter(drafter_config())
    run = run_of(
        Target(tiny_target("qwen3"), (0, 2, 4)), drafter, heldout=rows, max_anchors=9, anchor_share=0.5
    )
    facts = loop.validate(run)
    wanted = [wanted_anchors(len(anchor_candidates(row)), 0.5) for row in rows]
    assert wanted == [24, 24, 24, 12]
    assert (facts["blocks"], facts["anchors_cut"]) == (4 * 9, sum(wanted) - 4 * 9)
    fits = loop.validate(replace(run, config=replace(run.config, max_anchors=64)))
    assert (fits["blocks"], fits["anchors_cut"]) == (sum(wanted), 0)
    told = {**facts, "lr": 1.0, "tokens_per_second": 1.0}
    assert "48 ANCHORS CUT by --max-anchors" in loop.describe_step(3, told)
    free = loop.validate(replace(run, config=replace(run.config, anchor_share=None)))
    assert (free["blocks"], free["anchors_cut"]) == (4 * 9, 0)
    assert "CUT" not in loop.describe_step(3, {**told, **free})


def test_a_run_with_another_share_is_another_run():
    drafter = make_drafter(drafter_config())
    run = run_of(Target(tiny_target("qwen3"), (0, 2, 4)), drafter)
    other = replace(run, config=replace(run.config, anchor_share=0.1))
    assert other.fingerprint != run.fingerprint
