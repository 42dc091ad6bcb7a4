"""Laying a session out over the nodes: the ranks of all the model, or a trunk's ranks and hosts of experts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import NamedTuple

from motley.orchestrator.experts.hosting import Hosting
from motley.orchestrator.experts.questions import Answer
from motley.orchestrator.experts.registry import ExpertMap
from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import NodeTable
from motley.orchestrator.planning.adapters import with_adapters
from motley.orchestrator.planning.cache_holders import HOLDER_BYTES, choose_nodes, far_bytes
from motley.orchestrator.planning.caches import Caches, blocks_of
from motley.orchestrator.planning.choosing.arrangement import NoPart
from motley.orchestrator.planning.choosing.stages import own_profile
from motley.orchestrator.planning.cutting.shares import PlanError
from motley.orchestrator.planning.draft import Draft
from motley.orchestrator.planning.experts.layout import is_parallel
from motley.orchestrator.planning.placement.terms import PlacementError
from motley.orchestrator.planning.setup import can_hold_caches
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.errors import refusal
from motley.orchestrator.serving.plans.descriptions import Profiles
from motley.orchestrator.serving.plans.memory import Memory
from motley.orchestrator.serving.plans.participants import check_alive, choose_participants
from motley.orchestrator.serving.plans.planner import Planner
from motley.orchestrator.serving.plans.ranks import plan_ranks, plan_trunks
from motley.orchestrator.serving.plans.taking_part import (
    Participant,
    first_that_fits,
    on_chosen_gpus,
    ways_to_take_part,
)
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.workers import CacheHolder, Rank
from motley.protocol import MAX_RANKS
from motley.protocol.address import is_loopback
from motley.protocol.mesh_pb2 import ModelProfile, ModelSpec


class Layout(NamedTuple):
    """What a session is laid out as.

    Attributes:
        experts: what they are on; None: in the ranks' shares, or there are none.
        no_part: nodes that were to have ranks, and have none.
    """

    ranks: list[Rank]
    experts: ExpertMap | None = None
    no_part: Sequence[NoPart] = ()


class Layouts:
    """Lays sessions out, one at a time, so that there is always a planner for those that serve."""

    def __init__(
        self,
        nodes: NodeTable,
        links: LinkTable,
        memory: Memory,
        planner: Planner,
        carrier: Carrier,
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._links = links
        self._memory = memory
        self._planner = planner
        self._carrier = carrier
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()

    async def lay_out(
        self,
        session: Session,
        request: SessionRequest,
        spec: ModelSpec,
        profiles: Profiles,
        caches: Caches,
        draft: Draft | None = None,
        avoid: Container[str] = (),
    ) -> Layout:
        """The ranks of a session and, in parallel, what its experts are on: groups of nodes where there is no room for
        whole experts. In ``auto`` it is sliced where the trunk or whole experts do not fit in parallel. The caller must
        reserve the memory for them before it awaits anything.

        Args:
            request: the session's own, or another that is tried for it.
            draft: a model that guesses tokens beside rank 0; experts are sliced then. So they are in ``auto`` where
                there is room for adapters, which can be of sliced experts, too.
            avoid: ids of nodes that are to take no part.

        Raises:
            PlanError, PlacementError: the model does not fit.
            LayoutError, SetupError: parallel experts were asked for, and are not possible with these engines.
            ServingError: the session was closed meanwhile, or the nodes are not what the request asks for.
        """
        async with self._one_at_a_time:
            self._carrier.check_planning(session)
            profile = profiles[spec.quantisation]
            while True:
                session.planned = self._clock()
                participants = self._participants(request, profiles, avoid)
                engines = {one.node.name: one.node.capabilities.expert_engines for one in participants}
                together = draft or request.cache_node_tokens or (request.adapters and not request.wants_parallel)
                if together or not is_parallel(request, profile, engines, on_gpus=on_chosen_gpus(participants)):
                    break
                able = [one for one in participants if one.may_be_trunk or one.node.name in request.named]
                nodes = [one.node for one in participants if request.expert_engine in engines[one.node.name]]
                costs = with_adapters(profile, request.adapters, request.adapter_rank)
                hosting = Hosting(request, costs, nodes, partial(self._memory.beside, request.expert_engine))
                try:
                    trunks = await plan_trunks(request, profiles, caches, able, hosting, self._memory, self._planner)
                    ranks = trunks[0]
                    check_alive(participants, ranks)
                    try:
                        experts = hosting.on_nodes(ranks)
                        answer = await self._first_answer(session, request, experts, ranks)
                    except PlacementError as error:
                        if not request.wants_parallel:
                            raise
                        check_alive(participants, ranks)
                        ranks, experts = hosting.on_groups(trunks, error)
                        answer = await self._first_answer(session, request, experts, ranks)
                except (PlanError, PlacementError):
                    self._carrier.check_planning(session)
                    if request.wants_parallel:
                        raise
                    break
                self._carrier.check_planning(session)
                planned = [*ranks, *experts.hosts, *experts.members]
                check_alive(participants, planned)
                experts.begin(answer.placement)
                if self._memory.has((worker.node_id, worker.host_bytes) for worker in planned):
                    return Layout(ranks, experts)
            while True:
                participants = self._participants(request, profiles, avoid)
                ranks, no_part = await first_that_fits(
                    ways_to_take_part(request, participants),
                    lambda taking: plan_ranks(
                        request, profiles, caches, taking, self._memory, self._planner, self._links, draft
                    ),
                )
                self._carrier.check_planning(session)
                check_alive(participants, ranks)
                if self._memory.has((rank.node_id, rank.host_bytes) for rank in ranks):
                    return Layout(ranks, None, no_part)

    def place_holders(
        self,
        ranks: Sequence[Rank],
        caches: Caches,
        profile: ModelProfile,
        avoid: Container[str] = (),
        instead_of: Session | None = None,
    ) -> list[CacheHolder]:
        """A cache holder for every rank, if caches are to be on other nodes: on those with most room beside the ranks.
        The caller must reserve the memory for them, and for the ranks, before it awaits anything.

        Args:
            avoid: ids of nodes that are to keep none.
            instead_of: what this session's workers have is free.

        Raises:
            PlanError: no node has room for one.
            ServingError: the ranks are too many.
        """
        if not caches.node_tokens:
            return []
        if 2 * len(ranks) > MAX_RANKS:
            message = f"{len(ranks)} ranks can have no caches on other nodes; at most {MAX_RANKS // 2} ranks can"
            raise refusal("invalid_request", message, "cache_node_tokens")
        blocks = blocks_of(caches, profile, [rank.setup for rank in ranks])
        memory = self._memory.but_for(instead_of) if instead_of else self._memory
        free = memory.beside("", ranks)
        homes = [rank.node_id for rank in ranks]
        shut_in = any(is_loopback(node.address) for node in self._nodes if node.id in homes)
        nodes = {
            node.id: node
            for node in self._nodes
            if node.alive
            and node.id not in avoid
            and can_hold_caches(node.capabilities)
            and not node.taken_back(on_gpu=False)
            and is_loopback(node.address) == shut_in
        }
        rooms = {node_id: free(node_id) for node_id in nodes}
        tokens, windowed = blocks.on_nodes * blocks.tokens, blocks.windowed > 0
        needed = [far_bytes(rank.plan, own_profile(profile, rank.plan), tokens, windowed) for rank in ranks]
        chosen = choose_nodes(needed, homes, rooms, {node_id: node.name for node_id, node in nodes.items()})
        return [
            CacheHolder(
                index=len(ranks) + rank.index,
                node_id=node_id,
                node_name=nodes[node_id].name,
                memory_limit=rooms[node_id],
                rank=rank.index,
                blocks_bytes=own,
                fixed_bytes=HOLDER_BYTES,
            )
            for rank, node_id, own in zip(ranks, chosen, needed, strict=True)
        ]

    def _participants(self, request: SessionRequest, profiles: Profiles, avoid: Container[str]) -> list[Participant]:
        """Who takes part now. Whoever has joined meanwhile, and would hold the model as nobody did, comes too late."""
        nodes = [node for node in self._nodes if node.id not in avoid]
        found = [one for one in choose_participants(request, nodes) if one.setup.quantisation in profiles]
        if not found:
            raise refusal("no_nodes", f"no node that is left can hold the model in {' or '.join(profiles)}")
        return found

    async def _first_answer(
        self, session: Session, request: SessionRequest, experts: ExpertMap, ranks: Sequence[Rank]
    ) -> Answer:
        """Where experts are at first, by how often they were chosen in the session before."""
        experts.loads.resume(
            session.experts.loads.lately() if session.experts else session.earlier_loads, self._clock()
        )
        free = self._memory.beside(request.expert_engine, [*ranks, *experts.hosts, *experts.members])
        return await self._planner.answer(experts.first_question(free))
