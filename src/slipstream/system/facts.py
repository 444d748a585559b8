"""What a machine is: everything `slipstream doctor` reads, as plain facts that go to JSON and back.

`gather` reads and judges nothing; an absent probe is a fact that is None, never an error. torch is loaded in
a child process only, which also launches a small kernel on every GPU: a torch that cannot be imported, a
driver that hangs or a launch that crashes is a fact like the others. Judging them is doctor.py's.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
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
from slipstream.system.caches import ask_nvidia_smi, is_local

PROBE_SECONDS = 120
"""The probe takes 5 to 10 s; a first start of eight GPUs without the persistence daemon takes a minute."""
GIB = 2**30


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
    fault: str | None = None
    """Why it cannot be made or used."""


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
    open_files: int | None = None
    compiler: str | None = None
    python_headers: bool = False
    allocator: str | None = None
    triton_cache: Folder | None = None
    inductor_cache: Folder | None = None
    output: Folder | None = None
    target: dict[str, Any] | None = None
    """The config.json of the recipe's target."""


@dataclass(frozen=True)
class Sketch:
    """What `train` says of a recipe on a machine, as recipe.py finds out; bytes are 0 where not known."""

    refused: tuple[str, ...] = ()
    """Its errors, a line each."""
    unknown: str | None = None
    """Why the target was not looked at."""
    hybrid: bool = False
    """Whether the target has layers of linear attention."""
    target_bytes: int = 0
    drafter_parameters: int = 0
    need: int = 0
    """At the peak of a step."""
    need_free: int = 0
    """Of that, what must be free beside the CUDA context that whoever reads the free bytes has already."""
    offers: str = ""
    """Settings that would fit, where these do not."""


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
        driver=_driver(),
        devices=sum(re.fullmatch(r"nvidia\d+", p.name) is not None for p in Path("/dev").glob("nvidia*")),
        visible=environment["CUDA_VISIBLE_DEVICES"],
        cores=os.cpu_count(),
        cpu_bf16=re.search(r"\b(avx512_bf16|amx_bf16)\b", cpu) is not None,
        ram=_kilobytes("MemTotal"),
        ram_free=_free_ram(),
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


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


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
        for name in ("triton_cache", "inductor_cache", "output"):
            part = values.pop(name, None)
            parts[name] = None if part is None else from_dict(Folder, part, where)
        parts["target"] = values.pop("target", None)
        if not isinstance(parts["target"], dict | None):
            raise TypeError
    except (TypeError, AttributeError):
        raise UserError(f"{where}: recorded facts of another version: record them again") from None
    return dataclasses.replace(from_dict(Facts, values, where), **parts)


def read_folder(path: str | Path) -> Folder:
    """Facts of a folder, or of the nearest one above it that exists."""
    full = Path(os.path.abspath(path))
    there = next(p for p in (full, *full.parents) if os.path.exists(p))
    fault = None
    if not there.is_dir():
        fault = f"{there} is a file"
    elif not os.access(there, os.W_OK | os.X_OK | (os.R_OK if there == full else 0)):
        fault = "cannot be written to"
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        free = None
    return Folder(str(full), free, is_local(there), fault)


def read_target(name: str) -> dict[str, Any] | None:
    """A target's config.json; `name` is a folder, or a hub name whose files are in the local cache."""
    folder = Path(name) if os.path.isdir(name) else _cached(name)
    try:
        config = None if folder is None else json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


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
    query = shutil.which("nvidia-smi")  # WSL has no such file
    told = ask_nvidia_smi(query) if query else None
    return told[0][1] or None if told else None


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


def import_error() -> str | None:
    """Why torch cannot be imported on this machine; a process of its own tries, for some builds abort."""
    return _child("-c", "import torch")[1]


def _child(*arguments: str) -> tuple[str, str | None]:
    """What a Python of its own prints, and why it failed."""
    try:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired as e:
        return (e.stdout or b"").decode(errors="replace"), f"no answer within {PROBE_SECONDS} s"
    error = (_last_line(done.stderr) or f"it ended with {done.returncode}") if done.returncode else None
    return done.stdout.decode(errors="replace"), error


def _ask_child() -> dict[str, Any]:
    """Fields of `Facts` that only torch knows, from a process of its own."""
    out, error = _child("-m", "slipstream.system.facts")
    fields: dict[str, Any] = {}
    gpus: list[Gpu] = []
    for line in out.splitlines():
        what, _, text = line.partition(" ")
        if what == "torch":
            fields = json.loads(text)
            fields["arch"] = tuple(fields["arch"])
        elif what == "gpu":
            gpus.append(Gpu(**json.loads(text)))
        elif what == "launched":
            gpus[int(text)] = dataclasses.replace(gpus[int(text)], launch="")
    if error is not None:
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
