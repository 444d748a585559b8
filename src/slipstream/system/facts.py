"""What a machine is: everything `slipstream doctor` reads, as plain facts that go to JSON and back.

`gather` reads and judges nothing; an absent probe is a fact that is None, never an error. torch is loaded in
a child process only, which also launches a small kernel on every GPU: a torch that cannot be imported, a
driver that hangs or a launch that crashes is a fact like the others. Judging them is doctor.py's.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import TrainConfig, UserError, from_dict, kernel_cache_folders, read_environment
from slipstream.system.caches import is_local

PROBE_SECONDS = 120
"""The probe takes 5 to 10 s; a first start of eight GPUs without the persistence daemon takes a minute."""
HEADER_BYTES = 100_000_000
"""The most that the safetensors format allows."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it; sizes in bytes."""

    name: str
    major: int
    minor: int
    total: int
    free: int
    """Not taken by any process, before ours has put anything there."""
    shared: int
    """Shared memory that a block may ask for."""
    launch: str | None = None
    """Empty: a bf16 product and a Triton kernel ran and were right. Else what went wrong; None: not tried.
    """


@dataclass(frozen=True)
class Folder:
    """A folder as it is or would be made, and the bytes free there."""

    path: str
    free: int | None = None
    local: bool = True
    """On this machine's own disk."""
    writable: bool = True


@dataclass(frozen=True)
class TargetFacts:
    """What the files of a target say."""

    model_type: str
    hidden_size: int
    linear_attention: bool
    parameters: int | None = None
    """Counted from the headers of its safetensors; None without any."""
    vocab_size: int = 0
    num_layers: int = 0


@dataclass(frozen=True)
class Facts:
    """A machine and, for a recipe, its folders and target. What is absent is None; sizes are in bytes."""

    python: str = ""
    system: str = ""
    torch: str | None = None
    torch_error: str | None = None
    """Why torch cannot be imported."""
    gpu_error: str | None = None
    """Why an imported torch reaches no GPU."""
    cuda: str | None = None
    """The CUDA that torch was built for."""
    arch: tuple[str, ...] = ()
    """The architectures that torch's kernels were built for."""
    triton_wanted: str | None = None
    """The Triton that this torch was released with, from its own metadata."""
    transformers: str | None = None
    triton: str | None = None
    fla: str | None = None
    fla_core: str | None = None
    causal_conv1d: str | None = None
    liger: str | None = None
    driver: str | None = None
    devices: int = 0
    """GPUs that the system shows to this process, whether torch can use them or not."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    gpus: tuple[Gpu, ...] = ()
    cores: int | None = None
    cpu_bf16: bool = False
    ram: int | None = None
    ram_free: int | None = None
    shm: int | None = None
    open_files: int | None = None
    compiler: str | None = None
    python_headers: bool = False
    allocator: str | None = None
    triton_cache: Folder | None = None
    inductor_cache: Folder | None = None
    output: Folder | None = None
    target: TargetFacts | None = None


def gather(recipe: TrainConfig) -> Facts:
    """Reads the machine, the recipe's output folder and its target; takes up to ten seconds."""
    environment = read_environment(
        "CC", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    )
    triton_cache, inductor_cache = kernel_cache_folders()
    cpu = _text("/proc/cpuinfo")
    facts = Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=_version("torch"),
        triton_wanted=_pin("torch", "triton"),
        transformers=_version("transformers"),
        triton=_version("triton"),
        fla=_version("flash-linear-attention"),
        fla_core=_version("fla-core"),
        causal_conv1d=_version("causal-conv1d"),
        liger=_version("liger-kernel"),
        driver=_driver(),
        devices=sum(re.fullmatch(r"nvidia\d+", p.name) is not None for p in Path("/dev").glob("nvidia*")),
        visible=environment["CUDA_VISIBLE_DEVICES"],
        cores=os.cpu_count(),
        cpu_bf16=re.search(r"\b(avx512_bf16|amx_bf16)\b", cpu) is not None,
        ram=_kilobytes("MemTotal"),
        ram_free=_free_ram(),
        shm=_total_of("/dev/shm"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        compiler=environment["CC"] or shutil.which("gcc") or shutil.which("clang"),
        python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        allocator=environment["PYTORCH_ALLOC_CONF"] or environment["PYTORCH_CUDA_ALLOC_CONF"],
        triton_cache=read_folder(triton_cache) if triton_cache else None,
        inductor_cache=read_folder(inductor_cache) if inductor_cache else None,
        output=read_folder(recipe.output_dir or "."),
        target=read_target(recipe.target_model) if recipe.target_model else None,
    )
    return dataclasses.replace(facts, **_ask_child())


def to_json(facts: Facts) -> dict[str, Any]:
    return dataclasses.asdict(facts)


