"""Sessions whose ranks have engines, devices and quantisations of their own; GPUs are records, sockets are real."""

from __future__ import annotations

from typing import Any

import pytest

from motley.protocol import GPU_RESERVE
from motley.protocol.mesh_pb2 import Describe, Described, Engine, GpuUser, ModelProfile, RankCommand, Ready

GB = 10**9
FIXED = 10_000
"""Bytes that every rank of the model needs, whatever its share is."""
SIZES = {"fp32": 8, "fp16": 4, "int8": 2, "int4": 1, "stored": 2}
"""Of a weight, in half bytes."""


def held(profile: ModelProfile, quantisation: str) -> ModelProfile:
    own = ModelProfile()
    own.CopyFrom(profile)
    for field in ("attention_query_bytes", "attention_kv_bytes", "mlp_unit_bytes", "vocabulary_unit_bytes"):
        setattr(own, field, getattr(profile, field) * SIZES[quantisation])
    own.matrices = f"all in {quantisation}"
    return own


def assigned(node: Any) -> list[RankCommand]:
    return [command for command in node.commands if command.WhichOneof("body") == "assign"]


@pytest.fixture
def large(profile: ModelProfile) -> ModelProfile:
    """With units fine enough to see who gets how many: 64 million weights in MLPs."""
    profile.mlp_units, profile.mlp_unit_bytes = 640, 100_000
    return profile


@pytest.fixture
async def nodes(mesh: Any, new_node: Any, large: ModelProfile) -> dict[str, Any]:
    """A PC whose GPU reads ten times as fast as every processor, and a laptop."""
    joined = {}
    for name in ("pc", "laptop"):
        node = new_node(name, bandwidth=40e9)
        node.capabilities.engines.add(
            name="cuda", keeps_fp16=True, on_gpu=True, lacking="" if name == "pc" else "no GPU"
        )
        node.on_describe = lambda order: Described(
            profile=held(large, order.model.quantisation), beside=[held(large, each) for each in order.model.beside]
        )
        joined[name] = node
    joined["pc"].capabilities.gpus.add(name="RTX 9", memory_bytes=12 * GB, free_bytes=8 * GB, memory_bandwidth=400e9)
    for node in joined.values():
        await mesh.join(node)
    return joined


MIXED = {"engines": {"pc": "cuda"}, "quantisation": "int8", "quantisations": {"pc": "fp16"}, "context": 10}


async def test_a_gpu_in_fp16_and_a_cpu_in_int8(mesh: Any, nodes: dict[str, Any]) -> None:
    asked: list[Describe] = []
    answer = nodes["pc"].on_describe
    nodes["pc"].on_describe = lambda order: asked.append(order) or answer(order)
    session = await mesh.serve(**MIXED)
    (order,) = asked  # of the fastest device: it leads
    assert (order.model.quantisation, list(order.model.beside)) == ("fp16", ["int8"])
    gpu, cpu = session["ranks"]
    assert [(each["node"], each["engine"], each["quantisation"], each["device"]) for each in (gpu, cpu)] == [
        ("pc", "cuda", "fp16", "gpu"),
        ("laptop", "onnxruntime", "int8", "cpu"),
    ]
    assert gpu["share"]["mlp"] / cpu["share"]["mlp"] == pytest.approx(10 / 2, rel=0.02)
    assert gpu["memory"]["limit_bytes"] == 8 * GB - GPU_RESERVE
    assert (session["engine"], session["engines"]) == ("auto", {"pc": "cuda"})
    assert (session["quantisation"], session["quantisations"]) == ("int8", {"pc": "fp16"})
    assert session["matrices"] == "all in fp16; on other ranks all in int8"
    on_gpu, on_cpu = (assigned(nodes[name])[0].assign for name in ("pc", "laptop"))
    assert (on_gpu.engine, on_cpu.engine) == ("cuda", "onnxruntime")
    assert on_gpu.model == on_cpu.model == order.model
    assert [share.quantisation for share in on_gpu.shares] == ["fp16", "int8"]
    assert on_gpu.shares == on_cpu.shares
    _, body = await mesh.call("GET", "/api/nodes")
    assert body["nodes"][0]["memory_reserved_bytes"] == 10_000  # what a rank on the GPU needs beside it
    unknown = {**dict.fromkeys(("lacking", "memory_bandwidth", "layer_us", "host_us")), "speeds": []}
    assert body["nodes"][0]["engines"] == [
        {"name": "onnxruntime", "on_gpu": False, **unknown},
        {"name": "cuda", "on_gpu": True, **unknown},
    ]


