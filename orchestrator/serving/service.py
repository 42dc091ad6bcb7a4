"""Everything that serves, put together: what nodes say and the passing of time reach the sessions from here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.serving.adapters import Adapters
from motley.orchestrator.serving.answering.requests import Requests
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.kept_sessions import KeptSessions
from motley.orchestrator.serving.lending import Lending
from motley.orchestrator.serving.lifecycle import Lifecycle
from motley.orchestrator.serving.orders import Orders
from motley.orchestrator.serving.plans.descriptions import Descriptions
from motley.orchestrator.serving.plans.fitting import Fitting
from motley.orchestrator.serving.plans.forecasts import Forecasts
from motley.orchestrator.serving.plans.layouts import Layouts
from motley.orchestrator.serving.plans.memory import Memory
from motley.orchestrator.serving.plans.planner import Planner
from motley.orchestrator.serving.probes import Probes
from motley.orchestrator.serving.relays import Relays
from motley.orchestrator.serving.reopening import Reopening
from motley.orchestrator.serving.replanning.improving import Improving
from motley.orchestrator.serving.replanning.making_way import MakingWay
from motley.orchestrator.serving.replanning.rearranging import Rearranging
from motley.orchestrator.serving.replanning.recovery import Recovery
from motley.orchestrator.serving.upkeep import Upkeep
from motley.orchestrator.sessions.session import Command, Session
from motley.orchestrator.sessions.table import SessionTable
from motley.protocol.mesh_pb2 import (
    Delta,
    Failure,
    HeldRank,
    NodeMessage,
    OrchestratorMessage,
    RankCommand,
    RankEvent,
    Release,
)

TICK_S = 0.25
"""How often deadlines are looked at."""

_log = logging.getLogger(__name__)


class Serving:
    """A `motley.orchestrator.control.Listener`."""

    def __init__(
        self,
        nodes: NodeTable,
        control: Control,
        clock: Callable[[], float],
        state_dir: Path | None = None,
        rebalance_at: float = 0.0,
    ) -> None:
        """
        Args:
            state_dir: where sessions are kept that outlive the orchestrator; None: they do not.
            rebalance_at: see `Improving`.
        """
        self.nodes = nodes
        self.sessions = SessionTable()
        self.links = LinkTable(clock)
        self.requests = Requests(control, clock)
        self._control = control
        self._clock = clock
        self._planner = Planner()
        self._descriptions = Descriptions(control)
        self._kept = kept = KeptSessions(state_dir)
        self.relays = Relays(nodes, self.links, control)
        self._carrier = Carrier(self.sessions, control, self.requests, kept, self.relays)
        self._wanted = kept.take_up(self.sessions, clock())
        self.adapters = Adapters(control, self._carrier, self.requests)
        self.lending = Lending(control)
        memory = Memory(nodes, self.sessions, self.links)
        layouts = Layouts(nodes, self.links, memory, self._planner, self._carrier, clock)
        fitting = Fitting(nodes, self._descriptions, layouts, self._carrier)
        self.lifecycle = Lifecycle(
            nodes, self.links, self.sessions, self._descriptions, self.lending, layouts, fitting, self._carrier, clock
        )
        self._reopening = Reopening(nodes, self.lifecycle, kept, self._carrier, clock)
        self.upkeep = Upkeep(nodes, memory, self._planner, self._carrier, clock)
        self._recovery = Recovery(nodes, self.links, self._descriptions, self.lending, layouts, self._carrier, clock)
        self.forecasts = Forecasts(nodes, self.links, memory, self._descriptions, self._planner, self._carrier)
        self.rearranging = Rearranging(
            nodes, self.links, self.sessions, self.forecasts, self._recovery, self._carrier, control, clock
        )
        self._improving = Improving(
            nodes, self.links, self.sessions, self.requests, self.rearranging, clock, rebalance_at
        )
        self.orders = Orders(nodes, control)
        self._making_way = MakingWay(nodes, self.sessions, self.forecasts, self._recovery, self._carrier, clock)
        self._probes = Probes(nodes, self.links, self.sessions, control, clock)

    def on_message(self, node: Node, kind: str | None, message: NodeMessage) -> None:
        match kind:
            case "delta":
                self._on_delta(node, message.delta)
            case "described":
                self._descriptions.on_described(node, message.described)
            case "rank":
                self._on_rank_event(node, message.rank)
            case "lent":
                self.lending.on_lent(node, message.lent)
            case "probed":
                self._probes.on_probed(node, message.probed)
            case "relayed":
                self.relays.on_relayed(node, message.relayed)
            case "done":
                self.orders.on_done(node, message.done)

    def _on_delta(self, node: Node, delta: Delta) -> None:
        """A request whose caches are lost is computed again where other nodes have room for them."""
        session = self.requests.without_caches(node, delta)
        if session is not None and self._recovery.has_room_for_caches(session):
            why = delta.failure.message
            self._go_on(session, lambda session: session.replace_holders(why, self._clock()))
        else:
            self.requests.on_delta(node, delta)

    def on_joined(self, node: Node, held: Sequence[HeldRank]) -> None:
        """Take up the ranks that a node has kept while it was cut off; those that nobody wants any more are ended."""
        self._probes.on_joined(node)
        for session in self.sessions:
            kept = {(each.epoch, each.rank) for each in held if each.session == session.id}
            failed = {(each.epoch, each.rank): each.failed for each in node.failed if each.session == session.id}

            def back(
                session: Session,
                kept: AbstractSet[tuple[int, int]] = kept,
                failed: Mapping[tuple[int, int], Failure] = failed,
            ) -> list[Command]:
                return session.on_node_back(node.id, node.name, kept, failed, self._clock())

            self._go_on(session, back)
        for each in held:
            own = self.sessions.get(each.session)
            worker = own.worker(each.rank) if own else None
            if own is None or own.epoch != each.epoch or worker is None or worker.gone or worker.node_id != node.id:
                release = RankCommand(session=each.session, epoch=each.epoch, rank=each.rank, release=Release())
                self._control.send(node.id, OrchestratorMessage(rank=release))
        self._carrier.look()

    def on_offer(self, node: Node) -> None:
        """Have sessions make way on a node, or grow there, as it has said."""
        for session in self.sessions:
            self._go_on(session, lambda _: [])

    def on_lost(self, node: Node) -> None:
        self.orders.on_lost(node)
        self._descriptions.on_lost(node)
        self.lending.on_lost(node)
        self.relays.on_lost(node)
        self._probes.on_lost(node)
        for session in self.sessions:
            self._go_on(session, lambda session: session.on_node_lost(node.id, node.lost, self._clock()))
        self._carrier.look()

    def _on_rank_event(self, node: Node, event: RankEvent) -> None:
        session = self.sessions.get(event.session)
        if event.HasField("adapter"):
            self.adapters.on_event(node, event.adapter)
        elif session is not None:
            self._go_on(session, lambda session: session.on_event(node.id, event, self._clock()))
        elif event.WhichOneof("body") not in ("released", "failed"):  # a worker that outlived its session
            release = RankCommand(session=event.session, epoch=event.epoch, rank=event.rank, release=Release())
            self._control.send(node.id, OrchestratorMessage(rank=release))

    async def begin_anew(self) -> None:
        """Begin the sessions that there were before a restart, and that cannot be taken up."""
        await self._reopening.begin_anew(self._wanted)

    async def watch(self) -> None:
        """Notice silent nodes and passed deadlines, for ever."""
        told = ""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._let_pass(self._clock())
            except Exception as error:  # a fault of ours; without deadlines everything else would hang
                if told != (told := repr(error)):
                    _log.exception("looking at deadlines failed")

    def _let_pass(self, now: float) -> None:
        """Let the deadlines of nodes and sessions pass that lie before `now`."""
        for session in self.sessions:
            self._go_on(session, lambda session: session.on_time(now))
        self._control.drop_silent()
        self._probes.begin()
        self._improving.begin()
        self.nodes.forget(set[str]().union(*(session.node_names for session in self.sessions)))

    def _go_on(self, session: Session, step: Callable[[Session], list[Command]]) -> None:
        """Let a session take a step, and carry out what it decides. A fault of ours in it ends this session alone."""
        try:
            commands = step(session)
            while session.failed_engines:
                asked = session.request
                self.nodes.note_failed_engine(*session.failed_engines.pop(), asked.model, asked.cache_format)
            self._carrier.carry_out(session, commands)
            self._making_way.look_after(session)
            self.upkeep.look_after(session)
            self._recovery.look_after(session)
        except Exception as error:
            _log.exception("session %s (%s)", session.id, session.name)
            message = f"a fault of the orchestrator ({type(error).__name__}: {error}); its log has more"
            if not session.alive:
                self.sessions.remove(session)  # it cannot even end: its workers are released when they say something
                self.requests.end(session, Failure(code="internal_error", message=message))
                self.requests.forget(session)
                return
            failed = session.fail(Failure(code="internal_error", message=message), self._clock())
            self._carrier.carry_out(session, failed)

    async def stop(self) -> None:
        """End every session, for the orchestrator stops; those that are wanted are there again when it starts."""
        self._kept.stop(self.sessions)
        await self.lifecycle.close_all()
        await self.upkeep.finish()
        await self.relays.finish()
        await self._improving.finish()
        await self._making_way.finish()
        await self._recovery.finish()
        self._planner.stop()
