"""Collectives over a mesh of links: what a rank calls, and how it runs a schedule.

All ranks make the same calls in the same order. Results are the same bits on every rank: sums are taken in rank order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from .errors import TransportError, UsageError
from .exchange import Exchange
from .link import Incoming, IncomingMessage, Link, part_in_peace, part_with_blame
from .plan import Compiler, Outgoing, Step
from .reduce import sum_in_order
from .schedule import Algorithm, build, choose
from .wire import DTYPE_CODES, HEADER_SIZE, MAX_MESSAGE, Header, Op, pack_header

Array = npt.NDArray[Any]

MAX_PLANS = 64
"""Sizes whose plans are kept; a decoder meets one or two, prefill as many as there are chunk lengths."""
SUMMABLE = (np.dtype("<f4"), np.dtype("<f8"))


@dataclass(frozen=True)
class StatsSnapshot:
    """Where the time of a rank went since the last reset, in seconds."""

    compute_s: float
    """Between collectives, from the end of one call to the begin of the next; waiting for a step is no compute."""
    wait_s: float
    """In collectives, until the last peer's first byte was there."""
    wire_s: float
    """The rest of the collectives."""
    collectives: int


class Stats:
    """Cumulative clocks of a communicator, always on."""

    __slots__ = ("_compute_ns", "_left_ns", "_wait_ns", "_wire_ns", "collectives")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._compute_ns = self._wait_ns = self._wire_ns = self.collectives = 0
        self._left_ns = perf_counter_ns()

    def snapshot(self) -> StatsSnapshot:
        return StatsSnapshot(self._compute_ns / 1e9, self._wait_ns / 1e9, self._wire_ns / 1e9, self.collectives)

    def enter(self) -> int:
        """The rank stops computing."""
        now = perf_counter_ns()
        self._compute_ns += now - self._left_ns
        return now

    def leave(self, entered: int, heard: int) -> None:
        """A collective ends that was entered and heard all its peers at these times."""
        self._left_ns = now = perf_counter_ns()
        self._wait_ns += heard - entered
        self._wire_ns += now - heard
        self.collectives += 1

    def restart(self) -> None:
        """The rank computes from now on; what came before counts nowhere."""
        self._left_ns = perf_counter_ns()


