"""OpenAI's routes over real sockets: by hand, and with the official client."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest

from motley.orchestrator.serving.answering import requests
from motley.orchestrator.serving.replanning import recovery
from motley.protocol.mesh_pb2 import (
    Delta,
    Described,
    Empty,
    Failure,
    Generate,
    LogprobRow,
    NodeMessage,
    RankCommand,
    Several,
    TokenLogprob,
)

from ..conftest import DEADLINE_S, of_kind, say, small_profile

CHAT = {"model": "bard", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "bard", "prompt": "Hi"}


async def events(mesh: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream; the last may be "[DONE]"."""
    async with mesh.http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def last_event(rest: str) -> Any:
    return json.loads(rest.strip().rpartition("data: ")[2])


async def failing(_: Generate) -> AsyncIterator[Delta]:
    yield Delta(finish="error", failure=Failure(code="context_length_exceeded", message="12 tokens, 8 allowed"))


async def breaking(_: Generate) -> AsyncIterator[Delta]:
    yield Delta(text="Once upon")
    yield Delta(finish="error", failure=Failure(code="peer_lost", message="rank 2 is gone"))


async def stuck(_: Generate) -> AsyncIterator[Delta]:
    yield Delta(text="Once upon")
    await asyncio.Event().wait()


async def with_logprobs(_: Generate) -> AsyncIterator[Delta]:
    for text, other in (("a", "b"), ("é", "e")):
        top = [TokenLogprob(text=text, raw=text.encode(), logprob=-0.5), TokenLogprob(text=other, logprob=-math.inf)]
        yield Delta(text=text, logprobs=[LogprobRow(chosen=top[0], top=top)])
    yield Delta(finish="length", prompt_tokens=1, completion_tokens=2)


async def test_a_chat(mesh: Any, bard: Any) -> None:
    status, body = await mesh.call("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 7, "seed": 4})
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "bard"
    assert body["system_fingerprint"] == "fp_0123456789ab"
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"accepted_prediction_tokens": 2},
    }
    assert body["timings"]["ttft_ms"] == 250.0
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    (generate,) = bard.generated
    sampling = generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 40), (
        "its makers want the best 40, else OpenAI's"
    )
    assert json.loads(generate.messages_json) == CHAT["messages"]
    assert (generate.max_tokens, generate.sampling.seed) == (7, 4)


async def test_a_chat_stream(mesh: Any, bard: Any) -> None:
    *chunks, done = await events(mesh, "/v1/chat/completions", CHAT)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    (envelope,) = {
        (*chunk, *(chunk[key] for key in ("id", "created", "model", "system_fingerprint"))) for chunk in chunks[:-1]
    }
    assert envelope[:6] == ("id", "created", "model", "system_fingerprint", "object", "choices")
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": ", "},
        {"content": "world"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    (timings,) = [chunk["timings"] for chunk in chunks if "timings" in chunk]
    assert chunks[-1]["timings"] == timings
    assert timings["ttft_ms"] == 250.0


async def test_a_completion_and_its_stream_with_usage(mesh: Any, bard: Any) -> None:
    _, body = await mesh.call("POST", "/v1/completions", COMPLETION)
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "Hello, world"
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last, done = await events(mesh, "/v1/completions", {**COMPLETION, **usage})
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, world"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 8)


async def test_what_comes_at_once_is_read_and_written_at_once(mesh: Any, bard: Any) -> None:
    async def nothing(generate: Generate) -> AsyncIterator[Delta]:
        deltas = [Delta(request_id=generate.request_id, text=text, ids=[1]) for text in ("a", "b", "c")]
        deltas.append(Delta(request_id=generate.request_id, finish="stop", completion_tokens=3))
        await bard.send(several=Several(messages=[NodeMessage(delta=delta) for delta in deltas]))
        return
        yield

    bard.answer = nothing
    body = {"model": "bard", "prompt": "Hi", "stream": True}
    async with mesh.http.post("/v1/completions", json=body) as response:
        written = [data async for data, ends in response.content.iter_chunks() if data or ends]
    told = b"".join(written).decode().removesuffix("\n\n").split("\n\n")
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in told[:-1]]
    assert (texts, told[-1]) == (["a", "b", "c", ""], "data: [DONE]")
    assert len(written) == 1


