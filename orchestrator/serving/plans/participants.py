"""Which nodes take part in a session, and how: as a request names them, or as they are able to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from motley.orchestrator.mesh.nodes import Node, what_became
from motley.orchestrator.planning.setup import HANDS, Setup, SetupError, lacking_skill, setup_of
from motley.orchestrator.serving.errors import refusal, unknown_node
from motley.orchestrator.serving.plans.taking_part import (
    OLDER,
    Participant,
    TakenBackError,
    UnableError,
    setup_on,
    taking_part,
)
from motley.orchestrator.session_request import AUTO, Place, SessionRequest
from motley.orchestrator.sessions.assignments import model_spec
from motley.orchestrator.workers import Worker
from motley.protocol.address import is_loopback
from motley.protocol.mesh_pb2 import ModelSpec
from motley.protocol.versions import reads_ahead
from motley.protocol.wording import counted


def choose_participants(request: SessionRequest, nodes: Iterable[Node]) -> list[Participant]:
    """The node of every rank, in rank order: as the request names them; in the order they joined if it has only
    shares; else the fastest first. A node may be named more than once.

    Raises:
        ServingError: there is none, one is unknown or too many, an engine is unknown or cannot run, or only some of
            them can be reached from other machines.
    """
    alive = {node.name: node for node in nodes if node.alive}
    if request.nodes:
        for name, _ in request.places:
            if name not in alive:
                raise unknown_node(name, alive.values(), "nodes")
        chosen = [alive[place.node] for place in request.places]
    else:
        lent = {name: taken_back(request, node) for name, node in alive.items()}
        chosen = [alive[name] for name, why in lent.items() if not why]
        if alive and not chosen:
            told = "; ".join(f"node {name!r} {why}" for name, why in lent.items())
            raise refusal("device_leased", f"{told}: nothing may compute there until then", "nodes")
    if not chosen:
        raise refusal("no_nodes", "no node is in the mesh; start one with `motley join`")
    if request.shares and len(request.shares) != len(chosen):
        raise refusal(
            "invalid_request",
            f"{counted(len(request.shares), 'share')} given for {counted(len(chosen), 'rank')}"
            f" ({', '.join(node.name for node in chosen)}); give one for each",
            "shares",
        )
    _check_reachable(chosen)
    taking = {node.name for node in chosen}
    for field_name, own in (("engines", request.engines), ("quantisations", request.quantisations)):
        for name in sorted(own.keys() - taking):
            message = f"{field_name} names {name!r}, which takes no part; these do: {', '.join(sorted(taking))}"
            raise refusal("invalid_request", message, field_name)
    places = request.places or [Place(node.name, "") for node in chosen]
    participants = [participant(request, node, place) for node, place in zip(chosen, places, strict=True)]
    if not request.nodes and not request.shares:
        participants.sort(key=lambda each: -each.speed)
    return participants


def _check_reachable(chosen: Sequence[Node]) -> None:
    """
    Raises:
        ServingError: nodes on another machine would be told a loopback address, which leads them to themselves.
    """
    shut_in = {node.name: node.address for node in chosen if is_loopback(node.address)}
    others = sorted({node.name for node in chosen} - shut_in.keys())
    if shut_in and others:
        name, address = next(iter(shut_in.items()))
        raise refusal(
            "invalid_request",
            f"node {name!r} has the address {address}, at which {' and '.join(map(repr, others))} cannot reach it:"
            " its machine had no network when it joined. Start its daemon again, or with --advertise",
            "nodes",
        )


def taken_back(request: SessionRequest, node: Node) -> str:
    """Why a node can take no part as a request has it, as what it would compute on was taken back; empty: that is not
    in its way. To follow the node's name."""
    for place in [place for place in request.places if place.node == node.name] or [Place(node.name, "")]:
        try:
            taking_part(request, node, request.engine_at(place))
        except TakenBackError as error:
            return error.why
        except UnableError:
            continue
    return ""


def participant(request: SessionRequest, node: Node, place: Place) -> Participant:
    """A node with the engine and the quantisation that a request has for a rank on it.

    Raises:
        ServingError: the node has no such engine, it cannot run there, or it cannot keep caches as the request wants.
    """
    try:
        return taking_part(request, node, request.engine_at(place))
    except UnableError as error:
        by_name = "nodes" if place.engine else "engines" if node.name in request.engines else "engine"
        raise refusal(error.code, str(error), by_name if error.field == "engine" else error.field) from error


def draft_setup(request: SessionRequest, first: Participant) -> Setup:
    """How the draft model of a request is computed on the node of rank 0.

    Raises:
        ServingError: the node has no such engine, it cannot run there, or it cannot keep caches as the request wants.
    """
    node, engine = first.node, request.draft_engine or first.setup.engine
    try:
        setup = setup_on(request, node, engine, request.quantisation)
    except UnableError as error:
        raise refusal(error.code, str(error), "draft_engine") from error
    if request.has_own_head:
        for field, own in (("draft_model", first.setup.engine), ("draft_engine", engine)):
            if lacking := lacking_skill(node.name, node.capabilities, own, HANDS):
                raise refusal("unusable_engine", lacking, field)
        if not reads_ahead(node.protocol):
            message = f"node {node.name!r} cannot have the model's own head guess tokens: {OLDER}"
            raise refusal("unusable_engine", message, "draft_model")
    return setup


def able_hosts(request: SessionRequest, nodes: Iterable[Node]) -> list[Node]:
    """The nodes that may be expert hosts of a session: alive, able to, and named by the request if it names any."""
    named = {place.node for place in request.places}
    return [node for node in nodes if node.alive and _can_host(request, node) and (not named or node.name in named)]


def _can_host(request: SessionRequest, node: Node) -> bool:
    """Whether a node can compute single experts for a session."""
    try:
        setup = setup_of(node.name, node.capabilities, request.expert_engine, request.quantisation)
    except SetupError:
        return False
    return not node.taken_back(setup.on_gpu) and request.expert_engine in node.capabilities.expert_engines


def check_alive(participants: Sequence[Participant], planned: Iterable[Worker]) -> None:
    """Make sure that a plan is for nodes that are there.

    Raises:
        ServingError: a node that workers are planned on was lost meanwhile.
    """
    used = {worker.node_id for worker in planned}
    for node in (each.node for each in participants):
        if node.id in used and not node.alive:
            raise refusal("node_lost", f"node {node.name!r} {what_became(node.lost)}")


def wanted_model(request: SessionRequest, participants: Sequence[Participant]) -> ModelSpec:
    """The model as the ranks hold it. Where experts are asked to be on hosts, the quantisation of the session comes
    first, as that is how hosts hold them.

    Raises:
        SetupError: the first participant cannot run the engine of the session.
    """
    held = list(dict.fromkeys(each.setup.quantisation for each in participants))
    open_ = (one.node.name for one in participants if request.engine_at(Place(one.node.name, "")) == AUTO)
    if any(request.quantisations.get(name, request.quantisation) == "fp16" for name in open_):
        # A GPU that comes, or fails, changes which of them a node has.
        held += [each for each in ("fp16", "fp32") if each not in held]
    if request.named and request.wants_parallel:
        first = participants[0].node
        own = setup_of(first.name, first.capabilities, request.expert_engine, request.quantisation).quantisation
        held = [own, *(each for each in held if each != own)]
    return model_spec(request, held[0], held[1:])
