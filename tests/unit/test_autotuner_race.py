"""Six orders in which two threads meet in one Triton autotuner: our guard survives all, weaker guards do not.

The autotuner is Triton's own (and FLA's, where it is installed); only the launch is played by the test, so no
device is needed. A schedule holds thread A inside a launch until thread B is through, or until `patience`
seconds have shown that a lock keeps B out. It returns what went wrong; nothing is a pass.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
import triton.language as tl  # noqa: E402
from triton.runtime.autotuner import Autotuner, Config  # noqa: E402

from slipstream.system.kernels import guard_autotuner  # noqa: E402


@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pass


class Subclass(Autotuner):
    """Does what FLA's does: looks at the key itself, then calls Triton's `run`."""

    def run(self, *args, **kwargs):
        self.looked_at = args[2]
        return super().run(*args, **kwargs)


CLASSES: list[type] = [Autotuner, Subclass]
if find_spec("fla") is not None:
    from fla.ops.utils.cache import CachedAutotuner

    CLASSES.append(CachedAutotuner)


class Tensor:
    dtype = "fp32"

    def __init__(self, value: float) -> None:
        self.value = value

    def zero_(self) -> None:
        self.value = 0.0

    def clone(self) -> Tensor:
        return Tensor(self.value)

    def copy_(self, other: Tensor) -> None:
        self.value = other.value


Launched = Callable[[str, Tensor], None]


class Jit:
    """What an autotuner needs of a jitted function; a launch tells the schedule its thread and output."""

    def __init__(self, launched: Launched) -> None:
        self.fn, self.arg_names, self.launched = kernel.fn, kernel.arg_names, launched

    def run(self, _x: Tensor, out: Tensor, _n: int, **_: object) -> None:
        self.launched(threading.current_thread().name, out)

    warmup = run


def bench(call: Callable[[], None], quantiles: object) -> list[float]:
    call()
    return [1.0, 1.0, 1.0]


class Race:
    """One autotuner, two threads A and B, and the guard under test."""

    def __init__(self, cls: type, install: Callable[[], None], before: bool, patience: float) -> None:
        self.cls, self.install, self.before, self.patience = cls, install, before, patience
        self.a_inside, self.b_inside = threading.Event(), threading.Event()
        self.a_done, self.b_done = threading.Event(), threading.Event()

    def tuner(self, launched: Launched, reset: tuple[str, ...] = (), restore: tuple[str, ...] = ()):
        """`before`: the guard comes when the kernel is there already, as kernels are made at import."""
        if not self.before:
            self.install()
        configs = [Config({"BLOCK": 16 << i}, num_warps=4) for i in range(3)]
        jit = Jit(launched)
        tuner = self.cls(jit, jit.arg_names, configs, ["n"], list(reset), list(restore), do_bench=bench)
        if self.before:
            self.install()
        return tuner

    def call(self, tuner, n: int, out: Tensor | None = None) -> None:
        tuner.run(Tensor(1.0), out or Tensor(0.0), n, grid=(1,), warmup=False)

    def hold_a(self, thread: str, _out: Tensor) -> None:
        """A stays in its first launch until B is through."""
        if thread == "A" and not self.a_inside.is_set():
            self.a_inside.set()
            self.b_done.wait(self.patience)

    def both(self, a: Callable[[], None], b: Callable[[], None], b_waits: bool = True) -> list[str]:
        wrong = []

        def play(part: Callable[[], None], done: threading.Event) -> None:
            try:
                part()
            except (TypeError, KeyError, AttributeError) as e:  # what the race looks like
                wrong.append(f"{threading.current_thread().name}: {type(e).__name__}: {e}")
            finally:
                done.set()

        def b_after_a() -> None:
            if b_waits:
                assert self.a_inside.wait(5)
            b()

        threads = [
            threading.Thread(target=play, args=(a, self.a_done), name="A", daemon=True),
            threading.Thread(target=play, args=(b_after_a, self.b_done), name="B", daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.patience + 3)
            if thread.is_alive():
                wrong.append(f"{thread.name}: hangs")
        return wrong


def two_cold_keys(race: Race) -> list[str]:
    tuner = race.tuner(race.hold_a)
    return race.both(lambda: race.call(tuner, 100), lambda: race.call(tuner, 200))


def a_tuned_key_beside_a_cold_one(race: Race) -> list[str]:
    tuner = race.tuner(race.hold_a)
    race.call(tuner, 7)
    return race.both(lambda: race.call(tuner, 100), lambda: race.call(tuner, 7))


def both_first_calls_at_once(race: Race) -> list[str]:
    start = threading.Barrier(2)

    def launched(thread: str, out: Tensor) -> None:
        race.hold_a(thread, out)
        if thread == "B":
            race.a_inside.wait(race.patience)

    tuner = race.tuner(launched)

    def first(n: int) -> None:
        start.wait(5)
        race.call(tuner, n)

    return race.both(lambda: first(100), lambda: first(200), b_waits=False)


def a_reset_hook_beside_a_live_tensor(race: Race) -> list[str]:
    """A's tuning must not zero the output of B, which replays a tuned key and has no reset due."""

    def launched(thread: str, _out: Tensor) -> None:
        if thread == "A" and not race.a_inside.is_set():
            race.a_inside.set()
            race.b_inside.wait(race.patience)
        if thread == "B":
            race.b_inside.set()
            race.a_done.wait(race.patience)

    tuner = race.tuner(launched, reset=("out_ptr",))
    tuner.cache[(7, "fp32", "fp32")] = tuner.configs[0]
    out_of_b = Tensor(42.0)
    wrong = race.both(lambda: race.call(tuner, 100), lambda: race.call(tuner, 7, out_of_b))
    return wrong + ([] if out_of_b.value == 42.0 else [f"B's tensor was overwritten: {out_of_b.value}"])