async def test_the_time_per_token_is_what_its_node_tells(mesh: Any, bard: Any) -> None:
    """On the way here it may come all at once, after the orchestrator was started again, say."""

    async def steady(_: Generate) -> AsyncIterator[Delta]:
        yield Delta(text="Hello", ids=[1, 2])
        yield Delta(text="", ids=[4, 5, 6, 7], finish="stop", completion_tokens=7, token_s=0.1)

    bard.answer = steady
    *_, last, _ = await events(mesh, "/v1/chat/completions", CHAT)
    assert last["timings"]["ms_per_token"] == 100.0

    async def at_once(_: Generate) -> AsyncIterator[Delta]:
        yield Delta(text="Yes", ids=[1, 2], finish="stop", completion_tokens=2)

    bard.answer = at_once
    _, body = await mesh.call("POST", "/v1/completions", COMPLETION)
    assert body["timings"]["ms_per_token"] is None


async def test_logprobs_in_both_forms(mesh: Any, bard: Any) -> None:
    bard.answer = with_logprobs
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    _, answer = await mesh.call("POST", "/v1/chat/completions", body)
    second = answer["choices"][0]["logprobs"]["content"][1]
    assert (second["token"], second["logprob"], second["bytes"]) == ("é", -0.5, [0xC3, 0xA9])
    assert [top["logprob"] for top in second["top_logprobs"]] == [-0.5, -9999.0]
    chunks = await events(mesh, "/v1/chat/completions", body)
    assert chunks[2]["choices"][0]["logprobs"]["content"][0] == second

    body = {**COMPLETION, "logprobs": 2}
    _, answer = await mesh.call("POST", "/v1/completions", body)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "é"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -9999.0}, {"é": -0.5, "e": -9999.0}],
        "text_offset": [0, 1],
    }
    chunks = await events(mesh, "/v1/completions", body)
    assert chunks[1]["choices"][0]["logprobs"]["text_offset"] == [1]


async def test_the_official_client(mesh: Any, bard: Any) -> None:
    import openai  # takes a second, of every process that collects tests

    url = f"{mesh.orchestrator.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["bard"]
        assert (await client.models.retrieve("bard")).owned_by == "motley"
        chat = await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert chat.choices[0].message.content == "Hello, world"
        completion = await client.completions.create(**COMPLETION)
        assert completion.choices[0].text == "Hello, world"
        stream = await client.chat.completions.create(
            model="bard",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 4},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3
        assert bard.generated[-1].sampling.top_k == 4
        text = [c.choices[0].text async for c in await client.completions.create(**COMPLETION, stream=True)]
        assert "".join(text) == "Hello, world"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(**{**CHAT, "model": "gpt"})  # type: ignore[call-overload]
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert "served: bard" in str(caught.value)
        with pytest.raises(openai.BadRequestError, match="temperature must be at most 2, not 3"):
            await client.chat.completions.create(**CHAT, temperature=3)  # type: ignore[call-overload]
        bard.answer = breaking
        with pytest.raises(openai.APIError, match="rank 2 is gone"):
            [chunk async for chunk in await client.completions.create(**COMPLETION, stream=True)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_known_at_once_has_its_status(mesh: Any, bard: Any, stream: bool) -> None:
    bard.answer = failing
    status, body = await mesh.call("POST", "/v1/chat/completions", {**CHAT, "stream": stream})
    assert status == 400
    assert body == {
        "error": {
            "message": "12 tokens, 8 allowed",
            "type": "invalid_request_error",
            "param": None,
            "code": "context_length_exceeded",
        }
    }


async def test_an_answer_that_breaks_off_says_so(mesh: Any, bard: Any) -> None:
    bard.answer = breaking
    status, body = await mesh.call("POST", "/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"], body["error"]["type"]) == (503, "peer_lost", "server_error")
    *chunks, last = await events(mesh, "/v1/chat/completions", CHAT)
    assert chunks[-1]["choices"][0]["delta"] == {"content": "Once upon"}
    assert last["error"]["message"] == "rank 2 is gone"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels(mesh: Any, bard: Any, stream: bool) -> None:
    bard.answer = stuck
    body = {**CHAT, "stream": stream}
    async with aiohttp.ClientSession(mesh.orchestrator.http_url) as client:
        post = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await bard.until(lambda: bard.generated)
        if stream:
            response = await post
            await response.content.readline()
            response.close()
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
    async with asyncio.timeout(DEADLINE_S):
        assert await bard.cancelled.get() == bard.generated[0].request_id


