"""How a node takes part in a session: the engine of its rank, and what that offers. Pure.

Where a request leaves the engine open (``auto``) it is one on the node's GPU, if that can do all that is asked for and
has memory of its own that is faster than the processor's; else the processor's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from motley.orchestrator.mesh.nodes import Node
from motley.orchestrator.planning.cost import ATTENTION_CALLS, MLP_CALLS
from motley.orchestrator.planning.cutting.shares import Candidate, PlanError
from motley.orchestrator.planning.setup import (
    HANDS,
    SKILLS,
    Setup,
    SetupError,
    lacking_format,
    lacking_skill,
    setup_of,
    speed_of,
)
from motley.orchestrator.session_request import AUTO, ON_GPU, ON_PROCESSOR, SessionRequest
from motley.protocol.mesh_pb2 import FormatSpeed
from motley.protocol.versions import has_two_tiers

_Found = TypeVar("_Found")

OLDER = "its Motley is older than that: `motley update` says how to update it"
"""Why a node cannot do what came with a later version."""


@dataclass(frozen=True)
class Participant:
    """A node that is to have one rank of a session; a node that is to have two is there twice."""

    node: Node
    setup: Setup

    @property
    def speed(self) -> float:
        """Bytes/s that the device reads on which its rank computes, of weights in the rank's format; 0: not known."""
        if not self.setup.on_gpu:
            return self._measured.bytes_per_s if self._measured else self.node.capabilities.memory_bandwidth
        return self.setup.memory_bandwidth or self.node.gpus[0].memory_bandwidth

    @property
    def row_speed(self) -> float:
        """Bytes/s of weights, times the rows that they are multiplied by, in a step of many; 0: not measured."""
        if self.setup.on_gpu:
            return self.setup.row_speed
        return self._measured.row_bytes_per_s if self._measured else 0.0

    @property
    def call_s(self) -> float:
        """Seconds that a small operation takes between two products; 0: not measured."""
        if self.setup.on_gpu:
            return self.setup.layer_s / (ATTENTION_CALLS + MLP_CALLS)
        return self.node.capabilities.call_s

    @property
    def host_s(self) -> float:
        """Seconds in which what is summed gets to the host and back; 0: it is there, or nobody knows."""
        return self.setup.host_s if self.setup.on_gpu else 0.0

    def offer(self, name: str, memory: int, ranks: int, share: float | None = None) -> Candidate:
        """What it offers for a rank, if its device is divided among so many.

        Args:
            name: for messages.
            memory: bytes that the rank may use.
            share: of the model, given by hand; None: by its speed.
        """
        return Candidate(
            name,
            self.speed / ranks or 1.0,
            memory,
            share,
            row_speed=self.row_speed / ranks,
            call_s=self.call_s,
            host_s=self.host_s,
            cache_speed=self.setup.cache_bandwidth / ranks,
        )

    @property
    def _measured(self) -> FormatSpeed | None:
        """How fast the node's processor computes in the rank's format."""
        return speed_of(self.node.capabilities.speeds, self.setup.quantisation)

    @property
    def may_be_trunk(self) -> bool:
        """Whether the node's rank can compute with experts that are elsewhere."""
        return self.setup.engine in self.node.capabilities.expert_engines


class UnableError(Exception):
    """A node cannot have a rank as a request wants it. `field` is what asks for it, `code` stable, for clients."""

    def __init__(self, code: str, message: str, field: str) -> None:
        super().__init__(message)
        self.code, self.field = code, field


