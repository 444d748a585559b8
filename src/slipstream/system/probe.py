"""The parts of a step measured on the spot, with the ranks that are there (`--plan --probe`).

What follows from the times is scaling.py's. Nothing is written and no weight is changed.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from slipstream.distributed.crew import Crew, together
from slipstream.distributed.link import TapCache, TapLink
from slipstream.models.sketch import sketch_target
from slipstream.system.memory import target_shape, why_not
from slipstream.system.scaling import (
    FLEETS,
    Measured,
    Wires,
    card_named,
    estimate,
    recommend,
    say_advice,
    say_estimate,
    sizes_of,
)
from slipstream.training.flops import times_ms
from slipstream.training.metrics import Display
from slipstream.training.parallel import DrafterRanks
from slipstream.training.run import Run, device_name
from slipstream.training.step import make_optimizer, row_loss, update
from slipstream.training.warmup import warm_up


def probe(run: Run, display: Display) -> Measured:
    """Seconds of the fullest row's target pass and drafter step and of an update, on the slowest rank; the
    sum of gradients and a row's taps between real ranks. Every rank of the run calls it and gets the same.

    Takes as long as a warm-up and some ten steps.
    """
    crew, config = run.crew, run.config
    read = draft = backward = renewed = 0.0
    if crew.reads and (link := reading(run)) is not None:
        row = run.rows.row(fullest(run))
        read = seconds(lambda: link(row), run.device)
    if crew.drafts:
        draft, backward, renewed = drafting(run, display)
    summing, sending = seconds_of_sum(run), seconds_of_link(run)
    mine = torch.tensor([read, draft, backward, renewed, summing, sending], dtype=torch.float64)
    if crew.every is not None:
        dist.all_reduce(mine, dist.ReduceOp.MAX, crew.every)
    read, draft, backward, renewed, summing, sending = mine.tolist()
    if config.drafter_sharding:  # as on one rank
        renewed *= len(crew.place.drafters)
    return Measured(read, draft, backward, renewed, measured_wires(run, summing, sending))


def fullest(run: Run) -> int:
    return max(range(run.rows.count), key=run.rows.used)


def reading(run: Run) -> TapLink | None:
    """What this rank's taps come from; the run's own link may hold some back."""
    if run.config.taps_dir is not None:
        return TapCache.open(run.config.taps_dir).link("train", run.device)
    return None if run.target is None else run.target.taps


def drafting(run: Run, display: Display) -> tuple[float, float, float]:
    """Seconds of a row forward and backward on taps that are there, of the backward in it, of an update."""
    config, drafter = run.config, run.drafter
    optimizer = make_optimizer(drafter, config, run.device)
    # whole gradients are not summed here: that has a time of its own
    ranks = DrafterRanks(drafter, run.crew.drafters if config.drafter_sharding else None)
    row, key = run.rows.row(fullest(run)), (config.seed, 0, 0)
    if run.device.type == "cuda":
        warm_up(run, optimizer, display)
    link = reading(run) or run.taps
    taps_ST = link(row)

    def forward() -> torch.Tensor:
        loss, _ = row_loss(run, row, lambda _: taps_ST, key, config.noise, check_taps=False)
        return loss.total

    def both() -> None:
        if run.plan.rows_a_rank == 1:  # with more, rows add to the gradients of those before
            drafter.zero_grad(set_to_none=True)
        ranks.backward(forward(), last=True)

    draft = seconds(both, run.device)
    grads = [p.grad for p in drafter.parameters()]
    weight = torch.ones((), device=run.device)

    def renew() -> None:
        for p, grad in zip(drafter.parameters(), grads, strict=True):
            p.grad = grad
        update(drafter, optimizer, weight, config.clip, 0.0, ranks)

    renewed = seconds(renew, run.device)
    return draft, max(0.0, draft - seconds(forward, run.device)), renewed


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of a call, the median of some after two; queued as in training."""
    times_ms(call, 2, device)
    return statistics.median(times_ms(call, 10 if device.type == "cuda" else 3, device)) / 1e3


def seconds_of_sum(run: Run) -> float:
    """Of the sum of one gradient, the largest, over the drafter ranks; 0 where there is one."""
    if run.crew.drafters is None:
        return 0.0
    grad = torch.zeros(largest_parameter(run), device=run.device)
    return seconds(lambda: dist.all_reduce(grad, group=run.crew.drafters), run.device)


