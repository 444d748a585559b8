"""`slipstream doctor`: can this machine train, and how well.

`diagnose` judges facts (facts.py reads them) and is pure, so that every rule is tested without the hardware.
A rule says where it comes from: a number of the hardware, a release, or a report of a known defect. What
`train` itself says of the recipe comes from recipe.py, where torch can be imported. A run uses cuda:0 alone,
so a verdict is about that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from slipstream.config import DoctorConfig, TrainConfig, UserError
from slipstream.system.facts import (
    GIB,
    Facts,
    Gpu,
    Sketch,
    from_json,
    gather,
    gib,
    import_error,
    read_target,
    to_json,
)

LEAST_TORCH, LEAST_TRANSFORMERS = "2.11", "5.17"
LEAST_DRIVER = {12: 525, 13: 580}
"""Oldest driver branch for a CUDA major version (NVIDIA, CUDA compatibility, table of minor versions)."""
WIDE_HEAD_SHARED = 114_688
"""Bytes a block of flex attention's backward kernel takes for heads above 128 (pytorch issue 198224)."""
SPARE_DISK = 10 * GIB
GPU_WHEEL = "pip install torch --index-url https://download.pytorch.org/whl/cu130"


@dataclass(frozen=True)
class Finding:
    """One line: how grave, what is looked at, what was found, how to mend it."""

    level: Literal["ok", "warn", "FAIL"]
    what: str
    detail: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.what}: {self.detail}" + (f"  → {self.mend}" if self.mend else "")


def doctor(config: DoctorConfig) -> tuple[str, bool]:
    """What the verb prints, and whether the machine is usable."""
    names = {field.name for field in fields(TrainConfig)}
    recipe = TrainConfig(**{name: value for name, value in asdict(config).items() if name in names})
    if config.facts is None:
        facts = gather(recipe)
        broken = facts.torch_error or (None if facts.torch else "not installed")
    else:
        facts, broken = _recorded(config.facts), import_error()
        if recipe.target_model and (target := read_target(recipe.target_model)) is not None:
            facts = replace(facts, target=target)
        recipe = replace(recipe, output_dir="")  # a folder of the other machine
    if config.record is not None:
        Path(config.record).write_text(json.dumps(to_json(facts), indent=1) + "\n", encoding="utf-8")
    findings = diagnose(facts, recipe, _sketch(facts, recipe, broken))
    told, usable = verdict(facts, findings, recipe)
    if config.json:
        report = {"usable": usable, "verdict": told, "findings": [asdict(f) for f in findings]}
        return json.dumps({**report, "facts": to_json(facts)}, indent=1), usable
    return "\n".join([*map(str, findings), told]), usable


def _recorded(path: str) -> Facts:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path}: not JSON: record it with slipstream doctor --record") from None
    return from_json(values, path)


def verdict(facts: Facts, findings: list[Finding], recipe: TrainConfig) -> tuple[str, bool]:
    failed = [f for f in findings if f.level == "FAIL"]
    if failed:
        return f"not usable: {len(failed)} FAIL, the first: {failed[0].what}: {failed[0].detail}", False
    warned = sum(f.level == "warn" for f in findings)
    on = f"cuda:0, {facts.gpus[0].name}" if _on_gpu(facts, recipe) else "the CPU only"
    return f"usable: on {on}" + (f"; warnings: {warned}" if warned else ""), True


def _sketch(facts: Facts, recipe: TrainConfig, broken: str | None) -> Sketch:
    """`broken` says why this process must not import torch."""
    if broken is not None:
        return Sketch(unknown=f"torch cannot be imported here: {broken}")
    try:
        from slipstream.system.recipe import sketch
    except ImportError as e:  # another library is missing or too old, which has its own line
        return Sketch(unknown=" ".join(str(e).split()))
    return sketch(facts, recipe)


def diagnose(facts: Facts, recipe: TrainConfig, sketch: Sketch) -> list[Finding]:
    """Findings in the order of a start: software, GPUs, kernels, files, the recipe's needs. Pure."""
    out = list(_software(facts))
    if _on_gpu(facts, recipe):
        out += [*_gpus(facts, recipe), *_kernels(facts)]
        out += [*_linear_attention(facts, sketch), *_caches(facts)]
    else:
        out += _no_gpu(facts, recipe)
    return [*out, *_host(facts, sketch), *_output(facts, recipe, sketch), *_recipe(facts, recipe, sketch)]


def _on_gpu(facts: Facts, recipe: TrainConfig) -> bool:
    return bool(facts.gpus) and recipe.device != "cpu"


def _release(version: str) -> tuple[int, ...]:
    """(2, 11, 0) of `2.11.0+cu130`."""
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


