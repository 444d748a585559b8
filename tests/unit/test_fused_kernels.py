"""The kernels between matrix products, without a GPU: interpreted they are right, compiled nothing spills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from slipstream.models import fused_kernels  # noqa: E402
from slipstream.models.fp8 import E4M3  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTER = {torch.bfloat16: "*bf16", torch.float32: "*fp32", E4M3: "*fp8e4nv", torch.int64: "*i64"}
BF16, FP32 = torch.bfloat16, torch.float32
S, H, F, A, D, NK, Z = 8192, 5120, 17408, 48, 128, 16, 16480  # Qwen3.6-27B; Z columns of the merged product


def test_interpreted_on_a_cpu_they_give_what_fused_py_gives():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "tests/interpreted_kernels.py",
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d\d passed", done.stdout.splitlines()[-1]), done.stdout


class Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.args, self.num_warps = kernel, (), 0

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: object, num_warps: int) -> None:
        self.args, self.num_warps = args, num_warps

    def compiled(self, sm: int, folder: Path) -> dict[str, int]:
        """Registers, stack, shared and local memory, by the assembler, of the kernel with these arguments."""
        signature, constants, facts = {}, {}, {}
        for i, (parameter, value) in enumerate(zip(self.kernel.params, self.args, strict=True)):
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[(i,)] = "constexpr", value
                continue
            is_tensor = isinstance(value, torch.Tensor)
            kind = POINTER[value.dtype] if is_tensor else {int: "i32", float: "fp32"}[type(value)]
            signature[parameter.name] = kind
            if is_tensor or (isinstance(value, int) and value % 16 == 0):
                facts[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=facts)
        options = {"num_warps": self.num_warps}
        binary = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options).asm["cubin"]
        (folder / "kernel.cubin").write_bytes(binary)
        command = [str(TOOLS / "cuobjdump"), "-res-usage", str(folder / "kernel.cubin")]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {k: int(v) for k, v in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}


def nothing(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def add_norm(width: int, delta: bool, plain: bool, fp8: bool) -> None:
    x, weight = nothing(S, width), nothing(width, dtype=FP32)
    fused_kernels.add_norm(x, x if delta else None, weight, 1e-6, plain, fp8)


def gated_norm(fp8: bool) -> None:
    z = nothing(S, Z)[:, : A * D].unflatten(1, (A, D))
    fused_kernels.gated_norm(nothing(S, A, D), z, nothing(D, dtype=FP32), 1e-6, fp8)


def delta_inputs() -> None:
    columns, by_head = (2 * NK + A) * D, nothing(A, dtype=FP32)
    merged, conv = nothing(S, Z), nothing(4, columns, dtype=FP32)
    positions = nothing(S, dtype=torch.int64)
    fused_kernels.delta_inputs(
        merged[:, :columns], merged[:, -2 * A :], positions, conv, by_head, by_head, NK, D
    )


LAUNCHES = {
    "add_norm": lambda: add_norm(H, False, True, False),
    "add_norm, fp8": lambda: add_norm(H, True, False, True),
    "add_norm, both": lambda: add_norm(H, True, True, True),
    "add_norm, widest": lambda: add_norm(fused_kernels.WIDEST, True, True, True),
    "swiglu": lambda: fused_kernels.swiglu(nothing(S, 2 * F), False),
    "swiglu, fp8": lambda: fused_kernels.swiglu(nothing(S, 2 * F), True),
    "swiglu, fp8, widest": lambda: fused_kernels.swiglu(nothing(S, 2 * fused_kernels.WIDEST), True),
    "gated_norm": lambda: gated_norm(False),
    "gated_norm, fp8": lambda: gated_norm(True),
    "delta_inputs": delta_inputs,
}
ON = [(sm, what) for sm in (80, 90, 120) for what in LAUNCHES if sm > 80 or "," not in what]


@pytest.mark.parametrize(("sm", "what"), [(sm, what) for sm, what in ON if "widest" not in what or sm == 90])
def test_at_the_shape_of_a_27b_target_they_compile_and_spill_no_register(sm, what, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    name = "_" + what.split(",")[0]
    recorder = Recorder(vars(fused_kernels)[name])
    monkeypatch.setattr(fused_kernels, name, recorder)
    LAUNCHES[what]()
    used = recorder.compiled(sm, tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0), used
    assert used["SHARED"] < 48 * 1024


@pytest.mark.parametrize("width", [2, 3, 48, 64, 5120, 17408, 28672, 32768])
def test_two_pieces_cover_a_row_and_neither_alone_does(width):
    main, tail = fused_kernels.pieces(width)
    assert main < width <= main + tail < 2 * width
    assert all(piece & (piece - 1) == 0 for piece in (main, tail))


def test_shapes_that_the_kernels_cannot_take_are_known():
    assert fused_kernels.fits_row(17408)
    assert not fused_kernels.fits_row(2**15 + 16)
    assert fused_kernels.fits_heads(48, 128)
    assert not fused_kernels.fits_heads(1, 128)
    assert not fused_kernels.fits_heads(4, 96)
    assert fused_kernels.fits_delta(128, 128)
    assert not fused_kernels.fits_delta(128, 64)
    assert not fused_kernels.fits_delta(96, 96)