async def test_fp16_is_planned_as_fp32_where_the_engine_widens_it(mesh: Any, nodes: dict[str, Any]) -> None:
    session = await mesh.serve(engines={"pc": "cuda"}, quantisation="fp16", context=10)
    assert [rank["quantisation"] for rank in session["ranks"]] == ["fp16", "fp32"]
    assert session["ranks"][0]["share"]["mlp"] / session["ranks"][1]["share"]["mlp"] == pytest.approx(20, rel=0.05)


async def test_shares_by_hand_are_of_the_model(mesh: Any, nodes: dict[str, Any]) -> None:
    session = await mesh.serve(**MIXED, nodes=["laptop", "pc"], shares=[1, 3])
    assert [(rank["node"], rank["share"]["mlp"]) for rank in session["ranks"]] == [("laptop", 160), ("pc", 480)]
    assert session["ranks"][1]["share"]["weight_bytes"] > 5 * session["ranks"][0]["share"]["weight_bytes"]


async def test_two_ranks_on_a_node_are_alike_and_part_its_gpu(mesh: Any, nodes: dict[str, Any]) -> None:
    session = await mesh.serve(**MIXED, nodes=["pc", "pc"])
    assert {(rank["engine"], rank["quantisation"]) for rank in session["ranks"]} == {("cuda", "fp16")}
    assert {rank["memory"]["limit_bytes"] for rank in session["ranks"]} == {(8 * GB - GPU_RESERVE) // 2}
    assert {len(assigned(nodes["pc"])[0].assign.model.beside)} == {0}


async def refusal(mesh: Any, **fields: Any) -> tuple[str, str]:
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", **fields})
    assert status in (400, 422), body
    assert await mesh.call("GET", "/api/sessions") == (200, {"sessions": []})
    return body["error"]["code"], body["error"]["message"]


@pytest.mark.parametrize("free", [100_000_000, 545_000_000])
async def test_a_gpu_that_is_too_busy_is_refused_with_the_numbers(mesh: Any, nodes: dict[str, Any], free: int) -> None:
    """Also one that could hold nothing at all: it was asked for by name."""
    gpu = nodes["pc"].capabilities.gpus[0]
    gpu.free_bytes = free
    gpu.users.append(GpuUser(pid=7, name="game", bytes=11 * GB))
    nodes["pc"].gpus_now = [gpu]
    nodes["laptop"].capabilities.memory_bytes = 50_000_000
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["gpus"][0]["free_bytes"] == free)
    await mesh.poll("/api/nodes", lambda body: body["nodes"][1]["memory_available_bytes"] == 50_000_000)
    code, message = await refusal(mesh, **MIXED)
    assert code == "insufficient_memory"
    assert (
        f"pc, RTX 9 ({free / 1e6:.2f} MB of 12.00 GB free; 536.87 MB stay free; in use by game (11.00 GB))" in message
    )
    assert "laptop: 50.00 MB available" in message
    assert "needed" in message
    assert "missing" in message


async def test_the_same_gpu_serves_when_it_is_free_again(mesh: Any, nodes: dict[str, Any]) -> None:
    gpu = nodes["pc"].capabilities.gpus[0]
    gpu.free_bytes = 10_000_000
    nodes["pc"].gpus_now = [gpu]
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["gpus"][0]["free_bytes"] == 10_000_000)
    assert (await refusal(mesh, **MIXED, nodes=["pc"]))[0] == "insufficient_memory"
    gpu.free_bytes = 8 * GB
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["gpus"][0]["free_bytes"] == 8 * GB)
    await mesh.serve(**MIXED, nodes=["pc"])