def from_json(values: Any, where: str) -> Facts:
    """Facts of `to_json`; raises `UserError` for anything else."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: no recorded facts: make them with slipstream doctor --record FILE")
    values = dict(values)
    parts: dict[str, Any] = {}
    try:
        parts["gpus"] = tuple(from_dict(Gpu, g, where) for g in values.pop("gpus", ()))
        for name, cls in (
            ("triton_cache", Folder),
            ("inductor_cache", Folder),
            ("output", Folder),
            ("target", TargetFacts),
        ):
            part = values.pop(name, None)
            parts[name] = None if part is None else from_dict(cls, part, where)
    except (TypeError, AttributeError):
        raise UserError(f"{where}: recorded facts of another version: record them again") from None
    return dataclasses.replace(from_dict(Facts, values, where), **parts)


def read_folder(path: str | Path) -> Folder:
    """Facts of a folder, or of the nearest one above it that exists."""
    full = Path(path).expanduser().absolute()
    there = next(p for p in (full, *full.parents) if p.exists())
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        free = None
    return Folder(str(full), free, is_local(there), os.access(there, os.W_OK))


def read_target(name: str) -> TargetFacts | None:
    """What a target's files say; `name` is a folder, or a hub name whose files are in the local cache."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        found = _cached(name)
        if found is None:
            return None
        folder = found
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        layer_types = text.get("layer_types") or ()
        return TargetFacts(
            model_type=str(text["model_type"]),
            hidden_size=int(text["hidden_size"]),
            linear_attention="linear_attention" in layer_types or "full_attention_interval" in text,
            parameters=_parameters(folder),
            vocab_size=int(text.get("vocab_size", 0)),
            num_layers=int(text.get("num_hidden_layers", 0)),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # `train` says what is wrong with it


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def _parameters(folder: Path) -> int | None:
    """Elements of all tensors, from the headers of the safetensors files; no weight is read."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, HEADER_BYTES)))
        count += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return count or None


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pin(package: str, other: str) -> str | None:
    """The version of `other` that `package`'s own metadata asks for with ==."""
    try:
        wanted = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (re.match(rf"{other}\s*==\s*([\w.]+)", line) for line in wanted)
    return next((m[1] for m in found if m), None)


def _driver() -> str | None:
    found = re.search(r"Kernel Module\D*?(\d+\.\d+[\d.]*)", _text("/proc/driver/nvidia/version"))
    if found:
        return found[1]
    try:  # WSL has no such file
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"\d+\.\d+[\d.]*", asked.stdout.strip())
    return found[0] if asked.returncode == 0 and found else None


def _kilobytes(name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _free_ram() -> int | None:
    """Memory that the system and the container still give; file caches count as free."""
    free = [_kilobytes("MemAvailable")]
    group = Path("/sys/fs/cgroup")
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    cached = re.search(r"^inactive_file (\d+)", _text(group / "memory.stat"), re.MULTILINE)
    if limit.isdigit() and used.isdigit():
        free.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return min((f for f in free if f is not None), default=None)


def _total_of(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _ask_child() -> dict[str, Any]:
    """Fields of `Facts` that only torch knows, from a process of its own."""
    command = [sys.executable, "-m", "slipstream.system.facts"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS)
        out, error = done.stdout, _last_line(done.stderr) or f"it ended with {done.returncode}"
        failed = done.returncode != 0
    except subprocess.TimeoutExpired as e:
        out, error, failed = e.stdout or b"", f"no answer within {PROBE_SECONDS} s", True
    fields: dict[str, Any] = {}
    gpus: list[Gpu] = []
    for line in out.decode(errors="replace").splitlines():
        what, _, text = line.partition(" ")
        if what == "torch":
            fields = json.loads(text)
            fields["arch"] = tuple(fields["arch"])
        elif what == "gpu":
            gpus.append(Gpu(**json.loads(text)))
        elif what == "launched":
            gpus[int(text)] = dataclasses.replace(gpus[int(text)], launch="")
    if failed:
        waiting = [i for i, gpu in enumerate(gpus) if gpu.launch is None]
        if waiting:
            gpus[waiting[0]] = dataclasses.replace(gpus[waiting[0]], launch=error)
        else:
            fields["gpu_error" if fields else "torch_error"] = error
    return {**fields, "gpus": tuple(gpus)}


def _last_line(text: bytes) -> str:
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _probe() -> Iterator[str]:
    """Runs in the child: a line as soon as each thing is known, so that a crash leaves what came before."""
    import torch

    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "arch": torch.cuda.get_arch_list()}
    yield f"torch {json.dumps(found)}"
    if torch.version.cuda is None:
        return
    torch.cuda.init()
    count = torch.cuda.device_count()
    for i in range(count):
        has = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        gpu = Gpu(has.name, has.major, has.minor, total, free, has.shared_memory_per_block_optin)
        yield f"gpu {json.dumps(dataclasses.asdict(gpu))}"
    for i in range(count):
        _launch(f"cuda:{i}")
        yield f"launched {i}"


def _launch(device: str) -> None:
    """A bf16 product and a Triton kernel of our own, both with the right result, or an exception."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, y):
        at = tl.arange(0, 64)
        tl.store(y + at, tl.load(x + at) * 2)

    with torch.device(device), torch.cuda.device(device):
        ones = torch.ones(64, 64, dtype=torch.bfloat16)
        assert (ones @ ones == 64).all(), "a bf16 product is wrong"
        x = torch.arange(64, dtype=torch.float32)
        y = torch.zeros_like(x)
        double[(1,)](x, y)
        assert torch.equal(y, x * 2), "a Triton kernel's result is wrong"


if __name__ == "__main__":
    for _line in _probe():
        print(_line, flush=True)
