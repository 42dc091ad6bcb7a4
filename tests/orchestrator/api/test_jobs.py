"""Trainings over real sockets: begun, told to nodes, kept over a restart and stopped; the nodes are scripted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from motley.orchestrator.app import Orchestrator, OrchestratorConfig
from motley.orchestrator.store.keys import Scope
from motley.protocol.mesh_pb2 import JobEvent, JobProgress, Probed

WANTED = {"name": "letters", "model": "m", "mode": "merge", "owner": "pc", "nodes": ["pc", "box"], "ticket": "0" * 32}


def kinds(node: Any) -> list[tuple[int, str | None]]:
    return [(order.member, order.WhichOneof("body")) for order in node.job_orders]


async def tell(node: Any, job: str, member: int, **body: Any) -> None:
    await node.send(job=JobEvent(job=job, epoch=1, member=member, **body))


async def begin(mesh: Any, new_node: Any) -> tuple[str, Any, Any]:
    pc, box = await mesh.join(new_node("pc")), await mesh.join(new_node("box", memory=2 * 10**9))
    status, job = await mesh.call("POST", "/api/jobs", WANTED)
    assert (status, job["state"], job["by"]) == (201, "running", "this machine"), job
    await pc.until(lambda: len(pc.job_orders) == 2)
    await box.until(lambda: len(box.job_orders) == 1)
    return str(job["id"]), pc, box


async def test_a_job_goes_its_way(mesh: Any, new_node: Any, motley: Any) -> None:
    number, pc, box = await begin(mesh, new_node)
    assert kinds(pc) == [(0, "start"), (1, "start")]
    assert [order.start.ticket for order in (*pc.job_orders, *box.job_orders)] == ["0" * 32, "", ""]
    await tell(pc, number, 0, listening="")
    await tell(pc, number, 1, listening="pc:1")
    await tell(box, number, 2, listening="box:1")
    await pc.until(lambda: len(pc.job_orders) == 3)
    peers = pc.job_orders[2].peers.peers
    assert [(each.node, each.address, each.memory_bytes) for each in peers] == [
        ("pc", "pc:1", 10**9),
        ("box", "box:1", 2 * 10**9),
    ]
    for step in range(1, 4):
        progress = JobProgress(step=step, steps=9, loss=3.0 / step, tokens_per_s=50, peak_bytes=10**8)
        await tell(box, number, 2, progress=progress)
    told = await mesh.poll("/api/jobs", lambda told: len(told["jobs"][0]["members"][2]["curve"]) == 3)
    assert told["jobs"][0]["members"][2]["latest"]["loss"] == 1.0
    status, shown, _ = await motley("jobs", "show", "letters")
    assert status == 0
    assert "box: there, step 3 of 9, loss 3.000 to 1.000" in shown
    await tell(box, number, 2, says="all is well")
    await mesh.poll(f"/api/jobs/{number}", lambda job: "box: all is well" in job["log"])
    _, shown, _ = await motley("jobs", "logs", number)
    assert "box: all is well" in shown
    await tell(pc, number, 0, done='{"adapter": "/out/adapter", "perplexity": [4.0, 2.5], "held_out": 7}')
    await box.until(lambda: kinds(box)[-1] == (0, "forget"))
    _, shown, _ = await motley("jobs", "show", number)
    assert "perplexity of 7 held-out examples: 4.00 to 2.50" in shown
    _, shown, _ = await motley("jobs", "ls")
    assert "letters" in shown
    assert "done" in shown


async def test_a_job_of_more_members_than_can_connect_is_refused(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner leads besides: 64 nodes would be 65 members, which no worker would take."""
    monkeypatch.setattr("motley.orchestrator.jobs.running.MAX_RANKS", 2)
    await mesh.join(new_node("pc"))
    await mesh.join(new_node("box"))
    status, body = await mesh.call("POST", "/api/jobs", WANTED)
    assert (status, body["error"]["param"]) == (400, "nodes")
    assert "it would have 3 members with its owner; 2 at most" in body["error"]["message"]
    assert (await mesh.call("GET", "/api/jobs"))[1]["jobs"] == []


