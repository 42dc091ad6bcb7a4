"""Serving models with the nodes there are: brings sessions up and down, passes requests to their leaders.

The decisions are made in the pure state tables and the planner; this is the shell that carries messages between
them, the nodes' streams and whoever waits. Everything runs on one event loop, and no state changes across an
``await`` without being looked at again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

from motley.orchestrator.control import Control
from motley.orchestrator.nodes import Node, NodeTable
from motley.orchestrator.planning.shares import Candidate, PlanError, human_bytes, plan_shares, usable
from motley.orchestrator.sessions import (
    Command,
    NameInUseError,
    Rank,
    Session,
    SessionRequest,
    SessionTable,
    State,
)
from motley.protocol.mesh_pb2 import (
    Cancel,
    Delta,
    Describe,
    Described,
    Failure,
    Generate,
    ModelProfile,
    NodeMessage,
    OrchestratorMessage,
    RankCommand,
    RankEvent,
    Release,
)

DESCRIBE_S = 6 * 3600.0
"""Describing a model may mean downloading it; the loss of the node ends the wait."""
ANSWER_S = 300.0
"""A leader with requests says something about one of them at least this often."""
READY_S = 3600.0
"""The longest wait for a session to be ready; its own deadlines are shorter while nothing happens."""
CLOSE_S = 15.0
"""The longest wait for a session's ranks to be released."""
DEFAULT_CONTEXT = 4096
"""Tokens, or what the model allows if that is less."""
TICK_S = 0.25

_log = logging.getLogger(__name__)


