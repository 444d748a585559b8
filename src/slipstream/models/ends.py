"""What a drafter shares of its target, the embedding and the head, and reading these two without the layers.

The target itself, and what loading refuses of it, are target.py's.

Shapes: H hidden size · V vocabulary (rows of the embedding).
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from slipstream.config import UserError
from slipstream.models.families import family_of
from slipstream.models.fp8 import SCALE, WEIGHT
from slipstream.models.trunk import FULL


@dataclass(frozen=True)
class Head:
    """The target's frozen output head: logits = softcap·tanh(x·multiplier/softcap) of x = hidden Wᵀ + b."""

    weight_VH: Tensor
    bias_V: Tensor | None
    multiplier: float
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] after a final norm → [..., V], in the dtype of `hidden`, which must be the weight's."""
        return self.scale(F.linear(hidden, self.weight_VH, self.bias_V))

    def scale(self, product: Tensor) -> Tensor:
        """Multiplier and softcap on hidden Wᵀ + b of any slice of the vocabulary."""
        if self.multiplier != 1.0:
            product = product * self.multiplier
        if self.softcap is not None:
            product = self.softcap * torch.tanh(product / self.softcap)
        return product


@dataclass(frozen=True)
class TargetEnds:
    """All that drafting and the loss ask of a target beside its taps."""

    model_type: str
    """Of the text model, where a wrapper has several."""
    hidden_size: int
    vocab_size: int
    num_layers: int
    target_layer_ids: tuple[int, ...]
    rope_theta: float
    """Of full-attention layers, where kinds differ; 10000 if there is none."""
    input_embedding_scale: float
    max_position_embeddings: int
    embedding_VH: Tensor
    head: Head
    dtype: torch.dtype
    device: torch.device
    generation_config: GenerationConfig | None


def ends_of(model: PreTrainedModel, target_layer_ids: tuple[int, ...]) -> TargetEnds:
    """The ends of a model, its own tensors; `UserError` unless they are a plain table and matrix."""
    embedding, output = _embedding_and_head(model)
    config = model.config.get_text_config()
    facts = config.to_dict()
    family = family_of(facts["model_type"])
    rope = facts.get("rope_parameters") or {}
    return TargetEnds(
        model_type=facts["model_type"],
        hidden_size=config.hidden_size,
        vocab_size=embedding.weight.shape[0],
        num_layers=config.num_hidden_layers,
        target_layer_ids=target_layer_ids,
        rope_theta=float(rope.get(FULL, rope).get("rope_theta", 10000.0)),
        input_embedding_scale=float(family.embedding_scale(facts)),
        max_position_embeddings=config.max_position_embeddings,
        embedding_VH=embedding.weight,
        head=Head(
            output.weight,
            output.bias,
            float(family.logit_multiplier(facts)),
            facts.get("final_logit_softcapping"),
        ),
        dtype=embedding.weight.dtype,
        device=embedding.weight.device,
        generation_config=model.generation_config,
    )


def _embedding_and_head(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """The plain table and matrix that a drafter shares with its target; `UserError` for anything else."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    name = type(model).__name__
    if not isinstance(embedding, nn.Embedding) or not isinstance(output, nn.Linear):
        raise UserError(
            f"target: {name} has no plain embedding and head for a drafter to share: name another"
        )
    if embedding.weight.shape != output.weight.shape or not output.weight.is_floating_point():
        raise UserError(
            f"target: {name}'s embedding {tuple(embedding.weight.shape)} and head "
            f"{tuple(output.weight.shape)} are no pair of one shape in floating point: leave both unquantised"
        )
    return embedding, output


def blank_model(
    config: PreTrainedConfig, dtype: torch.dtype, attention: str | None = None
) -> PreTrainedModel:
    """The model that a folder with this configuration holds, on torch's meta device: shapes and no memory.

    An FP8 checkpoint's is the one its weights are dequantised into. Raises `ValueError` where the
    configuration is that of no causal LM.
    """
    plain = copy.deepcopy(config)
    plain.__dict__.pop("quantization_config", None)  # an attribute only where the file had it
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(plain, dtype=dtype, attn_implementation=attention)


def read_ends(
    path: str, config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The causal LM of a folder (or hub name) bare of all but its embedding and head, and the loading report.

    transformers itself looks for the two in the files, whatever they are called there; of other tensors
    nothing is read. It reads into a class that is the model's own but for a bare instance.
    """
    blank = blank_model(config, dtype)
    model_class: Any = type(blank)
    names = [name for name, _ in _bare(blank).named_parameters(remove_duplicate=False)]

    def init(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        model_class.__init__(self, config)
        _bare(self)

    scales = [name.removesuffix(WEIGHT) + SCALE for name in names]
    bare_class = type(
        model_class.__name__,
        (model_class,),
        {  # name and module are what transformers finds the checkpoint's renamings by
            "__module__": model_class.__module__,
            "__init__": init,
            "_keys_to_ignore_on_load_unexpected": [f"^(?!({'|'.join(map(re.escape, scales))})$)"],
        },
    )
    model, report = bare_class.from_pretrained(
        path, config=blank.config, dtype=dtype, output_loading_info=True
    )
    if scaled := sorted(report["unexpected_keys"]):
        raise UserError(
            f"{path}: {scaled[0]}: an embedding or a head in FP8 cannot be read without the layers: name a "
            "checkpoint with both in bf16, or give every rank the target"
        )
    return model, report


def _bare(model: PreTrainedModel) -> PreTrainedModel:
    """The model, left with its embedding, its head and the path to them."""
    ends = {*_embedding_and_head(model)}
    for parent in list(model.modules()):
        if parent in ends:
            continue
        for name, child in list(parent.named_children()):
            if ends.isdisjoint(child.modules()):
                delattr(parent, name)
        own = [*parent.named_parameters(recurse=False), *parent.named_buffers(recurse=False)]
        for name, _ in own:
            delattr(parent, name)
    return model
