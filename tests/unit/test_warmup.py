"""What the warm-up of a GPU makes of the memory of a layer; the warm-up itself needs a device (tests/gpu)."""

import pytest

from slipstream.config import UserError
from slipstream.training.warmup import judge
from tests.training import drafter_config

SHAPES = [
    (hidden, tokens, anchors, block)
    for hidden in (576, 2048, 4096, 5120)
    for tokens, anchors in ((8192, 512), (4096, 64), (2048, 1024), (2048, 64), (1024, 64), (1024, 512))
    for block in (4, 16)
]


def layer(hidden: int, queries: int) -> tuple[int, int]:
    """Heads, and bytes that a fused layer of the default geometry keeps (bf16)."""
    heads, width = (32, 128) if hidden >= 2048 else (9, 64)
    return heads, 2 * queries * (4 * hidden + 4 * heads * width + 3 * 3 * hidden)


@pytest.mark.parametrize(("hidden", "tokens", "anchors", "block"), SHAPES)
def test_fused_layers_of_every_shape_pass_and_dense_ones_are_refused(hidden, tokens, anchors, block):
    queries, keys = anchors * block, tokens + anchors * block
    heads, kept = layer(hidden, queries)
    said = judge("full_attention", heads, queries, keys, 2 * kept, 12.0)
    assert "fused" in said
    dense = 24 * heads * queries * keys  # bytes a score that the dense fall-back was seen to take
    if "too small" not in said:
        with pytest.raises(UserError, match=r"^attention: a full_attention layer took .* it ran dense") as e:
            judge("full_attention", heads, queries, keys, dense, 500.0)
        assert "\n" not in str(e.value)


def test_a_small_shape_is_not_judged():
    config = drafter_config()
    assert "too small to tell" in judge("full_attention", config.num_heads, 64, 128, 2**30, 1.0)
