"""Rank 0's part in a session's adapters: it has them found, brought to every rank, and loaded into slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from motley.daemon.pipe.daemon import Tell
from motley.daemon.rank.adapters.messages import FindAdapter, FoundAdapter, LoadAdapter
from motley.daemon.rank.adapters.spreading import Spread, Spreading, Wanted, found_adapters
from motley.daemon.rank.adapters.table import AdapterTable
from motley.daemon.rank.all_ranks import trouble_of
from motley.daemon.rank.steps import Message
from motley.protocol import mesh_pb2 as pb


@dataclass
class _Loading:
    """An adapter that is to be loaded into the slot that it was given.

    Attributes:
        pinning: who has ordered that, and what was found for them; None: a request waits for it.
        asked: whether ranks were told to have it in memory.
    """

    slot: int
    adapter: str
    pinning: tuple[pb.AdapterOrder, FoundAdapter] | None = None
    began: float = field(default_factory=time.perf_counter)
    asked: bool = False


class LeadingAdapters:
    """What is to be done about the adapters of a session.

    Attributes:
        table: which of them is in which slot.
    """

    def __init__(self, table: AdapterTable, told: Callable[[Message], list[bytes]], tell: Tell) -> None:
        """
        Args:
            told: has every rank execute a message, and gives what each of them tells, by rank.
            tell: tells the daemon what has become of orders.
        """
        self.table = table
        self._told = told
        self._tell = tell
        self._spreading = Spreading(told)
        self._loading: deque[_Loading] = deque()
        self._orders: dict[str, pb.AdapterOrder] = {}
        """Those under way, by their ids."""

    @property
    def busy(self) -> bool:
        """Whether there is something to `advance`."""
        return self._spreading.busy or bool(self._loading)

    def order(self, order: pb.AdapterOrder) -> None:
        """Do what somebody wants of an adapter; what becomes of it is told."""
        if order.unpin:
            self.table.unpin(order.adapter.fingerprint)
            for other in self._orders.values():  # one that came before, and is not carried out yet
                if other.adapter.fingerprint == order.adapter.fingerprint:
                    other.pin = False
            self._tell(adapter=pb.AdapterEvent(id=order.id, fingerprint=order.adapter.fingerprint))
            return
        self._orders[order.id] = order
        self._spreading.want(Wanted(order.adapter.fingerprint, order.adapter.source, order.id))

    def want(self, adapter: pb.Adapter) -> None:
        """A request is to be computed with an adapter: have it brought to all ranks, unless they have it."""
        if not self.table.knows(adapter.fingerprint):
            self._spreading.want(Wanted(adapter.fingerprint, adapter.source))

    def advance(self) -> Mapping[str, str]:
        """Do the next piece of work; why adapters cannot be had for which requests wait, by fingerprint.

        Raises:
            StepError: a rank tells something else than it was asked for.
            TransportError, EngineError: a rank is lost.
        """
        failed = self._load_next() if self._loading else {}
        spread = self._spreading.advance() if self._spreading.busy else None
        if spread is None:
            return failed
        if not spread.trouble:
            self.table.found(spread.found.fingerprint)
        order = self._orders.pop(spread.wanted.order, None)
        if order is not None:
            return {**failed, **self._carry_out(order, spread)}
        return {**failed, spread.wanted.fingerprint: spread.trouble} if spread.trouble else failed

    def load(self, loads: Sequence[tuple[int, str]]) -> Mapping[str, str]:
        """Load adapters into the slots that they were given: at once, if all ranks have them in memory, else they are
        read beside the steps; why some could not be, by fingerprint. Errors as `advance`."""
        failed: dict[str, str] = {}
        for slot, adapter in loads:
            self._loading.append(_Loading(slot, adapter))
            if len(self._loading) == 1:
                failed |= self._load_next()
        return failed

    def _load_next(self) -> Mapping[str, str]:
        """Load the first adapter that waits for it, if all ranks have it in memory by now; otherwise as `load`."""
        loading = self._loading[0]
        adapter = loading.adapter
        told = found_adapters(self._told(FindAdapter(adapter, "", loading.asked)))
        loading.asked = True
        if any(each.pending for each in told):
            return {}
        self._loading.popleft()
        missing = (f"rank {rank}: {each.trouble}" for rank, each in enumerate(told) if not each.fingerprint)
        trouble = "; ".join(missing) or trouble_of(self._told(LoadAdapter(adapter, loading.slot)))
        if trouble:
            self.table.failed(adapter)
        else:
            self.table.ready(adapter)
        if loading.pinning:
            if trouble:
                self.table.unpin(adapter)
            self._tell_of(*loading.pinning, trouble, time.perf_counter() - loading.began)
        return {adapter: trouble} if trouble else {}

    def _carry_out(self, order: pb.AdapterOrder, spread: Spread) -> Mapping[str, str]:
        """An adapter that was ordered has come, or will not; what could not be loaded for it, as `load`."""
        adapter = spread.found.fingerprint
        if spread.trouble or not order.pin:
            self._tell_of(order, spread.found, spread.trouble)
        elif not self.table.pin(adapter):
            pinned, count = len(self.table.pinned), self.table.count
            why = f"{pinned} of {count} slots have pinned adapters, and one must be left for others: unpin one of them,"
            self._tell_of(order, spread.found, f"{why} or start the session with more slots")
        elif (slot := self.table.place(adapter)) is None:  # it is loaded, or will be when somebody asks for it
            self._tell_of(order, spread.found)
        else:
            self._loading.append(_Loading(slot, adapter, (order, spread.found)))
            return self._load_next() if len(self._loading) == 1 else {}
        return {}

    def _tell_of(self, order: pb.AdapterOrder, found: FoundAdapter, trouble: str = "", load_s: float = 0.0) -> None:
        """Tell the daemon what has become of an order."""
        event = pb.AdapterEvent(
            id=order.id, fingerprint=found.fingerprint, rank=found.rank, bytes=found.weights, load_s=load_s
        )
        if trouble:
            event.failure.CopyFrom(pb.Failure(code="invalid_adapter", message=trouble))
        self._tell(adapter=event)
