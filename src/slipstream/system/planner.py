"""What a run needs, before it starts: `plan` says memory by part and rank, the time of a step, and both on
other machines, without reading a weight; `explain_out_of_memory` what to change where it did not fit.

What a step's parts need is memory.py's, how they make a step on many ranks scaling.py's; measuring is
probe.py's and the training loop's.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from slipstream.config import TrainConfig
from slipstream.data.shards import open_dataset, shard_cache
from slipstream.data.tokenizer import load_generation_config, load_tokenizer, stop_ids
from slipstream.distributed.link import TapCache
from slipstream.distributed.placement import Plan, placement_of, rows_of_a_step
from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.models.families import choose_mask_token
from slipstream.models.sketch import sketch_target
from slipstream.system.facts import GIB, gib
from slipstream.system.memory import (
    CONTEXT,
    NCCL,
    Role,
    TargetShape,
    drafter_parameters,
    fits,
    need_of,
    roles,
    say_offers,
    shape_of_ends,
    target_shape,
    what_fits,
    why_not,
)
from slipstream.system.scaling import (
    CARDS,
    FLEETS,
    REACHED,
    Advice,
    Sizes,
    card_named,
    estimate,
    guess,
    recommend,
    say_estimate,
    say_place,
    sizes_of,
)
from slipstream.training import setup
from slipstream.training.attention import choose_attention
from slipstream.training.blocks import draw_anchors, make_blocks
from slipstream.training.flops import RowFlops, fp8_ceiling, matmul_ceiling, row_flops, step_flops, times_ms
from slipstream.training.metrics import Display
from slipstream.training.run import Rows, Run, describe_drafter, describe_plan, describe_rows

LEAST_STEP = 0.1
"""Seconds below which launches and the host decide, not what is counted."""


def explain_out_of_memory(run: Run) -> str:
    """One line for a GPU on which the largest row did not fit: what a step needs, and settings to try."""
    free, total = torch.cuda.mem_get_info(run.device)
    beside = CONTEXT + (NCCL if run.crew.place.ranks > 1 else 0)
    ours = free + torch.cuda.memory_reserved(run.device) + beside
    shape = shape_of_ends(run.ends, run.dtype.itemsize)
    role: Role = "drafter"
    if run.target is not None:
        shape = target_shape(run.target, run.dtype.itemsize)
        role = "colocated" if run.crew.drafts else "target"
    return say_out_of_memory(run.config, run.drafter.config, shape, ours, total, role)


def say_out_of_memory(
    config: TrainConfig,
    geometry: DrafterConfig,
    target: TargetShape,
    ours: int,
    total: int,
    role: Role = "colocated",
) -> str:
    """The same from bytes: those this process could have, and those of the GPU."""
    need = need_of(config, geometry, target, role)
    parts = ", ".join(f"{name} {gib(size)}" for name, size in need.parts.items() if size > GIB // 20)
    taken = f"; other processes hold {gib(total - ours)}" if total - ours > GIB else ""
    known = None if target.layers else role  # of other ranks nothing can be said without the target's layers
    offers = what_fits(config, geometry, target, min(ours, int(0.95 * need.total)), known)
    return (
        f"the GPU's {gib(total)} are too few for the largest row{taken}: a step needs about "
        f"{gib(need.total)} ({parts}): {say_offers(offers, target)}"
    )


def plan(config: TrainConfig, display: Display) -> None:
    """Says what a run would be, need and take. Reads data and configurations, no weights, writes nothing."""
    setup.check_settings(config)
    place = placement_of(config)
    config = replace(config, rows_per_step=rows_of_a_step(config, place))
    assert config.rows_per_step is not None
    device = setup.choose_device(config.device)
    dtype = setup.choose_dtype(config.dtype, device)
    attention = choose_attention(config.attention, device, config.compile)
    limit = None if config.taps_dir is None else TapCache.open(config.taps_dir).facts.rows
    cache = shard_cache(config)
    rows = setup.open_rows(config.data_dir, "train", config.token_budget, config.on_long, limit, cache)
    display.say(describe_rows(rows, "data"))
    setup.check_anchors(rows, config)
    display.say(setup.describe_anchors(rows, config))

    target = sketch_target(config, device, dtype)
    ends = target.ends
    tokenizer = load_tokenizer(config.target_model)
    setup.check_ids(target, tokenizer, rows.dataset, open_dataset(config.data_dir, "heldout", cache))
    stops = stop_ids(load_generation_config(config.target_model), tokenizer)
    mask_token_id, source = choose_mask_token(
        config.mask_token_id, target.model_type, target.vocab_size, tokenizer, stops
    )
    geometry = setup.drafter_config(config, ends, mask_token_id)
    with torch.device("meta"):
        drafter = Drafter(geometry)
    display.say(describe_drafter(drafter, ends, target.isolation, source))
    steps = Plan(config.seed, rows.count, config.rows_per_step, config.anchor_draws).steps(config.epochs)
    steps = config.max_steps or steps
    display.say(describe_plan(config, place, rows.count, steps, device, dtype, attention))

    cuda = device.type == "cuda"
    shape = target_shape(target, 4 if config.dtype == "float32" else 2)
    display.say(say_memory(config, geometry, shape, gpus() if cuda else []))
    work = row_flops(geometry, 0 if config.taps_dir else sum(shape.layers))
    full = config.token_budget, config.max_anchors, config.max_anchors * (config.block_size - 1)
    mean = mean_row(config, rows, mask_token_id)
    share = step_flops(config, work, *mean) / step_flops(config, work, *full)
    ceiling = matmul_ceiling(device, dtype, 8192 if cuda else 1024)
    reading = fp8_ceiling(device) if cuda and config.target_fp8 else ceiling
    wires = card_named(torch.cuda.get_device_name(device) if cuda else "").wires
    timed = guess(
        work,
        full if cuda else mean,  # a GPU multiplies padding too
        drafter_parameters(geometry),
        (reading, ceiling),
        memory_speed(device),
        wires,
        device.type,
    )
    sizes = sizes_of(config, geometry, shape, mean[0])
    made = estimate(timed, sizes, place)
    display.say(say_time(config, made.seconds, steps, ceiling, share))
    if place.ranks > 1:
        display.say(f"time: guessed for {place.ranks} such ranks: {say_estimate(made)}")
    display.say(say_cards(config, geometry, shape, work, sizes, steps * config.rows_per_step))


def memory_speed(device: torch.device, size: int = 2**28) -> float:
    """Bytes/s that a copy of so many bytes reads and writes."""
    a = torch.zeros(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    times_ms(lambda: b.copy_(a), 2, device)
    return 2e3 * size / min(times_ms(lambda: b.copy_(a), 5, device))


def gpus() -> list[tuple[str, int, int]]:
    """Name, bytes in all and free bytes of each GPU."""
    out = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        out.append((f"cuda:{i} ({torch.cuda.get_device_name(i)})", total, free))
    return out


def mean_row(config: TrainConfig, rows: Rows, mask_token_id: int) -> tuple[int, int, int]:
    """Mean tokens, blocks and labelled slots of some of the run's rows."""
    found = []
    for i in range(count := min(rows.count, 8)):
        row = rows.row(i * rows.count // count)
        anchors = draw_anchors(row, config.max_anchors, (config.seed, 0, 0), config.anchor_share)
        blocks = make_blocks(row, anchors, config.max_anchors, config.block_size, mask_token_id)
        found.append((row.spans()[-1][1], blocks.count, blocks.labels))
    tokens, blocks, labels = (sum(column) // count for column in zip(*found, strict=True))
    return tokens, blocks, labels


def say_memory(
    config: TrainConfig, geometry: DrafterConfig, target: TargetShape, cards: list[tuple[str, int, int]]
) -> str:
    """A recipe's memory by part on each kind of rank, held against each GPU (name, bytes, free
    bytes).
    """
    lines = []
    for role in roles(config):
        whose = "" if role == "colocated" else f" of a {role} rank"
        need = need_of(config, geometry, target, role)
        lines.append(need.table(whose))
        if not cards:
            lines.append(f"memory{whose}: no GPU in this run: a card needs {gib(need.total)}")
        for name, total, free in cards:
            verdict = f"{gib(total)} are enough"
            if not fits(need, total):
                offers = what_fits(config, geometry, target, total)
                verdict = f"{gib(total)} are too few; {say_offers(offers, target)}"
            elif need.total > free + CONTEXT:
                verdict += f", but only {gib(free)} are free"
            lines.append(f"memory{whose}: {name}: {verdict}")
    return "\n".join(lines)


def say_time(config: TrainConfig, seconds: float, steps: int, ceiling: float, useful: float) -> str:
    """Of a run; `ceiling` in FLOP/s, `useful` a share."""
    whole = seconds * steps
    end = f"{steps} steps in {span(whole)}"
    if config.max_minutes is not None and whole > 60 * config.max_minutes:
        end += f", of which {config.max_minutes:g} minutes are run"
    return (
        f"time: about {span(seconds)} a step, {end} (matrix products reach {ceiling / 1e12:.3g} TFLOP/s "
        f"here); {useful:.0%} of a full row's work is useful, the rest is padding and slots without labels"
    )


def say_cards(
    config: TrainConfig,
    geometry: DrafterConfig,
    target: TargetShape,
    work: RowFlops,
    sizes: Sizes,
    rows: int,
) -> str:
    """What the run, of so many rows in all, would cost and yield on cards that are not here; guessed."""
    full = config.token_budget, config.max_anchors, config.max_anchors * (config.block_size - 1)
    lines, small = [], []
    for name, card in CARDS.items():
        ceiling, memory = 1e12 * REACHED * card.tflops, 1e12 * REACHED * card.memory
        timed = guess(work, full, drafter_parameters(geometry), (ceiling, ceiling), memory, card.wires)
        room = functools.partial(why_not, config, geometry, target, card.size * GIB)
        told = [
            say_fleet(recommend(timed, sizes, ranks, room, config.taps_dir is not None), rows)
            for ranks in FLEETS
        ]
        if any(told):
            lines.append(f"  {name:<13}" + " | ".join(f"{cell or 'too small':<42}" for cell in told).rstrip())
        else:
            small.append(name)
    head = "cards: guessed from datasheets, the fastest placement that fits on "
    head += ", ".join(map(str, FLEETS)) + " GPUs, eight a node: tokens/s, time and GPU-hours of the run"
    lines = [head, *(lines or ["  none"])]
    return "\n".join([*lines, f"  too small: {', '.join(small)}"] if small else lines)


def say_fleet(advice: Advice, rows: int) -> str:
    """A cell of that table; empty where nothing fits."""
    if advice.best is None:
        return ""
    best = advice.best
    how = f", {say_place(best.place)}" if best.place.split else ""
    if best.seconds < LEAST_STEP:
        return f"a step {span(best.seconds)}{how}"
    seconds = rows / best.rows * best.seconds
    hours = best.place.ranks * seconds / 3600
    return f"{best.rate:,.0f} tokens/s, {span(seconds)}, {hours:,.1f} GPU-h{how}"


def span(seconds: float) -> str:
    """0.84 s, 17 min, 3.2 h; no less than what launches and the host take anyhow."""
    if seconds < LEAST_STEP:
        return "less than 0.1 s"
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
