"""The `cache` verb: the target's taps of every packed row, recorded once, so that training needs no target
pass.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.config import CacheConfig, UserError
from slipstream.data.shards import open_dataset, shard_cache
from slipstream.data.tokenizer import load_tokenizer
from slipstream.distributed.link import TapCache, TapFacts, check_disk
from slipstream.models.selfcheck import tap_health
from slipstream.training.metrics import Display
from slipstream.training.run import describe_rows
from slipstream.training.setup import (
    add_heldout,
    check_ids,
    check_target,
    choose_device,
    choose_dtype,
    heldout_rows,
    open_rows,
    open_target,
    tap_facts,
)


def record_taps(config: CacheConfig, display: Display) -> TapFacts:
    """Record training and held-out rows into `config.output_dir`; goes on where an earlier call stopped."""
    device = choose_device(config.device)
    copies = shard_cache(config)
    rows = open_rows(config.data_dir, "train", config.token_budget, config.on_long, config.limit_rows, copies)
    heldout_data = open_dataset(config.data_dir, "heldout", copies)
    heldout = heldout_rows(heldout_data, config.token_budget, config.on_long, config.heldout_rows)
    display.say(describe_rows(rows, "data"))
    target = open_target(config, device, choose_dtype(config.dtype, device), display)
    check_ids(target, load_tokenizer(config.target_model), rows.dataset, heldout_data)
    facts = add_heldout(tap_facts(target, rows, config.token_budget), heldout)
    splits = {"train": rows} | ({} if heldout is None else {"heldout": heldout})
    folder = Path(config.output_dir)
    check_target(target, rows, display)
    cache = TapCache(folder, facts)
    missing = [
        (split, part, i)
        for split, part in splits.items()
        for i in range(part.count)
        if not cache.has(split, i, part.used(i))
    ]
    size = sum(part.used(i) for _, part, i in missing) * facts.width * target.dtype.itemsize
    display.say(f"cache: {size / 2**30:.2f} GiB of {facts.dtype} taps to record in {folder}")
    check_disk(folder, size)
    cache = TapCache.create(folder, facts)

    total = sum(part.count for part in splits.values())
    display.start("cache", total, total - len(missing))
    for done, (split, part, i) in enumerate(missing, total - len(missing) + 1):
        row = part.row(i)
        taps_ST = target.taps(row)
        if trouble := tap_health(taps_ST[: part.used(i)], len(facts.target_layer_ids)):
            raise UserError(f"row {i}: the target's features are {trouble}: nothing to record")
        cache.write(split, row, taps_ST)
        display.advance(done)
    display.stop()
    display.say(f"cache: {total} rows recorded in {folder}")
    return facts
