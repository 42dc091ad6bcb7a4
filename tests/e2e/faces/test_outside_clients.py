"""Clients of other houses against a mesh of real processes: LangChain, LiteLLM, an agent's loop, schemathesis.

Their packages are large, so they are no part of what development installs: `make soak` installs them, as
`pip install -e ".[outside]"` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from motley.cli.reaching.client import Client
from tests.e2e.answers.test_tools import GO, PARAMETERS, TEMPLATE
from tests.e2e.processes import Mesh, chatting_model

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]

HELLO = "Who goes there?"
PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


async def session(there: Mesh, folder: Path) -> None:
    model = chatting_model(folder)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    await there.session(model=str(model), name="able", nodes=["a", "b"], shares=[2, 1])


async def test_langchain(there: Mesh, tmp_path: Path) -> None:
    langchain = pytest.importorskip("langchain_openai")
    await session(there, tmp_path)
    await there.session(name="embedder", nodes=["c"], embeddings="mean")
    at: dict[str, Any] = {"base_url": f"{there.url}/v1", "api_key": "unused"}
    chat = langchain.ChatOpenAI(model="able", max_tokens=300, seed=3, **at)
    assert (await chat.ainvoke(HELLO, max_tokens=5)).usage_metadata["output_tokens"] == 5
    pieces = [piece async for piece in chat.astream(HELLO, max_tokens=9)]
    assert "".join(piece.content for piece in pieces)
    batch = await chat.abatch([HELLO] * 4, max_tokens=4)
    assert len({answer.content for answer in batch}) == 1, "equal seeds give equal answers"
    called = await chat.bind_tools([GO], tool_choice="go").ainvoke(HELLO)
    jsonschema.validate(called.tool_calls[0]["args"], PARAMETERS)
    strict = {**GO, "function": {**GO["function"], "strict": True}}
    assert (await chat.bind_tools([strict]).ainvoke(HELLO, max_tokens=20)).content
    told = await chat.with_structured_output(PERSON, method="json_schema", strict=True).ainvoke(HELLO)
    jsonschema.validate(told, PERSON)
    responses = langchain.ChatOpenAI(model="able", max_tokens=20, use_responses_api=True, **at)
    assert (await responses.ainvoke(HELLO)).text
    embedder = langchain.OpenAIEmbeddings(model="embedder", check_embedding_ctx_length=False, **at)
    texts = await embedder.aembed_documents(["ROMEO:", "JULIET:"])
    assert len(texts) == 2
    assert await embedder.aembed_query("ROMEO:") == pytest.approx(texts[0], abs=1e-5)


async def test_litellm(there: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the internet for prices
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("mcp")  # without which it has no tools
    await session(there, tmp_path)
    await there.session(name="embedder", nodes=["c"], embeddings="last")
    messages = [{"role": "user", "content": HELLO}]
    at: dict[str, Any] = {"api_base": f"{there.url}/v1", "api_key": "unused", "max_tokens": 300}
    whole = await litellm.acompletion(model="openai/able", messages=messages, **{**at, "max_tokens": 5})
    assert whole.usage.completion_tokens == 5
    stream = await litellm.acompletion(model="openai/able", messages=messages, stream=True, **{**at, "max_tokens": 9})
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    called = await litellm.acompletion(
        model="openai/able", messages=messages, tools=[GO], tool_choice="required", seed=5, **at
    )
    jsonschema.validate(json.loads(called.choices[0].message.tool_calls[0].function.arguments), PARAMETERS)
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    told = await litellm.acompletion(model="openai/able", messages=messages, response_format=form, **at)
    jsonschema.validate(json.loads(told.choices[0].message.content), PERSON)
    text = await litellm.atext_completion(
        model="text-completion-openai/able", prompt="ROMEO:", **{**at, "max_tokens": 5}
    )
    assert text.choices[0].text
    claude = {"api_base": there.url, "api_key": "unused", "max_tokens": 7}
    assert (await litellm.acompletion(model="anthropic/able", messages=messages, **claude)).choices[0].message.content
    embedded = await litellm.aembedding(model="openai/embedder", input=["ROMEO:"], api_base=at["api_base"], api_key="x")
    assert len(embedded.data[0]["embedding"]) > 10
    with pytest.raises(litellm.NotFoundError, match="no model named"):
        await litellm.acompletion(model="openai/nobody", messages=messages, **at)


async def test_an_agent_calls_tools_until_it_is_done(there: Mesh, tmp_path: Path) -> None:
    """Whatever the model makes of it: it is told to call, then to stop."""
    import openai

    await session(there, tmp_path)
    history: list[Any] = [{"role": "user", "content": "Go home!"}]
    asked: dict[str, Any] = {"model": "able", "tools": [GO], "max_tokens": 500, "parallel_tool_calls": False}
    async with openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="unused", max_retries=0) as client:
        for turn in range(4):
            choice: Any = "required" if turn < 3 else "none"
            answer = await client.chat.completions.create(**asked, messages=history, tool_choice=choice, seed=turn)
            message = answer.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
                history.append({"role": "tool", "tool_call_id": call.id, "content": f"at {turn} o'clock: not yet"})
        assert not message.tool_calls
        assert sum(isinstance(each, dict) and each["role"] == "tool" for each in history) >= 3


@pytest.mark.timeout(1800)
async def test_schemathesis_finds_no_failure(there: Mesh, tmp_path: Path) -> None:
    """Requests of all kinds by the OpenAPI document, right and wrong ones: no 5xx, and no answer but as it says.

    It has a model to ask, and closes what it opens: routes that end nodes or make keys are left out, as they would end
    the test.
    """
    pytest.importorskip("schemathesis")
    await session(there, tmp_path)
    left_out = "^/api/(nodes|members|keys|tokens)"
    checks = "not_a_server_error,response_schema_conformance,status_code_conformance,content_type_conformance"
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{there.url}/openapi.json", "--max-examples", "20"),
        *("--exclude-path-regex", left_out, "--checks", checks),
        *("--request-timeout", "60", "--workers", "2", "--phases", "examples,coverage,fuzzing", "--no-color"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path
    )
    try:
        out, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0, out.decode()[-20_000:]
    async with Client(there.url) as client:
        assert len((await client.call("GET", "/api/nodes"))["nodes"]) == 3
