"""Block attention in three ways of one predicate (training/blocks.py): compiled flex, dense by document,
dense.

`flex` is the GPU's: fused, its memory does not grow with queries × keys. `documents` is the CPU's (flex has
no backward there): dense attention over one document's blocks and context at a time, 10–30× less work than a
dense row of chats. `dense` is the oracle of both. A flex call that would not be fused is an error here,
never a slow success.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from slipstream.config import UserError
from slipstream.models.drafter import Attend, DrafterConfig
from slipstream.training.blocks import Blocks, visibility

TILE = 128
"""Side of flex's tiles; a tile that is seen in part asks the predicate for each of its pairs."""


def choose_attention(asked: str, device: torch.device, compiled: bool = True) -> str:
    """`flex`, `documents` or `dense` for this device. Raises `UserError` for what cannot train there."""
    if asked == "auto":
        return "flex" if device.type == "cuda" and compiled else "documents"
    if asked == "flex" and device.type != "cuda":
        raise UserError(
            "--attention flex: flex_attention has no backward on a CPU: use auto, documents or dense"
        )
    if asked == "flex" and not compiled:
        raise UserError(
            "--attention flex: uncompiled it would run dense: leave out --no-compile, or use documents"
        )
    if asked == "dense" and device.type == "cuda":
        raise UserError(
            "--attention dense: dense attention on a GPU grows with queries × keys "
            "(100 GiB at 8192 × 16384): use flex (or documents to debug without a compiler)"
        )
    return asked


FUSED: Any = {"BACKEND": "TRITON"}
"""Left to itself torch takes another kernel, meant for decoding, when there are fewer than 128 queries."""
SM_90: Any = FUSED | {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4, "bwd_num_stages": 2,
}  # fmt: skip
"""Tiles for 16-bit heads of 128 on an H100 or H200, in place of torch's own: the best that
benchmarks/kernels.py tries. On an H200 forward 0.55 against 0.62 ms; with the backward pass's, both 2.31
against 2.47.
"""


def tiles(q: Tensor) -> Any:
    """flex's kernel options for these queries."""
    known = q.is_cuda and q.shape[-1] == 128 and q.dtype.itemsize == 2
    return SM_90 if known and torch.cuda.get_device_capability(q.device) == (9, 0) else FUSED


def make_attend(kind: str, blocks: Blocks, config: DrafterConfig) -> Attend:
    """The attention function of one row's blocks, for `Drafter.forward`; `flex` wants compiled layers, which
    take it into their graph.
    """
    if kind == "flex":
        return flex_attend(blocks, config, fused_only)
    if kind == "documents":
        return documents_attend(blocks, config)
    assert kind == "dense", kind
    return dense_attend(blocks, config)


def dense_attend(blocks: Blocks, config: DrafterConfig) -> Attend:
    """Every query against every key of the row under a boolean mask: the oracle."""
    masks = {kind: dense_mask(blocks, config, kind) for kind in set(config.layer_types)}

    def attend(kind: str, q: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor) -> Tensor:
        k, v = torch.cat((k_ctx, k_blk), dim=1), torch.cat((v_ctx, v_blk), dim=1)
        return sdpa(q, k, v, masks[kind])

    return attend


def dense_mask(blocks: Blocks, config: DrafterConfig, layer_type: str) -> Tensor:
    """The predicate as a boolean matrix [Q, S+Q]."""
    device = blocks.anchors_N.device
    queries = blocks.anchors_N.shape[0] * blocks.block_size
    keys = blocks.context_documents_S.shape[0] + queries
    seen = visibility(blocks, config.window(layer_type), config.causal(layer_type))
    return seen(torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)[None, :])


def documents_attend(blocks: Blocks, config: DrafterConfig) -> Attend:
    """Dense attention one document at a time: queries, context and block keys of a document are three
    slices.
    """
    size, context, device = blocks.block_size, blocks.context_documents_S.shape[0], blocks.anchors_N.device
    spans, masks = [], {kind: [] for kind in set(config.layer_types)}
    for g in blocks.groups:
        ctx, blk = slice(g.context_start, g.context_end), slice(g.first_block * size, g.last_block * size)
        spans.append((ctx, blk))
        q = torch.arange(blk.start, blk.stop, device=device)
        k = torch.cat((torch.arange(ctx.start, ctx.stop, device=device), q + context))
        for kind, made in masks.items():
            made.append(visibility(blocks, config.window(kind), config.causal(kind))(q[:, None], k[None, :]))

    def attend(kind: str, q: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor) -> Tensor:
        out = []
        for (ctx, blk), mask in zip(spans, masks[kind], strict=True):
            k = torch.cat((k_ctx[:, ctx], k_blk[:, blk]), dim=1)
            v = torch.cat((v_ctx[:, ctx], v_blk[:, blk]), dim=1)
            out.append(sdpa(q[:, blk], k, v, mask))
        return torch.cat(out, dim=1)

    return attend


