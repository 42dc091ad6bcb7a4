"""Asking a node that has a model's files what the model costs, which may mean that it downloads them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from motley.orchestrator.control import Control
from motley.orchestrator.nodes import Node, what_became
from motley.orchestrator.serving.errors import DescriptionError, ServingError, refusal
from motley.orchestrator.sessions import Session
from motley.protocol.mesh_pb2 import Describe, Described, Failure, ModelProfile, ModelSpec, OrchestratorMessage

DESCRIBE_S = 6 * 3600.0
"""Describing a model may mean downloading it; the loss of the node ends the wait."""

Profiles = Mapping[str, ModelProfile]
"""What a model costs, by quantisation."""


class Descriptions:
    """Which nodes are describing a model, each for a session in planning."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._awaited: dict[str, tuple[Node, asyncio.Future[Described]]] = {}
        """By session: the node that is asked, and what it will say."""

    async def describe(self, session: Session, spec: ModelSpec, node: Node) -> Profiles:
        """What a session's model costs in each of its quantisations.

        Raises:
            DescriptionError: the model cannot be served.
            ServingError: the session was closed, the node is lost or says nothing of use.
        """
        model = session.request.model
        future: asyncio.Future[Described] = asyncio.get_running_loop().create_future()
        self._awaited[session.id] = node, future
        self._control.send(node.id, OrchestratorMessage(describe=Describe(request_id=session.id, model=spec)))
        try:
            async with asyncio.timeout(DESCRIBE_S):
                described = await future
        except TimeoutError as error:
            message = f"node {node.name!r} did not describe {model!r} within {DESCRIBE_S:.0f} s"
            raise refusal("timed_out", message) from error
        finally:
            del self._awaited[session.id]
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
            raise refusal("invalid_profile", f"node {node.name!r} described {model!r} incompletely")
        profiles[0].matrices = "; on other ranks ".join(profile.matrices for profile in profiles)
        return dict(zip((spec.quantisation, *spec.beside), profiles, strict=True))

    def on_described(self, node: Node, described: Described) -> None:
        """A node says what a model costs; ignored if it was not asked."""
        asked, future = self._awaited.get(described.request_id, (None, None))
        if future is not None and asked is node and not future.done():
            future.set_result(described)

    def on_lost(self, node: Node) -> None:
        """A node will not answer any more."""
        for asked, future in self._awaited.values():
            if asked is node and not future.done():
                future.set_exception(refusal("node_lost", f"node {node.name!r} {what_became(node.lost)}"))

    def cancel(self, session: Session, why: ServingError) -> None:
        """Nobody waits any more for what a session's model costs."""
        _, future = self._awaited.get(session.id, (None, None))
        if future is not None and not future.done():
            future.set_exception(why)


def _units(profile: ModelProfile) -> tuple[object, ...]:
    """What does not depend on how a model is held."""
    splits = tuple(profile.attention_splits)
    return splits, profile.kv_groups, profile.mlp_units, profile.vocabulary_units, profile.fingerprint
