"""The ranks of a session that nodes have room for: of the whole model, or of a trunk whose experts are elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from motley.orchestrator.experts.hosting import Hosting
from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import Node
from motley.orchestrator.planning.adapters import with_adapters
from motley.orchestrator.planning.caches import Caches, blocks_of, with_blocks, with_tables
from motley.orchestrator.planning.choosing.arrangement import NoPart
from motley.orchestrator.planning.choosing.choice import Chooser
from motley.orchestrator.planning.cost import Workload
from motley.orchestrator.planning.cutting.shares import (
    Candidate,
    PlanError,
    RankPlan,
    trunk_profile,
    usable,
)
from motley.orchestrator.planning.draft import Draft
from motley.orchestrator.planning.experts.layout import LayoutError
from motley.orchestrator.planning.experts.trunk import Forecast
from motley.orchestrator.serving.errors import refusal
from motley.orchestrator.serving.plans.descriptions import Profiles
from motley.orchestrator.serving.plans.memory import Memory
from motley.orchestrator.serving.plans.planner import Planner
from motley.orchestrator.serving.plans.taking_part import Participant
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.workers import Rank
from motley.protocol.mesh_pb2 import ModelProfile
from motley.protocol.wording import human_bytes
from motley.transport.schedules.forecast import Network


@dataclass(frozen=True)
class Team:
    """The nodes that may have ranks of a whole model, each with what the model costs there and what it offers.

    Attributes:
        cache_tokens: that the caches of every rank have room for.
    """

    participants: list[Participant]
    profiles: list[ModelProfile]
    candidates: list[Candidate]
    cache_tokens: int

    def chooser(self, request: SessionRequest, links: LinkTable, work: Workload, *, with_draft: bool) -> Chooser:
        """Who looks for the nodes that take part. All do that the request names, the first beside a draft model and,
        as long as some links were not measured and no two are known to be apart, everybody: nobody is left out by
        guess."""
        nodes = [one.node for one in self.participants]
        apart = [
            frozenset((one, other))
            for one, other in combinations(range(len(nodes)), 2)
            if links.are_apart(nodes[one], nodes[other]) and not links.relay(nodes[one], nodes[other])
        ]
        everybody = bool(request.nodes) or not (apart or links.all_known(nodes))
        required = [
            index
            for index, node in enumerate(nodes)
            if everybody or node.name in request.named or (with_draft and index == 0)
        ]
        network = network_of(nodes, links)
        may_stage = links.all_known(nodes) and not request.has_own_head  # slow links are not guessed
        stages = request.stages or (0 if may_stage else 1)
        return Chooser(
            self.profiles,
            self.candidates,
            self.cache_tokens,
            network,
            work,
            required,
            0 if with_draft else None,
            apart,
            stages,
        )


def network_of(nodes: Sequence[Node], links: LinkTable) -> Network:
    """The network between ranks on some nodes, as far as it was measured."""
    between = [[links.between(one, other) for other in nodes] for one in nodes]
    return Network([[way[0] for way in row] for row in between], [[way[1] for way in row] for row in between])


async def plan_ranks(
    request: SessionRequest,
    profiles: Profiles,
    caches: Caches,
    participants: Sequence[Participant],
    memory: Memory,
    planner: Planner,
    links: LinkTable,
    draft: Draft | None = None,
) -> tuple[list[Rank], list[NoPart]]:
    """The ranks of a whole model, as nodes have memory before this waits: on the nodes that the request names, else on
    those with which a token takes the least time; and who was to have a rank, and has none.

    Args:
        draft: a model that guesses tokens beside rank 0, which is then the first participant's.

    Raises:
        PlanError: the model does not fit.
        ServingError: nodes that are named cannot reach each other, the draft model does not fit beside any rank, nobody
            knows how fast a GPU is, or the orchestrator shuts down.
    """
    team, no_part = team_of(request, profiles, caches, participants, memory, draft), list[NoPart]()
    if request.shares:
        check_together([one.node for one in team.participants], links)
        plans = await planner.shares(team.profiles, team.candidates, team.cache_tokens)
        ranks = _ranks(team.participants, team.candidates, plans)
    else:
        chooser = team.chooser(request, links, Workload(wire=request.wire), with_draft=draft is not None)
        check_together([team.participants[number].node for number in chooser.required], links)
        choice = await planner.choose(chooser)
        members = [team.participants[number] for number in choice.members]
        ranks = _ranks(members, [team.candidates[number] for number in choice.members], choice.plans)
        no_part = [NoPart(team.participants[number].node.name, why) for number, why in choice.idle.items()]
    ranks[0].draft = draft
    return ranks, no_part


def check_together(nodes: Sequence[Node], links: LinkTable) -> None:
    """Make sure that nodes may have ranks of one session.

    Raises:
        ServingError: one of them is known not to reach another; the message says who, where and why.
    """
    if broken := links.broken(nodes):
        lines = "".join(f"\n  {each}" for each in broken)
        message = (
            f"these nodes cannot have ranks of one session:{lines}\nLook for a firewall, or a Wi-Fi that keeps its"
            " machines apart, or name nodes that can reach each other with --nodes"
        )
        raise refusal("unreachable_nodes", message, "nodes")


def team_of(
    request: SessionRequest,
    profiles: Profiles,
    caches: Caches,
    participants: Sequence[Participant],
    memory: Memory,
    draft: Draft | None = None,
) -> Team:
    """What nodes offer for ranks of a whole model, as they have memory now. Nodes that are too small for a rank are
    left out, but for those that the request names.

    Args:
        draft: a model that guesses tokens beside rank 0, which is then the first participant's.

    Raises:
        PlanError: no node has room for any rank.
        ServingError: the draft model does not fit beside any rank, or nobody knows how fast a GPU is.
    """
    each = [_costs(profiles[one.setup.quantisation], request, caches) for one in participants]
    if draft is not None:
        _check_draft(draft, participants[0], each[0], memory)
    candidates = _candidates(participants, each, memory, request.shares, draft)
    if not request.nodes and not request.shares:
        fitting = usable(each, candidates)
        taking = [
            index
            for index, (one, candidate) in enumerate(zip(participants, candidates, strict=True))
            if candidate in fitting or one.node.name in request.named
        ]
        if not taking:
            least = human_bytes(min(profile.fixed_bytes for profile in each))
            offers = "".join(f"\n  {offer.name}: {human_bytes(offer.memory)} available" for offer in candidates)
            raise PlanError(f"no node has the {least} free that every rank of {each[0].name} needs:{offers}")
        participants = [participants[index] for index in taking]
        each = [each[index] for index in taking]
        candidates = [candidates[index] for index in taking]
    blocks = blocks_of(caches, each[0], [one.setup for one in participants])
    each = [with_blocks(profile, blocks) for profile in each]
    return Team(list(participants), each, candidates, blocks.room)


def _costs(profile: ModelProfile, request: SessionRequest, caches: Caches) -> ModelProfile:
    """A model's costs with what every rank has of its own besides: slots for adapters, and rotary tables."""
    return with_adapters(with_tables(profile, caches.context), request.adapters, request.adapter_rank)


