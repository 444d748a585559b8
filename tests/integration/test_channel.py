"""Taps between ranks: equal to the last bit and in order, bounded by credits, and every fault named.

Ranks are processes joined by Gloo: drafters first, then targets, as in a run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.data.pack import Row
from slipstream.distributed.channel import Channel, Coming, TapReceiver, TapSender
from slipstream.distributed.wire import Traffic
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import random_row

TAPS, WIDTH, TOKENS = 2, 8, 24
ROWS, PAUSE = 8, 0.05


class Trip(NamedTuple):
    """A row of the global sequence, who makes its taps and who takes them."""

    row_id: int
    source: int
    to: int


@functools.cache
def row_of(row_id: int) -> Row:
    chance = random.Random(row_id)
    lengths = tuple(chance.randint(2, 8) for _ in range(chance.randint(1, 3)))
    row = random_row(lengths, TOKENS, seed=row_id)
    return replace(row, row_id=row_id)


def used_of(row_id: int) -> int:
    return row_of(row_id).spans()[-1][1]


def documents_of(row: Row) -> list[int]:
    """Their numbers in the dataset."""
    return [100 * row.row_id + i for i in range(len(row.spans()))]


def taps_of(row_id: int, dtype: torch.dtype = torch.float32) -> Tensor:
    taps_SC = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(row_id))
    taps_SC[used_of(row_id) :] = 0
    return taps_SC.to(dtype)


def channel(deadline: float = 20, credits: int = 2, dtype: torch.dtype = torch.float32) -> Channel:
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    return Channel(TAPS, WIDTH, dtype, torch.device("cpu"), control, deadline, credits)


def coming(trips: list[Trip], rank: int) -> Iterator[Coming]:
    return (Coming(t.row_id, used_of(t.row_id), t.source) for t in trips if t.to == rank)


def play(rank: int, ranks: int, drafters: int, trips: list[Trip], way: Channel) -> Traffic:
    """All rows of the sequence through the link, each compared."""
    if rank < drafters:
        with TapReceiver(coming(trips, rank), range(drafters, ranks), TOKENS, way) as link:
            for trip in trips:
                if trip.to == rank:
                    assert torch.equal(link(row_of(trip.row_id)), taps_of(trip.row_id, way.dtype))
        return link.traffic
    with TapSender(range(drafters), way) as sender:
        for trip in trips:
            if trip.source == rank:
                row = row_of(trip.row_id)
                sender.send(row, taps_of(trip.row_id, way.dtype), trip.to, documents_of(row))
    return sender.traffic


def deal(drafters: int, targets: int, seed: int) -> list[Trip]:
    """A sequence of rows given out at random, so that ranks differ in rows and some have several in turn."""
    chance = random.Random(seed)
    rows = range(chance.randint(0, 12))
    return [Trip(i, drafters + chance.randrange(targets), chance.randrange(drafters)) for i in rows]


def play_deals(rank: int, ranks: int, drafters: int) -> None:
    for credits, dtype in ((1, torch.float32), (2, torch.bfloat16), (3, torch.float32)):
        way = channel(credits=credits, dtype=dtype)
        for seed in range(6):
            trips = deal(drafters, ranks - drafters, 10 * credits + seed)
            mine = [t for t in trips if rank in (t.source, t.to)]
            traffic = play(rank, ranks, drafters, trips, way)
            assert traffic.rows == len(mine)
            assert traffic.bytes == sum(used_of(t.row_id) for t in mine) * WIDTH * dtype.itemsize


@pytest.mark.parametrize(("drafters", "targets"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_taps_arrive_bit_equal_and_in_order_whoever_makes_and_takes_them_with_any_credits(drafters, targets):
    run_ranks(drafters + targets, play_deals, drafters)


# ---- pace ----


def slow_consumer(rank: int, ranks: int, folder: Path, credits: int) -> Traffic:
    """One target; one drafter that holds each row until all that may be sent meanwhile is, and a while on."""
    way = channel(credits=credits)
    trips = [Trip(i, 1, 0) for i in range(ROWS)]
    if rank == 0:
        places = set()
        with TapReceiver(coming(trips, 0), [1], TOKENS, way) as link:
            for i in range(ROWS):
                places.add(link(row_of(i)).data_ptr())
                ahead, beyond = folder / f"{i + credits - 1}", folder / f"{i + credits}"
                while i + credits <= ROWS and not ahead.exists():
                    time.sleep(0.001)  # the test's timeout ends it
                time.sleep(PAUSE)
                assert not beyond.exists(), f"row {i + credits} was sent while row {i} was in use"
        assert len(places) == credits
        return link.traffic
    alive: list[weakref.ref] = []
    with TapSender([0], way) as sender:
        for i in range(ROWS):
            memory = np.zeros((TOKENS, WIDTH), np.float32)
            alive.append(weakref.ref(memory))
            sender.send(row_of(i), torch.from_numpy(memory).copy_(taps_of(i)), 0, documents_of(row_of(i)))
            del memory
            (folder / f"{i}").touch()
            assert sum(ref() is not None for ref in alive) == min(credits, i + 1)
    return sender.traffic


@pytest.mark.parametrize("credits", [1, 2, 3])
def test_with_a_slow_consumer_the_sender_is_credits_rows_ahead_and_no_further(tmp_path, credits):
    consumer, producer = run_ranks(2, slow_consumer, tmp_path, credits, timeout=30)
    assert producer.waited > (ROWS - credits - 1) * PAUSE > consumer.waited


def slow_producer(rank: int, ranks: int) -> Traffic:
    way, trips = channel(), [Trip(i, 1, 0) for i in range(ROWS)]
    if rank == 0:
        return play(rank, ranks, 1, trips, way)
    with TapSender([0], way) as sender:
        for i in range(ROWS):
            time.sleep(PAUSE)
            sender.send(row_of(i), taps_of(i), 0, documents_of(row_of(i)))
    return sender.traffic


def test_with_a_slow_producer_the_receiver_waits_and_says_so():
    consumer, producer = run_ranks(2, slow_producer)
    assert consumer.waited > ROWS * PAUSE / 2 > producer.waited


# ---- faults: each is named on the rank that meets it ----


def differ(rank: int, ranks: int, drafters_plan: list[Trip], targets_plan: list[Trip]) -> None:
    play(rank, ranks, 1, drafters_plan if rank == 0 else targets_plan, channel(deadline=5))


def errors(ranks: int, function: Callable[..., Any], *args: Any) -> list[str]:
    """The last line of what each rank raised; empty where it raised nothing."""
    outcomes = rank_outcomes(ranks, function, *args, timeout=30)
    return [o.error.strip().splitlines()[-1] if o.error else "" for o in outcomes]


def test_ranks_whose_plans_differ_in_a_row_both_name_both_rows():
    plan = [Trip(0, 1, 0), Trip(1, 1, 0)]
    for error in errors(2, differ, plan, [plan[0], Trip(5, 1, 0)]):
        assert "LinkError" in error
        assert f"row 1 ({used_of(1)} tokens × 8, number 1)" in error
        assert f"row 5 ({used_of(5)} tokens × 8, number 1)" in error
        assert "rank 0" in error
        assert "rank 1" in error


def test_a_sender_that_ends_before_its_receiver_is_named_by_it():
    receiver, sender = errors(2, differ, [Trip(0, 1, 0), Trip(1, 1, 0)], [Trip(0, 1, 0)])
    assert receiver.endswith(
        f"rank 1 has no more rows, rank 0 asked for row 1 ({used_of(1)} tokens × 8, number 1)"
    )
    assert "rank 0 has row 1" in sender
    assert "rank 1 has no more rows" in sender


def test_a_receiver_that_ends_before_its_sender_is_named_by_it():
    receiver, sender = errors(2, differ, [Trip(0, 1, 0)], [Trip(0, 1, 0), Trip(1, 1, 0)])
    assert "rank 0 has no more rows, rank 1 would send row 1" in sender
    assert "rank 1" in receiver


def leave_early(rank: int, ranks: int, credits: int) -> Traffic | None:
    trips, way = [Trip(i, 1, 0) for i in range(4)], channel(deadline=5, credits=credits)
    if rank == 1:
        return play(rank, ranks, 1, trips, way)
    with TapReceiver(coming(trips, 0), [1], TOKENS, way) as link:
        link(row_of(0))


@pytest.mark.parametrize("credits", [1, 2])
def test_a_drafter_that_leaves_with_rows_to_come_is_told_and_its_sender_too(credits):
    receiver, sender = errors(2, leave_early, credits)
    assert "rank 0 ends before row 1 of rank 1" in receiver
    assert "rank 0 has an error of its own, rank 1 would send row" in sender


def wrong_width(rank: int, ranks: int) -> Traffic | None:
    if rank == 0:
        return play(rank, ranks, 1, [Trip(0, 1, 0)], channel(deadline=5))
    with TapSender([0], channel(deadline=5)) as sender:
        sender.send(row_of(0), taps_of(0)[:, :6].contiguous(), 0, documents_of(row_of(0)))


def test_taps_of_another_width_do_not_travel():
    for error in errors(2, wrong_width):
        assert "tokens × 8, number 0)" in error
        assert "tokens × 6, number 0)" in error


def other_settings(rank: int, ranks: int) -> None:
    way = channel(deadline=5)
    play(rank, ranks, 1, [], replace(way, credits=2 + rank, width=WIDTH * (1 + rank)))


def test_ends_that_were_set_up_differently_say_so_before_the_first_row():
    for error in errors(2, other_settings):
        assert "2 taps of 8 × 4 bytes in all, 2 credits" in error
        assert "2 taps of 16 × 4 bytes in all, 3 credits" in error


def ask_out_of_turn(rank: int, ranks: int) -> None:
    trips = [Trip(0, 1, 0), Trip(1, 1, 0)]
    if rank == 1:
        return play(rank, ranks, 1, trips, channel(deadline=5))
    with TapReceiver(coming(trips, 0), [1], TOKENS, channel(deadline=5)) as link:
        link(row_of(1))


def test_a_drafter_that_wants_another_row_than_its_plan_is_told_and_its_sender_too():
    receiver, sender = errors(2, ask_out_of_turn)
    assert f"rank 0 wants row 1 ({used_of(1)} tokens), asked for row 0 ({used_of(0)} tokens" in receiver
    assert "rank 0 has an error of its own" in sender


def poison(rank: int, ranks: int, kind: str, at: int, late: bool) -> None:
    """`late`: as on a GPU, where the verdict comes when the next row is queued."""
    trips = [Trip(i, 2, i % 2) for i in range(ROWS)]
    if late:
        pretend_gpu()
    way = channel(deadline=5)
    if rank < 2:
        with TapReceiver(coming(trips, rank), [2], TOKENS, way) as link:
            for trip in trips[rank::2]:
                link(row_of(trip.row_id))
                assert trip.row_id < at + late
    with TapSender([0, 1], way) as sender:
        for trip in trips:
            row, taps_SC = row_of(trip.row_id), taps_of(trip.row_id)
            if trip.row_id == at:
                start, end = (0, used_of(at)) if kind == "the same" else row.spans()[1]
                bad = {"not finite": torch.nan, "all zero": 0.0, "the same": 0.5}[kind]
                taps_SC[start:end, WIDTH // TAPS :] = bad
            sender.send(row, taps_SC, trip.to, documents_of(row))
            assert trip.row_id < at + late


class NoStream:
    """A GPU's stream or event to whom everything has happened already."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self) -> None: ...

    def wait_event(self, event: NoStream) -> None: ...

    def wait_stream(self, stream: NoStream) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: NoStream) -> float:
        return 0.0