async def test_a_gpu_is_not_promised_twice(mesh: Any, nodes: dict[str, Any]) -> None:
    gpu = nodes["pc"].capabilities.gpus[0]
    gpu.free_bytes = GPU_RESERVE + 300_000_000  # of the 257 MB that the model takes in fp16
    nodes["pc"].gpus_now = [gpu]
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["gpus"][0]["free_bytes"] == gpu.free_bytes)

    async def never_ready(command: RankCommand) -> None:
        if command.WhichOneof("body") != "peers":
            await nodes["pc"].obey(command)

    nodes["pc"].on_rank = never_ready
    wanted = {"model": "bard", **MIXED, "nodes": ["pc"]}
    assert (await mesh.call("POST", "/api/sessions", {**wanted, "name": "one"}))[0] == 201
    status, body = await mesh.call("POST", "/api/sessions", {**wanted, "name": "two"})
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")
    assert "promised to other ranks" in body["error"]["message"]


@pytest.mark.parametrize("tells", [True, False])
async def test_what_a_rank_has_of_a_gpu_is_not_promised_to_it_again(
    mesh: Any, nodes: dict[str, Any], large: ModelProfile, tells: bool
) -> None:
    """Of its caches too, which are there when it is ready; whether the driver tells what it has or not."""
    pc, gpu = nodes["pc"], nodes["pc"].capabilities.gpus[0]
    large.cache_bytes_per_token = 100_000  # 819 MB of 1076 that a session takes

    async def obey(command: RankCommand) -> None:
        if command.WhichOneof("body") == "peers":
            await pc.event(command, ready=Ready(share_bytes=256_000_000, pid=77))
        else:
            await pc.obey(command)

    pc.on_rank = obey
    wanted = {**MIXED, "nodes": ["pc"], "context": 2048}
    await mesh.serve(**wanted)
    gpu.free_bytes = GPU_RESERVE + 1_200_000_000
    gpu.users.append(GpuUser(pid=77 if tells else 1077, name="python", bytes=1_000_000_000))
    pc.gpus_now = [gpu]
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["gpus"][0]["free_bytes"] == gpu.free_bytes)
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", **wanted, "name": "two"})
    assert status == 201, body


async def test_beside_a_gpu_there_must_be_memory_too(mesh: Any, nodes: dict[str, Any]) -> None:
    nodes["pc"].capabilities.memory_bytes = 9_000
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["memory_available_bytes"] == 9_000)
    code, message = await refusal(mesh, **MIXED)
    assert code == "insufficient_memory"
    assert "pc: a rank on its GPU needs 10.00 kB of the machine's own memory; 9.00 kB are free" in message


async def test_engines_that_cannot_run_are_refused_by_name(mesh: Any, nodes: dict[str, Any]) -> None:
    assert await refusal(mesh, engines={"laptop": "cuda"}) == (
        "unusable_engine",
        "node 'laptop' cannot run engine 'cuda': it shows no GPU; it can run: onnxruntime",
    )
    assert (await refusal(mesh, engine="cuda"))[0] == "unusable_engine"


async def test_a_gpu_of_unknown_speed_wants_shares(mesh: Any, nodes: dict[str, Any]) -> None:
    gpu = nodes["pc"].capabilities.gpus[0]
    gpu.memory_bandwidth = 0
    nodes["pc"].gpus_now = [gpu]
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["gpus"][0]["memory_bandwidth"] is None)
    code, message = await refusal(mesh, **MIXED)
    assert (code, "give shares" in message) == ("invalid_request", True)
    await mesh.serve(**MIXED, nodes=["pc", "laptop"], shares=[1, 1])


async def test_a_description_whose_units_differ_is_refused(
    mesh: Any, nodes: dict[str, Any], large: ModelProfile
) -> None:
    other = held(large, "int8")
    other.mlp_units += 1
    nodes["pc"].on_describe = lambda order: Described(profile=held(large, "fp16"), beside=[other])
    assert (await refusal(mesh, **MIXED))[0] == "invalid_profile"
    nodes["pc"].on_describe = lambda order: Described(profile=held(large, "fp16"))
    assert (await refusal(mesh, **MIXED))[0] == "invalid_profile"


@pytest.fixture
async def experts(mesh: Any, new_node: Any, moe: ModelProfile) -> dict[str, Any]:
    joined = {}
    for number, name in enumerate(("pc", "laptop", "box")):
        node = new_node(name, bandwidth=(10 - number) * 1e9)
        node.capabilities.engines.append(Engine(name="cuda", keeps_fp16=True, on_gpu=True))
        node.capabilities.gpus.add(name="RTX 9", memory_bytes=12 * GB, free_bytes=8 * GB, memory_bandwidth=1e9)
        node.on_describe = lambda order: Described(
            profile=held(moe, order.model.quantisation), beside=[held(moe, each) for each in order.model.beside]
        )
        joined[name] = await mesh.join(node)
    return joined


