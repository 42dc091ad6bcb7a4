"""Collectives over a mesh of links: what a rank calls.

All ranks make the same calls in the same order. Results are the same bits on every rank: sums are taken in FP32 and in
rank order. How a call is run is planned once per operation, sizes and type, and kept
(`motley.transport.schedules.plan`) with all the memory it needs, so buffers need no registering: a call that repeats
keeps nothing new, and what it allocates meanwhile is a few dozen small objects of Python (views, integers), none of
which grows with the payload. The plans are kept by `motley.transport.schedules.plans`; messages and the end of the mesh
are `motley.transport.endpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .endpoint import Endpoint
from .errors import PeerTimeout, UsageError
from .formats import Bytes, WireFormat
from .links.link import Incoming, Link
from .links.liveness import Pulse
from .links.wire import Op
from .schedules import schedule
from .schedules.forecast import Choice, Network
from .schedules.plan import Element, Plan
from .schedules.plans import Plans
from .schedules.schedule import Algorithm, Goal, Operation, even_parts

Array = npt.NDArray[Any]

_BARRIER = np.empty(0, np.float32)

MOST_STARTED = 2
"""Collectives that may be under way at a time: one of each half of a step."""


class Sums(Protocol):
    """What sums over all ranks: a `Communicator`, or what stands for one where nothing else is asked of it."""

    @property
    def rank(self) -> int:
        """Which of the ranks this one is."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_reduce(self, buffer: Array) -> None:
        """Sum `buffer` (f32, any shape) over all ranks, in place."""
        ...


class Pending:
    """A collective that has been started: what could leave has left, what comes is awaited.

    Attributes:
        plan: None for a rank that is alone.
        plans: the set that this is of.
        receives: the frames that are awaited next.
        after: the one that was started after it.
    """

    __slots__ = ("_communicator", "after", "plan", "plans", "receives")

    def __init__(self, communicator: Communicator, plan: Plan | None, plans: Plans, receives: list[Incoming]) -> None:
        self._communicator = communicator
        self.plan = plan
        self.plans = plans
        self.receives = receives
        self.after: Pending | None = None

    def advance(self) -> None:
        """Read what has come and push what follows from it, where there are several hops, so that nobody waits for it
        until this rank has computed. Never waits itself; the time since the start counts as computing.

        Raises:
            UsageError: one that was started before is not finished, or this one is already.
            TransportError: as the collective itself.
        """
        if self.plan is not None and self.plan.hops:
            self._communicator._advance(self)

    def finish(self) -> None:
        """Wait until the result is there and everything is sent; the time since the start counts as computing.

        Raises:
            UsageError: one that was started before is not finished, or this one is already.
            TransportError: as the collective itself.
        """
        self._communicator._finish(self)

    def follow(self, incoming: Incoming) -> Incoming | None:
        """Go on after a frame has come, see `Plan.follow`. The link then brings what `after` awaits, if it brings
        nothing more for this one."""
        assert self.plan is not None
        following = self.plan.follow(incoming)
        if self.after is not None and self.after.plan is not None:
            self.after.plan.push_held()
            if following is None and (first := self.after.plan.expect_first(incoming.link)) is not None:
                self.after.receives.append(first)
        return following


