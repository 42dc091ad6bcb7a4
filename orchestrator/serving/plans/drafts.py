"""The draft model of a session: what it costs on the node of rank 0, which computes it."""

from __future__ import annotations

from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.draft import Draft, plan_draft
from motley.orchestrator.serving.plans.descriptions import Descriptions
from motley.orchestrator.serving.plans.participants import Participant, draft_setup
from motley.orchestrator.sessions.assignments import draft_spec
from motley.orchestrator.sessions.session import Session


async def describe_draft(descriptions: Descriptions, session: Session, first: Participant, caches: Caches) -> Draft:
    """The model that is to guess tokens beside the rank of the first participant, which is rank 0.

    Raises:
        ServingError: the node has no such model or engine, the model's tokenizer is not that of the session's, or the
            session was closed meanwhile.
    """
    setup = draft_setup(session.request, first)
    spec = draft_spec(session.request, setup.quantisation)
    profile = await descriptions.describe_draft(session, spec, first.node)
    return plan_draft(spec, profile, setup, caches)
