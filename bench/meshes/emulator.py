"""A network between ranks of one machine: latency, jitter, bandwidth, loss, a cut. Needs no privileges.

Theory of operation
-------------------
`EmulatedSocket` wraps one end of a connection (a socket, or the TLS on it); both ends must be wrapped. What a rank
sends is cut in chunks, each with a header (when it begins to leave, how long it is), and handed to the connection at
once. The *receiving* end reads a header, computes when that chunk is due, and keeps quiet until then. All ranks are on
one machine, so both ends read the same clock, and a rank that computes delays nothing: bytes are due when a real
network would bring them.

A `Nic` is one rank's network interface, shared by all its sockets, on a switch without limits of its own::

    leaves = max(now, when the sender's interface is free), which it occupies for bytes / bandwidth
    comes  = when the receiver's interface, from leaves + latency on, has been idle for bytes / bandwidth
    due    = comes + jitter + retransmission, but never before the chunk ahead on the connection

A rank that waits for bytes sleeps until they are due. Linux may let it sleep 50 us longer, to save power: half the
latency of a home. A process that does nothing but emulate calls `sleep_exactly` first.

TCP repairs loss, so a lost packet is a chunk that comes a retransmission timeout later. Bandwidth is the payload's.
"""

from __future__ import annotations

import ctypes
import random
import re
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from struct import Struct
from time import perf_counter_ns
from weakref import WeakSet

from motley.transport.links.security import Stream

_HEADER = Struct("<qI")
CHUNK_BYTES = 128 << 10
PACKET_BYTES = 1448
"""Payload of a full Ethernet packet: what loss strikes."""
_PR_SET_TIMERSLACK = 29
MEMORY = 64
"""Stretches of time for which an interface remembers that it was occupied."""

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_UNITS = {
    "latency": _SECONDS,
    "bandwidth": {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "kbit": 1e3 / 8},
    "jitter": _SECONDS,
    "loss": {"%": 1e-2},
}
_TERM = re.compile(r"(?:(?P<name>[a-z]+)=)?(?P<number>\d+(?:\.\d+)?)(?P<unit>[a-z]+|%)")


@dataclass(frozen=True)
class LinkSpec:
    """What a connection is like, in each direction.

    Attributes:
        latency_s: seconds one way.
        bandwidth: bytes of payload per second through each rank's interface.
        jitter_s: a chunk comes up to so many seconds later, uniformly.
        loss: the share of packets that must be sent again.
        retransmission_s: how much later those come. Linux never waits less than 0.2 s for a lone packet.
    """

    latency_s: float
    bandwidth: float
    jitter_s: float = 0.0
    loss: float = 0.0
    retransmission_s: float = 0.2

    @staticmethod
    def parse(text: str) -> LinkSpec:
        """Read ``0.1ms,1Gbit`` or ``20ms,100Mbit,jitter=2ms,loss=0.1%``.

        Raises:
            ValueError: it is no such text; the message says what is wrong.
        """
        found: dict[str, float] = {}
        names = iter(("latency", "bandwidth"))  # of the terms that do not say what they are
        for term in text.lower().replace(" ", "").split(","):
            match = _TERM.fullmatch(term)
            name = match and (match["name"] or next(names, None))
            scale = _UNITS.get(name, {}).get(match["unit"]) if match and name else None
            if match is None or name is None or scale is None or name in found:
                raise ValueError(f"{term!r} is no part of a link; write 0.1ms,1Gbit or 20ms,100Mbit,jitter=2ms,loss=1%")
            found[name] = float(match["number"]) * scale
        if "latency" not in found or not found.get("bandwidth") or found.get("loss", 0.0) > 1:
            raise ValueError(f"{text!r} is no link: it needs a latency, a bandwidth above 0 and a loss of at most 100%")
        return LinkSpec(found["latency"], found["bandwidth"], found.get("jitter", 0.0), found.get("loss", 0.0))