class ServingError(Exception):
    """What was asked for cannot be done. `failure.code` is stable, `failure.message` is for people."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass
class _Request:
    """A request under way. Its queue is bounded by the length of the answer: at most `context` deltas."""

    id: str
    session: Session
    deltas: asyncio.Queue[Delta] = field(default_factory=asyncio.Queue)


class Serving:
    """A `motley.orchestrator.control.Listener`."""

    def __init__(self, nodes: NodeTable, control: Control, clock: Callable[[], float]) -> None:
        self.nodes = nodes
        self.sessions = SessionTable()
        self._control = control
        self._clock = clock
        self._describing: dict[str, tuple[Node, asyncio.Future[Described]]] = {}
        """By session, in planning."""
        self._requests: dict[str, _Request] = {}
        self._heard: dict[str, float] = {}
        """When each session's leader last said something about a request."""
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ sessions

    async def create(self, request: SessionRequest) -> Session:
        """Plan a session and start its ranks; returns once the assignments are sent.

        Raises:
            ServingError: the name is taken, a node or engine is unknown, or the model cannot be served or fitted.
        """
        describer = self._choose_nodes(request)[0]
        try:
            session = self.sessions.open(request, time.time())
            try:
                profile = await self._describe(session, describer)
                if session.state is not State.PLANNING:
                    raise ServingError(_closed(session))
                context = _context(request, profile)
                self.sessions.rename(session, request.name or profile.name)
                ranks = self._plan(request, profile, context)
            except BaseException:
                self.sessions.remove(session)
                raise
        except NameInUseError as error:
            raise _error("name_in_use", str(error)) from error
        except PlanError as error:
            raise _error("insufficient_memory", str(error)) from error
        self._carry_out(session, session.assign(profile, ranks, context, self._clock()))
        return session

    async def wait_ready(self, session: Session) -> None:
        """Wait until a session has left its way up, or `READY_S` have passed.

        Raises:
            ServingError: it failed or was closed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                await self._until(lambda: session.state is State.READY or not session.alive)
        if not session.alive:
            raise ServingError(session.failure or _closed(session))

    async def close(self, session: Session) -> None:
        """Release a session's ranks and wait, at most `CLOSE_S`, until they are gone."""
        self._carry_out(session, session.close(self._clock()))
        _, described = self._describing.get(session.id, (None, None))
        if described is not None and not described.done():
            described.set_exception(ServingError(_closed(session)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._until(lambda: session.over)

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(session) for session in self.sessions))

    def _choose_nodes(self, request: SessionRequest) -> list[Node]:
        """The node of every rank, in rank order: as the request names them; in the order they joined if it has
        only shares; else the fastest first. A node may be named more than once."""
        alive = {node.name: node for node in self.nodes if node.alive}
        if request.nodes:
            for name in request.nodes:
                if name not in alive:
                    there = ", ".join(sorted(alive)) or "none"
                    raise _error("unknown_node", f"no live node is named {name!r}; live nodes: {there}")
            chosen = [alive[name] for name in request.nodes]
        else:
            chosen = list(alive.values())
            if not request.shares:
                chosen.sort(key=lambda node: -node.capabilities.memory_bandwidth)
        if not chosen:
            raise _error("no_nodes", "no node is in the mesh; start one with `motley join`")
        if request.shares and len(request.shares) != len(chosen):
            raise _error(
                "invalid_request",
                f"{_counted(len(request.shares), 'share')} given for {_counted(len(chosen), 'rank')}"
                f" ({', '.join(node.name for node in chosen)}); give one for each",
            )
        for node in chosen:
            if request.engine not in node.capabilities.engines:
                has = ", ".join(node.capabilities.engines) or "none"
                message = f"node {node.name!r} has no engine {request.engine!r}; it has: {has}"
                raise _error("unknown_engine", message)
        return chosen

    async def _describe(self, session: Session, node: Node) -> ModelProfile:
        request = session.request
        future: asyncio.Future[Described] = asyncio.get_running_loop().create_future()
        self._describing[session.id] = node, future
        describe = Describe(request_id=session.id, model=request.spec)
        self._control.send(node.id, OrchestratorMessage(describe=describe))
        try:
            async with asyncio.timeout(DESCRIBE_S):
                described = await future
        except TimeoutError as error:
            message = f"node {node.name!r} did not describe {request.model!r} within {DESCRIBE_S:.0f} s"
            raise _error("timed_out", message) from error
        finally:
            del self._describing[session.id]
        if described.HasField("failure"):
            message = f"node {node.name!r}: {described.failure.message}"
            raise _error(described.failure.code or "unsupported_model", message)
        profile = described.profile
        needed = ("name", "kv_groups", "attention_splits", "mlp_units", "mlp_unit_bytes", "context_length")
        if not all(getattr(profile, field) for field in needed):
            raise _error("invalid_profile", f"node {node.name!r} described {request.model!r} incompletely")
        return profile

    def _plan(self, request: SessionRequest, profile: ModelProfile, context: int) -> list[Rank]:
        nodes = self._choose_nodes(request)
        ranks_on = Counter(node.id for node in nodes)
        candidates = [
            Candidate(
                name=node.name,
                speed=speed if request.shares else speed / ranks_on[node.id],
                memory=self.free_memory(node) // ranks_on[node.id],
            )
            for node, speed in zip(
                nodes, request.shares or [n.capabilities.memory_bandwidth for n in nodes], strict=True
            )
        ]
        if not request.nodes and not request.shares:
            fitting = usable(profile, candidates)
            if not fitting:
                least = human_bytes(profile.fixed_bytes)
                raise PlanError(f"no node has the {least} free that every rank of {profile.name} needs")
            nodes = [n for n, candidate in zip(nodes, candidates, strict=True) if candidate in fitting]
            candidates = fitting
        plans = plan_shares(profile, candidates, context)
        return [
            Rank(index, node.id, node.name, plan, candidate.memory)
            for index, (node, candidate, plan) in enumerate(zip(nodes, candidates, plans, strict=True))
        ]

    def free_memory(self, node: Node) -> int:
        """Bytes that new ranks may use on a node: what it offers less what is promised, and no more than is free."""
        offered = node.capabilities.memory_bytes - self.sessions.reserved(node.id)
        return max(0, min(offered, node.memory_available or offered))

    # ------------------------------------------------------------ requests

    @contextlib.asynccontextmanager
    async def generate(self, session: Session, generate: Generate) -> AsyncIterator[AsyncIterator[Delta]]:
        """Run a request. Leaving the context before the last delta cancels it.

        Yields the deltas; the last one has ``finish`` "stop" or "length".

        Raises:
            ServingError: the session is not ready. The iterator raises it where the answer breaks off.
        """
        if session.state is not State.READY:
            raise ServingError(_unready(session))
        request = _Request(secrets.token_hex(8), session)
        generate.request_id, generate.session = request.id, session.id
        leader = session.leader.node_id
        self._requests[request.id] = request
        self._control.send(leader, OrchestratorMessage(generate=generate))
        try:
            async with contextlib.aclosing(self._deltas(request)) as deltas:
                yield deltas
        finally:
            if self._requests.pop(request.id, None) is not None:
                self._control.send(leader, OrchestratorMessage(cancel=Cancel(request_id=request.id)))

    async def _deltas(self, request: _Request) -> AsyncGenerator[Delta, None]:
        started = self._clock()
        while True:
            try:
                async with asyncio.timeout(1.0):
                    delta = await request.deltas.get()
            except TimeoutError:
                silent = self._clock() - max(started, self._heard.get(request.session.id, 0.0))
                if silent < ANSWER_S:  # it may be busy with requests that came before
                    continue
                leader = request.session.leader
                raise _error("timed_out", f"{leader} has said nothing for {silent:.0f} s") from None
            yield delta
            if delta.HasField("failure"):
                raise ServingError(delta.failure)
            if delta.finish in ("stop", "length"):
                return
            if delta.finish:
                raise _error("cancelled", f"{request.session.leader} ended the request ({delta.finish})")

    # ------------------------------------------------------------ what nodes say

    def on_message(self, node: Node, message: NodeMessage) -> None:
        match message.WhichOneof("body"):
            case "described":
                asker, future = self._describing.get(message.described.request_id, (None, None))
                if future is not None and asker is node and not future.done():
                    future.set_result(message.described)
            case "rank":
                self._on_rank_event(node, message.rank)
            case "delta":
                self._on_delta(node, message.delta)

    def _on_rank_event(self, node: Node, event: RankEvent) -> None:
        session = self.sessions.get(event.session)
        if session is not None:
            self._carry_out(session, session.on_event(node.id, event, self._clock()))
        elif event.WhichOneof("body") not in ("released", "failed"):  # a worker that outlived its session
            release = RankCommand(session=event.session, epoch=event.epoch, rank=event.rank, release=Release())
            self._control.send(node.id, OrchestratorMessage(rank=release))

    def on_lost(self, node: Node) -> None:
        for asked, future in self._describing.values():
            if asked is node and not future.done():
                future.set_exception(_error("node_lost", f"node {node.name!r} is lost: {node.lost}"))
        for session in self.sessions:
            self._carry_out(session, session.on_node_lost(node.id, node.lost, self._clock()))

    def _on_delta(self, node: Node, delta: Delta) -> None:
        request = self._requests.get(delta.request_id)
        if request is None or request.session.leader.node_id != node.id:
            return  # cancelled meanwhile, or not its business
        self._heard[request.session.id] = self._clock()
        request.deltas.put_nowait(delta)
        if delta.finish or delta.HasField("failure"):
            del self._requests[request.id]

    # ------------------------------------------------------------ time

    async def watch(self) -> None:
        """Notice silent nodes and passed deadlines, for ever."""
        last = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            if now - last > 4 * TICK_S:
                self.nodes.excuse(now - last)
            last = now
            self._control.drop_silent()
            for session in self.sessions:
                self._carry_out(session, session.on_time(now))

    # ------------------------------------------------------------ carrying out

    def _carry_out(self, session: Session, commands: list[Command]) -> None:
        """Send what a session decided, and tell everyone who waits for it."""
        for node_id, command in commands:
            self._control.send(node_id, OrchestratorMessage(rank=command))
        if not session.alive:
            failure = session.failure if session.state is State.FAILED else None
            self._end_requests(session, failure or _closed(session))
        if session.state is State.CLOSING and session.over:
            self.sessions.remove(session)
            self._heard.pop(session.id, None)
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_requests(self, session: Session, failure: Failure) -> None:
        for request in [request for request in self._requests.values() if request.session is session]:
            del self._requests[request.id]
            request.deltas.put_nowait(Delta(request_id=request.id, finish="error", failure=failure))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


def _context(request: SessionRequest, profile: ModelProfile) -> int:
    if request.context > profile.context_length:
        raise _error(
            "invalid_request",
            f"a context of {request.context} tokens was asked for; {profile.name} allows {profile.context_length}",
        )
    return request.context or min(DEFAULT_CONTEXT, profile.context_length)


def _unready(session: Session) -> Failure:
    if session.state is State.FAILED and session.failure is not None:
        message = f"the session of {session.name!r} has failed: {session.failure.message}"
        return Failure(code=session.failure.code, message=message, lost_rank=session.failure.lost_rank)
    message = f"{session.name!r} is not ready (its session is {session.state}); try again soon"
    return Failure(code="session_not_ready", message=message)


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _closed(session: Session) -> Failure:
    return Failure(code="session_closed", message=f"session {session.id} ({session.request.model}) was closed")


def _error(code: str, message: str) -> ServingError:
    return ServingError(Failure(code=code, message=message))
