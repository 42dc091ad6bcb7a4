"""One connected peer: a non-blocking socket that sends what it can and receives the frame that is expected next."""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from ..errors import PeerLost, ProtocolError
from .security import Stream
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

_REPEAT_SOON = (16, 1), (44, 1000)
"""Options by which TCP repeats soon what a cut has lost: TCP_THIN_LINEAR_TIMEOUTS, so that the intervals grow later for
small frames, and TCP_RTO_MAX_MS (Linux 6.15), so that none grows beyond a second. Python has no names for them."""
_ABORT = MAGIC + bytes([Op.ABORT])
POLL_S = 2e-3
"""The system's poll counts in milliseconds; a shorter wait for bytes that are held back is slept."""
PEACE_S = 5.0
"""How long a rank that leaves in peace waits for its peers to take what it has sent."""
LAST_WORDS_S = 0.25
"""How long a rank that gives up tries to say why, and its peers try to hear it."""


class Waitable(Protocol):
    """Something that the system's poll can wait for. It may also have a method `ready_in`, see `Stream`."""

    def fileno(self) -> int:
        """The descriptor to wait for."""
        ...


if sys.platform == "win32":

    def _poll(readers: Sequence[Waitable], writers: Sequence[Waitable], seconds: float) -> set[Waitable]:
        if not readers and not writers:  # an error there
            time.sleep(seconds)
            return set()
        ready = select.select(readers, writers, writers, seconds)  # a connection that fails is an exception there
        return {*ready[0], *ready[1], *ready[2]}

else:

    def _poll(readers: Sequence[Waitable], writers: Sequence[Waitable], seconds: float) -> set[Waitable]:
        masks = dict.fromkeys(readers, select.POLLIN)
        for waitable in writers:
            masks[waitable] = masks.get(waitable, 0) | select.POLLOUT
        poll = select.poll()
        for waitable, mask in masks.items():
            poll.register(waitable, mask)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        return {waitable for waitable in masks if waitable.fileno() in ready}


def wait_ready(readers: Sequence[Waitable], writers: Sequence[Waitable], seconds: float) -> set[Waitable]:
    """Sleep until a reader has bytes (or its end) or a writer has room; returns the ready ones.

    Bytes that a stream holds back count: it does not sleep while there are some, nor longer than until they are due.
    """
    holders = {reader: ready_in for reader in readers if (ready_in := _ready_in(reader)) is not None}
    if holders:
        due = max(0.0, min(holders.values()))
        if due < min(seconds, POLL_S):
            time.sleep(due)
            seconds = 0.0
        # The system may call a connection readable because of bytes that are not due: do not ask it.
        readers = [reader for reader in readers if reader not in holders]
        seconds = min(seconds, due)
    ready = _poll(readers, writers, seconds)
    return ready | {holder for holder in holders if (ready_in := _ready_in(holder)) is not None and ready_in <= 0}


def _ready_in(waitable: Waitable) -> float | None:
    ready_in: Callable[[], float | None] | None = getattr(waitable, "ready_in", None)
    return None if ready_in is None else ready_in()


def tune(connection: socket.socket) -> None:
    """Set the options of a connection that becomes a link.

    Left out because they gained nothing when measured (16 KiB both ways, loopback, spinning, 7.5 us): SO_BUSY_POLL is
    7.5 us too, as a rank that waits spins anyway; TCP_QUICKACK must be set again for every frame and is 10 us, as
    frames are answered by data, which carries the acknowledgement. TCP_USER_TIMEOUT would end the connection to a rank
    that computes for long while a large frame waits for it.
    """
    connection.setblocking(False)
    # Buffers keep the system's defaults: a fixed size would turn off their tuning to bandwidth x delay.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Beats find a machine that has vanished; unanswered probes also end an idle connection that a router has forgotten.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 6), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if sys.platform == "linux":
        for number, value in _REPEAT_SOON:
            with suppress(OSError):  # an older kernel
                connection.setsockopt(socket.IPPROTO_TCP, number, value)