async def test_a_lost_node_ends_its_requests_at_once(mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    bard.answer = stuck

    async with mesh.http.post("/v1/completions", json={**COMPLETION, "stream": True}) as response:
        await response.content.readline()
        whole = asyncio.create_task(mesh.call("POST", "/v1/chat/completions", CHAT))
        await bard.until(lambda: len(bard.generated) == 2)
        async with asyncio.timeout(DEADLINE_S):
            await bard.leave()
            status, body = await whole
            last = last_event(await response.text())
    assert (status, body["error"]["code"]) == (503, "node_lost")
    assert "node 'pc' (rank 0) is lost" in body["error"]["message"]
    assert last["error"]["code"] == "node_lost"
    status, body = await mesh.call("POST", "/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"]) == (503, "node_lost")
    assert "the session of 'bard' is paused until a plan fits" in body["error"]["message"]
    refused = body
    _, body = await mesh.call("GET", "/v1/models")
    assert body["data"] == []
    assert await mesh.call("GET", "/v1/models/bard") == (status, refused)


async def starving(_: Generate) -> AsyncIterator[Delta]:
    yield Delta(finish="error", failure=Failure(code="out_of_memory", message="there is no memory for 4096 tokens"))


async def starving_later(generate: Generate) -> AsyncIterator[Delta]:
    yield Delta(text="Once upon")
    async for delta in starving(generate):
        yield delta


async def test_a_request_for_which_there_is_no_memory_is_told_so_and_may_be_tried_again(mesh: Any, bard: Any) -> None:
    told = {
        "message": "there is no memory for 4096 tokens",
        "type": "server_error",
        "param": None,
        "code": "out_of_memory",
    }
    bard.answer = starving
    for stream in (False, True):
        status, body = await mesh.call("POST", "/v1/completions", {**COMPLETION, "stream": stream})
        assert (status, body["error"]) == (503, told)
    bard.answer = starving_later
    *_, last = await events(mesh, "/v1/completions", COMPLETION)
    assert last["error"] == told


async def test_a_model_that_is_still_loading_is_not_there_yet(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())

    async def listen(command: RankCommand) -> None:
        if command.WhichOneof("body") == "assign":
            await node.obey(command)

    node.on_rank = listen
    assert (await mesh.call("POST", "/api/sessions", {"model": "bard"}))[0] == 201
    status, body = await mesh.call("GET", "/v1/models/bard")
    assert (status, body["error"]["code"]) == (503, "session_not_ready")


async def test_a_request_ends_with_the_word_of_the_rank_to_blame(mesh: Any, new_node: Any) -> None:
    first, second = [await mesh.join(new_node(name)) for name in ("pc", "box")]
    await mesh.serve(nodes=["pc", "box"], recover=False)
    first.answer = stuck

    async def explain(command: RankCommand) -> None:
        if command.WhichOneof("body") == "release":
            await second.event(command, failed=Failure(code="out_of_memory", message="its GPU is full"))

    second.on_rank = explain
    async with mesh.http.post("/v1/completions", json={**COMPLETION, "stream": True}) as response:
        await response.content.readline()
        lost = Failure(code="peer_lost", message="rank 1 is lost", lost_rank=2)
        await first.event(first.commands[-1], failed=lost)
        async with asyncio.timeout(DEADLINE_S):
            last = last_event(await response.text())
    assert (last["error"]["code"], last["error"]["message"]) == (
        "out_of_memory",
        "node 'box' (rank 1): its GPU is full",
    )


