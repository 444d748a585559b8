"""Caches and autotuner on a device: no false alarm, starts that heal, two threads on one kernel."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from slipstream.config import kernel_cache_folders, set_process_environment
from slipstream.system.caches import QUARANTINE, is_local, machine_key, sweep
from slipstream.system.kernels import guard_autotuner

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

pytestmark = pytest.mark.gpu

START = '''
"""A start: a tuned Triton kernel, and a graph that inductor compiles, forward and backward."""
import json
from slipstream import config
from slipstream.system.kernels import prepare_kernels
config.set_process_environment()
lines = prepare_kernels()
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"BLOCK": b}) for b in (64, 128)], key=["n"], cache_results=True)
@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n, 0.0) + 1.0, at < n)

@torch.compile(fullgraph=True)
def graph(x):
    return torch.softmax(x * 2.0, -1).square().sum()

x = torch.zeros(1000, device="cuda")
add_one[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, 1000)  # tuning runs it in place: not once
y = torch.linspace(0, 1, 4096, device="cuda").view(4, 1024).requires_grad_()
out = graph(y)
out.backward()
one = torch.zeros(1000, device="cuda")
add_one[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](one, 1000)
print(json.dumps([lines, [one.sum().item(), out.item(), y.grad.norm().item()]]))
'''


def start(folder: Path) -> tuple[list[str], list[float]]:
    program = folder / "start.py"
    program.write_text(START)
    caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    environ = {k: v for k, v in os.environ.items() if k not in caches}
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**environ, "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines, values = json.loads(done.stdout.splitlines()[-1])
    return lines, values


def test_a_start_on_a_broken_cache_heals_and_says_so_and_a_whole_one_raises_no_alarm(tmp_path):
    lines, values = start(tmp_path)
    assert lines == []
    assert values[0] == 1000.0
    (triton_cache,) = tmp_path.glob("slipstream/kernels/*/rank0/triton")
    inductor_cache = triton_cache.with_name("inductor")
    assert len(list(triton_cache.glob("*/*.cubin"))) >= 4
    assert sweep(triton_cache, inductor_cache) == []
    assert start(tmp_path)[0] == []

    groups = sorted(triton_cache.glob("*/__grp__add_one.json"))
    graphs = sorted(g for g in triton_cache.glob("*/__grp__triton_*.json"))
    os.truncate(groups[0], 25)
    (groups[1].parent / "add_one.cubin").unlink()
    next(graphs[0].parent.glob("*.cubin")).unlink()
    os.truncate(next(triton_cache.glob("*/add_one.autotune.json")), 30)
    sources = [p for p in inductor_cache.glob("??/c*.py") if "def call(" in p.read_text()]
    os.truncate(sources[0], 100)
    lines, healed = start(tmp_path)
    assert healed == pytest.approx(values, rel=1e-6)
    assert "4 broken entries set aside" in lines[0]
    assert "1 broken entry set aside" in lines[1]
    assert len([p for p in (triton_cache / QUARANTINE).iterdir() if p.is_dir()]) == 4
    assert start(tmp_path)[0] == []


def test_the_machine_is_named_at_once_and_without_cuda():
    begin = time.perf_counter()
    key = machine_key()
    seconds = time.perf_counter() - begin
    print(f"\n{key} in {seconds * 1000:.0f} ms")
    assert torch.cuda.get_device_name(0).replace(" ", "_") in key
    assert f"torch{torch.__version__.split('+')[0]}" in key
    assert seconds < 2  # the driver's folder takes 10 ms; nvidia-smi, where it is hidden, more


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n, 0.0) * 2.0, at < n)


def meet(lengths: tuple[int, int]) -> list[str]:
    """Two threads' first calls of one untuned kernel; what went wrong."""
    configs = [triton.Config({"BLOCK": b}, num_warps=w) for b in (64, 128, 256) for w in (1, 2, 4)]
    tuned = triton.autotune(configs, key=["n"], restore_value=["x_ptr"])(double)
    ready, wrong = threading.Barrier(2), []

    def work(n: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                x = torch.ones(n, device="cuda")
                ready.wait(20)
                for _ in range(3):
                    tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
                if not bool((x == 8.0).all()):
                    wrong.append(f"{n} elements: {x[0].item()}, not 8")
        except (TypeError, KeyError, AttributeError) as e:
            wrong.append(f"{type(e).__name__}: {e}")

    threads = [threading.Thread(target=work, args=(n,)) for n in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_two_threads_tune_one_kernel_only_behind_the_guard(monkeypatch):
    for name in ("run", "warmup"):
        monkeypatch.setattr(Autotuner, name, inspect.unwrap(vars(Autotuner)[name]))
    meet((1000, 1000))  # compiles
    assert any(meet((n, n + 64)) for n in (2000, 3000, 4000, 5000, 6000))
    guard_autotuner()
    assert [w for n in (7000, 8000, 9000, 10000, 11000) for w in meet((n, n + 64))] == []


def test_this_process_has_its_caches_on_a_local_disk():
    set_process_environment()
    for folder in kernel_cache_folders():
        assert folder is not None
        assert is_local(folder)
