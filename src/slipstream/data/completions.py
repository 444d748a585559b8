"""A folder of tokenised completions, not prepared: read into memory, five bytes a token, and split by prompt.

Not here: what a record of ready ids is (`records`), prepared datasets (`shards`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import UserError
from slipstream.data.layout import MANIFEST, Shard, Split
from slipstream.data.records import Document, read_tokens
from slipstream.data.sources import is_source, iter_records

HOLDOUT = 0.02


def read_completions(folder: str, files: list[str], split: Split) -> tuple[list[Shard], str, dict[str, Any]]:
    """(shards, fingerprint, counts) of a split, of those of the folder's `files` that hold records."""
    files = [f for f in files if is_source(f)]
    if not files:
        raise UserError(
            f"{folder}: neither {MANIFEST} (a finished `slipstream prepare`) nor Arrow, Parquet or JSONL "
            "files with prompt_ids + response_ids or input_ids + loss_mask"
        )
    counts: dict[str, Any] = {"records": 0, "kept": 0, "skipped": Counter()}
    hashes, shards = [], []
    for path in files:
        documents = []
        for record in iter_records(path):
            counts["records"] += 1
            document = read_tokens(record.value, record.where)
            if not document.supervised.any():
                counts["skipped"]["no supervised token"] += 1
                continue
            hashes.append(document.prompt_hash())
            documents.append(document)
        shards.append((path, documents))
    counts |= {"kept": len(hashes), "skipped": dict(counts["skipped"])}
    if not hashes:
        raise UserError(
            f"{folder}: no supervised token in {counts['records']} records: loss_mask must be 1 where the "
            "model answered, or response_ids hold its answer"
        )
    cut = _hold_out(np.array(hashes, np.uint64))
    digest = hashlib.sha256()
    chosen = []
    for path, documents in shards:
        mine = [d for d in documents if (d.prompt_hash() < cut) == (split == "heldout")]
        if mine:
            chosen.append(_in_memory(path, mine))
            digest.update(
                chosen[-1].tokens.tobytes() + chosen[-1].supervised.tobytes() + chosen[-1].offsets.tobytes()
            )
    return chosen, digest.hexdigest(), counts


def _hold_out(hashes: np.ndarray) -> int:
    """Documents whose prompt hash is below this are held out: at least one, unless all share one prompt."""
    ordered = np.sort(hashes)
    share = max(1, round(HOLDOUT * len(ordered)))
    above = ordered[share:][ordered[share:] > ordered[share - 1]] if len(ordered) > share else ordered[:0]
    return int(above[0]) if len(above) else 0


def _in_memory(path: str, documents: list[Document]) -> Shard:
    tokens = np.concatenate([d.ids for d in documents]).astype(np.uint32)
    supervised = np.concatenate([d.supervised for d in documents]).astype(np.uint8)
    return Shard(Path(path), tokens, supervised, np.cumsum([0, *(len(d.ids) for d in documents)]))
