"""Tools and thoughts of a chat in a mesh of real processes, with the official client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from motley.cli.reaching.client import Client
from tests.e2e.processes import Mesh, chatting_model

TEMPLATE = """{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.to }}</tool_call>{% endfor %}
{% endfor %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"""
"""Writes calls as Qwen's does."""
TAGGED = TEMPLATE.replace(
    "{{ call.function.arguments.to }}",
    """
<function={{ call.function.name }}>
{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>
""",
)
"""As Qwen3-Coder's does."""
PARAMETERS = {
    "type": "object",
    "properties": {
        "to": {"enum": ["Verona", "Rome"]},
        "at": {"type": "integer", "minimum": 0, "maximum": 23},
        "why": {"type": "string", "maxLength": 8},
    },
    "required": ["to", "at", "why"],
    "additionalProperties": False,
}
GO = {"type": "function", "function": {"name": "go", "description": "Go there.", "parameters": PARAMETERS}}
STAY = {"type": "function", "function": {"name": "stay"}}


async def test_the_official_client_calls_tools(there: Mesh, tmp_path: Path) -> None:
    import openai  # takes a second, of every process that collects tests

    model = chatting_model(tmp_path)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    await there.session(model=str(model), name="able", nodes=["a", "c"], shares=[2, 1])
    async with openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="unused", max_retries=0) as client:
        history: list[Any] = [{"role": "user", "content": "Go!"}]
        asked: dict[str, Any] = {"model": "able", "messages": history, "tools": [GO], "seed": 5, "max_tokens": 300}
        asked |= {"parallel_tool_calls": False, "reasoning_effort": "low"}
        whole = await client.chat.completions.create(**asked, tool_choice="required")
        (choice,) = whole.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name, call.id[:5]) == ("function", "go", "call_")
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)

        pieces: list[Any] = []
        finish = ""
        async for chunk in await client.chat.completions.create(**asked, tool_choice="required", stream=True):
            pieces += chunk.choices[0].delta.tool_calls or []
            finish = chunk.choices[0].finish_reason or finish
        assert finish == "tool_calls"
        assert (pieces[0].function.name, {piece.index for piece in pieces}) == ("go", {0})
        assert len(pieces) > 3, "its arguments come as they are written"
        assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments

        named = {**asked, "tools": [STAY, GO], "tool_choice": {"type": "function", "function": {"name": "go"}}}
        (chosen,) = (await client.chat.completions.create(**named)).choices[0].message.tool_calls
        assert chosen.function.name == "go"

        answered = [*history, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "It is far."}]
        goes_on = await client.chat.completions.create(**{**asked, "messages": answered, "max_tokens": 8})
        assert goes_on.usage.prompt_tokens > whole.usage.prompt_tokens
        assert goes_on.choices[0].message.tool_calls is None
        silent = await client.chat.completions.create(**asked, tool_choice="none")
        assert silent.usage.prompt_tokens < whole.usage.prompt_tokens, "the model hears nothing of tools"

        wrong = {"type": "function", "function": {"name": "x", "parameters": {"type": "array", "uniqueItems": True}}}
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            await client.chat.completions.create(**{**asked, "tools": [wrong]}, tool_choice="required")


async def test_a_model_whose_template_knows_no_tools_is_told_of_them(there: Mesh, tmp_path: Path) -> None:
    import openai

    await there.session(model=str(chatting_model(tmp_path)), name="plain", nodes=["b"])
    asked: dict[str, Any] = {"model": "plain", "messages": [{"role": "user", "content": "Go!"}], "max_tokens": 300}
    async with openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="unused", max_retries=0) as client:
        untold = await client.chat.completions.create(**asked)
        told = await client.chat.completions.create(
            **asked, tools=[GO], tool_choice="required", parallel_tool_calls=False
        )
        assert told.usage.prompt_tokens > untold.usage.prompt_tokens + 50
        (choice,) = told.choices
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


async def test_thoughts_come_apart_from_what_is_said(there: Mesh, tmp_path: Path) -> None:
    import openai

    model = chatting_model(tmp_path)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}{# </think> #}<think>")
    await there.session(model=str(model), name="thinker", nodes=["b"])
    async with openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="unused", max_retries=0) as client:
        chat: dict[str, Any] = {"model": "thinker", "messages": [{"role": "user", "content": "Go!"}], "max_tokens": 9}
        message = (await client.chat.completions.create(**chat, temperature=0)).choices[0].message
        assert message.content == ""
        assert message.reasoning_content
        pieces = [
            chunk.choices[0].delta
            async for chunk in await client.chat.completions.create(**chat, temperature=0, stream=True)
        ]
        thought = "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces)
        assert thought == message.reasoning_content
        assert not "".join(piece.content or "" for piece in pieces)