def two_restores_at_once(race: Race) -> list[str]:
    """A kernel that adds 1 in place, with `restore_value`, ends at exactly one addition for each thread."""

    def launched(thread: str, out: Tensor) -> None:
        out.value += 1.0
        race.hold_a(thread, out)

    tuner = race.tuner(launched, restore=("out_ptr",))
    outs = {"A": Tensor(10.0), "B": Tensor(500.0)}
    wrong = race.both(lambda: race.call(tuner, 100, outs["A"]), lambda: race.call(tuner, 200, outs["B"]))
    if (outs["A"].value, outs["B"].value) != (11.0, 501.0):
        wrong.append(f"values {outs['A'].value} {outs['B'].value}, not 11 501")
    return wrong


def a_call_from_within_a_benchmark(race: Race) -> list[str]:
    """The outer call must find its arguments and its copies again: `out` is restored but for one addition."""

    def launched(_thread: str, out: Tensor) -> None:
        out.value += 1.0
        if not race.a_inside.is_set():
            race.a_inside.set()
            race.call(tuner, 7)

    tuner = race.tuner(launched, restore=("out_ptr",))
    out = Tensor(10.0)
    wrong = race.both(lambda: race.call(tuner, 100, out), lambda: None)
    return wrong + ([] if out.value == 11.0 else [f"value {out.value}, not 11"])


SCHEDULES = [
    two_cold_keys,
    a_tuned_key_beside_a_cold_one,
    both_first_calls_at_once,
    a_reset_hook_beside_a_live_tensor,
    two_restores_at_once,
    a_call_from_within_a_benchmark,
]


# Guards that look right and are not


def no_guard() -> None:
    pass


def around(name: str, lock_for: Callable[[Autotuner, tuple], object]) -> None:
    method = vars(Autotuner)[name]

    def locked(self, *args, **kwargs):
        with lock_for(self, args):
            return method(self, *args, **kwargs)

    setattr(Autotuner, name, locked)