async def test_a_trunk_may_be_held_otherwise_than_experts(mesh: Any, experts: dict[str, Any]) -> None:
    session = await mesh.serve(quantisation="int8", quantisations={"pc": "fp32"}, experts="parallel")
    assert [(rank["node"], rank["quantisation"]) for rank in session["ranks"]] == [("pc", "fp32")]
    trunk, host = assigned(experts["pc"])
    assert (trunk.assign.model.quantisation, list(trunk.assign.model.beside)) == ("int8", ["fp32"])
    assert [share.quantisation for share in trunk.assign.shares] == ["fp32"]
    assert host.assign.model == trunk.assign.model


async def test_hosts_of_experts_hold_them_alike(mesh: Any, experts: dict[str, Any]) -> None:
    code, message = await refusal(mesh, engines={"pc": "cuda"}, experts="parallel")
    assert (code, "engine 'cuda' of node 'pc' cannot have experts elsewhere" in message) == ("invalid_request", True)
    for name, named in {"first": {}, "named": {"nodes": ["pc", "laptop", "box"]}}.items():
        session = await mesh.serve(quantisations={"box": "fp32"}, experts="parallel", name=name, **named)
        assert [(rank["node"], rank["quantisation"]) for rank in session["ranks"]] == [("box", "fp32")]
    session = await mesh.serve(quantisations={"box": "fp32"})  # auto
    assert session["experts"] == "sliced"
    assert [rank["quantisation"] for rank in session["ranks"]] == ["stored", "stored", "fp32"]


async def test_a_node_has_a_rank_on_its_processor_and_one_on_its_gpu(mesh: Any, nodes: dict[str, Any]) -> None:
    session = await mesh.serve(nodes=["pc", "cuda@pc"], quantisation="int8", context=10)
    cpu, gpu = session["ranks"]
    assert [(each["node"], each["engine"], each["device"]) for each in (cpu, gpu)] == [
        ("pc", "onnxruntime", "cpu"),
        ("pc", "cuda", "gpu"),
    ]
    assert [each.assign.engine for each in assigned(nodes["pc"])] == ["onnxruntime", "cuda"]
    assert gpu["share"]["mlp"] / cpu["share"]["mlp"] == pytest.approx(10, rel=0.02), "each at its device's whole speed"
    assert gpu["memory"]["limit_bytes"] == 8 * GB - GPU_RESERVE
    assert cpu["memory"]["limit_bytes"] == GB - FIXED, "less what the rank on the GPU needs of the host"
    (node,) = [each for each in (await mesh.call("GET", "/api/nodes"))[1]["nodes"] if each["name"] == "pc"]
    assert node["memory_reserved_bytes"] == cpu["memory"]["planned_bytes"] + FIXED


async def test_a_gpu_without_memory_of_its_own_takes_the_nodes(mesh: Any, nodes: dict[str, Any]) -> None:
    nodes["pc"].capabilities.gpus[0].kind = "integrated"
    await nodes["pc"].leave()
    await mesh.join(nodes["pc"])
    session = await mesh.serve(nodes=["cuda@pc", "pc"], quantisation="int8", context=10)
    assert [each["memory"]["limit_bytes"] for each in session["ranks"]] == [GB // 2, GB // 2]
    (node,) = [
        each
        for each in (await mesh.call("GET", "/api/nodes"))[1]["nodes"]
        if (each["name"], each["state"]) == ("pc", "alive")
    ]
    assert node["memory_reserved_bytes"] == sum(each["memory"]["planned_bytes"] for each in session["ranks"])


async def test_a_rank_with_an_engine_that_its_node_lacks_is_refused(mesh: Any, nodes: dict[str, Any]) -> None:
    body = {"model": "bard", "nodes": ["pc", "cuda@laptop"]}
    status, answer = await mesh.call("POST", "/api/sessions", body)
    assert (status, answer["error"]["param"]) == (400, "nodes"), answer
    assert "node 'laptop' cannot run engine 'cuda'" in answer["error"]["message"]
