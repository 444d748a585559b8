"""Documents → packed rows of a fixed token budget. Pure: the same lengths give the same rows everywhere.

Here: which piece of which document lies in which row, and the row's tensors. Not here: the order in which
rows are trained on (the loop's plan), files (`shards`).

Letters: S tokens of a row, P pieces, R rows.
"""

from __future__ import annotations

import bisect
import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from slipstream.config import UserError
from slipstream.data.shards import TokenDataset

Piece = tuple[int, int, int]  # (document, start, end)
OnLong = Literal["truncate", "split", "reject"]
WINDOW = 2**26
"""Tokens of neighbouring documents that rows are filled from."""
SCATTER = np.uint64(0x9E3779B97F4A7C15)
"""2⁶⁴ / golden ratio: its multiples modulo 2⁶⁴ spread the documents in a fixed pseudo-random order."""


@dataclass(frozen=True)
class Row:
    """One packed row on the host.

    input_ids [S] int64, 0 at padding; positions [S] int64, from 0 in every document, 0 at padding; documents
    [S] int64, 0, 1, 2, … in order, −1 at padding, which lies at the end; supervised [S] bool, False at
    padding.
    """

    row_id: int
    input_ids: Tensor
    positions: Tensor
    documents: Tensor
    supervised: Tensor

    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of each document in the row."""
        used = self.documents[self.documents >= 0]
        ends = torch.bincount(used).cumsum(0).tolist()
        return list(zip([0, *ends], ends, strict=False))


@dataclass(frozen=True)
class Packing:
    """Rows as pieces (document, start, end): row r holds `pieces_P3[row_starts[r] : row_starts[r + 1]]`."""

    token_budget: int
    pieces_P3: np.ndarray
    row_starts: np.ndarray  # [R + 1]
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def pieces(self, row: int) -> list[Piece]:
        return [
            (d, s, e) for d, s, e in self.pieces_P3[self.row_starts[row] : self.row_starts[row + 1]].tolist()
        ]

    @property
    def utilisation(self) -> float:
        """Share of the rows' tokens that are not padding."""
        tokens = int((self.pieces_P3[:, 2] - self.pieces_P3[:, 1]).sum())
        return tokens / (len(self) * self.token_budget) if len(self) else 0.0

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(str(self.token_budget).encode())
        for array in (self.pieces_P3, self.row_starts):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()


def pack_rows(lengths: np.ndarray, token_budget: int, on_long: OnLong, window: int = WINDOW) -> Packing:
    """Best fit: each piece goes into the fullest row that has room for it. `lengths` [documents] in tokens.

    Documents longer than the budget lose their tail, become several pieces (documents of their own: positions
    restart), or are left out; `counts` tells. Rows come in a scattered order, so that the first ones are a
    sample.

    A row is open for the `window` of documents (so many tokens, in the dataset's order) in which it is begun
    and for the next one: its documents lie within two neighbouring windows, and so in a few shards.

    In a window pieces are taken in a scattered order, so that a row mixes lengths; longest first packs
    closer, but its rows hold like lengths (91 against 3 % of the variance of log length lay between rows, on
    short chats at S = 8192), and a step would see only short or only long answers. It is taken where it saves
    more than 1 % of the rows.
    """
    lengths = np.asarray(lengths, np.int64)
    pieces_P3, counts = _cut(lengths, token_budget, on_long)
    if not len(pieces_P3):
        raise UserError(
            f"--token-budget {token_budget}: none of {len(lengths)} documents fits into a row; "
            "raise it, or set --on-long to truncate or split"
        )
    documents_P, sizes_P = pieces_P3[:, 0], pieces_P3[:, 2] - pieces_P3[:, 1]
    windows_P = ((np.cumsum(lengths) - 1) // window)[documents_P]
    scatter_P = documents_P.astype(np.uint64) * SCATTER
    rows_P, count = _best_fit(sizes_P, np.lexsort((scatter_P, windows_P)), windows_P, token_budget)
    if count > 1.01 * -(-int(sizes_P.sum()) // token_budget):  # else no order saves that much
        longest_first = np.lexsort((scatter_P, -sizes_P, windows_P))
        closer_P, fewer = _best_fit(sizes_P, longest_first, windows_P, token_budget)
        if count > 1.01 * fewer:
            rows_P, count = closer_P, fewer

    first_R = np.full(count, len(rows_P))
    np.minimum.at(first_R, rows_P, np.arange(len(rows_P)))
    rank_R = np.empty(count, np.int64)
    rank_R[np.lexsort((first_R, scatter_P[first_R]))] = np.arange(count)
    order_P = np.argsort(rank_R[rows_P], kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(rank_R[rows_P]))))
    return Packing(token_budget, pieces_P3[order_P], starts, counts)


