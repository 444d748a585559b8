"""Taps between ranks: `TapSender` on a target's rank, `TapReceiver` (a `TapLink`) on a drafter's.

Both ends know from the plan which row comes next between them. The receiver asks for a row when a slot is
free and its receive is posted; only then does the sender send. So memory is bounded by `credits` slots, no
GPU sits in a send whose receive nobody posted, and what is asked for is compared with what would be sent
before a byte of taps moves. A row waits only for rows before it: where all ranks walk one sequence, there is
no deadlock.

Taps travel over the default group (NCCL for GPU tensors, Gloo for others), notes over a Gloo group (wire.py).
The default group must have been made without `device_id`: then each pair of ranks has an NCCL communicator
and a stream of its own, made by the constructors here in an order that fits on all ranks; with it, sends
queue behind all else that the group does. A receive occupies thread blocks of its GPU from when it is posted:
NCCL_MAX_P2P_NCHANNELS bounds how many. Not here: the plan, launching, a process's death, taps on disk.

Letters: S tokens of a row · U those that are no padding · T taps · H hidden size · C = T·H.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.config import UserError
from slipstream.data.pack import Row
from slipstream.distributed.wire import HELLO, ROW, LinkError, Listening, Note, Traffic, Waits, Wire, posted
from slipstream.models.selfcheck import refuse_unhealthy


@dataclass(frozen=True)
class Channel:
    """What both ends agree on: taps of `width` C in `dtype`, and how many rows may be under way.

    `control` is a Gloo group of all ranks. A peer that says nothing for `deadline` seconds is an error: make
    it longer than any rank's compilation, validation or save, and the default group's timeout longer still:
    NCCL's runs from when a receive is posted.
    """

    taps: int
    width: int
    dtype: torch.dtype
    device: torch.device
    control: dist.ProcessGroup
    deadline: float
    credits: int = 2

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def hello(self) -> Note:
        return Note(HELLO, self.credits, self.dtype.itemsize, self.taps, self.width)


@dataclass(frozen=True)
class Parcel:
    """A row's taps on their way. On a GPU, `made` has passed when they are there."""

    row: Row
    documents: Sequence[int]
    taps_UC: Tensor
    made: torch.cuda.Event | None
    to: int
    told: dist.Work
    data: dist.Work


class TapSender:
    """Sends taps to drafters' ranks; one a target's rank, in a `with` block around all of its rows.

    `receivers` are all ranks that it may send to, ascending; the constructor meets them. At most `credits`
    rows are under way. Unhealthy taps end the run with a `UserError` here and at the receivers: on a CPU
    before they are sent; on a GPU, where the pass is not over yet, when the next row is. Raises `LinkError`
    when a receiver disagrees, left early, or is silent.
    """

    def __init__(self, receivers: Sequence[int], channel: Channel) -> None:
        assert list(receivers) == sorted(set(receivers))
        self.channel, self.waits = channel, Waits(channel.gpu)
        self.wire = Wire(channel.control, channel.deadline, channel.gpu)
        self.beside = torch.cuda.Stream(channel.device) if channel.gpu else None
        self.numbers = dict.fromkeys(receivers, 0)
        self.under_way: deque[Parcel] = deque()
        self.rows = self.bytes = 0
        for peer in receivers:
            self.wire.meet(peer, channel.hello())
            first = torch.zeros(1, dtype=channel.dtype, device=channel.device)
            self.wire.settle(posted(dist.isend(first, peer)), peer, "the first bytes to be taken")

    def send(self, row: Row, taps_ST: Tensor, to: int, documents: Sequence[int]) -> None:
        """Sends the taps [S, C] of `row`, which nobody may write to again, as soon as rank `to` asks for it.

        `documents`: the dataset's number of each document in the row, to be named if its taps are unhealthy.
        """
        assert taps_ST.dtype == self.channel.dtype
        used = row.spans()[-1][1]
        taps_UC = taps_ST[:used]
        made: torch.cuda.Event | None = None
        if not self.channel.gpu:
            self._check(row, documents, taps_UC, None)
        else:
            made = torch.cuda.Event()
            made.record()
            self._check_newest()
        note = Note(ROW, self.numbers[to], row.row_id, used, taps_ST.shape[1])
        with self.waits:
            asked = self.wire.hear(self.wire.listen(to), f"its asking for {note}")
            if asked != note:
                if asked.kind == ROW:  # it listens, and raises the like
                    self.wire.finish(self.wire.tell(to, note), to, str(note))
                raise LinkError(f"rank {to} has {asked}, rank {dist.get_rank()} would send {note}")
            if len(self.under_way) == self.channel.credits:
                self._retire()
            told, data = self.wire.tell(to, note), posted(dist.isend(taps_UC, to))
        self.under_way.append(Parcel(row, documents, taps_UC, made, to, told, data))
        self.numbers[to] += 1
        self.rows += 1
        self.bytes += taps_UC.nbytes

    @property
    def traffic(self) -> Traffic:
        """`waited`: for receivers without a free slot."""
        return Traffic(self.rows, self.bytes, self.waits.seconds())

    def close(self) -> None:
        """The end of the rows, agreed on with every receiver."""
        try:
            self._check_newest()
        except UserError as e:
            self.wire.leave(self.numbers, e)
            raise
        while self.under_way:
            self._retire()
        self.wire.part(self.numbers)

    def __enter__(self) -> TapSender:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.wire.leave(self.numbers, error)

    def _retire(self) -> None:
        """The oldest row's memory is free once it has left: on a GPU in the order of its queue."""
        parcel = self.under_way.popleft()
        what = f"row {parcel.row.row_id} to be taken"
        self.wire.finish(parcel.told, parcel.to, what)
        self.wire.settle(parcel.data, parcel.to, what)

    def _check_newest(self) -> None:
        if self.channel.gpu and self.under_way:
            newest = self.under_way[-1]
            self._check(newest.row, newest.documents, newest.taps_UC, newest.made)

    def _check(
        self, row: Row, documents: Sequence[int], taps_UC: Tensor, made: torch.cuda.Event | None
    ) -> None:
        """On a GPU beside the pass over the next row: that is queued, so only the host waits."""
        with torch.cuda.stream(self.beside):
            if self.beside is not None and made is not None:
                self.beside.wait_event(made)
            refuse_unhealthy(row, taps_UC, self.channel.taps, documents)