async def test_a_node_that_leaves_ends_its_requests_and_is_said_to_have_left(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    bard.answer = stuck
    whole = asyncio.create_task(mesh.call("POST", "/v1/completions", COMPLETION))
    await bard.until(lambda: bard.generated)
    await bard.send(leaving=Empty())
    status, body = await whole
    assert (status, body["error"]["code"]) == (503, "node_lost")
    assert body["error"]["message"].startswith("node 'pc' (rank 0) has left: its daemon was ended there. ")
    assert await bard.ended() is grpc.StatusCode.ABORTED
    _, body = await mesh.call("GET", "/api/nodes")
    assert (body["nodes"][0]["state"], body["nodes"][0]["lost"]) == ("left", "its daemon was ended there")


async def test_requests_are_told_that_the_orchestrator_stops(mesh: Any, bard: Any) -> None:
    bard.answer = stuck
    async with mesh.http.post("/v1/completions", json={**COMPLETION, "stream": True}) as response:
        await response.content.readline()
        stopping = asyncio.create_task(mesh.orchestrator.stop())
        assert last_event(await response.text())["error"]["message"] == "the orchestrator is shutting down"
        await stopping


async def test_a_deleted_session_ends_its_requests(mesh: Any, bard: Any) -> None:
    bard.answer = stuck
    async with mesh.http.post("/v1/completions", json={**COMPLETION, "stream": True}) as response:
        await response.content.readline()
        _, listed = await mesh.call("GET", "/api/sessions")
        await mesh.call("DELETE", f"/api/sessions/{listed['sessions'][0]['id']}")
        assert last_event(await response.text())["error"]["code"] == "session_closed"
    status, body = await mesh.call("POST", "/v1/completions", COMPLETION)
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_a_silent_leader_is_given_up(mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 0.5)
    bard.answer = stuck
    status, body = await mesh.call("POST", "/v1/completions", COMPLETION)
    assert (status, body["error"]["code"]) == (504, "timed_out")
    assert "node 'pc' (rank 0) has said nothing of this request" in body["error"]["message"]
    assert await bard.cancelled.get() == bard.generated[0].request_id


async def test_requests_run_side_by_side(mesh: Any, bard: Any) -> None:
    async def echo(generate: Generate) -> AsyncIterator[Delta]:
        for letter in generate.prompt:
            await asyncio.sleep(0)
            yield Delta(text=letter)
        yield Delta(finish="stop")

    bard.answer = echo
    prompts = [f"prompt {number}" for number in range(20)]
    answers = await asyncio.gather(
        *(mesh.call("POST", "/v1/completions", {**COMPLETION, "prompt": prompt}) for prompt in prompts)
    )
    assert [body["choices"][0]["text"] for _, body in answers] == prompts


async def told(generate: Generate) -> AsyncIterator[Delta]:
    """The prompt and the seed, a letter at a time."""
    for letter in f"{generate.prompt}{generate.sampling.seed}":
        await asyncio.sleep(0)
        yield Delta(text=letter, ids=[1])
    cached = max(0, 5 - generate.sampling.seed)  # the second answer finds less
    yield Delta(finish="stop", prompt_tokens=10, completion_tokens=2, cached_tokens=cached, accepted_drafts=1)


async def test_several_answers_to_several_prompts(mesh: Any, bard: Any) -> None:
    """Whole, streamed, and as the official client reads them: in the order of the prompts, each prompt counted once."""
    import openai

    bard.answer = told
    asked = {**COMPLETION, "prompt": ["a", "b"], "n": 2, "seed": 3}
    texts = ["a3", "a4", "b3", "b4"]
    usage = {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}
    _, body = await mesh.call("POST", "/v1/completions", asked)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate(texts))
    assert body["usage"].items() >= usage.items()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert body["usage"]["completion_tokens_details"] == {"accepted_prediction_tokens": 4}

    *chunks, last, done = await events(mesh, "/v1/completions", {**asked, "stream_options": {"include_usage": True}})
    assert (done, last["usage"]) == ("[DONE]", body["usage"])
    streamed = [""] * 4
    ends = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends.append(choice["index"])
            assert "timings" in chunk
    assert streamed == texts
    assert sorted(ends) == [0, 1, 2, 3]

    async with openai.AsyncOpenAI(base_url=f"{mesh.orchestrator.http_url}/v1", api_key="none") as client:
        chat = await client.chat.completions.create(**CHAT, n=2, seed=8)
        assert [(choice.index, choice.message.content) for choice in chat.choices] == [(0, "8"), (1, "9")]
        roles = [
            choice.index
            async for chunk in await client.chat.completions.create(**CHAT, n=2, seed=8, stream=True)
            for choice in chunk.choices
            if choice.delta.role
        ]
        assert sorted(roles) == [0, 1]


