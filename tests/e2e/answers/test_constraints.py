"""Answers that are kept to something, in a mesh of real processes: valid, and the same whoever computes them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from motley.cli.reaching.client import Client
from tests.e2e.processes import BUNDLED, Mesh, chatting_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["merry", "sad", None]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["name", "age", "mood", "friends"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
REGEX = r"(ROMEO|JULIET): [a-z ]{5,20}[.!]"
GRAMMAR = 'start: "yes" | "no" (", no"){1,3}'
GREEDY = {"model": BUNDLED.name, "prompt": "ROMEO:", "max_tokens": 700, "temperature": 0}
FREE = {**GREEDY, "max_tokens": 60}
KEPT: list[dict[str, Any]] = [
    {**GREEDY, "response_format": FORMAT},
    {**GREEDY, "regex": REGEX},
    {**GREEDY, "grammar": GRAMMAR, "temperature": 1.5, "seed": 1},
    *({**GREEDY, "response_format": FORMAT, "temperature": 1.0, "seed": seed, "top_p": 0.9} for seed in range(3)),
    {**GREEDY, "response_format": FORMAT, "temperature": 1.0, "seed": 9, "top_k": 5, "frequency_penalty": 0.5},
    {**GREEDY, "regex": REGEX, "temperature": 1.0, "seed": 2, "min_p": 0.1, "logprobs": 2},
]


def check(asked: dict[str, Any], choice: dict[str, Any]) -> None:
    assert choice["finish_reason"] == "stop"
    if "regex" in asked:
        assert re.fullmatch(REGEX, choice["text"])
    elif "grammar" in asked:
        assert re.fullmatch("yes|no(, no){1,3}", choice["text"])
    else:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


@pytest.mark.soak
async def test_answers_are_valid_and_the_same_on_every_number_of_ranks(there: Mesh) -> None:
    """Together with a request that is kept to nothing, whose text is what it is alone; with guesses and without."""
    texts: list[list[str]] = []
    for nodes, shares in ((["a"], [1]), (["a", "b", "c"], [3, 2, 1])):
        session = await there.session(nodes=nodes, shares=shares)
        async with Client(there.url) as client:

            async def text_of(asked: dict[str, Any], client: Client = client) -> str:
                answer = await client.call("POST", "/v1/completions", asked)
                choice = answer["choices"][0]
                if asked is not FREE:
                    check(asked, choice)
                return str(choice["text"])

            alone = await text_of(FREE)
            several = await asyncio.gather(*map(text_of, [FREE, *KEPT]))
            assert several[0] == alone
            plodding = [await text_of({**asked, "drafts": False}) for asked in KEPT]
            assert plodding == several[1:]
            texts.append(several)
            await client.call("DELETE", f"/api/sessions/{session['id']}")
    assert texts[0] == texts[1]


async def test_the_official_client_is_kept_to_a_schema(there: Mesh, tmp_path: Path) -> None:
    import openai  # takes a second, of every process that collects tests

    model = chatting_model(tmp_path)
    await there.session(model=str(model), name="chatty", nodes=["b"])
    async with openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="unused", max_retries=0) as client:
        chat: dict[str, Any] = {"model": "chatty", "messages": [{"role": "user", "content": "Who?"}]}
        whole = {**chat, "response_format": FORMAT, "max_tokens": 900}
        for seed in range(3):
            answer = await client.chat.completions.create(**whole, seed=seed)
            jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
        pieces = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(**whole, seed=0, stream=True)
        ]
        jsonschema.validate(json.loads("".join(pieces)), SCHEMA)
        short = await client.chat.completions.create(**chat, response_format=FORMAT, max_tokens=3)
        assert short.choices[0].finish_reason == "length"
        stopped = await client.chat.completions.create(**chat, response_format=FORMAT, stop=['"name"'])
        assert '"name"' not in stopped.choices[0].message.content
        for wrong, param, words in (
            ({"regex": "(a"}, "regex", "unclosed group"),
            ({"grammar": "start: x"}, "grammar", 'unknown name: "x"'),
        ):
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                await client.chat.completions.create(**chat, extra_body=wrong)
            assert refused.value.param == param
        unsupported = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
            await client.chat.completions.create(
                **chat, response_format={"type": "json_schema", "json_schema": unsupported}
            )
        assert refused.value.param == "response_format.json_schema.schema"
