"""What would fit of a model that does not: with fewer adapters, in a shorter context or smaller caches, or in narrower
caches or weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from motley.orchestrator.mesh.nodes import NodeTable
from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.cutting.shares import PlanError
from motley.orchestrator.planning.draft import Draft, plan_draft
from motley.orchestrator.planning.experts.layout import LayoutError
from motley.orchestrator.planning.placement.terms import PlacementError
from motley.orchestrator.planning.setup import SetupError
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.errors import DescriptionError, ServingError
from motley.orchestrator.serving.plans.descriptions import Descriptions, Profiles
from motley.orchestrator.serving.plans.layouts import Layouts
from motley.orchestrator.serving.plans.participants import able_hosts, wanted_model
from motley.orchestrator.serving.plans.taking_part import Participant, UnableError, taking_part
from motley.orchestrator.session_request import CACHE_FORMATS, CacheFormat, Quantisation, SessionRequest
from motley.orchestrator.sessions.session import Session
from motley.protocol.mesh_pb2 import ModelProfile, ModelSpec
from motley.protocol.wording import counted

HINT_S = 10.0
"""Where a model does not fit, what would is looked for no longer than this."""
TOKENS_STEP = 256
"""The largest context, or number of cache tokens, that would fit is told in such steps."""
NARROWER: Mapping[Quantisation, tuple[Quantisation, ...]] = {
    "fp32": ("int8", "int4"),
    "fp16": ("int8", "int4"),
    "stored": ("int4",),
    "int8": ("int4",),
}
"""What a model that does not fit may be quantised to."""
WIDE_BITS = 6
"""Weights of fewer bits in the mean are about as narrow as can be: int4, scales among them."""


class _Trial(NamedTuple):
    """Another request than the one that does not fit, or that one itself, which may fit in a shorter context.

    Attributes:
        told: how it differs, to follow "It fits".
        kind: what it tries, to follow "It does not fit in".
    """

    request: SessionRequest
    told: str = ""
    kind: str = "a shorter context"


def _trials(request: SessionRequest) -> Iterator[_Trial]:
    """What is tried for a request that does not fit, in the order of what answers lose by it."""
    yield _Trial(request)
    for caches in narrower_caches(request):
        yield _Trial(replace(request, cache_format=caches), f"with caches in {caches}", "narrower caches")
    everywhere = " on every node" if request.quantisations else ""
    for weights in NARROWER.get(request.quantisation, ()):
        narrower = replace(request, quantisation=weights, quantisations={})
        yield _Trial(narrower, f"quantised to {weights}{everywhere}", "narrower weights")


def narrower_caches(request: SessionRequest) -> Sequence[CacheFormat]:
    """What keys and values could be kept as in less memory than a request has them in."""
    return CACHE_FORMATS[CACHE_FORMATS.index(request.cache_format) + 1 :]


def takes_less(request: SessionRequest, profile: ModelProfile) -> str:
    """What takes less memory than a request that does not fit, where nobody tries what would fit; for people."""
    weights = profile.mlp_units * profile.mlp_unit_bytes + profile.vocabulary_units * profile.vocabulary_unit_bytes
    weights += profile.kv_groups * (profile.attention_query_bytes + profile.attention_kv_bytes)
    ways = ["a shorter context"]
    if caches := narrower_caches(request):
        ways.append(f"caches in {' or '.join(caches)}")
    if 8 * weights > WIDE_BITS * profile.parameters and (narrower := NARROWER.get(request.quantisation)):
        ways.append(f"weights in {' or '.join(narrower)}")
    return f"What takes less: {', '.join(ways)}."


class Fitting:
    """Looks for what would fit by laying out one session after another that nobody has asked for."""

    def __init__(self, nodes: NodeTable, descriptions: Descriptions, layouts: Layouts, carrier: Carrier) -> None:
        self._nodes = nodes
        self._descriptions = descriptions
        self._layouts = layouts
        self._carrier = carrier

    async def hint(
        self,
        session: Session,
        participants: Sequence[Participant],
        spec: ModelSpec,
        profiles: Profiles,
        caches: Caches,
        draft: Draft | None,
    ) -> str:
        """What would fit of a session that does not, for people. Empty where it is nodes that are missing, and where
        nobody found out: within `HINT_S`, and with the nodes that were asked for.

        Raises:
            ServingError: the session was closed meanwhile.
        """
        if session.request.replicas > max(1, len(able_hosts(session.request, self._nodes))):
            return ""
        ways, none = list[str](), ""
        with contextlib.suppress(TimeoutError, ServingError):
            async with asyncio.timeout(HINT_S):
                none = await self._look(session, participants, spec, profiles, caches, draft, ways)
        self._carrier.check_planning(session)
        if not all(one.node.alive for one in participants):
            return ""
        return f"It fits {', or '.join(ways)}." if ways else none

    async def _look(
        self,
        session: Session,
        participants: Sequence[Participant],
        spec: ModelSpec,
        profiles: Profiles,
        caches: Caches,
        draft: Draft | None,
        ways: list[str],
    ) -> str:
        """Add the `ways` in which it would fit, to follow "It fits", as they are found; what to say without any."""
        request = session.request
        tried, most = list[str](), 0
        if request.adapters and (fewer := await self._fewer_adapters(session, spec, profiles, caches, draft)):
            ways.append(fewer)
        for trial in _trials(request):
            # Models and nodes that cannot do that.
            with contextlib.suppress(DescriptionError, LayoutError, SetupError, UnableError):
                if trial.request is not request:
                    own = [taking_part(trial.request, one.node, one.setup.engine) for one in participants]
                    spec = wanted_model(trial.request, own)
                    profiles = await self._descriptions.describe(session, spec, own[0].node)
                tried.append(trial.kind)
                fits = await self._most_tokens(session, trial.request, spec, profiles, caches, draft)
                if trial.request is request and fits >= caches.tokens:
                    return ""  # it fits by now, or with nodes that take no part
                if fits > most:
                    most = fits
                    smaller = _smaller(caches, fits) if fits < caches.tokens else ""
                    ways.append(" ".join(filter(None, (trial.told, smaller))))
        return f"It does not fit in {' or '.join(dict.fromkeys(tried))}."

    async def _fewer_adapters(
        self, session: Session, spec: ModelSpec, profiles: Profiles, caches: Caches, draft: Draft | None
    ) -> str:
        """How many adapters there could be room for, of those that a session asks for, or of which rank for a single
        one; empty: it does not fit without any."""
        request = session.request

        async def most(below: int, trial: Callable[[int], SessionRequest]) -> int:
            """The largest number with which it fits; 0: none."""
            low, high = 0, below
            while high - low > 1:
                await asyncio.sleep(0)  # between two layouts it is everybody's turn
                middle = (low + high) // 2
                try:
                    await self._layouts.lay_out(session, trial(middle), spec, profiles, caches, draft)
                except (PlanError, PlacementError):
                    high = middle
                else:
                    low = middle
            return low

        if fewer := await most(request.adapters, lambda count: replace(request, adapters=count)):
            return f"with room for {counted(fewer, 'adapter')} of rank {request.adapter_rank}"
        if rank := await most(request.adapter_rank, lambda rank: replace(request, adapters=1, adapter_rank=rank)):
            return f"with room for {counted(1, 'adapter')} of rank {rank}"
        return "without room for adapters" if await most(2, lambda _: replace(request, adapters=0)) else ""

    async def _most_tokens(
        self,
        session: Session,
        request: SessionRequest,
        spec: ModelSpec,
        profiles: Profiles,
        caches: Caches,
        draft: Draft | None,
    ) -> int:
        """How many tokens the caches could hold, of a context that is shortened only where they hold less: all of
        `caches` or a multiple of `TOKENS_STEP`; 0: none fit."""

        async def fits(tokens: int) -> bool:
            await asyncio.sleep(0)  # between two layouts it is everybody's turn
            context = min(tokens + caches.far_tokens, caches.context)
            fewer = replace(caches, context=context, tokens=tokens)
            beside = plan_draft(draft.spec, draft.profile, draft.setup, fewer) if draft else None
            try:
                await self._layouts.lay_out(session, request, spec, profiles, fewer, beside)
            except (PlanError, PlacementError):
                return False
            return True

        if await fits(caches.tokens):
            return caches.tokens
        low, high = 0, -(-caches.tokens // TOKENS_STEP)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if await fits(middle * TOKENS_STEP) else (low, middle)
        return low * TOKENS_STEP


def _smaller(caches: Caches, tokens: int) -> str:
    """What to ask for in place of `caches`, where no more than so many tokens fit."""
    longest = tokens + caches.far_tokens
    if caches.context == caches.tokens and not caches.far_tokens:
        return f"with a context of {tokens}"
    if longest >= caches.context:
        return f"with {tokens} cache tokens"
    return f"with a context of {longest} and {tokens if caches.far_tokens else 'as many'} cache tokens"
