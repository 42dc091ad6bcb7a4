"""Collectives over a mesh of links: what a rank calls.

All ranks make the same calls in the same order. Results are the same bits on every rank: sums are taken in FP32 and in
rank order. How a call is run is planned once per operation, sizes and type, and kept (`motley.transport.plan`) with all
the memory it needs, so buffers need no registering: a call that repeats keeps nothing new, and what it allocates
meanwhile is a few dozen small objects of Python (views, integers), none of which grows with the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from . import schedule
from .errors import PeerLost, PeerTimeout, TransportError, UsageError
from .exchange import Exchange
from .formats import Bytes, Codecs, WireFormat
from .link import LAST_WORDS_S, Incoming, IncomingMessage, Link, part_in_peace, part_with_blame
from .liveness import BEAT_S, Pulse
from .plan import Compiler, Element, Layout, Plan
from .schedule import Algorithm, Choice, Goal, Operation, choose, even_parts
from .stats import Record as Record
from .stats import Stats as Stats
from .stats import StatsSnapshot as StatsSnapshot
from .wire import DTYPE_CODES, MAX_MESSAGE, Header, Op, pack_abort

Array = npt.NDArray[Any]

MAX_PLANS = 64
"""Calls whose plans are kept; a decoder meets one or two sizes, prefill as many as there are chunk lengths..."""
MAX_PLAN_BYTES = 64 << 20
"""...and the memory of their frames. Those used longest ago go first; the latest stays in any case."""

_BARRIER = np.empty(0, np.float32)


class Pending:
    """A collective that has been started: what could leave has left, what comes is awaited."""

    __slots__ = ("_communicator", "_plan", "_receives")

    def __init__(self, communicator: Communicator, plan: Plan | None, receives: list[Incoming]) -> None:
        self._communicator = communicator
        self._plan = plan
        self._receives = receives

    def finish(self) -> None:
        """Wait until the result is there and everything is sent; the time since the start counts as computing.

        Raises:
            TransportError: as the collective itself.
        """
        self._communicator._finish(self, self._plan, self._receives)


class Communicator:
    """One rank's end of the mesh. Not thread-safe: one thread owns it.

    Every collective raises `PeerLost` when a peer goes, `PeerTimeout` when one is silent for `deadline_s`,
    `ProtocolError` when one is in another call, and `UsageError` when called wrongly. After any but a `UsageError`
    the communicator is broken and closed, its peers have been told whom to blame, and calls raise the same error.

    Arrays are C-contiguous, of float32, float16, bfloat16 (`ml_dtypes`) or float64, and where nothing is summed also
    of uint8, int32 or int64. `algorithm` forces one; otherwise the one with the lowest forecast is taken.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, Link],
        pulse: Pulse | None = None,
        *,
        wire_format: WireFormat = WireFormat.FP32,
        spin_s: float | None = None,
    ) -> None:
        """`links`: a link to every other rank. Use `connect_mesh` to get them.

        `pulse` finds dead peers. `wire_format` is about sums. `spin_s` fixes how long a wait spins before it sleeps.
        """
        size = len(links) + 1
        self.deadline_s = 600.0
        """Seconds a peer may be silent in a collective: one that lives, but never comes."""
        self.stats = Stats(rank, size)
        self.network = schedule.Network([[0.0] * size for _ in range(size)], [[1e9] * size for _ in range(size)])
        """What algorithms are chosen by; set by `connect_mesh`, which measures it."""
        self.wire_format = wire_format
        self._rank = rank
        self._size = size
        self._links = dict(sorted(links.items()))
        self._pulse = pulse
        self._exchange = Exchange(list(self._links.values()), pulse, spin_s, outnumbered=True)
        self._sequence = 0
        self._codecs = Codecs(wire_format)
        self._compiler = Compiler(rank, self._links, self._codecs)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._elements: dict[np.dtype[Any], Element] = {}
        self._pending: Pending | None = None
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

    def share_cores(self, *, outnumbered: bool) -> None:
        """Say whether there are more ranks than cores here, which decides how calls wait; assumed until told."""
        self._exchange.share_cores(outnumbered=outnumbered)

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, buffer: Array, algorithm: Algorithm | None = None) -> None:
        """Sum `buffer` over all ranks in place, in rank order; any shape, the same on all ranks."""
        entered = self.stats.enter()
        plan, arrays = self._plan_all_reduce(buffer, algorithm)
        self._run(entered, plan, arrays, arrays)

    def all_reduce_start(self, buffer: Array, algorithm: Algorithm | None = None) -> Pending:
        """Begin to sum `buffer` over all ranks, to compute something else before ``.finish()``.

        Until then `buffer` must be left alone, and no other call is possible. What the system takes of the own terms
        leaves now, what the peers send arrives meanwhile.
        """
        entered = self.stats.enter()
        plan, arrays = self._plan_all_reduce(buffer, algorithm)
        receives = [] if plan is None else self._begin(plan, arrays, arrays)
        self._pending = Pending(self, plan, receives)
        self.stats.pause(entered)
        return self._pending

    def reduce_scatter(self, data: Array, out: Array, lengths: Sequence[int] | None = None) -> None:
        """Sum `data` over all ranks, in rank order, and give each rank one part of the sum.

        Args:
            data: any shape, the same on all ranks; keeps its values, except where it is `out`.
            out: takes this rank's part: ``lengths[rank]`` elements; may be that part of `data` itself.
            lengths: the elements of each rank's part, the same on all ranks; even parts by default.
        """
        entered = self.stats.enter()
        self._check_open()
        given, element = self._flat(data)
        taken, _ = self._flat(out, writable=True)
        self._check_summable(element, "reduce_scatter")
        if lengths is None:
            lengths = [len(part) for part in even_parts(given.size, self._size)]
        if len(lengths) != self._size or min(lengths) < 0 or sum(lengths) != given.size:
            cut = f"cut {given.size} elements in {self._size}"
            raise UsageError(f"reduce_scatter: the lengths {list(lengths)} do not {cut}")
        own = given[sum(lengths[: self._rank]) :][: lengths[self._rank]]
        if (taken.size, taken.dtype) != (own.size, own.dtype):
            wanted = f"this rank's part is {own.size} x {data.dtype}"
            raise UsageError(f"reduce_scatter: out takes {taken.size} x {out.dtype}, {wanted}")
        if np.may_share_memory(given, taken) and _address(own) != _address(taken):
            raise UsageError("reduce_scatter: out may be this rank's part of data, but must not overlap with another")
        plan = None
        if self._size > 1:
            key = (Op.REDUCE_SCATTER, *lengths, element.name)
            plan = self._plans.get(key) or self._plan(
                key, Op.REDUCE_SCATTER, element, schedule.reduce_scatter(lengths), None
            )
        else:
            taken[:] = own
        self._run(entered, plan, (given,), (taken,))

    def exchange_terms(self, own: Bytes, others: Sequence[Bytes], dtype: npt.DTypeLike) -> None:
        """A one-shot `all_reduce` without its sum, for a rank that sums elsewhere: on a GPU.

        To the other ranks it is that call: they may sum here, or be in `exchange_terms` too.

        Args:
            own: this rank's term as it travels (`motley.transport.formats`), the same size on all ranks.
            others: take the terms of the other ranks, in rank order.
            dtype: of the elements that are summed.
        """
        entered = self.stats.enter()
        self._check_open()
        if len(others) != self._size - 1 or any(other.nbytes != own.nbytes for other in others):
            room = [other.nbytes for other in others]
            raise UsageError(
                f"exchange_terms: {self._size - 1} x {own.nbytes} bytes will come, there is room for {room}"
            )
        self._check_summable(self._element(np.dtype(dtype)), "exchange_terms")
        taken = [self._flat(array, writable=True)[0] for array in others]
        given = self._flat(own)[0]
        taken.insert(self._rank, given)
        plan = None
        if self._size > 1:
            key = ("terms", own.nbytes, np.dtype(dtype))
            plan = self._plans.get(key)
            if plan is None:
                element = Element(np.dtype(dtype), storage=np.dtype(np.uint8))
                goal = schedule.all_gather([own.nbytes] * self._size)  # the same frames
                plan = self._plan(key, Op.ALL_REDUCE, element, goal, Algorithm.ONE_SHOT)
        self._run(entered, plan, (given,), taken)

    def all_gather(self, local: Array, out: Sequence[Array], algorithm: Algorithm | None = None) -> None:
        """Collect every rank's array on every rank.

        Args:
            local: what this rank contributes; may be ``out[rank]`` itself.
            out: an array per rank, of unequal sizes if need be, of one type, the same on all ranks.
        """
        entered = self.stats.enter()
        self._check_open()
        mine, element = self._flat(local)
        taken = [self._flat(array, writable=True)[0] for array in out]
        if len(taken) != self._size:
            raise UsageError(f"all_gather wants {self._size} output arrays, got {len(taken)}")
        if any(array.dtype != local.dtype for array in out) or taken[self._rank].size != mine.size:
            raise UsageError(
                f"all_gather: this rank gives {mine.size} x {local.dtype}, "
                f"out[{self._rank}] takes {taken[self._rank].size} x {out[self._rank].dtype}, all must be of one type"
            )
        own = taken[self._rank]
        own[:] = mine
        plan = None
        if self._size > 1:
            key = (Op.ALL_GATHER, *[array.size for array in taken], element.name, algorithm)
            plan = self._plans.get(key) or self._plan(
                key, Op.ALL_GATHER, element, schedule.all_gather([array.size for array in taken]), algorithm
            )
        self._run(entered, plan, (own,), taken)

    def broadcast(self, buffer: Array, root: int, algorithm: Algorithm | None = None) -> None:
        """Copy the `buffer` of rank `root` (same size and type on all ranks) into everyone's."""
        entered = self.stats.enter()
        self._check_open()
        flat, element = self._flat(buffer, writable=root != self._rank)
        if root != self._rank:
            self._link(root)
        plan = None
        if self._size > 1:
            key = (Op.BROADCAST, flat.size, root, element.name, algorithm)
            plan = self._plans.get(key) or self._plan(
                key, Op.BROADCAST, element, schedule.broadcast(flat.size, self._size, root), algorithm
            )
        self._run(entered, plan, (flat,), (flat,))

    def all_to_all(self, data: Sequence[Array], out: Sequence[Array]) -> None:
        """Send ``data[r]`` to each rank r and receive its array for this rank in ``out[r]``.

        Args:
            data: an array per rank, of unequal sizes if need be, of one type.
            out: likewise; may overlap with `data` in any way, as everything is copied before it leaves.
        """
        entered = self.stats.enter()
        self._check_open()
        given = [self._flat(array) for array in data]
        taken = [self._flat(array, writable=True) for array in out]
        if len(given) != self._size or len(taken) != self._size:
            raise UsageError(f"all_to_all wants {self._size} arrays each way, got {len(given)} and {len(taken)}")
        element = given[0][1]
        if any(other is not element for _, other in (*given, *taken)):
            raise UsageError("all_to_all: all arrays must be of one type")
        sources, targets = [array for array, _ in given], [array for array, _ in taken]
        own, into = sources[self._rank], targets[self._rank]
        if own.size != into.size:
            raise UsageError(
                f"all_to_all: this rank has {own.size} elements for itself, out[{self._rank}] takes {into.size}"
            )
        plan, receives = None, []
        if self._size > 1:
            key = (Op.ALL_TO_ALL, *[array.size for array in (*sources, *targets)], element.name)
            plan = self._plans.get(key)
            if plan is None:
                lengths = [[0] * self._size for _ in range(self._size)]  # of the others' pairs nothing is known
                for rank in range(self._size):
                    lengths[rank][self._rank] = targets[rank].size
                    lengths[self._rank][rank] = sources[rank].size
                plan = self._plan(key, Op.ALL_TO_ALL, element, schedule.all_to_all(lengths), None)
            receives = self._begin(plan, sources, targets)
        into[:] = own
        self._complete(entered, plan, receives)

    def barrier(self) -> None:
        """Wait until all ranks are here. For set-up: collectives need no barrier between them."""
        entered = self.stats.enter()
        self._check_open()
        plan = None
        if self._size > 1:
            key = (Op.BARRIER,)
            element = self._element(_BARRIER.dtype)
            plan = self._plans.get(key) or self._plan(
                key, Op.BARRIER, element, schedule.all_reduce(0, self._size), Algorithm.ONE_SHOT
            )
        self._run(entered, plan, (_BARRIER,), (_BARRIER,))

    def forecast(
        self,
        operation: Operation,
        elements: int,
        dtype: npt.DTypeLike = np.float32,
        algorithm: Algorithm | None = None,
    ) -> Choice:
        """The schedule that a call would take, and how many seconds it is expected to last.

        Args:
            elements: of the whole row: the buffer, all parts of a gather, everything that one rank sends to all.
                Parts are even, the root is rank 0.
        """
        lengths = [len(part) for part in even_parts(elements, self._size)]
        goals: dict[Operation, Callable[[], Goal]] = {
            Operation.ALL_REDUCE: lambda: schedule.all_reduce(elements, self._size),
            Operation.REDUCE_SCATTER: lambda: schedule.reduce_scatter(lengths),
            Operation.ALL_GATHER: lambda: schedule.all_gather(lengths),
            Operation.BROADCAST: lambda: schedule.broadcast(elements, self._size, 0),
            Operation.ALL_TO_ALL: lambda: schedule.all_to_all([lengths] * self._size),
        }
        return self._choose(goals[operation](), self._element(np.dtype(dtype)), algorithm)

    # -- messages ---------------------------------------------------------------------------------------------------

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

    def flush(self) -> None:
        """Wait until the messages that were sent have left: they need not wait then for this rank's next call."""
        self.stats.enter()
        self._check_open()
        links = list(self._links.values())
        if any(link.unsent for link in links):
            try:
                self._exchange.run([], None, links, self.deadline_s, "sending a message")
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

    # -- life -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Look whether all peers are still there, while nothing is expected of them.

        Raises:
            PeerLost: one is gone.
        """
        self._check_open()
        try:
            for link in self._links.values():
                link.has_words()
            if self._pulse is not None:
                self._pulse.raise_if_lost()
        except BaseException as error:
            self._give_up(error)

    def close(self) -> None:
        """Leave the session and close all sockets; peers that expect more of this rank raise `PeerLost`."""
        if self._broken is None:
            self._broken = UsageError("this communicator is closed")
            try:
                part_in_peace(list(self._links.values()))
            finally:
                if self._pulse is not None:
                    self._pulse.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._broken is None:
            self._break(error)
        self.close()

    # -- how a call is run ------------------------------------------------------------------------------------------

    def _run(self, entered: int, plan: Plan | None, given: Sequence[Array], taken: Sequence[Array]) -> None:
        """Run a plan; None is the plan of a rank that is alone."""
        self._complete(entered, plan, [] if plan is None else self._begin(plan, given, taken))

    def _begin(self, plan: Plan, given: Sequence[Array], taken: Sequence[Array]) -> list[Incoming]:
        self._sequence = sequence = self._sequence + 1
        if self._pulse is not None:
            self._pulse.sequence = sequence
        try:
            return plan.begin(sequence, given, taken)
        except BaseException as error:
            self._give_up(error)

    def _complete(self, entered: int, plan: Plan | None, receives: list[Incoming]) -> None:
        if plan is None:
            self.stats.leave(entered)
            return
        exchange = self._exchange
        try:
            exchange.run(receives, plan.follow, plan.senders, self.deadline_s, plan.what)
        except PeerTimeout as error:
            self._give_up(self._hindmost(error))
        except BaseException as error:
            self._give_up(error)
        plan.end()
        self.stats.leave(entered, exchange.heard_ns, prompt=exchange.prompt, op=plan.op, sequence=plan.sequence)

    def _finish(self, pending: Pending, plan: Plan | None, receives: list[Incoming]) -> None:
        entered = self.stats.enter()
        if self._broken is not None:
            raise self._broken
        if self._pending is not pending:
            raise UsageError("this collective is finished already")
        self._pending = None
        self._complete(entered, plan, receives)

    def _plan_all_reduce(self, buffer: Array, algorithm: Algorithm | None) -> tuple[Plan | None, tuple[Array]]:
        self._check_open()
        flat, element = self._flat(buffer, writable=True)
        self._check_summable(element, "all_reduce")
        if self._size == 1:
            return None, (flat,)
        key = (Op.ALL_REDUCE, flat.size, element.name, algorithm)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, Op.ALL_REDUCE, element, schedule.all_reduce(flat.size, self._size), algorithm)
        return plan, (flat,)

    def _plan(self, key: tuple[Any, ...], op: Op, element: Element, goal: Goal, algorithm: Algorithm | None) -> Plan:
        """Make and keep this rank's plan for a goal."""
        plan = self._compiler.compile(op, element, self._choose(goal, element, algorithm), self._layout(goal))
        room = MAX_PLAN_BYTES - plan.nbytes
        while self._plans and (
            len(self._plans) >= MAX_PLANS or sum(kept.nbytes for kept in self._plans.values()) > room
        ):
            del self._plans[min(self._plans, key=lambda each: self._plans[each].sequence)]
        self._plans[key] = plan
        return plan

    def _choose(self, goal: Goal, element: Element, algorithm: Algorithm | None) -> Choice:
        itemsize = element.storage.itemsize
        wire_itemsize: float = itemsize
        if goal.operation in schedule.SUMMED:
            self._check_summable(element, goal.operation)
            wire_itemsize = self._codecs.of(element.name)[1].size(1 << 16) / (1 << 16)
        if algorithm is not None and algorithm not in schedule.ALGORITHMS[goal.operation]:
            raise UsageError(f"{goal.operation} has no {algorithm} algorithm")
        return choose(
            goal,
            itemsize,
            self.network,
            wire_itemsize=wire_itemsize,
            algorithm=algorithm,
        )

    def _layout(self, goal: Goal) -> Layout:
        """Where the elements of a goal lie in this rank's arrays."""
        parts = [piece.part for piece in goal.pieces]
        everything = [range(goal.elements)]
        match goal.operation:
            case Operation.REDUCE_SCATTER:
                return Layout(everything, [parts[self._rank]])
            case Operation.ALL_GATHER:
                return Layout([parts[self._rank]], parts)
            case Operation.ALL_TO_ALL:
                row = self._rank * self._size
                return Layout(parts[row : row + self._size], parts[self._rank :: self._size])
            case _:
                return Layout(everything, everything)

    def _recv(self, source: int, deadline_s: float | None) -> bytes:
        link = self._link(source)
        try:
            incoming = IncomingMessage(link)
            self._exchange.run([incoming], None, (), deadline_s, "waiting for a message")
        except BaseException as error:
            self._give_up(error)
        link.messages_in += 1
        self.stats.restart()
        return bytes(incoming.payload)

    # -- what a call is checked for ---------------------------------------------------------------------------------

    def _link(self, rank: int) -> Link:
        self._check_open()
        link = self._links.get(rank)
        if link is None:
            raise UsageError(f"rank {rank} is no peer of rank {self._rank} in a mesh of {self._size}")
        return link

    def _check_open(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._pending is not None:
            raise UsageError("a collective that was started must be finished before the next call")

    def _check_summable(self, element: Element, what: str) -> None:
        if element.name not in self._codecs:
            raise UsageError(f"{what} sums float32, float16, bfloat16 and float64, not {element.name}")

    def _element(self, dtype: np.dtype[Any]) -> Element:
        element = self._elements.get(dtype)
        if element is None:
            try:
                element = self._elements[dtype] = Element(dtype)
            except KeyError:
                raise UsageError(f"arrays of {dtype} cannot travel; {', '.join(DTYPE_CODES)} can") from None
        return element

    def _flat(self, array: Array, *, writable: bool = False) -> tuple[Array, Element]:
        """The array as a row of what its elements are stored as."""
        flags = array.flags
        if not flags.c_contiguous or (writable and not flags.writeable):
            raise UsageError("collectives need C-contiguous arrays, and writable ones where they receive")
        element = self._element(array.dtype)
        flat = array.reshape(-1)
        return (flat if element.storage is array.dtype else flat.view(element.storage)), element

    # -- how it ends ------------------------------------------------------------------------------------------------

    def _give_up(self, error: BaseException) -> NoReturn:
        """Break the communicator and raise `error`."""
        if self._broken is None:
            error = self._truth(error)
            self._break(error)
        raise error

    def _truth(self, error: BaseException) -> BaseException:
        """Name the rank that is to blame: a connection that ended may be that of a survivor, who gave up."""
        if self._pulse is not None and isinstance(error, PeerLost):
            loss = self._pulse.first_loss(LAST_WORDS_S)
            if loss is not None and loss[0] != error.rank:
                return PeerLost(*loss)
        return error

    def _hindmost(self, error: PeerTimeout) -> PeerTimeout:
        """Name the rank that has not come to a collective: the one waited for may wait for it itself, as in a ring.

        Beats older than the wait would tell of the calls before: a deadline must leave time for new ones.
        """
        if self._pulse is None or error.seconds < 2 * BEAT_S:
            return error
        last = self._pulse.last(error.rank)
        if last == error.rank:
            return error
        return PeerTimeout(last, error.seconds, f"it is behind in its calls; {error.what} of rank {error.rank}")

    def _break(self, error: BaseException) -> None:
        """Close the communicator for good and tell the peers whom to blame."""
        of_python = type(error).__module__ == "builtins"  # whose words say little without the name
        why = repr(error) if of_python else str(error) or repr(error)
        if isinstance(error, TransportError):
            self._broken = error
        else:
            self._broken = UsageError(f"the communicator was closed: {why}")
        blamed = self._broken.rank
        if blamed is None or (self._pulse is not None and self._pulse.accused):  # or peers would be told two names
            blamed = self._rank
        try:
            if self._pulse is not None:  # first: its connections are never full
                self._pulse.close(pack_abort(blamed, why))
        finally:
            part_with_blame(list(self._links.values()), blamed, why)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