async def test_answers_that_were_asked_for_together_end_together(mesh: Any, new_node: Any) -> None:
    """One that fails fails all, and one place too few is no place for any."""
    node = await mesh.join(new_node())
    await mesh.serve(sequences=3, queue=0)

    async def second_fails(generate: Generate) -> AsyncIterator[Delta]:
        if generate.sampling.seed == 1:
            yield Delta(finish="error", failure=Failure(code="peer_lost", message="rank 2 is gone"))
        else:
            yield Delta(text="Once")
            await asyncio.Event().wait()

    node.answer = second_fails
    status, body = await mesh.call("POST", "/v1/completions", {**COMPLETION, "n": 3, "seed": 0})
    assert (status, body["error"]["code"]) == (503, "peer_lost")
    first, _, third = (generate.request_id for generate in node.generated)
    assert {await node.cancelled.get(), await node.cancelled.get()} == {first, third}

    node.answer = stuck
    async with mesh.http.post("/v1/completions", json={**COMPLETION, "n": 2, "stream": True}) as response:
        await response.content.readline()
        status, body = await mesh.call("POST", "/v1/completions", {**COMPLETION, "n": 2})
        assert status == 429
        await node.until(lambda: len(node.generated) >= 5)  # the second one may still be on its way
        assert len(node.generated) == 5
        assert "'bard' has 2 requests of the 3 that its session takes" in body["error"]["message"]
    gone = {await node.cancelled.get(), await node.cancelled.get()}
    assert gone == {generate.request_id for generate in node.generated[3:]}, "their client has gone"
    status, body = await mesh.call("POST", "/v1/completions", {**COMPLETION, "n": 4})
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert "'bard' takes 3 requests at a time" in body["error"]["message"]


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b'{"model": NaN}', 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b"[]", 400, None),
        (b'{"model": "bard", "messages": [], "surprise": 1}', 400, "invalid_value"),
        (b" " * (2 * 1024 * 1024 + 1), 413, "request_too_large"),
    ],
    ids=["empty", "cut", "binary", "nan", "deep", "list", "messages", "large"],
)
async def test_bad_bodies(mesh: Any, data: bytes, status: int, code: str | None) -> None:
    async with mesh.http.post("/v1/chat/completions", data=io.BytesIO(data)) as response:
        body = await response.json()
        assert (response.status, body["error"]["code"]) == (status, code)


async def test_unknown_routes_and_methods_have_the_same_form(mesh: Any) -> None:
    status, body = await mesh.call("GET", "/v1/nothing")
    assert (status, body["error"]["code"]) == (404, "not_found")
    status, body = await mesh.call("GET", "/v1/completions")
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")
    assert body["error"]["message"] == "/v1/completions takes POST, not GET"
    status, body = await mesh.call("GET", "/v1/models/owner/name")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_beyond_what_a_session_takes_requests_are_refused_until_others_end(mesh: Any, new_node: Any) -> None:
    import openai

    node = await mesh.join(new_node())
    session = await mesh.serve(sequences=2, queue=1)
    assert (session["sequences"], session["queue"]) == (2, 1)
    assert of_kind(node, "assign")[0].assign.sequences == 2
    node.answer = stuck
    taken = [asyncio.create_task(mesh.call("POST", "/v1/completions", COMPLETION)) for _ in range(3)]
    await node.until(lambda: len(node.generated) == 3)
    for stream in (False, True):
        async with mesh.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "60")
            assert (await response.json())["error"] == {
                "message": "'bard' has 3 requests, as many as its session takes (2 under way and 1 that wait); "
                "try again in 60 seconds",
                "type": "rate_limit_error",
                "param": None,
                "code": "too_many_requests",
            }
    url = f"{mesh.orchestrator.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(**COMPLETION)
    assert len(node.generated) == 3, "the node has heard of none that was refused"

    taken[0].cancel()
    async with asyncio.timeout(DEADLINE_S):
        await node.cancelled.get()
        node.answer = say
        assert (await mesh.call("POST", "/v1/completions", COMPLETION))[0] == 200
        assert (await mesh.call("POST", "/v1/completions", COMPLETION))[0] == 200, "a place serves again"
        node.answer = stuck
        again = asyncio.create_task(mesh.call("POST", "/v1/completions", COMPLETION))
        await node.until(lambda: len(node.generated) == 6)
        async with mesh.http.post("/v1/completions", json=COMPLETION) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1"), "as fast as others have ended"
    for task in (*taken, again):
        task.cancel()
    await asyncio.gather(*taken, again, return_exceptions=True)


