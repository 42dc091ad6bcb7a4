"""The adapters of sessions: they are added, pinned and removed while requests are answered."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace

from motley.orchestrator.adapters import NamedAdapter, listed
from motley.orchestrator.control import Control
from motley.orchestrator.mesh.nodes import Node
from motley.orchestrator.serving.answering.requests import Requests
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.errors import ServingError, refusal, unready
from motley.orchestrator.sessions.session import Session
from motley.protocol.mesh_pb2 import Adapter, AdapterEvent, AdapterOrder, Failure, OrchestratorMessage, RankCommand

ORDER_S = 600.0
"""The leader has so long to bring an adapter to all ranks, over their links; one that is lost is noticed before."""
MOST = 1024
"""Adapters that a session may know."""


@dataclass
class _Order:
    """Something that was ordered of a session's leader, in one epoch."""

    session: Session
    epoch: int
    order: AdapterOrder
    event: asyncio.Future[AdapterEvent] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def settled(self) -> bool:
        """Whether nothing more can come of it."""
        return self.event.done() or self.session.epoch != self.epoch or not self.session.answers


class Adapters:
    """Orders leaders to have adapters, and remembers in their sessions which ones they have."""

    def __init__(self, control: Control, carrier: Carrier, requests: Requests) -> None:
        self._control = control
        self._requests = requests
        self._carrier = carrier
        self._orders: dict[str, _Order] = {}
        """By id."""

    async def add(self, session: Session, name: str, source: str, pin: bool) -> NamedAdapter:
        """Have a session know an adapter by a name, once every rank has its files.

        Args:
            source: a folder on any node of the session.
            pin: keep it loaded.

        Raises:
            ServingError: the session has no room for adapters, or as many as it may know; the name is another's; no
                node has the folder; it does not fit the model; or the session is not ready, or ends meanwhile.
        """
        self._check(session, name)
        event = await self._order(session, AdapterOrder(adapter=Adapter(source=source)))
        self._check(session, name, event.fingerprint)
        added = NamedAdapter(name, source, event.fingerprint, event.rank, event.bytes, pin)
        if pin:
            await self._pin(session, added)
            try:
                self._check(session, name, event.fingerprint)  # others may have named one meanwhile
            except ServingError:
                self._let_go(session, added)
                raise
        if (known := session.adapters.get(name)) is not None and known.pinned:
            added = replace(added, pinned=True)  # added again, it stays loaded
        session.adapters[name] = added
        self._carrier.carry_out(session, [])  # so that it is kept
        return added

    async def pin(self, session: Session, name: str, pinned: bool) -> NamedAdapter:
        """Keep an adapter loaded, or let it give way again; errors as `add`, and if there is none of that name."""
        adapter = self._known(session, name)
        if pinned:
            await self._pin(session, adapter)
        else:
            await self._unpin(session, adapter)
        changed = replace(self._known(session, name), pinned=pinned)
        session.adapters[name] = changed
        self._carrier.carry_out(session, [])
        return changed

    async def remove(self, session: Session, name: str) -> NamedAdapter:
        """Forget an adapter: requests under way are answered with it to their end, new ones are refused.

        Raises:
            ServingError: there is none of that name, or the session cannot be asked to let it go.
        """
        adapter = self._known(session, name)
        if adapter.pinned:
            await self._unpin(session, adapter)
        session.adapters.pop(name, None)
        self._requests.forget_adapter(session, name)
        self._carrier.carry_out(session, [])
        return adapter

    async def _pin(self, session: Session, adapter: NamedAdapter) -> None:
        """Keep an adapter loaded; it gives way again if whoever wants that does not wait for it."""
        try:
            await self._order(session, AdapterOrder(adapter=adapter.message, pin=True))
        except (asyncio.CancelledError, ServingError):
            self._let_go(session, adapter)
            raise

    def _let_go(self, session: Session, adapter: NamedAdapter) -> None:
        """Have an adapter give way that nobody has come to know as pinned, without waiting for that."""
        pinned = {each.fingerprint for each in session.adapters.values() if each.pinned}
        pinned |= {own.order.adapter.fingerprint for own in self._orders.values() if own.order.pin}
        if session.answers and adapter.fingerprint not in pinned:
            self._send(session, AdapterOrder(id=secrets.token_hex(8), adapter=adapter.message, unpin=True))

    async def _unpin(self, session: Session, adapter: NamedAdapter) -> None:
        """Let an adapter give way, unless it is pinned under another name too."""
        pinned = [each for each in session.adapters.values() if each.pinned and each.name != adapter.name]
        if not any(each.fingerprint == adapter.fingerprint for each in pinned):
            await self._order(session, AdapterOrder(adapter=adapter.message, unpin=True))

    def on_event(self, node: Node, event: AdapterEvent) -> None:
        """A leader tells what has become of an order; ignored if nobody waits for that."""
        order = self._orders.get(event.id)
        if order is not None and order.session.leader.node_id == node.id and not order.event.done():
            order.event.set_result(event)
            self._carrier.look()

    async def _order(self, session: Session, order: AdapterOrder) -> AdapterEvent:
        """Have a leader do something, and wait until it has."""
        if not session.answers:
            raise unready(session)
        order.id = secrets.token_hex(8)
        waiting = self._orders[order.id] = _Order(session, session.epoch, order)
        self._send(session, order)
        try:
            async with asyncio.timeout(ORDER_S):
                await self._carrier.until(lambda: waiting.settled)
        except TimeoutError:
            message = f"{session.leader} has not told within {ORDER_S:.0f} s whether every rank has the adapter"
            raise refusal("timed_out", message) from None
        finally:
            del self._orders[order.id]
        if not waiting.event.done():
            raise refusal("session_not_ready", f"the session of {session.name!r} was interrupted meanwhile; try again")
        event = waiting.event.result()
        if event.HasField("failure"):
            raise ServingError(Failure(code=event.failure.code, message=event.failure.message))
        return event

    def _send(self, session: Session, order: AdapterOrder) -> None:
        command = RankCommand(session=session.id, epoch=session.epoch, rank=session.leader.index, adapter=order)
        self._control.send(session.leader.node_id, OrchestratorMessage(rank=command))

    def _check(self, session: Session, name: str, fingerprint: str = "") -> None:
        """Make sure that a session can have an adapter of a name.

        Args:
            fingerprint: what the adapter is, once that is known.
        """
        if not session.request.adapters:
            message = f"{session.name!r} was started without room for adapters; start it with adapters (--adapters 8)"
            raise refusal("invalid_request", message, "model")
        known = session.adapters.get(name)
        if fingerprint and known is not None and known.fingerprint != fingerprint:
            message = (
                f"{session.name!r} has another adapter named {name!r} already; remove that, or choose another name"
            )
            raise refusal("name_in_use", message, "name")
        if known is None and len(session.adapters) >= MOST:
            message = f"{session.name!r} knows {MOST} adapters, as many as it may; remove some"
            raise refusal("invalid_request", message)

    def _known(self, session: Session, name: str) -> NamedAdapter:
        adapter = session.adapters.get(name)
        if adapter is None:
            message = f"{session.name!r} has no adapter named {name!r}; it has: {listed(session.adapters.values())}"
            raise refusal("adapter_not_found", message)
        return adapter
