"""The drafter step side by side: ours, PyPI speculators 0.9.0 and specforge 0.2.0, in one run on one GPU.

    pip install --no-deps --target PEERS speculators==0.9.0 specforge==0.2.0 liger-kernel \
        pydantic==2.11.10 pydantic-core==2.33.2 annotated-types typing-inspection
    PYTHONPATH=PEERS python -m benchmarks.drafter_step --json step.json

prints a table: forward and backward in ms (median, least and most, CUDA events, steps queued as in
training, fresh anchors in every step), peak memory above steady, loss, gradient norm, slots that carried
loss in the last step, and the step with the optimiser where that is ours. Steady is weights + masters +
moments + persistent copies + one gradient per parameter; all else is above it, the row's taps (0.39 GiB)
included. The floor is the step's matrix work over the speed of a square bf16 product in the same run.

Every system is a process of its own, one after the other: it warms up (compilation) and is measured. A
system that fails or hangs is reported with its last words and does not stop the others. Which
systems there are: `SYSTEMS` below; `-published` is the released geometry, four sliding layers of 2048
tokens and a full one (in documents no longer than the window it costs what five full layers cost).
`--device cpu --tiny` runs the same without a GPU or a compiler. How the peers are run, and what they
compute that ours does not: peers.py; ours: ours.py.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.ours import ours
from benchmarks.workload import SEED, SQUARE, TINY, Batch, Shape, System, make_batch, sustained_flops
from slipstream.training.flops import matmul_ceiling, times_ms
from slipstream.training.warmup import graphs_compiled

GIB = 2**30


SYSTEMS: dict[str, Callable[[Shape, Batch], System]] = {
    "ours": ours,
    "speculators": partial(peers.speculators, loss="eager"),
    "speculators-fused": partial(peers.speculators, loss="fused"),
    "specforge": partial(peers.specforge, fastest=False),
    "specforge-fastest": partial(peers.specforge, fastest=True),
}
PUBLISHED = "-published"
"""Suffix of a system's name: all but the last layer slide."""
DEFAULT = ("ours", "speculators", "specforge", "specforge-fastest", "ours" + PUBLISHED)


@dataclass
class Options:
    """Flags of the benchmark; the shape's are its own."""

    shape: Shape = field(default_factory=Shape)
    only: tuple[str, ...] = DEFAULT
    """Systems to run, by name; `-published` may follow any of them."""
    device: str = "cuda"
    tiny: bool = False
    """A shape of a second on a CPU; the shape's own flags are ignored."""
    warmup: int = 4
    iterations: int = 24
    limit: float = 420.0
    """Seconds after which a system is given up; one of the peers compiles for 200."""
    profile: bool = False
    """Name the kernels of ours that take longest."""
    json: Path | None = None
    """Write the results there."""
    worker: str | None = None
    """Used between the processes of one run: the system to be."""


