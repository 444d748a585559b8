"""Triton's interpreter runs the kernels of fused_kernels.py on a CPU: their results are those of fused.py.

Run by tests/unit/test_fused_kernels.py with TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from slipstream.models import fused, fused_kernels
from slipstream.models.fp8 import E4M3
from slipstream.models.target import Target
from tests import fused_cases as cases
from tests.tiny import random_row, tiny_target

CPU = torch.device("cpu")
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8e4nv": E4M3}
BITS = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])


def rounded(values, source, wanted, _mode):
    x = torch.from_numpy(np.ascontiguousarray(values)).view(TORCH[str(source)]).to(TORCH[str(wanted)])
    return x.view(BITS[wanted.primitive_bitwidth]).numpy()


@pytest.fixture(autouse=True)
def _rounds_as_a_gpu(monkeypatch):
    """The interpreter's own conversions cut bits off."""
    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@DTYPES
@pytest.mark.parametrize("width", [85, 128, 130])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("plain", "fp8"), [(True, False), (False, True), (True, True)])
def test_add_norm(dtype, width, delta, plain, fp8):
    ours, theirs = (
        cases.add_norm(way.add_norm, dtype, CPU, width, delta, plain, fp8) for way in (fused_kernels, fused)
    )
    assert torch.equal(ours[0].nan_to_num(), theirs[0].nan_to_num())
    cases.assert_near(ours, theirs)


@DTYPES
@FP8
@pytest.mark.parametrize("width", [85, 128, 1030])
def test_swiglu(dtype, width, fp8):
    cases.assert_near(*(cases.swiglu(way.swiglu, dtype, CPU, width, fp8) for way in (fused_kernels, fused)))


@DTYPES
@FP8
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (3, 32), (6, 16)])
def test_gated_norm(dtype, heads, head_dim, fp8):
    cases.assert_near(
        *(
            cases.gated_norm(way.gated_norm, dtype, CPU, heads, head_dim, fp8)
            for way in (fused_kernels, fused)
        )
    )


@DTYPES
@pytest.mark.parametrize(
    ("lengths", "padding", "key_heads", "heads", "width"),
    [
        ((1,), 0, 1, 2, 4),
        ((1, 2, 3, 70), 5, 2, 6, 4),
        ((33, 31), 0, 2, 2, 4),
        ((50, 1, 1), 0, 3, 3, 2),
    ],
)
def test_delta_inputs(dtype, lengths, padding, key_heads, heads, width):
    cases.assert_near(
        *(
            cases.delta_inputs(way.delta_inputs, dtype, CPU, lengths, padding, key_heads, heads, 16, width)
            for way in (fused_kernels, fused)
        )
    )


def test_small_decays_keep_their_digits():
    """softplus(x) is eˣ where eˣ is nothing beside 1."""
    gates = torch.tensor([[0.0, 0.0, -25.0, -12.0]])
    rest = torch.zeros(1, 4 * 16), gates, torch.zeros(1, dtype=torch.int64), torch.zeros(4, 4 * 16)
    g = fused_kernels.delta_inputs(*rest, -torch.ones(2), torch.zeros(2), 1, 16)[3]
    torch.testing.assert_close(g[0], -torch.log1p(gates[0, 2:].exp()), rtol=1e-5, atol=0.0)


@FP8
def test_a_pass_with_kernels_gives_the_taps_of_the_pass_without(fp8):
    target, row = Target(tiny_target("hybrid"), (0, 2), "fused", fp8), random_row((9, 3, 4), 20)
    expected = target.taps(row)
    trunk = target.trunk
    trunk._take_kernels(linear=True)
    taken = (trunk._add_norm, trunk._swiglu, trunk._gated_norm, trunk._delta_inputs)
    assert [f.__module__ for f in taken] == 4 * ["slipstream.models.fused_kernels"]
    taps_SC = target.taps(row)
    # a value that is rounded the other way in FP8 moves all that follows
    assert (taps_SC - expected).norm() <= (1e-2 if fp8 else 1e-6) * expected.norm()


def test_the_cases_catch_a_convolution_that_runs_over_document_starts(monkeypatch):
    sound = fused.causal_conv
    monkeypatch.setattr(fused, "causal_conv", lambda x, w, p: sound(x, w, torch.arange(len(p))))
    with pytest.raises(AssertionError):
        test_delta_inputs(torch.float32, (1, 2, 3, 70), 5, 2, 6, 4)