async def test_silence_of_one_request_counts_though_others_are_answered(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 1.0)

    async def chatty_or_mute(generate: Generate) -> AsyncIterator[Delta]:
        while generate.prompt == "Chat":
            yield Delta(text="a", ids=[1])
            await asyncio.sleep(0.05)
        await asyncio.Event().wait()

    bard.answer = chatty_or_mute
    async with mesh.http.post("/v1/completions", json={**COMPLETION, "prompt": "Chat", "stream": True}) as chatting:
        await chatting.content.readline()
        async with asyncio.timeout(DEADLINE_S):
            status, body = await mesh.call("POST", "/v1/completions", COMPLETION)
        assert (status, body["error"]["code"]) == (504, "timed_out")
        assert await bard.cancelled.get() == bard.generated[1].request_id
        assert await chatting.content.readline(), "the other goes on"


async def test_a_request_of_which_there_are_signs_of_life_goes_on(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 1.5)

    async def slow(_: Generate) -> AsyncIterator[Delta]:
        for _ in range(6):
            await asyncio.sleep(0.4)
            yield Delta()
        yield Delta(text="at last", ids=[1], finish="stop", completion_tokens=1)

    bard.answer = slow
    status, body = await mesh.call("POST", "/v1/completions", COMPLETION)
    assert (status, body["choices"][0]["text"]) == (200, "at last")


async def test_what_is_served_is_published(mesh: Any) -> None:
    status, document = await mesh.call("GET", "/openapi.json")
    assert (status, document["openapi"]) == (200, "3.1.0")
    taken = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    chat = document["components"]["schemas"][taken["$ref"].rpartition("/")[2]]
    assert {"messages", "model"} == set(chat["required"])
    assert chat["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
    described = document["components"]["schemas"]["JsonSchema"]["properties"]["schema"]["description"]
    assert described == "Features that are not supported are refused by name."
    refs = re.findall(r"#/components/schemas/(\w+)", json.dumps(document))
    assert set(refs) <= set(document["components"]["schemas"])
    assert "/api/sessions/{id}" in document["paths"]


async def test_every_answer_has_an_id(mesh: Any, bard: Any) -> None:
    async with aiohttp.ClientSession(mesh.orchestrator.http_url) as http:
        told = []
        for headers in ({}, {}, {"X-Request-Id": "mine-1"}, {"X-Request-Id": "no <word>"}):
            for path in ("/version", "/v1/nothing"):
                async with http.get(path, headers=headers) as response:
                    told.append(response.headers["x-request-id"])
                    assert path == "/v1/nothing" or set(await response.json()) == {"version", "time"}
        body = {"model": "bard", "prompt": "Hi", "stream": True}
        async with http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-2"}) as response:
            assert response.headers["x-request-id"] == "mine-2"
    assert told[4:6] == ["mine-1"] * 2
    others = [*told[:4], *told[6:]]
    assert len({*others}) == 6
    assert all(re.fullmatch("req_[0-9a-f]{24}", each) for each in others)


async def test_an_answer_is_as_long_as_the_models_makers_say_where_a_request_does_not(mesh: Any, new_node: Any) -> None:
    node = new_node()
    profile = small_profile()
    profile.usual_tokens = 200
    node.on_describe = lambda _: Described(profile=profile)
    await mesh.join(node)
    await mesh.serve()
    for asked in ({}, {"max_tokens": None}, {"max_tokens": 500}):
        assert (await mesh.call("POST", "/v1/completions", {"model": "bard", "prompt": "Hi", **asked}))[0] == 200
    assert [(each.max_tokens, each.usual_tokens) for each in node.generated] == [(0, 16), (0, 200), (500, 200)]
