"""Upkeep of sessions whose experts are on hosts: balance, lost hosts that begin anew, hosts on nodes that join."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from motley.orchestrator.experts.hosting import expert_host, more_groups
from motley.orchestrator.experts.hosts import ExpertHost
from motley.orchestrator.experts.questions import Answer, Question
from motley.orchestrator.experts.recovery import bound_nodes, gave_up, may_restart
from motley.orchestrator.experts.registry import SKEWED, ExpertMap, Free
from motley.orchestrator.mesh.nodes import NodeTable
from motley.orchestrator.planning.placement.terms import PlacementError
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.errors import refusal, unready
from motley.orchestrator.serving.plans.memory import Memory
from motley.orchestrator.serving.plans.participants import able_hosts
from motley.orchestrator.serving.plans.planner import Planner
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.session import Session
from motley.protocol import MAX_RANKS

QUESTIONS = 10
"""How often the planner is asked in a row, where others are promised the memory of each answer."""

_log = logging.getLogger(__name__)


class _Fault(PlacementError):
    """The planner has no answer by a fault of ours: to ask it the same again would not help."""


class Upkeep:
    """Asks the planner where experts should be, one question per session at a time."""

    def __init__(
        self, nodes: NodeTable, memory: Memory, planner: Planner, carrier: Carrier, clock: Callable[[], float]
    ) -> None:
        self._nodes = nodes
        self._memory = memory
        self._planner = planner
        self._carrier = carrier
        self._clock = clock
        self._asking: dict[str, asyncio.Task[Answer | PlacementError]] = {}
        """By session: the planner is asked where its experts should be."""

    async def rebalance(self, session: Session) -> Answer:
        """Ask the planner for a better balance of the experts' load, and begin with it if there is one.

        Raises:
            ServingError: the session is not ready, its experts have no hosts, or they are being moved already.
        """
        if session.state is not State.READY:
            raise unready(session)
        experts = session.experts
        if experts is None:
            raise refusal("no_expert_hosts", f"the experts of {session.name!r} are not on hosts: nothing can be moved")
        if experts.stale or experts.moves or experts.waiting_for or session.id in self._asking:
            message = f"experts of {session.name!r} are on the move already; try again when they have come"
            raise refusal("experts_moving", message)
        asking = self._asking[session.id] = asyncio.create_task(
            self._ask(session, lambda: experts.rebalancing(self._room(session), worth=1.0))
        )
        answer = await asking
        if isinstance(answer, PlacementError):  # a host was lost while others were planned for
            raise refusal("internal_error" if isinstance(answer, _Fault) else "insufficient_memory", str(answer))
        return answer

    def look_after(self, session: Session) -> None:
        """Start lost hosts again, and new ones on nodes that have joined, and ask the planner if it must be asked."""
        experts, now = session.experts, self._clock()
        if experts is None or session.state is not State.READY:
            return
        self._restart_hosts(session, experts, now)
        self._add_hosts(session, experts, now)
        if session.id in self._asking:
            return
        self._add_groups(session, experts, now)
        if experts.stale:
            question = self._ask(session, lambda: experts.question(self._room(session)))
        elif experts.skewed(now):
            question = self._ask(session, lambda: experts.rebalancing(self._room(session), SKEWED))
        else:
            return
        self._asking[session.id] = asyncio.create_task(question)

    async def finish(self) -> None:
        """Wait for the planner's answers."""
        await asyncio.gather(*self._asking.values())

    def _restart_hosts(self, session: Session, experts: ExpertMap, now: float) -> None:
        able = {node.name: node for node in able_hosts(session.request, self._nodes)}
        for host in [host for host in experts.hosts if host.gone]:
            if not all(worker.node_name in able for worker in host.group):
                continue  # it may come back
            nodes = [able[worker.node_name] for worker in host.group]
            node_ids, rooms = [node.id for node in nodes], [self._memory.free(node) for node in nodes]
            roomy = all(room >= worker.least_bytes for room, worker in zip(rooms, host.group, strict=True))
            if roomy and may_restart(experts.hosts, host, node_ids, now):
                self._carrier.carry_out(session, session.restart(host, node_ids, rooms, now))

    def _add_hosts(self, session: Session, experts: ExpertMap, now: float) -> None:
        """Start hosts on nodes that have registered since the session was planned, and that it may use."""
        able = able_hosts(session.request, self._nodes)
        bound = bound_nodes(experts.hosts, {node.name: node.id for node in able})
        for node in able:
            index = len(session.ranks) + len(experts.hosts)
            if node.joined < session.planned or node.name in bound or index == MAX_RANKS:
                continue
            free = self._room(session)
            host = expert_host(experts.profile, [node], [experts.slices], len(experts.hosts), index, free)
            if host.memory_limit >= host.least_bytes and not gave_up(experts.hosts, host):
                self._grow(session, host, now)

    def _room(self, session: Session) -> Free:
        """Bytes that are free on nodes for more experts of a session."""
        return self._memory.beside(session.request.expert_engine, reaching=session.ranks)

    def _add_groups(self, session: Session, experts: ExpertMap, now: float) -> None:
        """Start hosts that are groups of nodes, for replicas that have found no place on the hosts that are left. The
        nodes are in no host now; a lost host that may come back as it was keeps its own, and so does one that is still
        ending."""
        if experts.slices == 1 or experts.is_starting:
            return
        room = self._room(session)
        if not (missing := experts.lacking(room)):
            return
        able = able_hosts(session.request, self._nodes)
        bound = bound_nodes(experts.hosts, {node.name: node.id for node in able}, complete=True)
        idle = [node for node in able if node.name not in bound]
        hosts = more_groups(experts.profile, experts, missing, idle, len(session.ranks), room)
        if not any(gave_up(experts.hosts, host) for host in hosts):
            for host in hosts:
                self._grow(session, host, now)

    def _grow(self, session: Session, host: ExpertHost, now: float) -> None:
        self._carrier.carry_out(session, session.grow(host, now))
        if host.index + 1 == MAX_RANKS:
            _log.warning(
                "session %s (%s) has had %d ranks and expert hosts, as many as can be: no other host can join it."
                " Start it anew to use more nodes",
                *(session.id, session.name, MAX_RANKS),
            )

    async def _ask(self, session: Session, pose: Callable[[], Question]) -> Answer | PlacementError:
        """Ask the planner and do what it says. While it thinks, others may be promised the memory that it plans with:
        then it is asked again, `QUESTIONS` times in all."""
        try:
            for _ in range(QUESTIONS):
                question = pose()
                answer = await self._answer(session, question)
                if isinstance(answer, PlacementError) or self._memory.has(session.claims(answer)):
                    break
            else:
                answer = PlacementError(f"others were promised the memory of {QUESTIONS} placements in a row")
            self._carrier.carry_out(session, session.on_answer(question, answer, self._clock()))
            return answer
        except Exception as error:
            fault = self._fault(session, error)
            if session.experts is not None:
                session.experts.stay(str(fault), self._clock())
            return fault
        finally:
            del self._asking[session.id]

    async def _answer(self, session: Session, question: Question) -> Answer | PlacementError:
        try:
            return await self._planner.answer(question)
        except PlacementError as error:
            return error
        except Exception as error:
            return self._fault(session, error)

    def _fault(self, session: Session, error: Exception) -> _Fault:
        _log.exception("planning where the experts of session %s (%s) should be", session.id, session.name)
        return _Fault(f"the planner failed ({type(error).__name__}: {error}); the orchestrator's log has more")
