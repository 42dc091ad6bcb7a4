"""``/v1/embeddings`` over real sockets: what is asked of nodes, what clients are told, what is refused."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from motley.orchestrator.api.openai import embeddings
from motley.orchestrator.serving.answering.places import Places
from motley.protocol.mesh_pb2 import Delta, Failure, Generate

ASKED = {"model": "embedder", "input": "Hi"}


async def embed(generate: Generate) -> AsyncIterator[Delta]:
    """A vector by which the tests know the text."""
    ids = list(generate.prompt_tokens.ids) or list(generate.prompt.encode())
    yield Delta(finish="stop", prompt_tokens=len(ids), embedding=np.array([len(ids), ids[0]], "<f4").tobytes())


@pytest.fixture
async def embedder(mesh: Any, new_node: Any) -> Any:
    node = new_node()
    for engine in node.capabilities.engines:
        engine.embeds = engine.name == "onnxruntime"
    node.capabilities.engines.add(name="warp")
    node.answer = embed
    await mesh.join(node)
    await mesh.serve(name="embedder", embeddings="mean")
    return node


async def test_texts_and_tokens_in_both_encodings(mesh: Any, embedder: Any) -> None:
    (order,) = [command.assign for command in embedder.commands if command.WhichOneof("body") == "assign"]
    assert order.embeddings == "mean"
    for asked, vectors in (
        ("Hi", [[2, 72]]),
        (["Hi", "A"], [[2, 72], [1, 65]]),
        ([9, 8, 7], [[3, 9]]),
        ([[9, 8, 7], [5]], [[3, 9], [1, 5]]),
    ):
        status, body = await mesh.call("POST", "/v1/embeddings", {**ASKED, "input": asked, "user": "me"})
        assert status == 200, body
        assert (body["object"], body["model"]) == ("list", "embedder")
        data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
        assert body["data"] == data
        tokens = sum(vector[0] for vector in vectors)
        assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        _, body = await mesh.call("POST", "/v1/embeddings", {**ASKED, "input": asked, "encoding_format": "base64"})
        read = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in body["data"]]
        assert read == vectors
    assert all(generate.embed for generate in embedder.generated)


async def test_other_pooling_is_asked_anew_by_the_same_key(mesh: Any, embedder: Any) -> None:
    headers = {"Idempotency-Key": "k1"}
    for pooling in ("mean", "last"):
        for _ in range(2):
            response = await mesh.http.post("/v1/embeddings", json=ASKED, headers=headers)
            assert response.status == 200
        (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
        assert (await mesh.call("DELETE", f"/api/sessions/{session['id']}"))[0] == 200
        if pooling == "mean":
            await mesh.serve(name="embedder", embeddings="last")
    assert len(embedder.generated) == 2


async def test_many_texts_are_asked_for_some_at_a_time(
    mesh: Any, embedder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what reads a folder of documents sends them; asked again with the same key, all is known."""
    monkeypatch.setattr(embeddings, "AT_ONCE", 8)
    under_way, most, full = 0, 0, asyncio.Event()

    async def counted(generate: Generate) -> AsyncIterator[Delta]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == embeddings.AT_ONCE:
            full.set()
        await full.wait()
        async for delta in embed(generate):
            under_way -= 1
            yield delta

    embedder.answer = counted
    asked = {**ASKED, "input": [[number] for number in range(20)]}
    for at_once, generated in ((8, 20), (8, 20), (16, 36), (4, 52)):  # the last part is always alike
        monkeypatch.setattr(embeddings, "AT_ONCE", at_once)
        async with mesh.http.post("/v1/embeddings", json=asked, headers={"Idempotency-Key": "k1"}) as response:
            body = await response.json()
        assert response.status == 200, body
        assert [each["embedding"] for each in body["data"]] == [[1, number] for number in range(20)]
        assert [each["index"] for each in body["data"]] == list(range(20))
        assert body["usage"]["total_tokens"] == 20
        assert len(embedder.generated) == generated
    assert 8 <= most <= 16


