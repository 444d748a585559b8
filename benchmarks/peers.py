"""PyPI speculators 0.9.0 and specforge 0.2.0 in the drafter benchmark: adapters, none of their code.

Both are called as their own trainers call them on one GPU, on the same taps, ids, documents and frozen
matrices as ours. What differs in meaning, and cannot be switched off:

- speculators projects slot 0 as well, and computes a teacher's logits for every slot (a third head product,
  no gradient): its labels are the teacher's arg-max; it has no mode that takes labels from the ids. A block
  may run into the next document; its mask keeps documents apart otherwise.
- specforge projects slot 0 as well and computes the logits a second time in the backward pass (three head
  products; two with `objective_chunk_blocks=0`, at the price of dense logits). It knows no documents in a
  row: in one row of S tokens a block sees every earlier document (more attention work), in a batch of one
  document a row it does not.

Sliding layers: speculators is asked for bidirectional blocks, as ours; specforge's are causal in the block.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from benchmarks.workload import Batch, Shape, System


def layer_config(shape: Shape, attention: str) -> Qwen3Config:
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        layer_types=list(shape.layer_types),
        use_sliding_window=shape.sliding_layers > 0,
        sliding_window=shape.window if shape.sliding_layers else None,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        pad_token_id=None,
    )
    config._attn_implementation = attention
    return config


def named_trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def held_by(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def speculators(shape: Shape, batch: Batch, loss: str) -> System:
    """Its trainer on one GPU: fp32 masters (frozen matrices too) under bf16 autocast, the whole forward
    compiled (its own decorator, on CUDA), CE with D-PACE weights (its defaults for DFlash), gradients dropped
    between forward and backward. `loss` is its `loss_implementation`: "fused" is its default, "eager" what
    runs where that does not compile.
    """
    # Its package reaches for its data loader, and with it clients of serving engines, for the name of a type.
    loader: Any = types.ModuleType("speculators.train.data")
    loader.BatchType = dict
    sys.modules["speculators.train.data"] = loader
    from speculators.models.dflash import (  # pyright: ignore
        DFlashDraftModel,
        DFlashSpeculatorConfig,
    )

    device = batch.device
    config = DFlashSpeculatorConfig(
        # flex has no backward on a CPU
        transformer_layer_config=layer_config(
            shape, "simple_flex_attention" if device.type == "cuda" else "eager"
        ),
        draft_vocab_size=shape.vocab,
        block_size=shape.block_size,
        aux_hidden_state_layer_ids=list(range(shape.taps)),
        mask_token_id=shape.mask_token_id,
        sliding_window_non_causal=True,
    )
    with device:
        model = DFlashDraftModel(config).train()
    frozen = (
        (model.embed_tokens, batch.embedding_VH),
        (model.lm_head, batch.head_VH),
        (model.verifier_lm_head, batch.head_VH),
    )
    for module, weight in frozen:
        module.weight.data.copy_(weight)
    settings, _ = model.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation=loss,
        max_anchors=shape.anchors,
        per_position_loss_weight="dpace",
    )
    inputs = {
        "hidden_states": batch.taps_ST[None],
        "input_ids": batch.row.input_ids[None].to(device),
        "loss_mask": batch.row.supervised[None].to(device),
        "verifier_last_hidden_states": batch.last_SH[None],
        "document_ids": batch.row.documents[None].to(device),
        "position_ids": batch.row.positions[None].to(device),
    }

    def step() -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            _, total, metrics = model(**inputs, **settings)
        model.zero_grad(set_to_none=True)
        total.backward()
        return total.detach(), metrics["full_acc_total"]

    told = f"fp32 masters, autocast, forward compiled, dense logits of drafter and teacher, {loss} CE"
    return System(step, named_trainable(model), held_by(model), told)


def specforge(shape: Shape, batch: Batch, fastest: bool) -> System:
    """Its trainer's model on one GPU, not wrapped for sharding: everything bf16 (fp32 masters live in its
    optimiser, which is not run), transformers' compiled flex attention, hard labels.

    Default: one row, the objective in chunks of 128 blocks, each recomputed. `fastest`: what its
    configuration offers for speed: Liger's norms and SwiGLU, dense logits, and a batch of one document a row.
    """
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel  # pyright: ignore
    from specforge.modeling.draft.dflash import DFlashDraftModel  # pyright: ignore
    from specforge.modeling.draft.dflash_kernels import (  # pyright: ignore
        DEFAULT_DFLASH_KERNELS,
        load_liger_dflash_kernels,
    )

    device = batch.device
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    config = layer_config(shape, attention)
    config.block_size, config.num_target_layers = shape.block_size, 64
    config.dflash_config = {
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(range(shape.taps)),
    }
    liger = fastest and device.type == "cuda"  # its kernels are Triton's
    with device:
        draft = DFlashDraftModel(config, load_liger_dflash_kernels() if liger else DEFAULT_DFLASH_KERNELS)
        head = nn.Linear(shape.hidden, shape.vocab, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        embedding = nn.Embedding(shape.vocab, shape.hidden, dtype=torch.bfloat16).requires_grad_(False)
    head.weight.data, embedding.weight.data = batch.head_VH, batch.embedding_VH
    rows = shape.documents if fastest else 1
    model = OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=head,
        target_embed_tokens=embedding,
        mask_token_id=shape.mask_token_id,
        block_size=shape.block_size,
        attention_backend=attention,
        num_anchors=shape.anchors // rows,
        objective_chunk_blocks=0 if fastest else 128,
    ).to(device=device, dtype=torch.bfloat16)
    inputs = {
        "input_ids": batch.row.input_ids.view(rows, -1).to(device),
        "hidden_states": batch.taps_ST.view(rows, shape.tokens // rows, -1),
        "loss_mask": batch.row.supervised.view(rows, -1).to(device),
    }

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad(set_to_none=True)
        loss, _, metrics = model(**inputs)
        loss.backward()
        return loss.detach(), metrics["accuracy_denom"]

    told = "bf16 parameters, flex compiled, "
    told += (
        "Liger norms and SwiGLU, dense logits, a document a row"
        if fastest
        else "head in recomputed chunks, one row"
    )
    return System(step, named_trainable(model), held_by(model), told)