class Coming(NamedTuple):
    """A row as the receiver's plan foretells it: its id, its tokens but for padding, who makes its taps."""

    row_id: int
    used: int
    source: int


@dataclass(frozen=True)
class Asked:
    """A row that was asked for, and where its taps will lie."""

    coming: Coming
    note: Note
    slot_SC: Tensor
    header: Listening
    told: dist.Work
    data: dist.Work


class TapReceiver:
    """Row → taps [S, C] from the rank that made them; one a drafter's rank, in a `with` block around all.

    The taps are valid until the next row is asked for: whoever keeps them clones them. Backward through them
    must have been launched by then. `order` is every row of this rank; it is read `credits` rows ahead, so it
    may yield only rows that will be sent whatever happens. `sources` are all ranks that make them, ascending;
    the constructor meets them. `tokens` is S. Raises `LinkError` when a sender disagrees, ended or is silent,
    and a sender's `UserError`.
    """

    def __init__(
        self, order: Iterator[Coming], sources: Sequence[int], tokens: int, channel: Channel
    ) -> None:
        assert list(sources) == sorted(set(sources))
        self.channel, self.waits = channel, Waits(channel.gpu)
        self.wire = Wire(channel.control, channel.deadline, channel.gpu)
        self.order = order
        shape, dtype, device = (tokens, channel.width), channel.dtype, channel.device
        self.free = deque(torch.zeros(shape, dtype=dtype, device=device) for _ in range(channel.credits))
        self.in_use: Tensor | None = None
        self.numbers = dict.fromkeys(sources, 0)
        self.asked: deque[Asked] = deque()
        self.rows = self.bytes = 0
        self.beside = torch.cuda.Stream(channel.device) if channel.gpu else None
        for peer in sources:
            self.wire.meet(peer, channel.hello())
            first = torch.zeros(1, dtype=dtype, device=device)
            self.wire.settle(posted(dist.irecv(first, peer)), peer, "its first bytes")
        self._ask()

    def __call__(self, row: Row) -> Tensor:
        if self.in_use is not None:
            self.free.append(self.in_use)
            self.in_use = None
        self._ask()
        used = row.spans()[-1][1]
        if not self.asked:
            raise LinkError(f"rank {dist.get_rank()} wants row {row.row_id}: its plan has no more rows")
        head = self.asked.popleft()
        if (row.row_id, used) != head.coming[:2]:
            raise LinkError(
                f"rank {dist.get_rank()} wants row {row.row_id} ({used} tokens), asked for {head.note}"
            )
        with self.waits:
            coming = self.wire.hear(head.header, str(head.note))
            if coming != head.note:
                raise LinkError(
                    f"rank {head.coming.source} has {coming}, rank {dist.get_rank()} asked for {head.note}"
                )
            self.wire.finish(head.told, head.coming.source, str(head.note))
            self.wire.settle(head.data, head.coming.source, str(head.note))
        self.in_use = head.slot_SC
        self.rows += 1
        self.bytes += head.slot_SC[:used].nbytes
        return head.slot_SC

    @property
    def traffic(self) -> Traffic:
        """`waited`: for taps that were not there."""
        return Traffic(self.rows, self.bytes, self.waits.seconds())

    def close(self) -> None:
        """The end of the rows, agreed on with every sender. `LinkError` when rows of the order are left."""
        left = self.asked[0].coming if self.asked else next(self.order, None)
        if left is not None:
            self.wire.leave(self.numbers, None)
            raise LinkError(f"rank {dist.get_rank()} ends before row {left.row_id} of rank {left.source}")
        self.wire.part(self.numbers)

    def __enter__(self) -> TapReceiver:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.wire.leave(self.numbers, error)

    def _ask(self) -> None:
        """Asks for a row for every free slot. On a GPU the receive waits for what was launched up to now,
        which reads the slot, and not for what the caller launches next.
        """
        if self.beside is not None:
            self.beside.wait_stream(torch.cuda.current_stream(self.channel.device))
        while self.free and (coming := next(self.order, None)) is not None:
            slot_SC, source = self.free.popleft(), coming.source
            assert coming.used <= len(slot_SC)
            note = Note(ROW, self.numbers[source], coming.row_id, coming.used, self.channel.width)
            self.numbers[source] += 1
            header = self.wire.listen(source)
            with torch.cuda.stream(self.beside):
                slot_SC[coming.used :].zero_()
                data = posted(dist.irecv(slot_SC[: coming.used], source))
            self.asked.append(Asked(coming, note, slot_SC, header, self.wire.tell(source, note), data))