class Communicator:
    """One rank's end of the mesh. Not thread-safe: one thread owns it.

    Every collective raises `PeerLost` when a peer goes, `PeerTimeout` when one is silent for `deadline_s`,
    `ProtocolError` when one is in another call, and `UsageError` when called wrongly. After any but a `UsageError`
    the communicator is broken and closed, its peers have been told whom to blame, and calls raise the same error.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], spin_s: float | None = None) -> None:
        """`links`: a link to every other rank. Use `connect_mesh` to get them."""
        size = len(links) + 1
        self.deadline_s = 60.0
        """Seconds a peer may be silent in a collective."""
        self.stats = Stats()
        self.latency: Sequence[Sequence[float]] = [[0.0] * size for _ in range(size)]
        """Seconds one way between two ranks; the same numbers on all ranks, as the algorithm is chosen from them."""
        self.bandwidth: Sequence[Sequence[float]] = [[1e9] * size for _ in range(size)]
        """Bytes per second between two ranks; the same numbers on all ranks."""
        self._rank = rank
        self._size = size
        self._links = dict(sorted(links.items()))
        self._exchange = Exchange(list(self._links.values()), spin_s)
        self._sequence = 0
        self._compiler = Compiler(rank, self._links)
        self._plans: dict[tuple[int, np.dtype[Any], Algorithm | None], list[Step]] = {}
        self._headers = {rank: memoryview(bytearray(HEADER_SIZE)) for rank in self._links}
        self._broken: TransportError | None = None

    def __repr__(self) -> str:
        state = "open" if self._broken is None else f"closed: {self._broken}"
        return f"<Communicator rank {self._rank} of {self._size}, {state}>"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, buffer: Array, algorithm: Algorithm | None = None) -> None:
        """Sum `buffer` over all ranks in place, in rank order.

        Args:
            buffer: C-contiguous f32 (or f64, for the reference engine) of any shape, the same on all ranks.
            algorithm: force one; by default it is chosen from the size and what `connect_mesh` measured.
        """
        entered = self.stats.enter()
        self._check_open()
        flat = self._flat(buffer, writable=True)
        if flat.dtype not in SUMMABLE:
            raise UsageError(f"all_reduce sums float32, not {flat.dtype}")
        heard = entered
        if self._size > 1:
            plan = self._plans.get((flat.size, flat.dtype, algorithm))
            if plan is None:
                plan = self._plan(flat.size, flat.dtype, algorithm)
            try:
                heard = self._run(plan, flat, DTYPE_CODES[flat.dtype])
            except BaseException as error:
                self._give_up(error)
        self.stats.leave(entered, heard or entered)

    def all_gather(self, local: Array, out: Sequence[Array]) -> None:
        """Collect every rank's array on every rank.

        Args:
            local: what this rank contributes: C-contiguous, of the size and type of ``out[rank]``.
            out: an array per rank, of unequal sizes if need be, the same on all ranks.
        """
        entered = self.stats.enter()
        self._check_open()
        mine = self._flat(local)
        targets = [self._flat(array, writable=True) for array in out]
        if len(targets) != self._size:
            raise UsageError(f"all_gather wants {self._size} output arrays, got {len(targets)}")
        own = targets[self._rank]
        if (own.size, own.dtype) != (mine.size, mine.dtype):
            raise UsageError(
                f"all_gather: this rank gives {mine.size} x {mine.dtype}, "
                f"out[{self._rank}] takes {own.size} x {own.dtype}"
            )
        own[:] = mine
        others = {rank: targets[rank] for rank in self._links}
        heard = self._move(Op.ALL_GATHER, own, list(self._links.values()), others, "an all_gather")
        self.stats.leave(entered, heard or entered)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the `buffer` of rank `root` (C-contiguous, same size and type on all ranks) into everyone's."""
        entered = self.stats.enter()
        self._check_open()
        flat = self._flat(buffer, writable=root != self._rank)
        if root == self._rank:
            heard = self._move(Op.BROADCAST, flat, list(self._links.values()), {}, "a broadcast")
        else:
            heard = self._move(Op.BROADCAST, flat, [], {self._link(root).rank: flat}, "a broadcast")
        self.stats.leave(entered, heard or entered)

    def send(self, data: bytes | bytearray | memoryview, to: int) -> None:
        """Send a message of up to `MAX_MESSAGE` bytes to one rank, which must `recv` it before the next collective.

        Never waits for the receiver: what the system does not take at once is kept and leaves during later calls.
        """
        self.stats.enter()
        link = self._link(to)
        payload = memoryview(data).cast("B")
        if len(payload) > MAX_MESSAGE:
            raise UsageError(f"a message of {len(payload)} bytes; at most {MAX_MESSAGE} can be sent")
        frame = Header(Op.MESSAGE, sequence=link.messages_out, length=len(payload)).pack() + payload
        link.messages_out += 1
        try:
            link.push(memoryview(frame))
        except BaseException as error:
            self._give_up(error)
        self.stats.restart()

    def recv(self, source: int, deadline_s: float | None) -> bytes:
        """Receive the next message of one rank; `deadline_s` is how long it may be silent, None for ever."""
        self.stats.enter()
        return self._recv(source, deadline_s)

    def wait_message(self, source: int, seconds: float) -> bool:
        """Wait up to so long until rank `source` has sent something; `recv` then gets it. Counts nowhere in `stats`.

        Raises:
            PeerLost: any peer is gone.
        """
        link = self._link(source)
        try:
            return self._exchange.wait(link, seconds)
        except BaseException as error:
            self._give_up(error)
        finally:
            self.stats.restart()

    def check(self) -> None:
        """Look whether all peers are still there, while nothing is expected of them.

        Raises:
            PeerLost: one is gone.
        """
        self._check_open()
        try:
            for link in self._links.values():
                link.has_words()
        except BaseException as error:
            self._give_up(error)

    def broadcast_message(
        self, data: bytes | bytearray | memoryview | None, root: int, deadline_s: float | None
    ) -> bytes:
        """Hand the message of rank `root` to all ranks: it gives `data`, the others None, and all get it.

        The time before and in this call counts nowhere in `stats`: a step begins here, and ranks idle until then.
        """
        self.stats.restart()
        if root != self._rank:
            return self._recv(root, deadline_s)
        if data is None:
            raise UsageError("broadcast_message: the root must give the message")
        for rank in self._links:
            self.send(data, rank)
        self.stats.restart()
        return bytes(data)

    def close(self) -> None:
        """Leave the session and close all sockets; peers that expect more of this rank raise `PeerLost`."""
        if self._broken is None:
            self._broken = UsageError("this communicator is closed")
            part_in_peace(list(self._links.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._broken is None:
            self._break(error)
        self.close()

    # -- how a call is run ------------------------------------------------------------------------------------------

    def _run(self, plan: Sequence[Step], flat: Array, dtype: int) -> int:
        """Run a plan on the values in `flat`; returns when the last peer of the first step was heard."""
        sequence = self._next_sequence()
        heard = 0
        for step in plan:
            number = step.number
            sends: list[tuple[Link, memoryview]] = []
            for outgoing in step.outgoing:
                header = pack_header(Op.ALL_REDUCE, dtype, number, sequence, outgoing.length)
                sends += outgoing.sends(header, flat[outgoing.part])
            receives = []
            for length, incoming in step.terms:
                incoming.expect(pack_header(Op.ALL_REDUCE, dtype, number, sequence, length))
                receives.append(incoming)
            for link, part in step.totals:
                receives.append(self._in_place(link, Op.ALL_REDUCE, dtype, number, sequence, flat[part]))
            first = self._exchange.run(sends, receives, self.deadline_s, "an all_reduce")
            heard = heard or first
            for total in step.sums:
                total.terms[total.own] = flat[total.part]
                sum_in_order(total.terms, total.own)
        return heard

    def _plan(self, elements: int, dtype: np.dtype[Any], algorithm: Algorithm | None) -> list[Step]:
        """Make and keep this rank's steps for an all-reduce."""
        size_bytes = elements * dtype.itemsize
        chosen = algorithm or choose(size_bytes, self._size, self.latency, self.bandwidth)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        plan = self._compiler.compile(build(chosen, elements, self._size, dtype.itemsize), dtype)
        self._plans[elements, dtype, algorithm] = plan
        return plan

    def _move(self, op: Op, payload: Array, to: Sequence[Link], into: Mapping[int, Array], what: str) -> int:
        """One exchange without sums: `payload` to some links, from others into arrays."""
        try:
            sequence = self._next_sequence()
            sends: list[tuple[Link, memoryview]] = []
            if to:
                header = pack_header(op, DTYPE_CODES[payload.dtype], 0, sequence, payload.nbytes)
                sends = Outgoing(slice(0, payload.size), payload.dtype, to).sends(header, payload)
            receives = [
                self._in_place(self._links[rank], op, DTYPE_CODES[array.dtype], 0, sequence, array)
                for rank, array in into.items()
            ]
            return self._exchange.run(sends, receives, self.deadline_s, what)
        except BaseException as error:
            self._give_up(error)

    def _in_place(self, link: Link, op: Op, dtype: int, step: int, sequence: int, target: Array) -> Incoming:
        """Expect a frame whose payload goes straight into `target`."""
        views = [self._headers[link.rank]]
        if target.nbytes:
            views.append(target.view(np.uint8).data)
        incoming = Incoming(link, views)
        incoming.expect(pack_header(op, dtype, step, sequence, target.nbytes))
        return incoming

    def _recv(self, source: int, deadline_s: float | None) -> bytes:
        link = self._link(source)
        try:
            incoming = IncomingMessage(link)
            self._exchange.run((), (incoming,), deadline_s, "waiting for a message")
        except BaseException as error:
            self._give_up(error)
        link.messages_in += 1
        self.stats.restart()
        return incoming.payload

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _link(self, rank: int) -> Link:
        self._check_open()
        link = self._links.get(rank)
        if link is None:
            raise UsageError(f"rank {rank} is no peer of rank {self._rank} in a mesh of {self._size}")
        return link

    def _check_open(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _flat(self, array: Array, *, writable: bool = False) -> Array:
        flags = array.flags
        if not flags.c_contiguous or (writable and not flags.writeable):
            raise UsageError("collectives need C-contiguous arrays, and writable ones where they receive")
        if array.dtype not in DTYPE_CODES:
            raise UsageError(f"arrays of {array.dtype} cannot travel; {', '.join(map(str, DTYPE_CODES))} can")
        return array.reshape(-1)

    def _give_up(self, error: BaseException) -> NoReturn:
        """Break the communicator and raise `error`."""
        if self._broken is None:
            self._break(error)
        raise error

    def _break(self, error: BaseException) -> None:
        """Close the communicator for good and tell the peers whom to blame."""
        if isinstance(error, TransportError):
            self._broken = error
        else:
            self._broken = UsageError(f"the communicator was closed by {error!r}")
        blamed = self._rank if self._broken.rank is None else self._broken.rank
        part_with_blame(list(self._links.values()), blamed, str(self._broken))
