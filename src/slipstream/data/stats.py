"""`slipstream data stats`: what a dataset holds, and what packing and anchors would make of it.

Here: sizes, lengths and distinct prompts by split; how full rows of S tokens are; which share of their
supervised tokens N anchors label. Not here: reading and checking files (`shards`), packing (`pack`), drawing
anchors (`training/blocks.py`; a test holds the figures here against what it draws).

Letters: D documents, K runs of supervised tokens, R rows of S tokens, N anchors a row.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from slipstream.config import DataConfig, TrainConfig, UserError
from slipstream.data.pack import pack_rows
from slipstream.data.shards import SPLITS, Split, TokenDataset, open_dataset, write_atomic

BUDGETS = (1024, 2048, 4096, 8192, 16384)
ANCHORS = (64, 128, 256, 512, 1024)
BLOCK = TrainConfig().block_size
BAR_WIDTH = 40


@dataclass(frozen=True)
class Packed:
    """Rows of `token_budget` tokens, longer documents truncated."""

    token_budget: int
    rows: int
    utilisation: float
    """Share of the rows' tokens that are not padding."""
    documents_cut: int
    tokens_cut: int
    anchors_possible: float
    """Mean of a row: what `--anchor-share` takes its share of."""
    coverage: dict[int, float]
    """N anchors a row → expected share of the rows' supervised tokens that a block labels."""


@dataclass(frozen=True)
class Stats:
    """Of one split."""

    split: Split
    documents: int
    tokens: int
    supervised_tokens: int
    distinct_prompts: int
    lengths: dict[str, float]
    """min, p10, median, mean, p90, p99, max; in tokens."""
    histogram: dict[int, int]
    """Power of two → documents at least so long and less than twice as long."""
    packed: tuple[Packed, ...]


@dataclass(frozen=True)
class Runs:
    """Runs of supervised tokens, none across a border of documents; places count in the document."""

    document_K: np.ndarray
    start_K: np.ndarray
    end_K: np.ndarray


def stats(config: DataConfig) -> str:
    """What `config.data_dir` holds, as text or JSON; the plot is written where `config.png` says."""
    datasets = [open_dataset(config.data_dir, split) for split in SPLITS]
    found = [split_stats(dataset) for dataset in datasets if len(dataset)]
    if config.png is not None:
        write_atomic(Path(config.png), plot(found))
    if config.json:
        return json.dumps({s.split: asdict(s) for s in found}, indent=1)
    return render(found)


def split_stats(dataset: TokenDataset) -> Stats:
    """All of one split, which must hold documents; reads masks and prompts once, a shard at a time."""
    lengths = dataset.lengths
    runs = find_runs(dataset)
    p10, median, p90, p99 = np.quantile(lengths, (0.1, 0.5, 0.9, 0.99)).tolist()
    octaves = np.bincount(np.frexp(lengths)[1] - 1).tolist()
    first = next(k for k, n in enumerate(octaves) if n)
    return Stats(
        split=dataset.split,
        documents=len(dataset),
        tokens=int(lengths.sum()),
        supervised_tokens=int((runs.end_K - runs.start_K).sum()),
        distinct_prompts=distinct_prompts(dataset, runs),
        lengths={
            "min": float(lengths.min()), "p10": p10, "median": median, "mean": float(lengths.mean()),
            "p90": p90, "p99": p99, "max": float(lengths.max()),
        },
        histogram={2**k: n for k, n in enumerate(octaves) if k >= first},
        packed=tuple(pack_stats(lengths, runs, budget) for budget in BUDGETS),
    )  # fmt: skip


def find_runs(dataset: TokenDataset) -> Runs:
    """Runs in the order of the documents."""
    parts = [np.zeros((3, 0), np.int64)]
    for shard, first in zip(dataset.shards, dataset.first_documents, strict=True):
        supervised_n = np.asarray(shard.supervised) != 0
        changes = np.flatnonzero(supervised_n[1:] != supervised_n[:-1]) + 1
        borders = np.union1d(changes, shard.offsets)
        starts, ends = borders[:-1], borders[1:]
        chosen = supervised_n[starts]
        starts, ends = starts[chosen], ends[chosen]
        document = np.searchsorted(shard.offsets, starts, "right") - 1
        begins = shard.offsets[document]
        parts.append(np.stack((document + first, starts - begins, ends - begins)))
    return Runs(*np.concatenate(parts, axis=1))


def distinct_prompts(dataset: TokenDataset, runs: Runs) -> int:
    """Different beginnings before the first supervised token (whole documents where that is the first)."""
    prompt_D = dataset.lengths.copy()
    document_D, first_D = np.unique(runs.document_K, return_index=True)
    start_D = runs.start_K[first_D]
    prompt_D[document_D] = np.where(start_D > 0, start_D, prompt_D[document_D])
    hashes = np.empty(len(dataset), np.int64)
    for shard, first in zip(dataset.shards, dataset.first_documents, strict=True):
        ids = np.asarray(shard.tokens)
        begins = shard.offsets[:-1] * ids.itemsize
        ends = begins + prompt_D[first : first + len(begins)] * ids.itemsize
        data = ids.tobytes()
        for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True), first):
            hashes[i] = hash(data[begin:end])
    return len(np.unique(hashes))


