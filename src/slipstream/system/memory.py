"""Memory of a step by part, on each kind of rank, and the settings that would fit.

Pure: shapes in, bytes out. What is said of it is planner.py's, times are scaling.py's.

Shapes: S tokens of a packed row · N blocks · B block size · Q = N·B block tokens · T taps · H hidden size ·
V vocabulary · F MLP width · L drafter layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.config import TrainConfig
from slipstream.distributed.placement import Placement, evenly, placement_of, rows_of_a_step
from slipstream.models.drafter import DrafterConfig
from slipstream.models.target import Target, TargetEnds
from slipstream.system.facts import GIB, gib
from slipstream.training import loss
from slipstream.training.flops import layer_elements, target_layers

LEAST_ANCHORS, LEAST_TOKENS = 32, 512
"""No fewer are offered where memory is short."""
CONTEXT = 7 * GIB // 10
"""Of CUDA, its libraries and loaded kernels; outside torch's allocator."""
NCCL = GIB
"""Of its buffers, where there are several ranks: a guess; outside torch's allocator too."""
SPARE = 0.02
"""Share of everything that the allocator holds without using it."""

Role = Literal["colocated", "drafter", "target"]
"""What a rank does: both, only draft, only read the target."""


@dataclass(frozen=True)
class TargetShape:
    """What a target costs."""

    weights: int
    """Bytes."""
    layers: tuple[int, ...]
    """Matrix elements that a token meets in each layer up to the last tap."""
    ends: int = 0
    """Bytes of its embedding and head: what a rank holds that only drafts, and every rank whole."""
    largest: int = 0
    """Bytes of its largest layer: what is gathered of one in shards."""


def target_shape(target: Target, element_size: int) -> TargetShape:
    """Of a target that is loaded or sketched, with weights of so many bytes an element."""
    parameters = sum(p.numel() for p in target.model.parameters())
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in target.layers)
    ends = shape_of_ends(target.ends, element_size).ends
    return TargetShape(parameters * element_size, tuple(target_layers(target)), ends, largest * element_size)


def shape_of_ends(ends: TargetEnds, element_size: int) -> TargetShape:
    """What is known of a target on a rank that only drafts."""
    tied = ends.head.weight_VH is ends.embedding_VH
    size = ends.embedding_VH.numel() * element_size * (1 if tied else 2)
    return TargetShape(size, (), size)


@dataclass(frozen=True)
class Need:
    """Bytes on a rank's GPU."""

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

    def table(self, whose: str = "") -> str:
        """Parts at the peak, a line each, then the other phases."""
        lines = [f"memory{whose}: {gib(self.total)} at the peak of a step, {self.peak}:"]
        shown = {name: size for name, size in self.parts.items() if size > GIB / 200}
        lines += [f"  {name:<28}{size / GIB:8.2f} GiB" for name, size in shown.items()]
        others = ", ".join(f"{name} {gib(size)}" for name, size in self.phases.items() if name != self.peak)
        return "\n".join([*lines, f"  less at other times (reserve left out): {others}"] if others else lines)


def roles(config: TrainConfig) -> tuple[Role, ...]:
    """The kinds of ranks that the settings ask for."""
    return ("drafter", "target") if placement_of(config).split else ("colocated",)


def predict(config: TrainConfig, geometry: DrafterConfig, target: TargetShape) -> Need:
    """Memory of a step on the rank that needs most of it (`need_of`)."""
    needs = [need_of(config, geometry, target, role) for role in roles(config)]
    return max(needs, key=lambda need: need.total)


