"""What a run needs, before it starts: memory by part, the settings that would fit, the time of a step.

`predict` and what is made of it are pure: shapes in, bytes out. `plan` says all of it for a recipe without
reading a weight. Measuring a real step is the training loop's.

Shapes: S tokens of a packed row · N blocks · B block size · Q = N·B block tokens · T taps · H hidden size ·
V vocabulary · F MLP width · L drafter layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from slipstream.config import TrainConfig
from slipstream.data.shards import open_dataset
from slipstream.data.tokenizer import load_generation_config, load_tokenizer, stop_ids
from slipstream.distributed.link import TapCache
from slipstream.distributed.placement import Plan
from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.models.families import choose_mask_token
from slipstream.models.sketch import sketch_target
from slipstream.models.target import Target
from slipstream.system.facts import GIB, gib
from slipstream.training import loss, setup
from slipstream.training.attention import choose_attention
from slipstream.training.blocks import draw_anchors, make_blocks
from slipstream.training.flops import (
    expected_seconds,
    fp8_ceiling,
    layer_elements,
    matmul_ceiling,
    row_flops,
    step_flops,
    target_layers,
)
from slipstream.training.metrics import Display
from slipstream.training.run import Rows, Run, describe_drafter, describe_plan, describe_rows

LEAST_ANCHORS, LEAST_TOKENS = 32, 512
"""No fewer are offered where memory is short."""
CONTEXT = 7 * GIB // 10
"""Of CUDA, its libraries and loaded kernels; outside torch's allocator."""
SPARE = 0.02
"""Share of everything that the allocator holds without using it."""
DATASHEET = 0.75
"""Share of a datasheet's dense bf16 figure that a large product reaches: a guess, measured where a GPU is."""
CARDS = {
    "B200": (178, 2250), "H200": (139, 989), "H100": (79, 989), "A100": (79, 312), "RTX PRO 6000": (94, 503),
    "L40S": (44, 362), "RTX 5090": (31, 209), "RTX 4090": (23, 165),
}  # fmt: skip
"""GiB as torch sees them, and dense bf16 TFLOP/s of NVIDIA's datasheets (fp32 sums)."""


@dataclass(frozen=True)
class TargetShape:
    """What a target costs."""

    weights: int
    """Bytes."""
    layers: tuple[int, ...]
    """Matrix elements that a token meets in each layer up to the last tap."""


def target_shape(target: Target, element_size: int) -> TargetShape:
    """Of a target that is loaded or sketched, with weights of so many bytes an element."""
    parameters = sum(p.numel() for p in target.model.parameters())
    return TargetShape(parameters * element_size, tuple(target_layers(target)))


