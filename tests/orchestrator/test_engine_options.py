"""Settings of a session's engine, from the request or the command line to the assignments of its ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from motley.cli.errors import CliError
from motley.cli.typed.options import Activations, Device, on_device
from motley.orchestrator.session_request import SessionRequest
from motley.protocol import GPU_RESERVE

GB = 10**9
Motley = Callable[..., Awaitable[tuple[int, str, str]]]
ON_GPU = {"engine": "reference", "engine_options": {"device": "cuda"}}


@pytest.fixture
async def nodes(mesh: Any, new_node: Any) -> dict[str, Any]:
    """A PC with a GPU, and a laptop."""
    joined = {name: new_node(name) for name in ("pc", "laptop")}
    joined["pc"].capabilities.gpus.add(name="RTX 9", memory_bytes=12 * GB, free_bytes=8 * GB, memory_bandwidth=60e9)
    for node in joined.values():
        node.capabilities.engines.add(name="reference", keeps_fp16=True)
        await mesh.join(node)
    return joined


def options_of(node: Any) -> dict[str, str]:
    """Of the engine of the rank that a node was assigned."""
    (assigned,) = (command.assign for command in node.commands if command.WhichOneof("body") == "assign")
    return dict(assigned.engine_options)


async def test_they_reach_ranks_with_the_engine_that_they_are_of(mesh: Any, nodes: dict[str, Any]) -> None:
    session = await mesh.serve(**ON_GPU, engines={"laptop": "onnxruntime"}, context=10)
    assert session["engine_options"] == {"device": "cuda"}
    assert {rank["node"]: rank["device"] for rank in session["ranks"]} == {"pc": "gpu", "laptop": "cpu"}
    assert (options_of(nodes["pc"]), options_of(nodes["laptop"])) == ({"device": "cuda"}, {})


async def test_a_rank_on_the_gpu_is_planned_by_its_memory(mesh: Any, nodes: dict[str, Any]) -> None:
    on_gpu = await mesh.serve(**ON_GPU, nodes=["pc"], context=10)
    assert on_gpu["ranks"][0]["memory"]["limit_bytes"] == 8 * GB - GPU_RESERVE


async def test_on_the_processor_no_gpu_is_planned(mesh: Any, nodes: dict[str, Any]) -> None:
    session = await mesh.serve(engine="reference", engine_options={"device": "cpu"}, nodes=["laptop"], context=10)
    assert session["ranks"][0]["device"] == "cpu"


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        (ON_GPU, "unusable_engine", "node 'laptop' cannot run engine 'reference': it shows no GPU"),
        ({"engine_options": ["cuda"]}, "invalid_value", "engine_options must be an object, not"),
        ({"engine_options": {"device": 1}}, "invalid_value", "engine_options.device must be a string"),
    ],
)
async def test_what_cannot_be_is_refused(
    fields: dict[str, Any], code: str, words: str, mesh: Any, nodes: dict[str, Any]
) -> None:
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "nodes": ["laptop"], **fields})
    assert status in (400, 422), body
    assert body["error"]["code"] == code
    assert words in body["error"]["message"]


async def test_the_command_line_gives_a_device(mesh: Any, nodes: dict[str, Any], motley: Motley) -> None:
    wanted = ["--engine", "reference", "--device", "cuda", "--nodes", "pc", "--no-recover"]
    status, _, err = await motley("run", "/models/a bard", "Hi", *wanted)
    assert status == 0, err
    assert options_of(nodes["pc"]) == {"device": "cuda"}
    status, _, err = await motley("run", "bard", "Hi", "--device", "cpu")
    assert status == 1
    assert "loaded on device cuda: leave out --device" in err


async def test_without_a_device_none_is_asked_for(mesh: Any, nodes: dict[str, Any], motley: Motley) -> None:
    assert "engine_options" not in SessionRequest("bard").body()
    assert SessionRequest("bard", engine_options={"device": "cuda"}).body()["engine_options"] == {"device": "cuda"}
    status, _, err = await motley("run", "/models/a bard", "Hi", "--engine", "reference", "--nodes", "pc")
    assert status == 0, err
    assert options_of(nodes["pc"]) == {}


@pytest.mark.parametrize(
    ("engine", "device", "computing", "settings"),
    [
        (None, None, None, {}),
        ("warp", None, "warp", {}),
        (None, Device.CPU, "onnxruntime", {}),
        (None, Device.CUDA, "cuda", {}),
        (None, Device.WEBGPU, "webgpu", {}),
        ("tensorrt", Device.CUDA, "tensorrt", {}),
        ("reference", Device.CUDA, "reference", {"device": "cuda"}),
    ],
)
def test_a_device_chooses_the_engine(
    engine: str | None, device: Device | None, computing: str | None, settings: dict[str, str]
) -> None:
    assert on_device(engine, device) == (computing, settings)


def test_an_engine_that_computes_elsewhere_is_refused() -> None:
    with pytest.raises(CliError, match="--device webgpu: engine 'cuda' computes on cuda; leave out"):
        on_device("cuda", Device.WEBGPU)


def test_what_products_are_computed_in_is_a_setting_of_one_engine() -> None:
    assert on_device(None, Device.WEBGPU, Activations.FP16) == ("webgpu", {"activations": "fp16"})
    for engine, device in ((None, None), ("auto", None), ("cuda", Device.CUDA)):
        with pytest.raises(CliError, match="--activations is of engine 'webgpu': give --device webgpu"):
            on_device(engine, device, Activations.FP16)


async def test_what_products_are_computed_in_is_shown(mesh: Any, nodes: dict[str, Any], motley: Motley) -> None:
    """And that it changes nothing where no rank has such an engine. A plan takes it as a session does."""
    await nodes["pc"].leave()
    nodes["pc"].capabilities.engines.add(name="webgpu", on_gpu=True)
    await mesh.join(nodes["pc"])
    told = {}
    for place in ("pc", "pc,onnxruntime@laptop", "onnxruntime@laptop"):
        wanted = ["--device", "webgpu", "--activations", "fp16", "--nodes", place]
        status, _, err = await motley("plan", "/models/bard", *wanted)
        assert status == 0, err
        status, _, err = await motley("run", "/models/bard", "Hi", *wanted)
        assert status == 0, err
        told[place] = (await motley("status"))[1]
        idle = "no rank computes by webgpu, so activations fp16 changes nothing"
        assert (idle in told[place], idle in err) == (place == "onnxruntime@laptop",) * 2
        await motley("stop", "bard")
    assert "bard: stored (), products in fp16, context" in told["pc"]
    assert "bard: stored (), products in fp16 on pc, context" in told["pc,onnxruntime@laptop"]
    assert "products" not in told["onnxruntime@laptop"]


async def test_the_command_line_puts_a_rank_on_each_device_of_a_node(
    mesh: Any, nodes: dict[str, Any], motley: Motley
) -> None:
    status, _, err = await motley("run", "/models/bard", "Hi", "--nodes", "pc,reference@pc")
    assert status == 0, err
    status, _, err = await motley("run", "bard", "Hi", "--nodes", "pc,reference@pc")
    assert status == 0, err
    status, _, err = await motley("run", "bard", "Hi", "--nodes", "pc,cuda@pc")
    assert (status, "loaded on pc: leave out --nodes" in err) == (1, True), err
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    assert [rank["engine"] for rank in session["ranks"]] == ["onnxruntime", "reference"]