async def test_what_has_been_embedded_is_not_thrown_away_where_others_take_the_places(
    mesh: Any, embedder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "AT_ONCE", 8)
    monkeypatch.setattr(Places, "retry_after", lambda self, now: 0)
    taken, take = count(), Places.take
    monkeypatch.setattr(Places, "take", lambda self, many: next(taken) not in (1, 2) and take(self, many))
    status, body = await mesh.call("POST", "/v1/embeddings", {**ASKED, "input": [[number] for number in range(20)]})
    assert status == 200, body
    assert [each["embedding"] for each in body["data"]] == [[1, number] for number in range(20)]
    assert len(embedder.generated) == 20


async def test_large_answers_are_written_beside_the_loop(
    mesh: Any, embedder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, plain = [], embeddings._encoded

    def told(*asked: Any) -> Any:
        threads.append(threading.current_thread())
        return plain(*asked)

    monkeypatch.setattr(embeddings, "_encoded", told)
    assert (await mesh.call("POST", "/v1/embeddings", ASKED))[0] == 200
    assert len(threads) == 1
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"input": ""}, "input[0]", "must not be empty"),
        ({"input": []}, "input[0]", "must be a string, a list of token ids that is not empty"),
        ({"input": ["a", ""]}, "input[1]", "must not be empty"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 items"),
        ({"dimensions": 7}, "dimensions", "must be 0 or left out: the embeddings of 'embedder' cannot be cut"),
        ({"encoding_format": "hex"}, "encoding_format", "must be one of float, base64"),
        ({"inputs": "a"}, "inputs", "is not a known parameter"),
        ({"model": "nobody"}, "model", "no model named 'nobody'"),
    ],
)
async def test_what_cannot_be_is_refused(
    mesh: Any, embedder: Any, wrong: dict[str, Any], param: str, words: str
) -> None:
    status, body = await mesh.call("POST", "/v1/embeddings", {**ASKED, **wrong})
    assert (status, body["error"]["param"]) == (404 if "model" in wrong else 400, param)
    assert words in body["error"]["message"]


async def test_of_several_texts_the_one_that_is_too_long_is_named(
    mesh: Any, embedder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "AT_ONCE", 2)

    async def limited(generate: Generate) -> AsyncIterator[Delta]:
        if len(generate.prompt) > 3:
            yield Delta(failure=Failure(code="context_length_exceeded", message="The input has 4.", param="input"))
        async for delta in embed(generate):
            yield delta

    embedder.answer = limited
    for asked, param, told in (
        (["a", "b", "c", "long"], "input[3]", "input[3]: The input has 4."),
        ("long", "input", "The input has 4."),
    ):
        status, body = await mesh.call("POST", "/v1/embeddings", {**ASKED, "input": asked})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert (body["error"]["param"], body["error"]["message"]) == (param, told)


async def test_a_session_embeds_or_answers(mesh: Any, embedder: Any) -> None:
    chat = {"model": "embedder", "messages": [{"role": "user", "content": "Hi"}]}
    status, body = await mesh.call("POST", "/v1/chat/completions", chat)
    assert (status, body["error"]["param"]) == (400, "model")
    assert "was started to embed texts; ask POST /v1/embeddings" in body["error"]["message"]
    await mesh.serve(name="bard")
    status, body = await mesh.call("POST", "/v1/embeddings", {**ASKED, "model": "bard"})
    assert (status, body["error"]["param"]) == (400, "model")
    assert "start a session with embeddings 'mean' or 'last'" in body["error"]["message"]


async def test_an_engine_that_cannot_is_refused_by_name(mesh: Any, embedder: Any) -> None:
    asked = {"model": "bard", "embeddings": "last", "engine": "warp"}
    status, body = await mesh.call("POST", "/api/sessions", asked)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unusable_engine", "embeddings")
    assert "engine 'warp' of node 'pc' cannot embed texts; engines there that can: onnxruntime" in str(body)