class Link:
    """A connection to one peer whose handshake is done; its owner pushes frames and expects others.

    Attributes:
        own_rank: the rank at this end...
        rank: ...and the one at the other.
        address: of the peer, for messages to people.
        socket: what is talked through, plain or encrypted.
        is_local: both ends are on one machine.
        unsent: what the system has not taken yet, in order.
    """

    __slots__ = (
        "address",
        "is_local",
        "messages_in",
        "messages_out",
        "own_rank",
        "rank",
        "received",
        "receiving",
        "sent",
        "socket",
        "unsent",
    )

    def __init__(self, own_rank: int, rank: int, address: str, stream: Stream, *, is_local: bool) -> None:
        self.own_rank = own_rank
        self.rank = rank
        self.address = address
        self.socket = stream
        self.is_local = is_local
        self.unsent: deque[memoryview] = deque()
        self.receiving: Incoming | None = None
        """The frame that is expected or has come in part."""
        self.messages_in = 0
        """Messages that were received whole..."""
        self.messages_out = 0
        """...and that were given to be sent; the next ones have these numbers."""
        self.received = 0
        """Bytes that have come..."""
        self.sent = 0
        """...and that the system has taken to send."""

    def __repr__(self) -> str:
        return f"rank {self.rank} at {self.address}"

    def fileno(self) -> int:
        """The descriptor of the connection, for the system's poll."""
        return self.socket.fileno()

    def ready_in(self) -> float | None:
        """Seconds until bytes can be read that the stream holds back, unseen by poll; None if it has none."""
        return _ready_in(self.socket)

    @property
    def progress(self) -> int:
        """A count that rises with every byte that comes: the stream's own, if it reads what it cannot pass on yet."""
        progress: int = getattr(self.socket, "progress", self.received)
        return progress

    @property
    def to_send(self) -> int:
        """What `sent` will be when all that was pushed has left."""
        return self.sent + sum(map(len, self.unsent))

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
        self.sent += sent
        if sent < len(view):
            self.unsent.append(view[sent:])
            if sent:  # some streams take a large view piece by piece
                self.flush()

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
            self.sent += sent
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
        """The error for a connection that has failed: who is lost and why, by the peer's last words, or else `why`.

        Reads what has come, for up to `LAST_WORDS_S`: a peer that gave up because of another rank has said so.
        """
        decoder = Decoder(sys.maxsize)
        deadline = time.monotonic() + LAST_WORDS_S
        data = b"" if self.receiving is None else self.receiving.received()
        try:
            while True:
                for frame in decoder.feed(data):
                    if frame.header.op == Op.BYE:
                        return PeerLost(self.rank, f"it left the session ({self.address})")
                    if frame.header.op == Op.ABORT:
                        said = unpack_abort(frame.payload)
                        lost, how, finder = said.heard(self.rank, self.own_rank)
                        where = f" ({self.address})" if lost == self.rank else ""
                        return PeerLost(lost, f"{how}{where}: {said.why}", finder)
                if not wait_ready([self], (), max(0.0, deadline - time.monotonic())):
                    break
                data = self.socket.recv(1 << 16)
                if not data or time.monotonic() > deadline:
                    break
        except (OSError, WireError):
            pass  # nothing more can be read: what is known already has to do
        return PeerLost(self.rank, f"{why} ({self.address})")


def part(links: Sequence[Link], farewell: bytes, seconds: float = LAST_WORDS_S) -> None:
    """Send the frame `farewell` to every peer, after what is still unsent, and close all links.

    What is not sent within `seconds` is dropped.
    """
    deadline = time.monotonic() + seconds
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


def close_gently(connection: Stream) -> None:
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
    """Tell all peers that this rank leaves as it should, and close all links; what is unsent has `PEACE_S` to go."""
    part(links, pack_frame(Op.BYE), PEACE_S)


def part_with_blame(links: Sequence[Link], blamed: int, why: str, finder: int | None = None) -> None:
    """Tell all peers that this rank gives up because of rank `blamed`, as rank `finder` has found (None: itself), and
    close all links.
    """
    part(links, pack_abort(blamed, why, finder))


class Incoming:
    """The frame that a link has to receive next: a header that is known beforehand, and where its payload goes."""

    __slots__ = ("_expected", "_header", "_index", "_rest", "_views", "begun", "link")

    def __init__(self, link: Link, views: Sequence[memoryview]) -> None:
        """
        Args:
            views: the memory that takes the frame, one after the other; none is empty, and the first begins with room
                for the header.
        """
        self.link = link
        self._views = views
        self._header = views[0][:HEADER_SIZE]

    def expect(self, header: bytes) -> None:
        """Make ready for a frame with this header, packed; the same object may take frame after frame."""
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
        rest, link = self._rest, self.link
        try:
            count = link.socket.recv_into(rest)
        except BlockingIOError:
            raise
        except OSError as error:
            raise link.obituary(str(error)) from error
        if not count:
            raise link.obituary("it closed the connection")
        link.received += count
        self.begun = True
        self._rest = rest = rest[count:]
        if self._index == 0 and len(self._views[0]) - len(rest) >= HEADER_SIZE:
            self._check_header()
        if rest:
            return False
        self._index += 1
        if self._index == len(self._views):
            link.receiving = None
            return True
        self._rest = self._views[self._index]
        return False

    def _check_header(self) -> None:
        """Compare the header that has come with the one that was expected; raises as `pull`."""
        if self._header != self._expected:
            raise self._unexpected(unpack_header(self._expected))

    def _unexpected(self, expected: Header) -> PeerLost | ProtocolError:
        """The error for a header that is not the expected one: the peer may have said that it leaves."""
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
    def payload(self) -> memoryview:
        """What has come of it, in memory of its own."""
        return self._views[1] if len(self._views) > 1 else memoryview(b"")

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
