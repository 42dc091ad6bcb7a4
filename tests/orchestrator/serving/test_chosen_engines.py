"""Sessions that leave the engine open: a GPU computes where it can and is faster. GPUs are records, sockets real."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from motley.protocol.mesh_pb2 import Described, Engine, Failure, Gpu, ModelProfile, RankCommand

GB = 10**9
FASTER = "computes on its GPU, RTX 9, which computes 10.0 x as fast"


@pytest.fixture
def large(profile: ModelProfile) -> ModelProfile:
    """With units that can be divided finely: 640 MB of MLPs."""
    profile.mlp_units, profile.mlp_unit_bytes = 640, 1_000_000
    return profile


@pytest.fixture
def pc(new_node: Any, large: ModelProfile) -> Any:
    """A PC whose GPU reads ten times as fast as its processor."""
    node = new_node("pc", memory=8 * GB, bandwidth=40e9)
    node.on_describe = lambda _: Described(profile=large)
    node.capabilities.engines.append(Engine(name="cuda", keeps_fp16=True, on_gpu=True))
    node.capabilities.gpus.add(name="RTX 9", memory_bytes=12 * GB, free_bytes=8 * GB, memory_bandwidth=400e9)
    return node


def ranks_of(session: Any) -> list[tuple[str, str, str | None]]:
    return [(rank["node"], rank["engine"], rank["chosen"]) for rank in session["ranks"]]


async def test_a_gpu_computes_where_nobody_says_what_shall(mesh: Any, new_node: Any, pc: Any) -> None:
    await mesh.join(pc)
    await mesh.join(new_node("laptop", memory=8 * GB, bandwidth=40e9))
    session = await mesh.serve(context=10)
    assert session["engine"] == "auto"
    assert ranks_of(session) == [("pc", "cuda", FASTER), ("laptop", "onnxruntime", None)]


@pytest.mark.parametrize(
    ("gpu", "engine", "fields", "why"),
    [
        ({"memory_bandwidth": 40e9}, {}, {}, "its GPU, RTX 9, computes no faster"),
        ({"kind": "integrated"}, {}, {}, "its GPU, RTX 9, has no memory of its own"),
        ({}, {"lacking": "package cupy"}, {}, "node 'pc' cannot run engine 'cuda': package cupy"),
        ({}, {}, {"exact": True}, "engines on its GPU, RTX 9, cannot have exact sums"),
        ({}, {}, {"embeddings": "mean"}, "engine 'cuda' of node 'pc' cannot embed texts"),
        ({}, {}, {"draft_model": "own"}, "engine 'cuda' of node 'pc' cannot hand a model's own head what it guesses"),
        ({}, {}, {"cache_format": "int8"}, "engine 'cuda' of node 'pc' cannot keep KV caches as 'int8'"),
    ],
)
async def test_the_processor_computes_what_the_gpu_cannot(
    mesh: Any, pc: Any, gpu: dict[str, Any], engine: dict[str, str], fields: dict[str, Any], why: str
) -> None:
    pc.capabilities.gpus[0].MergeFrom(Gpu(**gpu))
    processors, cuda = pc.capabilities.engines
    processors.embeds = True
    processors.cache_formats.extend(["fp32", "int8"])
    cuda.MergeFrom(Engine(**engine))
    await mesh.join(pc)
    ((node, computing, chosen),) = ranks_of(await mesh.serve(context=10, **fields))
    assert (node, computing) == ("pc", "onnxruntime")
    assert why in (chosen or "")


async def test_what_a_gpu_takes_besides_reading_weights_is_forecast(mesh: Any, new_node: Any, pc: Any) -> None:
    """Of each layer, and of each sum the way to its host and back, which a rank alone has not to go."""
    slow, laptop = (new_node(name, memory=8 * GB, bandwidth=40e9) for name in ("slow", "laptop"))
    slow.capabilities.CopyFrom(pc.capabilities)
    slow.capabilities.engines[1].layer_s, slow.capabilities.engines[1].host_s = 2e-4, 1e-3
    for node in (pc, slow, laptop):
        node.on_describe = pc.on_describe
        await mesh.join(node)

    async def forecast(*nodes: str) -> dict[str, float]:
        status, planned = await mesh.call("POST", "/api/plan", {"model": "bard", "context": 10, "nodes": nodes})
        assert status == 200, planned
        return dict(planned["forecast"])

    layers = pc.on_describe(None).profile.layers
    quick, alone = await forecast("pc"), await forecast("slow")
    assert alone["compute_ms"] - quick["compute_ms"] == pytest.approx(1e3 * layers * 2e-4, rel=0.3)
    assert alone["wire_ms"] == quick["wire_ms"]
    quick, beside = await forecast("pc", "laptop"), await forecast("slow", "laptop")
    assert beside["wire_ms"] - quick["wire_ms"] == pytest.approx(1e3 * 2 * layers * 1e-3, rel=0.1)


async def test_a_gpu_s_products_are_forecast_by_what_was_measured_in_the_format(
    mesh: Any, new_node: Any, pc: Any
) -> None:
    """Also those of a prompt, which compute more than they read."""
    measured = new_node("measured", memory=8 * GB)
    measured.capabilities.CopyFrom(pc.capabilities)
    measured.on_describe = pc.on_describe
    measured.capabilities.engines[1].speeds.add(format="int4", bytes_per_s=40e9, row_bytes_per_s=80e9)
    for node in (pc, measured):
        await mesh.join(node)

    async def forecast(node: str, quantisation: str) -> dict[str, float]:
        asked = {"model": "bard", "context": 10, "nodes": [node], "engine": "cuda", "quantisation": quantisation}
        status, planned = await mesh.call("POST", "/api/plan", asked)
        assert status == 200, planned
        return dict(planned["forecast"])

    assert await forecast("measured", "int8") == await forecast("pc", "int8")
    told, own = await forecast("pc", "int4"), await forecast("measured", "int4")
    assert own["compute_ms"] == pytest.approx(10 * told["compute_ms"], rel=0.05)
    assert own["ttft_ms"] > 200 * told["ttft_ms"]


async def test_a_model_that_is_too_large_for_the_gpu_is_on_the_processor_too(mesh: Any, pc: Any) -> None:
    pc.capabilities.gpus[0].free_bytes = GB
    await mesh.join(pc)
    session = await mesh.serve(context=10)
    assert [(node, engine) for node, engine, _ in ranks_of(session)] == [("pc", "cuda"), ("pc", "onnxruntime")]
    assert session["ranks"][1]["chosen"] == "computes on its processor, too, as the model does not fit its GPU"
    status, planned = await mesh.call("POST", "/api/plan", {"model": "bard", "context": 10})
    assert status == 200, planned
    assert [rank["node"] for rank in planned["plan"]["ranks"]] == ["pc", "pc"]


@pytest.mark.parametrize("code", ["engine_error", "worker_died", "wrong_results"])
async def test_a_gpu_that_fails_is_done_without(mesh: Any, pc: Any, code: str) -> None:
    await failing_on_gpu(pc, Failure(code=code, message="no kernel image"))
    await mesh.join(pc)
    session = await mesh.serve(context=10)
    assert ranks_of(session) == [
        (
            "pc",
            "onnxruntime",
            "computes on its processor, not on its GPU, RTX 9: 'cuda' has failed with this model: node 'pc'"
            " (rank 0): no kernel image",
        )
    ]
    assert [loss["code"] for loss in session["losses"]] == [code]
    again = await mesh.serve(name="again", context=10)
    assert [command.assign.engine for command in pc.commands if command.HasField("assign")] == [
        "cuda",
        "onnxruntime",
        "onnxruntime",
    ], "what has failed is not tried at once again"
    assert again["losses"] == []


async def test_a_gpu_that_somebody_has_asked_for_is_not_done_without(mesh: Any, pc: Any) -> None:
    await failing_on_gpu(pc, Failure(code="engine_error", message="no kernel image"))
    await mesh.join(pc)
    status, answer = await mesh.call("POST", "/api/sessions", {"model": "bard", "engine": "cuda", "context": 10})
    assert status == 201, answer
    session = await mesh.session(answer["id"], "failed")
    assert "no kernel image" in session["failure"]["message"]


async def test_files_that_cannot_be_read_are_no_fault_of_the_gpu(mesh: Any, pc: Any) -> None:
    await failing_on_gpu(pc, Failure(code="load_failed", message="the file has shrunk"))
    await mesh.join(pc)
    status, answer = await mesh.call("POST", "/api/sessions", {"model": "bard", "context": 10})
    assert status == 201, answer
    session = await mesh.session(answer["id"], "failed")
    assert "the file has shrunk" in session["failure"]["message"]


@pytest.mark.parametrize("recover", [True, False])
async def test_a_node_whose_gpu_fails_later_goes_on_with_its_processor(
    mesh: Any, new_node: Any, pc: Any, recover: bool
) -> None:
    await mesh.join(pc)
    await mesh.join(new_node("laptop", memory=8 * GB, bandwidth=40e9))
    session = await mesh.serve(context=10, recover=recover)
    (command,) = [command for command in pc.commands if command.HasField("peers")]
    await pc.event(command, failed=Failure(code="engine_error", message="the device is lost"))
    if not recover:
        ended = await mesh.session(session["id"], "failed")
        assert "the device is lost" in ended["failure"]["message"]
        return
    again = await mesh.poll(
        f"/api/sessions/{session['id']}", lambda body: body["epoch"] == 2 and body["state"] == "ready"
    )
    assert [(node, engine) for node, engine, _ in ranks_of(again)] == [("pc", "onnxruntime"), ("laptop", "onnxruntime")]


async def test_a_peer_that_cannot_be_reached_is_no_fault_of_the_gpu(mesh: Any, new_node: Any, pc: Any) -> None:
    await mesh.join(pc)
    laptop = await mesh.join(new_node("laptop", memory=8 * GB, bandwidth=40e9))
    await failing(laptop, "onnxruntime", Failure(code="peer_timeout", message="no answer", lost_rank=1))
    status, answer = await mesh.call("POST", "/api/sessions", {"model": "bard", "context": 10})
    assert status == 201, answer
    assert (await mesh.session(answer["id"], "failed"))["epoch"] == 1


async def test_a_gpu_that_is_lent_leaves_the_processor(mesh: Any, pc: Any) -> None:
    await pc.lease("gpu:0")
    await mesh.join(pc)
    ((_, engine, chosen),) = ranks_of(await mesh.serve(context=10))
    assert engine == "onnxruntime"
    assert "node 'pc' has lent the GPU to 'game'" in chosen


async def failing_on_gpu(node: Any, failure: Failure) -> None:
    """Have ranks on the GPU of a node fail while they load."""
    await failing(node, "cuda", failure)


async def failing(node: Any, engine: str, failure: Failure) -> None:
    """Have ranks of a node with an engine fail while they load."""
    obey: Callable[[RankCommand], Awaitable[None]] = node.on_rank

    async def on_rank(command: RankCommand) -> None:
        if command.HasField("peers") and node._assigned(command).engine == engine:
            await node.event(command, failed=failure)
        else:
            await obey(command)

    node.on_rank = on_rank


async def test_a_device_that_was_typed_and_is_not_everywhere_is_answered_as_it_was_typed(
    mesh: Any, new_node: Any, pc: Any, motley: Any
) -> None:
    laptop = new_node("laptop")
    laptop.capabilities.engines.append(Engine(name="cuda", on_gpu=True))
    for node in (pc, laptop):
        await mesh.join(node)
    status, _, err = await motley("run", "bard", "--device", "cuda")
    assert status == 1
    assert "motley: --device cuda: not every machine" in err
    assert err.endswith("take part: --nodes pc\n  laptop: no GPU was found\n"), err
    status, _, err = await motley("run", "bard", "--engine", "cuda")
    assert "motley: --engine: node 'laptop' cannot run engine 'cuda'" in err
