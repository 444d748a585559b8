"""The drafter on several ranks: gradients summed over them, replicas kept equal, or weights in shards.

Here is what the drafter ranks do together. The division by the summed weight, the clip and the update are
step.py's, the files checkpoint.py's; which rank works on which rows is not decided here.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slipstream.config import UserError
from slipstream.distributed.crew import together
from slipstream.models.drafter import Drafter
from slipstream.training.checkpoint import (
    Position,
    load_checkpoint,
    local,
    make_moments,
    save_checkpoint,
    set_steps,
    training_state,
)


class DrafterRanks:
    """The drafter ranks, as one of them sees them. A group of None is a run on one rank: nothing is sent.

    All ranks call the methods in the same order. `backward` alone may be called by one rank more often than
    by another, and by a rank without a row in this step not at all; a sharded drafter wants equally many.
    """

    def __init__(self, drafter: Drafter, group: dist.ProcessGroup | None = None) -> None:
        self.drafter, self.group = drafter, group
        self.parameters = list(drafter.parameters())
        whole = [p for p in reversed(self.parameters) if not isinstance(p, DTensor)]
        self.sharded = len(whole) < len(self.parameters)
        self.matrices = [p for p in whole if p.ndim > 1]
        """In the order in which the backward is done with them, more or less; summed in this order."""
        self.norms = [p for p in whole if p.ndim == 1]
        self._done: set[int] = set()
        self._works: list[dist.Work] = []
        self._last_row = False
        if group is not None:
            for place, p in enumerate(self.matrices):
                p.register_post_accumulate_grad_hook(lambda _, place=place: self._gradient_done(place))

    @property
    def first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.group is None or dist.get_rank(self.group) == 0

    def backward(self, total: Tensor, last: bool) -> None:
        """Backward of a row's loss. During that of a step's `last` row on this rank, every matrix's gradient
        is on its way to the other ranks as soon as it is whole.
        """
        if isinstance(self.drafter, FSDPModule):
            self.drafter.set_requires_gradient_sync(last)
        self._last_row = last and self.group is not None
        total.backward()
        self._last_row = False

    def _gradient_done(self, place: int) -> None:
        if self._last_row:
            self._done.add(place)
            self._sum_next()

    def _sum_next(self) -> None:
        """Start the sums whose turn it is: on all ranks in one order, whatever the backward's was."""
        while len(self._works) in self._done:
            grad = self.matrices[len(self._works)].grad
            assert grad is not None
            work = dist.all_reduce(grad, group=self.group, async_op=True)
            assert work is not None
            self._works.append(work)

    @torch.no_grad()
    def summed(self, weight: Tensor) -> tuple[list[Tensor], Tensor]:
        """Gradients, parameter by parameter (of a sharded one its part here), and slot weight, both summed
        over rows and ranks. Gradients that no row has given are zero.
        """
        for p in self.parameters:
            if p.grad is None:
                assert self.group is None or not self.sharded, "a rank of a sharded drafter had no row"
                p.grad = torch.zeros_like(p)
        if self.group is not None:
            self._done.update(range(len(self.matrices)))
            self._sum_next()
            norms = [p.grad for p in self.norms if p.grad is not None]
            together = torch.cat([*norms, weight.reshape(1)])
            dist.all_reduce(together, group=self.group)
            for work in self._works:
                work.wait()
            self._works.clear()
            self._done.clear()
            *parts, weight = together.split([*map(len, norms), 1])
            torch._foreach_copy_(norms, parts)  # pyright: ignore[reportPrivateImportUsage]
            weight = weight.squeeze()
        return [local(p.grad) for p in self.parameters if p.grad is not None], weight

    def norm(self, grads: list[Tensor]) -> Tensor:
        """Global norm of what `summed` gave: equal on all ranks."""
        if not self.sharded:
            return torch.nn.utils.get_total_norm(grads, foreach=True)
        shards, whole = (
            [g for g, p in zip(grads, self.parameters, strict=True) if isinstance(p, DTensor) is part]
            for part in (True, False)
        )
        squares = torch.nn.utils.get_total_norm(shards, foreach=True) ** 2
        dist.all_reduce(squares, group=self.group)
        return (squares + torch.nn.utils.get_total_norm(whole, foreach=True) ** 2).sqrt()

    def share(self, optimizer: torch.optim.Optimizer) -> None:
        """Give all ranks the first one's masters, and its moments if it has any. Ranks of a sharded drafter
        began with the same ones (`shard_drafter`).
        """
        if self.group is None or self.sharded:
            return
        resumed = torch.tensor(int(bool(optimizer.state)), device=self.parameters[0].device)
        dist.broadcast(resumed, group=self.group, group_src=0)
        if resumed and not optimizer.state:
            make_moments(self.drafter, optimizer)
        state = training_state(self.drafter, optimizer) if resumed else self.drafter.state_dict()
        for tensor in state.values():
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)
        if resumed:
            set_steps(optimizer, state["step"])
        self.drafter.refresh()

    def refuse_difference(self, optimizer: torch.optim.Optimizer) -> None:
        """Replicas that are no longer equal to the last bit are a `UserError` that names a tensor."""
        if self.group is None:
            return
        state = training_state(self.drafter, optimizer)
        whole = {name: t for name, t in state.items() if not isinstance(t, DTensor)}
        bits = torch.stack([t.view(torch.int32).sum(dtype=torch.int64) for t in whole.values()])
        extremes = torch.cat((bits, -bits))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.group)
        high, low = extremes.chunk(2)
        if differing := [n for n, same in zip(whole, (high == -low).tolist(), strict=True) if not same]:
            raise UserError(
                f"the drafter ranks differ in {len(differing)} tensors ({differing[0]}, …): a device "
                "computes wrongly, or they are of different kinds: resume from the last checkpoint on others"
            )

    def save(self, run_dir: Path, optimizer: torch.optim.Optimizer, position: Position, keep: int) -> None:
        """A checkpoint of replicas that were seen to be equal, or of all shards. When it returns, on whatever
        rank, the checkpoint is complete. Raises `UserError`, on all ranks if on one.
        """
        self.refuse_difference(optimizer)
        group = self.group if self.sharded else None

        def write() -> None:
            if self.first or self.sharded:
                save_checkpoint(run_dir, self.drafter, optimizer, position, keep, group)

        together(self.group, write)

    def load(self, checkpoint: Path, optimizer: torch.optim.Optimizer, fingerprint: str) -> Position:
        """A checkpoint of any number of ranks, sharded or not, on all ranks; replicas get it from the first,
        which alone reads files. Raises `UserError`, on all ranks if on one.
        """

        def read() -> Position | None:
            if self.first or self.sharded:
                return load_checkpoint(checkpoint, self.drafter, optimizer, fingerprint)
            return None

        position = together(self.group, read)[0]
        assert position is not None
        self.share(optimizer)
        return position


def shard_drafter(drafter: Drafter, group: dist.ProcessGroup, dtype: torch.dtype, compiled: bool) -> None:
    """Lay masters, gradients and moments of the matrices in equal parts on the ranks of `group` (FSDP2);
    each layer is gathered in `dtype` when its turn comes. In place of `Drafter.use_gpu`, and before the
    optimiser.

    Gradients of a row are rounded to `dtype`, as FSDP takes them from the gathered weights; their sums over
    rows and ranks are fp32. Norms are small and stay whole, in fp32.
    """
    for p in drafter.parameters():
        dist.broadcast(p.detach(), group=group, group_src=0)
    device = drafter.fc.weight.device.type
    # rotary cosines are among a layer's inputs: they stay fp32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = DeviceMesh.from_group(group, device)
    norms = {p for p in drafter.parameters() if p.ndim == 1}
    for module in (*drafter.stack(), drafter):
        # the root, too, is put away after a forward: one without a backward must leave shards behind
        sharded = fully_shard(
            module, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=norms
        )
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
    drafter.use_shards(compiled)
