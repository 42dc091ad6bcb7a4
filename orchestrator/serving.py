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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from motley.orchestrator.control import Control
from motley.orchestrator.expert_hosts import SKEWED, Answer, ExpertHost, ExpertMap, Question
from motley.orchestrator.hosting import Hosting, expert_host, more_groups
from motley.orchestrator.nodes import Node, NodeTable, what_became
from motley.orchestrator.planning.experts import PlacementError
from motley.orchestrator.planning.layout import LayoutError, is_parallel
from motley.orchestrator.planning.setup import Setup, SetupError, gpu_room, gpu_told, setup_of
from motley.orchestrator.planning.shares import (
    Candidate,
    PlanError,
    RankPlan,
    human_bytes,
    plan_shares,
    trunk_profile,
    usable,
)
from motley.orchestrator.planning.trunk import Forecast
from motley.orchestrator.sessions import (
    Command,
    NameInUseError,
    Session,
    SessionRequest,
    SessionTable,
    State,
)
from motley.orchestrator.workers import Rank, Worker
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import (
    Cancel,
    Delta,
    Describe,
    Described,
    Failure,
    Generate,
    ModelProfile,
    ModelSpec,
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
HINT_S = 10.0
"""Where a model does not fit, what would is looked for no longer than this."""
CONTEXT_STEP = 256
"""The largest context that would is told in such steps."""
NARROWER = {"fp32": ("int8", "int4"), "fp16": ("int8", "int4"), "stored": ("int4",), "int8": ("int4",)}
"""What a model that does not fit may be quantised to."""
TICK_S = 0.25
QUESTIONS = 10
"""In a row about the same experts, while others are promised the memory of each answer."""
PLANNERS = 4
"""Questions about experts that are answered at a time: of one new session, and of those that lose or get hosts."""

_log = logging.getLogger(__name__)


class ServingError(Exception):
    """What was asked for cannot be done. `failure.code` is stable, `failure.message` is for people."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class DescriptionError(ServingError):
    """A node says that the model cannot be served, or not so quantised."""


@dataclass
class _Request:
    """A request under way. Its queue is bounded by the length of the answer: at most `context` deltas."""

    id: str
    session: Session
    deltas: asyncio.Queue[Delta] = field(default_factory=asyncio.Queue)


@dataclass(frozen=True)
class _Part:
    """A node's, in a session: one rank of it."""

    node: Node
    setup: Setup

    @property
    def speed(self) -> float:
        """Bytes/s that its device reads; 0: not known."""
        capabilities = self.node.capabilities
        return self.node.gpus[0].memory_bandwidth if self.setup.on_gpu else capabilities.memory_bandwidth

    @property
    def is_able(self) -> bool:
        """It can be a rank of a trunk: experts may be elsewhere."""
        return self.setup.engine in self.node.capabilities.expert_engines


Profiles = Mapping[str, ModelProfile]
"""By quantisation."""


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
        self._asking: dict[str, asyncio.Task[Answer | PlacementError]] = {}
        """By session: the planner is asked where its experts should be."""
        self._laying_out = asyncio.Lock()
        """New sessions are laid out one at a time, so that there is always a planner for those that serve."""
        self._planners = ThreadPoolExecutor(PLANNERS, "planner")
        self._stopping = False

    # ------------------------------------------------------------ sessions

    async def create(self, request: SessionRequest) -> Session:
        """Plan a session and start its ranks; returns once the assignments are sent.

        Raises:
            ServingError: the name is taken, a node or engine is unknown, or the model cannot be served or fitted.
        """
        try:
            parts = self._choose_parts(request)
            spec = _spec(request, parts)
            session = self.sessions.open(request, time.time())
            try:
                profiles = await self._describe(session, spec, parts[0].node)
                profile = profiles[spec.quantisation]
                self._check_planning(session)
                context = _context(request, profile)
                self.sessions.rename(session, request.name or profile.name)
                try:
                    async with self._laying_out:
                        self._check_planning(session)
                        ranks, experts = await self._lay_out(session, request, spec, profiles, context)
                        self._carry_out(session, session.assign(spec, profile, ranks, context, self._clock(), experts))
                except (PlanError, PlacementError) as error:
                    hint = await self._what_fits(session, parts, spec, profiles, context)
                    raise type(error)(f"{error}\n{hint}" if hint else str(error)) from error
            except BaseException:
                self.sessions.remove(session)
                raise
        except NameInUseError as error:
            raise _error("name_in_use", str(error), "name") from error
        except LayoutError as error:
            raise _error("invalid_request", str(error), "experts") from error
        except SetupError as error:
            raise _error(error.code, str(error), "engine") from error
        except (PlanError, PlacementError) as error:
            raise _error("insufficient_memory", str(error)) from error
        return session

    async def wait_ready(self, session: Session) -> None:
        """Wait until a session has left its way up, or `READY_S` have passed.

        Raises:
            ServingError: it failed or was closed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                await self._until(lambda: session.state is State.READY or session.explained)
        if not session.alive:
            raise ServingError(session.failure or self._closed(session))

    async def close(self, session: Session) -> None:
        """Release a session's ranks and wait, at most `CLOSE_S`, until they are gone."""
        self._carry_out(session, session.close(self._clock()))
        _, described = self._describing.get(session.id, (None, None))
        if described is not None and not described.done():
            described.set_exception(ServingError(self._closed(session)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._until(lambda: session.over)

    async def close_all(self) -> None:
        """Close every session, for the orchestrator stops; requests under way are told so."""
        self._stopping = True
        await asyncio.gather(*(self.close(session) for session in self.sessions))
        await asyncio.gather(*self._asking.values())
        self._planners.shutdown(wait=False)

    def _choose_parts(self, request: SessionRequest) -> list[_Part]:
        """The node of every rank, in rank order: as the request names them; in the order they joined if it has
        only shares; else the fastest first. A node may be named more than once.

        Raises:
            ServingError: there is none, one is unknown or too many, or an engine is unknown or cannot run.
        """
        alive = {node.name: node for node in self.nodes if node.alive}
        if request.nodes:
            for name in request.nodes:
                if name not in alive:
                    there = ", ".join(sorted(alive)) or "none"
                    raise _error("unknown_node", f"no live node is named {name!r}; live nodes: {there}", "nodes")
            chosen = [alive[name] for name in request.nodes]
        else:
            chosen = list(alive.values())
        if not chosen:
            raise _error("no_nodes", "no node is in the mesh; start one with `motley join`")
        if request.shares and len(request.shares) != len(chosen):
            raise _error(
                "invalid_request",
                f"{_counted(len(request.shares), 'share')} given for {_counted(len(chosen), 'rank')}"
                f" ({', '.join(node.name for node in chosen)}); give one for each",
                "shares",
            )
        taking = {node.name for node in chosen}
        for field_name, own in (("engines", request.engines), ("quantisations", request.quantisations)):
            for name in sorted(own.keys() - taking):
                message = f"{field_name} names {name!r}, which takes no part; these do: {', '.join(sorted(taking))}"
                raise _error("invalid_request", message, field_name)
        parts = [_Part(node, _setup(request, node)) for node in chosen]
        if not request.nodes and not request.shares:
            parts.sort(key=lambda part: -part.speed)
        return parts

    async def _describe(self, session: Session, spec: ModelSpec, node: Node) -> Profiles:
        """What the model costs in each of its quantisations.

        Raises:
            DescriptionError: it cannot be served.
            ServingError: the session was closed, the node is lost or says nothing of use.
        """
        request = session.request
        future: asyncio.Future[Described] = asyncio.get_running_loop().create_future()
        self._describing[session.id] = node, future
        describe = Describe(request_id=session.id, model=spec)
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
            code = described.failure.code or "unsupported_model"
            raise DescriptionError(Failure(code=code, message=message, param="model"))
        profiles = [described.profile, *described.beside]
        needed = ["name", "kv_groups", "attention_splits", "mlp_units", "mlp_unit_bytes", "context_length"]
        if described.profile.expert_layers:
            needed += ["hidden", "expert_count", "experts_per_token", "expert_bytes"]
        complete = all(getattr(profile, field) for profile in profiles for field in needed)
        if not complete or len(profiles) != 1 + len(spec.beside) or len(set(map(_units, profiles))) > 1:
            raise _error("invalid_profile", f"node {node.name!r} described {request.model!r} incompletely")
        profiles[0].matrices = "; on other ranks ".join(profile.matrices for profile in profiles)
        return dict(zip((spec.quantisation, *spec.beside), profiles, strict=True))

    async def _lay_out(
        self, session: Session, request: SessionRequest, spec: ModelSpec, profiles: Profiles, context: int
    ) -> tuple[list[Rank], ExpertMap | None]:
        """The ranks of a session by its request, or by another that is tried for it, and, in parallel, what its experts
        are on: groups of nodes where there is no room for whole ones. In ``auto`` it is sliced where the trunk or whole
        experts do not fit in parallel."""
        profile = profiles[spec.quantisation]
        explicit = request.experts != "auto" or request.replicas > 1 or request.trunk > 1
        while True:
            session.planned = self._clock()
            parts = self._parts_now(request, profiles)
            if not is_parallel(
                request.experts,
                profile,
                engines={part.node.name: part.node.capabilities.expert_engines for part in parts},
                engine=request.engine,
                replicas=request.replicas,
                trunk=request.trunk,
                by_hand=bool(request.shares or request.named),
                exact=request.exact,
            ):
                break
            able = [part for part in parts if part.is_able or part.node.name in request.named]
            nodes = [part.node for part in parts if request.engine in part.node.capabilities.expert_engines]
            hosting = Hosting(request, profile, nodes, self._room)
            try:
                trunks = self._plan_trunks(request, profiles, context, able, hosting)
                ranks = trunks[0]
                try:
                    experts = hosting.on_nodes(ranks)
                    answer = await self._first_answer(session, experts, ranks)
                except PlacementError as error:
                    if not explicit:
                        raise
                    _check_alive(parts, ranks)
                    ranks, experts = hosting.on_groups(trunks, error)
                    answer = await self._first_answer(session, experts, ranks)
            except (PlanError, PlacementError):
                self._check_planning(session)
                if explicit:
                    raise
                break
            self._check_planning(session)
            planned = [*ranks, *experts.hosts, *experts.members]
            _check_alive(parts, planned)
            experts.begin(answer.placement)
            if self._is_free((worker.node_id, worker.host_bytes) for worker in planned):
                return ranks, experts
        return self._plan(request, profiles, context, self._parts_now(request, profiles)), None

    async def _what_fits(
        self, session: Session, parts: Sequence[_Part], spec: ModelSpec, profiles: Profiles, context: int
    ) -> str:
        """What would fit of a model that does not, in a shorter context or in narrower weights. Empty where it is nodes
        that are missing, and where nobody found out: within `HINT_S`, and with the nodes that were asked for.

        Raises:
            ServingError: the session was closed meanwhile.
        """
        if session.request.replicas > max(1, len(self._able_nodes(session))):
            return ""
        try:
            async with asyncio.timeout(HINT_S):
                hint = await self._look_for_fits(session, parts, spec, profiles, context)
        except (TimeoutError, ServingError):
            hint = ""
        self._check_planning(session)
        return hint if all(part.node.alive for part in parts) else ""

    async def _look_for_fits(
        self, session: Session, parts: Sequence[_Part], spec: ModelSpec, profiles: Profiles, context: int
    ) -> str:
        request = session.request
        everywhere = " on every node" if request.quantisations else ""
        ways, longest = [], 0
        for narrower in (None, *NARROWER.get(request.quantisation, ())):
            trial = request
            # Models and nodes that cannot do that.
            with contextlib.suppress(DescriptionError, LayoutError, SetupError):
                if narrower is not None:
                    trial = replace(request, quantisation=narrower, quantisations={})
                    own = [_Part(part.node, _setup(trial, part.node)) for part in parts]
                    spec = _spec(trial, own)
                    profiles = await self._describe(session, spec, own[0].node)
                fits = await self._largest_context(session, trial, spec, profiles, context)
                if fits > longest:
                    longest = fits
                    in_context = f"with a context of {fits}"
                    narrowed = f"quantised to {narrower}{everywhere}" + (f" {in_context}" if fits < context else "")
                    ways.append(narrowed if narrower else in_context)
        return f"It fits {', or '.join(ways)}." if ways else "It does not fit in a shorter context or narrower weights."

    async def _largest_context(
        self, session: Session, request: SessionRequest, spec: ModelSpec, profiles: Profiles, most: int
    ) -> int:
        """Tokens, `most` or a multiple of `CONTEXT_STEP`; 0: none fit."""

        async def fits(context: int) -> bool:
            await asyncio.sleep(0)  # between two layouts it is everybody's turn
            try:
                async with self._laying_out:
                    self._check_planning(session)
                    await self._lay_out(session, request, spec, profiles, context)
            except (PlanError, PlacementError):
                return False
            return True

        if await fits(most):
            return most
        low, high = 0, -(-most // CONTEXT_STEP)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if await fits(middle * CONTEXT_STEP) else (low, middle)
        return low * CONTEXT_STEP

    def _parts_now(self, request: SessionRequest, profiles: Profiles) -> list[_Part]:
        """Who takes part. Whoever has joined meanwhile, and would hold the model as nobody did, comes too late."""
        return [part for part in self._choose_parts(request) if part.setup.quantisation in profiles]

    async def _first_answer(self, session: Session, experts: ExpertMap, ranks: Sequence[Rank]) -> Answer:
        self._check_planning(session)  # or the planners may be shut down
        question = experts.first_question(self._room([*ranks, *experts.hosts, *experts.members]))
        return await self._plan_apart(question)

    def _plan_trunks(
        self, request: SessionRequest, profiles: Profiles, context: int, parts: list[_Part], hosting: Hosting
    ) -> list[list[Rank]]:
        """The ranks of every trunk that is looked at and possible, the one with the best forecast first. All are on the
        nodes that the request has an engine or a quantisation for; beyond these it may be any node or, if the request
        asks for more, any that are next to each other in speed."""
        own = list({part.node.id: part for part in parts if part.node.name in request.named}.values())
        others = sorted((part for part in parts if part not in own), key=lambda part: -part.speed)
        more = max(0, request.trunk - len(own))
        if more > len(others):
            message = f"a trunk of {request.trunk} ranks needs as many nodes; {len(own) + len(others)} take part"
            raise _error("invalid_request", message, "trunk")
        _check_trunk(own)
        trunks: list[tuple[Forecast, list[Rank]]] = []
        refusals = []
        for first in range(len(others) - more + 1 if more else 1):
            chosen = own + others[first : first + more]
            each = [trunk_profile(profiles[part.setup.quantisation]) for part in chosen]
            try:
                candidates = self._candidates(chosen, each)
                ranks = _ranks(chosen, candidates, plan_shares(each, candidates, context))
            except PlanError as error:
                refusals.append(error)
            else:
                trunks.append((hosting.forecast(ranks, [candidate.speed for candidate in candidates]), ranks))
        if not trunks:
            raise refusals[0]
        return [ranks for _, ranks in sorted(trunks, key=lambda trunk: trunk[0])]

    def _plan(self, request: SessionRequest, profiles: Profiles, context: int, parts: list[_Part]) -> list[Rank]:
        each = [profiles[part.setup.quantisation] for part in parts]
        candidates = self._candidates(parts, each, request.shares)
        if not request.nodes and not request.shares:
            # Nodes too small to take part are left out, but for those that something was asked of by name.
            fitting = usable(each, candidates)
            taking = [
                index
                for index, (part, candidate) in enumerate(zip(parts, candidates, strict=True))
                if candidate in fitting or part.node.name in request.named
            ]
            if not taking:
                least = human_bytes(min(profile.fixed_bytes for profile in each))
                offers = "".join(f"\n  {offer.name}: {human_bytes(offer.memory)} available" for offer in candidates)
                raise PlanError(f"no node has the {least} free that every rank of {each[0].name} needs:{offers}")
            parts = [parts[index] for index in taking]
            each = [each[index] for index in taking]
            candidates = [candidates[index] for index in taking]
        return _ranks(parts, candidates, plan_shares(each, candidates, context))

    def _candidates(
        self, parts: Sequence[_Part], profiles: Sequence[ModelProfile], shares: Sequence[float] = ()
    ) -> list[Candidate]:
        """What each node offers for a rank: speed and memory are divided among its ranks, shares are for each.

        Raises:
            PlanError: beside a GPU there is no room for what a rank on it needs of its node.
            ServingError: nobody knows how fast a GPU is.
        """
        ranks_on = Counter(part.node.id for part in parts)
        by_hand: Sequence[float | None] = shares or [None] * len(parts)
        candidates = []
        for part, profile, share in zip(parts, profiles, by_hand, strict=True):
            node, ranks = part.node, ranks_on[part.node.id]
            name, free = node.name, self.free_memory(node) // ranks
            if part.setup.on_gpu:
                if free < profile.fixed_bytes:
                    needed, left = human_bytes(profile.fixed_bytes), human_bytes(free)
                    raise PlanError(
                        f"{name}: a rank on its GPU needs {needed} of the machine's own memory; {left} are free"
                    )
                if not part.speed and share is None and len(parts) > 1:
                    message = (
                        f"the driver of node {name!r} does not tell how fast the memory of its GPU is: give shares"
                    )
                    raise _error("invalid_request", message)
                promised = self.sessions.promised_gpu(node.id, node.gpus[0])
                name, free = gpu_told(name, node.gpus[0], promised), gpu_room(node.gpus[0], promised) // ranks
            speed = part.speed / ranks or 1.0
            candidates.append(Candidate(name=name, speed=speed, memory=free, share=share))
        return candidates

    def _room(self, planned: Sequence[Worker] = ()) -> Callable[[str], int]:
        """Bytes free on a node, by its id, beside workers that are planned but not reserved yet."""
        taken = Counter[str]()
        for worker in planned:
            taken[worker.node_id] += worker.host_bytes
        nodes = {node.id: node for node in self.nodes}
        return lambda node_id: max(0, self.free_memory(nodes[node_id]) - taken[node_id])

    def _is_free(self, claims: Iterable[tuple[str, int]]) -> bool:
        """Whether nodes still have what was planned with: others may have been promised it meanwhile. Whoever is told
        so must reserve it before anybody else is asked."""
        claimed = Counter[str]()
        for node_id, more in claims:
            claimed[node_id] += more
        offered = {node.id: node.capabilities.memory_bytes for node in self.nodes}
        return all(
            more <= max(0, offered.get(node_id, 0) - self.sessions.reserved(node_id))
            for node_id, more in claimed.items()
        )

    def free_memory(self, node: Node) -> int:
        """Bytes that new ranks may use on a node: what it offers less what is promised, and no more than is free."""
        offered = node.capabilities.memory_bytes - self.sessions.reserved(node.id)
        return max(0, min(offered, node.memory_available or offered))

    # ------------------------------------------------------------ experts

    async def rebalance(self, session: Session) -> Answer:
        """Ask the planner for a better balance of the experts' load, and begin with it if there is one.

        Raises:
            ServingError: the session is not ready, its experts have no hosts, or they are being moved already.
        """
        if session.state is not State.READY:
            raise ServingError(_unready(session))
        experts = session.experts
        if experts is None:
            raise _error("no_expert_hosts", f"the experts of {session.name!r} are not on hosts: nothing can be moved")
        if experts.stale or experts.moves or experts.waiting_for or session.id in self._asking:
            message = f"experts of {session.name!r} are on the move already; try again when they have come"
            raise _error("experts_moving", message)
        asking = self._asking[session.id] = asyncio.create_task(
            self._ask(session, lambda: experts.rebalancing(self._room(), worth=1.0))
        )
        answer = await asking
        if isinstance(answer, PlacementError):  # a host was lost while others were planned for
            raise _error("insufficient_memory", str(answer))
        return answer

    def _look_after_experts(self, session: Session, now: float) -> None:
        """Ask the planner where it should be asked, start lost hosts again, and new ones on nodes that have joined."""
        experts = session.experts
        if experts is None or session.state is not State.READY:
            return
        self._restart_hosts(session, experts, now)
        self._add_hosts(session, experts, now)
        if session.id in self._asking:
            return
        self._add_groups(session, experts, now)
        if experts.stale:
            question = self._ask(session, lambda: experts.question(self._room()))
        elif experts.skewed(now):
            question = self._ask(session, lambda: experts.rebalancing(self._room(), SKEWED))
        else:
            return
        self._asking[session.id] = asyncio.create_task(question)

    def _restart_hosts(self, session: Session, experts: ExpertMap, now: float) -> None:
        able = {node.name: node for node in self._able_nodes(session)}
        for host in [host for host in experts.hosts if host.gone]:
            if not all(worker.node_name in able for worker in host.group):
                continue  # it may come back
            nodes = [able[worker.node_name] for worker in host.group]
            node_ids, rooms = [node.id for node in nodes], [self.free_memory(node) for node in nodes]
            roomy = all(room >= worker.least_bytes for room, worker in zip(rooms, host.group, strict=True))
            if roomy and experts.may_restart(host, node_ids, now):
                self._carry_out(session, session.restart(host, node_ids, rooms, now))

    def _add_hosts(self, session: Session, experts: ExpertMap, now: float) -> None:
        """On nodes that have registered since the session was planned, and that it may use."""
        able = self._able_nodes(session)
        bound = experts.bound({node.name: node.id for node in able})
        for node in able:
            index = len(session.ranks) + len(experts.hosts)
            if node.joined < session.planned or node.name in bound or index == MAX_RANKS:
                continue
            host = expert_host(session.profile, [node], [experts.slices], len(experts.hosts), index, self._room())
            if host.memory_limit >= host.least_bytes and not experts.gave_up(host):
                self._grow(session, host, now)

    def _add_groups(self, session: Session, experts: ExpertMap, now: float) -> None:
        """Of nodes that are in no host now, for replicas that have found no place on the hosts that are left. A lost
        host that may come back as it was keeps its nodes, and so does one that is still ending."""
        if experts.slices == 1 or experts.is_starting:
            return
        room = self._room()
        if not (missing := experts.lacking(room)):
            return
        able = self._able_nodes(session)
        bound = experts.bound({node.name: node.id for node in able}, complete=True)
        idle = [node for node in able if node.name not in bound]
        hosts = more_groups(session.profile, experts, missing, idle, len(session.ranks), room)
        if not any(map(experts.gave_up, hosts)):
            for host in hosts:
                self._grow(session, host, now)

    def _grow(self, session: Session, host: ExpertHost, now: float) -> None:
        self._carry_out(session, session.grow(host, now))
        if host.index + 1 == MAX_RANKS:
            _log.warning(
                "session %s (%s) has had %d ranks and expert hosts, as many as can be: no other host can join it."
                " Start it anew to use more nodes",
                *(session.id, session.name, MAX_RANKS),
            )

    def _able_nodes(self, session: Session) -> list[Node]:
        """Those that may be its hosts: what it asks for, and nobody that it does not name, if it names any."""
        request = session.request
        return [
            node
            for node in self.nodes
            if node.alive and _can_host(request, node) and (not request.nodes or node.name in request.nodes)
        ]

    async def _ask(self, session: Session, pose: Callable[[], Question]) -> Answer | PlacementError:
        """Ask the planner and do what it says. While it thinks, others may be promised the memory that it plans with:
        then it is asked again, `QUESTIONS` times in all."""
        try:
            for _ in range(QUESTIONS):
                question = pose()
                try:
                    answer: Answer | PlacementError = await self._plan_apart(question)
                except PlacementError as error:
                    answer = error
                if isinstance(answer, PlacementError) or self._is_free(session.claims(answer)):
                    break
            else:
                answer = PlacementError(f"others were promised the memory of {QUESTIONS} placements in a row")
            self._carry_out(session, session.on_answer(question, answer, self._clock()))
            return answer
        finally:
            del self._asking[session.id]

    async def _plan_apart(self, question: Question) -> Answer:
        """Ask the planner, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._planners, question.answer)

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
            self._look_after_experts(session, self._clock())
        elif event.WhichOneof("body") not in ("released", "failed"):  # a worker that outlived its session
            release = RankCommand(session=event.session, epoch=event.epoch, rank=event.rank, release=Release())
            self._control.send(node.id, OrchestratorMessage(rank=release))

    def on_lost(self, node: Node) -> None:
        for asked, future in self._describing.values():
            if asked is node and not future.done():
                future.set_exception(_error("node_lost", f"node {node.name!r} {what_became(node.lost)}"))
        for session in self.sessions:
            self._carry_out(session, session.on_node_lost(node.id, node.lost, self._clock()))
            self._look_after_experts(session, self._clock())

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
            self.nodes.forget(set[str]().union(*(session.node_names for session in self.sessions)))
            for session in self.sessions:
                self._carry_out(session, session.on_time(now))
                self._look_after_experts(session, now)

    # ------------------------------------------------------------ carrying out

    def _carry_out(self, session: Session, commands: list[Command]) -> None:
        """Send what a session decided, and tell everyone who waits for it."""
        for node_id, command in commands:
            self._control.send(node_id, OrchestratorMessage(rank=command))
        if session.explained or session.state is State.CLOSING:  # soon: whoever is to blame is released
            self._end_requests(session, session.failure or self._closed(session))
        if session.state is State.CLOSING and session.over:
            self.sessions.remove(session)
            self._heard.pop(session.id, None)
            for other in self.sessions:
                if other.experts is not None:
                    other.experts.retry()
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_requests(self, session: Session, failure: Failure) -> None:
        for request in [request for request in self._requests.values() if request.session is session]:
            del self._requests[request.id]
            request.deltas.put_nowait(Delta(request_id=request.id, finish="error", failure=failure))

    def _check_planning(self, session: Session) -> None:
        """
        Raises:
            ServingError: it was closed meanwhile.
        """
        if session.state is not State.PLANNING:
            raise ServingError(self._closed(session))

    def _closed(self, session: Session) -> Failure:
        if self._stopping:
            return Failure(code="session_closed", message="the orchestrator is shutting down")
        return Failure(code="session_closed", message=f"session {session.id} ({session.request.model}) was closed")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


def _setup(request: SessionRequest, node: Node) -> Setup:
    """
    Raises:
        ServingError: the node has no such engine, or it cannot run there.
    """
    engine = request.engines.get(node.name, request.engine)
    quantisation = request.quantisations.get(node.name, request.quantisation)
    try:
        return setup_of(node.name, node.capabilities, engine, quantisation, request.options_on(node.name))
    except SetupError as error:
        raise _error(error.code, str(error), "engines" if node.name in request.engines else "engine") from error


def _can_host(request: SessionRequest, node: Node) -> bool:
    """Whether a node can compute single experts for a session."""
    try:
        setup_of(node.name, node.capabilities, request.engine, request.quantisation)
    except SetupError:
        return False
    return request.engine in node.capabilities.expert_engines


def _check_alive(parts: Sequence[_Part], planned: Iterable[Worker]) -> None:
    """
    Raises:
        ServingError: a node that workers are planned on was lost meanwhile.
    """
    used = {worker.node_id for worker in planned}
    for node in (part.node for part in parts):
        if node.id in used and not node.alive:
            raise _error("node_lost", f"node {node.name!r} {what_became(node.lost)}")


def _spec(request: SessionRequest, parts: Sequence[_Part]) -> ModelSpec:
    """The model as the ranks hold it; where experts are asked to be on hosts, as these do: in the session's own."""
    ranks = list(dict.fromkeys(part.setup.quantisation for part in parts))
    if request.named and (request.experts == "parallel" or request.replicas > 1 or request.trunk > 1):
        first = parts[0].node
        own = setup_of(first.name, first.capabilities, request.engine, request.quantisation).quantisation
        ranks = [own, *(each for each in ranks if each != own)]
    return request.spec(ranks[0], ranks[1:])


def _units(profile: ModelProfile) -> tuple[object, ...]:
    """What does not depend on how a model is held."""
    splits = tuple(profile.attention_splits)
    return splits, profile.kv_groups, profile.mlp_units, profile.vocabulary_units, profile.fingerprint


def _check_trunk(chosen: Sequence[_Part]) -> None:
    """
    Raises:
        LayoutError: a node that an engine is given for has a rank of the trunk, and cannot.
    """
    for part in chosen:
        if not part.is_able:
            able = " or ".join(map(repr, part.node.capabilities.expert_engines)) or "of another node"
            raise LayoutError(
                f"engine {part.setup.engine!r} of node {part.node.name!r} cannot have experts elsewhere; use engine"
                f" {able}, or experts 'sliced'"
            )


def _ranks(parts: Sequence[_Part], candidates: Sequence[Candidate], plans: Sequence[RankPlan]) -> list[Rank]:
    return [
        Rank(index, part.node.id, part.node.name, candidate.memory, plan, part.setup)
        for index, (part, candidate, plan) in enumerate(zip(parts, candidates, plans, strict=True))
    ]


def _context(request: SessionRequest, profile: ModelProfile) -> int:
    if request.context > profile.context_length:
        raise _error(
            "invalid_request",
            f"a context of {request.context} tokens was asked for; {profile.name} allows {profile.context_length}",
            "context",
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


def _error(code: str, message: str, param: str = "") -> ServingError:
    """`param`: the field of the request that is to blame, if one is."""
    return ServingError(Failure(code=code, message=message, param=param))
