"""One connected peer: a non-blocking socket that sends what it can and receives the frame that is expected next."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from .errors import PeerLost, ProtocolError
from .wire import (
    HEADER_SIZE,
    MAGIC,
    MAX_MESSAGE,
    Decoder,
    Header,
    Op,
    WireError,
    mismatch,
    pack_abort,
    pack_frame,
    unpack_abort,
    unpack_header,
)

_ABORT = MAGIC + bytes([Op.ABORT])
LAST_WORDS_S = 0.25
"""How long a rank that gives up tries to say why, and its peers try to hear it."""

if sys.platform == "linux":
    give_way = os.sched_yield
else:

    def give_way() -> None:
        """Let another process have this core, if one wants it."""
        time.sleep(0)


if sys.platform == "win32":

    def wait_ready(readers: Sequence[Link], writers: Sequence[Link], seconds: float) -> set[Link]:
        """Sleep until a reader has bytes (or its end) or a writer has room; returns the ready ones."""
        ready = select.select(readers, writers, (), seconds)
        return {*ready[0], *ready[1]}

else:

    def wait_ready(readers: Sequence[Link], writers: Sequence[Link], seconds: float) -> set[Link]:
        """Sleep until a reader has bytes (or its end) or a writer has room; returns the ready ones."""
        masks = dict.fromkeys(readers, select.POLLIN)
        for link in writers:
            masks[link] = masks.get(link, 0) | select.POLLOUT
        poll = select.poll()
        for link, mask in masks.items():
            poll.register(link, mask)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        return {link for link in masks if link.fileno() in ready}


class Link:
    """A connection whose handshake is done. Links encrypted by TLS will wrap `socket` before it comes here."""

    __slots__ = (
        "address",
        "is_local",
        "messages_in",
        "messages_out",
        "own_rank",
        "rank",
        "receiving",
        "socket",
        "unsent",
    )

    def __init__(self, own_rank: int, rank: int, address: str, connected: socket.socket) -> None:
        self.own_rank = own_rank
        self.rank = rank
        self.address = address
        self.socket = connected
        self.is_local: bool = connected.getpeername()[0] == connected.getsockname()[0]
        """Both ends are on one machine."""
        self.unsent: deque[memoryview] = deque()
        self.receiving: Incoming | None = None
        """The frame that is expected or has come in part."""
        self.messages_in = 0
        self.messages_out = 0
        connected.setblocking(False)
        # Buffers keep the system's defaults: a fixed size would turn off their tuning to bandwidth x delay.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that vanishes sends no EOF; unanswered probes end the connection after about 15 s.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 6), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def __repr__(self) -> str:
        return f"rank {self.rank} at {self.address}"

    def fileno(self) -> int:
        return self.socket.fileno()

    def push(self, view: memoryview) -> None:
        """Send `view` after what is still unsent, as far as the system takes it; the rest refers to its memory.

        Raises:
            PeerLost: the connection is gone.
        """
        if self.unsent:
            self.unsent.append(view)
            return
        try:
            sent = self.socket.send(view)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self.obituary(str(error)) from error
        if sent < len(view):
            self.unsent.append(view[sent:])

    def flush(self) -> bool:
        """Send more of what is unsent; returns whether any byte went.

        Raises:
            PeerLost: the connection is gone.
        """
        moved = False
        while self.unsent:
            view = self.unsent[0]
            try:
                sent = self.socket.send(view)
            except BlockingIOError:
                break
            except OSError as error:
                raise self.obituary(str(error)) from error
            moved = True
            if sent < len(view):
                self.unsent[0] = view[sent:]
            else:
                self.unsent.popleft()
        return moved

    def has_words(self) -> bool:
        """Look, between frames, whether the peer has sent anything, without taking it.

        Raises:
            PeerLost: it has aborted or died. A peer that said BYE is no loss until something is expected of it.
        """
        try:
            head = self.socket.recv(HEADER_SIZE, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.obituary(str(error)) from error
        if not head or (len(head) == HEADER_SIZE and head.startswith(_ABORT)):
            raise self.obituary("it closed the connection")
        return True

    def obituary(self, why: str) -> PeerLost:
        """Read the peer's last words and name the rank that was truly lost; `why` if the peer left none."""
        decoder = Decoder(sys.maxsize)
        deadline = time.monotonic() + LAST_WORDS_S
        data = b"" if self.receiving is None else self.receiving.received()
        try:
            while True:
                for frame in decoder.feed(data):
                    if frame.header.op == Op.BYE:
                        return PeerLost(self.rank, f"it left the session ({self.address})")
                    if frame.header.op == Op.ABORT:
                        blamed, reason = unpack_abort(frame.payload)
                        if blamed in (self.rank, self.own_rank):
                            return PeerLost(self.rank, f"it gave up ({self.address}): {reason}")
                        return PeerLost(blamed, f"reported by rank {self.rank}: {reason}")
                if not wait_ready([self], (), max(0.0, deadline - time.monotonic())):
                    break
                data = self.socket.recv(1 << 16)
                if not data:
                    break
        except (OSError, WireError):
            pass  # nothing more can be read: what is known already has to do
        return PeerLost(self.rank, f"{why} ({self.address})")