@dataclass(frozen=True)
class Need:
    """Bytes on the GPU that holds target and drafter."""

    parts: dict[str, int]
    """At the step's peak; they sum to `total`."""
    phases: dict[str, int]
    """The peak of each phase of a step, as the allocator counts: without the reserve."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def peak(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.phases.__getitem__)

    def table(self) -> str:
        """Parts at the peak, a line each, then the other phases."""
        lines = [f"memory: {gib(self.total)} at the peak of a step, {self.peak}:"]
        shown = {name: size for name, size in self.parts.items() if size > GIB / 200}
        lines += [f"  {name:<24}{size / GIB:8.2f} GiB" for name, size in shown.items()]
        others = ", ".join(f"{name} {gib(size)}" for name, size in self.phases.items() if name != self.peak)
        return "\n".join([*lines, f"  less at other times (reserve left out): {others}"])


def predict(config: TrainConfig, geometry: DrafterConfig, target: TargetShape) -> Need:
    """Memory of a step on a GPU with compiled layers, for a full row with all its blocks: the worst case.

    At all times: the target's weights (and 8-bit copies), the drafter's fp32 masters and two moments (4 and 8
    bytes a parameter), its matrices in the working dtype, the taps. Beside them, by phase:

    - the target's pass: an activation for every column and row of its widest layer's matrices, four
      residuals and once more the taps; some of it is gone before the rest comes;
    - the head: what all layers keep for their backward pass, and a chunk of logits;
    - the backward pass: layer by layer what was kept goes and gradients (4 bytes a parameter) come;
    - the update: all gradients.

    Checked on one H200 (torch 2.11) at S = 8192, N = 512, B = 16, L = 5, H = 5120, 32/8 heads of 128,
    F = 17408, V = 248320, T = 5: at the peak, the head, 8.57 GiB were measured beside weights, copies,
    moments and taps, 9.47 and 10.2 with chunks twice and three times as large; tests/unit/test_planner.py.
    """
    g, e = geometry, 4 if config.dtype == "float32" else 2
    s, n, h = config.token_budget, config.max_anchors, geometry.hidden_size
    q, slots = n * g.block_size, g.block_size - 1
    layer, parameters = layer_elements(g), drafter_parameters(g)
    matrices = len(g.target_layer_ids) * h**2 + g.num_layers * layer
    taps = e * s * len(g.target_layer_ids) * h
    held = config.anchor_draws > 1  # over several steps

    whole = kept_by_layer(g, s, q, e)
    kept = e * q * h if config.activation_checkpointing else whole
    context = 2 * e * s * h  # fc's output and its norm; as much again for their slopes
    rotary = 8 * g.head_dim * (s + q)
    chunk = min(n, max(1, 128 * loss.CHUNK_TILES // slots)) * slots
    noisy = taps if config.noise and held else 0
    earlier = 4 * parameters if config.accumulation > 1 else 0  # gradients of the step's rows before

    def backward(left: int) -> dict[str, int]:
        """With so many layers before the one that is worked on."""
        last = left == g.num_layers - 1
        # slopes of what the layer gave, of gate and up, and down_proj's gradient come before anything goes
        slopes = e * q * (h + 2 * g.intermediate_size) + 4 * h * g.intermediate_size
        activations = left * kept + whole + slopes + context + (0 if last else context) + rotary
        gradients = earlier or 4 * layer * (g.num_layers - 1 - left)
        return {"activations": activations, "gradients": gradients, "noisy taps": noisy}

    steady = {
        "target weights": target.weights,
        "target in FP8": sum(target.layers) if config.target_fp8 else 0,
        "drafter masters": 4 * parameters,
        "drafter working copies": e * matrices if e < 4 else 0,
        "optimiser's moments": 8 * parameters,
        "taps": taps * (config.accumulation if held else 1),
    }
    read = 0 if config.taps_dir else e * s * (max(target.layers) // h + 4 * h) + taps
    phases = {
        "the target's pass": {"target's pass": read, "gradients": earlier},
        "the head": {
            "activations": g.num_layers * kept + context + rotary + 2 * e * q * h,
            "head chunk": e * (chunk * (g.vocab_size + 3 * h) + n * slots * h),
            "gradients": earlier,
            "noisy taps": noisy,
        },
        "the backward pass": max((backward(0), backward(g.num_layers - 1)), key=lambda p: sum(p.values())),
        "the update": {"gradients": 4 * parameters},
    }
    peaks = {name: sum(steady.values()) + sum(parts.values()) for name, parts in phases.items()}
    peak = max(peaks, key=peaks.__getitem__)
    return Need(steady | phases[peak] | {"reserve": CONTEXT + int(SPARE * peaks[peak])}, peaks)


def drafter_parameters(geometry: DrafterConfig) -> int:
    """All of a drafter's: matrices, two norms and two norms of heads a layer, two norms beside."""
    g = geometry
    layer = layer_elements(g) + 2 * (g.hidden_size + g.head_dim)
    return g.num_layers * layer + len(g.target_layer_ids) * g.hidden_size**2 + 2 * g.hidden_size


def kept_by_layer(geometry: DrafterConfig, s: int, q: int, element_size: int) -> int:
    """Bytes that a compiled layer keeps for its backward pass: what its graph saves.

    Input, its norm, the residual behind attention, its norm: 4 × [Q, H]. Queries before and after their norm,
    attention's output as it came and with heads side by side: 4 × [Q, nq·D]. Gate, up and what down_proj
    reads: 3 × [Q, F]. The product of keys and values, keys, values: 4 × [S + Q, nkv·D]. Scales of
    norms and of attention: fp32.
    """
    g = geometry
    queries = 4 * (g.hidden_size + g.num_heads * g.head_dim) + 3 * g.intermediate_size
    scales = q * (2 + 2 * g.num_heads + g.num_kv_heads) + s * g.num_kv_heads
    return element_size * (q * queries + 4 * (s + q) * g.num_kv_heads * g.head_dim) + 4 * scales


