"""Rows, blocks and runs for the tests of training's mathematics, beside the tiny targets of tiny.py."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from slipstream.config import TrainConfig
from slipstream.data.pack import Row
from slipstream.data.shards import TokenDataset
from slipstream.distributed.crew import ONE
from slipstream.distributed.link import TapFacts
from slipstream.distributed.placement import Plan
from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.models.target import Target
from slipstream.training.attention import fused_only
from slipstream.training.blocks import Blocks, anchor_candidates, decay_weights, make_blocks
from slipstream.training.flops import row_flops
from slipstream.training.loss import SlotWeights
from slipstream.training.run import Run
from tests.tiny import row_of

MASK = 130
LAYOUTS: dict[str, list[list[bool]]] = {
    "supervised from the first token": [[True] * 7, [True] * 5],
    "one-token documents": [[True], [True], [True, True, True], [True]],
    "fills the row": [[False, True, True, True, True, False, True, True]],
    "supervision touches the border": [[False, False, True, True], [True, True, True], [False, True, True]],
    "nothing supervised": [[False] * 5, [False] * 3],
    "never two in a row": [[True, False, True, False, True], [True]],
    "holes": [[True, True, False, True, True, True, False], [False, True, True, True, True, True]],
}
"""Supervision of each document, for the cases that have gone wrong in trainers."""

DEVICE = torch.device(os.environ.get("SLIPSTREAM_TEST_DEVICE", "cpu"))
"""Where the properties of target, drafter, attention and loss are tested: `make test-gpu` asks for cuda."""
if DEVICE.type == "cuda":
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # FLA's kernels take fp32 as TF32 by default: 1e-3, not 1e-5

documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6)


def supervised_row(masks: list[list[bool]], padding: int = 0, row_id: int = 0, vocab_size: int = MASK) -> Row:
    """Documents supervised as `masks` say, then padding; ids differ from place to place."""
    ends = torch.tensor([0, *map(len, masks)]).cumsum(0).tolist()
    ids = (torch.arange(ends[-1] + padding) * 37 + 11) % (vocab_size - 3) + 3
    row = row_of([ids[a:b] for a, b in itertools.pairwise(ends)], ends[-1] + padding, row_id=row_id)
    supervised = torch.tensor([bit for mask in masks for bit in mask] + [False] * padding)
    return replace(row, supervised=supervised)


def all_blocks(row: Row, block_size: int, spare: int = 0) -> Blocks:
    """Blocks at every anchor the row allows, and `spare` unused places."""
    anchors = anchor_candidates(row)
    return make_blocks(row, anchors, max(1, len(anchors) + spare), block_size, MASK).to(DEVICE)


def drafter_config(**changes: Any) -> DrafterConfig:
    """A drafter for the tiny targets; its heads and MLP are none of theirs."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "vocab_size": 131,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 96,
        "block_size": 5,
        "mask_token_id": MASK,
        "target_layer_ids": (0, 2, 4),
        "num_target_layers": 6,
        "rope_theta": 10000.0,
    }
    return DrafterConfig(**{**values, **changes})


def make_drafter(config: DrafterConfig, seed: int = 1) -> Drafter:
    """Random weights, norms not flat: a norm that is left out or taken twice shows."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drafter = Drafter(config)
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "layers" in name:
                parameter.mul_(1.5)
    return drafter.to(DEVICE)


def run_of(
    target: Target,
    drafter: Drafter,
    attention: str = "documents",
    slot_weights: SlotWeights | None = None,
    folder: Path = Path("nowhere"),
    rows: Any = None,
    heldout: Any = None,
    steps: int = 1,
    **config: Any,
) -> Run:
    """A run in fp32 on `DEVICE`; settings of `TrainConfig` by name. Rows are wanted by `train` only."""
    size = drafter.config.block_size
    settings = TrainConfig(
        **{"block_size": size, "max_anchors": 64, "noise": 0.0, "rows_per_step": 1, **config}
    )
    return Run(
        config=settings,
        folder=folder,
        device=DEVICE,
        dtype=torch.float32,
        crew=ONE,
        target=target,
        ends=target.ends,
        drafter=drafter,
        rows=rows,
        heldout=heldout,
        heldout_data=TokenDataset("heldout", np.zeros(0, int), "", None, None, (), {}, (), ()),
        taps=target.taps,
        heldout_taps=target.taps,
        plan=Plan(
            settings.seed,
            rows.count if rows is not None else 1,
            settings.rows_per_step or 1,
            settings.anchor_draws,
        ),
        steps=steps,
        attention=attention,
        flops=row_flops(drafter.config, 0),
        slot_weights=slot_weights or SlotWeights(decay_weights(size, 2.0).to(DEVICE)),
        facts=TapFacts("tiny", target.target_layer_ids, 0, "float32", 0, "tiny", "", 1, 0),
    )


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    """Gradients by name; zero where none came."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in drafter.named_parameters()
    }


def assert_close(ours: Tensor, reference: Tensor, relative: float) -> None:
    """Largest difference against the reference's largest value; exact where the reference is all zero."""
    assert ours.shape == reference.shape
    assert (ours - reference).abs().max() <= relative * reference.abs().max()


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    """Flex attention compiled alone, without a layer around it."""
    return torch.compile(fused_only, fullgraph=True, dynamic=False)
