"""Triton made safe for a trainer: its autotuner under threads, its cache when damaged, one launching thread.

Triton's autotuner keeps the arguments of the running call on the kernel's object, so a second thread in the
same kernel breaks the first one's tuning, whether its own key is tuned already or not; FLA's and inductor's
own state is no safer. This trainer has one thread that launches kernels (`only_launching_thread` says so
aloud); the guard is for a user's threads around it. FLA's tensor cache stays on for that reason: it saves a
copy to the host per packed row and is only unsafe under threads; a program with several launching threads
sets FLA_DISABLE_TENSOR_CACHE=1 and compiles under one lock.

What is done here is done to classes of Triton, once per process, the same for every kernel. Inductor's
compile workers are processes of their own, which it does not reach: an entry that breaks under them after
the sweep fails that start as with Triton alone, and the next start's sweep sets it aside.

Where caches lie and what counts as broken is in caches.py; whether attention is fused, in
training/attention.py.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from slipstream.config import UserError, kernel_cache_folders
from slipstream.system.caches import entry_fault, file_fault, set_aside, sweep, told

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


def prepare_kernels() -> list[str]:
    """To be called before the first kernel of a process that uses CUDA. Returns lines for the user: entries
    set aside.
    """
    lines = sweep(*kernel_cache_folders())
    if find_spec("triton") is not None:
        heal_triton_cache()
        guard_autotuner()
    return lines


# The autotuner

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()
_guards: set[Callable[..., Any]] = set()


def guard_autotuner() -> None:
    """Let one thread at a time into an autotuner, of Triton's class and every subclass, also of those that
    are loaded later: FLA's comes with the first pass over linear attention.

    A re-entrant lock per kernel is held over the whole of `run` and `warmup`: over the benchmark alone, or
    only while a key is not tuned, is too little, for a call that replays a tuned key ends another's tuning
    too. `nargs` and `restore_copies` are put back at the end, so that a call from within a benchmark leaves
    the outer one whole. Kernels made before are guarded as well; calling this again changes nothing. Costs
    1.2 µs a launch.
    """
    from triton.runtime.autotuner import Autotuner

    def guard_later(cls: type[Autotuner], **options: Any) -> None:
        super(Autotuner, cls).__init_subclass__(**options)
        _guard(cls)

    Autotuner.__init_subclass__ = classmethod(guard_later)  # pyright: ignore[reportAttributeAccessIssue]
    classes: list[type] = [Autotuner]
    for cls in classes:
        classes.extend(cls.__subclasses__())
        _guard(cls)


def _guard(cls: type) -> None:
    for name in ("run", "warmup"):
        method = vars(cls).get(name)
        if method is not None and method not in _guards:
            guarded = _one_at_a_time(method)
            _guards.add(guarded)
            setattr(cls, name, guarded)


def _lock_of(tuner: Any) -> threading.RLock:
    with _locks_lock:
        return _locks.setdefault(tuner, threading.RLock())


def _one_at_a_time(method: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> R:
        with _lock_of(self):
            state = vars(self)
            nargs, copies = state.get("nargs"), state.get("restore_copies")
            try:
                return method(self, *args, **kwargs)
            finally:
                state["nargs"] = nargs
                if copies is not None:
                    state["restore_copies"] = copies

    return guarded


# The cache


def heal_triton_cache() -> None:
    """Make Triton's file cache look at an entry before it believes it: a broken one is set aside, said, and
    a miss. The sweep at start-up sees what is broken then; this sees what breaks later, and costs about
    0.2 ms per kernel a process loads.
    """
    from triton.runtime.cache import FileCacheManager

    if FileCacheManager.get_group in _guards:
        return
    get_group, get_file = FileCacheManager.get_group, FileCacheManager.get_file

    def whole_group(self: FileCacheManager, filename: str) -> dict[str, str] | None:
        folder = Path(self.cache_dir)
        return None if _broken(folder, folder, entry_fault) else get_group(self, filename)

    def whole_file(self: FileCacheManager, filename: str) -> str | None:
        folder = Path(self.cache_dir)
        return None if _broken(folder, folder / filename, file_fault) else get_file(self, filename)

    FileCacheManager.get_group, FileCacheManager.get_file = whole_group, whole_file
    _guards.update((whole_group, whole_file))


def _broken(folder: Path, entry: Path, fault_of: Callable[[Path], str | None]) -> bool:
    if fault_of(entry) is None:
        return False
    if fault := set_aside(folder.parent, entry, fault_of):
        log.warning("%s", told(folder.parent, [f"{folder.name[:12]}: {fault}"]))
    return True


# Threads

_launcher: threading.Thread | None = None
_launcher_lock = threading.Lock()


def only_launching_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of what launches kernels: the first thread to call any such function owns the device for as
    long as it lives; another one gets a `UserError` that names both. Costs 0.3 µs a call.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        global _launcher
        me = threading.current_thread()
        if _launcher is not me:
            with _launcher_lock:
                if _launcher is not None and _launcher.is_alive():
                    raise UserError(
                        f"{function.__qualname__}: called from thread {me.name!r} while {_launcher.name!r} "
                        "launches this process's kernels: call it from that thread, or use a process a device"
                    )
                _launcher = me
        return function(*args, **kwargs)

    return checked
