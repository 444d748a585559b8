"""Blocks: what a drafter is trained on. Anchors, labels, slot weights and the mask predicate; pure functions.

A packed row holds whole documents. An *anchor* is a token of it; the *block* of an anchor is the anchor
itself followed by B−1 mask tokens, and slot k ≥ 1 must say the token k places after the anchor. The drafter
sees the target's features strictly before the anchor, in the anchor's own document, and the other slots of
its block.

    row        The cat sat on the mat .            anchor = "sat" (index 2), B = 4
    block               [sat] [M] [M] [M]          positions 2 3 4 5
    labels               —    on  the mat          slot 0 carries no loss
    context    The cat                             features of index 0 and 1: at inference the state of "sat"
    is not there

Conventions: "1+N" labels (arXiv 2602.06036). Shapes: S tokens of the row · N anchors · B block size · Q =
N·B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.data.pack import Row


@dataclass(frozen=True)
class DocumentGroup:
    """The blocks [first_block, last_block) of one document, and the row span of the context they can see."""

    context_start: int
    context_end: int
    first_block: int
    last_block: int


@dataclass(frozen=True)
class Blocks:
    """N blocks of one packed row. Anchors are sorted, so the blocks of a document lie together."""

    block_size: int
    anchors_N: Tensor
    """Row index of each anchor; unused places repeat the last anchor (or 0) and have no valid slot."""
    documents_N: Tensor
    """Document of each anchor."""
    context_documents_S: Tensor
    """Document of each token of the row, −1 at padding."""
    context_positions_S: Tensor
    """Position of each token of the row in its document."""
    input_ids_NB: Tensor
    """The anchor's token, then mask tokens."""
    positions_NB: Tensor
    """Positions in the document: pos(anchor) + slot."""
    labels_NB: Tensor
    """Token that each slot must say; 0 where the slot is not valid."""
    valid_NB: Tensor
    """Slots that carry loss: slot 0 never, slot k only when slots 1 … k are in the document and
    supervised.
    """
    groups: tuple[DocumentGroup, ...]
    """Host-side spans, one for each document with blocks: dense attention one document at a time."""
    count: int
    """Anchors drawn, the padding of N not counted."""
    labels: int
    """Slots that carry loss."""
    labelled: int
    """Supervised tokens of the row that at least one block labels: the row's coverage."""

    def to(self, device: torch.device) -> Blocks:
        """On `device`; to a GPU through pinned memory, so that the host does not wait for its queue."""
        pinned = device.type == "cuda"
        moved = {
            k: (v.pin_memory() if pinned else v).to(device, non_blocking=True)
            for k, v in vars(self).items()
            if isinstance(v, Tensor)
        }
        return Blocks(**{**vars(self), **moved})


def anchor_candidates(row: Row) -> Tensor:
    """Row indices that can be anchors: p and p+1 are supervised and in the same document."""
    both = row.supervised[:-1] & row.supervised[1:]
    same = (row.documents[:-1] == row.documents[1:]) & (row.documents[:-1] >= 0)
    return (both & same).nonzero().flatten()


def draw_anchors(row: Row, max_anchors: int, key: tuple[int, ...], share: float | None = None) -> Tensor:
    """The anchors that `share` asks for, at most `max_anchors`, without replacement, sorted (sorted anchors
    make 2–5× fewer attention tiles).

    `key` is (seed, epoch, draw): with the row's own id it fixes the draw, whatever rank or step asks.
    """
    candidates = anchor_candidates(row)
    drawn = min(max_anchors, wanted_anchors(len(candidates), share))
    if drawn < len(candidates):
        picked = generator(row, key).permutation(len(candidates))[:drawn]
        candidates = candidates[torch.from_numpy(np.sort(picked))]
    return candidates


def wanted_anchors(candidates: int, share: float | None) -> int:
    """Anchors of a row before the bound: all candidates without a share, else that share of them, rounded,
    and one at least where there is any.
    """
    if share is None or not candidates:
        return candidates
    return max(1, round(share * candidates))


def anchors_cut(row: Row, drawn: int, share: float | None) -> int:
    """Anchors of the row's share that the bound left out; without a share the bound is all that is asked."""
    return 0 if share is None else wanted_anchors(len(anchor_candidates(row)), share) - drawn


def generator(row: Row, key: tuple[int, ...]) -> np.random.Generator:
    return np.random.default_rng((*key, row.row_id))


