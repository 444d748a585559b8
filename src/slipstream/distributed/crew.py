"""A rank among the others: its roles, the groups it speaks in, and how all ranks come to one answer.

How processes meet and what becomes of them is world.py's; who has which role placement.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from slipstream.config import UserError
from slipstream.distributed.placement import ALONE, Placement
from slipstream.distributed.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Crew:
    """This rank's part in a run. On one rank all groups are None, and nothing is sent."""

    world: World
    place: Placement
    every: dist.ProcessGroup | None = None
    """All ranks, for decisions and small values on the host (Gloo)."""
    notes: dist.ProcessGroup | None = None
    """All ranks, for what two of them say about taps (Gloo)."""
    drafters: dist.ProcessGroup | None = None
    """The drafter ranks: gradients on their devices, sums on their hosts. None where there is one."""
    readers: dist.ProcessGroup | None = None
    """The target ranks, where they hold shards of one target."""

    @property
    def drafts(self) -> bool:
        return self.world.rank in self.place.drafters

    @property
    def reads(self) -> bool:
        return self.world.rank in self.place.readers

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all; it drafts."""
        return self.world.rank == 0

    def by_first(self, work: Callable[[], T]) -> T:
        """The result of `work`, done by the first rank alone; its user error is every rank's."""
        return self.by(0, work)

    def by(self, rank: int, work: Callable[[], T]) -> T:
        """The same by another rank."""
        if self.every is None:
            return work()
        answer: list[T | UserError | None] = [None]
        if self.world.rank == rank:
            try:
                answer = [work()]
            except UserError as e:
                answer = [e]
        dist.broadcast_object_list(answer, src=rank, group=self.every)
        if isinstance(answer[0], UserError):
            raise answer[0]
        return answer[0]  # type: ignore[return-value]

    def summed(self, values: Sequence[float]) -> list[float]:
        """Sums over the drafter ranks, which all call this."""
        if self.drafters is None:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self.drafters)
        return sums.tolist()


ONE = Crew(World(0, 1, 0, "localhost"), ALONE)


def together(group: dist.ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """What each rank of the group gets from `work`, once all have done it; a user error of one is raised on
    all.
    """
    if group is None:
        return [work()]
    mine: T | UserError
    try:
        mine = work()
    except UserError as e:
        mine = e
    gathered: list[T | UserError] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    results: list[T] = []
    for result in gathered:
        if isinstance(result, UserError):
            raise result
        results.append(result)
    return results


def make_crew(world: World, place: Placement, sharded_target: bool) -> Crew:
    """Called once by every rank of a process group."""
    assert world.size == place.ranks
    if world.size == 1:
        return Crew(world, place)

    def group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup | None:
        made = dist.new_group(list(ranks), backend=backend)  # by all ranks, whether they are in it or not
        return made if isinstance(made, dist.ProcessGroup) else None

    everybody = range(world.size)
    return Crew(
        world,
        place,
        every=group(everybody, "gloo"),
        notes=group(everybody, "gloo"),
        drafters=group(place.drafters) if len(place.drafters) > 1 else None,
        readers=group(place.readers) if sharded_target and len(place.readers) > 1 else None,
    )
