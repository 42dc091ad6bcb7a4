"""Messages between ranks that come and go: each pair has a link of its own, and its loss is an event, not the end.

Where a mesh is whole or broken, a `Messenger` has the peers that are there. Their links are like those of a mesh: the
same handshake and protection, and frames whose next header is known but for its length (`motley.transport.links.wire`),
all of them MESSAGE until BYE or ABORT. There are no beats: who asks sees for itself when an answer is late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from .errors import PeerLost, ProtocolError, UsageError
from .links.connecting import Arrival, Connector, Failure, check_membership
from .links.link import IncomingMessage, Link, Waitable, part, wait_ready
from .links.listening import Listener
from .links.security import Plain, Stream, Tls
from .links.waiting import PARK_S, Spin
from .links.wire import HEADER_SIZE, MAX_MESSAGE, Membership, Op, Purpose, pack_abort, pack_frame, pack_header

Buffer = bytes | bytearray | memoryview | NDArray[Any]
"""C-contiguous memory."""

MAX_UNSENT = 4 * MAX_MESSAGE
"""A peer that lets more bytes than this pile up is lost: it does not read."""
JOINED = 64 << 10
"""Up to this size the parts of a message are copied into one frame, which is cheaper than a system call for each."""
GLANCE_S = 5e-3
"""How often a rank that never sleeps looks for connections that are on their way."""


class Connected(NamedTuple):
    """Messages can be sent to `peer`."""

    peer: int


class Message(NamedTuple):
    """`peer` has sent `data`, which is valid as long as it is referenced."""

    peer: int
    data: memoryview


class Lost(NamedTuple):
    """`peer` is gone, or could not be reached within the time for it; what was under way to it may be lost as well."""

    peer: int
    reason: str


Event = Connected | Message | Lost
Found = TypeVar("Found", list[Event], bool)


class _Peer:
    """A peer that is connected."""

    __slots__ = ("_incoming", "_queued", "broken", "link")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.broken: str | None = None
        """Why nothing can be sent to it any more; it is lost as soon as that is told."""
        self._incoming = IncomingMessage(link)
        self._queued = 0  # bytes that were ever given to the link

    def send(self, parts: Sequence[memoryview], size: int) -> None:
        """Send a message of these parts, none of them empty; what the system does not take at once is copied."""
        if self.broken is not None:
            return
        link = self.link
        header = pack_header(Op.MESSAGE, 0, 0, link.messages_out, size)
        link.messages_out += 1
        self._queued += HEADER_SIZE + size
        views: Sequence[memoryview] = (memoryview(header), *parts)
        if size <= JOINED:
            views = [memoryview(b"".join(views))]
        kept = len(link.unsent)
        try:
            for view in views:
                link.push(view)
        except PeerLost as error:
            self.broken = error.why
            return
        for index in range(kept, len(link.unsent)):
            link.unsent[index] = memoryview(bytes(link.unsent[index]))
        if self._queued - link.sent > MAX_UNSENT:
            self.broken = f"it does not read: {self._queued - link.sent} bytes wait for it ({link.address})"

    def receive(self) -> memoryview | None:
        """The next message, if it is here in whole.

        Raises:
            PeerLost, ProtocolError
        """
        try:
            while not self._incoming.pull():
                pass
        except BlockingIOError:
            return None
        payload = self._incoming.payload
        self.link.messages_in += 1
        self._incoming = IncomingMessage(self.link)
        return payload


class Messenger:
    """Messages with peers over links of their own; the loss of a peer is an event. One thread owns it.

    Of two ranks one dials (`connect`) and the other accepts. Whatever happens to a link is told by `receive` only, the
    losses first: a peer is connected from the `Connected` that it returns to the `Lost`, or to `drop`.
    """

    def __init__(
        self,
        membership: Membership,
        security: Tls | Plain,
        *,
        listener: Listener | None,
        accepts: Container[int] = (),
        wrap: Callable[[int, Stream], Stream] | None = None,
    ) -> None:
        """
        Args:
            membership, security: as for `connect_mesh`, and equal in the same way on all ranks.
            listener: where peers reach this rank, if any do; stays the caller's.
            accepts: the ranks that may dial this one. If one does that is connected already, the newer link counts.
            wrap: see `connect_mesh`.

        Raises:
            UsageError: a membership that cannot be right.
        """
        check_membership(membership)
        self._membership = membership
        self._peers: dict[int, _Peer] = {}
        self._connector = Connector(
            membership,
            security,
            listener,
            {(rank, Purpose.MESSAGES) for rank in range(membership.size) if rank in accepts},
            wrap,
        )
        self._glance_s = 0.0
        self._spin = Spin(outnumbered=False)

    @property
    def connected(self) -> Collection[int]:
        """The peers that messages can be sent to."""
        return tuple(self._peers)

    def connect(self, peer: int, address: str, timeout_s: float) -> None:
        """Begin to reach a peer at `address`, for up to `timeout_s`; `Connected` or `Lost` follows.

        Raises:
            UsageError: it is connected or being reached, or is no rank, or this is no address.
        """
        if not 0 <= peer < self._membership.size or peer == self._membership.rank:
            raise UsageError(f"rank {peer} is no peer of rank {self._membership.rank} of {self._membership.size}")
        if peer in self._peers or self._connector.is_dialling(peer):
            raise UsageError(f"rank {peer} is connected already, or will be")
        self._connector.dial(peer, Purpose.MESSAGES, address, time.monotonic() + timeout_s)

    def send(self, peer: int, parts: Sequence[Buffer]) -> None:
        """Send one message, the bytes of all parts, in order.

        Never waits: what the system does not take at once is copied and leaves during later calls of `receive`. If the
        peer turns out to be lost, `receive` tells.

        Raises:
            UsageError: the peer is not connected, or the message is longer than `MAX_MESSAGE`; nothing was sent.
        """
        if peer not in self._peers:
            raise UsageError(f"rank {peer} is not connected")
        views = [view.cast("B") for view in map(_view, parts) if view.nbytes]
        size = sum(map(len, views))
        if size > MAX_MESSAGE:
            raise UsageError(f"a message of {size} bytes; at most {MAX_MESSAGE} can be sent")
        self._peers[peer].send(views, size)

    def receive(self, timeout_s: float) -> list[Connected | Message | Lost]:
        """What has happened, waiting up to `timeout_s` until something does: spinning at first, then asleep.

        What is unsent leaves meanwhile, and connections are made: call it often, if only with a time of 0.
        """
        return self._await(self._move, (), timeout_s)

    def wait(self, others: Sequence[Waitable], seconds: float) -> None:
        """Wait up to `seconds` until `receive` has something to do or one of `others` can be read.

        It may end early, without an event: what is unsent can be sent, or a connection goes on.
        """
        self._await(lambda ready: bool(ready) or self._has_work(others), others, seconds)

    def drop(self, peer: int, reason: str) -> None:
        """Tell a peer that it is given up and why, and forget it; no event follows. Does not wait.

        A peer that is still being reached is reached no more.
        """
        self._connector.cancel(peer)
        if peer in self._peers:
            part([self._peers.pop(peer).link], pack_abort(peer, reason), 0.0)

    def close(self) -> None:
        """Leave all peers in peace; what is unsent has `LAST_WORDS_S` (`motley.transport.links.link`) to go."""
        self._connector.close()
        links = [peer.link for peer in self._peers.values()]
        self._peers.clear()
        part(links, pack_frame(Op.BYE))

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _await(self, look: Callable[[Container[Waitable]], Found], others: Sequence[Waitable], seconds: float) -> Found:
        """Call `look` until it finds something, for up to `seconds`: in a spin, and then after each sleep.

        `look` is told what the system calls ready: nothing, in a spin.
        """
        spin, may_spin, began = self._spin, bool(self._peers), perf_counter_ns()
        limit = began + int(seconds * 1e9)
        found = look(self._glance())
        while not found and (now := perf_counter_ns()) < limit:
            spins = may_spin and spin.goes_on(now, now - began)
            found = look(() if spins else self._sleep(others, (limit - now) / 1e9))
        now = perf_counter_ns()
        spin.end(now, now - began if seconds else None)
        return found

    def _sleep(self, others: Sequence[Waitable], seconds: float) -> set[Waitable]:
        seconds = max(0.0, min(seconds, PARK_S, self._connector.due - time.monotonic()))
        links = [peer.link for peer in self._peers.values()]
        writers = [*(link for link in links if link.unsent), *self._connector.writers]
        return wait_ready([*links, *self._connector.readers, *others], writers, seconds)

    def _has_work(self, others: Sequence[Waitable]) -> bool:
        if any(peer.broken for peer in self._peers.values()) or self._connector.due <= time.monotonic():
            return True
        return bool(self._sleep(others, 0.0))

    def _glance(self) -> Container[Waitable]:
        """The connections on their way that can go on, looked for now and then: otherwise only a sleep would tell."""
        now = time.monotonic()
        if now < self._glance_s:
            return ()
        self._glance_s = now + GLANCE_S
        return wait_ready(self._connector.readers, self._connector.writers, 0.0)

    # -- what happens -----------------------------------------------------------------------------------------------

    def _move(self, ready: Container[Waitable]) -> list[Event]:
        """Go on with every link, and with the connections that are ready."""
        events = self._tell_losses()
        for rank, peer in self._peers.items():
            try:
                payload = peer.receive()
                if payload is not None:
                    events.append(Message(rank, payload))
                if peer.link.unsent:
                    peer.link.flush()
            except (PeerLost, ProtocolError) as error:
                peer.broken = error.why
        if not events:
            events = self._tell_losses()
        if ready or self._connector.busy:
            for outcome in self._connector.step(ready):
                match outcome:
                    case Arrival(link=link):
                        if link.rank in self._peers:
                            events.append(self._lose(link.rank, f"it has connected anew ({link.address})"))
                        self._peers[link.rank] = _Peer(link)
                        events.append(Connected(link.rank))
                    case Failure(rank=rank, reason=reason):
                        events.append(Lost(rank, reason))
        return events

    def _tell_losses(self) -> list[Event]:
        """Lose the peers that are broken. That comes before anything else is told, and not after: whoever is told of a
        message may still send to all peers.
        """
        broken = [(rank, peer.broken) for rank, peer in self._peers.items() if peer.broken is not None]
        return [self._lose(rank, reason) for rank, reason in broken]

    def _lose(self, rank: int, reason: str) -> Lost:
        self.drop(rank, reason)
        return Lost(rank, reason)


def _view(part: Buffer) -> memoryview:
    return memoryview(part)  # type: ignore[arg-type]  # NumPy's stubs know from Python 3.12 on that arrays are buffers
