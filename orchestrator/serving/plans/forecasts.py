"""What a model is forecast to take: on nodes that are there, on others besides, and on those of a running session."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from motley.orchestrator.known_models.names import short_name_of
from motley.orchestrator.mesh.links import OWN_BANDWIDTH, OWN_LATENCY_S, LinkTable
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.planning.choosing.arrangement import Choice
from motley.orchestrator.planning.choosing.choice import Chooser, RunnersUp
from motley.orchestrator.planning.cost import Forecast, Workload, forecast
from motley.orchestrator.planning.cutting.shares import PlanError
from motley.orchestrator.planning.experts.layout import LayoutError, is_parallel
from motley.orchestrator.planning.machines import Machine
from motley.orchestrator.planning.setup import SetupError
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.errors import refusal
from motley.orchestrator.serving.plans.descriptions import Descriptions, Profiles
from motley.orchestrator.serving.plans.fitting import takes_less
from motley.orchestrator.serving.plans.memory import Memory
from motley.orchestrator.serving.plans.participants import choose_participants, taken_back, wanted_model
from motley.orchestrator.serving.plans.planner import Planner
from motley.orchestrator.serving.plans.ranks import check_together, network_of, team_of
from motley.orchestrator.serving.plans.sizes import caches_of
from motley.orchestrator.serving.plans.substitutes import among, anywhere
from motley.orchestrator.serving.plans.taking_part import (
    Participant,
    first_that_fits,
    on_chosen_gpus,
    ways_to_take_part,
)
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.workers import Rank
from motley.protocol.mesh_pb2 import ModelProfile
from motley.protocol.versions import describes_by_config
from motley.transport.schedules.forecast import Network


@dataclass(frozen=True)
class Planned:
    """A plan that nobody carries out.

    Attributes:
        profile: what the model costs.
        names: of all machines that were considered.
        choice: which of them take part, how, and what is expected.
        runners_up: what else there is.
        held: the quantisations that units suit, that of the session first.
    """

    profile: ModelProfile
    names: Sequence[str]
    choice: Choice
    runners_up: RunnersUp
    held: Sequence[str]


class Forecasts:
    """Plans sessions that nobody has asked to start."""

    def __init__(
        self,
        nodes: NodeTable,
        links: LinkTable,
        memory: Memory,
        descriptions: Descriptions,
        planner: Planner,
        carrier: Carrier,
    ) -> None:
        self._nodes = nodes
        self._links = links
        self._memory = memory
        self._descriptions = descriptions
        self._planner = planner
        self._carrier = carrier

    async def plan(
        self,
        request: SessionRequest,
        requests: int,
        machines: Sequence[Machine],
        *,
        alone: bool = False,
        config: str = "",
    ) -> Planned:
        """Plan a session as it would be if it started now.

        Args:
            requests: that are to be answered at a time.
            machines: that are not there, and take part as nodes do.
            alone: plan on these alone; a node that is there only tells what the model costs.
            config: the model's ``config.json``, if it is to be planned by this alone, without its files.

        Raises:
            ServingError: a node or engine is unknown, the model cannot be served or fitted, its experts would be on
                nodes of their own, or the orchestrator shuts down.
        """
        self._carrier.check_running()
        aside = self._nodes.set_aside(request.all_named)
        participants = choose_participants(request, [node for node in self._nodes if node.id not in aside])
        try:
            spec = wanted_model(request, participants)
            session = Session(secrets.token_hex(4), request, "", time.time())  # in no table: nobody is to wait for it
            there = [one.node for one in participants]
            if config:
                spec.source, spec.config_json = "", config
                profiles = await self._descriptions.describe(session, spec, _newest(there))
                for each in profiles.values():
                    each.name = short_name_of(request.model) or request.model  # its config does not tell it
            else:
                profiles, _ = await self._descriptions.survey(session, spec, there, self._nodes, in_part=True)
            profile = profiles[spec.quantisation]
            engines = {one.node.name: one.node.capabilities.expert_engines for one in participants}
            if not alone and is_parallel(request, profile, engines, on_gpus=on_chosen_gpus(participants)):
                message = "experts would be on nodes of their own, which is not forecast: ask for experts 'sliced'"
                raise refusal("invalid_request", message, "experts")

            async def chosen(taking: list[Participant]) -> tuple[Chooser, Choice]:
                chooser = self._chooser(request, profiles, taking, requests, machines, alone=alone)
                return chooser, await self._planner.choose(chooser)

            try:
                chooser, choice = await first_that_fits(ways_to_take_part(request, participants), chosen)
            except PlanError as error:
                raise refusal("insufficient_memory", f"{error}\n{takes_less(request, profile)}") from error
        except (LayoutError, SetupError) as error:
            raise refusal("invalid_request", str(error)) from error
        names = [each.name for each in chooser.candidates]
        held = (spec.quantisation, *spec.beside)
        return Planned(profile, names, choice, await self._planner.runners_up(chooser, choice), held)

    async def members_anew(self, session: Session) -> set[str]:
        """Names of the nodes that would take part in a session if it was planned now; errors as `anew`."""
        names, choice = await self._anew(session)
        return {names[number] for number in choice.members}

    async def anew(self, session: Session) -> Choice:
        """The best plan that a session without experts on hosts would get now, if it had none: on the nodes that its
        request names, as far as they are there, and nobody has taken them back.

        Raises:
            PlanError: there is none.
            ServingError: an engine that it names is not there.
        """
        return (await self._anew(session))[1]

    async def _anew(self, session: Session) -> tuple[list[str], Choice]:
        """As `anew`, with the names of all that were considered."""
        assert session.known is not None
        members = {worker.node_id for worker in session.workers}  # whoever has stayed goes on to take part
        aside = self._nodes.set_aside(session.request.all_named)
        aside -= members
        nodes = [node for node in self._nodes if node.id not in aside]
        there = {node.name for node in nodes if node.alive and not taken_back(session.request, node)}
        named = there & {place.node for place in session.request.places}
        request = among(session.request, there) if named else anywhere(session.request, there)
        participants = choose_participants(request, nodes)
        profiles, caches, memory = session.known.profiles, session.caches, self._memory.but_for(session)

        async def chosen(taking: list[Participant]) -> tuple[list[str], Choice]:
            team = team_of(request, profiles, caches, taking, memory)
            chooser = team.chooser(request, self._links, Workload(wire=request.wire), with_draft=False)
            return [one.node.name for one in team.participants], await self._planner.choose(chooser)

        return await first_that_fits(ways_to_take_part(request, participants), chosen)

    def _chooser(
        self,
        request: SessionRequest,
        profiles: Profiles,
        participants: Sequence[Participant],
        requests: int,
        machines: Sequence[Machine],
        *,
        alone: bool,
    ) -> Chooser:
        """Who chooses among nodes and machines that are not there; errors as `team_of`."""
        profile = profiles[participants[0].setup.quantisation]
        caches = caches_of(request, profile)
        work = Workload(rows=requests, wire=request.wire)
        try:
            team = None if alone else team_of(request, profiles, caches, participants, self._memory)
        except PlanError:
            if not machines:
                raise
            team = None  # no node that is there has room for a rank; one of these may
        if team is None:
            offers = [machine.offer for machine in machines]
            nowhere = Network([], [])
            room = caches.blocks(whole=False).room
            return Chooser(
                [profile] * len(offers), offers, room, _widened(nowhere, machines), work, stages=request.stages
            )
        there = team.chooser(request, self._links, work, with_draft=False)
        check_together([team.participants[number].node for number in there.required], self._links)
        names = [one.node.name for one in team.participants]
        offers = [replace(offer, name=name) for offer, name in zip(team.candidates, names, strict=True)]
        return replace(
            there,
            profiles=[*there.profiles, *[profile] * len(machines)],
            candidates=[*offers, *(machine.offer for machine in machines)],
            network=_widened(there.network, machines),
        )


def _newest(nodes: Sequence[Node]) -> Node:
    """A node that knows models by their config alone.

    Raises:
        ServingError: none does.
    """
    for node in nodes:
        if describes_by_config(node.protocol):
            return node
    names = ", ".join(node.name for node in nodes)
    why = f"the motley on {names} is too old to know a model by its sizes alone: update it (`motley update` says how)"
    raise refusal("outdated_node", why)


def _widened(network: Network, machines: Sequence[Machine]) -> Network:
    """A network with machines that are not there: between two of them the slower link counts."""
    before = len(network.latency)
    size = before + len(machines)

    def own(index: int, of_machine: str, otherwise: float) -> float:
        value: float = getattr(machines[index - before], of_machine) if index >= before else otherwise
        return value

    def latency(one: int, other: int) -> float:
        if max(one, other) < before:
            return network.latency[one][other]
        return OWN_LATENCY_S if one == other else max(own(each, "latency_s", 0.0) for each in (one, other))

    def bandwidth(one: int, other: int) -> float:
        if max(one, other) < before:
            return network.bandwidth[one][other]
        return OWN_BANDWIDTH if one == other else min(own(each, "bandwidth", OWN_BANDWIDTH) for each in (one, other))

    return Network(
        [[latency(one, other) for other in range(size)] for one in range(size)],
        [[bandwidth(one, other) for other in range(size)] for one in range(size)],
    )


def forecast_of(
    ranks: Sequence[Rank], profiles: Profiles, request: SessionRequest, nodes: NodeTable, links: LinkTable
) -> Forecast | None:
    """What a session's token is forecast to take; None: a node is gone, or how fast it is was not measured."""
    there = {node.id: node for node in nodes}
    if any(rank.node_id not in there for rank in ranks):
        return None
    own = [Participant(there[rank.node_id], rank.setup) for rank in ranks]
    if not all(one.speed and (one.setup.on_gpu or one.row_speed) for one in own):
        return None
    counts = [(one.node.id, one.setup.on_gpu) for one in own]
    candidates = [one.offer(one.node.name, 0, counts.count(key)) for one, key in zip(own, counts, strict=True)]
    network = network_of([one.node for one in own], links)
    each = [profiles[rank.setup.quantisation] for rank in ranks]
    return forecast(each, candidates, [rank.plan for rank in ranks], network, Workload(wire=request.wire))
