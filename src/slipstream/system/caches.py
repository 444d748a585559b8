"""Where compiled kernels lie on disk, and which of those files cannot be believed.

Triton and inductor each keep a cache; both trust what they find in it. A file cut short by a full disk or a
lost node then fails every later start, and a cache on a network home or shared between unlike machines adds
faults of its own. So each process has its own folder on a local disk, and a broken entry is renamed out of
the way, where it can be looked at, and made again. Nothing is ever deleted here.

Standard library only: this runs before torch is imported. Environment variables come as an argument.
What is done to Triton's own classes is in kernels.py.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TRITON_CACHE, INDUCTOR_CACHE = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"
QUARANTINE = "quarantine"
REMOTE = re.compile(
    r"nfs|cifs|smb|9p$|afs|ceph|lustre|gpfs|beegfs|glusterfs|pvfs|orangefs|panfs|wekafs|fuse\.|davfs"
)
"""File systems that are somewhere else. `fuse.` mounts are (sshfs, s3fs); `fuseblk` is a local disk."""
NVIDIA = Path("/proc/driver/nvidia/gpus")
MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True)
class Caches:
    """Environment variables that place the caches, and what the user should know about the choice."""

    variables: dict[str, str]
    notes: tuple[str, ...]


def place_caches(environ: Mapping[str, str], key: str | None = None) -> Caches:
    """Folders for the kernels of this process: `<base>/slipstream/kernels/<key>/rank<LOCAL_RANK>/…`.

    The base is the user's cache folder when that is on a local disk and can be written, else one of their own
    in the temporary directory; either is made here. A variable that `environ` has already is kept. `key`
    names what kernels depend on (default: `machine_key()`).
    """
    root, notes = _writable_root(environ)
    below = Path(key or machine_key()) / f"rank{environ.get('LOCAL_RANK') or 0}"
    variables, kept = {}, []
    for name, folder in ((TRITON_CACHE, "triton"), (INDUCTOR_CACHE, "inductor")):
        value = environ.get(name)
        if value and not Path(value).is_relative_to(root):
            if not is_local(Path(value)):
                kept.append(f"caches: {name}={value} is on a network file system: a local disk is safer")
        else:  # unset, or set by this for another rank, which then started this process
            variables[name] = str(root / below / folder)
    return Caches(variables, (*(notes if variables else ()), *kept))


def _writable_root(environ: Mapping[str, str]) -> tuple[Path, list[str]]:
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "/nonexistent", ".cache")
    home = Path(base) / "slipstream"
    shared = Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}"
    why = None
    if not is_local(home):
        why = "is on a network file system"
    elif not _writable(home):
        why = "cannot be written"
    if why is None:
        return home / "kernels", []
    # kernels are code: where everybody may write, nobody else may have made this folder
    if not (_writable(shared) and shared.stat().st_uid == os.getuid()):
        shared = Path(tempfile.mkdtemp(prefix="slipstream-"))
    return shared / "kernels", [f"caches: {home} {why}: kernels are kept in {shared} instead"]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def is_local(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether a folder (it need not exist) is on this machine's own disk. Yes where mounts are not listed."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return True
    path = os.path.realpath(folder)
    best, kind = "", ""
    for fields in map(str.split, lines):
        point = fields[1].replace("\\040", " ")
        if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, kind = point, fields[2]
    return not REMOTE.match(kind)


def machine_key(gpus: Path = NVIDIA) -> str:
    """What a compiled kernel depends on, as a folder's name: GPU model and versions of torch, Triton, FLA."""
    from importlib.metadata import PackageNotFoundError, version

    parts = [_gpu_models(gpus)]
    for name, package in (("torch", "torch"), ("triton", "triton"), ("fla", "fla-core")):
        try:
            parts.append(name + version(package))
        except PackageNotFoundError:
            parts.append(f"{name}-none")
    return "-".join(re.sub(r"[^A-Za-z0-9.+]+", "_", part) for part in parts)


