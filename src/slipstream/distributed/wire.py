"""What two ranks tell one another beside the taps: notes of five integers over a Gloo group, with a deadline;
and the clock of how long a rank stood still for its peers. When notes are sent is channel.py's.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.config import UserError
from slipstream.models.target import one_line

HELLO, ROW, END, LEFT, REFUSED = range(5)
NOTE_TAG, TEXT_TAG = 1, 2
FAREWELL = 1.0
"""Seconds that a rank which ends in an error gives its peers to hear of it."""


class LinkError(RuntimeError):
    """The two ends of a link disagree, or one of them is silent or gone; the message names its rank."""


class Note(NamedTuple):
    """A receiver's "send me this", a sender's "this is coming", or how either of them ended."""

    kind: int
    number: int = 0
    """Rows between these two ranks before this one."""
    row_id: int = 0
    used: int = 0
    width: int = 0

    def __str__(self) -> str:
        if self.kind == ROW:
            return f"row {self.row_id} ({self.used} tokens × {self.width}, number {self.number})"
        if self.kind == HELLO:
            return f"{self.used} taps of {self.width} × {self.row_id} bytes in all, {self.number} credits"
        return "no more rows" if self.kind == END else "an error of its own"


@dataclass(frozen=True)
class Listening:
    """A note that is still to come from `peer`."""

    peer: int
    note_5: Tensor
    work: dist.Work


class Wire:
    """Notes to and from peers. No wait for a peer is longer than `deadline` seconds."""

    def __init__(self, group: dist.ProcessGroup, deadline: float, gpu: bool) -> None:
        self.group, self.deadline, self.gpu = group, deadline, gpu

    def tell(self, peer: int, note: Note) -> dist.Work:
        """Whoever drops the work before it is finished may take the note back."""
        return posted(dist.isend(torch.tensor(note), peer, self.group, NOTE_TAG))

    def listen(self, peer: int) -> Listening:
        note_5 = torch.empty(len(Note._fields), dtype=torch.int64)
        return Listening(peer, note_5, posted(dist.irecv(note_5, peer, self.group, NOTE_TAG)))

    def hear(self, listening: Listening, what: str) -> Note:
        """The peer's note. Raises its `UserError` if it sent one."""
        peer = listening.peer
        self.finish(listening.work, peer, what)
        note = Note(*listening.note_5.tolist())
        if note.kind != REFUSED:
            return note
        text = torch.empty(note.used, dtype=torch.uint8)
        self.finish(posted(dist.irecv(text, peer, self.group, TEXT_TAG)), peer, what)
        raise UserError(bytes(text.tolist()).decode())

    def finish(self, work: dist.Work, peer: int, what: str) -> None:
        """Waits for what `peer` has a part in; `LinkError` if it is gone or silent for too long."""
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=self.deadline))
        except RuntimeError as e:
            here = f"rank {dist.get_rank()} waits for {what}"
            if time.monotonic() - began < 0.9 * self.deadline:
                raise LinkError(f"rank {peer} is gone: {here} ({one_line(e)})") from e
            raise LinkError(f"rank {peer} has been silent for {self.deadline:g} s: {here}") from e

    def settle(self, data: dist.Work, peer: int, what: str) -> None:
        """Taps have come or gone: for the host on a CPU, for its current stream on a GPU, where the host goes
        on.
        """
        if self.gpu:
            data.wait()  # with a timeout it would hold the host
        else:
            self.finish(data, peer, what)

    def meet(self, peer: int, hello: Note) -> None:
        """The start: both ends must say the same."""
        said = self.tell(peer, hello)
        theirs = self.hear(self.listen(peer), "its first word")
        self.finish(said, peer, "its hearing the first word")
        if theirs != hello:
            raise LinkError(f"rank {peer} has {theirs}, rank {dist.get_rank()} has {hello}")

    def part(self, peers: Iterable[int]) -> None:
        """The end of the rows, agreed on by both ends."""
        said = {peer: self.tell(peer, Note(END)) for peer in peers}
        for peer, work in said.items():
            note = self.hear(self.listen(peer), "the end")
            if note.kind != END:
                raise LinkError(f"rank {peer} has {note}, rank {dist.get_rank()} has no more rows")
            self.finish(work, peer, "the end to be heard")

    def leave(self, peers: Iterable[int], error: BaseException | None) -> None:
        """Tells peers in the middle of a run that nothing more comes, and why where a user can mend it."""
        text = str(error).encode() if isinstance(error, UserError) else b""
        said = []
        for peer in peers:
            with contextlib.suppress(RuntimeError):  # a peer that is gone, or does not listen, need not know
                said.append(self.tell(peer, Note(REFUSED, used=len(text)) if text else Note(LEFT)))
                if text:
                    words = torch.tensor(list(text), dtype=torch.uint8)
                    said.append(posted(dist.isend(words, peer, self.group, TEXT_TAG)))
        until = time.monotonic() + FAREWELL
        for work in said:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.01, until - time.monotonic())))


def posted(work: dist.Work | None) -> dist.Work:
    """torch gives no work to a rank outside the group: none of ours is."""
    assert work is not None
    return work


@dataclass(frozen=True)
class Traffic:
    """Rows and bytes of taps so far, and the seconds that this rank's device stood still for a peer."""

    rows: int
    bytes: int
    waited: float


class Waits:
    """Seconds that a device had nothing to do inside `with` blocks. On a GPU between two events of its queue,
    read once they have passed: the host runs ahead of it.
    """

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self._seconds, self._began = 0.0, 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> None:
        if self.gpu:
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._events[-1][0].record()
        else:
            self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self.gpu:
            self._events[-1][1].record()
            self.seconds()  # the queue stays short
        else:
            self._seconds += time.monotonic() - self._began

    def seconds(self) -> float:
        while self._events and self._events[0][1].query():
            began, ended = self._events.popleft()
            self._seconds += began.elapsed_time(ended) / 1000
        return self._seconds