def need_of(config: TrainConfig, geometry: DrafterConfig, target: TargetShape, role: Role) -> Need:
    """Memory of a step on a GPU with compiled layers, for a full row with all its blocks: the worst case.

    At all times, where the target is read: its weights (and 8-bit copies); where only its ends are needed,
    embedding and head. Where the drafter is: its fp32 masters and two moments (4 and 8 bytes a parameter),
    its matrices in the working dtype. Taps: of one row; over a link, of as many as it has slots. Beside
    them, by phase:

    - the target's pass: an activation for every column and row of its widest layer's matrices, four
      residuals and once more the taps; some of it is gone before the rest comes;
    - the head: what all layers keep for their backward pass, and a chunk of logits;
    - the backward pass: layer by layer what was kept goes and gradients (4 bytes a parameter) come;
    - the update: all gradients.

    In shards over n ranks (FSDP2) a rank has an n-th of the layers' weights, or of masters, moments and
    gradients, and holds two layers gathered; gradients of a step's earlier rows are whole until the last one.

    Checked on one H200 (torch 2.11), for one rank, at S = 8192, N = 512, B = 16, L = 5, H = 5120, 32/8 heads
    of 128, F = 17408, V = 248320, T = 5: at the peak, the head, 8.57 GiB were measured beside weights,
    copies, moments and taps, 9.47 and 10.2 with chunks twice and three times as large
    (tests/unit/test_planner.py). Nothing of several ranks was measured yet.
    """
    g, e = geometry, 4 if config.dtype == "float32" else 2
    reads, drafts, place = role != "drafter", role != "target", placement_of(config)
    shards_D = len(place.drafters) if config.drafter_sharding else 1
    shards_T = len(place.readers) if config.target_sharding else 1
    s, n, h = config.token_budget, config.max_anchors, geometry.hidden_size
    q, slots = n * g.block_size, g.block_size - 1
    layer, parameters, rows = layer_elements(g), drafter_parameters(g), rows_a_rank(config)
    fc = len(g.target_layer_ids) * h**2
    matrices = fc + g.num_layers * layer
    taps = e * s * len(g.target_layer_ids) * h
    held = config.anchor_draws > 1  # over several steps
    masters = 4 * (matrices // shards_D + parameters - matrices)
    if shards_D > 1:
        working = {"drafter layers gathered": e * (fc + 2 * layer)}
    else:
        working = {"drafter working copies": e * matrices if e < 4 else 0}
    in_link = {"colocated": 0, "drafter": config.link_credits, "target": config.link_credits + 1}[role]
    kept_taps = rows if held and drafts else int(role == "colocated")

    whole = kept_by_layer(g, s, q, e)
    kept = e * q * h if config.activation_checkpointing else whole
    context = 2 * e * s * h  # fc's output and its norm; as much again for their slopes
    rotary = 8 * g.head_dim * (s + q)
    chunk = min(n, max(1, 128 * loss.CHUNK_TILES // slots)) * slots
    noisy = taps if config.noise and (held or role == "drafter") else 0  # others are let go for them
    earlier = 4 * parameters if drafts and rows > 1 else 0  # gradients of the step's rows before

    def backward(left: int) -> dict[str, int]:
        """With so many layers before the one that is worked on."""
        last = left == g.num_layers - 1
        # slopes of what the layer gave, of gate and up, and down_proj's gradient come before anything goes
        slopes = e * q * (h + 2 * g.intermediate_size) + 4 * h * g.intermediate_size
        activations = left * kept + whole + slopes + context + (0 if last else context) + rotary
        done = 4 * layer * (g.num_layers - 1 - left) // shards_D
        gathered = (4 + e) * layer if shards_D > 1 else 0  # a layer's, on their way to the other ranks
        return {
            "activations": activations,
            "gradients": (earlier or done) + gathered,
            "noisy taps": noisy,
        }

    steady: dict[str, int] = {}
    if reads:
        steady |= {
            "target weights": target.ends + (target.weights - target.ends) // shards_T,
            "target layers gathered": 2 * target.largest if shards_T > 1 else 0,
            "target in FP8": sum(target.layers) if config.target_fp8 else 0,
        }
    else:
        steady |= {"target's embedding and head": target.ends}
    if drafts:
        steady |= {"drafter masters": masters} | working | {"optimiser's moments": 2 * masters}
    steady |= {"taps": taps * (in_link + kept_taps)}
    phases: dict[str, dict[str, int]] = {}
    if reads:
        read = 0 if config.taps_dir else e * s * (max(target.layers) // h + 4 * h) + taps
        phases |= {"the target's pass": {"target's pass": read, "gradients": earlier}}
    if drafts:
        phases |= {
            "the head": {
                "activations": g.num_layers * kept + context + rotary + 2 * e * q * h,
                "head chunk": e * (chunk * (g.vocab_size + 3 * h) + n * slots * h),
                "gradients": earlier,
                "noisy taps": noisy,
            },
            "the backward pass": max(
                (backward(0), backward(g.num_layers - 1)), key=lambda p: sum(p.values())
            ),
            "the update": {"gradients": masters},
        }
    peaks = {name: sum(steady.values()) + sum(parts.values()) for name, parts in phases.items()}
    peak = max(peaks, key=peaks.__getitem__)
    reserve = CONTEXT + (NCCL if place.ranks > 1 else 0) + int(SPARE * peaks[peak])
    return Need(steady | phases[peak] | {"reserve": reserve}, peaks)


def rows_a_rank(config: TrainConfig) -> int:
    """Most rows of a step that one drafter rank works on."""
    place = placement_of(config)
    return -(-rows_of_a_step(config, place) // len(place.drafters))


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


def why_not(
    config: TrainConfig,
    geometry: DrafterConfig,
    target: TargetShape,
    capacity: int,
    place: Placement,
    rows: int,
) -> str | None:
    """Why a recipe, placed so, with so many rows a step, does not fit on GPUs of so many bytes; None if it
    does.
    """
    readers = len(place.readers) if place.split else 0
    placed = replace(
        config,
        ranks=None if place.ranks == 1 else place.ranks,
        dp_pairs=0,
        target_ranks=readers,
        drafter_ranks=place.ranks - readers if readers else 0,
        rows_per_step=rows,
    )
    for role in roles(placed):
        need = need_of(placed, geometry, target, role)
        if not fits(need, capacity):
            return f"a {role} rank needs {gib(need.total)}, a GPU has {gib(capacity)}"
    return None


Change = tuple[str, TrainConfig, DrafterConfig]
"""Flags to type, and what they make of a recipe."""


def what_fits(
    config: TrainConfig,
    geometry: DrafterConfig,
    target: TargetShape,
    capacity: int,
    role: Role | None = None,
) -> list[str]:
    """Settings that fit into `capacity` bytes on every rank, as flags to type and what is needed then: one
    thing changed, the cheapest first; where none is enough, several at once. Empty where these are not
    enough either.

    With a `role` only its ranks are looked at: all that can be said where a target is known by its ends.
    """

    def first(changes: Iterable[Change]) -> list[str]:
        for flags, recipe, drafter in changes:
            need = need_of(recipe, drafter, target, role) if role else predict(recipe, drafter, target)
            if fits(need, capacity):
                return [f"{flags} ({gib(need.total)})"]
        return []

    singles = [offer for group in single_changes(config, geometry) for offer in first(group)]
    return singles or first(joint_changes(config, geometry))


def single_changes(config: TrainConfig, geometry: DrafterConfig) -> Iterator[Iterable[Change]]:
    """By group, the cheapest first; in a group the smallest change first."""
    place = placement_of(config)
    drafters, readers = len(place.drafters), len(place.readers)
    rows, least = rows_of_a_step(config, place), max(drafters, evenly(config, place))
    if config.target_fp8:
        yield [("--no-target-fp8", replace(config, target_fp8=False), geometry)]
    if not config.activation_checkpointing:
        yield [("--activation-checkpointing", replace(config, activation_checkpointing=True), geometry)]
    if place.split:
        yield [("--link-credits 1", replace(config, link_credits=1), geometry)]
    if drafters > 1 and not config.drafter_sharding:
        yield [(*with_rows("--drafter-sharding", replace(config, drafter_sharding=True)), geometry)]
    if config.taps_dir is None and not place.split:
        yield [("--taps-dir with taps of `slipstream cache`", replace(config, taps_dir="taps"), geometry)]
    if rows > least:
        yield [(f"--rows-per-step {least}", replace(config, rows_per_step=least), geometry)]
    if not place.split and place.ranks % 2 == 0 and config.taps_dir is None:
        pairs = place.ranks // 2
        yield [(*with_rows(f"--dp-pairs {pairs}", replace(config, dp_pairs=pairs)), geometry)]
    if readers > 1 and not config.target_sharding and config.target_pass != "fused":
        flags = "--target-sharding" + (" --no-target-fp8" if config.target_fp8 else "")
        yield [(*with_rows(flags, replace(config, target_sharding=True, target_fp8=False)), geometry)]
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


def with_rows(flags: str, config: TrainConfig) -> tuple[str, TrainConfig]:
    """The change with as many more rows a step as ranks with shards want, who work on equally many."""
    place = placement_of(config)
    even, rows = evenly(config, place), config.rows_per_step or len(place.drafters)
    if rows % even == 0:
        return flags, config
    rows = even * -(-rows // even)
    return f"{flags} --rows-per-step {rows}", replace(config, rows_per_step=rows)


def joint_changes(config: TrainConfig, geometry: DrafterConfig) -> Iterator[Change]:
    """What costs time only, and then shorter rows with fewer blocks, one step after the other."""
    place = placement_of(config)
    slow = replace(config, activation_checkpointing=True, target_fp8=False)
    flags = "--activation-checkpointing --no-target-fp8"
    if len(place.drafters) > 1:
        slow, flags = replace(slow, drafter_sharding=True), flags + " --drafter-sharding"
    least = max(len(place.drafters), evenly(slow, place))
    slow, flags = replace(slow, rows_per_step=least), f"{flags} --rows-per-step {least}"
    anchors = halves(2 * config.max_anchors, LEAST_ANCHORS)
    for n, s in zip(anchors, halves(2 * config.token_budget, LEAST_TOKENS), strict=False):
        less = replace(slow, max_anchors=n, token_budget=s)
        yield f"{flags} --max-anchors {n} --token-budget {s}", less, geometry


def halves(value: int, least: int) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


def say_offers(offers: list[str], target: TargetShape) -> str:
    if offers:
        return "would fit: " + "; ".join(offers)
    return f"no setting is enough (the target alone takes {gib(target.weights)}): use a larger GPU"