async def test_the_owner_lends_the_model_to_nodes_that_may_have_none(mesh: Any, new_node: Any) -> None:
    _, pc, box = await begin(mesh, new_node)
    (lend,) = pc.lends
    assert (lend.source, lend.fingerprint, lend.members) == ("m", "", 3)
    assert [order.start.HasField("loan") for order in pc.job_orders] == [False, False]
    loan = box.job_orders[0].start.loan
    assert (loan.node, loan.address, loan.member, bool(loan.tls.key)) == ("pc", "pc:5000", 2, True)
    pc.refuses_to_lend = "it is a GGUF file"
    _, job = await mesh.call("POST", "/api/jobs", WANTED)
    await box.until(lambda: len(box.job_orders) == 2)
    assert not box.job_orders[1].start.HasField("loan")
    _, told = await mesh.call("GET", f"/api/jobs/{job['id']}")
    assert "pc does not lend the model: it is a GGUF file" in told["log"]


@pytest.mark.parametrize("mode", ["merge", "chain"])
async def test_workers_whose_nodes_cannot_reach_each_other_meet_by_a_relay(
    mode: str, mesh: Any, new_node: Any, motley: Any
) -> None:
    nodes = {}
    dialler, listener = ("pc", "box") if mode == "merge" else ("box", "pc")
    for name in ("pc", "box", "far"):
        nodes[name] = node = new_node(name)
        node.ways = {other: Probed(latency_s=1e-3, bandwidth=1e8) for other in ("pc", "box", "far") if other != name}
        if name == dialler:
            node.ways[listener] = Probed(failure=f"nothing answers at {listener}:4000")
        await mesh.join(node)
    await mesh.poll("/api/nodes", lambda body: all(len(node["links"]) == 2 for node in body["nodes"]))
    _, job = await mesh.call("POST", "/api/jobs", WANTED | {"nodes": ["box"], "mode": mode})
    await nodes["box"].until(lambda: len(nodes["box"].job_orders) == 1)
    await tell(nodes["pc"], job["id"], 0, listening="127.0.0.1:5000")
    await tell(nodes["box"], job["id"], 1, listening="127.0.0.1:5001")
    await nodes[dialler].until(lambda: kinds(nodes[dialler])[-1][1] == "peers")
    (relay,) = nodes["far"].relays
    target = "127.0.0.1:5001" if mode == "merge" else "127.0.0.1:5000"
    assert relay.target == target
    told = [peer.address for peer in nodes[dialler].job_orders[-1].peers.peers]
    assert told == (["far:7000"] if mode == "merge" else ["far:7000", "127.0.0.1:5001"])
    await tell(nodes["pc"], job["id"], 0, done="{}")
    await mesh.poll(f"/api/jobs/{job['id']}", lambda job: job["state"] == "done")
    status, _, _ = await motley("jobs", "show", job["id"])
    assert status == 0, "of a report that tells nothing, too"


async def test_a_job_that_is_stopped_is_forgotten_by_its_nodes(mesh: Any, new_node: Any, motley: Any) -> None:
    number, pc, box = await begin(mesh, new_node)
    status, shown, _ = await motley("jobs", "stop", "letters")
    assert (status, "stopped" in shown) == (0, True)
    for node in (pc, box):
        await node.until(lambda node=node: kinds(node)[-1] == (0, "forget"))
    box_again = new_node("box")
    box_again.jobs = [JobEvent(job=number, epoch=1, member=2, listening="box:1")], [number, "99999999"]
    await box.leave()
    await mesh.poll("/api/nodes", lambda told: any(node["state"] != "alive" for node in told["nodes"]))
    await mesh.join(box_again)
    await box_again.until(lambda: len(box_again.job_orders) == 2)
    assert {(order.job, order.WhichOneof("body")) for order in box_again.job_orders} == {
        (number, "forget"),
        ("99999999", "forget"),
    }
    mesh.nodes.remove(box)


