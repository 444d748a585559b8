"""The DFlash drafter: a small transformer that drafts a whole block of tokens in one pass.

It sees the target's tapped hidden states as context and the block's token embeddings as queries. Here live
its geometry (`DrafterConfig`), its forward pass over the packed blocks of training, and its cached pass of
decoding. Anchors, labels and the mask predicate are in training/blocks.py, the attention kernels in
training/attention.py, files in export/.

Shapes: S context tokens of a packed row · N blocks · B block size · Q = N·B block tokens · T taps · H hidden
size · n heads (nq query, nkv key/value) · D head width · F MLP width.

Source: arXiv 2602.06036; tensor names are those of the released checkpoints. Weights are fp32 masters; the
matrix work runs in the dtype of the activations that come in, norms and rotary embeddings in fp32. On a GPU
`use_gpu` compiles every layer as one graph and keeps a copy of the matrices in the working dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.config import UserError
from slipstream.models.parts import Linear, MasterProduct, RMSNorm, rotary, rotate

FULL, SLIDING = "full_attention", "sliding_attention"

# (layer_type, q [nq,Q,D], context k and v [nkv,S,D], block k and v [nkv,Q,D]) -> [nq,Q,D]
Attend = Callable[[str, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DrafterConfig:
    """Geometry of a drafter. Only `hidden_size` and `vocab_size` (and what taps exist) come from the
    target.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = False
    """Causality inside a block: False none, True every layer, None (an imported checkpoint) sliding layers
    only.
    """
    input_embedding_scale: float = 1.0
    max_position_embeddings: int = 40960

    def __post_init__(self) -> None:
        if not self.layer_types:
            kind = FULL if self.sliding_window is None else SLIDING
            object.__setattr__(self, "layer_types", (kind,) * self.num_layers)
        self._check()

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"drafter: {self.num_heads} heads cannot share {self.num_kv_heads} key/value heads: "
                "choose --kv-heads that divides --heads"
            )
        if self.head_dim % 2:
            raise UserError(
                f"drafter: head_dim {self.head_dim} is odd: rotary embeddings need an even --head-dim"
            )
        if self.block_size < 2:
            raise UserError(
                f"drafter: block size {self.block_size} drafts nothing: --block-size must be at least 2"
            )
        if len(self.layer_types) != self.num_layers:
            raise UserError(f"drafter: {len(self.layer_types)} layer types for {self.num_layers} layers")
        if SLIDING in self.layer_types and (
            self.sliding_window is None or self.sliding_window < self.block_size
        ):
            raise UserError(
                f"drafter: sliding window {self.sliding_window} is smaller than a block of "
                f"{self.block_size}: raise --sliding-window"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"drafter: mask token {self.mask_token_id} is not a row of the embedding "
                f"(0 to {self.vocab_size - 1}): give an existing, unused one with --mask-token-id"
            )
        for tap in self.target_layer_ids:
            if not 0 <= tap < self.num_target_layers - 1:
                raise UserError(
                    f"drafter: tap {tap} is out of range: layers 0 to {self.num_target_layers - 2} of this "
                    "target can be read (never the last); mend --target-layer-ids"
                )
        if not self.target_layer_ids or list(self.target_layer_ids) != sorted(set(self.target_layer_ids)):
            raise UserError(f"drafter: taps {list(self.target_layer_ids)} must be ascending and distinct")

    def causal(self, layer_type: str) -> bool:
        """Whether layers of this type are causal inside a block."""
        return layer_type == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer_type: str) -> int | None:
        return self.sliding_window if layer_type == SLIDING else None

    def check_against_target(self, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """What must match the target; everything else is the drafter's own. Raises `UserError`."""
        for name, mine, theirs in (
            ("hidden size", self.hidden_size, hidden_size),
            ("vocabulary", self.vocab_size, vocab_size),
            ("number of target layers", self.num_target_layers, num_layers),
        ):
            if mine != theirs:
                raise UserError(
                    f"drafter: its {name} is {mine}, the target's is {theirs}: "
                    "this drafter was made for another target"
                )


def default_heads(hidden_size: int) -> tuple[int, int, int]:
    """(query heads, key/value heads, head width) when nothing is asked for. Never the target's own."""
    if hidden_size >= 2048:
        return 32, 8, 128
    heads = max(1, round(hidden_size / 64))
    divisors = [d for d in range(1, heads + 1) if heads % d == 0]
    return heads, min(divisors, key=lambda d: (abs(d - heads / 3), d)), 64


def default_intermediate(hidden_size: int) -> int:
    return -(-3 * hidden_size // 256) * 256


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.kv_copy: Tensor | None = None
        """Working copies of k_proj and v_proj below one another: one product for both."""

    def split(self, x_PC: Tensor) -> Tensor:
        return x_PC.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

    def keys_values(self, x_PH: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed per head, rotated) and values [nkv, P, D] of context or block tokens: the same
        weights.
        """
        if self.kv_copy is None:
            k_PC, v_PC = self.k_proj(x_PH), self.v_proj(x_PH)
        else:
            kv_PC = MasterProduct.apply(x_PH, self.kv_copy, self.k_proj.weight, self.v_proj.weight)
            assert isinstance(kv_PC, Tensor)
            k_PC, v_PC = kv_PC.chunk(2, dim=-1)
        return rotate(self.k_norm(self.split(k_PC)), cos_PD, sin_PD), self.split(v_PC)

    def queries(self, x_QH: Tensor, cos_QD: Tensor, sin_QD: Tensor) -> Tensor:
        return rotate(self.q_norm(self.split(self.q_proj(x_QH))), cos_QD, sin_QD)

    def merge(self, out_nQD: Tensor) -> Tensor:
        return self.o_proj(out_nQD.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig, layer_type: str) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x_QH: Tensor,
        ctx_SH: Tensor,
        block_rope: tuple[Tensor, Tensor],
        ctx_rope: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        h = self.input_layernorm(x_QH)
        q = self.self_attn.queries(h, *block_rope)
        k_ctx, v_ctx = self.self_attn.keys_values(ctx_SH, *ctx_rope)
        k_blk, v_blk = self.self_attn.keys_values(h, *block_rope)
        x_QH = x_QH + self.self_attn.merge(attend(self.layer_type, q, k_ctx, v_ctx, k_blk, v_blk))
        return x_QH + self.mlp(self.post_attention_layernorm(x_QH))


@dataclass
class ContextCache:
    """Keys and values of the context tokens, per layer [nkv, max_tokens, D]; block tokens never enter it."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0


class Drafter(nn.Module):
    """The trainable part: no embedding and no head of its own, these are the target's frozen ones."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.checkpoint_layers = False
        """Keep a layer's input only and compute the layer again in the backward pass."""
        self._compiled: _Compiled | None = None
        self.register_load_state_dict_post_hook(lambda *_: self.refresh())

    def use_gpu(self, dtype: torch.dtype, compiled: bool) -> None:
        """Working copies of the matrices in `dtype`, and each layer compiled as one graph (two graphs where
        layer types differ), so that nothing but matrix products and one attention kernel touches memory
        twice. Call it once the weights are on their device.
        """
        if dtype != self.fc.weight.dtype:
            for linear in self.linears():
                linear.copy = torch.empty_like(linear.weight, dtype=dtype, requires_grad=False)
            for layer in self.stack():
                attn = layer.self_attn
                attn.kv_copy = torch.cat([p.weight.detach().to(dtype) for p in (attn.k_proj, attn.v_proj)])
                attn.k_proj.copy, attn.v_proj.copy = attn.kv_copy.chunk(2)
            self.refresh()
        if compiled:
            self._compiled = _Compiled(
                torch.compile(Drafter.context, fullgraph=True, dynamic=False),
                torch.compile(Layer.forward, fullgraph=True, dynamic=False),
                torch.compile(RMSNorm.forward, fullgraph=True, dynamic=False),
            )

    def use_shards(self, compiled: bool) -> None:
        """Call the layers as modules, whose hooks gather a layer's shards and put them away; with `compiled`
        what lies between the hooks is one graph. Gathered weights are in the working dtype: no copies.
        """
        pieces = PLAIN
        if compiled:
            forward = torch.compile(Layer.forward, fullgraph=True, dynamic=False)
            for layer in self.stack():
                object.__setattr__(layer, "forward", MethodType(forward, layer))
            pieces = _Compiled(
                torch.compile(Drafter.context, fullgraph=True, dynamic=False),
                PLAIN.layer,
                torch.compile(RMSNorm.forward, fullgraph=True, dynamic=False),
            )
        self._compiled = replace(pieces, layer=Layer.__call__)

    @property
    def working_dtype(self) -> torch.dtype:
        """What decoding multiplies in: the dtype of the working copies or, without them, of the weights."""
        return (self.fc.weight if self.fc.copy is None else self.fc.copy).dtype

    def linears(self) -> list[Linear]:
        return [module for module in self.modules() if isinstance(module, Linear)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters into the working copies: after every change of the masters. A fused optimiser
        does not raise a tensor's version, so nothing here could notice by itself.
        """
        pairs = [(linear.copy, linear.weight) for linear in self.linears() if linear.copy is not None]
        if pairs:
            copies, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, masters)  # pyright: ignore[reportPrivateImportUsage]

    def stack(self) -> Iterator[Layer]:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    def context(self, taps: Tensor) -> Tensor:
        """hidden_norm(fc(taps)) of tapped features [..., T·H] → [..., H]; shared by all layers, never
        updated.
        """
        return self.hidden_norm(self.fc(taps))

    def forward(
        self,
        taps_ST: Tensor,
        ctx_positions_S: Tensor,
        x_QH: Tensor,
        block_positions_Q: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Normed hidden states [Q, H] of all blocks of a packed row; the head is applied by the loss.

        `taps_ST` [S, T·H] and the block embeddings `x_QH` [Q, H] share the dtype the matrix work runs in.
        """
        run = self._compiled or PLAIN
        cfg = self.config
        ctx_SH = run.context(self, taps_ST)
        ctx_rope = rotary(ctx_positions_S, cfg.head_dim, cfg.rope_theta)
        block_rope = rotary(block_positions_Q, cfg.head_dim, cfg.rope_theta)
        for layer in self.stack():
            x_QH = self.run_layer(layer, x_QH, ctx_SH, block_rope, ctx_rope, attend)
        return run.norm(self.norm, x_QH)

    def run_layer(self, layer: Layer, x_QH: Tensor, ctx_SH: Tensor, *rest: Any) -> Tensor:
        """`Layer.forward` of one of the layers, compiled and checkpointed as this drafter is set."""
        run = (self._compiled or PLAIN).layer
        if not (self.checkpoint_layers and torch.is_grad_enabled()):
            return run(layer, x_QH, ctx_SH, *rest)
        out = checkpoint(run, layer, x_QH, ctx_SH, *rest, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(out, Tensor)
        return out

    def new_context(self, max_tokens: int) -> ContextCache:
        cfg, like = self.config, self.fc.weight
        shape, dtype = (cfg.num_kv_heads, max_tokens, cfg.head_dim), self.working_dtype
        return ContextCache(
            keys=[like.new_empty(shape, dtype=dtype) for _ in range(cfg.num_layers)],
            values=[like.new_empty(shape, dtype=dtype) for _ in range(cfg.num_layers)],
        )

    def extend_context(self, cache: ContextCache, taps_nT: Tensor) -> None:
        """Append n context tokens, given by their taps [n, T·H], at positions length … length+n−1."""
        start, end = cache.length, cache.length + taps_nT.shape[0]
        assert end <= cache.keys[0].shape[1], "the context cache is full"
        ctx_nH = self.context(taps_nT.to(self.working_dtype))
        positions = torch.arange(start, end, device=ctx_nH.device)
        rope = rotary(positions, self.config.head_dim, self.config.rope_theta)
        for i, layer in enumerate(self.stack()):
            cache.keys[i][:, start:end], cache.values[i][:, start:end] = layer.self_attn.keys_values(
                ctx_nH, *rope
            )
        cache.length = end

    def draft(self, cache: ContextCache, embeds_BH: Tensor) -> Tensor:
        """Normed hidden states [B, H] of one block whose anchor sits at position `cache.length`.

        The block's own keys and values are dropped: after acceptance the target's features take their place.
        """
        cfg, block = self.config, embeds_BH.shape[0]
        x_BH = embeds_BH.to(self.working_dtype)
        positions = torch.arange(cache.length, cache.length + block, device=x_BH.device)
        rope = rotary(positions, cfg.head_dim, cfg.rope_theta)
        for i, layer in enumerate(self.stack()):
            h = layer.input_layernorm(x_BH)
            q = layer.self_attn.queries(h, *rope)
            k_blk, v_blk = layer.self_attn.keys_values(h, *rope)
            k = torch.cat((cache.keys[i][:, : cache.length], k_blk), dim=1)
            v = torch.cat((cache.values[i][:, : cache.length], v_blk), dim=1)
            mask = decode_mask(
                cache.length, block, cfg.window(layer.layer_type), cfg.causal(layer.layer_type), x_BH.device
            )
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[
                0
            ]
            x_BH = x_BH + layer.self_attn.merge(out)
            x_BH = x_BH + layer.mlp(layer.post_attention_layernorm(x_BH))
        return self.norm(x_BH)


@dataclass(frozen=True)
class _Compiled:
    """The three pieces of the forward pass, compiled or plain."""

    context: Callable[[Drafter, Tensor], Tensor]
    layer: Callable[..., Tensor]
    norm: Callable[[RMSNorm, Tensor], Tensor]


PLAIN = _Compiled(Drafter.context, Layer.forward, RMSNorm.forward)


def decode_mask(
    length: int, block: int, window: int | None, causal: bool, device: torch.device
) -> Tensor | None:
    """Visibility [B, length+B] of one block behind `length` context tokens; None when everything is
    visible.
    """
    if not causal and (window is None or length + block <= window):
        return None
    q = torch.arange(length, length + block, device=device)[:, None]
    k = torch.arange(length + block, device=device)[None, :]
    seen = k <= q if causal else torch.ones_like(k <= q)
    return seen if window is None else seen & (q - k < window)
