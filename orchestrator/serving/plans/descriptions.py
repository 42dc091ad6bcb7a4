"""Asking a node that has a model's files what the model costs, which may mean that it downloads them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.nodes import Node, what_became
from motley.orchestrator.serving.errors import DescriptionError, ServingError, refusal
from motley.orchestrator.serving.plans.copies import MISSING, Copies, check_copies
from motley.orchestrator.sessions.session import Session
from motley.protocol.mesh_pb2 import (
    Cancel,
    Describe,
    Described,
    Failure,
    ModelProfile,
    ModelSpec,
    OrchestratorMessage,
)

DESCRIBE_S = 6 * 3600.0
"""Describing a model may mean downloading it; the loss of the node ends the wait."""

LOOK_S = 10.0
"""Nodes that do not say what they have of a model, so long after it was described, are not waited for."""

Profiles = Mapping[str, ModelProfile]
"""What a model costs, by quantisation."""


@dataclass(frozen=True)
class _Question:
    """What one node is asked for a session, and its answer once it has come."""

    session: Session
    node: Node
    answer: asyncio.Future[Described]


class Descriptions:
    """Which nodes are describing a model, each for a session in planning."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._questions: dict[str, _Question] = {}
        """By an id of their own."""

    async def describe(self, session: Session, spec: ModelSpec, node: Node) -> Profiles:
        """What a session's model costs in each of its quantisations.

        Raises:
            DescriptionError: the model cannot be served.
            ServingError: the session was closed, the node is lost or says nothing of use.
        """
        return self._profiles(session, spec, node, await self._described(session, spec, node))

    async def survey(
        self, session: Session, spec: ModelSpec, nodes: Sequence[Node], there: Iterable[Node], *, in_part: bool = False
    ) -> tuple[Profiles, Copies]:
        """What a session's model costs, as the first node says that has it, and what all of them have of it, as far as
        they say so in time.

        Args:
            nodes: that may take part.
            there: all nodes: where none of the former has the model, these are asked too.
            in_part: of a model on the hub, nobody is to fetch more than tells what it costs.

        Raises:
            DescriptionError: the model cannot be served.
            ServingError: the session was closed, no node has such a model (the message names all that have none), or
                the node that is asked is lost or says nothing of use.
        """
        first, *others = {node.id: node for node in nodes}.values()
        copies: dict[str, Described] = {}
        looks = [asyncio.create_task(self._look(session, spec, node, copies)) for node in others]
        try:
            described = copies[first.name] = await self._described(session, spec, first, in_part=in_part)
            if looks and described.failure.code in ("", MISSING):
                await asyncio.wait(looks, timeout=LOOK_S)
        finally:
            for task in looks:
                task.cancel()
        if described.failure.code == MISSING:
            own = {node.id: node for node in nodes}
            more = [node for node in there if node.alive and node.id not in own]
            if more and not any(each.profile.fingerprint for each in copies.values()):
                copies |= await self.look(session, spec, more, LOOK_S)
            having = (node for node in (*own.values(), *more) if copies.get(node.name, Described()).profile.fingerprint)
            lender = next(having, None)
            if lender is None:
                check_copies(session.request.model, copies, [node.name for node in own.values()])
            else:
                first, described = lender, await self._described(session, spec, lender, in_part=in_part)
        return self._profiles(session, spec, first, described), copies

    async def look(self, session: Session, spec: ModelSpec, nodes: Sequence[Node], within_s: float) -> Copies:
        """What nodes have of a session's model, as far as they say so in time."""
        copies: dict[str, Described] = {}
        looks = [asyncio.create_task(self._look(session, spec, node, copies)) for node in nodes]
        try:
            if looks:
                await asyncio.wait(looks, timeout=within_s)
        finally:
            for task in looks:
                task.cancel()
        return copies

    async def _look(self, session: Session, spec: ModelSpec, node: Node, copies: dict[str, Described]) -> None:
        """Note what a node has of a model, unless it is lost, or the session was closed."""
        with contextlib.suppress(ServingError):
            copies[node.name] = await self._ask(session, node, Describe(model=spec, only_here=True))

    async def describe_draft(self, session: Session, spec: ModelSpec, node: Node) -> ModelProfile:
        """What a draft model of a session costs.

        Raises:
            DescriptionError: it cannot be served, or its tokenizer is not that of the session's model.
            ServingError: as `describe`.
        """
        tokens_of = "" if spec.ahead else session.request.model
        described = await self._described(session, spec, node, tokens_of=tokens_of)
        try:
            profile = self._profiles(session, spec, node, described)[spec.quantisation]
        except ServingError as error:
            error.failure.param = "draft_model"
            raise
        if profile.state_bytes:
            message = f"{profile.name} has layers with recurrent states: it can be no draft model; take another or none"
            raise refusal("unsupported_model", message, "draft_model")
        return profile

    async def _described(
        self, session: Session, spec: ModelSpec, node: Node, tokens_of: str = "", *, in_part: bool = False
    ) -> Described:
        """A node's description of a model, which may have to have the tokenizer of another; errors as `describe`."""
        try:
            async with asyncio.timeout(DESCRIBE_S):
                return await self._ask(session, node, Describe(model=spec, tokens_of=tokens_of, in_part=in_part))
        except TimeoutError as error:
            message = f"node {node.name!r} did not describe {spec.source!r} within {DESCRIBE_S:.0f} s"
            raise refusal("timed_out", message) from error

    def _profiles(self, session: Session, spec: ModelSpec, node: Node, described: Described) -> Profiles:
        """What a node has said, if it can be used; errors as `describe`."""
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
            raise refusal("invalid_profile", f"node {node.name!r} described {spec.source!r} incompletely")
        profiles[0].matrices = "; on other ranks ".join(profile.matrices for profile in profiles)
        return dict(zip((spec.quantisation, *spec.beside), profiles, strict=True))

    async def _ask(self, session: Session, node: Node, describe: Describe) -> Described:
        """Ask a node, which is told when nobody waits for its answer any more; errors as `describe`."""
        describe.request_id = secrets.token_hex(8)
        question = _Question(session, node, asyncio.get_running_loop().create_future())
        self._questions[describe.request_id] = question
        self._control.send(node.id, OrchestratorMessage(describe=describe))
        answered = False
        try:
            described = await question.answer
            answered = True
            return described
        finally:
            del self._questions[describe.request_id]
            if not answered:
                self._control.send(node.id, OrchestratorMessage(cancel=Cancel(request_id=describe.request_id)))

    def on_described(self, node: Node, described: Described) -> None:
        """A node says what a model costs; ignored if it was not asked."""
        question = self._questions.get(described.request_id)
        if question is not None and question.node is node and not question.answer.done():
            question.answer.set_result(described)

    def on_lost(self, node: Node) -> None:
        """A node will not answer any more."""
        for question in self._questions.values():
            if question.node is node and not question.answer.done():
                question.answer.set_exception(refusal("node_lost", f"node {node.name!r} {what_became(node.lost)}"))

    def cancel(self, session: Session, why: ServingError) -> None:
        """Nobody waits any more for what a session's model costs."""
        for question in self._questions.values():
            if question.session is session and not question.answer.done():
                question.answer.set_exception(why)


def _units(profile: ModelProfile) -> tuple[object, ...]:
    """What does not depend on how a model is held."""
    splits = tuple(profile.attention_splits)
    return splits, profile.kv_groups, profile.mlp_units, profile.vocabulary_units, profile.fingerprint
