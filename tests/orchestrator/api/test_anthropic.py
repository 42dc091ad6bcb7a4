"""Anthropic's messages, with the official client against the real routes and nodes that say what they are told to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.orchestrator.api.anthropic.generates import COUNT, MESSAGES, generate_of, prompt_of
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.schema import read
from motley.protocol.mesh_pb2 import CallPiece, Delta, Generate

HELLO = [{"role": "user", "content": "Hello!"}]
ASKED: dict[str, Any] = {"model": "bard", "max_tokens": 50, "messages": HELLO}
GO = {"name": "go", "description": "Go.", "input_schema": {"type": "object", "properties": {"to": {"type": "string"}}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@asynccontextmanager
async def client_of(mesh: Any) -> AsyncIterator[Any]:
    import anthropic  # takes a second, of every process that collects tests

    async with anthropic.AsyncAnthropic(base_url=mesh.orchestrator.http_url, api_key="any", max_retries=0) as client:
        yield client


def saying(*deltas: Delta, **last: Any) -> Callable[[Generate], AsyncIterator[Delta]]:
    """A node that says these, and then how it ended."""

    async def answer(_: Generate) -> AsyncIterator[Delta]:
        for number, delta in enumerate(deltas):
            said = Delta(ids=[number])
            said.MergeFrom(delta)
            yield said
        yield Delta(
            **{"finish": "stop", "prompt_tokens": 9, "completion_tokens": len(deltas), "cached_tokens": 4} | last
        )

    return answer


THINKS = Delta(reasoning="Hm. ")
CALLS = [
    Delta(calls=[CallPiece(index=0, id="call_1", name="go", arguments='{"to"')]),
    Delta(calls=[CallPiece(index=0, arguments=': "Rome"}'), CallPiece(index=1, id="call_2", name="stay")]),
]


async def test_a_text(mesh: Any, bard: Any) -> None:
    bard.answer = saying(Delta(text="Good "), Delta(text="morrow"))
    async with client_of(mesh) as client:
        how = {"temperature": 0.5, "top_k": 7, "top_p": 0.9}  # which this client leaves to its callers
        message = await client.messages.create(**ASKED, system="Be brief.", extra_body=how)
    (block,) = message.content
    assert (block.type, block.text) == ("text", "Good morrow")
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        *("assistant", "bard", "end_turn", None),
    )
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (5, 4, 2)
    assert message.id.startswith("msg_")
    (generate,) = bard.generated
    assert json.loads(generate.messages_json) == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert (generate.max_tokens, generate.sampling.top_k, generate.sampling.temperature) == (50, 7, 0.5)


async def test_a_stream_has_the_events_that_the_client_puts_together(mesh: Any, bard: Any) -> None:
    bard.answer = saying(THINKS, THINKS, Delta(text="I "), Delta(text="go."), *CALLS)
    async with client_of(mesh) as client:
        asked = {**ASKED, "tools": [GO], "thinking": {"type": "enabled", "budget_tokens": 1024}}
        async with client.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**asked)
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert streamed.content[0].thinking == "Hm. Hm. "
    assert [block.input for block in streamed.content[2:]] == [{"to": "Rome"}, {}]
    assert [block.model_dump() for block in whole.content] == [block.model_dump() for block in streamed.content]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", 6)
    assert streamed.usage.input_tokens == whole.usage.input_tokens == 5
    assert [kind for kind in kinds if kind in ("message_start", "message_delta", "message_stop")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


async def test_thoughts_that_nobody_wants_are_not_told(mesh: Any, bard: Any) -> None:
    bard.answer = saying(THINKS, Delta(text="Yes."))
    async with client_of(mesh) as client:
        for thinking in ({}, {"thinking": {"type": "disabled"}}):
            assert [block.type for block in (await client.messages.create(**ASKED, **thinking)).content] == ["text"]


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        ({"finish": "length"}, "max_tokens", None),
        ({"stopped_by": "END"}, "stop_sequence", "END"),
        ({}, "end_turn", None),
    ],
)
async def test_why_an_answer_ended(
    last: dict[str, Any], reason: str, sequence: str | None, mesh: Any, bard: Any
) -> None:
    bard.answer = saying(Delta(text="x"), **last)
    async with client_of(mesh) as client:
        message = await client.messages.create(**ASKED, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert list(bard.generated[0].stop) == ["END"]


def test_a_conversation_with_tools_is_told_as_templates_know_it() -> None:
    called = {"type": "tool_use", "id": "t1", "name": "go", "input": {"to": "Rome"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "far"}],
        "is_error": True,
    }
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "user", "content": [{"type": "text", "text": "now!", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": "s"}, called]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    told = json.loads(prompt_of(read(COUNT, {"model": "bard", "messages": messages, "tools": [GO]})).messages_json)
    function = {"name": "go", "arguments": '{"to": "Rome"}'}
    assert told == [
        {"role": "user", "content": "Go\nnow!"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Error: far", "tool_call_id": "t1"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("choice", "told", "one"),
    [
        (None, "", False),
        ({"type": "auto", "disable_parallel_tool_use": True}, "", True),
        ({"type": "any"}, "required", False),
        ({"type": "tool", "name": "go"}, "=go", False),
    ],
)
def test_whether_tools_are_called(choice: dict[str, Any] | None, told: str, one: bool) -> None:
    generate = generate_of(read(MESSAGES, {**ASKED, "tools": [GO], "tool_choice": choice}))
    function = {"name": "go", "description": "Go.", "parameters": GO["input_schema"]}
    assert json.loads(generate.tools_json) == [{"type": "function", "function": function}]
    assert (generate.tool_choice, generate.one_call) == (told, one)
    none = generate_of(read(MESSAGES, {**ASKED, "tools": [GO], "tool_choice": {"type": "none"}}))
    assert not none.tools_json


def test_an_answer_can_be_kept_to_a_schema() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    generate = generate_of(read(MESSAGES, {**ASKED, "output_config": {"format": form, "effort": "high"}}))
    assert (json.loads(generate.constraint.json_schema), generate.reasoning_effort) == ({"type": "object"}, "high")


def test_a_model_is_asked_not_to_think_where_nobody_wants_thoughts() -> None:
    quiet = {"enable_thinking": False, "thinking": False}
    for thinking, told in (("disabled", json.dumps(quiet)), ("enabled", ""), ("adaptive", "")):
        assert generate_of(read(MESSAGES, {**ASKED, "thinking": {"type": thinking}})).template_json == told


@pytest.mark.parametrize(
    ("change", "param", "why"),
    [
        ({"max_tokens": None}, "max_tokens", "is missing"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "images"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages[1]", "cannot be gone on with"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "x", "input": {}}]}]},
            "messages[0].content[0]",
            "is an assistant's alone",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "Anthropic's servers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tools": [GO], "tool_choice": {"type": "tool", "name": "fly"}}, "tool_choice.name", "is no tool"),
        ({"tools": [GO], "tool_choice": {"type": "tool"}}, "tool_choice.name", "is missing"),
        ({"temperature": 1.5}, "temperature", "must be at most 1"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "is not supported"),
        ({"colour": "red"}, "colour", "is not a known parameter"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(MESSAGES, {**ASKED, **change})
    assert refused.value.param == param
    assert why in str(refused.value)


async def test_errors_have_the_form_that_the_client_knows(mesh: Any, bard: Any) -> None:
    import anthropic

    async with client_of(mesh) as client:
        with pytest.raises(anthropic.NotFoundError, match="no model named 'nobody'") as missing:
            await client.messages.create(**{**ASKED, "model": "nobody"})
        assert missing.value.body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": "no model named 'nobody' is served; served: bard"},
        }
        with pytest.raises(anthropic.BadRequestError, match="images"):
            await client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": [IMAGE]}]})

        async def breaks(_: Generate) -> AsyncIterator[Delta]:
            yield Delta(text="Good ", ids=[1])
            delta = Delta(finish="error")
            delta.failure.code, delta.failure.message = "peer_lost", "rank 1 has gone"
            yield delta

        bard.answer = breaks
        async with client.messages.stream(**ASKED) as stream:
            with pytest.raises(anthropic.APIError, match="rank 1 has gone"):
                await stream.get_final_message()
    async with mesh.http.get("/v1/messages") as wrong:
        assert (await wrong.json())["type"] == "error"


async def test_tokens_are_counted_and_told(mesh: Any, bard: Any) -> None:
    async def tell(generate: Generate) -> AsyncIterator[Delta]:
        assert generate.only_prompt
        yield Delta(finish="stop", ids=[5, 6, 7], prompt_tokens=3, text="Hello!" if generate.echo else "")

    bard.answer = tell
    async with client_of(mesh) as client:
        assert (await client.messages.count_tokens(model="bard", messages=HELLO, system="Hi")).input_tokens == 3
    for asked in ({"prompt": "Hello!"}, {"messages": HELLO}):
        status, body = await mesh.call("POST", "/tokenize", {"model": "bard", **asked})
        assert (status, body["count"], body["tokens"]) == (200, 3, [5, 6, 7])
        assert body["max_model_len"] > 0
    assert await mesh.call("POST", "/detokenize", {"model": "bard", "tokens": [5, 6, 7]}) == (200, {"prompt": "Hello!"})
    for wrong in ({}, {"prompt": "x", "messages": HELLO}, {"prompt": 3}):
        status, body = await mesh.call("POST", "/tokenize", {"model": "bard", **wrong})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    session = (await mesh.call("GET", "/api/sessions"))[1]["sessions"][0]
    assert session["state"] == "ready"


async def test_an_answer_can_be_taken_up(mesh: Any, bard: Any) -> None:
    """Events have numbers then, and the same answer comes again."""
    bard.answer = saying(Delta(text="Good "), Delta(text="morrow"))
    texts = []
    for _ in range(2):
        asked = {"json": {**ASKED, "stream": True}, "headers": {"Idempotency-Key": "k"}}
        async with mesh.http.post("/v1/messages", **asked) as response:
            texts.append(await response.text())
    assert texts[0] == texts[1]
    assert texts[0].startswith("id: 1\nevent: message_start\ndata: {")
    assert len(bard.generated) == 1


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["user", "text", "tool", "any"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*MESSAGES.json_schema()["properties"], "type", "role", "content", "text", "name", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(body=st.dictionaries(st.sampled_from([*MESSAGES.json_schema()["properties"], "x"]), ANYTHING, max_size=6))
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    for whole in (body, {**ASKED, **body}):
        with suppress(ApiError):  # anything else is our fault
            assert json.loads(generate_of(read(MESSAGES, whole)).messages_json)


def test_the_document_describes_the_routes(mesh: Any) -> None:
    schema = MESSAGES.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({**ASKED, "tools": [GO], "system": "x"}, schema)
