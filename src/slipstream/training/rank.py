"""One rank's part of a run, from its settings to the last step: a drafter's or a reader's.

How the process became a rank is distributed/world.py's; what is made of the trained drafter is the caller's.
"""

from __future__ import annotations

from slipstream.config import TrainConfig
from slipstream.distributed.crew import make_crew
from slipstream.distributed.placement import placement_of
from slipstream.distributed.world import World
from slipstream.training.loop import Trained, train
from slipstream.training.metrics import Display
from slipstream.training.reading import read_for_drafters
from slipstream.training.run import Run, describe_plan, write_run_facts
from slipstream.training.setup import open_run


def open_rank(config: TrainConfig, world: World, display: Display) -> Run:
    """This rank's run, checked, said and, unless it is only planned, written down. Raises `UserError`."""
    place = placement_of(config, world.size)
    run = open_run(config, display, make_crew(world, place, config.target_sharding))
    what = run.rows.count, run.steps, run.device, run.dtype, run.attention
    display.say(describe_plan(run.config, place, *what))
    if not config.plan:
        write_run_facts(run)
    return run


def work(run: Run, display: Display) -> Trained | None:
    """Train, or read for those that train; how a rank's training ended."""
    if run.crew.drafts:
        return train(run, display)
    read_for_drafters(run, display)
    return None
