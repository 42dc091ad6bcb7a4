"""A plan's step on its way through the ranks: the message that tells it, and what is still to be chosen of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from motley.daemon.rank.scheduling.client import Client
from motley.daemon.rank.scheduling.plan import Part, Plan
from motley.daemon.rank.scheduling.request import Request
from motley.daemon.rank.steps import SpanPlan, Step
from motley.daemon.sampling.choice import initial_want


@dataclass
class Decision:
    """Next tokens of a request that are to be chosen.

    Attributes:
        told: for each wanted row of its part, the summaries by rank.
        row: the one that is next; before it, guesses were right.
    """

    part: Part
    told: list[Sequence[bytes]]
    row: int = 0


@dataclass(frozen=True)
class UnderWay:
    """A step that the ranks compute.

    Attributes:
        began, planned: when its plan was begun and done, by `time.perf_counter`.
    """

    plan: Plan
    began: float
    planned: float


def step_of(plan: Plan, clients: Mapping[Request, Client]) -> Step:
    """The message for a plan's step.

    Args:
        clients: of its requests.
    """
    tokens = [*chain.from_iterable(part.tokens for part in plan.parts)]
    spans = [_span(part, clients[part.request]) for part in plan.parts]
    return Step(spans, np.array(tokens, np.int32), plan.halved)


def _span(part: Part, client: Client) -> SpanPlan:
    want = initial_want(client.params) if part.wanted else 0
    blocks, windowed = (np.array(numbers, np.int32) for numbers in (part.blocks, part.windowed))
    allowed = None
    if client.constraint is not None and part.wanted:
        allowed = client.constraint.masks(client.answer, part.tokens[len(part.tokens) - part.guesses :])
    return SpanPlan(part.request.slot, part.position, len(part.tokens), part.wanted, want, blocks, windowed, allowed)
