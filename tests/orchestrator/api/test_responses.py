"""The Responses API, with the official client against the real routes and nodes that say what they are told to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.responses.generates import RESPONSE, generate_of
from motley.orchestrator.api.schema import read
from motley.protocol.mesh_pb2 import Delta, Generate, LogprobRow, TokenLogprob

from .test_anthropic import CALLS, THINKS, saying

ASKED: dict[str, Any] = {"model": "bard", "input": "Hello!"}
PARAMETERS = {"type": "object", "properties": {"to": {"type": "string"}}}
GO = {"type": "function", "name": "go", "description": "Go.", "parameters": PARAMETERS, "strict": True}


@asynccontextmanager
async def client_of(mesh: Any) -> AsyncIterator[Any]:
    import openai  # takes a second, of every process that collects tests

    url = f"{mesh.orchestrator.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


async def test_a_text(mesh: Any, bard: Any) -> None:
    bard.answer = saying(Delta(text="Good "), Delta(text="morrow"))
    async with client_of(mesh) as client:
        response = await client.responses.create(
            **ASKED, instructions="Be brief.", max_output_tokens=9, temperature=0.5, metadata={"a": "b"}
        )
    assert (response.output_text, response.status, response.model) == ("Good morrow", "completed", "bard")
    assert (response.id[:5], response.object, response.metadata) == ("resp_", "response", {"a": "b"})
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (9, 2, 11)
    assert usage.input_tokens_details.cached_tokens == 4
    (generate,) = bard.generated
    system, user = json.loads(generate.messages_json)
    assert (system, user) == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello!"},
    )
    assert (generate.max_tokens, generate.sampling.temperature) == (9, 0.5)


async def test_a_stream_has_the_events_that_the_client_puts_together(mesh: Any, bard: Any) -> None:
    bard.answer = saying(THINKS, THINKS, Delta(text="I "), Delta(text="go."), *CALLS)
    async with client_of(mesh) as client:
        async with client.responses.stream(**ASKED, tools=[GO]) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        whole = await client.responses.create(**ASKED, tools=[GO])
    kinds = [item.type for item in streamed.output]
    assert kinds == [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert streamed.output[0].content[0].text == "Hm. Hm. "
    assert streamed.output_text == whole.output_text == "I go."
    assert [(call.name, call.call_id, call.arguments) for call in streamed.output[2:]] == [
        ("go", "call_1", '{"to": "Rome"}'),
        ("stay", "call_2", ""),
    ]
    assert streamed.usage.output_tokens_details.reasoning_tokens == 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    told = [event.type for event in events]
    assert (told[:2], told[-1]) == (["response.created", "response.in_progress"], "response.completed")
    assert told.count("response.output_item.added") == told.count("response.output_item.done") == 4
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I go."
    assert told.count("response.function_call_arguments.delta") == 2
    assert told.count("response.reasoning_text.done") == 1


async def test_an_answer_that_is_cut_off_is_incomplete(mesh: Any, bard: Any) -> None:
    bard.answer = saying(Delta(text="Good "), finish="length")
    async with client_of(mesh) as client:
        response = await client.responses.create(**ASKED)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"
        async with client.responses.stream(**ASKED) as stream:
            assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_log_probabilities(mesh: Any, bard: Any) -> None:
    row = LogprobRow(chosen=TokenLogprob(id=1, logprob=-0.5, text="Hi", raw=b"Hi"))
    bard.answer = saying(Delta(text="Hi", logprobs=[row]))
    async with client_of(mesh) as client:
        response = await client.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=2)
    (told,) = response.output[0].content[0].logprobs
    assert (told.token, told.logprob) == ("Hi", -0.5)
    assert (bard.generated[0].sampling.logprobs, bard.generated[0].sampling.top_logprobs) == (True, 2)


def test_items_are_told_as_templates_know_them() -> None:
    items = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "good"}],
        },
        {"type": "message", "role": "user", "content": "Go!"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "go",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c2", "name": "stay", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "far"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "near"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "So.", "annotations": []}]},
        {"role": "user", "content": "And?"},
    ]
    told = json.loads(generate_of(read(RESPONSE, {"model": "bard", "input": items})).messages_json)
    calls = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for each, name in (("c1", "go"), ("c2", "stay"))
    ]
    assert told == [
        {"role": "system", "content": "Be good"},
        {"role": "user", "content": "Go!"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": calls},
        {"role": "tool", "content": "far", "tool_call_id": "c1"},
        {"role": "tool", "content": "near", "tool_call_id": "c2"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("choice", "told"), [("auto", ""), ("required", "required"), ({"type": "function", "name": "go"}, "=go")]
)
def test_whether_tools_are_called(choice: Any, told: str) -> None:
    generate = generate_of(
        read(RESPONSE, {**ASKED, "tools": [GO], "tool_choice": choice, "parallel_tool_calls": False})
    )
    function = {"name": "go", "description": "Go.", "parameters": PARAMETERS}
    assert json.loads(generate.tools_json) == [{"type": "function", "function": function}]
    assert (generate.tool_choice, generate.one_call) == (told, True)


def test_an_answer_can_be_kept_to_a_schema() -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    generate = generate_of(read(RESPONSE, {**ASKED, "text": {"format": form}, "reasoning": {"effort": "low"}}))
    assert (json.loads(generate.constraint.json_schema), generate.reasoning_effort) == ({"type": "object"}, "low")


@pytest.mark.parametrize(
    ("change", "param", "why"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "is not supported"),
        ({"background": True}, "background", "is not supported"),
        ({"conversation": "c"}, "conversation", "is not supported"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type", "must be one of message"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].message.content[0].type",
            "only text can be read here",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "OpenAI's servers"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [GO], "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice.name", "is no tool"),
        ({"tools": [GO], "tool_choice": "maybe"}, "tool_choice", "must be none, auto, required"),
        ({"colour": "red"}, "colour", "is not a known parameter"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(RESPONSE, {**ASKED, **change})
    assert refused.value.param == param
    assert why in str(refused.value)


async def test_errors(mesh: Any, bard: Any) -> None:
    import openai

    async def breaks(_: Generate) -> AsyncIterator[Delta]:
        yield Delta(text="Good ", ids=[1])
        delta = Delta(finish="error")
        delta.failure.code, delta.failure.message = "peer_lost", "rank 1 has gone"
        yield delta

    bard.answer = breaks
    async with client_of(mesh) as client:
        with pytest.raises(openai.NotFoundError, match="no model named 'nobody'"):
            await client.responses.create(model="nobody", input="x")
        with pytest.raises(openai.InternalServerError, match="rank 1 has gone"):
            await client.responses.create(**ASKED)
        stream = await client.responses.create(**ASKED, stream=True)
        last = [event async for event in stream][-1]
    assert (last.type, last.response.error.message) == ("response.failed", "rank 1 has gone")


KEYS = [*RESPONSE.json_schema()["properties"], "type", "role", "content", "text", "name", "call_id", "output", "x"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["user", "message", "function"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(body=st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=6))
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    for whole in (body, {**ASKED, **body}):
        with suppress(ApiError):  # anything else is our fault
            assert json.loads(generate_of(read(RESPONSE, whole)).messages_json)


def test_the_document_describes_the_route() -> None:
    schema = RESPONSE.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({**ASKED, "tools": [GO], "instructions": "x"}, schema)