async def test_a_model_s_own_template_takes_answers_apart_in_all_apis(there: Mesh, tmp_path: Path) -> None:
    """By it, this one's first word is a thought, of which its chat template knows nothing."""
    import anthropic
    import openai

    model = chatting_model(tmp_path)
    raw: dict[str, Any] = {"content_args": {"strip": False}}
    fields = {"thinking": {"open_pattern": "^", "close": " ", **raw}, "content": raw}
    settings = model / "tokenizer_config.json"
    written = json.loads(settings.read_text()) | {"response_template": {"start_anchor": "Go!\n", "fields": fields}}
    settings.write_text(json.dumps(written))
    await there.session(model=str(model), name="own", nodes=["a", "b"], shares=[1, 1])
    chat: dict[str, Any] = {"model": "own", "messages": [{"role": "user", "content": "Go!"}], "max_tokens": 24}
    async with openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="unused", max_retries=0) as client:
        raw_text = await client.completions.create(model="own", prompt="user: Go!\n", max_tokens=24, temperature=0)
        thought, _, said = raw_text.choices[0].text.partition(" ")
        assert thought
        assert said
        message = (await client.chat.completions.create(**chat, temperature=0)).choices[0].message
        assert (message.reasoning_content, message.content) == (thought, said)
        stream = await client.chat.completions.create(**chat, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == thought
        assert "".join(piece.content or "" for piece in pieces) == said
        response = await client.responses.create(model="own", input="Go!", max_output_tokens=24, temperature=0)
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output_text == said
    async with anthropic.AsyncAnthropic(base_url=there.url, api_key="unused", max_retries=0) as talker:
        (block,) = (await talker.messages.create(**chat, extra_body={"temperature": 0})).content
        assert block.text == said, "thoughts are told to those who ask for them"


async def test_anthropic_s_client_calls_tools(there: Mesh, tmp_path: Path) -> None:
    """The same session, text for text, as OpenAI's does; streamed, counted, and kept to the tool's schema.

    The model writes arguments between tags.
    """
    import anthropic

    model = chatting_model(tmp_path)
    (model / "chat_template.jinja").write_text(TAGGED)
    await there.session(model=str(model), name="talker", nodes=["a", "c"], shares=[1, 2])
    async with anthropic.AsyncAnthropic(base_url=there.url, api_key="unused", max_retries=0) as client:
        history: list[Any] = [{"role": "user", "content": "Go!"}]
        tool = {"name": "go", "description": "Go there.", "input_schema": PARAMETERS}
        asked: dict[str, Any] = {"model": "talker", "max_tokens": 300, "messages": history, "tools": [tool]}
        asked |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "extra_body": {"temperature": 0}}
        whole = await client.messages.create(**asked)
        assert whole.stop_reason == "tool_use"
        (call,) = whole.content
        jsonschema.validate(call.input, PARAMETERS)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        assert streamed.content[0].input == call.input
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        counted = await client.messages.count_tokens(model="talker", messages=history, tools=[tool])
        assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        answered = {"type": "tool_result", "tool_use_id": call.id, "content": "It is far."}
        goes_on = [*history, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [answered]}]
        last = await client.messages.create(model="talker", max_tokens=8, messages=goes_on, stop_sequences=["\n"])
        assert last.stop_reason in ("max_tokens", "stop_sequence")
        wrong = {**tool, "input_schema": {"type": "array", "uniqueItems": True}}
        with pytest.raises(anthropic.BadRequestError, match="uniqueItems"):
            await client.messages.create(**{**asked, "tools": [wrong]})
    async with Client(there.url) as http:
        told = await http.call("POST", "/tokenize", {"model": "talker", "prompt": "ROMEO:"})
        assert told["count"] == len(told["tokens"]) > 0
        back = await http.call("POST", "/detokenize", {"model": "talker", "tokens": told["tokens"]})
        assert back["prompt"] == "ROMEO:"


async def test_the_responses_api_calls_tools(there: Mesh, tmp_path: Path) -> None:
    """And goes on with what they came to; the same text as a chat has."""
    import openai

    model = chatting_model(tmp_path)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    await there.session(model=str(model), name="responder", nodes=["b", "c"], shares=[1, 2])
    async with openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="unused", max_retries=0) as client:
        tool: Any = {"type": "function", **GO["function"], "strict": True}
        asked: dict[str, Any] = {"model": "responder", "tools": [tool], "temperature": 0, "max_output_tokens": 300}
        first = await client.responses.create(
            **asked, input="Go!", tool_choice="required", parallel_tool_calls=False, store=False
        )
        (call,) = first.output
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)
        items: list[Any] = [{"role": "user", "content": "Go!"}, call]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "It is far."})
        asked["max_output_tokens"] = 8
        events = [event async for event in await client.responses.create(**asked, input=items, stream=True)]
        streamed = events[-1].response
        assert (streamed.status, streamed.usage.output_tokens) == ("incomplete", 8)
        chat: list[Any] = [
            {"role": "user", "content": "Go!"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "It is far."},
        ]
        same = await client.chat.completions.create(
            model="responder", messages=chat, tools=[GO], temperature=0, max_tokens=8
        )
        assert streamed.usage.input_tokens == same.usage.prompt_tokens
        assert streamed.output_text == (same.choices[0].message.content or "")
