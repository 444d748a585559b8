"""Where documents lie in a packed row, which are read together, and the two operations that mix tokens:
attention and recurrence.

Both keep documents apart by their starts. On a GPU they are the kernels of torch and of
flash-linear-attention; on a CPU, where tests run, their plain definitions. The convolution, which also mixes
tokens, is pointwise enough to be in fused.py.

Shapes: S tokens of a packed row · n heads (nq query, nkv key/value) · D head width · A value heads of a
linear layer, Dk and Dv widths of its heads · N chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.data.pack import Row

CHUNK = 64  # tokens that flash-linear-attention's kernels take at a time
Span = tuple[int, int]

# Documents share an unpacked sub-batch while its padding stays below this share of it. On a CPU, where 25 %
# cost a tenth of the speed, 10 % cost nothing measurable against no padding at all and need 40 % fewer
# passes.
MAX_PADDING = 0.1
# Sub-batches no longer than this are padded freely: a pass that short costs its overhead, not its tokens.
SHORT = 64


@dataclass(frozen=True)
class Layout:
    """Where documents lie in a row, on the device; padding is a document of its own."""

    ids_S: Tensor
    positions_S: Tensor
    spans: list[Span]
    starts: Tensor
    """int32, of each document, and S."""
    chunks_N2: Tensor
    """int32 (document, chunk in it) of every chunk of `CHUNK` tokens."""
    longest: int

    @classmethod
    def of(cls, row: Row, device: torch.device) -> Layout:
        """Nothing here waits for the device: the kernels of the row before may still be running."""
        size, spans = len(row.input_ids), row.spans()
        used = spans[-1][1] if spans else 0
        if used < size:
            spans = [*spans, (used, size)]
        chunks = [(d, c) for d, (start, end) in enumerate(spans) for c in range(-(-(end - start) // CHUNK))]

        def there(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

        return cls(
            there(row.input_ids),
            there(row.positions),
            spans,
            there(torch.tensor([start for start, _ in spans] + [size], dtype=torch.int32)),
            there(torch.tensor(chunks, dtype=torch.int32)),
            max(end - start for start, end in spans),
        )


def attend_by_document(
    q_SnD: Tensor, k_SnD: Tensor, v_SnD: Tensor, layout: Layout, window: int | None
) -> Tensor:
    """Causal attention [S, nq, D] within each document; a window counts the token itself."""
    if q_SnD.is_cuda:
        # The operator below torch.nn.attention.varlen, whose signature is another in every version.
        return torch.ops.aten._flash_attention_forward(
            q_SnD, k_SnD, v_SnD, layout.starts, layout.starts, layout.longest, layout.longest,
            0.0, True, False,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
        )[0]  # fmt: skip
    out = torch.empty_like(q_SnD)
    for start, end in layout.spans:
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (q_SnD, k_SnD, v_SnD))
        mask = None
        if window is not None:
            mask = q.new_ones(end - start, end - start, dtype=torch.bool).tril().triu(1 - window)
        seen = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        out[start:end] = seen[0].transpose(0, 1)
    return out


def delta_by_document(
    q_SnD: Tensor, k_SnD: Tensor, v_SAD: Tensor, g_SA: Tensor, beta_SA: Tensor, layout: Layout
) -> Tensor:
    """Gated delta rule [S, A, Dv] with a state for each document; a key head serves A/n value heads.

    State M [Dk, Dv]: M ← e^g M, then M ← M + β k (v − Mᵀk)ᵀ, out = Mᵀq/√Dk. Source: arXiv 2412.06464.
    """
    if q_SnD.is_cuda:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

        batch = (x[None] for x in (q_SnD, k_SnD, v_SAD, g_SA, beta_SA))
        out, _ = chunk_gated_delta_rule(*batch, cu_seqlens=layout.starts, chunk_indices=layout.chunks_N2)
        return out[0]
    out, groups = torch.empty_like(v_SAD), v_SAD.shape[1] // q_SnD.shape[1]
    q, k = (x.float().repeat_interleave(groups, dim=1) for x in (q_SnD, k_SnD))
    v, decay, beta = v_SAD.float(), g_SA.exp()[..., None, None], beta_SA[..., None]
    for start, end in layout.spans:
        state = v.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        for s in range(start, end):
            state = decay[s] * state
            change = beta[s] * (v[s] - torch.einsum("akv,ak->av", state, k[s]))
            state = state + k[s][:, :, None] * change[:, None]
            out[s] = torch.einsum("akv,ak->av", state, q[s]) * q.shape[2] ** -0.5
    return out


def group_spans(spans: list[Span], budget: int) -> list[list[Span]]:
    """Documents (start, end) → sub-batches of like length: longest first, padded size at most `budget`
    tokens (a longer document stands alone), padding at most `MAX_PADDING` of a sub-batch unless it is
    `SHORT`."""
    groups: list[list[Span]] = []
    longest = used = 0
    for span in sorted(spans, key=lambda s: (s[0] - s[1], s[0])):
        length = span[1] - span[0]
        padded = (len(groups[-1]) + 1) * longest if groups else 0
        wasteful = longest > SHORT and padded - used - length > MAX_PADDING * padded
        if not groups or padded > budget or wasteful:
            groups.append([])
            longest, used = length, 0
        groups[-1].append(span)
        used += length
    return groups