def measure(system: System, options: Options, device: torch.device) -> dict[str, Any]:
    """The measured part of a run, after warm-up. Raises `SystemExit` for numbers that cannot be real."""
    outcomes: list[tuple[Tensor, Tensor]] = []
    system.step()  # memory given back after the warm-up is taken again
    steady = system.steady_bytes()
    graphs = graphs_compiled()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    times = times_ms(lambda: outcomes.append(system.step()), options.iterations, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else steady
    losses = torch.stack([loss.float() for loss, _ in outcomes])
    grads = {name: p.grad for name, p in system.trainable}
    if dead := [name for name, g in grads.items() if g is None or not g.isfinite().all() or not g.any()]:
        raise SystemExit(f"gradients missing, zero or not finite: {dead}")
    if not losses.isfinite().all() or not losses.std() > 0:
        raise SystemExit(f"losses not finite or constant: {losses.tolist()}")
    return {
        "settings": system.settings,
        "ms": times,
        "steady_gib": steady / GIB,
        "above_gib": (peak - steady) / GIB,
        "loss": losses.mean().item(),
        "grad_norm": torch.nn.utils.get_total_norm([g for g in grads.values() if g is not None]).item(),
        "slots": int(outcomes[-1][1]),
        "compiled_late": graphs_compiled() - graphs,
    }


def measure_with_update(system: System, options: Options, device: torch.device) -> list[float]:
    """Milliseconds of forward, backward and optimiser step."""
    change = system.update
    assert change is not None

    def whole() -> None:
        system.step()
        change()

    times_ms(whole, 2, device)  # the moments are made
    return times_ms(whole, options.iterations, device)


def top_kernels(system: System, count: int = 25) -> list[str]:
    """The device's longest kernels in one step, the mean of three."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA, activity.CPU]) as profile:
        times_ms(system.step, 3, torch.device("cuda"))
    kernels = [e for e in profile.key_averages() if e.device_type.name == "CUDA"]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels) / 3e3
    lines = [
        f"{e.self_device_time_total / 3e3:8.2f} ms {e.count // 3:5d} × {e.key[:96]}" for e in kernels[:count]
    ]
    return [f"{total:8.2f} ms in {len(kernels)} kinds of kernels", *lines]


def work(name: str, options: Options) -> None:
    """A system's process: warm up, measure, print what came out as the last line of its output."""
    faulthandler.dump_traceback_later(max(1.0, options.limit - 10), exit=True)  # a hang says where
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the system prints is no answer
    began = time.monotonic()
    device = torch.device(options.device)
    torch.manual_seed(SEED)
    if name == "ceiling":
        result: dict[str, Any] = {
            "tflops": matmul_ceiling(device, side=256 if options.tiny else SQUARE) / 1e12,
            "sustained_tflops": sustained_flops(device, options.tiny) / 1e12,
        }
    else:
        shape = TINY if options.tiny else options.shape
        if name.endswith(PUBLISHED):
            shape = dataclasses.replace(shape, sliding_layers=shape.layers - 1)
        system = SYSTEMS[name.removesuffix(PUBLISHED)](shape, make_batch(shape, device))
        for _ in range(options.warmup):
            system.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        warm = time.monotonic() - began
        result = measure(system, options, device) | {"warm_s": warm}
        if system.update is not None:
            if options.profile and device.type == "cuda":
                result["kernels"] = top_kernels(system)
            result["with_update_ms"] = measure_with_update(system, options, device)
    print(json.dumps(result), file=answers, flush=True)
    os._exit(0)  # no compile worker holds the end up


def run(name: str, options: Options) -> dict[str, Any] | None:
    """A system in a process of its own; None, with its last words printed, when it failed."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    command = [sys.executable, "-m", "benchmarks.drafter_step", *sys.argv[1:], "--worker", name]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        answer = process.stdout.readline()
        code = process.wait()
        if answer:
            return json.loads(answer)
        errors.seek(0)
        words = "\n".join(errors.read().strip().splitlines()[-25:])
    print(f"--- {name} failed (exit {code}):\n{words}", flush=True)
    return None


def run_all(names: list[str], options: Options) -> dict[str, dict[str, Any]]:
    """Results by name, one system after the other; a system that failed is missing."""
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        if result := run(name, options):
            results[name] = result
            said = f"{statistics.median(result['ms']):.1f} ms" if "ms" in result else "measured"
            print(f"{name}: {said}", flush=True)
            if options.json:  # what is there stays, whatever comes
                options.json.write_text(
                    json.dumps({"torch": torch.__version__, "results": results}, indent=1)
                )
    return results


def table(results: dict[str, dict[str, Any]], flop: float, ceiling: float) -> str:
    """Markdown; × is a system's time over ours of the same geometry, MFU is floor over time."""
    floor = 1e3 * flop / ceiling
    tera, work = ceiling / 1e12, flop / 1e12
    heads = (
        "system", "ms (least–most)", "× ours", "MFU", "above steady, GiB", "steady, GiB",
        "with optimiser, ms", "loss", "gradient norm", "slots", "warm-up, s", "graphs compiled late", "how",
    )  # fmt: skip
    lines = [
        f"ceiling {tera:.0f} TFLOP/s; {work:.1f} TFLOP of matrix work a step: floor {floor:.0f} ms",
        "",
        f"| {' | '.join(heads)} |",
        "|" + "---|" * len(heads),
    ]
    for name, r in results.items():
        mine = results.get("ours" + (PUBLISHED if name.endswith(PUBLISHED) else ""))
        ms = statistics.median(r["ms"])
        ratio = f"{ms / statistics.median(mine['ms']):.2f}" if mine else ""
        whole = f"{statistics.median(r['with_update_ms']):.1f}" if "with_update_ms" in r else ""
        cells = (
            name, f"{ms:.1f} ({min(r['ms']):.1f}–{max(r['ms']):.1f})", ratio, f"{floor / ms:.0%}",
            f"{r['above_gib']:.2f}", f"{r['steady_gib']:.2f}", whole, f"{r['loss']:.4f}",
            f"{r['grad_norm']:.3g}", str(r["slots"]), f"{r['warm_s']:.0f}", str(r["compiled_late"]),
            r["settings"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    import tyro

    options = tyro.cli(tyro.conf.OmitArgPrefixes[Options], description=__doc__)
    if options.worker:
        work(options.worker, options)
        return
    unknown = [n for n in options.only if n.removesuffix(PUBLISHED) not in SYSTEMS]
    if unknown:
        sys.exit(f"--only: no system {unknown}: choose from {list(SYSTEMS)}, each may end in {PUBLISHED}")
    results = run_all(["ceiling", *options.only], options)
    limits = results.pop("ceiling")
    ceiling = limits["tflops"] * 1e12
    burst, sustained = limits["tflops"], limits["sustained_tflops"]
    print(f"\nsquare products: {burst:.0f} TFLOP/s in a burst, {sustained:.0f} sustained")
    shape = TINY if options.tiny else options.shape
    for name, result in results.items():
        print(
            "\n".join([f"\n{name}: longest kernels", *result["kernels"]]) if "kernels" in result else "",
            end="",
        )
    print(f"\n{table(results, shape.matrix_flop(), ceiling)}")
    if options.json:
        facts = {"shape": dataclasses.asdict(shape), "flop": shape.matrix_flop(), "ceiling": ceiling}
        facts |= {"torch": torch.__version__, "limits": limits, "results": results}
        options.json.write_text(json.dumps(facts, indent=1))
    if len(results) < len(options.only):
        sys.exit(1)


if __name__ == "__main__":
    main()