async def test_an_orchestrator_that_is_started_again_knows_its_jobs(mesh: Any, new_node: Any, tmp_path: Path) -> None:
    """As after `kill -9`: the second orchestrator has what the first one has written, and nothing else."""
    number, pc, box = await begin(mesh, new_node)
    await tell(pc, number, 0, listening="")
    await tell(pc, number, 1, listening="pc:1")
    await tell(box, number, 2, listening="box:1")
    await pc.until(lambda: len(pc.job_orders) == 3)
    shutil.copytree(tmp_path / "state", tmp_path / "copied")
    again = Orchestrator(OrchestratorConfig("127.0.0.1", 0, http_port=0, state_dir=tmp_path / "copied"))
    await again.start()
    back = {name: new_node(name) for name in ("pc", "box")}
    back["pc"].jobs = [JobEvent(job=number, epoch=1, member=each, listening="pc:1") for each in (0, 1)], [number]
    back["box"].jobs = [JobEvent(job=number, epoch=1, member=2, listening="box:1")], [number]
    for node in back.values():
        await node.join(again.local_target, again.join_token)
    await back["pc"].until(lambda: any(order.WhichOneof("body") == "peers" for order in back["pc"].job_orders))
    assert all(order.WhichOneof("body") == "peers" for order in back["pc"].job_orders), "its workers go on"
    assert back["box"].job_orders == []
    await tell(back["pc"], number, 0, done="{}")
    await back["box"].until(lambda: kinds(back["box"]) == [(0, "forget")])
    async with aiohttp.ClientSession(again.http_url) as http, http.get("/api/jobs") as response:
        assert [job["state"] for job in (await response.json())["jobs"]] == ["done"]
    await again.stop()
    for node in back.values():
        await node.leave()


async def test_what_cannot_be_is_refused_by_name(mesh: Any, new_node: Any) -> None:
    bare = new_node("box")
    bare.capabilities.cannot_train = "it lacks torch: pip install 'motley-mesh[train]'"
    old = new_node("attic")
    old.protocol = 9
    for node in (new_node("pc"), bare, old):
        await mesh.join(node)

    async def refused(**other: Any) -> tuple[int, str]:
        status, told = await mesh.call("POST", "/api/jobs", WANTED | other)
        return status, told["error"]["message"]

    assert await refused() == (409, "node 'box' cannot train: it lacks torch: pip install 'motley-mesh[train]'")
    assert (await refused(nodes=["tv"]))[1].startswith("no live node is named 'tv'; live nodes: attic, box, pc")
    assert (await refused(nodes=["attic"]))[1].startswith("node 'attic' cannot train: its Motley is older")
    assert await refused(nodes=["pc"], mode="chain") == (400, "a chain wants a node beside those that have the data")
    assert (await refused(nodes=["pc"], others={"pc": "1" * 32}))[1].startswith("only a chain has others with data")
    assert (await refused(nodes=["pc", "pc"]))[0] == 400
    assert (await refused(ticket="../../etc"))[0] == 400
    assert (await refused(data="/home"))[1].startswith("data is not a known parameter")
    assert (await mesh.call("GET", "/api/jobs"))[1] == {"jobs": []}
    assert (await mesh.call("GET", "/api/jobs/12345678"))[0] == 404


async def test_only_admins_begin_jobs_and_everybody_sees_them(tmp_path: Path) -> None:
    where = {"grpc_port": 0, "http_port": 0, "state_dir": tmp_path, "api_key": "motley-admin"}
    orchestrator = Orchestrator(OrchestratorConfig(host="127.0.0.1", **where))
    await orchestrator.start()
    async with aiohttp.ClientSession(orchestrator.http_url) as http:

        async def call(method: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {key}"}
            async with http.request(method, path, headers=headers, json=body) as response:
                return response.status, await response.json()

        _, made = await call("POST", "/api/keys", "motley-admin", {"note": "phone", "scope": Scope.USE})
        secret = made["secret"] if "secret" in made else made["key"]
        assert await call("GET", "/api/jobs", secret) == (200, {"jobs": []})
        for method, path in (("POST", "/api/jobs"), ("GET", "/api/jobs/1"), ("DELETE", "/api/jobs/1")):
            status, told = await call(method, path, secret, WANTED if method == "POST" else None)
            assert (status, told["error"]["code"]) == (403, "insufficient_scope")
        assert (await call("POST", "/api/jobs", "motley-admin", WANTED))[0] == 400, "there is no node"
    await orchestrator.stop()
