"""The draft model of a session: what it costs on the node of rank 0, which computes it."""

from __future__ import annotations

from collections.abc import Iterable

from motley.orchestrator.mesh.nodes import Node
from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.draft import Draft, plan_draft
from motley.orchestrator.serving.errors import DescriptionError, ServingError, refusal
from motley.orchestrator.serving.plans.copies import MISSING
from motley.orchestrator.serving.plans.descriptions import Descriptions
from motley.orchestrator.serving.plans.participants import draft_setup
from motley.orchestrator.serving.plans.taking_part import Participant
from motley.orchestrator.sessions.assignments import draft_spec
from motley.orchestrator.sessions.session import Session


async def describe_draft(
    descriptions: Descriptions, session: Session, first: Participant, there: Iterable[Node], caches: Caches
) -> tuple[Draft, Node]:
    """The model that is to guess tokens beside the rank of the first participant, which is rank 0, and the node that
    has it: that one, or the first of those that are there.

    Raises:
        ServingError: no node has both the draft model and the session's, or that node has no such engine, the model's
            tokenizer is not that of the session's, or the session was closed meanwhile.
    """
    setup = draft_setup(session.request, first)
    spec = draft_spec(session.request, setup.quantisation)
    missing = None
    for node in [first.node, *(node for node in there if node is not first.node)]:
        if not node.alive:
            continue
        try:
            profile = await descriptions.describe_draft(session, spec, node)
        except ServingError as error:
            lacks = isinstance(error, DescriptionError) and error.failure.code == MISSING
            if node is first.node and not lacks:
                raise  # of another node, which need not take part, any fault only says that it does not help
            missing = missing or error
        else:
            return plan_draft(spec, profile, setup, caches), node
    raise missing or refusal("node_lost", f"node {first.node.name!r} is lost", "draft_model")