def _older(version: str, least: str) -> bool:
    return _release(version) < _release(least)


def _software(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None or facts.torch_error:
        broken = f"{facts.torch} cannot be imported: {facts.torch_error}"
        why = "not installed" if facts.torch is None else broken
        mend = f"install torch {LEAST_TORCH} or newer, in an environment of its own"
        yield Finding("FAIL", "torch", why, mend)
    elif _older(facts.torch, LEAST_TORCH):
        yield Finding("FAIL", "torch", f"{facts.torch} is too old", f"pip install 'torch>={LEAST_TORCH}'")
    else:
        built = f"built for CUDA {facts.cuda}" if facts.cuda else "built for the CPU"
        yield Finding("ok", "torch", f"{facts.torch}, {built}; Python {facts.python}, {facts.system}")
    if facts.transformers is None or _older(facts.transformers, LEAST_TRANSFORMERS):
        found = "not installed" if facts.transformers is None else f"{facts.transformers} is too old"
        yield Finding("FAIL", "transformers", found, f"pip install 'transformers>={LEAST_TRANSFORMERS}'")
    else:
        yield Finding("ok", "transformers", facts.transformers)


def _no_gpu(facts: Facts, recipe: TrainConfig) -> Iterator[Finding]:
    if recipe.device == "cpu":
        yield Finding("ok", "GPU", "not asked for (--device cpu)")
    elif not facts.devices:
        level = "FAIL" if recipe.device == "cuda" else "warn"
        detail = "none here: the CPU trains drafters for targets of some 100 M parameters (make quickstart)"
        yield Finding(level, "GPU", detail, "in a container: was it started with its GPUs (--gpus all)?")
    elif facts.torch_error or facts.torch is None:
        return  # said already
    elif not facts.cuda:
        detail = f"driver {facts.driver} is here, but torch {facts.torch} is built for the CPU"
        yield Finding("FAIL", "GPU", detail, GPU_WHEEL)
    elif (least := _driver_too_old(facts)) is not None:
        detail = f"driver {facts.driver} is too old for torch's CUDA {facts.cuda}, which needs {least}"
        other = ", or a torch built for CUDA 12" if least > min(LEAST_DRIVER.values()) else ""
        yield Finding("FAIL", "driver", detail, f"install driver {least} or newer{other}")
    else:
        hidden = "" if facts.visible is None else f" (CUDA_VISIBLE_DEVICES={facts.visible!r})"
        why = facts.gpu_error or "none is shown to it"
        detail = f"driver {facts.driver} is here, torch reaches no GPU{hidden}: {why}"
        mend = "check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, --gpus all; or --device cpu"
        yield Finding("FAIL", "GPU", detail, mend)


def _driver_too_old(facts: Facts) -> int | None:
    """The driver branch that is needed, where an older one is there."""
    cuda, driver = _release(facts.cuda or ""), _release(facts.driver or "")
    least = LEAST_DRIVER.get(cuda[0]) if cuda else None
    return least if least is not None and driver and driver[0] < least else None


def runs_on(arch: tuple[str, ...], major: int, minor: int) -> bool:
    """Whether a torch with these architectures has kernels for a GPU of this capability.

    Machine code (sm_86) runs on its own major version from its minor version on; `a` and `f` variants only
    where they are (`a`) or in their family (`f`); PTX (compute_90) is compiled anew for anything newer.
    """
    for kind, digits, variant in re.findall(r"(sm|compute)_(\d{2,})([af]?)", " ".join(arch)):
        built = int(digits[:-1]), int(digits[-1])
        if variant == "a":
            fits = built == (major, minor)
        elif kind == "sm" or variant == "f":
            fits = built[0] == major and built[1] <= minor
        else:
            fits = built <= (major, minor)
        if fits:
            return True
    return False


def _gpus(facts: Facts, recipe: TrainConfig) -> Iterator[Finding]:
    if (least := _driver_too_old(facts)) is not None:  # a compatibility package can make it run
        detail = f"{facts.driver} is older than {least}, which torch's CUDA {facts.cuda} asks for"
        yield Finding("warn", "driver", detail, f"install driver {least} or newer")
    for i, gpu in enumerate(facts.gpus):
        for found in _gpu(f"cuda:{i}", gpu, facts, recipe):
            if i and found.level == "FAIL":
                mend = "nothing to do: a run uses cuda:0 alone; CUDA_VISIBLE_DEVICES chooses which that is"
                found = replace(found, level="warn", mend=mend)
            yield found


def _gpu(what: str, gpu: Gpu, facts: Facts, recipe: TrainConfig) -> Iterator[Finding]:
    sm = f"sm_{gpu.major}{gpu.minor}"
    capability = (gpu.major, gpu.minor)
    if gpu.major < 8:
        detail = f"{gpu.name} ({sm}) has no bf16 matrix products"
        yield Finding("FAIL", what, detail, "use a GPU of sm_80 or newer (A100, RTX 30 and later)")
        return
    if not runs_on(facts.arch, *capability):
        detail = f"{gpu.name} is {sm}, torch {facts.torch} has kernels for {' '.join(facts.arch) or 'none'}"
        needs = f": CUDA 12.8 or newer for {sm}" if gpu.major >= 10 else ""
        yield Finding("FAIL", what, detail, GPU_WHEEL + needs)
        return
    # ptxas: Triton 3.3 first knows Blackwell; 3.6 brings one that knows sm_103 and sm_121 (triton 10331)
    if gpu.major >= 10 and facts.triton and _older(facts.triton, least := "3.6" if gpu.minor else "3.3"):
        detail = f"Triton {facts.triton} does not compile for {sm}"
        yield Finding("FAIL", what, detail, f"install the torch that brings Triton {least} or newer")
        return
    if gpu.launch:
        detail = f"{gpu.name} ({sm}): a small kernel does not run: {gpu.launch}"
        yield Finding(
            "FAIL", what, detail, "mend what the lines below name, or see in nvidia-smi what else holds it"
        )
    else:
        mig = ", a MIG slice" if "MIG " in gpu.name else ""
        fp8 = "" if capability >= (8, 9) else "; no FP8 products (sm_89 and newer have them)"
        tried = "a bf16 product and a Triton kernel run" if gpu.launch == "" else "no kernel was tried"
        memory = f"{gib(gpu.total)} ({gib(gpu.free)} free)"
        yield Finding("ok", what, f"{gpu.name}{mig}, {sm}, {memory}: {tried}{fp8}")
    if what == "cuda:0" and gpu.total - gpu.free > 2 * GIB:
        detail = f"{gib(gpu.total - gpu.free)} of its memory are taken by other processes"
        yield Finding("warn", what, detail, "nvidia-smi names them")
    if gpu.shared < WIDE_HEAD_SHARED:
        wide = recipe.head_dim is not None and recipe.head_dim > 128
        flex = recipe.attention in ("auto", "flex") and recipe.compile
        limit = f"{gpu.shared:,} bytes of shared memory a block"
        if wide and flex:
            detail = f"{limit}: flex attention's backward takes {WIDE_HEAD_SHARED:,} for heads above 128"
            yield Finding("FAIL", what, detail, f"lower --head-dim {recipe.head_dim} to 128 or 64")
        else:
            yield Finding("ok", what, f"{limit}: heads up to 128 wide fit")


def _kernels(facts: Facts) -> Iterator[Finding]:
    """What Triton needs to compile, and what is known of it."""
    bad = "warn" if facts.gpus[0].launch == "" else "FAIL"  # a launch may have come from the cache
    if facts.triton is None:
        mend = f"pip install triton=={facts.triton_wanted}" if facts.triton_wanted else GPU_WHEEL
        yield Finding("FAIL", "Triton", "not installed: kernels are compiled with it", mend)
        return
    if facts.triton_wanted and _release(facts.triton) != _release(facts.triton_wanted):
        detail = f"{facts.triton} is here, torch {facts.torch} was released with {facts.triton_wanted}"
        yield Finding("warn", "Triton", detail, f"pip install triton=={facts.triton_wanted}")
    else:
        race = "its autotuner is not safe between threads, nor is any up to 3.9: an upgrade mends nothing"
        held = "here one thread launches kernels and a guard holds off others"
        yield Finding("ok", "Triton", f"{facts.triton}; {race}, {held}")
    if facts.compiler is None:
        detail = "no gcc or clang: Triton builds its launcher with one"
        yield Finding(bad, "C compiler", detail, "apt install gcc, or set CC")
    if not facts.python_headers:
        detail = f"Python.h of {facts.python} is missing: Triton's launcher is built with it"
        yield Finding(bad, "Python headers", detail, "apt install python3-dev")
    if "expandable_segments:True" not in (facts.allocator or ""):
        detail = f"PYTORCH_CUDA_ALLOC_CONF is {facts.allocator!r}: memory will fragment"
        yield Finding("warn", "allocator", detail, "add expandable_segments:True, or unset it")


def _linear_attention(facts: Facts, sketch: Sketch) -> Iterator[Finding]:
    """flash-linear-attention, which hybrid targets (Qwen3.5 and its like) are read with."""
    install = "pip install 'flash-linear-attention>=0.6'"
    if facts.fla is None:
        if sketch.hybrid:  # that a setting which asks for the fused pass is refused then, `sketch` knows
            detail = (
                "not installed: this hybrid target is read by the stock pass, document by document, slowly"
            )
            yield Finding("warn", "flash-linear-attention", detail, install)
        else:
            yield Finding("ok", "flash-linear-attention", "not installed; only hybrid targets need it")
        return
    blackwell = facts.gpus[0].major in (10, 12)
    old_triton = facts.triton is not None and _older(facts.triton, "3.8")
    if facts.fla_core != facts.fla:
        detail = f"{facts.fla} with fla-core {facts.fla_core}: they belong together"
        yield Finding("warn", "flash-linear-attention", detail, install)
    elif blackwell and old_triton and _older(facts.fla, "0.6"):
        # flash-linear-attention 945, 1228: forward kernels; 0.5.2 and 0.6.0 leave out the settings that race
        detail = f"{facts.fla} with Triton {facts.triton} on Blackwell: taps can differ from pass to pass"
        yield Finding("warn", "flash-linear-attention", detail, install)
    else:
        conv = "" if facts.causal_conv1d else "; causal-conv1d is not needed"
        yield Finding("ok", "flash-linear-attention", f"{facts.fla}{conv}")


def _host(facts: Facts, sketch: Sketch) -> Iterator[Finding]:
    ram = "memory unknown" if facts.ram is None else f"{gib(facts.ram)} of memory"
    free = "" if facts.ram_free is None else f" ({gib(facts.ram_free)} free)"
    bf16 = "fast bf16" if facts.cpu_bf16 else "no fast bf16: fp32 is used"
    yield Finding("ok", "host", f"{facts.cores} cores, {bf16}, {ram}{free}")
    if facts.ram_free is not None and sketch.target_bytes > facts.ram_free:
        weights = gib(sketch.target_bytes)
        detail = f"{gib(facts.ram_free)} free, the target's weights of {weights} are loaded through it"
        yield Finding("warn", "memory of the host", detail, "free some, or raise the container's limit")
    if facts.open_files is not None and 0 <= facts.open_files < 1024:
        yield Finding("warn", "open files", f"at most {facts.open_files}", "ulimit -n 4096")


def _caches(facts: Facts) -> Iterator[Finding]:
    for what, folder in (("Triton cache", facts.triton_cache), ("inductor cache", facts.inductor_cache)):
        if folder is None:
            continue
        variable = "TRITON_CACHE_DIR" if what == "Triton cache" else "TORCHINDUCTOR_CACHE_DIR"
        if folder.fault is not None:
            yield Finding("FAIL", what, f"{folder.path}: {folder.fault}", f"name another in {variable}")
        elif not folder.local:
            detail = f"{folder.path} is on a network file system: slow, and entries break there"
            yield Finding("warn", what, detail, f"name a folder on a local disk in {variable}")
        elif folder.free is not None and folder.free < GIB:
            detail = f"{folder.path}: {gib(folder.free)} free"
            yield Finding("warn", what, detail, f"free some, or name another in {variable}")
        else:
            yield Finding("ok", what, folder.path)


def _output(facts: Facts, recipe: TrainConfig, sketch: Sketch) -> Iterator[Finding]:
    folder = facts.output
    if folder is None:
        return
    needed = 16 * sketch.drafter_parameters * (recipe.keep_checkpoints + 1) or SPARE_DISK
    if folder.fault is not None:
        yield Finding("FAIL", "output folder", f"{folder.path}: {folder.fault}", "name another --output-dir")
    elif folder.free is not None and folder.free < needed:
        detail = f"{folder.path}: {gib(folder.free)} free, checkpoints take {gib(needed)}"
        yield Finding("warn", "output folder", detail, "free some, or lower --keep-checkpoints")
    elif folder.free is not None:
        yield Finding("ok", "output folder", f"{folder.path}: {gib(folder.free)} free")


def _recipe(facts: Facts, recipe: TrainConfig, sketch: Sketch) -> Iterator[Finding]:
    for line in sketch.refused:  # in the words of `train`, which say how to mend it
        what, _, detail = line.partition(": ")
        yield Finding("FAIL", what, detail)
    if sketch.unknown is not None:
        yield Finding("warn", "recipe", f"not judged: {sketch.unknown}")
    elif sketch.need and _on_gpu(facts, recipe):
        gpu, what, least = facts.gpus[0], "memory for the recipe", f"a step needs {gib(sketch.need)}"
        if sketch.offers:
            yield Finding("FAIL", what, f"{least}, of {gib(gpu.total)}", sketch.offers)
        elif sketch.need_free > gpu.free:
            yield Finding("warn", what, f"{least}, {gib(gpu.free)} free", "stop what else uses this GPU")
        else:
            yield Finding("ok", what, f"{least}, of {gib(gpu.free)} free")
