"""The fused target pass: the decoder's layers up to the last tap, over a packed row, documents apart.

Reads the stock model's weights. Projections of one input are merged into one matrix, and the stock modules
then look at slices of it: nothing is held twice and the stock model works as before. What lies between matrix
products is in fused.py, on a GPU compiled or as kernels of fused_kernels.py, and in documents.py (attention,
recurrence). Which families this knows is in families.py, the choice between this pass and the stock one in
target.py, the proof at start-up in selfcheck.py.

Shapes: S tokens of a packed row, padding included · T taps · H hidden size · n heads (nq query, nkv
key/value) · D head width · C columns of a merged product · A value heads of a linear layer · W width of its
convolution · I, O features of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.data.pack import Row
from slipstream.models import fused
from slipstream.models.documents import Layout, attend_by_document, delta_by_document
from slipstream.models.families import TrunkFacts
from slipstream.models.fp8 import Fp8Weight, fits_fp8, fp8_matmul, quantize_weight
from slipstream.models.fused import Operand

P = ParamSpec("P")
R = TypeVar("R")
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class Weight:
    """A matrix of the trunk; where it is quantised, products are made in FP8."""

    plain_OI: Tensor
    quantised: Fp8Weight | None


@dataclass(frozen=True)
class TrunkAttention:
    inputs: Weight
    """q (a gate behind each head's query, in families that have one) | k | v."""
    output: Weight
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    window: int | None


@dataclass(frozen=True)
class Delta:
    inputs: Weight
    """q | k | v | z, and b | a unless they are in `gates_OI`."""
    gates_OI: Tensor | None
    """b | a where `inputs` is quantised: decays are too sensitive for 8 bits."""
    output: Weight
    conv_WC: Tensor
    decay_A: Tensor
    dt_bias_A: Tensor
    norm_D: Tensor


@dataclass(frozen=True)
class TrunkLayer:
    norm_H: Tensor
    mixer: TrunkAttention | Delta
    mlp_norm_H: Tensor
    gate_up: Weight
    down: Weight

    def weights(self) -> tuple[Weight, ...]:
        """In the order of their products."""
        return self.mixer.inputs, self.mixer.output, self.gate_up, self.down


def why_not_fused(
    facts: TrunkFacts | None,
    config: dict[str, Any],
    decoder: nn.Module,
    dtype: torch.dtype,
    fp8: bool,
    on_gpu: bool,
    fla: bool,
) -> str | None:
    """None where a model (its text config as a dict) can be read by a `Trunk`, else the reason why not; on a
    GPU or a CPU, with flash-linear-attention or without. Whether the GPU has FP8 products is not asked.
    """
    if facts is None:
        return f"{config['model_type']} is not among the families that the fused pass knows"
    kinds = {*_layer_types(config)}
    if config["hidden_act"] != "silu" or not kinds <= {FULL, SLIDING, LINEAR}:
        return f"layers of kind {' '.join(sorted(kinds))}, {config['hidden_act']} are unknown to it"
    rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        return f"rotary embeddings of type {rope} change with the longest document of a row"
    for name, module in decoder.named_modules():
        if "proj" not in (own := name.rpartition(".")[2]):
            continue
        if type(module) is not nn.Linear or module.bias is not None or module.weight.dtype != dtype:
            return f"{name} is no plain projection without bias in {dtype}"
        if fp8 and own not in ("in_proj_a", "in_proj_b") and not fits_fp8(module.weight):
            return f"FP8 needs sides that are multiples of 16, {name} is {tuple(module.weight.shape)}"
    if not on_gpu:
        return None
    if dtype not in (torch.bfloat16, torch.float16) or _head_dim(config) % 8 or _head_dim(config) > 256:
        return f"attention kernels take 16-bit heads of up to 256, not {dtype} of {_head_dim(config)}"
    if LINEAR in kinds and not fla:
        return "linear attention needs flash-linear-attention: pip install 'slipstream[gpu]'"
    return None


def _layer_types(config: dict[str, Any]) -> list[str]:
    return config.get("layer_types") or [FULL] * config["num_hidden_layers"]


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


class Trunk:
    """The layers up to the last tap, ready to read rows. Merges weights of `decoder` in place (see above)."""

    def __init__(
        self,
        decoder: nn.Module,
        layers: nn.ModuleList,
        facts: TrunkFacts,
        config: dict[str, Any],
        target_layer_ids: tuple[int, ...],
        fp8: bool = False,
    ) -> None:
        self.embedding_VH: Tensor = decoder.get_submodule("embed_tokens").get_parameter("weight")
        self.rotary = decoder.get_submodule("rotary_emb")
        self.facts, self.config, self.fp8 = facts, config, fp8
        self.eps: float = config["rms_norm_eps"]
        self.head_dim, self.heads = _head_dim(config), config["num_attention_heads"]
        self.tap_ids = target_layer_ids
        kinds = _layer_types(config)
        self.layers = [self._layer(layers[i], kinds[i]) for i in range(target_layer_ids[-1] + 1)]
        device = self.embedding_VH.device
        self._add_norm = _for_device(fused.add_norm, device)
        self._swiglu = _for_device(fused.swiglu, device)
        self._attention_inputs = _for_device(fused.attention_inputs, device)
        self._gated_heads = _for_device(fused.gated_heads, device)
        self._delta_inputs = _for_device(fused.delta_inputs, device)
        self._gated_norm = _for_device(fused.gated_norm, device)
        if device.type == "cuda":
            self._take_kernels(LINEAR in kinds)

    def _take_kernels(self, linear: bool) -> None:
        """Triton's kernels in place of compiled functions, where heads and widths suit them: no other reason
        brings the compiled ones back, a kernel that fails raises.
        """
        from slipstream.models import fused_kernels as kernels

        if kernels.fits_row(self.embedding_VH.shape[1]):
            self._add_norm = kernels.add_norm
        if kernels.fits_row(self.layers[0].down.plain_OI.shape[1]):
            self._swiglu = kernels.swiglu
        if linear:
            key_dim, value_dim = self.config["linear_key_head_dim"], self.config["linear_value_head_dim"]
            if kernels.fits_heads(self.config["linear_num_value_heads"], value_dim):
                self._gated_norm = kernels.gated_norm
            if kernels.fits_delta(key_dim, value_dim):
                self._delta_inputs = kernels.delta_inputs

    def _weight(self, merged_OI: Tensor) -> Weight:
        return Weight(merged_OI, quantize_weight(merged_OI) if self.fp8 else None)

    def _norm_weight(self, module: nn.Module, name: str, offset: float) -> Tensor:
        return module.get_parameter(name + ".weight").detach().float() + offset

    def _layer(self, layer: nn.Module, kind: str) -> TrunkLayer:
        offset = self.facts.norm_offset
        return TrunkLayer(
            self._norm_weight(layer, "input_layernorm", offset),
            self._delta(layer) if kind == LINEAR else self._attention(layer, kind),
            self._norm_weight(layer, "post_attention_layernorm", offset),
            self._weight(merge(layer, "mlp.gate_proj", "mlp.up_proj")),
            self._weight(merge(layer, "mlp.down_proj")),
        )

    def _attention(self, layer: nn.Module, kind: str) -> TrunkAttention:
        q_norm = k_norm = None
        if self.facts.head_norm:
            q_norm = self._norm_weight(layer, "self_attn.q_norm", self.facts.norm_offset)
            k_norm = self._norm_weight(layer, "self_attn.k_norm", self.facts.norm_offset)
        return TrunkAttention(
            self._weight(merge(layer, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            self._weight(merge(layer, "self_attn.o_proj")),
            q_norm,
            k_norm,
            self.config["sliding_window"] if kind == SLIDING else None,
        )

    def _delta(self, layer: nn.Module) -> Delta:
        mixer = layer.get_submodule("linear_attn")
        merged_OI = merge(mixer, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        main, gates = len(merged_OI) - 2 * self.config["linear_num_value_heads"], None
        if self.fp8:
            merged_OI, gates = merged_OI[:main], merged_OI[main:]
        return Delta(
            self._weight(merged_OI),
            gates,
            self._weight(merge(mixer, "out_proj")),
            mixer.get_parameter("conv1d.weight").detach().float()[:, 0].T.contiguous(),
            -mixer.get_parameter("A_log").detach().float().exp(),
            mixer.get_parameter("dt_bias").detach().float(),
            self._norm_weight(mixer, "norm", 0.0),
        )

    @torch.no_grad()
    def taps(self, row: Row) -> Tensor:
        """[S, T·H] as `Target.taps` gives them: zeros at padding, no layer after the last tap run.

        Nothing waits for the device. Rows of one length S share their kernels; another S compiles again.
        """
        layout = Layout.of(row, self.embedding_VH.device)
        used, width = int((row.documents >= 0).sum()), self.embedding_VH.shape[1]
        taps_SC = self.embedding_VH.new_zeros(len(row.input_ids), len(self.tap_ids) * width)
        residual_SH = F.embedding(layout.ids_S, self.embedding_VH)
        positions = layout.positions_S[None]
        if self.facts.position_axes > 1:
            positions = positions.expand(self.facts.position_axes, 1, -1)
        cos, sin = self.rotary(residual_SH[None], positions)
        rope = cos[0], sin[0]
        pending: Tensor | None = None  # what the residual still lacks
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mixer, Delta):
                x = self._delta_rule(layer.norm_H, layer.mixer, residual_SH, pending, layout)
            else:
                x = self._attend(layer.norm_H, layer.mixer, residual_SH, pending, layout, rope)
            pending = self._add_product(residual_SH, x, layer.mixer.output)
            gate_up = self._product(self._norm(residual_SH, pending, layer.mlp_norm_H), layer.gate_up)
            x = self._swiglu(gate_up, self.fp8)
            del gate_up  # a quarter of the pass's memory
            pending = self._add_product(residual_SH, x, layer.down)
            if i in self.tap_ids:
                t = self.tap_ids.index(i)
                tap = taps_SC[:used, t * width : (t + 1) * width]
                if pending is None:
                    tap.copy_(residual_SH[:used])
                else:
                    torch.add(residual_SH[:used], pending[:used], out=tap)
        return taps_SC

    def _norm(
        self, residual_SH: Tensor, pending: Tensor | None, weight_H: Tensor, both: bool = False
    ) -> Operand:
        return self._add_norm(residual_SH, pending, weight_H, self.eps, both or not self.fp8, self.fp8)

    def _product(self, x: Operand, weight: Weight) -> Tensor:
        if weight.quantised is None:
            assert x.plain_SI is not None
            return F.linear(x.plain_SI, weight.plain_OI)
        assert x.rows8_SI is not None
        assert x.scale_S is not None
        return fp8_matmul(x.rows8_SI, x.scale_S, weight.quantised, weight.plain_OI.dtype)

    def _add_product(self, residual_SH: Tensor, x: Operand, weight: Weight) -> Tensor | None:
        """Adds x Wᵀ to the residual, or returns it for the next norm to add: an FP8 product cannot add."""
        if weight.quantised is None:
            assert x.plain_SI is not None
            residual_SH.addmm_(x.plain_SI, weight.plain_OI.T)
            return None
        return self._product(x, weight)

    def _attend(
        self,
        norm_H: Tensor,
        w: TrunkAttention,
        residual_SH: Tensor,
        pending: Tensor | None,
        layout: Layout,
        rope: tuple[Tensor, Tensor],
    ) -> Operand:
        mixed_SC = self._product(self._norm(residual_SH, pending, norm_H), w.inputs)
        kv = self.config["num_key_value_heads"] * self.head_dim
        q_SC, k_SC, v_SC = mixed_SC.split((mixed_SC.shape[1] - 2 * kv, kv, kv), dim=1)
        q, gate = q_SC.unflatten(1, (self.heads, -1)), None
        if self.facts.query_gate:
            q, gate = q.chunk(2, dim=-1)
        k, v = (x.unflatten(1, (-1, self.head_dim)) for x in (k_SC, v_SC))
        q, k = self._attention_inputs(q, k, w.q_norm_D, w.k_norm_D, self.eps, *rope)
        return self._gated_heads(attend_by_document(q, k, v, layout, w.window), gate, self.fp8)

    def _delta_rule(
        self, norm_H: Tensor, w: Delta, residual_SH: Tensor, pending: Tensor | None, layout: Layout
    ) -> Operand:
        config = self.config
        key_heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        x = self._norm(residual_SH, pending, norm_H, both=True)
        mixed_SC = self._product(x, w.inputs)
        conv, z = w.conv_WC.shape[1], value_heads * value_dim
        if w.gates_OI is None:
            gates = mixed_SC[:, conv + z :]
        else:
            assert x.plain_SI is not None
            gates = F.linear(x.plain_SI, w.gates_OI)
        del x
        inputs = self._delta_inputs(
            mixed_SC[:, :conv],
            gates,
            layout.positions_S,
            w.conv_WC,
            w.decay_A,
            w.dt_bias_A,
            key_heads,
            key_dim,
        )
        out_SAD = delta_by_document(*inputs, layout)
        del inputs
        z_SAD = mixed_SC[:, conv : conv + z].unflatten(1, (value_heads, value_dim))
        return self._gated_norm(out_SAD, z_SAD, w.norm_D, self.eps, self.fp8)


def _for_device(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    return torch.compile(function, fullgraph=True) if device.type == "cuda" else function


def merge(module: nn.Module, *names: str) -> Tensor:
    """The weights of these projections below one another, [ΣO, I]; the projections become slices of it."""
    weights = [module.get_parameter(name + ".weight") for name in names]
    if len(weights) == 1:
        return weights[0].detach()
    merged_OI = torch.cat([w.detach() for w in weights])
    for weight, part in zip(weights, merged_OI.split([len(w) for w in weights]), strict=True):
        weight.data = part
    return merged_OI
