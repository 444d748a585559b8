"""Two threads over a hybrid model's kernels, the autotuner cold: how many starts fail, guarded and not.

    PYTHONPATH=WHEELS python -m benchmarks.race --starts 20          guard on
    PYTHONPATH=WHEELS python -m benchmarks.race --starts 5 --no-guard
    PYTHONPATH=WHEELS python -m benchmarks.race --heal               a start on a cache that was broken

WHEELS is a folder with flash-linear-attention 0.6.0. A start is a process of its own: nothing tuned,
Triton's compile cache warm (starts in a single thread fill it first; `--cache` keeps it), tuning results
only in memory. Two threads go through the same forward passes from opposite ends, so that first tunings
meet each other and replays of tuned keys: a small Qwen3.5 hybrid with linear heads of 64 and of 128, and
FLA's own kernels on packed rows. Afterwards one thread repeats every pass: outputs must agree. With the
guard, FLA's tensor cache is off and kernels compile one at a time. `--parallel` starts run at once:
nothing here is timed.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

LENGTHS = (130, 520, 1030)
HEAD_DIMS = (64, 128)
TIMEOUT = 240
"""Seconds a start of two threads may take."""
FILLING = 560
"""The same for a start that compiles everything."""


@dataclass
class Result:
    """What a start tells the process that counts."""

    errors: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tuned: int = 0


# One start


def passes() -> list[Callable[[], list]]:
    """Every forward pass of a thread, in order: each returns tensors to compare."""
    import torch
    from fla.modules import FusedRMSNormGated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    calls: list[Callable[[], list]] = []
    for dim in HEAD_DIMS:
        config = Qwen3_5TextConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=dim,
            linear_value_head_dim=dim,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
        norm = FusedRMSNormGated(dim).to("cuda", torch.bfloat16)
        for length in LENGTHS:
            ids = torch.randint(512, (1, length), device="cuda")
            qkvz = torch.randn(4, 1, length, 4, dim, device="cuda", dtype=torch.bfloat16)
            gate = torch.randn(2, 1, length, 4, device="cuda").sigmoid()
            ends = torch.tensor([0, length // 3, length], device="cuda")

            def hybrid(model=model, ids=ids) -> list:
                return [model(input_ids=ids, use_cache=False).logits]

            def packed(norm=norm, qkvz=qkvz, gate=gate, ends=ends) -> list:
                q, k, v, z = qkvz
                out, _ = chunk_gated_delta_rule(
                    q,
                    k,
                    v,
                    g=gate[0].log(),
                    beta=gate[1].to(q.dtype),
                    use_qk_l2norm_in_kernel=True,
                    cu_seqlens=ends,
                )
                return [norm(out, z)]

            calls += [hybrid, packed]
    return calls


def start(guard: bool, threads: int, first: int) -> Result:
    """In a fresh process: the passes in `threads` threads at once from pass `first` on; once more here."""
    from slipstream.config import set_process_environment
    from slipstream.system.kernels import prepare_kernels

    set_process_environment()
    result = Result(lines=prepare_kernels() if guard else [])

    import torch
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    quick = functools.partial(do_bench, warmup=3, rep=12)  # the passes matter here, not the best tile
    CudaDriver.get_benchmarker = lambda _self: quick  # type: ignore[method-assign]
    if not torch.cuda.is_available():
        return Result(errors=["no CUDA device"])
    calls = passes()
    if guard:
        compile_one_at_a_time()
    outs: list[dict[int, list]] = [{} for _ in range(threads)]
    ready = threading.Barrier(threads)

    @torch.no_grad()
    def work(number: int) -> None:
        order = [(first + i) % len(calls) for i in range(len(calls))]
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                ready.wait(60)
                for i in order if number % 2 == 0 else reversed(order):
                    outs[number][i] = calls[i]()
                torch.cuda.current_stream().synchronize()
        except BaseException as e:  # whatever a race makes of it is the result
            last = traceback.extract_tb(e.__traceback__)[-1]
            result.errors.append(f"{type(e).__name__}: {e} ({Path(last.filename).name}:{last.name})")

    torch.cuda.synchronize()
    workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(FILLING if threads == 1 else TIMEOUT / 2)
        if worker.is_alive():
            result.errors.append("a thread hangs")
            faulthandler.dump_traceback(all_threads=True)
    result.tuned = sum(bool(a.cache) for a in live(Autotuner))
    if not result.errors:
        with torch.no_grad():
            for i, call in enumerate(calls):
                for alone, *meanwhile in zip(call(), *(out[i] for out in outs), strict=True):
                    scale = alone.float().std().item()
                    if not (scale > 0 and all((alone - m).abs().max() < 0.2 * scale for m in meanwhile)):
                        result.errors.append(f"pass {i} gave other values beside another thread")
        if result.tuned < 4:
            result.errors.append(f"only {result.tuned} kernels were tuned: this is not FLA's path")
    return result


def live(cls: type) -> list:
    import gc

    return [o for o in gc.get_objects() if isinstance(o, cls)]


def compile_one_at_a_time() -> None:
    from triton.runtime.jit import JITFunction

    lock, compile_kernel = threading.RLock(), JITFunction._do_compile

    def locked(self, *args, **kwargs):
        with lock:
            return compile_kernel(self, *args, **kwargs)

    JITFunction._do_compile = locked  # type: ignore[method-assign]


# Counting


def run_start(cache: Path, guard: bool, threads: int = 2, first: int = 0) -> Result:
    """A start in a process that ends by itself, at the latest after `TIMEOUT` or `FILLING` seconds."""
    tuning = ("TRITON_CACHE_AUTOTUNING", "FLA_CACHE_MODE")  # both would bring tuning results from disk
    environ = {k: v for k, v in os.environ.items() if k not in tuning}
    environ |= {
        "TRITON_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache.with_name("inductor")),
        "FLA_CACHE_RESULTS": "0",
        "FLA_DISABLE_TENSOR_CACHE": str(int(guard)),
    }
    options = ["--one", str(threads), "--first", str(first), "--guard" if guard else "--no-guard"]
    command = [sys.executable, "-m", "benchmarks.race", *options]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if found := re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE):
        return Result(**json.loads(found[-1]))
    said = done.stderr.strip().splitlines() or ["nothing"]
    return Result(errors=[f"exit {done.returncode}: {said[-1]}"])


def warm(cache: Path, parallel: int) -> None:
    """Fill the compile cache: one thread a process, each from another pass on, so they share the work."""
    with ThreadPoolExecutor(parallel) as pool:
        firsts = [3 * i for i in range(parallel)]
        filled = list(pool.map(lambda first: run_start(cache, True, 1, first), firsts))
    for result in filled:
        if result.errors:
            sys.exit(f"one thread alone fails: {result.errors[0]}")
    kernels = sum(1 for _ in cache.glob("*/__grp__*.json"))
    print(f"one thread: {filled[0].tuned} kernels tuned, {kernels} compiled in {cache}", flush=True)


def race(cache: Path, guard: bool, starts: int, parallel: int) -> int:
    with ThreadPoolExecutor(parallel) as pool:
        results = list(pool.map(lambda _: run_start(cache, guard), range(starts)))
    failed = [r for r in results if r.errors]
    kinds = Counter(r.errors[0] for r in failed)
    what = ": " + "; ".join(f"{n}× {error}" for error, n in kinds.most_common()) if kinds else ""
    tuned = min((r.tuned for r in results if not r.errors), default=0)
    print(f"guard {'on' if guard else 'off'}: {len(failed)} of {starts} failed{what}")
    if tuned:
        print(f"kernels tuned in a start that went well: {tuned} or more")
    return int(guard and bool(failed))


def heal(cache: Path) -> int:
    """Break two entries that the passes use; Triton alone must fail on them, a start of ours must not."""
    groups = sorted(cache.glob("*/__grp__*.json"))[:2]
    os.truncate(groups[0], 40)
    next(groups[1].parent.glob("*.cubin")).unlink()
    alone = run_start(cache, guard=False, threads=1)
    print(f"broken cache, Triton alone: {alone.errors[0] if alone.errors else 'runs'}")
    ours = run_start(cache, guard=True, threads=1)
    for line in ours.lines:
        print(f"broken cache, ours: {line}")
    print(f"broken cache, ours: {ours.errors[0] if ours.errors else 'healed'}")
    return int(not alone.errors or bool(ours.errors) or not any("2 broken entries" in m for m in ours.lines))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.race", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=4, help="starts that run at once")
    parser.add_argument("--guard", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--heal", action="store_true", help="break the cache and start again")
    parser.add_argument("--cache", type=Path, help="Triton cache to keep between calls (default: a new one)")
    parser.add_argument("--one", type=int, help="one start with so many threads: for this program's own use")
    parser.add_argument("--first", type=int, default=0, help="the pass it begins with")
    args = parser.parse_args()
    if args.one:
        faulthandler.dump_traceback_later(FILLING if args.one == 1 else TIMEOUT, exit=True)
        print("RESULT " + json.dumps(asdict(start(args.guard, args.one, args.first))), flush=True)
        os._exit(0)  # a hanging thread must not keep the process
    cache = args.cache or Path(tempfile.mkdtemp(prefix="race-")) / "triton"
    warm(cache, args.parallel)
    return heal(cache) if args.heal else race(cache, args.guard, args.starts, args.parallel)


if __name__ == "__main__":
    sys.exit(main())
