"""What all APIs that answer have in common: a request finds its session, is asked there, and may be taken up again."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from motley.orchestrator.api.again import digest_of, idempotency_key, last_event
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.guard import CALLER
from motley.orchestrator.serving.answering.kept_answers import KeptAnswers
from motley.orchestrator.serving.answering.requests import Answers, Requests
from motley.orchestrator.serving.errors import BusyError, ServingError
from motley.orchestrator.session_table import SessionTable
from motley.orchestrator.sessions import Session
from motley.orchestrator.store.usage import Usage
from motley.protocol.mesh_pb2 import Generate


@dataclass(frozen=True)
class Given:
    """A request that is being answered.

    Attributes:
        session: that answers.
        id, created: what the answer is called, and when it was asked for (Unix time).
        count: answers that there will be.
        answers: what comes of them.
        after: the number of the last event of a stream that the client has; None: its events have no numbers.
    """

    session: Session
    id: str
    created: int
    count: int
    answers: Answers
    after: int | None


class Asking:
    """Asks sessions for answers, as HTTP requests want them."""

    def __init__(self, sessions: SessionTable, requests: Requests, kept: KeptAnswers, usage: Usage) -> None:
        self._sessions = sessions
        self._requests = requests
        self._kept = kept
        self._usage = usage

    def session(self, model: str) -> Session:
        """The session that serves a model.

        Raises:
            ApiError: 404, none does.
        """
        session = self._sessions.named(model)
        if session is None:
            served = ", ".join(s.name for s in self._sessions if s.takes_requests) or "none"
            message = f"no model named {model!r} is served; served: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return session

    @asynccontextmanager
    async def answers(
        self, http: web.Request, model: str, each: Sequence[Generate], prefix: str
    ) -> AsyncIterator[Given]:
        """Ask for answers. Leaving the context cancels those that are not complete.

        Args:
            each: what the leader is asked, for each answer; what has been asked before by the same key counts instead.
            prefix: of the answer's id.

        Raises:
            ApiError: there is no such session, or it does not take the request, or an answer breaks off.
        """
        session = self.session(model)
        kept, after = None, None
        id_, created = prefix + secrets.token_hex(12), int(time.time())
        try:
            if key := idempotency_key(http):
                after = last_event(http)
                of_model = (
                    f"{key} {session.profile.fingerprint}"  # what another model has begun is nothing to go on with
                )
                kept = await self._kept.take(of_model, await digest_of(http), id_)
                id_, created = kept.id, kept.created
                each = kept.generates or each
            async with self._requests.generate(session, each, kept) as answers:
                try:
                    yield Given(session, id_, created, len(each), answers, after)
                finally:
                    self._usage.count(http[CALLER].name, session.name, answers.used)
        except ServingError as error:
            wait = error.retry_after_s if isinstance(error, BusyError) else None
            raise ApiError.from_failure(error.failure, retry_after_s=wait) from error
        finally:
            if kept is not None:
                self._kept.let_go(kept)