class TakenBackError(UnableError):
    """Somebody has taken back what the rank would compute on; `why` is to follow the name of the node."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__("device_leased", f"node {node!r} {why}", "nodes")
        self.why = why


def taking_part(request: SessionRequest, node: Node, engine: str) -> Participant:
    """A node with a rank by this engine, as a request has it; ``auto`` stands for the best that the node has.

    Raises:
        TakenBackError: somebody has taken back what it would compute on.
        UnableError: the node has no such engine, it cannot run there, or it cannot do what the request asks for.
    """
    if engine != AUTO:
        return _by(request, node, engine)
    on_processor = refused = None
    try:
        on_processor = _by(request, node, ON_PROCESSOR)
    except UnableError as error:  # it was taken back, say
        refused = error
    found = _on_gpu(request, node, on_processor)
    if isinstance(found, Participant):
        return found
    if on_processor is None:
        assert refused is not None
        raise refused
    return _chosen(on_processor, found)


def _on_gpu(request: SessionRequest, node: Node, on_processor: Participant | None) -> Participant | str:
    """A node with a rank on its GPU, or why it has none, to follow the name of the node; empty: it shows no GPU.

    Args:
        on_processor: the same with a rank on its processor; None: it can have none.
    """
    if not node.gpus:
        return ""
    gpu = node.gpus[0]
    if request.exact or request.wants_parallel:
        asked = "exact sums" if request.exact else "experts on nodes of their own"
        return f"computes on its processor: engines on its GPU, {gpu.name}, cannot have {asked}"
    reasons = []
    for engine in ON_GPU:
        if failed := node.failed_engines.get((engine, request.model, request.cache_format)):
            reasons.append(f"{engine!r} has failed with this model: {failed.why}")
            continue
        try:
            there = _by(request, node, engine)
        except UnableError as error:
            reasons += [str(error)] if error.code != "unknown_engine" else []
            continue
        if request.has_own_head and (lacking := lacking_skill(node.name, node.capabilities, engine, HANDS)):
            reasons.append(lacking)  # and any node may come to be the first
            continue
        if there.setup.on_host_memory:
            return f"computes on its processor: its GPU, {gpu.name}, has no memory of its own"
        if on_processor is None:
            return _chosen(there, f"computes on its GPU, {gpu.name}")
        if not there.speed:
            return f"computes on its processor: nobody knows how fast the memory of its GPU, {gpu.name}, is"
        if there.speed <= on_processor.speed:
            return f"computes on its processor: its GPU, {gpu.name}, computes no faster"
        faster = there.speed / on_processor.speed
        return _chosen(there, f"computes on its GPU, {gpu.name}, which computes {faster:.1f} x as fast")
    told = "; ".join(reasons) or f"it has none of engines {', '.join(map(repr, ON_GPU))}"
    return f"computes on its processor, not on its GPU, {gpu.name}: {told}"


def _by(request: SessionRequest, node: Node, engine: str) -> Participant:
    """A node with a rank by a certain engine; errors as `taking_part`."""
    setup = setup_on(request, node, engine, request.quantisations.get(node.name, request.quantisation))
    for field, skill in SKILLS.items():
        if getattr(request, field) and (lacking := lacking_skill(node.name, node.capabilities, engine, skill)):
            raise UnableError("unusable_engine", lacking, field)
    if request.cache_disk_tokens and request.cache_node_tokens and not has_two_tiers(node.protocol):
        message = f"node {node.name!r} cannot keep caches on its disk and on another node at a time: {OLDER}"
        raise UnableError("unusable_engine", message, "cache_node_tokens")
    return Participant(node, setup)


def setup_on(request: SessionRequest, node: Node, engine: str, quantisation: str) -> Setup:
    """How a certain engine computes on a node for a session, be it a rank or a draft model; errors as `taking_part`."""
    try:
        setup = setup_of(node.name, node.capabilities, engine, quantisation, request.options_of(engine))
    except SetupError as error:
        raise UnableError(error.code, str(error), "engine") from error
    if why := node.taken_back(setup.on_gpu):
        raise TakenBackError(node.name, why)
    if lacking := lacking_format(node.name, node.capabilities, engine, request.cache_format):
        raise UnableError("unusable_engine", lacking, "cache_format")
    return setup


def _chosen(one: Participant, why: str) -> Participant:
    return replace(one, setup=replace(one.setup, chosen=why))


def on_chosen_gpus(participants: Sequence[Participant]) -> bool:
    """Whether a rank would be on a GPU that no request has named."""
    return any(one.setup.chosen and one.setup.on_gpu for one in participants)


def ways_to_take_part(request: SessionRequest, participants: Sequence[Participant]) -> Iterator[list[Participant]]:
    """Who may have ranks, the best first: all participants; where a request leaves nodes and engines open, then the
    processors beside chosen GPUs too, for a model that is too large for these."""
    yield [*participants]
    if request.nodes or request.shares or request.engine != AUTO:
        return
    beside = []
    for one in participants:
        if on_chosen_gpus([one]):
            try:
                processor = _by(request, one.node, ON_PROCESSOR)
            except UnableError:
                continue
            beside.append(_chosen(processor, "computes on its processor, too, as the model does not fit its GPU"))
    if beside:
        yield [*participants, *beside]


async def first_that_fits(
    ways: Iterator[list[Participant]], plan: Callable[[list[Participant]], Awaitable[_Found]]
) -> _Found:
    """The first plan that is possible, by who may have ranks.

    Raises:
        PlanError: none is; the last one says why.
        Exception: what else `plan` raises.
    """
    last: PlanError | None = None
    for participants in ways:
        try:
            return await plan(participants)
        except PlanError as error:
            last = error
    assert last is not None, "there is a way"
    raise last