def _gpu_models(gpus: Path) -> str:
    """Models of this machine's NVIDIA GPUs as the driver lists them: reading it takes no CUDA start-up."""
    texts = [path.read_text() for path in gpus.glob("*/information")]
    models = {
        m.group(1).strip() for text in texts if (m := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE))
    }
    if not models and (query := shutil.which("nvidia-smi")):  # containers that hide the driver's folder
        asked = [query, "--query-gpu=name", "--format=csv,noheader"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return "gpu_unknown"
        models = set(done.stdout.split("\n")) - {""} if done.returncode == 0 else {"gpu_unknown"}
    return "+".join(sorted(models)) or "cpu"


# What is broken


def file_fault(path: str | Path) -> str | None:
    """Why this cache file cannot be what its writer meant, or None. A vanished file is nobody's fault.

    Empty files, JSON that does not parse, ELF images (cubin, hsaco, so) shorter than their own tables say,
    and inductor's Python sources, which are named by the hash of their text.
    """
    name, kind = os.path.basename(path), os.path.splitext(path)[1]
    try:
        if os.stat(path).st_size == 0:
            return f"{name} is empty"
        if kind in (".json", ".best_config"):
            with open(path, "rb") as f:
                json.load(f)
        elif kind in (".cubin", ".hsaco", ".so"):
            with open(path, "rb") as f:
                if not _elf_is_whole(f.read(64), os.fstat(f.fileno()).st_size):
                    return f"{name} is cut short"
        elif kind == ".py" and re.fullmatch(r"c[a-z2-7]{51}\.py", name):
            with open(path, "rb") as f:
                digest = hashlib.sha256(f.read().strip()).digest()
            if name[1:52] != base64.b32encode(digest)[:51].decode().lower():
                return f"{name} is not the text it is named for"
    except FileNotFoundError:
        return None
    except ValueError:  # JSON, or text that is not UTF-8
        return f"{name} is no JSON"
    return None


def _elf_is_whole(head: bytes, size: int) -> bool:
    """Whether an ELF64 image reaches to the end of its program and section tables. Other formats pass."""
    if head[:5] != b"\x7fELF\x02":
        return any(head)  # but for blocks that were never written
    if len(head) < 64:
        return False
    program, section = struct.unpack_from("<QQ", head, 32)
    p_size, p_count, s_size, s_count = struct.unpack_from("<HHHH", head, 54)
    return program + p_size * p_count <= size and section + s_size * s_count <= size


def entry_fault(folder: str | Path) -> str | None:
    """Why one kernel's folder in Triton's cache cannot be believed, or None.

    Triton believes a kernel's files because a group file, written last, lists them. A folder without one is
    being written, or holds files that are believed alone: tuning results and launchers.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    groups = [n for n in names if n.startswith("__grp__")]
    if not groups:
        names = [n for n in names if n.endswith((".autotune.json", ".so"))]
    for name in names:
        if not name.startswith("tmp.") and (fault := file_fault(os.path.join(folder, name))):
            return fault
    for name in groups:
        try:
            with open(os.path.join(folder, name), "rb") as f:
                children: dict[str, str] = json.load(f).get("child_paths") or {}
        except FileNotFoundError:
            return None
        for child, path in children.items():
            if not os.path.exists(path):
                return f"{child} is missing"
    return None


# Out of the way


def set_aside(root: Path, entry: Path, fault_of: Callable[[Path], str | None]) -> str | None:
    """Rename a broken `entry` of the cache `root` into its quarantine; the fault, or None if it is whole now.

    Processes that start on one cache take turns, and each looks again in its turn, so that none takes away
    what another has just made anew.
    """
    quarantine = root / QUARANTINE
    quarantine.mkdir(exist_ok=True)
    with open(quarantine / ".lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fault = fault_of(entry)
        if fault is not None:
            os.replace(entry, quarantine / f"{entry.name}.{os.getpid()}.{time.time_ns()}")
    return fault


def sweep(triton: Path | None, inductor: Path | None) -> list[str]:
    """Look through both caches, set broken entries aside; a line for each cache that had any.

    Measured: 3,000 kernels of eight files take 0.3 s. Inductor's graph entries are left to it: it compiles
    again when one does not load. Its sources, tuning results and libraries it trusts.
    """
    lines = []
    for root, entries, fault_of in (
        (triton, _triton_entries, entry_fault),
        (inductor, _inductor_entries, file_fault),
    ):
        if root is None or not root.is_dir():
            continue
        found = []
        try:
            for entry in entries(root):
                if fault_of(entry) and (fault := set_aside(root, Path(entry), fault_of)):
                    found.append(f"{os.path.basename(entry)[:12]}: {fault}")
        except OSError as e:
            lines.append(
                f"cache: a broken entry in {root} cannot be set aside: {e.strerror}: empty it by hand"
            )
        if found:
            lines.append(told(root, found))
    return lines


def told(root: Path, faults: list[str]) -> str:
    """The line for entries set aside: how many, where they are now, and the first few of them."""
    entries = "entry" if len(faults) == 1 else "entries"
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    listed = "; ".join(faults[:3])
    return f"cache: {len(faults)} broken {entries} set aside in {root / QUARANTINE}: {listed}{more}"


def _triton_entries(root: Path) -> Iterator[str]:
    with os.scandir(root) as items:
        yield from (i.path for i in items if i.name != QUARANTINE and not i.name.startswith("tmp."))


def _inductor_entries(root: Path) -> Iterator[str]:
    with os.scandir(root) as folders:
        for folder in folders:
            if len(folder.name) != 2 or not folder.is_dir():
                continue
            with os.scandir(folder.path) as items:
                yield from (i.path for i in items if i.name.endswith((".py", ".so", ".best_config")))