def sleep_exactly() -> None:
    """Make this thread, and those that it starts, sleep as long as they ask for, where that is not usual."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


class Nic:
    """One rank's network interface. ``connect_mesh(..., wrap=nic.wrap)`` puts all its connections behind it."""

    def __init__(self, spec: LinkSpec, seed: int = 0, clock: Callable[[], int] = perf_counter_ns) -> None:
        """`seed`: of jitter and loss. `clock`: nanoseconds, the same for all processes of the machine."""
        self.spec = spec
        self.clock = clock
        self._random = random.Random(seed)
        self._sending_until = 0
        self._receiving: list[tuple[int, int]] = []  # when it is occupied, in order: [begin, end) in ns
        self._lock = threading.Lock()  # data and liveness beats are different threads
        self._sockets: WeakSet[EmulatedSocket] = WeakSet()
        self._is_cut = False

    def wrap(self, peer: int, connected: Stream) -> EmulatedSocket:
        """A connection to rank `peer` through this interface."""
        emulated = EmulatedSocket(connected, self)
        self._sockets.add(emulated)
        if self._is_cut:
            emulated.cut()
        return emulated

    def cut(self) -> None:
        """Pull the plug: cut all connections, those that are still made too."""
        self._is_cut = True
        for emulated in list(self._sockets):
            emulated.cut()

    def departure(self, count: int) -> int:
        """When a chunk of `count` bytes that is offered now begins to leave, in ns."""
        with self._lock:
            leaves = max(self.clock(), self._sending_until)
            self._sending_until = leaves + self._occupation(count)
            return leaves

    def arrival(self, leaves: int, count: int) -> int:
        """When the last byte of a chunk that left at `leaves` is here, in ns."""
        spec = self.spec
        with self._lock:
            comes = occupy(self._receiving, leaves + int(1e9 * spec.latency_s), self._occupation(count))
            late = spec.jitter_s and spec.jitter_s * self._random.random()
            if spec.loss and self._random.random() >= (1 - spec.loss) ** -(-count // PACKET_BYTES):
                late += spec.retransmission_s
            return comes + int(1e9 * late)

    def _occupation(self, count: int) -> int:
        return int(1e9 * count / self.spec.bandwidth)


def occupy(intervals: list[tuple[int, int]], begin: int, need: int) -> int:
    """Take the first `need` ns from `begin` on that lie in none of the intervals; returns when they are over.

    Connections are read in any order, so a chunk that came earlier may be seen later: it still finds its time free.
    """
    first = last = bisect_left(intervals, begin, key=itemgetter(1))
    start, end = begin, begin + need
    while last < len(intervals) and intervals[last][0] < end:
        start = min(start, intervals[last][0])
        end += intervals[last][1] - max(begin, intervals[last][0])
        last += 1
    intervals[first:last] = [(start, end)]
    del intervals[:-MEMORY]
    return end


class EmulatedSocket:
    """A non-blocking connection whose bytes come when a network would bring them.

    It stays readable for the system's poll while bytes are here but not due; reading them raises BlockingIOError.
    """

    def __init__(self, connected: Stream, nic: Nic) -> None:
        self.is_cut = False
        self._stream = connected
        self._nic = nic
        self._unsent_header = b""
        self._promised = 0  # bytes that the last header announced and the connection has not taken yet
        self._header = bytearray()  # of the next chunk, as far as it has come
        self._rest = 0  # bytes of the chunk being read
        self._due = 0

    def cut(self) -> None:
        """Cut the connection: nothing comes through any more, in either direction, not even its end.

        Whoever closes the wrapped connection still ends the real connection: cut both ends to hide that too.
        """
        self.is_cut = True

    # -- what is used of a socket -----------------------------------------------------------------------------------

    def ready_in(self) -> float | None:
        """Seconds until bytes that are here may be read; 0: now, None: nothing is known to be here."""
        if self.is_cut:
            return None
        if self._rest:
            return max(0, self._due - self._nic.clock()) / 1e9
        inner = getattr(self._stream, "ready_in", None)
        return None if inner is None else inner()

    def send(self, data: memoryview, /) -> int:
        """Like a socket's; as with TLS, the bytes that were not taken must be offered again, before any others."""
        if self.is_cut:
            return len(data)
        sent = 0
        try:
            while sent < len(data):
                sent += self._send_some(data[sent:])
        except BlockingIOError:
            if not sent:
                raise
        return sent

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Like a socket's; `socket.MSG_PEEK` is the only flag."""
        data = self._stream.recv(self._readable(size), flags)
        if not flags:
            self._rest -= len(data)
        return data

    def recv_into(self, buffer: memoryview, size: int = 0, /) -> int:
        """Like a socket's: bytes read, 0 at the end of the connection; `size` 0: as many as `buffer` takes."""
        count = self._readable(size or len(buffer))
        if count:
            count = self._stream.recv_into(buffer, count)
            self._rest -= count
        return count

    def shutdown(self, how: int, /) -> None:
        """Like a socket's, but the peer does not see it if this end is cut."""
        if not self.is_cut:
            self._stream.shutdown(how)

    def close(self) -> None:
        self._stream.close()

    def fileno(self) -> int:
        return self._stream.fileno()

    # -- chunks -----------------------------------------------------------------------------------------------------

    def _send_some(self, view: memoryview) -> int:
        """Send of one chunk what the connection takes, at least one byte."""
        if not self._promised:
            self._promised = min(len(view), CHUNK_BYTES)
            self._unsent_header = _HEADER.pack(self._nic.departure(self._promised), self._promised)
        header = self._unsent_header
        part = view[: self._promised]
        count = self._stream.send(memoryview(header + part) if header else part)
        self._unsent_header = header[count:]
        taken = max(0, count - len(header))
        self._promised -= taken
        if not taken:
            raise BlockingIOError("the connection is full")
        return taken

    def _readable(self, wanted: int) -> int:
        """How many of the `wanted` bytes may be read at once; 0 at the end of the connection.

        Raises:
            BlockingIOError: none yet.
        """
        if self.is_cut:
            raise BlockingIOError("the connection is cut")
        while not self._rest:
            more = self._stream.recv(_HEADER.size - len(self._header))
            if not more:
                return 0
            self._header += more
            if len(self._header) == _HEADER.size:
                leaves, self._rest = _HEADER.unpack(self._header)
                self._header.clear()
                self._due = max(self._due, self._nic.arrival(leaves, self._rest))
        if self._nic.clock() < self._due:
            raise BlockingIOError("nothing is due")
        return min(wanted, self._rest)
