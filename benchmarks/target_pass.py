"""The target's pass over one packed row at the shape of Qwen3.6-27B: the common way, stock layers, ours.

    python -m benchmarks.target_pass --fp8 --json target.json

needs a GPU of 141 GB for all of it (weights 54 GB, their FP8 copies 24 GB), flash-linear-attention, and no
files: weights are random, made on the device. Printed for each way, in one run: milliseconds (median, least,
most; CUDA events, passes queued as in training), peak memory above the weights, and how far its taps are
from the stock layers' run document by document. The floors: the products of our pass alone, and its matrix
work over the speed of a square bf16 product.

"common" is the whole causal LM with all hidden states, the row read as one long document. "stock" is the
stock layers stopped after the last tap, documents as a batch. `--profile` prints where the time of our pass
goes. `--device cpu --tiny` runs everything without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig
from transformers import logging as transformers_logging

from benchmarks.workload import SEED, equal_documents
from slipstream.config import UserError
from slipstream.data.pack import Row
from slipstream.models.fp8 import fp8_matmul, quantize_rows
from slipstream.models.selfcheck import tap_health
from slipstream.models.target import Target, default_target_layer_ids
from slipstream.training.flops import matmul_ceiling, times_ms

GIB = 2**30
KINDS = {
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "scaled_mm"),
    "gated delta rule": ("chunk_", "recompute_w_u", "cumsum", "solve"),
    "attention": ("flash", "fmha", "pytorch_flash"),
    "between the products": ("triton_", "_add_norm", "_swiglu", "_gated_norm", "_delta_inputs"),
}


@dataclass(frozen=True)
class Measured:
    name: str
    median_ms: float
    least_ms: float
    most_ms: float
    peak_gib: float
    difference: list[float]
    """‖taps − reference‖ / ‖reference‖ of each tap."""
    worst_token: float


def shape_27b(layers: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=layers,
        num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    )  # fmt: skip


def shape_tiny(layers: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=131, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    )  # fmt: skip


@torch.no_grad()
def build(config: Qwen3_5TextConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights made where they stay: rows of a matrix have length 1, so that 64 layers keep their scale
    and every layer adds something of the residual's own size.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    torch.manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(0.01, 16).log_()
        elif name.endswith("dt_bias"):
            parameter.fill_(1.0)
        elif name.endswith("linear_attn.norm.weight"):
            parameter.normal_(1.0, 0.1)
        elif parameter.ndim == 1:  # norms, whose weight is an offset from 1
            parameter.normal_(0.0, 0.1)
        elif name.endswith("conv1d.weight"):
            parameter.normal_(0.0, 0.5)
        else:
            parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    decoder = model.get_decoder()
    # its table of frequencies is no parameter: made again, as `to_empty` left it undefined
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config).to(device)
    return model


def alone(target: Target, row: Row) -> Tensor:
    """Taps [S, T·H] on the host: the stock layers over one document after another."""
    parts = []
    for start, end in row.spans():
        positions = torch.arange(end - start)
        document = Row(0, row.input_ids[start:end], positions, positions * 0, positions >= 0)
        parts.append(target.taps(document).cpu())
    return torch.cat(parts)


def differences(taps_SC: Tensor, reference_SC: Tensor, num_taps: int) -> tuple[list[float], float]:
    """Relative difference of each tap, and of the worst token of any."""
    relative, worst = [], 0.0
    for mine, theirs in zip(taps_SC.chunk(num_taps, 1), reference_SC.chunk(num_taps, 1), strict=True):
        theirs = theirs.to(mine.device).float()
        apart = (mine.float() - theirs).norm(dim=1)
        relative.append(float(apart.norm() / theirs.norm()))
        worst = max(worst, float((apart / theirs.norm(dim=1)).max()))
    return relative, worst


class Bench:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.device, self.count = device, args.count
        self.results: list[Measured] = []
        self.reference_SC: Tensor | None = None

    def measure(self, name: str, run: Callable[[], object], num_taps: int) -> None:
        """`run` returns taps, or something else that is not compared."""
        started = time.perf_counter()
        times_ms(run, 2, self.device)
        warm = time.perf_counter() - started
        on_gpu = self.device.type == "cuda"
        peak = 0.0
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - held) / GIB
        times = times_ms(run, self.count, self.device)
        difference, worst = [], float("nan")
        if isinstance(found := run(), Tensor) and self.reference_SC is not None:
            problem = tap_health(found, num_taps)
            assert problem is None, f"{name}: {problem}"
            difference, worst = differences(found, self.reference_SC, num_taps)
        measured = Measured(name, statistics.median(times), min(times), max(times), peak, difference, worst)
        self.results.append(measured)
        apart = " ".join(f"{d:.2%}" for d in difference)
        apart = f"taps differ by {apart}, worst token {worst:.2%}" if difference else "taps not compared"
        spread = f"({measured.least_ms:.1f} to {measured.most_ms:.1f})"
        print(
            f"{name:<24} {measured.median_ms:8.1f} ms {spread} peak +{peak:.2f} GiB, {apart}; "
            f"first two passes {warm:.0f} s",
            flush=True,
        )


def products_alone(target: Target, tokens: int, device: torch.device) -> Callable[[], None]:
    """The matrix products of a fused pass and nothing else, on random rows."""
    assert target.trunk is not None
    layers = target.trunk.layers
    dtype = target.dtype
    rows = {w.plain_OI.shape[1]: torch.randn(tokens, w.plain_OI.shape[1], device=device, dtype=dtype)
            for layer in layers for w in layer.weights()}  # fmt: skip
    rows8 = {width: quantize_rows(x) for width, x in rows.items()} if target.trunk.fp8 else {}

    @torch.no_grad()
    def run() -> None:
        for layer in layers:
            for weight in layer.weights():
                width = weight.plain_OI.shape[1]
                if weight.quantised is None:
                    F.linear(rows[width], weight.plain_OI)
                else:
                    fp8_matmul(*rows8[width], weight.quantised, dtype)

    return run


def print_profile(run: Callable[[], object]) -> None:
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        run()
        torch.cuda.synchronize()
    kernels = [e for e in recorded.key_averages() if e.self_device_time_total > 0 and "aten::" not in e.key]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    by_kind: Counter[str] = Counter()
    for event in kernels:
        kind = next((k for k, parts in KINDS.items() if any(p in event.key.lower() for p in parts)), "other")
        by_kind[kind] += event.self_device_time_total
    print("where the time goes:", ", ".join(f"{k} {us / 1e3:.1f} ms" for k, us in by_kind.most_common()))
    for event in kernels[:25]:
        print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:5d} × {event.key[:110]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--count", type=int, default=10, help="timed passes of each way")
    parser.add_argument("--skip-stock", action="store_true", help="leave out the ways of stock layers")
    parser.add_argument("--fp8", action="store_true", help="our pass with FP8 products too")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: a dry run")
    args = parser.parse_args(argv)
    transformers_logging.set_verbosity_error()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if args.tiny:
        args.layers, args.tokens = min(args.layers, 8), min(args.tokens, 64)
    config = (shape_tiny if args.tiny else shape_27b)(args.layers)
    started = time.perf_counter()
    model = build(config, device, dtype)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / GIB
    print(f"{args.layers} layers, {weights:.1f} GiB of {dtype} in {time.perf_counter() - started:.0f} s")
    ids = default_target_layer_ids(args.layers, 5 if args.layers > 6 else 2)
    row = equal_documents(args.tokens, args.documents, config.vocab_size)
    bench, taps = Bench(args, device), len(ids)

    stock = Target(model, ids, "stock")
    stock.isolation = "unpacked"
    bench.reference_SC = alone(stock, row)
    scale = [float(x.float().std()) for x in bench.reference_SC.chunk(taps, 1)]
    print(f"taps of layers {ids}, standard deviations {' '.join(f'{s:.2f}' for s in scale)}")
    if not args.skip_stock:
        ids_1S = row.input_ids[None].to(device)

        @torch.no_grad()
        def common() -> object:
            return model(input_ids=ids_1S, output_hidden_states=True, use_cache=False)

        bench.measure("common", common, taps)
        bench.measure("stock", partial(stock.taps, row), taps)
    del stock
    floors: dict[str, float] = {}
    target: Target | None = None
    flop = 0.0
    for name, fp8 in (("ours", False), ("ours, FP8", True)) if args.fp8 else (("ours", False),):
        if target is not None:
            target.trunk = None  # its merged weights go as the next one's are made
        target = Target(model, ids, "fused", fp8)
        assert target.trunk is not None
        run = partial(target.taps, row)
        bench.measure(name, run, taps)
        products = products_alone(target, args.tokens, device)
        times_ms(products, 2, device)
        floors[f"products of {name} alone"] = statistics.median(times_ms(products, args.count, device))
        flop = sum(
            2.0 * args.tokens * w.plain_OI.numel() for layer in target.trunk.layers for w in layer.weights()
        )
        if args.profile and device.type == "cuda":
            print_profile(run)
        del run, products
    ceiling = matmul_ceiling(device, side=8192 if device.type == "cuda" else 128)
    floors["matrix work at the ceiling"] = 1e3 * flop / ceiling
    print(f"bf16 ceiling {ceiling / 1e12:.0f} TFLOP/s, matrix work of a pass {flop / 1e12:.1f} TFLOP")
    for name, ms in floors.items():
        print(f"floor: {name:<40} {ms:8.1f} ms")
    if args.json:
        facts = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__, "layers": args.layers, "tokens": args.tokens,
            "documents": args.documents,
            "ceiling_tflops": ceiling / 1e12, "matrix_tflop": flop / 1e12, "floors_ms": floors,
            "ways": [asdict(m) for m in bench.results],
        }  # fmt: skip
        with open(args.json, "w") as file:
            json.dump(facts, file, indent=1)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