class Communicator(Endpoint):
    """One rank's end of the mesh, with all collectives. `connect_mesh` makes it. One thread owns it.

    What a call raises, and what becomes of the mesh then, is told at `Endpoint`; a peer that is in another call is a
    `ProtocolError`.

    Arrays are C-contiguous, of float32, float16, bfloat16 (`ml_dtypes`) or float64, and where nothing is summed also
    of uint8, int32 or int64. `algorithm` forces one; otherwise the one with the lowest forecast is taken.

    Attributes:
        wire_format: how float32 values travel in sums.
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
        """
        Args:
            links, pulse, spin_s: see `Endpoint`.
            wire_format: how float32 values travel in sums.
        """
        super().__init__(rank, links, pulse, spin_s)
        self.wire_format = wire_format
        self._sequence = 0
        # Two collectives under way must not share frames and scratch: the second one has plans of its own.
        self._sets = [Plans(rank, self._links, wire_format) for _ in range(MOST_STARTED)]
        self._plans = self._sets[0]

    @property
    def network(self) -> Network:
        """What algorithms are chosen by; set by `connect_mesh`, which measures it."""
        return self._plans.network

    @network.setter
    def network(self, network: Network) -> None:
        for plans in self._sets:
            plans.network = network

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, buffer: Array, algorithm: Algorithm | None = None) -> None:
        """Sum `buffer` over all ranks in place, in rank order; any shape, the same on all ranks."""
        entered = self.stats.enter()
        plan, arrays = self._plan_all_reduce(buffer, algorithm)
        self._run(entered, plan, arrays, arrays)

    def all_reduce_start(self, buffer: Array, algorithm: Algorithm | None = None) -> Pending:
        """Begin to sum `buffer` over all ranks, to compute something else before ``.finish()``.

        Until then `buffer` must be left alone. One more sum may be started meanwhile (`MOST_STARTED`), to be finished
        after this one; no other call is possible. What the system takes of the own terms leaves now, what the peers
        send arrives meanwhile. What several hops need goes on in each of these calls, and in `Pending.advance`.
        """
        entered = self.stats.enter()
        before: Pending | None = self._started[-1] if self._started else None
        if before is None:
            plan, arrays = self._plan_all_reduce(buffer, algorithm)
            receives = [] if plan is None else self._begin(plan, arrays, arrays)
            started = Pending(self, plan, self._plans, receives)
        else:
            started = self._start_beside(before, buffer, algorithm)
        self._started.append(started)
        self.stats.pause(entered)
        return started

    def _start_beside(self, before: Pending, buffer: Array, algorithm: Algorithm | None) -> Pending:
        """Start a sum while another is under way."""
        if self._broken is not None:
            raise self._broken
        if len(self._started) >= MOST_STARTED:
            raise UsageError(
                f"{MOST_STARTED} collectives are under way; one must be finished before the next is started"
            )
        other = next(plans for plans in self._sets if plans is not before.plans)
        plan, arrays = self._plan_all_reduce(buffer, algorithm, other)
        if plan is None:
            return Pending(self, None, other, [])
        assert before.plan is not None
        try:
            self._exchange.advance(before.receives, before.follow)
        except BaseException as error:
            self._give_up(error)
        before.plan.mark()
        started = Pending(self, plan, other, self._begin(plan, arrays, arrays, before.plan))
        before.after = started
        return started

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
        self._plans.check_summable(element, "reduce_scatter")
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
            plan = self._plans.kept.get(key) or self._plans.make(
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
        self._plans.check_summable(self._plans.element(np.dtype(dtype)), "exchange_terms")
        taken = [self._flat(array, writable=True)[0] for array in others]
        given = self._flat(own)[0]
        taken.insert(self._rank, given)
        plan = None
        if self._size > 1:
            key = ("terms", own.nbytes, np.dtype(dtype))
            plan = self._plans.kept.get(key)
            if plan is None:
                element = Element(np.dtype(dtype), storage=np.dtype(np.uint8))
                goal = schedule.all_gather([own.nbytes] * self._size)  # the same frames
                plan = self._plans.make(key, Op.ALL_REDUCE, element, goal, Algorithm.ONE_SHOT)
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
            plan = self._plans.kept.get(key) or self._plans.make(
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
            plan = self._plans.kept.get(key) or self._plans.make(
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
            plan = self._plans.kept.get(key)
            if plan is None:
                lengths = [[0] * self._size for _ in range(self._size)]  # of the others' pairs nothing is known
                for rank in range(self._size):
                    lengths[rank][self._rank] = targets[rank].size
                    lengths[self._rank][rank] = sources[rank].size
                plan = self._plans.make(key, Op.ALL_TO_ALL, element, schedule.all_to_all(lengths), None)
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
            element = self._plans.element(_BARRIER.dtype)
            plan = self._plans.kept.get(key) or self._plans.make(
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

        Raises:
            UsageError: the operation has no such algorithm, or cannot be done with such elements.
        """
        lengths = [len(part) for part in even_parts(elements, self._size)]
        goals: dict[Operation, Callable[[], Goal]] = {
            Operation.ALL_REDUCE: lambda: schedule.all_reduce(elements, self._size),
            Operation.REDUCE_SCATTER: lambda: schedule.reduce_scatter(lengths),
            Operation.ALL_GATHER: lambda: schedule.all_gather(lengths),
            Operation.BROADCAST: lambda: schedule.broadcast(elements, self._size, 0),
            Operation.ALL_TO_ALL: lambda: schedule.all_to_all([lengths] * self._size),
        }
        return self._plans.choose(goals[operation](), self._plans.element(np.dtype(dtype)), algorithm)

    # -- how a call is run ------------------------------------------------------------------------------------------

    def _run(self, entered: int, plan: Plan | None, given: Sequence[Array], taken: Sequence[Array]) -> None:
        """Run a plan; None is the plan of a rank that is alone."""
        self._complete(entered, plan, [] if plan is None else self._begin(plan, given, taken))

    def _begin(
        self, plan: Plan, given: Sequence[Array], taken: Sequence[Array], before: Plan | None = None
    ) -> list[Incoming]:
        self._sequence = sequence = self._sequence + 1
        if self._pulse is not None:
            self._pulse.sequence = sequence
        try:
            return plan.begin(sequence, given, taken, before)
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
        self._end(entered, plan)

    def _end(self, entered: int, plan: Plan) -> None:
        """A collective is over."""
        plan.end()
        exchange = self._exchange
        self.stats.leave(entered, exchange.heard_ns, prompt=exchange.prompt, op=plan.op, sequence=plan.sequence)

    def _check_first(self, pending: Pending) -> None:
        if self._broken is not None:
            raise self._broken
        if pending not in self._started:
            raise UsageError("this collective is finished already")
        if self._started[0] is not pending:
            raise UsageError("a collective that was started before this one must be finished first")

    def _advance(self, pending: Pending) -> None:
        entered = self.stats.enter()
        self._check_first(pending)
        try:
            self._exchange.advance(pending.receives, pending.follow)
        except BaseException as error:
            self._give_up(error)
        self.stats.pause(entered)

    def _finish(self, pending: Pending) -> None:
        entered = self.stats.enter()
        self._check_first(pending)
        self._started.popleft()
        plan, after = pending.plan, pending.after
        if plan is None or after is None or after.plan is None:
            self._complete(entered, plan, pending.receives)
            return
        try:
            self._exchange.run(
                pending.receives,
                pending.follow,
                plan.senders,
                self.deadline_s,
                plan.what,
                after.receives,
                after.follow,
                plan.marks,
            )
            after.plan.push_held(alone=True)
        except PeerTimeout as error:
            self._give_up(self._hindmost(error))
        except BaseException as error:
            self._give_up(error)
        self._end(entered, plan)

    def _plan_all_reduce(
        self, buffer: Array, algorithm: Algorithm | None, plans: Plans | None = None
    ) -> tuple[Plan | None, tuple[Array]]:
        """The plan for a sum, and the buffer as it takes it.

        Args:
            plans: the second set, for a sum that is started beside another one; None: nothing may be under way.
        """
        if plans is None:
            self._check_open()
            plans = self._plans
        flat, element = self._flat(buffer, writable=True)
        if self._size == 1:
            plans.check_summable(element, "all_reduce")
            return None, (flat,)
        key = (Op.ALL_REDUCE, flat.size, element.name, algorithm)
        plan = plans.kept.get(key)
        if plan is None:
            plan = plans.make(key, Op.ALL_REDUCE, element, schedule.all_reduce(flat.size, self._size), algorithm)
        return plan, (flat,)

    def _flat(self, array: Array, *, writable: bool = False) -> tuple[Array, Element]:
        """An array as a row of what its elements are stored as, and their type; it may be one to write to."""
        flags = array.flags
        if not flags.c_contiguous or (writable and not flags.writeable):
            raise UsageError("collectives need C-contiguous arrays, and writable ones where they receive")
        element = self._plans.element(array.dtype)
        flat = array.reshape(-1)
        return (flat if element.storage is array.dtype else flat.view(element.storage)), element


def _address(array: Array) -> int:
    """Where an array lies in memory; unlike `array.ctypes.data` this is cheap."""
    address: int = array.__array_interface__["data"][0]
    return address