def make_blocks(row: Row, anchors: Tensor, max_anchors: int, block_size: int, mask_token_id: int) -> Blocks:
    """Blocks of `row` at sorted row indices `anchors`, padded to `max_anchors` places."""
    size, count = len(row.input_ids), len(anchors)
    assert count <= max_anchors
    pad = anchors.new_full((max_anchors - count,), int(anchors[-1]) if count else 0)
    anchors_N = torch.cat((anchors, pad))
    documents_N = row.documents[anchors_N]
    slots_B = torch.arange(block_size)

    index_NB = anchors_N[:, None] + slots_B
    inside_NB = index_NB < size
    index_NB = index_NB.clamp(max=size - 1)
    good_NB = inside_NB & (row.documents[index_NB] == documents_N[:, None]) & row.supervised[index_NB]
    good_NB[:, 0] = True  # the anchor itself: cumulative products below start behind it
    valid_NB = good_NB.cumprod(dim=1).bool()
    valid_NB[:, 0] = False  # slot 0 holds the anchor, there is nothing to foresee
    valid_NB[count:] = False

    labelled_S = torch.zeros(size, dtype=torch.bool)
    labelled_S[index_NB[valid_NB]] = True
    input_ids_NB = torch.full((max_anchors, block_size), mask_token_id)
    input_ids_NB[:, 0] = row.input_ids[anchors_N]
    return Blocks(
        block_size=block_size,
        anchors_N=anchors_N,
        documents_N=documents_N,
        context_documents_S=row.documents,
        context_positions_S=row.positions,
        input_ids_NB=input_ids_NB,
        positions_NB=row.positions[anchors_N][:, None] + slots_B,
        labels_NB=torch.where(valid_NB, row.input_ids[index_NB], 0),
        valid_NB=valid_NB,
        groups=_document_groups(row, anchors_N),
        count=count,
        labels=int(valid_NB.sum()),
        labelled=int(labelled_S.sum()),
    )


def _document_groups(row: Row, anchors_N: Tensor) -> tuple[DocumentGroup, ...]:
    """Runs of blocks of one document, with the context from the document's start to the run's last anchor."""
    documents = row.documents[anchors_N].tolist()
    anchors = anchors_N.tolist()
    spans = row.spans()
    groups, first = [], 0
    for i in range(1, len(anchors) + 1):
        if i == len(anchors) or documents[i] != documents[first]:
            start = spans[documents[first]][0] if documents[first] >= 0 else anchors[first]
            groups.append(DocumentGroup(start, anchors[i - 1], first, i))
            first = i
    return tuple(groups)


def visibility(blocks: Blocks, window: int | None, causal: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The one mask predicate: `seen(q, k)` for query index q in [0, Q) and key index k in [0, S+Q),
    broadcasting.

    Keys 0 … S−1 are the row's context tokens, keys S … S+Q−1 the block tokens. The whole of DFlash's
    correctness: context is seen iff it is in the anchor's document and strictly before the anchor; a block
    token iff it is in the same block (and not later, where the layer is causal); a window W further asks
    q_pos − k_pos < W with q_pos = anchor + slot. Closes over tensors and integers only, so that
    flex_attention compiles it once.
    """
    anchors_N, documents_N, documents_S = blocks.anchors_N, blocks.documents_N, blocks.context_documents_S
    size, context = blocks.block_size, blocks.context_documents_S.shape[0]

    def seen(q: Tensor, k: Tensor) -> Tensor:
        block = q // size
        anchor = anchors_N[block]
        in_context = k < context
        k_ctx = k.clamp(max=context - 1)
        k_blk = (k - context).clamp(min=0)
        from_context = (documents_S[k_ctx] == documents_N[block]) & (k_ctx < anchor)
        from_block = k_blk // size == block
        if causal:
            from_block = from_block & (k_blk <= q)
        visible = torch.where(in_context, from_context, from_block)
        if window is None:
            return visible
        k_row = torch.where(in_context, k_ctx, anchors_N[k_blk // size] + k_blk % size)
        return visible & (anchor + q % size - k_row < window)

    return seen


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """exp(−(k−1)/γ) for slots k = 1 … B−1, fp32 [B−1]."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def dpace_weights(ce: Tensor, valid: Tensor, floor: float) -> Tensor:
    """D-PACE weights W_k = Σ_{i≥k} P_i·valid_i, P_k = Π_{j≤k} s_j, s = (1−a)·exp(−CE) + a; detached.

    `ce` and `valid` are [n, B−1] for slots 1 … B−1; s is 1 and W is 0 at invalid slots. `floor` is a.
    """
    s = torch.where(valid, (1 - floor) * torch.exp(-ce.detach()) + floor, 1.0)
    reach = s.cumprod(dim=1) * valid
    tail = reach.flip(1).cumsum(dim=1).flip(1)
    return tail * valid


def add_noise(taps_ST: Tensor, kind: str, size: float, row: Row, key: tuple[int, ...]) -> Tensor:
    """Tapped features with noise U(−size, size) (`uniform`) or of deviation `size` (`gaussian`), training
    only.

    Like the anchors it depends on (seed, epoch, draw) and the row alone; never on rank or step.
    """
    seed = int(generator(row, (*key, 1)).integers(2**62))
    source = torch.Generator(taps_ST.device).manual_seed(seed)
    noise = torch.empty(taps_ST.shape, dtype=torch.float32, device=taps_ST.device)
    if kind == "uniform":
        noise.uniform_(-size, size, generator=source)
    else:
        assert kind == "gaussian", kind
        noise.normal_(0.0, size, generator=source)
    return (taps_ST.float() + noise).to(taps_ST.dtype)


def accepted_prefix(correct: Tensor) -> Tensor:
    """Σ_k Π_{j≤k} correct_j over slots 1 … B−1: drafts accepted of each block [n], the bonus token not
    counted.
    """
    return correct.long().cumprod(dim=1).sum(dim=1)