def pack_stats(lengths: np.ndarray, runs: Runs, token_budget: int) -> Packed:
    """Rows of `token_budget` tokens as `train` packs them, and what anchors label in them."""
    packing = pack_rows(lengths, token_budget, "truncate")
    row_D = np.empty(len(lengths), np.int64)
    row_D[packing.pieces_P3[:, 0]] = np.repeat(np.arange(len(packing)), np.diff(packing.row_starts))
    size_K = np.maximum(np.minimum(runs.end_K, token_budget) - runs.start_K, 0)
    before_RB, possible_R = chances(row_D[runs.document_K], size_K, len(packing))
    supervised = max(1, int(size_K.sum()))
    return Packed(
        token_budget=token_budget,
        rows=len(packing),
        utilisation=packing.utilisation,
        documents_cut=packing.counts["truncated"],
        tokens_cut=packing.counts["truncated_tokens"],
        anchors_possible=float(possible_R.mean()),
        coverage={n: labelled(before_RB, possible_R, n) / supervised for n in ANCHORS},
    )


def chances(row_K: np.ndarray, size_K: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each row [R, B]: tokens that m = 0 … B − 1 possible anchors could label; and those anchors [R].

    A token is labelled by any anchor among the up to B − 1 tokens before it in its run, and all but the last
    token of a run can be anchors.
    """
    before_RB = np.zeros((rows, BLOCK))
    for m in range(1, BLOCK - 1):
        before_RB[:, m] = np.bincount(row_K[size_K > m], minlength=rows)
    before_RB[:, -1] = np.bincount(row_K, np.maximum(size_K - (BLOCK - 1), 0), rows)
    return before_RB, np.bincount(row_K, np.maximum(size_K - 1, 0), rows)


def labelled(before_RB: np.ndarray, possible_R: np.ndarray, anchors: int) -> float:
    """Expected number of tokens labelled when each row draws `anchors` of its possible ones, without
    replacement: a token with m chances stays without a label in Π (c − N − i) / (c − i), i < m, of all draws.
    """
    missed_R = np.ones(len(possible_R))
    total = 0.0
    for m in range(1, BLOCK):
        left_R = possible_R - (m - 1)
        missed_R *= np.clip((left_R - anchors) / np.maximum(left_R, 1), 0, 1)
        total += float(before_RB[:, m] @ (1 - missed_R))
    return total


def render(found: list[Stats]) -> str:
    """Tables and bars for a terminal, as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=110, highlight=False)
    for s in found:
        console.print(
            f"{s.split}: {s.documents:,} documents, {s.tokens:,} tokens, "
            f"{s.supervised_tokens / s.tokens:.1%} of them supervised, "
            f"{s.distinct_prompts:,} distinct prompts",
            soft_wrap=True,
        )
        console.print("tokens of a document: " + ", ".join(f"{k} {v:,.0f}" for k, v in s.lengths.items()))
        bars = Table(box=None, show_header=False)
        bars.add_column(justify="right")
        most = max(s.histogram.values())
        for size, n in s.histogram.items():
            bars.add_row(f"{size:,} – {2 * size - 1:,}", Bar(most, 0, n, width=BAR_WIDTH), f"{n:,}")
        console.print(bars)
        table = Table(title=f"{s.split}: packed rows, and coverage by N anchors a row (blocks of {BLOCK})")
        for name in ("tokens a row", "rows", "full", "cut", "anchors possible", *(f"N {n}" for n in ANCHORS)):
            table.add_column(name, justify="right")
        for p in s.packed:
            facts = (f"{p.token_budget}", f"{p.rows:,}", f"{p.utilisation:.1%}", f"{p.documents_cut:,}")
            coverage = (f"{c:.1%}" for c in p.coverage.values())
            table.add_row(*facts, f"{p.anchors_possible:,.0f}", *coverage)
        console.print(table)
    return out.getvalue().rstrip()


def plot(found: list[Stats]) -> bytes:
    """A PNG: lengths, utilisation by S, coverage by N; needs matplotlib (the `report` extra)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "slipstream data stats --png: matplotlib is missing: pip install 'slipstream[report]'"
        ) from None
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    lengths, full, coverage = figure.subplots(1, 3)
    for s in found:
        share = [n / s.documents for n in s.histogram.values()]
        lengths.stairs(share, [*s.histogram, 2 * max(s.histogram)], label=s.split)
        full.plot(BUDGETS, [p.utilisation for p in s.packed], marker="o", label=s.split)
    for p in found[0].packed:
        coverage.plot(ANCHORS, list(p.coverage.values()), marker="o", label=f"S = {p.token_budget}")
    lengths.set(xscale="log", xlabel="tokens of a document", ylabel="share of documents", ylim=(0, None))
    full.set(xscale="log", xlabel="tokens a row (S)", ylabel="utilisation", ylim=(None, 1))
    lengths.set_xticks([*found[0].histogram], map(str, found[0].histogram))
    full.set_xticks(BUDGETS, map(str, BUDGETS))
    coverage.set(
        xscale="log", xlabel="anchors a row (N)", ylabel="coverage of supervised tokens", ylim=(0, 1)
    )
    coverage.set_title(f"{found[0].split}, blocks of {BLOCK}")
    coverage.set_xticks(ANCHORS, map(str, ANCHORS))
    for axes in (lengths, full, coverage):
        axes.legend()
        axes.minorticks_off()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
