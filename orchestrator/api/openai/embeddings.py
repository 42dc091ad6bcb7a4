"""OpenAI's embeddings: texts as vectors of length 1, of sessions that were started for them."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BeforeValidator, Field, TypeAdapter

from motley.orchestrator.api.access.slow_clients import give
from motley.orchestrator.api.asking import Asking, next_delta
from motley.orchestrator.api.openai.schema import ONE_OR_SEVERAL, TokenIds, prompt_or_list
from motley.orchestrator.api.schema import Body, FieldError, Text, read, read_json, refuse
from motley.orchestrator.serving.errors import AnswerError, BusyError, refusal
from motley.protocol import mesh_pb2 as pb

MAX_TEXTS = 2048
"""Of one request, as at OpenAI: clients that read whole folders send a thousand."""
AT_ONCE = 128
"""Texts that are under way of one request, at most, and half of a session's places: others want some, too."""


def _text(text: Any) -> Any:
    """A text is not empty; said here, as a union would tell of both its parts what is wrong."""
    if text == "":
        refuse("must not be empty")
    return prompt_or_list(text)


class EmbeddingsRequest(Body):
    """The body of ``POST /v1/embeddings``."""

    model: Annotated[Text, Field(min_length=1)]
    """The name of a model that is served for embeddings; with an adapter: ``model:adapter``."""
    input: Annotated[
        list[Annotated[Text | TokenIds, BeforeValidator(_text)]],
        Field(max_length=MAX_TEXTS),
        ONE_OR_SEVERAL,
    ]
    """A text, or several (2048 at most), each as a string or as token ids. Strings become the tokens that the model's
    tokenizer makes of them."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or float32 in little endian as base64."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """As many as the model has, or left out: no model tells that its vectors could be cut."""
    user: str = ""


EMBEDDINGS = TypeAdapter(EmbeddingsRequest)


class EmbeddingsApi:
    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/embeddings", self.embeddings)]

    async def embeddings(self, http: web.Request) -> web.StreamResponse:
        """Embed texts."""
        asked = read(EMBEDDINGS, await read_json(http))
        served = self._asking.served(asked.model)
        session = served.session
        if asked.dimensions not in (None, session.profile.hidden):
            why = f"must be {session.profile.hidden} or left out: the embeddings of {asked.model!r} cannot be cut"
            raise FieldError("dimensions", why)
        each = [_generate(text) for text in asked.input]
        at_once = max(1, min(AT_ONCE, self._asking.places(session) // 2))
        ends: list[pb.Delta] = []
        while len(ends) < len(each):
            some = each[len(ends) : len(ends) + at_once]
            try:
                ends += await self._ends(http, asked.model, some, len(ends))
            except BusyError as busy:
                if not ends:
                    raise
                await asyncio.sleep(busy.retry_after_s)  # what has been computed is not thrown away
            except AnswerError as error:
                if error.failure.param != "input" or len(each) == 1:
                    raise
                name = f"input[{len(ends) + error.number}]"
                raise refusal(error.failure.code, f"{name}: {error.failure.message}", name) from error
        tokens = sum(end.prompt_tokens for end in ends)
        body = {
            "object": "list",
            "data": await asyncio.to_thread(_vectors, ends, asked.encoding_format),
            "model": served.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return await give(http, body)

    async def _ends(self, http: web.Request, model: str, some: Sequence[pb.Generate], begin: int) -> list[pb.Delta]:
        """What has become of some texts of a request, from its text number `begin` on."""
        ends = [pb.Delta()] * len(some)
        async with self._asking.answers(http, model, some, "embd-", part=f"{begin}+{len(some)}") as given:
            while not given.answers.ended:
                number, delta = await next_delta(given.answers)
                ends[number] = delta
        return ends


def _generate(text: str | list[int]) -> pb.Generate:
    """What the leader is asked for one text."""
    generate = pb.Generate(embed=True, sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0), without_drafts=True)
    if isinstance(text, str):
        generate.prompt = text
    else:
        generate.prompt_tokens.ids.extend(text)
    return generate


def _vectors(ends: Sequence[pb.Delta], encoding: str) -> list[dict[str, Any]]:
    """The vectors of texts as a client wants them."""
    return [
        {"object": "embedding", "index": index, "embedding": _encoded(end.embedding, encoding)}
        for index, end in enumerate(ends)
    ]


def _encoded(vector: bytes, encoding: str) -> Any:
    """float32 in little endian as a client wants it."""
    if encoding == "base64":
        return base64.b64encode(vector).decode()
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