def sdpa(q_nQD: Tensor, k_nKD: Tensor, v_nKD: Tensor, mask_QK: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        q_nQD[None], k_nKD[None], v_nKD[None], attn_mask=mask_QK, enable_gqa=True
    )[0]


def flex_attend(blocks: Blocks, config: DrafterConfig, kernel: Callable[..., Tensor]) -> Attend:
    """Fused attention through `kernel`, a compiled `flex_attention`, with one block mask a layer type."""
    masks = {kind: flex_mask(blocks, config, kind) for kind in set(config.layer_types)}

    def attend(kind: str, q: Tensor, k_ctx: Tensor, v_ctx: Tensor, k_blk: Tensor, v_blk: Tensor) -> Tensor:
        k, v = torch.cat((k_ctx, k_blk), dim=1), torch.cat((v_ctx, v_blk), dim=1)
        return kernel(q[None], k[None], v[None], block_mask=masks[kind], enable_gqa=True)[0]

    return attend


def flex_mask(blocks: Blocks, config: DrafterConfig, layer_type: str) -> BlockMask:
    """The predicate as flex's block mask: tiles of 128 × 128 that are seen in part, or whole.

    `create_block_mask` does the same, but compiled it takes minutes for its first mask (its sort), and
    uncompiled seconds and gigabytes for each. Here one compiled kernel counts and torch sorts 64 × 128 tiles.
    """
    seen = visibility(blocks, config.window(layer_type), config.causal(layer_type))

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen(q, k)

    device = blocks.anchors_N.device
    queries = blocks.anchors_N.shape[0] * blocks.block_size
    keys = blocks.context_documents_S.shape[0] + queries
    count = compiled_tile_counts() if device.type == "cuda" else tile_counts
    counts_qk = count(seen, queries, keys, device)
    whole = counts_qk == TILE * TILE
    return BlockMask.from_kv_blocks(
        *_ordered((counts_qk > 0) & ~whole),
        *_ordered(whole),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )


def tile_counts(
    seen: Callable[[Tensor, Tensor], Tensor], queries: int, keys: int, device: torch.device
) -> Tensor:
    """Visible pairs in each tile [⌈Q/128⌉, ⌈(S+Q)/128⌉]; nothing is seen beyond the last query and key."""
    q = torch.arange(-(-queries // TILE) * TILE, device=device)[:, None]
    k = torch.arange(-(-keys // TILE) * TILE, device=device)[None, :]
    visible = seen(q.clamp(max=queries - 1), k.clamp(max=keys - 1)) & (q < queries) & (k < keys)
    return visible.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).sum((1, 3))


def _ordered(tiles_qk: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of a row are set [1, 1, q], and their columns first, in ascending order [1, 1, q, k]."""
    columns = tiles_qk.to(torch.int32).argsort(dim=1, descending=True, stable=True)
    return tiles_qk.sum(1).to(torch.int32)[None, None], columns.to(torch.int32)[None, None]


def fused_only(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    """`flex_attention` that refuses to run outside a compiled graph, where it would be dense."""
    if not torch.compiler.is_compiling():
        raise UserError(
            "attention: torch.compile is switched off in this process, so flex_attention would run dense "
            "(100 GiB at 8192 × 16384): unset TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE and force_eager"
        )
    out = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, kernel_options=tiles(q))
    assert isinstance(out, Tensor)
    return out


@contextlib.contextmanager
def loud_fallbacks() -> Iterator[None]:
    """Turns torch's end of patience with ever new shapes into one line. Without `fullgraph` it would go on
    uncompiled, and attention would run dense.
    """
    try:
        yield
    except FailOnRecompileLimitHit as e:
        raise UserError(
            "attention: torch compiled its limit of shapes and would go on uncompiled, where attention runs "
            "dense: keep --token-budget, --max-anchors and --block-size fixed in a process "
            f"({' '.join(str(e).split())[:160]})"
        ) from None


@functools.cache
def compiled_tile_counts() -> Callable[..., Tensor]:
    return torch.compile(tile_counts, fullgraph=True, dynamic=False)