def fits(need: Need, capacity: int) -> bool:
    """Whether it fits on a GPU of so many bytes."""
    return need.total <= capacity


Change = tuple[str, TrainConfig, DrafterConfig]
"""Flags to type, and what they make of a recipe."""


def what_fits(config: TrainConfig, geometry: DrafterConfig, target: TargetShape, capacity: int) -> list[str]:
    """Settings that fit into `capacity` bytes, as flags to type and what is needed then: one thing changed,
    the cheapest first; where none is enough, several at once. Empty where these are not enough either.
    """

    def first(changes: Iterable[Change]) -> list[str]:
        for flags, recipe, drafter in changes:
            if fits(need := predict(recipe, drafter, target), capacity):
                return [f"{flags} ({gib(need.total)})"]
        return []

    singles = [offer for group in single_changes(config, geometry) for offer in first(group)]
    return singles or first(joint_changes(config, geometry))


def single_changes(config: TrainConfig, geometry: DrafterConfig) -> Iterator[Iterable[Change]]:
    """By group, the cheapest first; in a group the smallest change first."""
    if config.target_fp8:
        yield [("--no-target-fp8", replace(config, target_fp8=False), geometry)]
    if not config.activation_checkpointing:
        yield [("--activation-checkpointing", replace(config, activation_checkpointing=True), geometry)]
    if config.taps_dir is None:
        yield [("--taps-dir with taps of `slipstream cache`", replace(config, taps_dir="taps"), geometry)]
    if config.accumulation > 1:
        yield [("--accumulation 1", replace(config, accumulation=1), geometry)]
    yield (
        (f"--max-anchors {n}", replace(config, max_anchors=n), geometry)
        for n in halves(config.max_anchors, LEAST_ANCHORS)
    )
    yield (
        (f"--token-budget {s}", replace(config, token_budget=s), geometry)
        for s in halves(config.token_budget, LEAST_TOKENS)
    )
    yield (
        (f"--layers {n}", config, replace(geometry, num_layers=n, layer_types=geometry.layer_types[-n:]))
        for n in range(geometry.num_layers - 1, 0, -1)
    )


def joint_changes(config: TrainConfig, geometry: DrafterConfig) -> Iterator[Change]:
    """What costs time only, and then shorter rows with fewer blocks, one step after the other."""
    slow = replace(config, activation_checkpointing=True, target_fp8=False, accumulation=1)
    flags = "--activation-checkpointing --no-target-fp8 --accumulation 1"
    anchors = halves(2 * config.max_anchors, LEAST_ANCHORS)
    for n, s in zip(anchors, halves(2 * config.token_budget, LEAST_TOKENS), strict=False):
        less = replace(slow, max_anchors=n, token_budget=s)
        yield f"{flags} --max-anchors {n} --token-budget {s}", less, geometry


def halves(value: int, least: int) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


def explain_out_of_memory(run: Run) -> str:
    """One line for a GPU on which the largest row did not fit: what a step needs, and settings to try."""
    free, total = torch.cuda.mem_get_info(run.device)
    ours = free + torch.cuda.memory_reserved(run.device)
    shape = target_shape(run.target, run.dtype.itemsize)
    return say_out_of_memory(run.config, run.drafter.config, shape, ours + CONTEXT, total)