class Open:
    """No lock."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def lock_around_the_benchmark() -> None:
    lock = threading.RLock()
    around("_bench", lambda _tuner, _args: lock)


def lock_while_the_key_is_cold() -> None:
    lock = threading.RLock()
    around("run", lambda tuner, args: Open() if any(k[0] == args[2] for k in tuner.cache) else lock)


def lock_made_at_first_use() -> None:
    def lock_of(tuner: Autotuner, _args: tuple) -> object:
        if not hasattr(tuner, "own_lock"):
            time.sleep(0.02)  # stands for a thread switch at this very place
            tuner.own_lock = threading.RLock()
        return tuner.own_lock

    around("run", lock_of)


def lock_made_in_init() -> None:
    init = Autotuner.__init__

    def with_lock(self, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        self.init_lock = threading.RLock()

    Autotuner.__init__ = with_lock
    around("run", lambda tuner, _args: vars(tuner).get("init_lock", Open()))


def nargs_by_thread() -> None:
    values = threading.local()
    Autotuner.nargs = property(
        lambda self: vars(values).get(id(self)), lambda self, v: vars(values).update({id(self): v})
    )


def lock_that_forgets_nargs() -> None:
    lock = threading.RLock()
    around("run", lambda _tuner, _args: lock)


@pytest.fixture
def bare(monkeypatch):
    """Triton's classes as they come, and again afterwards as they were before the test."""
    for cls in CLASSES:
        for name in ("run", "warmup", "_bench", "__init__"):
            if name in vars(cls):
                monkeypatch.setattr(cls, name, inspect.unwrap(vars(cls)[name]))
    monkeypatch.setattr(Autotuner, "nargs", None, raising=False)
    monkeypatch.setattr(Autotuner, "__init_subclass__", lambda **_: None, raising=False)
    return monkeypatch


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.__name__)
@pytest.mark.usefixtures("bare")
def test_our_guard_survives(schedule, cls):
    assert schedule(Race(cls, guard_autotuner, before=True, patience=0.15)) == []


@pytest.mark.parametrize(
    ("guard", "schedule"),
    [
        *((no_guard, schedule) for schedule in SCHEDULES),
        (lock_around_the_benchmark, a_tuned_key_beside_a_cold_one),
        (lock_while_the_key_is_cold, a_tuned_key_beside_a_cold_one),
        (lock_made_at_first_use, both_first_calls_at_once),
        (lock_made_in_init, two_cold_keys),
        (nargs_by_thread, two_restores_at_once),
        (lock_that_forgets_nargs, a_call_from_within_a_benchmark),
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.usefixtures("bare")
def test_a_weaker_guard_is_caught(guard, schedule):
    wrong = schedule(Race(Autotuner, guard, before=guard is lock_made_in_init, patience=1.0))
    assert wrong
    assert not any("hangs" in w for w in wrong)


@pytest.mark.usefixtures("bare")
def test_guarding_twice_changes_nothing_and_classes_loaded_later_are_guarded_as_they_come():
    guard_autotuner()
    first = Autotuner.run, Autotuner.warmup, Subclass.run
    guard_autotuner()
    assert (Autotuner.run, Autotuner.warmup, Subclass.run) == first

    def run(self, *args, **kwargs):
        return Autotuner.run(self, *args, **kwargs)

    later = type("Later", (Autotuner,), {"run": run})
    latest = type("Latest", (later,), {"run": run})
    for cls in (later, latest):
        assert vars(cls)["run"] is not run
        assert inspect.unwrap(vars(cls)["run"]) is run
        assert "warmup" not in vars(cls), "what a class inherits is guarded where it stands"


@pytest.mark.usefixtures("bare")
def test_warmup_waits_for_a_tuning_thread():
    race = Race(Autotuner, guard_autotuner, before=True, patience=0.15)
    tuner = race.tuner(race.hold_a)
    warm = lambda: tuner.warmup(Tensor(1.0), Tensor(0.0), 7, grid=(1,))  # noqa: E731
    assert race.both(lambda: race.call(tuner, 100), warm) == []


@pytest.mark.usefixtures("bare")
def test_a_failed_call_leaves_no_arguments_behind():
    guard_autotuner()
    race = Race(Autotuner, no_guard, before=True, patience=0.1)

    def fails(_thread: str, _out: Tensor) -> None:
        raise RuntimeError("the launch")

    tuner = race.tuner(fails)
    with pytest.raises(RuntimeError, match="the launch"):
        race.call(tuner, 100)
    assert tuner.nargs is None
