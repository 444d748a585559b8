"""How a process becomes one of several ranks: its place, the process group, the sentinel beside it.

Ranks come from torchrun, on any number of nodes. Who starts it is launch.py's, how a death is told
sentinel.py's.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from slipstream.config import UserError, read_environment
from slipstream.distributed.launch import USER_ERROR, is_rank
from slipstream.distributed.sentinel import Sentinel

TIMEOUT = timedelta(minutes=15)
"""The longest a rank waits for another in a collective: loading and compiling need not take equally long."""


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks."""

    rank: int
    size: int
    local_rank: int
    """The rank on its node; the GPU it has."""
    host: str


@contextlib.contextmanager
def joined(device_type: str) -> Iterator[World]:
    """The default process group (gloo for CPU tensors, nccl too on `cuda`), with the sentinels around it.

    An exception inside is told to all ranks and ends the job. A process that is alone, started by torchrun or
    not, gets no group and no sentinel. On `cuda` the current device becomes the one of the local rank.
    """
    world, rank0 = read_world()
    if device_type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"rank {world.rank} on {world.host}: wants GPU {world.local_rank}, "
                f"{torch.cuda.device_count()} are there: start fewer ranks a node"
            )
        torch.cuda.set_device(world.local_rank)
    if world.size == 1:
        yield world
        return
    store = meet(world)

    def exchange(text: str | None) -> str:
        if text is not None:
            store.set("sentinel", text)
        return store.get("sentinel").decode()

    try:
        sentinel = Sentinel.start(world.rank, world.size, world.host, rank0, exchange)
    except ConnectionError as e:
        raise UserError(
            f"rank {world.rank} on {world.host}: cannot reach rank 0 at {e}: let the nodes connect to each "
            "other on all ports"
        ) from None
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=world.rank, world_size=world.size)
        yield world
        dist.destroy_process_group()
    except BaseException as e:
        sentinel.fail(first_line(e), by_peer=any(map(is_of_peer, chain(e))))
        raise
    sentinel.done()


def read_world() -> tuple[World, str]:
    """From torchrun's environment, with the name or address of rank 0's node; without it, a world of one."""
    values = read_environment("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    host = socket.gethostname()
    if not is_rank():
        return World(0, 1, 0, host), "localhost"
    rank, size, local_rank = (int(values[n] or 0) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return World(rank, size, local_rank, host), str(values["MASTER_ADDR"])


def meet(world: World) -> Store:
    """The store of these very ranks, all of which are there.

    torchrun's own store outlives a restart, and a rank that starts again would find the addresses of dead
    ones in it: so rank 0 draws a new prefix, and tells it to who asks with a number drawn as freshly.
    """
    store, _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=TIMEOUT)))
    if world.rank:
        question = secrets.token_hex(8)
        store.set(f"ask/{world.rank}", question)
        prefix = store.get(f"answer/{question}").decode()
        store.set(f"{prefix}/here/{world.rank}", "")
        return PrefixStore(prefix, store)
    prefix, deadline = secrets.token_hex(8), time.monotonic() + TIMEOUT.total_seconds()
    missing = set(range(1, world.size))
    while missing:
        for rank in missing:
            if store.check([f"ask/{rank}"]):
                store.set(f"answer/{store.get(f'ask/{rank}').decode()}", prefix)
        missing = {rank for rank in missing if not store.check([f"{prefix}/here/{rank}"])}
        if time.monotonic() > deadline:
            raise UserError(f"ranks {sorted(missing)} did not come in {TIMEOUT}: see the logs of their nodes")
        time.sleep(0.02)
    return PrefixStore(prefix, store)


def first_line(error: BaseException) -> str:
    kind = USER_ERROR if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + str(error).partition("\n")[0]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_of_peer(error: BaseException) -> bool:
    """Whether this is how another rank's death shows here. gloo raises a plain RuntimeError."""
    known = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, known) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