def _best_fit(
    sizes_P: np.ndarray, order_P: np.ndarray, windows_P: np.ndarray, token_budget: int
) -> tuple[np.ndarray, int]:
    """(the row of each piece, number of rows); pieces are taken in an order that goes window by window."""
    rows_P, count = np.empty(len(sizes_P), np.int64), 0
    open_rows: dict[int, list[int]] = {}  # free tokens → rows that have exactly so many
    borders = np.flatnonzero(np.diff(windows_P[order_P])) + 1
    begun, before = 0, -1
    for pieces in np.split(order_P, borders):
        window = int(windows_P[pieces[0]])
        oldest = begun if window == before + 1 else count
        kept = {free: [r for r in rows if r >= oldest] for free, rows in open_rows.items()}
        open_rows = {free: rows for free, rows in kept.items() if rows}
        rooms = sorted(open_rows)  # stays sorted: the best fit is a binary search
        begun, before, placed = count, window, []
        for size in sizes_P[pieces].tolist():
            at = bisect.bisect_left(rooms, size)
            if at < len(rooms):
                free = rooms[at]
                row = open_rows[free].pop()
                if not open_rows[free]:
                    del rooms[at], open_rows[free]
            else:
                free, row = token_budget, count
                count += 1
            placed.append(row)
            left = free - size
            if left in open_rows:
                open_rows[left].append(row)
            elif left:
                open_rows[left] = [row]
                bisect.insort(rooms, left)
        rows_P[pieces] = placed
    return rows_P, count


def _cut(lengths: np.ndarray, budget: int, on_long: OnLong) -> tuple[np.ndarray, dict[str, int]]:
    """Pieces [P, 3] in the order of the documents, and what became of the long ones."""
    assert budget >= 1
    assert (lengths >= 1).all(), "an empty document reached the packing"
    long = lengths > budget
    over, tokens = int(long.sum()), int(lengths[long].sum())
    counts = {"documents": len(lengths), "truncated": 0, "truncated_tokens": 0}
    counts |= {"split": 0, "rejected": 0, "rejected_tokens": 0}
    documents = np.arange(len(lengths))
    if on_long == "truncate":
        counts |= {"truncated": over, "truncated_tokens": tokens - over * budget}
        ends = np.minimum(lengths, budget)
        return np.stack((documents, np.zeros_like(ends), ends), axis=1), counts
    if on_long == "reject":
        counts |= {"rejected": over, "rejected_tokens": tokens}
        kept = documents[~long]
        return np.stack((kept, np.zeros_like(kept), lengths[kept]), axis=1), counts
    counts |= {"split": over}
    pieces = -(-lengths // budget)
    of = np.repeat(documents, pieces)
    starts = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * budget
    return np.stack((of, starts, np.minimum(starts + budget, lengths[of])), axis=1), counts


def make_row(dataset: TokenDataset, packing: Packing, index: int) -> Row:
    """The tensors of row `index`; its `row_id` is the index."""
    size = packing.token_budget
    ids, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
    documents, supervised = np.full(size, -1, np.int64), np.zeros(size, bool)
    at = 0
    pieces = packing.pieces(index)
    read = dataset.documents([document for document, _, _ in pieces])  # at once: they may be far away
    for number, ((_, start, end), (tokens, mask)) in enumerate(zip(pieces, read, strict=True)):
        here = slice(at, at + end - start)
        ids[here], supervised[here] = tokens[start:end], mask[start:end]
        positions[here], documents[here] = np.arange(end - start), number
        at = here.stop
    return Row(index, *map(torch.from_numpy, (ids, positions, documents, supervised)))