def part(links: Sequence[Link], farewell: bytes) -> None:
    """Say `farewell` to every peer, as far as that goes within `LAST_WORDS_S`, and close all links."""
    deadline = time.monotonic() + LAST_WORDS_S
    talking = list(links)
    for link in talking:
        link.unsent.append(memoryview(farewell))
    while talking:
        for link in tuple(talking):
            try:
                link.flush()
            except PeerLost:
                link.unsent.clear()
            if not link.unsent:
                talking.remove(link)
        remaining = deadline - time.monotonic()
        if not talking or remaining <= 0:
            break
        wait_ready((), talking, remaining)
    for link in links:
        close_gently(link.socket)


def close_gently(connection: socket.socket) -> None:
    """Close a non-blocking socket such that what was sent last arrives.

    Closing with unread bytes would reset the connection, which can destroy what the peer has not read yet.
    """
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        for _ in range(64):
            if not connection.recv(1 << 16):
                break
    connection.close()


def part_in_peace(links: Sequence[Link]) -> None:
    part(links, pack_frame(Op.BYE))


def part_with_blame(links: Sequence[Link], blamed: int, why: str) -> None:
    part(links, pack_abort(blamed, why))


class Incoming:
    """The frame that a link has to receive next: a header that is known beforehand, and where its payload goes."""

    __slots__ = ("_expected", "_header", "_index", "_rest", "_views", "begun", "link")

    def __init__(self, link: Link, views: Sequence[memoryview]) -> None:
        """`views`: one after the other they take header and payload; none is empty, the first has the header."""
        self.link = link
        self._views = views
        self._header = views[0][:HEADER_SIZE]

    def expect(self, header: bytes) -> None:
        """Make ready for a frame with this header."""
        self._expected = header
        self._rest = self._views[0]
        self._index = 0
        self.begun = False
        self.link.receiving = self

    def pull(self) -> bool:
        """Read once; returns whether the frame is complete.

        Raises:
            BlockingIOError: nothing is there yet.
            PeerLost: the connection is gone.
            ProtocolError: another frame came than the one expected.
        """
        rest = self._rest
        try:
            count = self.link.socket.recv_into(rest)
        except BlockingIOError:
            raise
        except OSError as error:
            raise self.link.obituary(str(error)) from error
        if not count:
            raise self.link.obituary("it closed the connection")
        self.begun = True
        self._rest = rest = rest[count:]
        if self._index == 0 and len(self._views[0]) - len(rest) >= HEADER_SIZE:
            self._check_header()
        if rest:
            return False
        self._index += 1
        if self._index == len(self._views):
            self.link.receiving = None
            return True
        self._rest = self._views[self._index]
        return False

    def _check_header(self) -> None:
        if self._header != self._expected:
            raise self._unexpected(unpack_header(self._expected))

    def _unexpected(self, expected: Header) -> PeerLost | ProtocolError:
        try:
            got = unpack_header(self._header)
        except WireError as error:
            return ProtocolError(self.link.rank, f"{error} ({self.link.address})")
        if got.op in (Op.ABORT, Op.BYE):
            return self.link.obituary("it gave up")
        return ProtocolError(self.link.rank, f"{mismatch(expected, got)} ({self.link.address})")

    def received(self) -> bytes:
        """All that has come of this frame."""
        views = [*self._views[: self._index], self._views[self._index]]
        views[-1] = views[-1][: len(views[-1]) - len(self._rest)]
        return b"".join(views)


class IncomingMessage(Incoming):
    """The next message of a link, of any length up to `MAX_MESSAGE`."""

    __slots__ = ()

    def __init__(self, link: Link) -> None:
        super().__init__(link, [memoryview(bytearray(HEADER_SIZE))])
        self.expect(Header(Op.MESSAGE, sequence=link.messages_in).pack())

    @property
    def payload(self) -> bytes:
        return bytes(self._views[1]) if len(self._views) > 1 else b""

    def _check_header(self) -> None:
        expected = unpack_header(self._expected)
        try:
            got = unpack_header(self._header)
        except WireError as error:
            raise ProtocolError(self.link.rank, f"{error} ({self.link.address})") from error
        if got._replace(length=0) != expected:
            raise self._unexpected(expected)
        if got.length > MAX_MESSAGE:
            raise ProtocolError(
                self.link.rank,
                f"a message of {got.length} bytes; at most {MAX_MESSAGE} are allowed ({self.link.address})",
            )
        if got.length:
            self._views = [*self._views, memoryview(bytearray(got.length))]
