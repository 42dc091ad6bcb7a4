"""Rank 0's part in a session's adapters: it has them found, brought to every rank, and loaded into slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from motley.daemon.pipe.daemon import Tell
from motley.daemon.rank.adapters.messages import LoadAdapter
from motley.daemon.rank.adapters.spreading import Spread, Spreading, Wanted
from motley.daemon.rank.adapters.table import AdapterTable
from motley.daemon.rank.all_ranks import trouble_of
from motley.daemon.rank.steps import Message
from motley.protocol import mesh_pb2 as pb


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
        self._orders: dict[str, pb.AdapterOrder] = {}
        """Those under way, by their ids."""

    @property
    def busy(self) -> bool:
        """Whether there is something to `advance`."""
        return self._spreading.busy

    def order(self, order: pb.AdapterOrder) -> None:
        """Do what somebody wants of an adapter; what becomes of it is told."""
        if order.unpin:
            self.table.unpin(order.adapter.fingerprint)
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
        spread = self._spreading.advance()
        if spread is None:
            return {}
        if not spread.trouble:
            self.table.found(spread.found.fingerprint)
        order = self._orders.pop(spread.wanted.order, None)
        if order is None:
            return {spread.wanted.fingerprint: spread.trouble} if spread.trouble else {}
        return self._tell_of(order, spread)

    def load(self, loads: Sequence[tuple[int, str]]) -> Mapping[str, str]:
        """Load adapters into the slots that they were given; why some could not be, by fingerprint. Errors as
        `advance`."""
        failed = {}
        for slot, adapter in loads:
            if trouble := trouble_of(self._told(LoadAdapter(adapter, slot))):
                self.table.failed(adapter)
                failed[adapter] = trouble
            else:
                self.table.ready(adapter)
        return failed

    def _tell_of(self, order: pb.AdapterOrder, spread: Spread) -> Mapping[str, str]:
        """An adapter that was ordered has come, or will not; what could not be loaded for it, as `load`."""
        found, trouble, load_s = spread.found, spread.trouble, 0.0
        failed: Mapping[str, str] = {}
        if order.pin and not trouble:
            trouble, failed, load_s = self._pin(found.fingerprint)
        event = pb.AdapterEvent(
            id=order.id, fingerprint=found.fingerprint, rank=found.rank, bytes=found.weights, load_s=load_s
        )
        if trouble:
            event.failure.CopyFrom(pb.Failure(code="invalid_adapter", message=trouble))
        self._tell(adapter=event)
        return failed

    def _pin(self, adapter: str) -> tuple[str, Mapping[str, str], float]:
        """Keep an adapter loaded; why it cannot be, what could not be loaded, and the seconds that loading took."""
        if not self.table.pin(adapter):
            pinned, count = len(self.table.pinned), self.table.count
            why = f"{pinned} of {count} slots have pinned adapters, and one must be left for others: unpin one of them,"
            return f"{why} or start the session with more slots", {}, 0.0
        slot = self.table.place(adapter)
        if slot is None:  # it is loaded, or will be when somebody asks for it
            return "", {}, 0.0
        began = time.perf_counter()
        failed = self.load([(slot, adapter)])
        if failed:
            self.table.unpin(adapter)
        return failed.get(adapter, ""), failed, time.perf_counter() - began
