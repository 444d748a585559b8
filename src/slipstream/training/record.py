"""The `cache` verb: the target's taps of every packed row, recorded once, so that training needs no target
pass.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.config import CacheConfig, UserError
from slipstream.distributed.link import TapCache, TapFacts, check_disk
from slipstream.models.selfcheck import tap_health
from slipstream.models.target import load_target
from slipstream.training.metrics import Display
from slipstream.training.setup import (
    Rows,
    check_ids,
    check_target,
    choose_device,
    choose_dtype,
    describe_rows,
    heldout_rows,
    load_tokenizer,
    open_rows,
    tap_facts,
)


def record_taps(config: CacheConfig, display: Display) -> TapFacts:
    """Record training and held-out rows into `config.output_dir`; goes on where an earlier call stopped."""
    device = choose_device(config.device)
    rows = open_rows(config.data_dir, "train", config.token_budget, config.on_long, config.limit_rows)
    heldout = heldout_rows(config.data_dir, config.token_budget, config.on_long, config.heldout_rows)
    display.say(describe_rows(rows, "data"))
    target = load_target(
        config.target_model, config.target_layer_ids, config.taps, device, choose_dtype(config.dtype, device)
    )
    check_ids(target, load_tokenizer(config.target_model), rows, heldout)
    facts = tap_facts(target, rows, heldout, config.token_budget)
    splits = {"train": rows} | ({} if heldout is None else {"heldout": heldout})
    size = sum(_tokens(part) for part in splits.values()) * facts.width * target.dtype.itemsize
    folder = Path(config.output_dir)
    display.say(f"cache: {size / 2**30:.2f} GiB of {facts.dtype} taps in {folder}")
    check_disk(folder, size)
    check_target(target, rows, display)
    cache = TapCache.create(folder, facts)

    done, total = 0, sum(part.count for part in splits.values())
    display.start("cache", total)
    for split, part in splits.items():
        for row in part:
            if not cache.has(split, row):
                taps_ST = target.taps(row)
                if trouble := tap_health(taps_ST[: row.spans()[-1][1]], len(facts.target_layer_ids)):
                    raise UserError(
                        f"row {row.row_id}: the target's features are {trouble}: nothing to record"
                    )
                cache.write(split, row, taps_ST)
            done += 1
            display.advance(done)
    display.stop()
    display.say(f"cache: {done} rows recorded in {folder}")
    return facts


def _tokens(rows: Rows) -> int:
    return sum(end - start for i in range(rows.count) for _, start, end in rows.packing.pieces(i))
