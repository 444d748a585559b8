"""FP8 on a GPU: products equal their emulation, 8 bits are written where the values are made, speed.

`pytest -m gpu -s tests/gpu/test_fp8_gpu.py` prints the speed of the products of a 27B target.
"""

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import metrics

from slipstream.models.fp8 import SLICE, fp8_matmul, quantize_rows, quantize_weight, supports_fp8
from slipstream.models.target import load_target
from tests.fp8_files import write_fp8
from tests.tiny import tiny_target

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOKENS = 8192
PRODUCTS = {
    "linear attention in": (5120, 16480),
    "full attention in": (5120, 14336),
    "attention out": (6144, 5120),
    "MLP in": (5120, 34816),
    "MLP out": (17408, 5120),
}
"""Sides (I, O) of the products of a 27B hybrid: 24/4 heads of 256 with gates, 16/48 of 128, MLP of 17408."""


@pytest.fixture(autouse=True)
def only_where_fp8_is():
    if why := supports_fp8(torch.cuda.get_device_capability()):
        pytest.skip(why)


def operands(tokens, width_in, width_out, dtype=torch.bfloat16):
    """Rows of very different sizes, so that a scale on the wrong axis cannot go unseen."""
    torch.manual_seed(0)
    x = torch.randn(tokens, width_in, device=CUDA) * torch.logspace(-3, 3, tokens, device=CUDA)[:, None]
    w = torch.randn(width_out, width_in, device=CUDA) * torch.logspace(2, -4, width_out, device=CUDA)[:, None]
    return x.to(dtype), w.to(dtype)


@pytest.mark.parametrize("shape", [(256, 512, 384), (1, 64, 16), (17, 272, 48), (1000, 5120, 16480)], ids=str)
def test_the_product_is_its_emulation_within_bf16_rounding_and_accumulation(shape):
    x, w = operands(*shape)
    (x8, scale), weight = quantize_rows(x), quantize_weight(w)
    x64 = x8.double() * scale.double()[:, None]
    w64 = weight.data_OI.double() * weight.scale_O.double()[:, None]
    exact, size = x64 @ w64.T, x64.abs() @ w64.abs().T
    out = fp8_matmul(x8, scale, weight)
    assert (out.dtype, out.shape) == (torch.bfloat16, (shape[0], shape[2]))
    # half a bf16 step of the result, and fast accumulation: each product of 32 columns cuts the running sum
    # to 14 bits, at the worst always the same way
    apart, cut = (out.double() - exact).abs(), size * 2.0**-14
    assert (apart <= exact.abs() * 2.0**-8 + cut * max(1, shape[1] // 32)).all()
    assert apart.mean() <= (exact.abs() * 2.0**-9 + 4 * cut).mean(), "and in the mean far less"


def test_zero_and_broken_rows_compiled():
    x = torch.ones(32, 64, device=CUDA, dtype=torch.bfloat16)
    x[3], x[5, 7], x[6, 1] = 0, float("nan"), float("inf")
    x8, scale = torch.compile(quantize_rows, fullgraph=True, dynamic=False)(x)
    out = fp8_matmul(x8, scale, quantize_weight(torch.ones(16, 64, device=CUDA, dtype=torch.bfloat16)))
    assert scale[3] == 1
    assert not out[3].any()
    assert out[5:7].isnan().all()
    whole = [i for i in range(32) if i not in (3, 5, 6)]
    assert torch.equal(out[whole], torch.full_like(out[whole], 64))


def norm_and_quantize(x_SH, weight_H):
    return quantize_rows(F.rms_norm(x_SH.float(), weight_H.shape, weight_H, 1e-6))


def swiglu_and_quantize(gate_up_S2F):
    gate, up = gate_up_S2F.float().chunk(2, dim=-1)
    return quantize_rows(F.silu(gate) * up)


@pytest.mark.parametrize("which", ["norm", "swiglu"])
def test_eight_bits_are_written_by_the_one_kernel_that_makes_the_values(which):
    torch.manual_seed(0)
    if which == "norm":
        make, args = (
            norm_and_quantize,
            (torch.randn(512, 5120, device=CUDA).bfloat16(), torch.rand(5120, device=CUDA)),
        )
    else:
        make, args = swiglu_and_quantize, (torch.randn(512, 2 * 17408, device=CUDA).bfloat16(),)
    torch._dynamo.reset()
    metrics.reset()
    x8, scale = torch.compile(make, fullgraph=True, dynamic=False)(*args)
    assert metrics.generated_kernel_count == 1
    eager8, eager_scale = make(*args)
    assert torch.allclose(scale, eager_scale, rtol=1e-5)
    # another order of the same sums may tip a value that lies between two steps
    assert (x8.float() != eager8.float()).float().mean() < 1e-3
    assert ((x8.float() - eager8.float()).abs() <= eager8.float().abs() / 7 + 2.0**-9).all()


def test_quantising_the_largest_weight_needs_little_beside_it():
    w = torch.randn(34816, 5120, device=CUDA, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weight = quantize_weight(w)
    peak = torch.cuda.max_memory_allocated() - before - weight.data_OI.nbytes - weight.scale_O.nbytes
    print(f"quantize_weight [34816, 5120]: {peak / 2**20:.0f} MiB beside the result")
    assert peak <= 5 * 4 * SLICE


def test_an_fp8_checkpoint_is_the_same_on_the_gpu_as_on_the_cpu(tmp_path):
    tiny_target("hybrid", tmp_path / "plain", dtype=torch.bfloat16)
    write_fp8(tmp_path / "plain", tmp_path / "fp8", (24, 40))
    on_gpu, on_cpu = (
        load_target(str(tmp_path / "fp8"), (1, 3), 2, device, torch.bfloat16).model.state_dict()
        for device in (CUDA, torch.device("cpu"))
    )
    for name, w in on_cpu.items():
        assert torch.equal(on_gpu[name].cpu(), w), name


def milliseconds(work, repeats=20):
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def test_products_of_a_27b_target_are_faster_than_in_bf16():
    total = {"bf16": 0.0, "fp8": 0.0}
    for what, (width_in, width_out) in PRODUCTS.items():
        x, w = torch.randn(TOKENS, width_in, device=CUDA).bfloat16(), None
        w = torch.randn(width_out, width_in, device=CUDA, dtype=torch.bfloat16)
        (x8, scale), weight = quantize_rows(x), quantize_weight(w)
        took = {
            "bf16": milliseconds(lambda x=x, w=w: x @ w.T),
            "fp8": milliseconds(lambda a=x8, s=scale, w=weight: fp8_matmul(a, s, w)),
        }
        flop = 2e-9 * TOKENS * width_in * width_out
        speeds = ", ".join(f"{k} {ms:.3f} ms {flop / ms:.0f} TFLOP/s" for k, ms in took.items())
        print(f"{what} [{TOKENS}, {width_in}] x [{width_in}, {width_out}]: {speeds}")
        total = {k: total[k] + took[k] for k in total}
    assert total["fp8"] < 0.75 * total["bf16"]
