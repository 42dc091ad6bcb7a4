"""What all APIs that answer have in common: a request finds its session, is asked there, and may be taken up again."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from motley.orchestrator.adapters import NamedAdapter, listed, served_name
from motley.orchestrator.api.access.guard import CALLER
from motley.orchestrator.api.again import digest_of, idempotency_key, last_event
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.request_id import request_id
from motley.orchestrator.serving.answering.kept_answers import KeptAnswers
from motley.orchestrator.serving.answering.requests import Answers, Requests
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.store.usage import Usage
from motley.orchestrator.usual_sampling import fill
from motley.protocol.mesh_pb2 import Delta, Generate, Sampling


@dataclass(frozen=True)
class Given:
    """A request that is being answered.

    Attributes:
        session: that answers.
        model: what the client calls that, with the adapter that it has named.
        id, created: what the answer is called, and when it was asked for (Unix time).
        count: answers that there will be.
        sampling: how tokens of the first are chosen, with what the request did not say.
        answers: what comes of them.
        after: the number of the last event of a stream that the client has; None: its events have no numbers.
    """

    session: Session
    model: str
    id: str
    created: int
    count: int
    sampling: Sampling
    answers: Answers
    after: int | None


@dataclass(frozen=True)
class Served:
    """What serves a request.

    Attributes:
        adapter: that it is computed with; None: the model alone.
    """

    session: Session
    adapter: NamedAdapter | None = None

    @property
    def adapter_name(self) -> str:
        """Of the adapter; empty: there is none."""
        return self.adapter.name if self.adapter else ""

    @property
    def name(self) -> str:
        """What clients call it."""
        return served_name(self.session.name, self.adapter_name)

    @property
    def fingerprint(self) -> str:
        """Tells it from others, whatever they are called; embeddings of one model differ by how they are pooled."""
        model, pooling = self.session.profile.fingerprint, self.session.request.embeddings
        return " ".join([model, pooling or "answers", *([self.adapter.fingerprint] if self.adapter else [])])


class Asking:
    """Asks sessions for answers, as HTTP requests want them."""

    def __init__(self, sessions: SessionTable, requests: Requests, kept: KeptAnswers, usage: Usage) -> None:
        self._sessions = sessions
        self._requests = requests
        self._kept = kept
        self._usage = usage

    def served(self, model: str, adapter: str = "") -> Served:
        """What serves a model, or one with an adapter: ``base:adapter``.

        Args:
            adapter: its name, if the request gives it apart from the model's.

        Raises:
            ApiError: 404, nothing does; 400, the request names two adapters.
        """
        session, named = self._sessions.named(model), ""
        if session is None:
            base, _, named = model.rpartition(":")
            session = self._sessions.named(base) if base else None
        if session is None:
            served = ", ".join(s.name for s in self._sessions if s.takes_requests) or "none"
            message = f"no model named {model!r} is served; served: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if named and adapter and named != adapter:
            message = f"adapter {adapter!r} contradicts the model's name, {model!r}; give one of them"
            raise ApiError(400, message, param="adapter", code="invalid_value")
        wanted = adapter or named
        if not wanted:
            return Served(session)
        if wanted not in session.adapters:
            message = f"{session.name!r} has no adapter {wanted!r}; it has: {listed(session.adapters.values())}"
            raise ApiError(404, message, param="adapter" if adapter else "model", code="model_not_found")
        return Served(session, session.adapters[wanted])

    async def told_of_prompt(self, http: web.Request, model: str, generate: Generate) -> tuple[Session, Delta]:
        """What a session tells of a prompt that it is not to answer, and which session that is; errors as `answers`."""
        generate.only_prompt = True
        async with self.answers(http, model, [generate], "") as given:
            return given.session, (await next_delta(given.answers))[1]

    @asynccontextmanager
    async def answers(
        self,
        http: web.Request,
        model: str,
        each: Sequence[Generate],
        prefix: str,
        adapter: str = "",
        *,
        part: str = "",
    ) -> AsyncIterator[Given]:
        """Ask for answers. Leaving the context cancels those that are not complete.

        Args:
            each: what the leader is asked, for each answer; what has been asked before by the same key counts instead.
            prefix: of the answer's id.
            adapter: see `served`.
            part: names which part of a request this is, where one is asked for in several.

        Raises:
            ApiError: there is no such session, or it is for other answers.
            ServingError: it does not take the request, or an answer breaks off.
        """
        served = self.served(model, adapter)
        session = served.session
        _check_kind(session, each)
        if served.adapter is not None:
            for generate in each:
                generate.adapter.CopyFrom(served.adapter.message)
        kept, after = None, None
        id_, created = prefix + secrets.token_hex(12), int(time.time())
        try:
            if key := idempotency_key(http):
                after = last_event(http)
                # What somebody else has begun, another model or another adapter, is nothing to go on with.
                key = f"{key} {served.fingerprint} {part} {http[CALLER].name}"
                kept = await self._kept.take(key, await digest_of(http), id_)
                id_, created = kept.id, kept.created
                each = kept.generates or each
            for generate in each:
                generate.name = request_id(http)
                fill(generate.sampling, session.profile.sampling)
                generate.usual_tokens = generate.usual_tokens or session.profile.usual_tokens
            async with self._requests.generate(session, each, kept, served.adapter_name) as answers:
                try:
                    yield Given(session, served.name, id_, created, len(each), each[0].sampling, answers, after)
                finally:
                    self._usage.count(http[CALLER].name, served.name, answers.used)
        finally:
            if kept is not None:
                self._kept.let_go(kept)

    def places(self, session: Session) -> int:
        """How many answers a session takes at a time."""
        return self._requests.places(session).number


async def next_delta(answers: Answers) -> tuple[int, Delta]:
    """The next delta of answers that have not ended, and which it is of, for as long as that takes.

    Raises:
        ServingError: an answer breaks off.
    """
    came = await answers.next(math.inf)
    assert came is not None, "it waits for as long as it takes"
    return came


def _check_kind(session: Session, each: Sequence[Generate]) -> None:
    """Refuse answers of a session that embeds texts, and embeddings of one that answers.

    Raises:
        ApiError: 400.
    """
    embeds = bool(session.request.embeddings)
    if any(generate.embed != embeds and not generate.only_prompt for generate in each):
        does = (
            "was started to embed texts; ask POST /v1/embeddings"
            if embeds
            else (
                "was started to answer; for embeddings start a session with embeddings 'mean' or 'last'"
                " (motley run --embeddings)"
            )
        )
        raise ApiError(400, f"model {session.name!r} {does}", param="model", code="invalid_value")
