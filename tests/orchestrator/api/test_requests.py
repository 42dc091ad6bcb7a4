"""What a request is called, from the HTTP request to the logs of all nodes, and which requests are under way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motley.protocol.mesh_pb2 import Delta, Generate

COMPLETION = {"model": "bard", "prompt": "Hi"}


async def test_a_request_has_one_name_everywhere(mesh: Any, new_node: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "motley")  # whether answers are logged is decided when a client connects
    nodes = [await mesh.join(new_node(name)) for name in ("a", "b")]
    session = await mesh.serve(nodes=["a", "b"])
    headers = {"X-Request-Id": "mine-7"}
    async with mesh.http.post("/v1/completions", json=COMPLETION, headers=headers) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (200, "mine-7")
    assert nodes[0].generated[0].name == "mine-7"
    assert not nodes[0].involved
    await nodes[1].until(lambda: len(nodes[1].involved) == 2)
    told = [(each.name, each.session, each.rank, each.ended) for each in nodes[1].involved]
    assert told == [("mine-7", session["id"], 1, ended) for ended in (False, True)]
    about = [record for record in caplog.records if getattr(record, "request", None) == "mine-7"]
    lines = [(record.name.rpartition(".")[2], record.getMessage().partition(" in ")[0]) for record in about]
    assert lines[0] == ("requests", "request mine-7: asked of bard")
    assert lines[1][1].startswith("request mine-7: answered after")
    assert lines[2] == ("access", "POST /v1/completions: 200")
    assert len(lines) == 3


async def test_a_word_that_would_not_do_in_a_log_is_replaced(mesh: Any, bard: Any) -> None:
    headers = {"X-Request-Id": "no word {}"}
    async with mesh.http.post("/v1/completions", json=COMPLETION, headers=headers) as response:
        told = response.headers["X-Request-Id"]
    assert told.startswith("req_")
    assert bard.generated[0].name == told


async def test_requests_under_way_are_told(mesh: Any, bard: Any) -> None:
    go_on = asyncio.Event()

    async def slow(_: Generate) -> AsyncIterator[Delta]:
        yield Delta(text="Once", ids=[1, 2])
        await go_on.wait()
        yield Delta(finish="stop", completion_tokens=2)

    bard.answer = slow
    assert await mesh.call("GET", "/api/requests") == (200, {"requests": []})
    asking = asyncio.create_task(mesh.call("POST", "/v1/completions", COMPLETION))
    body = await mesh.poll("/api/requests", lambda body: body["requests"] and body["requests"][0]["tokens"])
    (request,) = body["requests"]
    assert request.pop("seconds") >= 0
    assert request == {"name": bard.generated[0].name, "model": "bard", "state": "answering", "tokens": 2}
    go_on.set()
    assert (await asking)[0] == 200
    assert await mesh.call("GET", "/api/requests") == (200, {"requests": []})
