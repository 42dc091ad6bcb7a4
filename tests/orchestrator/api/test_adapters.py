"""Adapters over real sockets: added, listed, named in requests, pinned and removed; the leader is a scripted node."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motley.orchestrator.serving.kept_sessions import FOLDER
from motley.orchestrator.sessions.files import read
from motley.orchestrator.workers import Away
from motley.protocol.mesh_pb2 import Activity, Delta, Described, Empty, Generate

from ..conftest import of_kind, say
from .test_operators import numbers

COMPLETION = {"model": "bard", "prompt": "Hi"}


def print_of(folder: str) -> str:
    return hashlib.sha256(folder.encode()).hexdigest()


@pytest.fixture
async def leader(mesh: Any, new_node: Any) -> Any:
    node = await mesh.join(new_node())
    await mesh.serve(adapters=2, adapter_rank=16)
    return node


async def add(mesh: Any, name: str, folder: str, **more: Any) -> dict[str, Any]:
    body = {"model": "bard", "name": name, "folder": folder, **more}
    status, told = await mesh.call("POST", "/api/adapters", body)
    assert status == 201, told
    return dict(told)


async def test_requests_name_an_adapter_behind_the_model_or_by_itself(mesh: Any, leader: Any) -> None:
    (assigned,) = of_kind(leader, "assign")
    assert (assigned.assign.adapters, assigned.assign.adapter_rank) == (2, 16)
    told = await add(mesh, "poems", "/poems")
    assert told == {
        "model": "bard",
        "name": "poems",
        "served_as": "bard:poems",
        "folder": "/poems",
        "fingerprint": print_of("/poems"),
        "rank": 8,
        "bytes": 4000,
        "pinned": False,
        "loaded": False,
    }
    for named in ({"model": "bard:poems"}, {"adapter": "poems"}, {"model": "bard:poems", "adapter": "poems"}):
        status, body = await mesh.call("POST", "/v1/completions", {**COMPLETION, "n": 2, **named})
        assert (status, body["model"]) == (200, "bard:poems")
    await mesh.call("POST", "/v1/completions", COMPLETION)
    adapters = [(each.adapter.fingerprint, each.adapter.source) for each in leader.generated]
    assert adapters == [(print_of("/poems"), "/poems")] * 6 + [("", "")]
    chat = {"model": "bard:poems", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
    assert (await mesh.call("POST", "/v1/messages", chat))[1]["model"] == "bard:poems"
    assert (await mesh.call("POST", "/v1/responses", {"model": "bard", "adapter": "poems", "input": "Hi"}))[0] == 200
    assert all(each.HasField("adapter") for each in leader.generated[-2:])


async def test_models_are_listed_with_their_adapters(mesh: Any, leader: Any) -> None:
    await add(mesh, "poems", "/poems")
    _, models = await mesh.call("GET", "/v1/models")
    assert [model["id"] for model in models["data"]] == ["bard", "bard:poems"]
    assert (await mesh.call("GET", "/v1/models/bard:poems"))[1]["parent"] == "bard"
    await leader.event(of_kind(leader, "peers")[0], activity=Activity(adapters=[print_of("/poems")], adapter_loads=3))
    listed = await mesh.poll("/api/adapters", lambda body: body["adapters"][0]["loaded"])
    assert [each["name"] for each in listed["adapters"]] == ["poems"]
    _, sessions = await mesh.call("GET", "/api/sessions")
    (session,) = sessions["sessions"]
    assert (session["adapters"], session["known_adapters"]) == (2, listed["adapters"])
    assert session["activity"]["adapters"] == [print_of("/poems")]


@pytest.mark.parametrize(
    ("asked", "param"), [({"model": "bard:none"}, "model"), ({"adapter": "none"}, "adapter"), ({"model": ":"}, "model")]
)
async def test_an_unknown_adapter_is_told_as_an_unknown_model(
    mesh: Any, leader: Any, asked: dict[str, str], param: str
) -> None:
    status, body = await mesh.call("POST", "/v1/completions", {**COMPLETION, **asked})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", param)
    assert not leader.generated


async def test_two_adapters_for_one_request_are_refused(mesh: Any, leader: Any) -> None:
    status, body = await mesh.call("POST", "/v1/completions", {**COMPLETION, "model": "bard:a", "adapter": "b"})
    assert (status, body["error"]["param"]) == (400, "adapter")


async def test_what_cannot_be_added_is_refused_by_name(mesh: Any, leader: Any) -> None:
    await add(mesh, "poems", "/poems")
    assert await add(mesh, "poems", "/poems"), "the same again"
    body = {"model": "bard", "name": "poems", "folder": "/other"}
    for change, status, code, words in (
        ({}, 409, "name_in_use", "another adapter named 'poems'"),
        ({"folder": "nothing"}, 400, "invalid_adapter", "no folder 'nothing'"),
        ({"model": "none"}, 404, "model_not_found", "'none'"),
        ({"name": "a:b"}, 400, "invalid_value", "name"),
        ({"file": "x"}, 400, "unknown_parameter", "file"),
    ):
        got, told = await mesh.call("POST", "/api/adapters", body | change)
        assert (got, told["error"]["code"]) == (status, code)
        assert words in told["error"]["message"]
    await mesh.serve(name="plain")
    got, told = await mesh.call("POST", "/api/adapters", body | {"model": "plain"})
    assert (got, told["error"]["param"]) == (400, "model")
    assert "--adapters 8" in told["error"]["message"]


async def test_an_adapter_that_is_removed_while_it_answers_finishes(mesh: Any, leader: Any) -> None:
    goes_on = asyncio.Event()

    async def slowly(generate: Generate) -> AsyncIterator[Delta]:
        yield Delta(text="Once", ids=[1])
        await goes_on.wait()
        async for delta in say(generate):
            yield delta

    leader.answer = slowly
    await add(mesh, "poems", "/poems", pinned=True)
    asked = asyncio.create_task(mesh.call("POST", "/v1/completions", {**COMPLETION, "adapter": "poems"}))
    await leader.until(lambda: bool(leader.generated))
    assert (await mesh.call("DELETE", "/api/adapters/bard/poems"))[0] == 200
    assert of_kind(leader, "adapter")[-1].adapter.unpin
    assert (await mesh.call("POST", "/v1/completions", {**COMPLETION, "adapter": "poems"}))[0] == 404
    assert (await mesh.call("DELETE", "/api/adapters/bard/poems"))[1]["error"]["code"] == "adapter_not_found"
    goes_on.set()
    status, body = await asked
    assert (status, body["choices"][0]["text"]) == (200, "OnceHello, world")


async def test_pinned_ones_are_loaded_again_after_a_loss(mesh: Any, leader: Any) -> None:
    await add(mesh, "poems", "/poems")
    await add(mesh, "songs", "/songs")
    assert (await mesh.call("POST", "/api/adapters/bard/poems/pin", {}))[1]["pinned"]
    assert (await mesh.call("POST", "/api/adapters/bard/songs/pin", {"pinned": True}))[1]["pinned"]
    assert not (await mesh.call("POST", "/api/adapters/bard/songs/pin", {"pinned": False}))[1]["pinned"]
    before = len(of_kind(leader, "adapter"))
    (first,) = of_kind(leader, "assign")
    await leader.event(first, released=Empty())
    await leader.until(lambda: len(of_kind(leader, "adapter")) > before)
    (again,) = of_kind(leader, "adapter")[before:]
    assert (again.epoch, again.adapter.adapter.source, again.adapter.pin) == (2, "/poems", True)
    await mesh.session(first.session, "ready")
    status, _ = await mesh.call("POST", "/v1/completions", {**COMPLETION, "adapter": "songs"})
    assert status == 200, "all are known in the next epoch"


async def test_a_pinned_adapter_that_is_added_again_stays_pinned(mesh: Any, leader: Any) -> None:
    await add(mesh, "poems", "/poems", pinned=True)
    assert (await add(mesh, "poems", "/poems"))["pinned"]
    assert not any(each.adapter.unpin for each in of_kind(leader, "adapter"))
    assert (await mesh.call("POST", "/api/adapters/bard/poems/pin", {"pinned": False}))[1]["pinned"] is False
    assert not (await add(mesh, "poems", "/poems"))["pinned"]


async def test_a_pin_that_nobody_waits_for_is_undone(mesh: Any, leader: Any) -> None:
    """But not one that somebody else waits for, or has."""

    async def pins_wait(command: Any) -> None:
        if not command.adapter.pin:
            await leader.obey(command)

    def unpins() -> list[str]:
        return [each.adapter.adapter.fingerprint for each in of_kind(leader, "adapter") if each.adapter.unpin]

    def pins() -> int:
        return sum(each.adapter.pin for each in of_kind(leader, "adapter"))

    leader.on_rank = pins_wait
    adding = [asyncio.create_task(add(mesh, name, "/poems", pinned=True)) for name in ("poems", "verses")]
    await leader.until(lambda: pins() == 2)
    for task in adding:
        task.cancel()
    await leader.until(lambda: unpins() == [print_of("/poems")])
    await asyncio.gather(*adding, return_exceptions=True)
    await add(mesh, "songs", "/songs")
    pinning = asyncio.create_task(mesh.call("POST", "/api/adapters/bard/songs/pin", {}))
    await leader.until(lambda: pins() == 3)
    pinning.cancel()
    await leader.until(lambda: unpins() == [print_of("/poems"), print_of("/songs")])
    (only,) = (await mesh.call("GET", "/api/adapters"))[1]["adapters"]
    assert (only["name"], only["pinned"]) == ("songs", False)


async def test_what_is_pinned_under_two_names_stays_for_the_other(mesh: Any, leader: Any) -> None:
    for name in ("poems", "verses"):
        await add(mesh, name, "/poems", pinned=True)
    await mesh.call("POST", "/api/adapters/bard/poems/pin", {"pinned": False})
    assert not any(each.adapter.unpin for each in of_kind(leader, "adapter"))
    await mesh.call("DELETE", "/api/adapters/bard/verses")
    assert of_kind(leader, "adapter")[-1].adapter.unpin


async def test_a_trunk_and_its_expert_hosts_have_room_for_adapters(mesh: Any, new_node: Any, moe: Any) -> None:
    """Each takes 400 kB of each; where nothing is said of experts, they are in slices."""
    moe.adapter_elements = 1_000
    nodes = [await mesh.join(new_node(name, memory=4_000_000)) for name in ("a", "b")]
    for node in nodes:
        node.on_describe = lambda _: Described(profile=moe)
    planned = []
    for adapters in (0, 2):
        body = {"model": "bard", "adapters": adapters, "adapter_rank": 100, "experts": "parallel", "nodes": ["a", "b"]}
        status, told = await mesh.call("POST", "/api/sessions", body)
        assert (status, told["experts"]) == (201, "parallel"), told
        planned.append([told[kind][0]["memory"]["planned_bytes"] for kind in ("ranks", "hosts")])
        await mesh.call("DELETE", f"/api/sessions/{told['id']}")
    assert [more - before for before, more in zip(*planned, strict=True)] == [2 * 400_000] * 2
    del body["experts"], body["nodes"]
    status, told = await mesh.call("POST", "/api/sessions", body)
    assert (status, told["experts"]) == (201, "sliced"), told


async def test_operators_see_requests_by_adapter(mesh: Any, leader: Any) -> None:
    await add(mesh, "poems", "/poems")
    await mesh.call("POST", "/v1/completions", {**COMPLETION, "adapter": "poems"})
    told = await numbers(mesh)
    assert told["motley_adapter_requests_total", "poems", "bard", "answered"] == 1
    assert told["motley_adapter_tokens_total", "poems", "bard"] == 3
    assert told["motley_adapter_loaded", "poems", "bard"] == 0
    await mesh.call("DELETE", "/api/adapters/bard/poems")
    assert not [key for key in await numbers(mesh) if "poems" in key]


async def test_too_little_memory_says_for_how_many_adapters_there_is_room(
    mesh: Any, new_node: Any, profile: Any
) -> None:
    """Each takes 400 kB of the million bytes beside the model."""
    profile.adapter_elements = 1_000
    node = await mesh.join(new_node(memory=1_400_000))
    node.on_describe = lambda _: Described(profile=profile)
    body = {"model": "bard", "adapters": 8, "adapter_rank": 100}
    status, told = await mesh.call("POST", "/api/sessions", body)
    assert (status, told["error"]["code"]) == (422, "insufficient_memory")
    assert "It fits with room for 2 adapters of rank 100" in told["error"]["message"]
    for adapters in (1, 3):
        _, told = await mesh.call("POST", "/api/sessions", body | {"adapters": adapters, "adapter_rank": 1000})
        assert "It fits with room for 1 adapter of rank 201" in told["error"]["message"]
    profile.adapter_elements = 10**9
    _, told = await mesh.call("POST", "/api/sessions", body)
    assert "It fits without room for adapters" in told["error"]["message"]
    profile.adapter_elements = 1_000
    assert (await mesh.call("POST", "/api/sessions", body | {"adapters": 2}))[0] == 201


async def test_what_outlives_the_orchestrator_has_the_adapters(mesh: Any, leader: Any, tmp_path: Any) -> None:
    away = Away(0.0, 30.0, "it is not back")
    (file,) = (tmp_path / "state" / FOLDER).glob("*.json")
    assert not read(file.read_bytes(), away).adapters
    await add(mesh, "poems", "/poems", pinned=True)
    (kept,) = read(file.read_bytes(), away).adapters.values()
    assert (kept.name, kept.source, kept.fingerprint, kept.pinned) == ("poems", "/poems", print_of("/poems"), True)
    await mesh.call("DELETE", "/api/adapters/bard/poems")
    assert not read(file.read_bytes(), away).adapters
