"""Bootstrap: everyone connects to everyone, measures, agrees.

Rank i dials every lower rank and is dialled by every higher one. All connections are driven by one selector loop, so a
stranger that talks nonsense, or nothing, delays nobody: it is refused, logged, and the loop goes on.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, cycle
from typing import Any

import numpy as np

from .collectives import Communicator
from .errors import PeerTimeout, ProtocolError, TransportError, UsageError
from .link import Link, close_gently, part_with_blame
from .wire import Handshake, Membership, Refusal

log = logging.getLogger(__name__)

MAX_RANKS = 64
MAX_SESSION = 256
REDIAL_S = 0.1
"""Pause before a dial that was refused is tried again: the peer may still be starting."""
STRANGER_S = 5.0
"""How long an accepted connection may take for its handshake."""
MAX_STRANGERS = 64
"""Accepted connections in their handshake at one time; further ones wait in the system's backlog."""
PINGS = 4
REMOTE_BANDWIDTH = 117e6
"""Assumed until it is measured: what gigabit Ethernet gives, in bytes per second."""
LOCAL_BANDWIDTH = 1.5e9
"""Assumed between ranks of one machine, in bytes per second."""


class Listener:
    """The socket where higher ranks reach this one. It outlives meshes: the next epoch uses it again."""

    def __init__(self, host: str = "0.0.0.0", port: int = 0) -> None:
        """`port` 0 lets the system choose. An IPv6 `host` such as "::" is possible; "::" takes IPv4 too.

        Raises:
            UsageError: the port is taken, or the host is none of this machine's.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # on Windows SO_REUSEADDR would let others take the port
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
            else:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self.socket.bind((host, port))
            self.socket.listen(128)
        except (OSError, OverflowError) as error:
            self.socket.close()
            raise UsageError(f"cannot listen on {host} port {port}: {error}; choose another port or host") from error
        self.socket.setblocking(False)

    @property
    def port(self) -> int:
        port: int = self.socket.getsockname()[1]
        return port

    def close(self) -> None:
        self.socket.close()


def connect_mesh(
    listener: Listener,
    membership: Membership,
    addresses: Sequence[str],
    timeout: float = 30.0,
    spin_s: float | None = None,
) -> Communicator:
    """Connect this rank to all others and return when every link is up and measured.

    Args:
        addresses: "host:port" (IPv6: "[host]:port") of the listener of every rank, in order of rank.
        timeout: seconds until all ranks must be there.
        spin_s: how long a wait may spin before it sleeps; by default short if local ranks outnumber the cores.

    Raises:
        PeerTimeout: ranks are missing; the message names them all, `rank` is the lowest.
        ProtocolError: a rank that was dialled refused this one, or is not what it should be.
        PeerLost: a rank went while the mesh was being built.
        UsageError: arguments that cannot be right.
    """
    _check(membership, addresses)
    deadline = time.monotonic() + timeout
    bootstrap = _Bootstrap(listener, membership, addresses)
    try:
        bootstrap.run(timeout)
    except BaseException as error:
        blamed = error.rank if isinstance(error, TransportError) else None
        blamed = membership.rank if blamed is None else blamed
        part_with_blame(list(bootstrap.links.values()), blamed, str(error))
        raise
    finally:
        bootstrap.close()
    communicator = Communicator(membership.rank, bootstrap.links, spin_s)
    # A rank that still misses another one gives up when its time is over: wait a little longer, to hear whom it misses.
    try:
        _measure(communicator, bootstrap.links, max(0.0, deadline - time.monotonic()) + 2.0)
    except BaseException:
        communicator.close()
        raise
    return communicator


def _check(membership: Membership, addresses: Sequence[str]) -> None:
    if not 0 <= membership.rank < membership.size <= MAX_RANKS:
        raise UsageError(f"rank {membership.rank} of {membership.size}: ranks are 0 to size - 1, at most {MAX_RANKS}")
    if len(addresses) != membership.size:
        raise UsageError(f"{len(addresses)} addresses for {membership.size} ranks")
    if not 0 <= membership.epoch < 1 << 32:
        raise UsageError(f"epoch {membership.epoch} is not a 32-bit number")
    if len(membership.agreement) != 32:
        raise UsageError(f"the agreement is a SHA-256 digest of 32 bytes, not {len(membership.agreement)}")
    if len(membership.secret) < 16:
        raise UsageError(f"a secret of {len(membership.secret)} bytes can be guessed; use at least 16 random ones")
    if len(membership.session.encode()) > MAX_SESSION:
        raise UsageError(f"the session id is longer than {MAX_SESSION} bytes")
    for address in addresses[: membership.rank]:
        _split(address)


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{address!r} is no address: write host:port or [IPv6 host]:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(eq=False)
class _Attempt:
    """A connection on its way to become a link."""

    socket: socket.socket
    address: str
    handshake: Handshake
    dialled: int | None
    """The rank at the other end if this rank dialled; the peer has yet to say who it is otherwise."""
    expires: float
    connecting: bool


class _Bootstrap:
    """All of one rank's connections while the mesh is being built."""

    def __init__(self, listener: Listener, membership: Membership, addresses: Sequence[str]) -> None:
        self.links: dict[int, Link] = {}
        self._membership = membership
        self._addresses = addresses
        self._listener = listener
        self._missing = set(range(membership.size)) - {membership.rank}
        self._above = set(range(membership.rank + 1, membership.size))  # those of the missing that dial us
        self._trouble: dict[int, str] = {}
        self._redials = dict.fromkeys(range(membership.rank), 0.0)
        self._targets: dict[int, Iterator[tuple[Any, ...]]] = {}
        self._attempts: set[_Attempt] = set()
        self._selector = selectors.DefaultSelector()
        self._listening = False

    def run(self, timeout: float) -> None:
        """Build all links or raise."""
        deadline = time.monotonic() + timeout
        while self._missing:
            now = time.monotonic()
            if now >= deadline:
                raise PeerTimeout(min(self._missing), timeout, self._missing_text())
            for rank in [rank for rank, due in self._redials.items() if due <= now]:
                del self._redials[rank]
                self._dial(rank, deadline)
            for attempt in [attempt for attempt in self._attempts if attempt.expires <= now]:
                self._refuse(attempt, attempt.handshake.refusal(f"no handshake within {STRANGER_S:g} s", retry=True))
            self._listen_if_room()
            events = [deadline, *self._redials.values(), *(attempt.expires for attempt in self._attempts)]
            for key, _ in self._selector.select(max(0.0, min(events) - time.monotonic())):
                match key.data:
                    case _Attempt():
                        self._advance(key.data)
                    case Link():
                        if key.data.has_words():  # it is done and measures already
                            self._selector.unregister(key.data)
                    case _:
                        self._accept()

    def close(self) -> None:
        """Close all connections that are no links."""
        for attempt in tuple(self._attempts):
            self._drop(attempt)
        self._selector.close()

    def _missing_text(self) -> str:
        described = []
        for rank in sorted(self._missing):
            unheard = "no answer" if rank < self._membership.rank else "it has not connected to us"
            described.append(f"rank {rank} at {self._addresses[rank]} ({self._trouble.get(rank, unheard)})")
        return f"the mesh is incomplete, missing {', '.join(described)}"

    # -- dialling and accepting -------------------------------------------------------------------------------------

    def _dial(self, rank: int, deadline: float) -> None:
        try:
            if rank not in self._targets:
                host, port = _split(self._addresses[rank])
                self._targets[rank] = cycle(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            family, kind, protocol, _, target = next(self._targets[rank])
            connection = socket.socket(family, kind, protocol)
        except OSError as error:  # the name may resolve later
            self._redial(rank, str(error))
            return
        connection.setblocking(False)
        handshake = Handshake(self._membership, (rank,), dials=True)
        attempt = _Attempt(connection, self._addresses[rank], handshake, rank, deadline, connecting=True)
        self._attempts.add(attempt)
        try:
            connection.connect(target)
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(attempt)
            self._redial(rank, str(error))
            return
        self._selector.register(connection, selectors.EVENT_WRITE, attempt)

    def _redial(self, rank: int, why: str) -> None:
        self._trouble[rank] = why
        self._redials[rank] = time.monotonic() + REDIAL_S

    def _listen_if_room(self) -> None:
        strangers = sum(attempt.dialled is None for attempt in self._attempts)
        wanted = bool(self._above) and strangers < MAX_STRANGERS
        if wanted and not self._listening:
            self._selector.register(self._listener.socket, selectors.EVENT_READ)
        elif self._listening and not wanted:
            self._selector.unregister(self._listener.socket)
        self._listening = wanted

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.socket.accept()
            address = _peer_address(connection)
        except OSError:  # it has gone already
            return
        connection.setblocking(False)
        handshake = Handshake(self._membership, self._above, dials=False)
        attempt = _Attempt(connection, address, handshake, None, time.monotonic() + STRANGER_S, connecting=False)
        self._attempts.add(attempt)
        self._selector.register(connection, selectors.EVENT_READ, attempt)

    # -- the life of one attempt ------------------------------------------------------------------------------------

    def _advance(self, attempt: _Attempt) -> None:
        """Its socket is ready: go on with the handshake as far as the bytes there reach."""
        try:
            if attempt.connecting:
                self._connected(attempt)
            while attempt.handshake.peer is None:
                data = attempt.socket.recv(attempt.handshake.missing)
                if not data:
                    raise ConnectionResetError("it closed the connection during the handshake")
                attempt.socket.sendall(attempt.handshake.receive(data))
            self._complete(attempt, attempt.handshake.peer)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(attempt)
            if attempt.dialled is not None:
                self._redial(attempt.dialled, str(error))
        except Refusal as refusal:
            self._refuse(attempt, refusal)

    def _connected(self, attempt: _Attempt) -> None:
        error = attempt.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        if attempt.socket.getsockname() == attempt.socket.getpeername():
            raise ConnectionRefusedError("nobody listens there")  # TCP met itself: a simultaneous open
        attempt.connecting = False
        attempt.socket.sendall(attempt.handshake.start())
        self._selector.modify(attempt.socket, selectors.EVENT_READ, attempt)

    def _complete(self, attempt: _Attempt, rank: int) -> None:
        if rank not in self._missing:  # two claimed the rank at once and both hold the secret
            raise attempt.handshake.refusal(f"rank {rank} is connected already")
        link = Link(self._membership.rank, rank, attempt.address, attempt.socket)
        self.links[rank] = link
        self._attempts.remove(attempt)
        self._missing.discard(rank)
        self._above.discard(rank)
        self._selector.modify(link, selectors.EVENT_READ, link)  # to notice if it goes while others are missing

    def _refuse(self, attempt: _Attempt, refusal: Refusal) -> None:
        """Tell the peer why, log it, and go on - unless the peer is one that this rank needs and cannot have."""
        with suppress(OSError):
            attempt.socket.sendall(refusal.reply)
        self._drop(attempt)
        if attempt.dialled is None:
            claimed = attempt.handshake.claimed
            if claimed is not None:
                self._trouble[claimed] = f"refused: {refusal}"
            log.warning("%s refused the connection from %s: %s", self._membership, attempt.address, refusal)
        elif refusal.retry:
            self._redial(attempt.dialled, str(refusal))
        else:
            log.error("%s cannot use rank %d at %s: %s", self._membership, attempt.dialled, attempt.address, refusal)
            raise ProtocolError(attempt.dialled, f"{refusal} ({attempt.address})")

    def _drop(self, attempt: _Attempt) -> None:
        if attempt.socket in self._selector.get_map():
            self._selector.unregister(attempt.socket)
        self._attempts.discard(attempt)
        close_gently(attempt.socket)


def _peer_address(connection: socket.socket) -> str:
    host, port, *_ = connection.getpeername()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _measure(communicator: Communicator, links: Mapping[int, Link], timeout: float) -> None:
    """Ping every peer a few times and share the results, so that all ranks choose algorithms by the same numbers."""
    rank, size = communicator.rank, communicator.size
    rows = np.zeros((size, 2, size))  # latency and bandwidth, measured by the higher rank of each pair
    # Pairs take their turn in the same order everywhere, so that no two ranks wait for each other.
    for low, high in combinations(range(size), 2):
        if rank == high:
            rows[rank, 0, low] = _ping(communicator, low, timeout) / 2
            rows[rank, 1, low] = LOCAL_BANDWIDTH if links[low].is_local else REMOTE_BANDWIDTH
        elif rank == low:
            for _ in range(PINGS):
                communicator.send(communicator.recv(high, timeout), high)
    usual, communicator.deadline_s = communicator.deadline_s, timeout
    communicator.all_gather(rows[rank].copy(), list(rows))
    communicator.deadline_s = usual
    latency, bandwidth = rows[:, 0], rows[:, 1]
    communicator.latency = (latency + latency.T).tolist()
    communicator.bandwidth = (bandwidth + bandwidth.T).tolist()
    communicator.stats.reset()


def _ping(communicator: Communicator, peer: int, timeout: float) -> float:
    """The fastest of a few round trips, in seconds."""
    trips = []
    for _ in range(PINGS):
        started = time.perf_counter()
        communicator.send(b"ping", peer)
        communicator.recv(peer, timeout)
        trips.append(time.perf_counter() - started)
    return min(trips)
