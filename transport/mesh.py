"""How a mesh is made: every rank connects to every other, and together they measure their connections.

Rank i dials every lower rank, for data and then for beats, and is dialled by every higher one. All connections are
driven by one loop (`motley.transport.links.connecting`), so a stranger delays nobody.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .collectives import Communicator
from .errors import PeerLost, PeerTimeout, ProtocolError, TransportError, UsageError
from .exchange import Exchange
from .formats import WireFormat
from .links.connecting import Arrival, Connector, Failure, check_membership
from .links.knocks import Knocks
from .links.link import Incoming, Link, part_with_blame, wait_ready
from .links.listening import Listener, split_address
from .links.liveness import Pulse, Watch, listen
from .links.security import Plain, Stream, Tls
from .links.wire import HEADER_SIZE, Membership, Op, Purpose, pack_frame, pack_header
from .schedules.forecast import FRAME_S, Crowd, Network, choose
from .schedules.schedule import Algorithm, all_reduce

PURPOSES = Purpose.DATA, Purpose.BEATS
"""What each pair of ranks has a link for."""
REHEARSAL_S = 0.05
"""How long calls are timed where ranks share cores, to see what a frame costs there, and again what a byte costs."""
REHEARSALS = 3, 15
"""Rehearsals of a chain, at least and at most."""
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
PINGING_S = 40e-3
"""Longest time for the pings of a pair: long enough that its processors are free for one of them, also if others use
them."""
PINGS = range(4, 256)
"""The best of so many pings is near the truth also on a busy machine."""
BURST_TRIALS = range(3, 6)
"""Bursts of one size, at least and at most."""
WIDE_S = 10e-3
"""A network with longer round trips is wide: what frames cost the processor drowns in its jitter, and..."""
WIDE_TRIALS = range(2, 3)
"""...so few pings must do there, and so few bursts of one size: ranks of a crowd wait for the pairs before them."""
WIDE_BURST = 128 << 10
"""Bytes that measure bandwidth on a wide network."""
REFUSED_S = 3.0
"""A rank that listens refuses nobody for so long: a queue of connections that is full is soon shorter."""
GRACE_S = 5.0
"""A rank that still misses another gives up when its time is over: the others wait a little longer, to hear whom."""
ROW = 16
"""Pings in a row show what a frame costs the processor..."""
ROW_TRIP_S = 2e-3
"""...unless a single ping takes longer than this: the processor does not count then."""
FRAME_BOUNDS_S = (1e-6, 20e-6)
"""A frame cannot cost less or more; on a network with jitter a row of pings may seem to say so."""
REQUEST_SIZE = 8
"""Bytes in which one rank tells the other what to send."""
BURSTS = (16 << 10, 128 << 10, 1 << 20)
"""Bytes that measure bandwidth, one size after the other, until one takes longer than two round trips and a 16th of the
time for a pair: the next would take half of that time, and this one is long enough, also for TCP to have sped up."""


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
    all_listen: bool = False,
) -> Communicator:
    """Connect this rank to all others and return when every link is up and measured.

    Args:
        listener: where higher ranks reach this one; it stays the caller's.
        membership: this rank's place in the session; what all ranks have in common is compared in the handshakes.
        addresses: "host:port" (IPv6: "[host]:port") of the listener of every rank, in order of rank.
        timeout: seconds until all ranks must be there.
        security: how links are protected, the same on all ranks.
        wire_format: how float32 values travel in sums, the same on all ranks.
        spin_s: how long a wait may spin before it sleeps; by default short if local ranks outnumber the cores.
        wrap: called with a peer's rank and each of the two streams to it as soon as the handshake is done; returns what
            to use instead. It stands for a slow or broken network; if it changes the bytes, the peer's must undo that.
        all_listen: all ranks listen already, so that one which refuses connections for `REFUSED_S` is not starting but
            has ended, or is behind a firewall.

    Raises:
        PeerTimeout: ranks are missing; the message names them all, `rank` is the lowest.
        ProtocolError: a rank that was dialled refused this one, or is not what it should be.
        PeerLost: a rank went while the mesh was being built, or cannot be reached: its name is not known here, or its
            machine does not answer or, if `all_listen`, refuses.
        UsageError: arguments that cannot be right.
    """
    _check(membership, addresses)
    deadline = time.monotonic() + timeout
    refused_s = REFUSED_S if all_listen else math.inf
    bootstrap = _Bootstrap(listener, membership, addresses, security, wrap, refused_s)
    try:
        bootstrap.run(timeout)
    except BaseException as error:
        blamed = error.rank if isinstance(error, TransportError) else None
        blamed = membership.rank if blamed is None else blamed
        finder = error.finder if isinstance(error, PeerLost) else None
        made = [link for links in bootstrap.links.values() for link in links.values()]
        part_with_blame(made, blamed, str(error), finder)
        raise
    finally:
        bootstrap.close()
    links = bootstrap.links[Purpose.DATA]
    try:
        pulse = bootstrap.start_pulse() if links else None
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
    check_membership(membership)
    if len(addresses) != membership.size:
        raise UsageError(f"{len(addresses)} addresses for {membership.size} ranks")
    for address in addresses[: membership.rank]:
        split_address(address)


class _Bootstrap:
    """All of one rank's connections while the mesh is being built."""

    def __init__(
        self,
        listener: Listener,
        membership: Membership,
        addresses: Sequence[str],
        security: Tls | Plain,
        wrap: Callable[[int, Stream], Stream] | None,
        refused_s: float,
    ) -> None:
        rank = membership.rank
        self._refused_s = refused_s
        self.links: dict[Purpose, dict[int, Link]] = {purpose: {} for purpose in PURPOSES}
        self.watch = Watch(rank)
        self._membership = membership
        self._addresses = addresses
        self._missing = {(peer, purpose) for peer in range(membership.size) if peer != rank for purpose in PURPOSES}
        self._above = {(peer, purpose) for peer, purpose in self._missing if peer > rank}  # those that dial us
        self._heard: set[Link] = set()  # those that are done and measure already
        self._listener = listener
        self._connector = Connector(membership, security, listener, self._above, wrap)
        for peer in range(rank):
            self._connector.dial(peer, Purpose.DATA, addresses[peer], refused_s=refused_s)

    def run(self, timeout: float) -> None:
        """Build all links or raise."""
        deadline = time.monotonic() + timeout
        while self._missing:
            now = time.monotonic()
            if now >= deadline:
                raise PeerTimeout(min(self._missing)[0], timeout, self._missing_text())
            quiet = [link for links in self.links.values() for link in links.values() if link not in self._heard]
            connector, pause = self._connector, max(0.0, min(deadline, self._connector.due) - now)
            ready = wait_ready([*connector.readers, *quiet], connector.writers, pause)
            for link in quiet:
                if link in ready:
                    self._hear(link)
            for outcome in connector.step(ready):
                match outcome:
                    case Arrival(purpose, link):
                        self._welcome(purpose, link)
                    case Failure(rank=rank, reason=reason, refused=True):
                        raise ProtocolError(rank, reason)
                    case Failure(rank=rank, reason=reason):
                        raise PeerLost(rank, f"rank {self._membership.rank} cannot reach it: {reason}")

    def start_pulse(self) -> Pulse:
        """Watch over the links from now on; what has been connected knocks with the same means."""
        rank, size = self._membership.rank, self._membership.size
        knocks = Knocks(self._connector, self._listener, dict(enumerate(self._addresses[:rank])), size)
        try:
            return Pulse(self.watch, self.links[Purpose.BEATS], self.links[Purpose.DATA], knocks)
        except BaseException:
            knocks.close()
            raise

    def close(self) -> None:
        """Close all connections that are no links."""
        self._connector.close()

    def _missing_text(self) -> str:
        described = []
        for rank in sorted({rank for rank, _ in self._missing}):
            unheard = "no answer" if rank < self._membership.rank else "it has not connected to us"
            trouble = self._connector.trouble.get(rank, unheard)
            described.append(f"rank {rank} at {self._addresses[rank]} ({trouble})")
        return f"the mesh is incomplete, missing {', '.join(described)}"

    def _welcome(self, purpose: Purpose, link: Link) -> None:
        rank = link.rank
        self.links[purpose][rank] = link
        if purpose is Purpose.BEATS:
            self.watch.add(rank, link.address)
        elif rank < self._membership.rank:
            self._connector.dial(rank, Purpose.BEATS, self._addresses[rank], refused_s=self._refused_s)
        self._missing.discard((rank, purpose))
        self._above.discard((rank, purpose))

    def _hear(self, link: Link) -> None:
        """A peer that is a link already has said something, or is gone: the mesh cannot be built without it."""
        if self.links[Purpose.BEATS].get(link.rank) is link:
            listen(self.watch, link)
            self.watch.raise_if_lost()
        elif link.has_words():  # it is done and measures already; its beats tell if it goes after that
            self._heard.add(link)


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
    usual_s = _median(frame_s[frame_s > 0]) if (frame_s > 0).any() else FRAME_S
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


def _median(values: npt.NDArray[np.float64]) -> float:
    """As NumPy's own, which imports masked arrays for it."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


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
        return _median(np.concatenate(seconds))

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
