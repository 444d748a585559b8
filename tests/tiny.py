"""Tiny random targets and rows for the tests: seconds on a CPU, no hub, the same weights every time.

`tiny_target("qwen3")` is a model; `tiny_target("qwen3", folder)` saves it and returns the folder. Weights
are larger than a fresh model's and norm weights are not flat, so that attention is peaked, documents really
differ, and a norm of the (1+w) kind read as w shows. Tokenizers and chats are not here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from slipstream.data.pack import Row

FAMILIES = ("qwen3", "llama", "hybrid", "gemma3")
PAD, BOS, EOS = 0, 1, 2


def tiny_config(
    family: str, vocab_size: int = 131, hidden_size: int = 64, layers: int = 6, tie: bool = False
) -> PreTrainedConfig:
    """Config of a tiny target. Families: qwen3, llama, hybrid (Qwen3.5 text), gemma3 (text), granite."""
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": tie,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if family == "qwen3":
        return Qwen3Config(**common, rope_parameters=rope)
    if family == "llama":
        return LlamaConfig(**common, rope_parameters=rope)
    if family == "granite":
        scales = {"logits_scaling": 3.0, "embedding_multiplier": 5.0, "attention_multiplier": 0.25}
        head_dim = common.pop("head_dim")
        assert head_dim == hidden_size // common["num_attention_heads"]
        return GraniteConfig(**common, **scales, residual_multiplier=0.5, rope_parameters=rope)
    if family == "gemma3":
        return Gemma3TextConfig(
            **common,
            sliding_window=8,
            layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
            query_pre_attn_scalar=16,
            final_logit_softcapping=5.0,
        )
    assert family == "hybrid", f"no tiny family {family!r}"
    return Qwen3_5TextConfig(
        **common,
        layer_types=["linear_attention" if i % 3 != 2 else "full_attention" for i in range(layers)],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        rope_parameters={**rope, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    )


def tiny_target(
    family: str,
    path: str | Path | None = None,
    *,
    vocab_size: int = 131,
    hidden_size: int = 64,
    layers: int = 6,
    tie: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A random frozen causal LM of the family; with `path` it is saved and the folder's name returned."""
    config = tiny_config(family, vocab_size, hidden_size, layers, tie)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv" not in name:
                parameter.normal_(std=0.12)
            elif "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model = model.to(dtype).eval().requires_grad_(False)
    if path is None:
        return model
    model.save_pretrained(str(path))
    return str(path)


def random_row(
    lengths: tuple[int, ...], row_tokens: int, vocab_size: int = 131, seed: int = 0, prompt: int = 0
) -> Row:
    """A row of random documents of these lengths, then padding; the first `prompt` tokens are no labels."""
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(3, vocab_size, (n,), generator=generator) for n in lengths]
    return row_of(documents, row_tokens, prompt)


def row_of(documents: list[torch.Tensor], row_tokens: int, prompt: int = 0, row_id: int = 0) -> Row:
    """A row of these documents (int64 ids), then padding."""
    used = sum(len(d) for d in documents)
    assert used <= row_tokens, f"{used} tokens do not fit a row of {row_tokens}"
    ids, positions, owner = (torch.zeros(row_tokens, dtype=torch.int64) for _ in range(3))
    supervised = torch.zeros(row_tokens, dtype=torch.bool)
    owner.fill_(-1)
    start = 0
    for index, document in enumerate(documents):
        end = start + len(document)
        ids[start:end] = document
        positions[start:end] = torch.arange(len(document))
        owner[start:end] = index
        supervised[min(start + prompt, end) : end] = True
        start = end
    return Row(row_id, ids, positions, owner, supervised)
