"""Random drafters and prompts for the tests of decoding, beside the tiny targets of tiny.py."""

from __future__ import annotations

import functools

import torch

from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.models.target import Target
from tests.tiny import tiny_target

TAPS = (0, 2, 4)
BLOCK = 6


@functools.cache
def target_of(family: str) -> Target:
    return Target(tiny_target(family), TAPS)


def drafter_of(target: Target, block_size: int = BLOCK, seed: int = 1, layers: int = 2) -> Drafter:
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        block_size=block_size,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=target.target_layer_ids,
        num_target_layers=target.num_layers,
        rope_theta=target.rope_theta,
        input_embedding_scale=target.input_embedding_scale,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.data.normal_(std=0.2)
    return drafter.requires_grad_(False)


def prompt_of(length: int, seed: int = 0, vocab_size: int = 131) -> list[int]:
    return torch.randint(3, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
