"""The drafter's forward pass and both losses against numbers computed by an independent implementation."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.data.pack import Row
from slipstream.models.drafter import Drafter, DrafterConfig
from slipstream.models.target import Head
from slipstream.training.attention import make_attend
from slipstream.training.blocks import decay_weights, make_blocks
from slipstream.training.loss import SlotWeights, block_loss

GOLDEN = Path(__file__).parent.parent / "golden"
CONFIG = DrafterConfig(
    hidden_size=128,
    vocab_size=1024,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=256,
    block_size=8,
    mask_token_id=1023,
    target_layer_ids=(0, 2, 3),
    num_target_layers=6,
    rope_theta=1e6,
)


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "speculators_090.safetensors")


@pytest.fixture(scope="module")
def losses():
    return json.loads((GOLDEN / "speculators_090.json").read_text())["losses"]


def golden_row(golden) -> Row:
    return Row(
        row_id=0,
        input_ids=golden["input_ids"][0],
        positions=golden["position_ids"][0],
        documents=golden["document_ids"][0],
        supervised=golden["loss_mask"][0],
    )


def golden_forward(golden, kind: str):
    names = {k.removeprefix("state."): v for k, v in golden.items() if k.startswith("state.")}
    frozen = {k: names.pop(k) for k in list(names) if "head" in k or "embed" in k or k.startswith("verifier")}
    drafter = Drafter(CONFIG)
    drafter.load_state_dict(names)
    row = golden_row(golden)
    blocks = make_blocks(
        row, golden["anchors"], len(golden["anchors"]), CONFIG.block_size, CONFIG.mask_token_id
    )
    x = frozen["embed_tokens.weight"][blocks.input_ids_NB.flatten()]
    hidden = drafter(
        golden["hidden_states"][0],
        row.positions,
        x,
        blocks.positions_NB.flatten(),
        make_attend(kind, blocks, CONFIG),
    )
    return hidden, blocks, frozen["lm_head.weight"]


@pytest.mark.parametrize("kind", ["dense", "documents"])
def test_logits_equal_the_independent_implementation(golden, kind):
    hidden, _, head = golden_forward(golden, kind)
    logits, reference = hidden @ head.T, golden["logits"][0]
    assert (logits - reference).abs().max() <= 1e-5 * reference.abs().max()


@pytest.mark.parametrize(("name", "decay"), [("ce/fixed-exp-decay", True), ("ce/dpace", False)])
def test_losses_equal_the_independent_implementation(golden, losses, name, decay):
    hidden, blocks, head = golden_forward(golden, "dense")
    valid = golden["aligned_loss_mask"].view(-1, 8).clone()
    labels = golden["targets"][0].argmax(-1).view(-1, 8)
    from dataclasses import replace

    blocks = replace(blocks, labels_NB=labels, valid_NB=valid)
    weights = SlotWeights(decay_weights(8, 4.0) if decay else None, dpace_floor=0.5)
    loss = block_loss(hidden, blocks, Head(head, None, 1.0, None), weights)
    ours = loss.total / (valid.sum() + 1e-5)
    assert float(ours) == pytest.approx(losses[name], rel=1e-5)
