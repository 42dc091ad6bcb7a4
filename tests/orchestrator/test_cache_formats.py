"""What a session's caches are kept as: from the request or the command line to the assignments of its ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from motley.orchestrator.planning.setup import lacking_format
from motley.protocol.mesh_pb2 import Capabilities, Describe, Described, Engine
from tests.orchestrator.conftest import small_profile

Motley = Callable[..., Awaitable[tuple[int, str, str]]]
ALL = ("fp32", "fp16", "int8")


def able(node: Any) -> Any:
    """A node whose CPU engine has all formats; it has another that says nothing of formats."""
    node.capabilities.engines[0].cache_formats.extend(ALL)
    node.capabilities.engines.add(name="warp")
    return node


async def test_it_reaches_the_planner_and_the_ranks(mesh: Any, new_node: Any) -> None:
    node, asked = await mesh.join(able(new_node())), list[Describe]()

    def describe(order: Describe) -> Described:
        asked.append(order)
        return Described(profile=small_profile())

    node.on_describe = describe
    for cache_format in ALL:
        session = await mesh.serve(name=cache_format, cache_format=cache_format, context=100)
        assert session["cache_format"] == cache_format
        order = [command.assign for command in node.commands if command.WhichOneof("body") == "assign"][-1]
        assert (order.model.cache_format, asked[-1].model.cache_format) == (cache_format, cache_format)
    assert (await mesh.serve(name="untold", context=100))["cache_format"] == "fp32"


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        (
            {"cache_format": "int8", "engine": "warp"},
            "unusable_engine",
            "engine 'warp' of node 'pc' cannot keep KV caches as 'int8'; it can as: fp32. Engines there that can as"
            " 'int8': onnxruntime",
        ),
        ({"cache_format": "fp16", "engines": {"pc": "warp"}}, "unusable_engine", "cannot keep KV caches as 'fp16'"),
        ({"cache_format": "int4"}, "invalid_value", "cache_format must be one of fp32, fp16, int8, not 'int4'"),
    ],
)
async def test_what_an_engine_cannot_keep_is_refused_when_it_is_planned(
    fields: dict[str, Any], code: str, words: str, mesh: Any, new_node: Any
) -> None:
    node = await mesh.join(able(new_node()))
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", **fields})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, code, "cache_format")
    assert words in body["error"]["message"]
    assert not node.commands


def test_an_engine_that_says_nothing_of_formats_has_fp32() -> None:
    node = Capabilities(engines=[Engine(name="plain"), Engine(name="half", cache_formats=["fp32", "fp16"])])
    assert lacking_format("pc", node, "plain", "fp32") == ""
    assert lacking_format("pc", node, "half", "fp16") == ""
    assert lacking_format("pc", node, "plain", "int8").endswith("Engines there that can as 'int8': none")


async def test_the_command_line_gives_and_tells_it(mesh: Any, new_node: Any, motley: Motley) -> None:
    await mesh.join(able(new_node()))
    status, _, err = await motley("run", "bard", "Hi", "--cache-format", "int8", "--no-recover")
    assert status == 0, err
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    assert session["cache_format"] == "int8"
    assert "bard: stored (), context 2048, caches in int8, ready" in (await motley("status"))[1]
    assert (await motley("run", "bard", "Hi"))[0] == 0
    for other in ("fp32", "fp16"):
        status, _, err = await motley("run", "bard", "Hi", "--cache-format", other)
        assert (status, "loaded with caches in int8: leave out --cache-format, or" in err) == (1, True), err
    status, _, err = await motley("run", "bard", "Hi", "--cache-format", "int4")
    assert (status, "'int4' is not one of 'fp32', 'fp16', 'int8'" in " ".join(err.split())) == (2, True), err
