"""The process of a sentinel: it watches its rank and the other sentinels, tells of a death and ends its rank.

A script that sentinel.py starts beside each rank, with the standard library only: it must be there at once,
and run while its rank is deep in a collective. It reads a pipe from its rank, whose end of file is the rank's
death. All sentinels are connected to rank 0's, which judges who died first and why and tells all. Each prints
that in one line to its rank's standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MARK = "slipstream: rank "
"""How the line about a death begins."""
WORDLESS = "killed or crashed without a word (out of memory? see the log of its node)"
SILENCE_S = 15.0
"""Without a beat for so long, a sentinel's node has vanished."""
BEAT_S, TICK_S = 1.0, 0.2
CONNECT_S = 20.0
HOLD_S = 2.0
"""What is a peer's fault waits so long for the peer's own news."""
GRACE_S, FAILING_S = 1.0, 5.0
"""From the news to SIGKILL: for a rank, and for one that is on its own way out, its traceback unprinted."""
LINGER_S = 5.0
"""How long a sentinel waits for the others to have read its last message."""


class Death(NamedTuple):
    rank: int
    host: str
    cause: str
    by_peer: bool


@dataclass
class Peer:
    """The other end of a connection: any sentinel at rank 0's, rank 0's at the others."""

    rank: int
    host: str
    heard: float
    socket: socket.socket | None = None
    rest: bytes = b""
    done: bool = False