def _check_draft(draft: Draft, first: Participant, profile: ModelProfile, memory: Memory) -> None:
    """Make sure that a draft model fits beside a rank of the model.

    Args:
        first: the node of rank 0.
        profile: what the model costs there.

    Raises:
        ServingError: it does not.
    """
    node = first.node
    name, needed, there = node.name, draft.host_bytes, memory.free(node)
    least = profile.fixed_bytes
    if needed + least <= there and draft.gpu_bytes:
        offer = memory.on_gpu(node)
        name, needed, there = offer.told(name), draft.gpu_bytes, offer.room
        least = profile.fixed_bytes if first.setup.on_gpu else 0
    if needed + least <= there:
        return
    rank = f", and a rank of {profile.name} at least {human_bytes(least)}" if least else ""
    raise refusal(
        "insufficient_memory",
        f"{name}: the draft model {draft.profile.name} needs {human_bytes(needed)} with its caches{rank};"
        f" {human_bytes(there)} are available. Take a smaller one, another first node or smaller caches, or do without",
        "draft_model",
    )


async def plan_trunks(
    request: SessionRequest,
    profiles: Profiles,
    caches: Caches,
    participants: Sequence[Participant],
    hosting: Hosting,
    memory: Memory,
    planner: Planner,
) -> list[list[Rank]]:
    """The ranks of every trunk that is looked at and possible, as nodes have memory while this waits, the one with the
    best forecast first. All are on the nodes that the request has an engine or a quantisation for; beyond these it may
    be any node or, if the request asks for more, any that are next to each other in speed.

    Raises:
        PlanError: no trunk fits.
        LayoutError: an engine that the request has for a node cannot have experts elsewhere.
        ServingError: fewer nodes take part than the request wants ranks, nobody knows how fast a GPU is, or the
            orchestrator shuts down.
    """
    own = list({one.node.id: one for one in participants if one.node.name in request.named}.values())
    others = sorted((one for one in participants if one not in own), key=lambda one: -one.speed)
    more = max(0, request.trunk - len(own))
    if more > len(others):
        message = f"a trunk of {request.trunk} ranks needs as many nodes; {len(own) + len(others)} take part"
        raise refusal("invalid_request", message, "trunk")
    _check_trunk(own)
    trunks: list[tuple[Forecast, list[Rank]]] = []
    refusals = []
    for first in range(len(others) - more + 1 if more else 1):
        chosen = own + others[first : first + more]
        each = [_costs(trunk_profile(profiles[one.setup.quantisation]), request, caches) for one in chosen]
        try:
            candidates = _candidates(chosen, each, memory)
            blocks = blocks_of(caches, each[0], [one.setup for one in chosen])
            each = [with_blocks(profile, blocks) for profile in each]
            ranks = _ranks(chosen, candidates, await planner.shares(each, candidates, blocks.room))
        except PlanError as error:
            refusals.append(error)
        else:
            trunks.append((hosting.forecast(ranks, [candidate.speed for candidate in candidates]), ranks))
    if not trunks:
        raise refusals[0]
    return [ranks for _, ranks in sorted(trunks, key=lambda trunk: trunk[0])]


