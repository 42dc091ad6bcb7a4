"""Bootstrap: everyone connects to everyone, measures, agrees.

Rank i dials every lower rank, for data and then for beats, and is dialled by every higher one. All connections are
driven by one selector loop, so a stranger that talks nonsense, or nothing, delays nobody: it is refused, logged, and
the loop goes on.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np

from .collectives import Communicator
from .errors import PeerTimeout, ProtocolError, TransportError, UsageError
from .exchange import Exchange
from .formats import WireFormat
from .link import Incoming, Link, close_gently, part_with_blame, tune
from .liveness import Pulse, Watch, listen
from .schedule import FRAME_S, Algorithm, Crowd, Network, all_reduce, choose
from .security import Plain, Stream, Tls, explain
from .wire import HEADER_SIZE, Handshake, Membership, Op, Purpose, Refusal, pack_frame, pack_header

log = logging.getLogger(__name__)

MAX_RANKS = 64
MAX_SESSION = 256
REDIAL_S = 0.1
"""Pause before a dial that was refused is tried again: the peer may still be starting."""
STRANGER_S = 5.0
"""How long an accepted connection may take for its handshake."""
MAX_STRANGERS = 64
"""Accepted connections in their handshake at one time; a further one takes the place of the oldest."""
REHEARSAL_S = 0.05
"""How long calls are timed where ranks share cores, to see what a frame costs there, and again what a byte costs."""
REHEARSALS = 3, 15
CHAINS = 3
"""Chains of rehearsals, of which the fastest counts."""
REHEARSED = 8 << 10
"""Elements that are summed in a rehearsal: 32 KiB."""
FRAME_MAX_S = 2e-4
"""No frame costs a processor more, also where ranks share it and have to be woken."""
MAX_CORES = 4096
"""Cores with higher numbers are not known to ranks that look whether they share some."""
MEASURE_S = 0.3
"""What all measuring should take together; it takes longer where few pings do not fit into that."""
PINGING_S = 12e-3
"""Longest time for the pings of a pair."""
PINGS = range(4, 64)
"""The best of so many pings is near the truth also on a busy machine."""
BURST_TRIALS = range(3, 6)
WIDE_S = 10e-3
"""A network with longer round trips is wide: what frames cost the processor drowns in its jitter, and..."""
WIDE_TRIALS = range(2, 3)
"""...so few pings must do there, and so few bursts of one size: ranks of a crowd wait for the pairs before them."""
WIDE_BURST = 128 << 10
GRACE_S = 5.0
"""A rank that still misses another gives up when its time is over: the others wait a little longer, to hear whom."""
ROW = 16
"""Pings in a row show what a frame costs the processor..."""
ROW_TRIP_S = 2e-3
"""...unless a single ping takes longer than this: the processor does not count then."""
FRAME_BOUNDS_S = (1e-6, 20e-6)
"""A frame cannot cost less or more; on a network with jitter a row of pings may seem to say so."""
REQUEST_SIZE = 8
BURSTS = (16 << 10, 128 << 10, 1 << 20)
"""Bytes that measure bandwidth, one size after the other, until one takes longer than two round trips and a 16th of the
time for a pair: the next would take half of that time, and this one is long enough, also for TCP to have sped up."""


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
    *,
    security: Tls | Plain,
    wire_format: WireFormat = WireFormat.FP32,
    spin_s: float | None = None,
    wrap: Callable[[int, Stream], Stream] | None = None,
) -> Communicator:
    """Connect this rank to all others and return when every link is up and measured.

    Args:
        addresses: "host:port" (IPv6: "[host]:port") of the listener of every rank, in order of rank.
        timeout: seconds until all ranks must be there.
        security: how links are protected, the same on all ranks.
        wire_format: how float32 values travel in sums, the same on all ranks.
        spin_s: how long a wait may spin before it sleeps; by default short if local ranks outnumber the cores.
        wrap: called with a peer's rank and each of the two streams to it as soon as the handshake is done; returns what
            to use instead. It stands for a slow or broken network; if it changes the bytes, the peer's must undo that.

    Raises:
        PeerTimeout: ranks are missing; the message names them all, `rank` is the lowest.
        ProtocolError: a rank that was dialled refused this one, or is not what it should be.
        PeerLost: a rank went while the mesh was being built.
        UsageError: arguments that cannot be right.
    """
    _check(membership, addresses)
    deadline = time.monotonic() + timeout
    bootstrap = _Bootstrap(listener, membership, addresses, security, wrap)
    try:
        bootstrap.run(timeout)
    except BaseException as error:
        blamed = error.rank if isinstance(error, TransportError) else None
        blamed = membership.rank if blamed is None else blamed
        part_with_blame([link for links in bootstrap.links.values() for link in links.values()], blamed, str(error))
        raise
    finally:
        bootstrap.close()
    links = bootstrap.links[Purpose.DATA]
    try:
        pulse = Pulse(bootstrap.watch, bootstrap.links[Purpose.BEATS], links) if links else None
    except BaseException as error:
        part_with_blame([*links.values(), *bootstrap.links[Purpose.BEATS].values()], membership.rank, str(error))
        raise
    with ExitStack() as undo:
        communicator = undo.enter_context(
            Communicator(membership.rank, links, pulse, wire_format=wire_format, spin_s=spin_s)
        )
        remaining = max(0.0, deadline - time.monotonic()) + GRACE_S
        if links:
            usual, communicator.deadline_s = communicator.deadline_s, remaining
            _measure(communicator, Exchange(list(links.values()), pulse, spin_s, outnumbered=True), links)
            communicator.deadline_s = usual
        undo.pop_all()
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
    stream: Stream
    """What the handshake is spoken through: the socket, or what encrypts it."""
    address: str
    handshake: Handshake
    dialled: int | None
    """The rank at the other end if this rank dialled; the peer has yet to say who it is otherwise."""
    expires: float
    connecting: bool
    authenticated: bool = False


class _Bootstrap:
    """All of one rank's connections while the mesh is being built."""

    def __init__(
        self,
        listener: Listener,
        membership: Membership,
        addresses: Sequence[str],
        security: Tls | Plain,
        wrap: Callable[[int, Stream], Stream] | None,
    ) -> None:
        rank = membership.rank
        self.links: dict[Purpose, dict[int, Link]] = {purpose: {} for purpose in Purpose}
        self.watch = Watch(rank)
        self._membership = membership
        self._addresses = addresses
        self._listener = listener
        self._security = security
        self._wrap = wrap
        self._missing = {(peer, purpose) for peer in range(membership.size) if peer != rank for purpose in Purpose}
        self._above = {(peer, purpose) for peer, purpose in self._missing if peer > rank}  # those that dial us
        self._trouble: dict[int, str] = {}
        self._redials = {(peer, Purpose.DATA): 0.0 for peer in range(rank)}
        self._targets: dict[tuple[int, Purpose], Iterator[tuple[Any, ...]]] = {}
        self._attempts: set[_Attempt] = set()
        self._selector = selectors.DefaultSelector()
        self._listening = False

    def run(self, timeout: float) -> None:
        """Build all links or raise."""
        deadline = time.monotonic() + timeout
        while self._missing:
            now = time.monotonic()
            if now >= deadline:
                raise PeerTimeout(min(self._missing)[0], timeout, self._missing_text())
            for rank, purpose in [dial for dial, due in self._redials.items() if due <= now]:
                del self._redials[rank, purpose]
                self._dial(rank, purpose, deadline)
            for attempt in [attempt for attempt in self._attempts if attempt.expires <= now]:
                self._refuse(attempt, attempt.handshake.refusal(f"no handshake within {STRANGER_S:g} s", retry=True))
            self._listen_if_wanted()
            events = [deadline, *self._redials.values(), *(attempt.expires for attempt in self._attempts)]
            pause = max(0.0, min(events) - time.monotonic())
            if not self._selector.get_map():  # Windows cannot select among no sockets
                time.sleep(pause)
                continue
            for key, _ in self._selector.select(pause):
                match key.data:
                    case _Attempt():
                        self._advance(key.data)
                    case Link():
                        self._hear(key.data)
                    case _:
                        self._accept()

    def close(self) -> None:
        """Close all connections that are no links."""
        for attempt in tuple(self._attempts):
            self._drop(attempt)
        self._selector.close()

    def _missing_text(self) -> str:
        described = []
        for rank in sorted({rank for rank, _ in self._missing}):
            unheard = "no answer" if rank < self._membership.rank else "it has not connected to us"
            described.append(f"rank {rank} at {self._addresses[rank]} ({self._trouble.get(rank, unheard)})")
        return f"the mesh is incomplete, missing {', '.join(described)}"

    # -- dialling and accepting -------------------------------------------------------------------------------------

    def _dial(self, rank: int, purpose: Purpose, deadline: float) -> None:
        try:
            if (rank, purpose) not in self._targets:
                host, port = _split(self._addresses[rank])
                self._targets[rank, purpose] = cycle(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            family, kind, protocol, _, target = next(self._targets[rank, purpose])
            connection = socket.socket(family, kind, protocol)
        except OSError as error:  # the name may resolve later
            self._redial(rank, purpose, str(error))
            return
        tune(connection)
        stream = self._security.protect(connection, dials=True)
        handshake = Handshake(self._membership, {(rank, purpose)}, dials_for=purpose)
        attempt = _Attempt(connection, stream, self._addresses[rank], handshake, rank, deadline, connecting=True)
        self._attempts.add(attempt)
        try:
            connection.connect(target)
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(attempt)
            self._redial(rank, purpose, str(error))
            return
        self._selector.register(connection, selectors.EVENT_WRITE, attempt)

    def _redial(self, rank: int, purpose: Purpose | None, why: str) -> None:
        assert purpose is not None  # it is known from the beginning to a rank that dials
        self._trouble[rank] = why
        self._redials[rank, purpose] = time.monotonic() + REDIAL_S

    def _listen_if_wanted(self) -> None:
        wanted = bool(self._above)
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
        strangers = [attempt for attempt in self._attempts if attempt.dialled is None]
        if len(strangers) >= MAX_STRANGERS:  # whoever has waited longest is least likely to be a rank
            oldest = min(strangers, key=lambda attempt: attempt.expires)
            self._refuse(oldest, oldest.handshake.refusal("too many connections at a time", retry=True))
        tune(connection)
        stream = self._security.protect(connection, dials=False)
        handshake = Handshake(self._membership, self._above)
        expires = time.monotonic() + STRANGER_S
        attempt = _Attempt(connection, stream, address, handshake, None, expires, connecting=False)
        self._attempts.add(attempt)
        self._selector.register(connection, selectors.EVENT_READ, attempt)

    # -- the life of one attempt ------------------------------------------------------------------------------------

    def _advance(self, attempt: _Attempt) -> None:
        """Its socket is ready: go on with the handshake as far as the bytes there reach."""
        try:
            if attempt.connecting:
                self._connected(attempt)
            if not attempt.authenticated:
                attempt.handshake.certified = self._security.authenticate(attempt.stream)
                attempt.authenticated = True
                self._say(attempt, attempt.handshake.start())
            while attempt.handshake.peer is None:
                data = attempt.stream.recv(attempt.handshake.missing)
                if not data:
                    raise ConnectionResetError("it closed the connection during the handshake")
                self._say(attempt, attempt.handshake.receive(data))
            self._complete(attempt, attempt.handshake.peer)
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            attempt.stream = attempt.socket  # TLS has sent its alert; a peer that knows nothing of TLS is told as well
            self._refuse(attempt, attempt.handshake.refusal(explain(error)))
        except OSError as error:
            self._drop(attempt)
            if attempt.dialled is not None:
                self._redial(attempt.dialled, attempt.handshake.purpose, str(error))
        except Refusal as refusal:
            self._refuse(attempt, refusal)

    def _say(self, attempt: _Attempt, words: bytes) -> None:
        """Send all of these few words, for which a connection always has room."""
        try:
            sent = attempt.stream.send(memoryview(words)) if words else 0
        except BlockingIOError:
            sent = 0
        if sent < len(words):
            raise ConnectionAbortedError("it does not take even a handshake")

    def _connected(self, attempt: _Attempt) -> None:
        error = attempt.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        if attempt.socket.getsockname() == attempt.socket.getpeername():
            raise ConnectionRefusedError("nobody listens there")  # TCP met itself: a simultaneous open
        attempt.connecting = False
        self._selector.modify(attempt.socket, selectors.EVENT_READ, attempt)

    def _complete(self, attempt: _Attempt, rank: int) -> None:
        purpose = attempt.handshake.purpose
        assert purpose is not None
        if (rank, purpose) not in self._missing:  # two claimed the rank at once and both hold the secret
            raise attempt.handshake.refusal(f"rank {rank} is connected already")
        is_local = attempt.socket.getpeername()[0] == attempt.socket.getsockname()[0]
        stream = attempt.stream if self._wrap is None else self._wrap(rank, attempt.stream)
        link = Link(self._membership.rank, rank, attempt.address, stream, is_local=is_local)
        self.links[purpose][rank] = link
        if purpose is Purpose.BEATS:
            self.watch.add(rank, attempt.address)
        self._attempts.remove(attempt)
        self._missing.discard((rank, purpose))
        self._above.discard((rank, purpose))
        if attempt.dialled is not None and purpose is Purpose.DATA:
            self._redials[rank, Purpose.BEATS] = 0.0
        self._selector.modify(link, selectors.EVENT_READ, link)  # to notice if it goes while others are missing

    def _hear(self, link: Link) -> None:
        """A peer that is a link already has said something, or is gone: the mesh cannot be built without it."""
        if self.links[Purpose.BEATS].get(link.rank) is link:
            listen(self.watch, link)
            self.watch.raise_if_lost()
        elif link.has_words():  # it is done and measures already; its beats tell if it goes after that
            self._selector.unregister(link)

    def _refuse(self, attempt: _Attempt, refusal: Refusal) -> None:
        """Tell the peer why, log it, and go on - unless the peer is one that this rank needs and cannot have."""
        if attempt.authenticated or attempt.stream is attempt.socket:
            with suppress(OSError):
                self._say(attempt, refusal.reply)
        self._drop(attempt)
        if attempt.dialled is None:
            claimed = attempt.handshake.claimed
            if claimed is not None:
                self._trouble[claimed] = f"refused: {refusal}"
            log.warning("%s refused the connection from %s: %s", self._membership, attempt.address, refusal)
        elif refusal.retry:
            self._redial(attempt.dialled, attempt.handshake.purpose, str(refusal))
        else:
            log.error("%s cannot use rank %d at %s: %s", self._membership, attempt.dialled, attempt.address, refusal)
            raise ProtocolError(attempt.dialled, f"{refusal} ({attempt.address})")

    def _drop(self, attempt: _Attempt) -> None:
        if attempt.socket in self._selector.get_map():
            self._selector.unregister(attempt.socket)
        self._attempts.discard(attempt)
        close_gently(attempt.stream)


def _peer_address(connection: socket.socket) -> str:
    host, port, *_ = connection.getpeername()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _measure(communicator: Communicator, exchange: Exchange, links: Mapping[int, Link]) -> None:
    """Measure every pair and share the results, so that all ranks choose algorithms by the same numbers."""
    rank, size, timeout = communicator.rank, communicator.size, communicator.deadline_s
    crowds = _crowds(communicator, [link.rank for link in links.values() if link.is_local])
    for waiting in (communicator, exchange):
        waiting.share_cores(outnumbered=any(rank in crowd.ranks for crowd in crowds))
    rows = np.zeros((size, 3, size))  # of each pair, by the higher rank: round trip, bandwidth, cost of a frame

    turns = _turns(size, crowds)
    seconds = MEASURE_S / sum(max(Counter(high for _, high in pairs).values()) for pairs in turns)
    for pairs in turns:
        for low, high in pairs:
            if rank == high:
                with_frames = not crowds or low == high - 1  # a rehearsal is to follow: what a frame costs may be rough
                rows[rank, :, low] = _Gauge(exchange, links[low], timeout).measure(seconds, with_frames=with_frames)
            elif rank == low:
                _Gauge(exchange, links[high], timeout).help()
        communicator.barrier()
    communicator.all_gather(rows[rank].copy(), list(rows))
    trip, bandwidth, frame_s = rows.transpose(1, 0, 2)
    usual_s = float(np.median(frame_s[frame_s > 0])) if (frame_s > 0).any() else FRAME_S
    latency = np.maximum(trip / 2 - 2 * np.where(frame_s > 0, frame_s, usual_s), trip / 20)
    network = Network((latency + latency.T).tolist(), (bandwidth + bandwidth.T).tolist(), usual_s, crowds=crowds)
    communicator.network = _rehearse(communicator, network) if crowds and trip.max() <= WIDE_S else network
    communicator.stats.reset()


def _crowds(communicator: Communicator, local: Sequence[int]) -> list[Crowd]:
    """The ranks that share too few cores; `local` are this rank's peers on its machine.

    Ranks that are bound to some cores are a crowd if they outnumber those; where one crowd has ranks of another, the
    denser one counts.
    """
    rank, size = communicator.rank, communicator.size
    rows = np.zeros((size, size + MAX_CORES), np.uint8)  # of each rank: who is on its machine, where it may run
    rows[rank, [rank, *local]] = 1
    rows[rank, [size + core for core in _usable_cores() if core < MAX_CORES]] = 1
    communicator.all_gather(rows[rank].copy(), list(rows))
    together, cores = rows[:, :size] > 0, rows[:, size:] > 0
    found = []
    for machine, usable in zip(together, cores, strict=True):
        ranks = np.flatnonzero(machine & ~(cores & ~usable).any(1))
        if 0 < usable.sum() < len(ranks):
            found.append(Crowd(ranks.tolist(), int(usable.sum())))
    crowds: list[Crowd] = []
    for crowd in sorted(found, key=lambda crowd: (-len(crowd.ranks) / crowd.cores, -crowd.cores, crowd.ranks)):
        if not any(set(crowd.ranks) & set(known.ranks) for known in crowds):
            crowds.append(crowd)
    return crowds


def _usable_cores() -> Collection[int]:
    """The cores that this process may run on, where the system tells; otherwise all."""
    affinity: Callable[[int], Collection[int]] | None = getattr(os, "sched_getaffinity", None)
    return range(os.cpu_count() or 1) if affinity is None else affinity(0)


def _rehearse(communicator: Communicator, network: Network) -> Network:
    """See what frames and bytes really cost processors that are shared.

    A pair measures alone; in a collective all the ranks of a core want it at once, and have to be woken.
    """

    def rehearse(call: Callable[[], object], rounds: int) -> float:
        """Seconds per call, in a row: ranks are late by turns, and wait for each other by turns."""
        began = time.perf_counter()
        for _ in range(rounds):
            call()
        seconds = [np.zeros(1) for _ in range(communicator.size)]
        communicator.all_gather(np.array([(time.perf_counter() - began) / rounds]), seconds)
        return float(np.median(seconds))

    def fastest_s(call: Callable[[], object]) -> float:
        call()  # plans are made
        rounds = int(np.clip(REHEARSAL_S / CHAINS / rehearse(call, 1), *REHEARSALS))
        return min(rehearse(call, rounds) for _ in range(CHAINS))  # others may use the machine too

    def forecast(network: Network, elements: int) -> float:
        goal = all_reduce(elements, communicator.size)
        return choose(goal, 4, network, algorithm=Algorithm.ONE_SHOT).seconds

    values, costs = np.zeros(REHEARSED, np.float32), np.zeros(2)
    empty_s = fastest_s(communicator.barrier)
    full_s = fastest_s(lambda: communicator.all_reduce(values, Algorithm.ONE_SHOT))
    if communicator.rank == 0:  # the others have no core to do the same
        costs[0] = _solve(
            lambda each: forecast(replace(network, frame_s=each), 0), empty_s, network.frame_s, FRAME_MAX_S
        )
        empty = replace(network, frame_s=costs[0])
        most = 1 / float(np.max(network.bandwidth))  # what bytes cost the processor is part of what they take at all
        costs[1] = _solve(lambda each: forecast(replace(empty, byte_s=each), REHEARSED), full_s, 0.0, most)
    communicator.broadcast(costs, 0)
    return replace(network, frame_s=float(costs[0]), byte_s=float(costs[1]))


def _solve(rising: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Where a rising function has this value, or the end of its range that is nearer."""
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return low


def _turns(size: int, crowds: Sequence[Crowd]) -> list[list[tuple[int, int]]]:
    """All pairs of ranks, in turns: those of a turn measure at the same time, as far as they have no rank in common.

    Pairs of a crowd would measure each other's haste: in a turn they have one rank in common, which takes one after the
    other. A turn for each pair would be slow where ranks share cores, and one for all a long silence of some.
    """
    longest = max((len(crowd.ranks) for crowd in crowds), default=0)
    turns = [
        [(low, crowd.ranks[n]) for crowd in crowds for low in crowd.ranks[:n] if n < len(crowd.ranks)]
        for n in range(1, longest)
    ]
    crowded = {pair for pairs in turns for pair in pairs}
    for other in range(1, 1 << (size - 1).bit_length()):
        pairs = [(rank, rank ^ other) for rank in range(size) if rank < rank ^ other < size]
        turns.append([pair for pair in pairs if pair not in crowded])
    return [pairs for pairs in turns if pairs]


class _Gauge:
    """Measures the connection to one peer with frames that are exchanged as in a collective.

    With `f` the processor's time to send or receive a frame, a swap of empty frames takes ``4 f + 2 latency``, k in a
    row take ``2 f (k - 1)`` longer, and one of S bytes each way ``S / bandwidth`` longer. Both ends send their bytes at
    the same time, as in a collective: what a half-duplex network or a busy core makes of that is what counts.
    """

    def __init__(self, exchange: Exchange, link: Link, timeout: float) -> None:
        self._exchange = exchange
        self._link = link
        self._timeout = timeout
        self._outgoing, self._incoming = (memoryview(bytearray(HEADER_SIZE + BURSTS[-1])) for _ in range(2))

    def measure(self, seconds: float, *, with_frames: bool) -> tuple[float, float, float]:
        """Round trip (s), bandwidth (bytes/s) and cost of a frame (s; 0: not measured), in about so long.

        The peer must `help`.
        """
        share = min(seconds / 4, PINGING_S)
        trip = self._best(0, 1, WIDE_TRIALS, share)
        wide = trip > max(seconds, WIDE_S)
        if not wide:
            trip = min(trip, self._best(0, 1, PINGS, share))
        frame_s = 0.0
        if with_frames and trip < ROW_TRIP_S:
            longer = self._best(0, ROW, PINGS, share) - trip
            frame_s = float(np.clip(longer / (2 * (ROW - 1)), *FRAME_BOUNDS_S))
        bursts, trials = ((WIDE_BURST,), WIDE_TRIALS) if wide else (BURSTS, BURST_TRIALS)
        for size in bursts:
            burst = self._best(size, 1, trials, share)
            trip = min(trip, burst)
            if burst - trip > trip + seconds / 16:
                break
        self._ask(-1)
        return trip, size / max(burst - trip, burst / (16 if wide else 2)), frame_s

    def help(self) -> None:
        """Do what the peer asks for until it has measured all."""
        while (size := int.from_bytes(self._receive(REQUEST_SIZE), "little", signed=True)) >= 0:
            self._send(size)
            if size:
                self._receive(size)

    def _best(self, size: int, row: int, trials: range, seconds: float) -> float:
        """The fastest of so many trials, the fewer if they take longer than `seconds`."""
        began = time.perf_counter()
        trips: list[float] = []
        while len(trips) < trials.start or (len(trips) < trials.stop and time.perf_counter() - began < seconds):
            started = time.perf_counter()
            for _ in range(row):
                self._ask(size)
            if size:
                self._send(size)
            for _ in range(row):
                self._receive(size)
            trips.append(time.perf_counter() - started)
        return min(trips)

    def _ask(self, size: int) -> None:
        self._link.push(memoryview(pack_frame(Op.MESSAGE, size.to_bytes(REQUEST_SIZE, "little", signed=True))))

    def _send(self, size: int) -> None:
        self._outgoing[:HEADER_SIZE] = pack_header(Op.MESSAGE, 0, 0, 0, size)
        self._link.push(self._outgoing[: HEADER_SIZE + size])

    def _receive(self, size: int) -> memoryview:
        incoming = Incoming(self._link, [self._incoming[: HEADER_SIZE + size]])
        incoming.expect(pack_header(Op.MESSAGE, 0, 0, 0, size))
        self._exchange.run([incoming], None, [self._link], self._timeout, "measuring the network")
        return self._incoming[HEADER_SIZE : HEADER_SIZE + size]
