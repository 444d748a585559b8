"""Caches of kernels: where they are put, what counts as broken, and that a start on a broken cache heals."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slipstream import config
from slipstream.config import UserError
from slipstream.system import caches, kernels
from slipstream.system.caches import INDUCTOR_CACHE, TRITON_CACHE, entry_fault, is_local, place_caches, sweep

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.cache import FileCacheManager  # noqa: E402

# Where they are put


def test_caches_lie_under_the_users_cache_folder_by_machine_and_rank(tmp_path):
    for rank in ("0", "3"):
        placed = place_caches({"XDG_CACHE_HOME": str(tmp_path), "LOCAL_RANK": rank}, key="h200-torch2")
        base = tmp_path / "slipstream/kernels/h200-torch2" / f"rank{rank}"
        assert placed.variables == {TRITON_CACHE: f"{base}/triton", INDUCTOR_CACHE: f"{base}/inductor"}
        assert placed.notes == ()
    placed = place_caches({"HOME": str(tmp_path)}, key="k")
    assert placed.variables[TRITON_CACHE].startswith(f"{tmp_path}/.cache/slipstream/kernels/k/rank0/")


def test_the_key_names_gpu_model_and_versions(tmp_path):
    for bus, model in (("0000:01", "NVIDIA H200"), ("0000:02", "NVIDIA H200"), ("0000:03", "NVIDIA L4")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 27\n")
    key = caches.machine_key(tmp_path)
    assert key.startswith("NVIDIA_H200+NVIDIA_L4-torch2.")
    assert f"-triton{triton.__version__}" in key
    assert caches.machine_key(tmp_path / "0000:01") != key


def test_a_users_own_folder_is_kept_and_said_where_it_is_a_bad_place(tmp_path, monkeypatch):
    environ = {"HOME": str(tmp_path), TRITON_CACHE: "/scratch/mine"}
    placed = place_caches(environ, key="k")
    assert set(placed.variables) == {INDUCTOR_CACHE}
    assert placed.notes == ()
    monkeypatch.setattr(caches, "is_local", lambda folder: folder != Path("/scratch/mine"))
    (note,) = place_caches(environ, key="k").notes
    assert note == f"caches: {TRITON_CACHE}=/scratch/mine is on a network file system: a local disk is safer"


def test_a_rank_started_by_another_gets_its_own_folder(tmp_path):
    parent = {"HOME": str(tmp_path)}
    parent |= place_caches(parent, key="k").variables
    placed = place_caches({**parent, "LOCAL_RANK": "1"}, key="k")
    assert placed.notes == ()
    assert {Path(v).parent.name for v in placed.variables.values()} == {"rank1"}


def test_a_home_on_a_network_or_not_to_be_written_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(caches.tempfile, "gettempdir", lambda: str(tmp_path / "t"))
    (tmp_path / "file").write_text("")
    blocked = place_caches({"HOME": str(tmp_path / "file")}, key="k")
    monkeypatch.setattr(caches, "is_local", lambda folder: "home" not in str(folder))
    remote = place_caches({"HOME": str(tmp_path / "home")}, key="k")
    instead = tmp_path / "t" / f"slipstream-{os.getuid()}"
    for placed, why in ((blocked, "cannot be written"), (remote, "is on a network file system")):
        assert placed.variables[TRITON_CACHE] == f"{instead}/kernels/k/rank0/triton"
        (note,) = placed.notes
        assert f"{why}: kernels are kept in {instead} instead" in note
    assert instead.stat().st_mode & 0o777 == 0o700


def test_without_a_home_kernels_are_kept_in_the_temporary_folder_and_relative_folders_are_not_used(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(caches.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.chdir(tmp_path)
    instead = tmp_path / f"slipstream-{os.getuid()}"
    placed = place_caches({}, key="k")
    assert placed.variables[INDUCTOR_CACHE] == f"{instead}/kernels/k/rank0/inductor"
    assert placed.notes == (f"caches: HOME names no folder: kernels are kept in {instead} instead",)
    placed = place_caches({"XDG_CACHE_HOME": "rel", "HOME": str(tmp_path / "h")}, key="k")
    assert placed.variables[TRITON_CACHE].startswith(f"{tmp_path}/h/.cache/slipstream/")
    assert placed.notes == ("caches: XDG_CACHE_HOME=rel is relative: not used",)
    assert len(place_caches({"XDG_CACHE_HOME": "rel", "HOME": "h"}, key="k").notes) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h", instead.name]


@pytest.mark.parametrize("planted", ["link", "folder others can fill", "file"])
def test_what_was_planted_in_the_temporary_directory_is_not_trusted(tmp_path, monkeypatch, planted):
    monkeypatch.setattr(caches.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(caches.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "fresh"))
    shared = tmp_path / f"slipstream-{os.getuid()}"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        shared.symlink_to(tmp_path / "elsewhere")
    elif planted == "file":
        shared.write_text("")
    else:
        shared.mkdir()
        shared.chmod(0o770)
    assert place_caches({}, key="k").variables[TRITON_CACHE].startswith(f"{tmp_path}/fresh/")
    if planted == "folder others can fill":
        shared.chmod(0o750)
        assert place_caches({}, key="k").variables[TRITON_CACHE].startswith(f"{shared}/")


def test_the_gpu_is_asked_for_only_where_the_drivers_folder_is_absent(tmp_path, monkeypatch):
    smi, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    smi.write_text(f"#!/bin/sh\necho x >> {asked}\necho NVIDIA L4\n")
    smi.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "gpus").mkdir()
    assert caches.machine_key(tmp_path / "gpus").startswith("cpu-torch")
    assert not asked.exists()
    assert caches.machine_key(tmp_path / "absent").startswith("NVIDIA_L4-torch")
    assert asked.exists()


def test_a_folder_somebody_else_made_in_the_temporary_directory_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(caches.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(caches.os, "getuid", lambda: 12345)
    placed = place_caches({"HOME": "/proc/nowhere"}, key="k")
    assert not placed.variables[TRITON_CACHE].startswith(str(tmp_path / "slipstream-12345"))
    shutil.rmtree(Path(placed.variables[TRITON_CACHE]).parents[3])


@pytest.mark.parametrize(
    ("folder", "local"),
    [
        ("/home/a/.cache", False),
        ("/home/local/x", True),
        ("/homely", True),
        ("/data/with space/x", False),
        ("/bucket/x", False),
        ("/usb/x", True),
    ],
)
def test_network_file_systems_are_told_from_local_ones(tmp_path, folder, local):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\nserver:/h /home nfs4 rw 0 0\n/dev/b /home/local xfs rw 0 0\n"
        "lus /data/with\\040space lustre rw 0 0\ns3fs /bucket fuse.s3fs rw 0 0\n/dev/c /usb fuseblk rw 0 0\n"
    )
    assert is_local(Path(folder), mounts) is local
    assert is_local(Path(folder), tmp_path / "no such list")


def test_the_environment_is_set_without_torch_and_twice_says_nothing(tmp_path):
    program = (
        "import os, sys\nfrom slipstream import config\n"
        "print(config.set_process_environment(), config.set_process_environment())\n"
        "print(config.kernel_cache_folders()[0])\nassert not {'torch', 'triton'} & set(sys.modules)"
    )
    environ = {k: v for k, v in os.environ.items() if k not in (TRITON_CACHE, INDUCTOR_CACHE)}
    environ["XDG_CACHE_HOME"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    said, folder = done.stdout.splitlines()
    assert said == "[] []"
    assert folder.startswith(f"{tmp_path}/slipstream/kernels/")


# What is broken


def put_kernel(name: str, files: tuple[str, ...] = ("k.ttir", "k.cubin", "k.json")) -> Path:
    """An entry as Triton writes one, in the cache that the environment names."""
    manager = FileCacheManager(name)
    content = {".json": json.dumps({"name": name, "shared": 0}), ".cubin": b"\x01 not an ELF image"}
    group = {file: manager.put(content.get(Path(file).suffix, "text"), file) for file in files}
    manager.put_group("k.json", group)
    return Path(manager.cache_dir)


def put_alone(name: str, file: str, text: str) -> Path:
    manager = FileCacheManager(name)
    manager.put(text, file)
    return Path(manager.cache_dir)


def truncate(file: Path, size: int) -> None:
    os.truncate(file, size)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "triton"
    monkeypatch.setenv(TRITON_CACHE, str(root))
    for name in ("get_group", "get_file"):  # whatever the test puts in their place goes again
        monkeypatch.setattr(FileCacheManager, name, vars(FileCacheManager)[name])
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in root.rglob("*") if p.is_file() and "quarantine" not in p.parts}


def folder_for(file: Path) -> None:
    file.unlink()
    file.mkdir()


BREAKS = {
    "group cut short": (lambda e: truncate(e / "__grp__k.json", 20), "__grp__k.json is no JSON"),
    "group empty": (lambda e: truncate(e / "__grp__k.json", 0), "__grp__k.json is empty"),
    "group a list": (lambda e: (e / "__grp__k.json").write_text("[]"), "__grp__k.json is no JSON object"),
    "group of a list": (
        lambda e: (e / "__grp__k.json").write_text('{"child_paths": ["k.json"]}'),
        "__grp__k.json lists no files",
    ),
    "group of numbers": (
        lambda e: (e / "__grp__k.json").write_text('{"child_paths": {"k.json": 1}}'),
        "k.json is missing",
    ),
    "group a folder": (lambda e: folder_for(e / "__grp__k.json"), "__grp__k.json is no file"),
    "metadata a list": (lambda e: (e / "k.json").write_text("[]"), "k.json is no JSON object"),
    "metadata cut short": (lambda e: truncate(e / "k.json", 7), "k.json is no JSON"),
    "cubin missing": (lambda e: (e / "k.cubin").unlink(), "k.cubin is missing"),
    "metadata missing": (lambda e: (e / "k.json").unlink(), "k.json is missing"),
    "cubin empty": (lambda e: truncate(e / "k.cubin", 0), "k.cubin is empty"),
    "ttir empty": (lambda e: truncate(e / "k.ttir", 0), "k.ttir is empty"),
    "cubin never written": (lambda e: (e / "k.cubin").write_bytes(bytes(4096)), "k.cubin is cut short"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_entry_is_set_aside_at_the_start_and_the_others_stay(cache, how):
    whole, broken = put_kernel("WHOLE"), put_kernel("BROKEN")
    before = contents(whole)
    hurt, fault = BREAKS[how]
    hurt(broken)
    (line,) = sweep(cache, None)
    assert line == f"cache: 1 broken entry set aside in {cache}/quarantine: BROKEN: {fault}"
    assert contents(cache) == before
    assert [p.name.split(".")[0] for p in (cache / "quarantine").iterdir() if p.is_dir()] == ["BROKEN"]
    assert FileCacheManager("BROKEN").get_group("k.json") is None
    assert sweep(cache, None) == []


def test_tuning_results_cut_short_are_set_aside_and_an_entry_being_written_is_not(cache):
    put_alone("TUNED", "k.autotune.json", '{"configs_timings": []}')
    truncate(put_alone("CUT", "k.autotune.json", '{"configs_timings": []}') / "k.autotune.json", 9)
    truncate(put_alone("WRITING", "k.ttir", "text") / "k.ttir", 0)
    (cache / "TUNED" / "tmp.pid_1_x").mkdir()
    (line,) = sweep(cache, None)
    assert "CUT: k.autotune.json is no JSON" in line
    assert sorted(p.name for p in cache.iterdir()) == ["TUNED", "WRITING", "quarantine"]


def test_a_cache_that_is_whole_empty_or_not_there_says_nothing(cache):
    assert sweep(None, None) == sweep(cache, cache) == []
    put_kernel("WHOLE")
    assert sweep(cache, None) == []
    assert not (cache / "quarantine").exists()


def test_an_entry_that_resists_is_named_and_the_others_are_still_looked_at(cache):
    put_kernel("WHOLE")
    for i in range(5):
        BREAKS["group empty"][0](put_kernel(f"BROKEN{i}"))
    for name in ("A", "Z"):
        (cache / name).symlink_to(name)
    moved, stuck = sweep(cache, None)
    assert moved.startswith("cache: 5 broken entries set aside in ")
    assert stuck.startswith(f"cache: 2 broken entries cannot be read or set aside in {cache}: ")
    assert "Z: Too many levels of symbolic links" in stuck
    assert stuck.endswith(": move by hand")
    assert sorted(p.name for p in cache.iterdir()) == ["A", "WHOLE", "Z", "quarantine"]


def test_many_broken_entries_make_one_line(cache):
    for i in range(5):
        BREAKS["group empty"][0](put_kernel(f"K{i}"))
    (line,) = sweep(cache, None)
    assert line.startswith(f"cache: 5 broken entries set aside in {cache}/quarantine: K")
    assert line.endswith(" and 2 more")


@pytest.mark.parametrize("how", ["group cut short", "group a list", "group of a list", "group a folder"])
def test_what_breaks_later_is_a_miss_and_said(cache, caplog, how):
    kernels.heal_triton_cache()
    kernels.heal_triton_cache()
    entry = put_kernel("LATER")
    assert set(FileCacheManager("LATER").get_group("k.json") or ()) == {"k.ttir", "k.cubin", "k.json"}
    hurt, fault = BREAKS[how]
    hurt(entry)
    with caplog.at_level(logging.WARNING):
        assert FileCacheManager("LATER").get_group("k.json") is None
    assert f"LATER: {fault}" in caplog.text
    put_kernel("LATER")
    assert FileCacheManager("LATER").get_group("k.json")
    truncate(put_alone("TUNED", "k.autotune.json", '{"a": 1}') / "k.autotune.json", 3)
    assert FileCacheManager("TUNED").get_file("k.autotune.json") is None


def test_an_entry_made_anew_since_it_was_found_is_not_taken_away(cache):
    entry = put_kernel("ANEW")
    assert caches.set_aside(cache, entry, entry_fault) is None
    assert FileCacheManager("ANEW").get_group("k.json")


SWEEP = """
import sys
from pathlib import Path
from slipstream.system.caches import sweep
print("ready", flush=True)
sys.stdin.readline()
print(*sweep(Path(sys.argv[1]), None))
"""


def test_two_processes_starting_on_one_cache_share_the_work_without_a_crash(cache):
    for i in range(60):
        BREAKS["group empty"][0](put_kernel(f"BROKEN{i}"))
    whole = put_kernel("WHOLE")
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", SWEEP, str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for start in starts:
        assert start.stdout is not None
        assert start.stdout.readline() == "ready\n"
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("go\n")
        start.stdin.flush()
    said = [start.communicate(timeout=20)[0] for start in starts]
    assert [start.returncode for start in starts] == [0, 0]
    assert sum(int(s.split()[1]) for s in said if s.strip()) == 60
    assert sorted(p.name for p in cache.iterdir()) == ["WHOLE", "quarantine"]
    assert entry_fault(whole) is None


def add_one(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1.0)


@pytest.mark.parametrize(
    ("hurt", "fault"),
    [
        (lambda e: truncate(e / "__grp__add_one.json", 30), "__grp__add_one.json is no JSON"),
        (lambda e: (e / "add_one.cubin").unlink(), "add_one.cubin is missing"),
        (lambda e: truncate(e / "add_one.cubin", 2000), "add_one.cubin is cut short"),
    ],
    ids=["truncated group", "half deleted", "truncated binary"],
)
@pytest.mark.parametrize("when", ["before the start", "later"])
def test_a_real_kernel_is_compiled_again_from_a_broken_entry(cache, caplog, hurt, fault, when):
    """Compiled for sm_90, which needs no device. What Triton does alone is proven where it does not cope."""
    source = ASTSource(triton.jit(add_one), {"x_ptr": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 64})

    def compiled() -> bytes:
        return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

    binary = compiled()
    assert sweep(cache, None) == []
    (entry,) = (p for p in cache.iterdir() if (p / "add_one.cubin").exists())
    hurt(entry)
    if triton.__version__ < "3.7" and "cut short" not in fault:
        with pytest.raises((json.JSONDecodeError, KeyError)):
            compiled()
    if when == "later":
        kernels.heal_triton_cache()
    else:
        assert fault in sweep(cache, None)[0]
    assert compiled() == binary
    assert when != "later" or fault in caplog.text
    assert entry_fault(entry) is None


def test_inductors_sources_and_tuning_results_are_judged_by_their_own_marks(tmp_path, monkeypatch):
    from torch._inductor.codecache import write

    monkeypatch.setenv(INDUCTOR_CACHE, str(tmp_path))
    files = {i: Path(write(f"\ndef call(args):\n    return {i}\n\n", "py")[1]) for i in range(3)}
    tuned = files[0].with_name("ckernel.best_config")
    tuned.write_text('{"num_warps": 4}')
    assert sweep(None, tmp_path) == []
    truncate(files[1], 20)
    truncate(files[2], 0)
    truncate(tuned, 10)
    (line,) = sweep(None, tmp_path)
    assert line.startswith("cache: 3 broken entries set aside")
    assert (files[0].exists(), files[1].exists(), files[2].exists(), tuned.exists()) == (True, *[False] * 3)
    assert Path(write("\ndef call(args):\n    return 1\n\n", "py")[1]) == files[1]
    assert sweep(None, tmp_path) == []


def test_the_start_of_a_process_sweeps_guards_and_heals(cache, monkeypatch):
    from triton.runtime.autotuner import Autotuner

    BREAKS["group empty"][0](put_kernel("BROKEN"))
    monkeypatch.delenv(INDUCTOR_CACHE, raising=False)
    (line,) = kernels.prepare_kernels()
    assert "1 broken entry" in line
    assert config.kernel_cache_folders() == (cache, None)
    assert Autotuner.run in kernels._guards
    assert FileCacheManager.get_group in kernels._guards


# Threads


@pytest.fixture
def nobody(monkeypatch):
    monkeypatch.setattr(kernels, "_launcher", None)


@pytest.mark.usefixtures("nobody")
def test_a_second_launching_thread_is_refused_by_name_while_the_first_lives():
    @kernels.only_launching_thread
    def taps(x: int) -> int:
        return x + 1

    refused = []

    def second() -> None:
        try:
            taps(1)
        except UserError as e:
            refused.append(str(e))

    def run(target, name: str) -> None:
        thread = threading.Thread(target=target, name=name)
        thread.start()
        thread.join()

    run(lambda: taps(1), "short-lived")
    assert taps(1) == 2
    assert taps(2) == 3
    run(second, "prefetcher")
    (message,) = refused
    assert "taps: called from thread 'prefetcher' while 'MainThread' launches" in message
    assert "\n" not in message