def pretend_gpu() -> None:
    """This rank takes a GPU's way through the code, with a CPU's tensors."""
    for name in ("Stream", "Event", "current_stream"):
        setattr(torch.cuda, name, NoStream)
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # pyright: ignore
    Channel.gpu = True  # pyright: ignore


@pytest.mark.parametrize(
    ("kind", "at", "late"),
    [
        ("not finite", 5, False),
        ("all zero", 5, False),
        ("the same", 5, False),
        ("not finite", 5, True),
        ("all zero", ROWS - 1, True),
    ],
)
def test_a_poisoned_row_ends_all_ranks_with_its_number_its_document_and_its_tap(kind, at, late):
    bad = documents_of(row_of(at))
    assert len(bad) > 1
    for error in errors(3, poison, kind, at, late):
        assert "UserError" in error
        assert f"row {at}, documents {bad if kind == 'the same' else bad[1:2]}: " in error
        assert f"tap 2 of 2 is {kind} at" in error


def silent(rank: int, ranks: int, quiet: int, gone: bool) -> None:
    way, trips = channel(deadline=1.0), [Trip(i, 1, 0) for i in range(4)]
    if rank != quiet:
        return play(rank, ranks, 1, trips, way)
    link = TapReceiver(coming(trips, 0), [1], TOKENS, way) if rank == 0 else TapSender([0], way)
    if gone:
        os._exit(1)
    time.sleep(2.5)
    assert link.traffic.rows == 0


@pytest.mark.parametrize("quiet", [0, 1])
def test_a_peer_that_stops_answering_is_named_after_the_deadline(quiet):
    error = errors(2, silent, quiet, False)[1 - quiet]
    assert f"LinkError: rank {quiet} has been silent for 1 s: rank {1 - quiet} waits for" in error


@pytest.mark.parametrize("quiet", [0, 1])
def test_a_peer_that_dies_is_named_at_once(quiet):
    error = errors(2, silent, quiet, True)[1 - quiet]
    assert f"LinkError: rank {quiet} is gone: rank {1 - quiet} waits for" in error