def _check_trunk(chosen: Sequence[Participant]) -> None:
    """
    Raises:
        LayoutError: a node that an engine is given for has a rank of the trunk, and cannot.
    """
    for one in chosen:
        if not one.may_be_trunk:
            able = " or ".join(map(repr, one.node.capabilities.expert_engines)) or "of another node"
            raise LayoutError(
                f"engine {one.setup.engine!r} of node {one.node.name!r} cannot have experts elsewhere; use engine"
                f" {able}, or experts 'sliced'"
            )


def _candidates(
    participants: Sequence[Participant],
    profiles: Sequence[ModelProfile],
    memory: Memory,
    shares: Sequence[float] = (),
    draft: Draft | None = None,
) -> list[Candidate]:
    """What each node offers for a rank: speed and memory of its processor are divided among the ranks there, those of
    its GPU among those on it, after what these need of the node's own memory; shares are for each.

    Args:
        draft: what the first node has beside its ranks.

    Raises:
        PlanError: beside a GPU there is no room for what a rank on it needs of its node.
        ServingError: nobody knows how fast a GPU is.
    """
    ranks_on = Counter((one.node.id, one.setup.on_gpu) for one in participants)
    in_host_memory = Counter(one.node.id for one in participants if one.setup.on_host_memory)
    beside_gpu = Counter[str]()
    for one, profile in zip(participants, profiles, strict=True):
        if not one.setup.on_host_memory:
            beside_gpu[one.node.id] += profile.fixed_bytes
    by_hand: Sequence[float | None] = shares or [None] * len(participants)
    candidates = []
    for one, share in zip(participants, by_hand, strict=True):
        node, ranks = one.node, ranks_on[one.node.id, one.setup.on_gpu]
        beside = draft if draft and node is participants[0].node else None
        name, needed = node.name, beside_gpu[node.id]
        host = max(0, memory.free(node) - (beside.host_bytes if beside else 0))
        free = max(0, host - needed) // max(1, in_host_memory[node.id])
        if one.setup.on_gpu:
            if host < needed:
                raise PlanError(
                    f"{name}: a rank on its GPU needs {human_bytes(needed)} of the machine's own memory;"
                    f" {human_bytes(host)} are free"
                )
            if not one.speed and share is None and len(participants) > 1:
                message = f"the driver of node {name!r} does not tell how fast the memory of its GPU is: give shares"
                raise refusal("invalid_request", message)
            offer = memory.on_gpu(node, beside.gpu_bytes if beside else 0)
            room, name = offer.room // ranks, offer.told(name)
            if one.setup.on_host_memory and free < room:
                name = f"{node.name}, {offer.gpu.name} (in the machine's own memory)"
                room = free
            free = room
        candidates.append(one.offer(name, free, ranks, share))
    return candidates


def _ranks(
    participants: Sequence[Participant], candidates: Sequence[Candidate], plans: Sequence[RankPlan]
) -> list[Rank]:
    return [
        Rank(index, one.node.id, one.node.name, candidate.memory, plan, one.setup)
        for index, (one, candidate, plan) in enumerate(zip(participants, candidates, plans, strict=True))
    ]