def say_out_of_memory(
    config: TrainConfig, geometry: DrafterConfig, target: TargetShape, ours: int, total: int
) -> str:
    """The same from bytes: those this process could have, and those of the GPU."""
    need = predict(config, geometry, target)
    parts = ", ".join(f"{name} {gib(size)}" for name, size in need.parts.items() if size > GIB // 20)
    taken = f"; other processes hold {gib(total - ours)}" if total - ours > GIB else ""
    offers = what_fits(config, geometry, target, min(ours, int(0.95 * need.total)))
    return (
        f"the GPU's {gib(total)} are too few for the largest row{taken}: a step needs about "
        f"{gib(need.total)} ({parts}): {say_offers(offers, target)}"
    )


def say_offers(offers: list[str], target: TargetShape) -> str:
    if offers:
        return "would fit: " + "; ".join(offers)
    return f"no setting is enough (the target alone takes {gib(target.weights)}): use a larger GPU"


def plan(config: TrainConfig, display: Display) -> None:
    """Says what a run would be, need and take. Reads data and configurations, no weights, writes nothing."""
    setup.check_settings(config)
    device = setup.choose_device(config.device)
    dtype = setup.choose_dtype(config.dtype, device)
    attention = choose_attention(config.attention, device, config.compile)
    limit = None if config.taps_dir is None else TapCache.open(config.taps_dir).facts.rows
    rows = setup.open_rows(config.data_dir, "train", config.token_budget, config.on_long, limit)
    display.say(describe_rows(rows, "data"))
    setup.check_anchors(rows, config)

    target = sketch_target(config, device, dtype)
    tokenizer = load_tokenizer(config.target_model)
    setup.check_ids(target, tokenizer, rows.dataset, open_dataset(config.data_dir, "heldout"))
    stops = stop_ids(load_generation_config(config.target_model), tokenizer)
    mask_token_id, source = choose_mask_token(
        config.mask_token_id, target.model_type, target.vocab_size, tokenizer, stops
    )
    geometry = setup.drafter_config(config, target, mask_token_id)
    with torch.device("meta"):
        drafter = Drafter(geometry)
    display.say(describe_drafter(drafter, target, source))
    steps = Plan(config.seed, rows.count, config.accumulation, config.anchor_draws).steps(config.epochs)
    steps = config.max_steps or steps
    display.say(describe_plan(config, rows.count, steps, device, dtype, attention))

    cuda = device.type == "cuda"
    shape = target_shape(target, 4 if config.dtype == "float32" else 2)
    display.say(say_memory(config, geometry, shape, gpus() if cuda else []))
    work = row_flops(geometry, 0 if config.taps_dir else sum(shape.layers))
    full = config.token_budget, config.max_anchors, config.max_anchors * (config.block_size - 1)
    padded = step_flops(config, work, *full)
    useful = step_flops(config, work, *mean_row(config, rows, mask_token_id))
    ceiling = matmul_ceiling(device, dtype, 8192 if cuda else 1024)
    seconds = expected_seconds(padded if cuda else useful, ceiling, device.type)
    if cuda and config.target_fp8:  # the target's part has a ceiling of its own
        read = padded - step_flops(config, replace(work, target_token=0), *full)
        seconds = expected_seconds(padded - read, ceiling, "cuda")
        seconds += expected_seconds(read, fp8_ceiling(device), "cuda")
    display.say(say_time(config, seconds, steps, ceiling, useful / padded))
    if not cuda:
        display.say(say_cards(predict(config, geometry, shape), padded))


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
        anchors = draw_anchors(row, config.max_anchors, (config.seed, 0, 0))
        blocks = make_blocks(row, anchors, config.max_anchors, config.block_size, mask_token_id)
        found.append((row.spans()[-1][1], blocks.count, blocks.labels))
    tokens, blocks, labels = (sum(column) // count for column in zip(*found, strict=True))
    return tokens, blocks, labels


def say_memory(
    config: TrainConfig, geometry: DrafterConfig, target: TargetShape, cards: list[tuple[str, int, int]]
) -> str:
    """A recipe's memory by part, held against each GPU (name, bytes in all, free bytes)."""
    need = predict(config, geometry, target)
    lines = [need.table()]
    if not cards:
        lines.append(f"memory: no GPU in this run: a card needs {gib(need.total)}")
    for name, total, free in cards:
        verdict = f"{gib(total)} are enough"
        if not fits(need, total):
            offers = what_fits(config, geometry, target, total)
            verdict = f"{gib(total)} are too few; {say_offers(offers, target)}"
        elif need.total > free + CONTEXT:
            verdict += f", but only {gib(free)} are free"
        lines.append(f"memory: {name}: {verdict}")
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


def say_cards(need: Need, flop: float) -> str:
    """Expected time of a step on cards that are not here; guessed."""
    guesses = [
        f"{name} {span(expected_seconds(flop, 1e12 * DATASHEET * tflops, 'cuda'))}"
        for name, (size, tflops) in CARDS.items()
        if fits(need, size * GIB)
    ]
    small = ", ".join(name for name, (size, _) in CARDS.items() if not fits(need, size * GIB))
    told = ", ".join(guesses) or "none"
    return f"cards: a step's time, guessed from datasheets: {told}" + (
        f"; too small: {small}" if small else ""
    )


def span(seconds: float) -> str:
    """0.84 s, 17 min, 3.2 h; no less than what launches and the host take anyhow."""
    if seconds < 0.1:
        return "less than 0.1 s"
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
