"""Tokens of texts, and texts of tokens, as a model's tokenizer has them: vLLM's routes."""

from __future__ import annotations

import json
from typing import Annotated

from aiohttp import web
from pydantic import Field, TypeAdapter, model_validator

from motley.orchestrator.api.asking import Asking
from motley.orchestrator.api.openai.generates import message_of
from motley.orchestrator.api.openai.schema import Message, TokenId
from motley.orchestrator.api.schema import Body, Text, read, read_json, refuse
from motley.protocol.mesh_pb2 import Generate, TokenIds


class TokenizeRequest(Body):
    """The body of ``POST /tokenize``: a text, or a chat as its template writes it."""

    model: Annotated[Text, Field(min_length=1)]
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            refuse("must be given, or messages, and not both", "prompt")
        return self


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    model: Annotated[Text, Field(min_length=1)]
    tokens: Annotated[list[TokenId], Field(min_length=1)]


TOKENIZE = TypeAdapter(TokenizeRequest)
DETOKENIZE = TypeAdapter(DetokenizeRequest)


class TokensApi:
    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/tokenize", self.tokenize), web.post("/detokenize", self.detokenize)]

    async def tokenize(self, request: web.Request) -> web.Response:
        """Tell the tokens of a text, or of a chat."""
        asked = read(TOKENIZE, await read_json(request))
        generate = Generate()
        if asked.messages is not None:
            generate.messages_json = json.dumps([message_of(each) for each in asked.messages])
        else:
            generate.prompt = asked.prompt or ""
        session, told = await self._asking.told_of_prompt(request, asked.model, generate)
        ids, context = list(told.ids), session.caches.context
        return web.json_response({"count": len(ids), "max_model_len": context, "tokens": ids})

    async def detokenize(self, request: web.Request) -> web.Response:
        """Tell the text of tokens."""
        asked = read(DETOKENIZE, await read_json(request))
        generate = Generate(echo=True, prompt_tokens=TokenIds(ids=asked.tokens))
        _, told = await self._asking.told_of_prompt(request, asked.model, generate)
        return web.json_response({"prompt": told.text})
