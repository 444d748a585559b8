"""The way a GPU trains, from tokens to hidden states: nothing of the future, nothing of another document."""

from dataclasses import replace

import pytest
import torch

from slipstream.models.drafter import FULL, SLIDING, Drafter, DrafterConfig
from slipstream.models.target import Target
from slipstream.training.blocks import decay_weights, draw_anchors
from slipstream.training.loss import SlotWeights
from slipstream.training.step import row_loss
from tests.gpu.test_trunk_gpu import model_of
from tests.tiny import random_row
from tests.training import run_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ANCHORS = 24
LENGTHS = (70, 1, 60, 45)


@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_a_block_hangs_on_its_document_up_to_its_anchor_and_on_nothing_else(family):
    """Fused target, compiled flex, bf16: blocks that may not know of a changed token stay equal to a bit."""
    target = Target(model_of(family, torch.bfloat16), (0, 2, 4))
    assert target.isolation == "fused", target.why_stock
    torch.manual_seed(0)
    config = DrafterConfig(
        hidden_size=256, vocab_size=target.vocab_size, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
        intermediate_size=512, block_size=8, mask_token_id=target.vocab_size - 1, target_layer_ids=(0, 2, 4),
        num_target_layers=6, rope_theta=1e4, layer_types=(SLIDING, FULL), sliding_window=32, is_causal=None,
    )  # fmt: skip
    drafter = Drafter(config).to(CUDA)
    drafter.use_gpu(torch.bfloat16, compiled=True)
    weights = SlotWeights(decay_weights(8, 4.0).to(CUDA))
    run = run_of(target, drafter, "flex", weights, max_anchors=ANCHORS)
    run = replace(run, device=CUDA, dtype=torch.bfloat16)
    row = random_row(LENGTHS, 256)
    anchors, caught = draw_anchors(row, ANCHORS, (0, 0, 0)), []
    drafter.register_forward_hook(lambda module, args, out: caught.append(out.detach().clone()))

    def hidden() -> torch.Tensor:
        row_loss(run, row, run.taps, (0, 0, 0), noise=0.0)
        return caught.pop().unflatten(0, (ANCHORS, -1))

    before, reached = hidden(), 0
    for t in range(0, sum(LENGTHS), 3):
        kept = int(row.input_ids[t])
        row.input_ids[t] = (kept + 50) % 127 + 3
        changed = (hidden() != before).flatten(1).any(1).cpu()
        row.input_ids[t] = kept
        allowed = (row.documents[anchors] == row.documents[t]) & (t <= anchors)
        assert not (changed & ~allowed).any(), f"token {t} reaches blocks that may not know of it"
        reached += int((changed & allowed).sum())
    assert reached > 100, "changes are seen where they should be"