def largest_parameter(run: Run) -> int:
    return max(p.numel() for p in run.drafter.parameters())


def linked(crew: Crew) -> tuple[int, int] | None:
    """The ranks between which a row's taps are sent: to the first drafter from its farthest reader or, of
    colocated ranks, from the next one.
    """
    if crew.place.ranks == 1:
        return None
    return (crew.place.partners(0)[-1] if crew.place.split else 1), 0


def seconds_of_link(run: Run) -> float:
    """Of a row's taps from one rank to another; 0 on ranks that neither send nor receive."""
    if (ends := linked(run.crew)) is None or run.crew.world.rank not in ends:
        return 0.0
    sender, receiver = ends
    width = len(run.ends.target_layer_ids) * run.ends.hidden_size
    taps_UC = torch.zeros(row_tokens(run), width, dtype=run.dtype, device=run.device)
    if run.crew.world.rank == receiver:
        return seconds(lambda: dist.recv(taps_UC, sender), run.device)
    return seconds(lambda: dist.send(taps_UC, receiver), run.device)


def row_tokens(run: Run) -> int:
    return run.rows.used(fullest(run))


def measured_wires(run: Run, summing: float, sending: float) -> Wires:
    """The wires that these seconds tell of, by whether they were between nodes; the rest by the card's
    datasheet. Every rank calls it.
    """
    crew, place = run.crew, run.crew.place
    cuda = run.device.type == "cuda"
    wires = card_named(torch.cuda.get_device_name(run.device) if cuda else "").wires
    hosts = together(crew.every, lambda: crew.world.host)
    most = max(Counter(hosts).values())
    wires = replace(wires, node=most if len(set(hosts)) > 1 else max(most, wires.node))
    if summing:
        n = len(place.drafters)
        bus = 2 * (1 - 1 / n) * 4 * largest_parameter(run) / summing
        between = len({hosts[rank] for rank in place.drafters}) > 1
        wires = replace(wires, across=bus) if between else replace(wires, inside=bus)
    if sending:
        width = len(run.ends.target_layer_ids) * run.ends.hidden_size
        wires = replace(wires, link=row_tokens(run) * width * run.dtype.itemsize / sending)
    return wires


def say_probe(run: Run, measured: Measured, display: Display) -> None:
    """The measured parts, what the formula makes of them, here and placed otherwise, and its advice. For the
    first rank.
    """
    config, geometry, place = run.config, run.drafter.config, run.crew.place
    m, wires = measured, measured.wires
    cuda = run.device.type == "cuda"
    display.say(
        f"probe: {device_name(run.device)}: a row of {row_tokens(run)} tokens: target {1e3 * m.read:.4g} ms, "
        f"drafter {1e3 * m.draft:.4g} ms ({1e3 * m.backward:.4g} backward); an update {1e3 * m.update:.4g} ms"
    )
    if run.crew.drafters is not None:
        display.say(f"probe: gradients are summed at {wires.bus(place.ranks) / 1e9:.3g} GB/s")
    if wires.link is not None:
        display.say(f"probe: taps go from rank to rank at {wires.link / 1e9:.3g} GB/s")
    if not cuda:
        display.say("probe: a CPU's times, which say nothing of a GPU's; memory is not looked at")
    shape = target_shape(sketch_target(config, run.device, run.dtype), run.dtype.itemsize)
    sizes = sizes_of(config, geometry, shape, row_tokens(run))
    capacity = torch.cuda.mem_get_info(run.device)[1] if cuda else 2**62
    room = functools.partial(why_not, config, geometry, shape, capacity)
    display.say(f"probe: here, {say_estimate(estimate(m, sizes, place))}")
    for ranks in dict.fromkeys((place.ranks, *(FLEETS if cuda else ()))):
        advice = recommend(m, sizes, ranks, room, config.taps_dir is not None)
        display.say(f"probe: {ranks} ranks" + (f", {wires.node} a node" if ranks > wires.node else ""))
        for line in say_advice(advice, ranks, [place] if ranks == place.ranks else []):
            display.say(f"  {line}")
