"""Putting a training run together and checking it, before the first step: rows, target, drafter, links.

User errors come from here. What a run is and writes is in run.py, its steps are in loop.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from slipstream.config import CacheConfig, TrainConfig, UserError, default_gamma
from slipstream.data.pack import OnLong, Row, pack_rows
from slipstream.data.remote import Cache
from slipstream.data.shards import (
    DEFAULT_CACHE,
    Split,
    TokenDataset,
    check_tokenizer,
    open_dataset,
    shard_cache,
)
from slipstream.data.tokenizer import load_tokenizer, stop_ids
from slipstream.distributed.crew import ONE, Crew, together
from slipstream.distributed.link import TapCache, TapFacts, TapLink, holding, target_fingerprint
from slipstream.distributed.placement import Placement, Plan, evenly, rows_of_a_step
from slipstream.models.drafter import (
    FULL,
    SLIDING,
    Drafter,
    DrafterConfig,
    default_heads,
    default_intermediate,
)
from slipstream.models.ends import TargetEnds
from slipstream.models.families import choose_mask_token
from slipstream.models.selfcheck import MIN_SAMPLE_TOKENS, self_check
from slipstream.models.target import Target, check_vocab, load_ends, load_target, wanted_pass
from slipstream.system.kernels import prepare_kernels
from slipstream.training.attention import choose_attention
from slipstream.training.blocks import anchor_candidates, decay_weights, wanted_anchors
from slipstream.training.flops import row_flops, target_layers
from slipstream.training.loss import SlotWeights
from slipstream.training.metrics import Display
from slipstream.training.parallel import shard_drafter
from slipstream.training.run import (
    Rows,
    Run,
    check_run_folder,
    check_same_run,
    describe_drafter,
    describe_rows,
)

ROWS_LOOKED_AT = 16
"""Rows that `describe_anchors` reads: the order of the rows is scattered, so the first are a sample."""


def choose_device(asked: str) -> torch.device:
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked not in ("cpu", "cuda"):
        raise UserError(f"--device {asked}: give cpu, cuda or auto")
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here: use --device cpu or auto")
    return torch.device(asked)


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """bf16 where its matrix products are fast: CUDA, and CPUs with AVX512-BF16 or AMX; else fp32."""
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[asked]
    # torch's own test for a CPU; oneDNN's says yes to processors that only emulate bf16
    fast = (
        device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
    return torch.bfloat16 if fast else torch.float32


def open_rows(
    data_dir: str,
    split: Split,
    token_budget: int,
    on_long: OnLong,
    limit: int | None,
    cache: Cache = DEFAULT_CACHE,
) -> Rows:
    return pack_dataset(open_dataset(data_dir, split, cache), token_budget, on_long, limit)


def pack_dataset(dataset: TokenDataset, token_budget: int, on_long: OnLong, limit: int | None) -> Rows:
    packing = pack_rows(dataset.lengths, token_budget, on_long)
    count = len(packing) if limit is None else min(limit, len(packing))
    return Rows(dataset, packing, count)


def open_target(
    config: TrainConfig | CacheConfig,
    device: torch.device,
    dtype: torch.dtype,
    display: Display,
    compiled: bool = True,
    shards: dist.ProcessGroup | None = None,
) -> Target:
    """The target as the settings want it read; on a GPU with the kernel caches swept and the autotuner
    guarded.
    """
    if device.type == "cuda":
        for line in prepare_kernels():
            display.say(line)
    target = load_target(
        config.target_model,
        config.target_layer_ids,
        config.taps,
        device,
        dtype,
        wanted_pass(config.target_pass, compiled),
        config.target_fp8,
        shards,
    )
    if target.why_stock is not None:
        display.say(f"target: read by its stock layers, {target.isolation}: {target.why_stock}")
    return target


def drafter_config(config: TrainConfig, target: TargetEnds, mask_token_id: int) -> DrafterConfig:
    """The drafter's own geometry: from the settings and its defaults; hidden size and vocabulary from the
    target.
    """
    heads, kv_heads, head_dim = default_heads(target.hidden_size)
    if config.heads is not None:
        heads = config.heads
        kv_heads = max(d for d in range(1, kv_heads + 1) if heads % d == 0)
    sliding = 0 if config.sliding_window is None else config.layers - config.full_layers
    return DrafterConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=config.layers,
        num_heads=heads,
        num_kv_heads=config.kv_heads or kv_heads,
        head_dim=config.head_dim or head_dim,
        intermediate_size=config.intermediate_size or default_intermediate(target.hidden_size),
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target.target_layer_ids,
        num_target_layers=target.num_layers,
        rope_theta=config.rope_theta or target.rope_theta,
        layer_types=(SLIDING,) * sliding + (FULL,) * (config.layers - sliding),
        sliding_window=config.sliding_window,
        input_embedding_scale=target.input_embedding_scale,
        max_position_embeddings=target.max_position_embeddings,
    )


def check_target(target: Target, rows: Rows, display: Display) -> None:
    """The start-up self-checks on the fullest of the first rows; a failure ends the run with what to do."""
    sample = max((rows.row(i) for i in range(min(rows.count, 8))), key=lambda row: row.spans()[-1][1])
    if (found := sample.spans()[-1][1]) < MIN_SAMPLE_TOKENS:
        raise UserError(
            f"{rows.dataset.where}: rows of {found} tokens are too few to check the target "
            f"with ({MIN_SAMPLE_TOKENS} at least): raise --token-budget, or prepare longer documents"
        )
    failed = []
    for check in self_check(target, sample):
        display.say(f"check: {check.name}: {'ok' if check.ok else 'FAILED'} ({check.detail})")
        if not check.ok:
            failed.append(f"{check.name}: {check.detail}: {check.mend}")
    if failed:
        raise UserError(f"target: {failed[0]}")


def check_ids(
    target: Target | TargetEnds, tokenizer: PreTrainedTokenizerBase, *datasets: TokenDataset
) -> None:
    """The token ids of the splits are the target's: its tokenizer's, and rows of its embedding.

    A tokenizer may know more ids than the embedding has rows, as long as no document holds them.
    """
    for dataset in datasets:
        check_tokenizer(dataset, tokenizer)
        check_vocab(target, dataset.largest_id)


def check_anchors(rows: Rows, config: TrainConfig) -> None:
    if config.block_size > config.token_budget:
        raise UserError(
            f"--block-size {config.block_size}: no such block fits into a row of {config.token_budget} "
            "tokens: lower it, or raise --token-budget"
        )
    if not any(len(anchor_candidates(row)) for row in rows):
        raise UserError(
            f"{config.data_dir}: no row of {config.token_budget} tokens has two neighbouring supervised "
            "tokens, so no anchor is possible: raise --token-budget, or prepare data with longer answers"
        )


def describe_anchors(rows: Rows, config: TrainConfig) -> str:
    """How many of a row's blocks are used, by the first rows, and which --max-anchors would fit them."""
    looked, most = min(rows.count, ROWS_LOOKED_AT), config.max_anchors
    possible = [len(anchor_candidates(rows.row(i))) for i in range(looked)]
    wanted = [wanted_anchors(n, config.anchor_share) for n in possible]
    used = [min(n, most) for n in wanted]
    fit = max(16, -(-max(wanted) // 16) * 16)
    line = (
        f"anchors: rows have {sum(possible) / looked:,.0f} possible anchors and use "
        f"{sum(used) / looked:,.0f} of {most} blocks ({looked} rows looked at)"
    )
    if config.anchor_share is not None and used != wanted:
        cut = f"{1 - sum(used) / sum(wanted):.0%} of --anchor-share {config.anchor_share:g}"
        return f"{line}; the bound cuts {cut}: --max-anchors {fit} would not"
    if fit < 0.9 * most:
        return f"{line}; unused blocks cost as much time as used ones: --max-anchors {fit} is enough"
    return line


def tap_facts(target: Target, rows: Rows, token_budget: int) -> TapFacts:
    """What the taps of the training rows belong to; `add_heldout` adds the validation's."""
    fp8 = target.trunk is not None and target.trunk.fp8
    return TapFacts(
        target=target_fingerprint(target),
        target_layer_ids=target.target_layer_ids,
        width=len(target.target_layer_ids) * target.hidden_size,
        dtype=str(target.dtype).removeprefix("torch.") + (", FP8 products" if fp8 else ""),
        token_budget=token_budget,
        packing=rows.packing.fingerprint + rows.dataset.fingerprint,
        heldout_packing="",
        rows=rows.count,
        heldout_rows=0,
    )


def add_heldout(facts: TapFacts, heldout: Rows | None) -> TapFacts:
    if heldout is None:
        return facts
    packing = heldout.packing.fingerprint + heldout.dataset.fingerprint
    return replace(facts, heldout_packing=packing, heldout_rows=heldout.count)


def heldout_rows(heldout: TokenDataset, token_budget: int, on_long: OnLong, limit: int) -> Rows | None:
    """The first `limit` held-out rows; None where there are none or none are wanted."""
    if not len(heldout) or not limit:
        return None
    return pack_dataset(heldout, token_budget, on_long, limit)


def check_settings(config: TrainConfig) -> None:
    """What can be refused before anything is read. Of `resolved` settings."""
    if config.full_layers and (config.sliding_window is None or config.full_layers > config.layers):
        raise UserError(
            f"--full-layers {config.full_layers}: they are those of {config.layers} layers that a "
            "--sliding-window leaves out: give one, and at most as many"
        )
    check_run_folder(config)


@dataclass(frozen=True)
class Read:
    """What ranks that read the target know of it, and those that only draft are told."""

    facts: TapFacts
    isolation: str
    elements: int
    """Matrix elements that a token meets up to the last tap."""


def resolved(config: TrainConfig, place: Placement) -> TrainConfig:
    """The settings with what follows from the number of ranks, as the run's folder keeps them."""
    ranks = None if place.split or place.ranks == 1 else place.ranks
    return replace(config, rows_per_step=rows_of_a_step(config, place), ranks=ranks)


def open_run(config: TrainConfig, display: Display, crew: Crew = ONE) -> Run:
    """All of a run, checked: user errors come from here, before the first step and before anything is
    written. Called by every rank.
    """
    config = resolved(config, crew.place)
    crew.by_first(lambda: check_settings(config))
    assert config.rows_per_step is not None
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    attention = choose_attention(config.attention, device, config.compile)

    cache = None if config.taps_dir is None else TapCache.open(config.taps_dir)
    rows = open_rows(
        config.data_dir,
        "train",
        config.token_budget,
        config.on_long,
        None if cache is None else cache.facts.rows,
        shard_cache(config),
    )
    display.say(describe_rows(rows, "data"))
    heldout_data = open_dataset(config.data_dir, "heldout", shard_cache(config))
    heldout = heldout_rows(heldout_data, config.token_budget, config.on_long, config.eval_rows)
    if heldout is not None and heldout.count % (even := evenly(config, crew.place)):
        display.say(f"data: held-out rows are cut to a multiple of {even}, for ranks with shards")
        kept = heldout.count - heldout.count % even
        heldout = replace(heldout, count=kept) if kept else None
    check_anchors(rows, config)
    display.say(describe_anchors(rows, config))
    if not len(heldout_data):
        display.say("data: no held-out documents: validation and the last decoding are left out")

    target = None
    if crew.reads:
        target = open_target(config, device, dtype, display, config.compile, crew.readers)
        ends = target.ends
    else:
        ends = load_ends(config.target_model, config.target_layer_ids, config.taps, device, dtype)
    tokenizer = load_tokenizer(config.target_model)
    check_ids(ends, tokenizer, rows.dataset, heldout_data)
    stops = stop_ids(ends.generation_config, tokenizer)
    mask_token_id, source = choose_mask_token(
        config.mask_token_id, ends.model_type, ends.vocab_size, tokenizer, stops
    )
    geometry = drafter_config(config, ends, mask_token_id)

    def read() -> Read | None:
        if target is None:
            return None
        check_target(target, rows, display)
        facts = tap_facts(target, rows, config.token_budget)
        return Read(facts, target.isolation, sum(target_layers(target)))

    known = next(found for found in together(crew.every, read) if found is not None)
    torch.manual_seed(config.seed)
    drafter = Drafter(geometry).to(device)
    if crew.drafters is not None and config.drafter_sharding:
        shard_drafter(drafter, crew.drafters, dtype, config.compile and device.type == "cuda")
    elif device.type == "cuda":
        drafter.use_gpu(dtype, config.compile)
    drafter.checkpoint_layers = config.activation_checkpointing
    display.say(describe_drafter(drafter, ends, known.isolation, source))

    taps, heldout_taps = (target.taps, target.taps) if target is not None else (noise_like(ends),) * 2
    if cache is not None:
        cache.check(add_heldout(known.facts, heldout))
        cache.check_recorded("train", rows.count)
        cache.check_recorded("heldout", 0 if heldout is None else heldout.count)
        taps, heldout_taps = cache.link("train", device), cache.link("heldout", device)
    plan = Plan(config.seed, rows.count, config.rows_per_step, config.anchor_draws, crew.place, rows.used)
    if config.anchor_draws > 1:
        taps = holding(taps, plan.rows_a_rank)
    steps = plan.steps(config.epochs) if config.max_steps is None else config.max_steps
    gamma = config.gamma or default_gamma(config.block_size)
    decay_B = decay_weights(config.block_size, gamma).to(device) if config.loss == "decay" else None
    run = Run(
        config=config,
        folder=Path(config.output_dir),
        device=device,
        dtype=dtype,
        crew=crew,
        target=target,
        ends=ends,
        drafter=drafter,
        rows=rows,
        heldout=heldout,
        heldout_data=heldout_data,
        taps=taps,
        heldout_taps=heldout_taps,
        plan=plan,
        steps=steps,
        attention=attention,
        flops=row_flops(geometry, 0 if cache is not None else known.elements),
        slot_weights=SlotWeights(decay_B, config.dpace_floor),
        facts=known.facts,
    )
    crew.by_first(lambda: check_same_run(run))
    return run


def noise_like(ends: TargetEnds) -> TapLink:
    """Taps that are none, for a warm-up on a rank without a target."""

    def noise(row: Row) -> torch.Tensor:
        width = len(ends.target_layer_ids) * ends.hidden_size
        return torch.randn(len(row.input_ids), width, dtype=ends.dtype, device=ends.device)

    return noise
