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
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import stat
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

    The base is the user's cache folder (a relative XDG_CACHE_HOME is none, as the XDG specification has it)
    when that is on a local disk and can be written, else one of their own in the temporary directory; either
    is made here. A variable that `environ` has already is kept. `key`
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
    xdg = environ.get("XDG_CACHE_HOME") or ""
    notes = [f"caches: XDG_CACHE_HOME={xdg} is relative: not used"] if xdg and not os.path.isabs(xdg) else []
    bases = (xdg, os.path.join(environ.get("HOME") or "", ".cache"))
    home = next((Path(base) / "slipstream" for base in bases if os.path.isabs(base)), None)
    if home is None:
        why = "HOME names no folder"
    elif not is_local(home):
        why = f"{home} is on a network file system"
    elif not _writable(home):
        why = f"{home} cannot be written"
    else:
        return home / "kernels", notes
    shared = Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}"
    if not (_writable(shared) and _is_ours_alone(shared)):
        shared = Path(tempfile.mkdtemp(prefix="slipstream-"))
    return shared / "kernels", [*notes, f"caches: {why}: kernels are kept in {shared} instead"]


def _is_ours_alone(folder: Path) -> bool:
    """Kernels are code: in a place where everybody may write, no link and no folder that others can fill."""
    seen = os.lstat(folder)
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o022


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
    if not gpus.is_dir() and (query := shutil.which("nvidia-smi")):  # containers hide the driver's folder
        told = ask_nvidia_smi(query)
        models = {"gpu_unknown"} if told is None else {model for model, _ in told}
    return "+".join(sorted(models)) or "cpu"


@functools.cache
def ask_nvidia_smi(query: str) -> tuple[tuple[str, str], ...] | None:
    """(model, driver version) of each GPU by the nvidia-smi at this path, asked once; None if it fails."""
    asked = [query, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    lines = [line.partition(", ") for line in done.stdout.splitlines() if line]
    return tuple((model, driver) for model, _, driver in lines)


# What is broken


def file_fault(path: str | Path) -> str | None:
    """Why this cache file cannot be what its writer meant, or None. A vanished file is nobody's fault.

    Empty files, folders in a file's place, JSON that is no object, ELF images (cubin, hsaco, so) shorter than
    their own tables say, and inductor's Python sources, which are named by the hash of their text.
    """
    name, kind = os.path.basename(path), os.path.splitext(path)[1]
    try:
        seen = os.stat(path)
        if not stat.S_ISREG(seen.st_mode):
            return f"{name} is no file"
        if seen.st_size == 0:
            return f"{name} is empty"
        if kind in (".json", ".best_config"):
            with open(path, "rb") as f:
                if not isinstance(json.load(f), dict):
                    return f"{name} is no JSON object"
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
                children = json.load(f).get("child_paths")
        except FileNotFoundError:
            return None
        if not isinstance(children, dict):
            return f"{name} lists no files"
        for child, path in children.items():
            if not (isinstance(path, str) and os.path.exists(path)):
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
    """Look through both caches, set broken entries aside; a line for each cache that had any, and one for
    entries that resist. Folders that cannot be listed are passed over.

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
        found, stuck = [], []
        for entry in entries(root):
            name = os.path.basename(entry)[:12]
            try:
                if fault_of(entry) and (fault := set_aside(root, Path(entry), fault_of)):
                    found.append(f"{name}: {fault}")
            except OSError as e:
                stuck.append(f"{name}: {e.strerror}")
        if found:
            lines.append(told(root, found))
        if stuck:
            lines.append(f"{_listed(f'cannot be read or set aside in {root}', stuck)}: move by hand")
    return lines


def told(root: Path, faults: list[str]) -> str:
    """The line for entries set aside: how many, where they are now, and the first few of them."""
    return _listed(f"set aside in {root / QUARANTINE}", faults)


def _listed(what: str, faults: list[str]) -> str:
    entries = "entry" if len(faults) == 1 else "entries"
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return f"cache: {len(faults)} broken {entries} {what}: {'; '.join(faults[:3])}{more}"


def _triton_entries(root: Path) -> Iterator[str]:
    for path in glob.iglob(os.path.join(glob.escape(str(root)), "*")):
        if not os.path.basename(path).startswith((QUARANTINE, "tmp.")):
            yield path


def _inductor_entries(root: Path) -> Iterator[str]:
    for path in glob.iglob(os.path.join(glob.escape(str(root)), "??", "*")):
        if path.endswith((".py", ".so", ".best_config")):
            yield path