class Watch:
    """The sentinel's own process."""

    def __init__(
        self, rank: int, size: int, host: str, rank0: str, silence_s: float, pid: int, launcher: int
    ) -> None:
        self.rank, self.host, self.silence_s, self.pid, self.launcher = rank, host, silence_s, pid, launcher
        self.leads = parent_of(pid) is not None and os.getpgid(pid) == pid
        """Whether the rank leads a group, as torchrun's do: its helpers end with it."""
        self.selector = selectors.DefaultSelector()
        self.rest = b""
        self.done = self.failing = self.gone = False
        self.held: Death | None = None
        self.news: Death | None = None
        self.since = self.beat = self.ticked = time.monotonic()
        """When `held` or, once there is, `news` came."""
        self.left: float | None = None
        """When all was said and only the other ends are waited for."""
        if rank == 0:
            self.peers = [Peer(r, "an unknown host", self.since) for r in range(1, size)]
            self._listen("127.0.0.1" if rank0 in ("localhost", "127.0.0.1") else "")
        else:
            self.peers = [Peer(0, rank0, self.since)]
            self._connect(rank0)
        self.selector.register(0, selectors.EVENT_READ, self._hear_rank)

    # ---- how sentinels meet ----

    def _listen(self, address: str) -> None:
        dual = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server((address, 0), family=family, dualstack_ipv6=dual, backlog=1024)
        self.token = secrets.token_hex(16)
        self.selector.register(server, selectors.EVENT_READ, self._accept)
        print(server.getsockname()[1], self.token, flush=True)

    def _connect(self, rank0: str) -> None:
        with open(0, "rb", buffering=0, closefd=False) as pipe:
            port, token = pipe.readline().decode().split()
        try:
            connection = socket.create_connection((rank0, int(port)), timeout=CONNECT_S)
        except OSError as e:
            print(f"{rank0}:{port}: {e}", flush=True)
            sys.exit(1)
        self._attach(self.peers[0], connection)
        self._tell(self.peers[0], ["hello", token, self.rank, self.host])
        print("ok", flush=True)

    def _attach(self, peer: Peer, connection: socket.socket) -> None:
        connection.setblocking(False)
        peer.socket = connection
        self.selector.register(connection, selectors.EVENT_READ, lambda _: self._hear_peer(peer))

    def _accept(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        self._attach(Peer(-1, "", time.monotonic()), connection)  # known by its first message

    # ---- what comes in ----

    def _hear_rank(self, pipe: int) -> None:
        data = os.read(pipe, 65536)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for kind, *values in map(json.loads, lines):
            self.done = kind == "done"
            if kind == "done":
                for peer in self.peers:
                    self._tell(peer, ["done"])
            else:
                self.failing = True
                self._report(Death(self.rank, self.host, *values))
        if not data:
            self.selector.unregister(pipe)
            self._rank_is_gone()

    def _rank_is_gone(self) -> None:
        self.gone = True
        if not self.done and not self.failing:
            self._report(Death(self.rank, self.host, WORDLESS, False))

    def _hear_peer(self, peer: Peer) -> None:
        assert peer.socket is not None
        try:
            data = peer.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.heard = time.monotonic()
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        if peer.rank < 0 and lines:
            known = self._introduce(peer, lines.pop(0))
            if known is None:
                self._close(peer)
                return
            peer = known
        for line in lines:
            self._read(peer, *json.loads(line))
        if not data:
            self._close(peer)
            if peer.rank >= 0 and not peer.done:
                self._report(Death(peer.rank, peer.host, "its node or its sentinel is gone", False))

    def _introduce(self, stranger: Peer, line: bytes) -> Peer | None:
        """The peer that this is, its connection taken over; None without the token."""
        if not line.startswith(json.dumps(["hello", self.token]).encode()[:-1]):
            return None
        _, _, rank, host = json.loads(line)
        peer, connection = self.peers[rank - 1], stranger.socket
        assert connection is not None
        self.selector.unregister(connection)
        peer.host, peer.heard, peer.rest = host, stranger.heard, stranger.rest
        self._attach(peer, connection)
        self._tell(peer, ["hello", self.host])
        if self.news or self.done:  # what was told before it came
            self._tell(peer, ["dead", *self.news] if self.news else ["done"])
        return peer

    def _read(self, peer: Peer, kind: str, *values) -> None:
        if kind == "done":
            peer.done = True
            if self.rank == 0:
                self._finish(peer)
        elif kind == "hello":
            (peer.host,) = values
        elif kind == "dead" and self.rank == 0:
            self._report(Death(*values))
        elif kind == "dead":
            self._believe(Death(*values))

    # ---- what follows ----

    def _report(self, death: Death) -> None:
        """To rank 0's sentinel, which judges; at rank 0, or without it, the judgement."""
        if self.news or (self.rank and self.done):
            return
        if self.rank and self.peers[0].socket and death.rank == self.rank:
            self._tell(self.peers[0], ["dead", *death])
        elif death.by_peer and self.rank == 0:
            if self.held is None:
                self.held, self.since = death, time.monotonic()
        else:
            self._believe(death)

    def _believe(self, death: Death) -> None:
        if self.news:
            return
        self.news, self.since = death, time.monotonic()
        what = f"this rank ({self.rank}) stops" if death.rank != self.rank else "the job stops"
        line = f"{MARK}{death.rank} on {death.host} ended: {death.cause}; {what}\n"
        with contextlib.suppress(OSError):
            os.write(2, ("\n" * os.isatty(2) + line).encode())
        if self.rank == 0:
            for peer in self.peers:
                self._tell(peer, ["dead", *death])
                self._finish(peer)

    def _tell(self, peer: Peer, message: list) -> None:
        if peer.socket is not None:
            with contextlib.suppress(OSError):  # what that means is seen when it is read from
                peer.socket.send(json.dumps(message).encode() + b"\n")

    @staticmethod
    def _finish(peer: Peer) -> None:
        """Nothing more will be said to this peer; what it still says is read."""
        if peer.socket is not None:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)

    def _close(self, peer: Peer) -> None:
        if peer.socket is not None:
            self.selector.unregister(peer.socket)
            peer.socket.close()
            peer.socket = None

    def run(self) -> None:
        while not self._over():
            for key, _ in self.selector.select(TICK_S):
                key.data(key.fileobj)
            self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        if not self.gone and os.getppid() != self.pid:  # a fork of the rank may hold its end of the pipe
            self._rank_is_gone()
        if not self.gone and not self.done and parent_of(self.pid) not in (None, self.launcher):
            self._report(Death(self.rank, self.host, "its launcher was killed", False))
        if now - self.ticked > self.silence_s / 2:
            for peer in self.peers:
                peer.heard = now  # this node stood still, or all did: beats are on their way
        self.ticked = now
        if now - self.beat > BEAT_S:
            self.beat = now
            for peer in self.peers:
                self._tell(peer, ["beat"])
        for peer in self.peers:
            if not peer.done and now - peer.heard > self.silence_s:
                cause = f"its node has not been heard of for {now - peer.heard:.0f} s"
                self._report(Death(peer.rank, peer.host, cause, False))
        if self.held and now - self.since > HOLD_S:
            self._believe(self.held)
        alive = not self.gone and not self.done
        if self.news and alive and now - self.since > (FAILING_S if self.failing else GRACE_S):
            self._end_rank()

    def _end_rank(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.leads:
                os.killpg(self.pid, signal.SIGKILL)
            elif not self.gone:
                os.kill(self.pid, signal.SIGKILL)

    def _over(self) -> bool:
        ended, met = self.gone or self.done, any(peer.socket for peer in self.peers)
        if self.left is None and ended and (self.news or (self.done and self.rank)):
            self.left = time.monotonic()
            self._finish(self.peers[0])
            if not self.done:
                self._end_rank()  # what it left of itself
        if self.left is not None:
            return not met or time.monotonic() - self.left > LINGER_S
        return self.done and not met and all(peer.done for peer in self.peers)


def parent_of(pid: int) -> int | None:
    """None where it cannot be told."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these ask the rank to save; what comes of it must be seen
    Watch(*json.loads(sys.argv[1])).run()
