"""The map of experts and rebalancing, as clients see them."""

from __future__ import annotations

from typing import Any

import pytest

from motley.protocol.mesh_pb2 import (
    ExpertLoad,
    HostReport,
    ModelProfile,
)

from ..conftest import report


async def test_the_map_of_experts(mesh: Any, nodes: list[Any]) -> None:
    session = await mesh.serve()
    path = f"/api/sessions/{session['id']}/experts"
    await report(
        nodes[0],
        loads=[ExpertLoad(layer=layer, rows=[200, 200, 0, 0, 0, 0, 0, 0]) for layer in range(4)],
        hosts=[HostReport(host=1, rows=75, round_trip_s=0.002), HostReport(host=2, rows=25, stalls_s=[0.1])],
        bytes_out=1000,
        bytes_in=500,
    )
    body = await mesh.poll(path, lambda body: body["bytes_out"])
    assert (body["bytes_in"], body["replicas"], body["waiting_for"]) == (500, {"asked": 1, "least": 1}, [])
    assert [(host["rows"], host["load"]) for host in body["hosts"]] == [(0, 0), (75, 0.75), (25, 0.25)]
    assert body["hosts"][1]["round_trip_ms"] == pytest.approx(2)
    assert body["hosts"][2]["stalls_ms"] == pytest.approx([100])
    assert [group["layers"] for group in body["groups"]] == [[0], [1], [2], [3]]
    for group in body["groups"]:
        assert [expert["load"] for expert in group["experts"][:3]] == pytest.approx([2.83, 2.83, 0.39], abs=0.01)
        assert all([host["state"] for host in expert["hosts"]] == ["serving"] for expert in group["experts"])
    assert sum(host["serving"] for host in body["hosts"]) == 32
    status, each = await mesh.call("GET", f"{path}?layers=each")
    assert (status, len(each["groups"])) == (200, 4)


async def test_many_layers_are_shown_in_groups(mesh: Any, nodes: list[Any], moe: ModelProfile) -> None:
    moe.expert_layers.extend(range(4, 19))
    session = await mesh.serve()
    _, body = await mesh.call("GET", f"/api/sessions/{session['id']}/experts")
    assert [len(group["layers"]) for group in body["groups"]] == [3, 3, 3, 2, 2, 2, 2, 2]
    assert all(
        sum(host["layers"] for host in expert["hosts"]) == len(group["layers"])
        for group in body["groups"]
        for expert in group["experts"]
    )
    _, body = await mesh.call("GET", f"/api/sessions/{session['id']}/experts?layers=each")
    assert [group["layers"] for group in body["groups"]] == [[layer] for layer in range(19)]


async def test_rebalancing(mesh: Any, nodes: list[Any], moe: ModelProfile) -> None:
    moe.expert_bytes = 10_000_000
    session = await mesh.serve()
    path = f"/api/sessions/{session['id']}/experts"
    status, body = await mesh.call("POST", f"{path}/rebalance")
    assert (status, body["moves"]) == (200, 0)
    assert body["busy_ms"] == body["busy_ms_after"] > 0
    _, experts = await mesh.call("GET", f"{path}?layers=each")
    loads = [
        ExpertLoad(layer=layer, rows=[150 * (e["hosts"][0]["host"] == 1) for e in group["experts"]])
        for layer, group in enumerate(experts["groups"])
    ]
    await report(nodes[0], loads=loads, bytes_out=1)
    await mesh.poll(path, lambda body: body["bytes_out"])
    status, body = await mesh.call("POST", f"{path}/rebalance")
    assert status == 200
    assert 0 < body["moves"] <= 8
    assert body["busy_ms_after"] < body["busy_ms"]
    status, body = await mesh.call("POST", f"{path}/rebalance")
    assert (status, body["error"]["code"]) == (409, "experts_moving")


@pytest.mark.parametrize(
    ("fields", "status", "match"),
    [
        ({"experts": "scattered"}, 400, "experts must be one of auto, sliced, parallel"),
        ({"replicas": 0}, 400, "replicas must be at least 1"),
        ({"trunk": 0}, 400, "trunk must be at least 1"),
        ({"experts": "sliced", "replicas": 2}, 400, "replicas is for experts on nodes of their own"),
        ({"experts": "sliced", "trunk": 2}, 400, "trunk is for experts on nodes of their own"),
        ({"experts": "parallel", "shares": [1, 1, 1]}, 400, "shares are of sliced experts"),
        ({"replicas": 4}, 422, "4 different nodes; with room for experts there are 3 (box, laptop, pc), 1 missing"),
        ({"trunk": 4}, 400, "a trunk of 4 ranks needs as many nodes; 3 take part"),
    ],
)
async def test_bad_requests(mesh: Any, nodes: list[Any], fields: Any, status: int, match: str) -> None:
    told, body = await mesh.call("POST", "/api/sessions", {"model": "mix", **fields})
    assert (told, match in body["error"]["message"]) == (status, True), body
    assert status != 400 or body["error"]["param"] in fields
    assert await mesh.call("GET", "/api/sessions") == (200, {"sessions": []})


async def test_a_model_without_experts_has_none_to_place(mesh: Any, bard: Any) -> None:
    status, body = await mesh.call("POST", "/api/sessions", {"model": "x", "name": "x", "experts": "parallel"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_request", "experts")
    assert "bard (llama) has no experts" in body["error"]["message"]
    _, listed = await mesh.call("GET", "/api/sessions")
    assert listed["sessions"][0]["experts"] is None


async def test_bad_queries(mesh: Any, nodes: list[Any]) -> None:
    session = await mesh.serve()
    status, body = await mesh.call("GET", f"/api/sessions/{session['id']}/experts?layers=some")
    assert (status, body["error"]["param"]) == (400, "layers")
    for method, path in (("GET", "experts"), ("POST", "experts/rebalance")):
        assert (await mesh.call(method, f"/api/sessions/nope/{path}"))[0] == 404


# ---------------------------------------------------------------- nodes that change while a session is planned
