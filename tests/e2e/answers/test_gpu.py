"""Sessions of real daemons with a rank on a GPU, by engine webgpu: a real GPU, or Vulkan's software driver."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from tests.conftest import SHARED_MESH
from tests.e2e.processes import BUNDLED, Mesh, last_json, mesh, motley
from tests.software_gpu import ALLOWED, ALLOWED_BY_PROVIDER, fp16_driver, show_software_gpu
from tests.vulkan_layer import LOST, layer_environment

GREEDY = {"model": BUNDLED.name, "prompt": "ROMEO:\nLook, good sir, you are", "max_tokens": 8, "temperature": 0}
SHORT = {"context": 64, "shares": [1, 1]}


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[f"{SHARED_MESH} with a GPU"], ids=str)
async def gpu_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """A node whose GPU is shown, and one with a processor alone."""
    if why := show_software_gpu():
        if "CI" in os.environ and sys.platform == "linux":
            pytest.fail(why)
        pytest.skip(why)
    async with mesh(tmp_path_factory.mktemp("gpu"), "cpu") as made:
        await made.join("gpu", **{ALLOWED: "1"})
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def client(gpu_mesh: Mesh) -> AsyncIterator[Client]:
    """Of the mesh; sessions end with the test."""
    async with Client(gpu_mesh.url) as made:
        yield made
        for session in await made.sessions():
            await made.call("DELETE", f"/api/sessions/{session['id']}")


async def said(client: Client) -> str:
    body = await client.call("POST", "/v1/completions", GREEDY)
    text: str = body["choices"][0]["text"]
    return text


async def test_a_gpu_beside_a_cpu_says_what_a_cpu_says_and_can_be_had_again(gpu_mesh: Mesh, client: Client) -> None:
    alone = await gpu_mesh.session(nodes=["cpu"], context=64)
    expected = await said(client)
    await client.call("DELETE", f"/api/sessions/{alone['id']}")
    session = await gpu_mesh.session(nodes=["cpu", "webgpu@gpu"], recover=False, **SHORT)
    assert [(rank["engine"], rank["device"]) for rank in session["ranks"]] == [
        ("onnxruntime", "cpu"),
        ("webgpu", "gpu"),
    ]
    assert await said(client) == expected

    (worker,) = gpu_mesh.nodes["gpu"].workers()
    answer = client.stream("/v1/completions", {**GREEDY, "max_tokens": 50, "ignore_eos": True})
    await anext(answer)
    worker.kill()
    with pytest.raises(CliError, match=r"node 'gpu' \(rank 1\)"):
        async for _ in answer:
            pass
    await client.call("DELETE", f"/api/sessions/{session['id']}")
    assert not psutil.pid_exists(worker.pid)
    await gpu_mesh.session(nodes=["gpu", "webgpu@gpu"], **SHORT)  # both of its devices
    assert await said(client) == expected


@pytest.mark.soak
async def test_experts_on_a_gpu_s_host_say_what_those_of_a_cpu_say(gpu_mesh: Mesh, client: Client) -> None:
    experts = {"model": str(BUNDLED.with_name("shakespeare-moe-1.5m")), "experts": "parallel", "context": 64}
    texts = []
    for wanted in ({"nodes": ["cpu"]}, {"nodes": ["gpu"], "engine": "webgpu"}):
        session = await gpu_mesh.session(**experts, **wanted)
        assert [host["node"] for host in session["hosts"]] == wanted["nodes"]
        asked = {**GREEDY, "model": session["name"], "max_tokens": 6}
        body = await client.call("POST", "/v1/completions", asked)
        texts.append(body["choices"][0]["text"])
        await client.call("DELETE", f"/api/sessions/{session['id']}")
    assert texts[0] == texts[1]


IN_FP16 = {"engine": "webgpu", "engine_options": {"activations": "fp16"}, **SHORT}


async def test_products_in_fp16_are_refused_where_the_gpu_has_none(gpu_mesh: Mesh, client: Client) -> None:
    with pytest.raises(CliError, match=r"cannot compute in fp16 on this GPU .*shader-f16"):
        await gpu_mesh.session(nodes=["onnxruntime@cpu", "gpu"], **IN_FP16)


@pytest.mark.soak  # its driver may compile for longer than a rank is waited for
async def test_products_in_fp16_where_a_gpu_has_it(gpu_mesh: Mesh, client: Client) -> None:
    driver = fp16_driver()
    if isinstance(driver, str):
        pytest.skip(driver)
    alone = await gpu_mesh.session(nodes=["cpu"], context=64)
    expected = await said(client)
    await client.call("DELETE", f"/api/sessions/{alone['id']}")
    await gpu_mesh.join("fp16", **{ALLOWED: "1"}, **driver)
    await gpu_mesh.session(nodes=["onnxruntime@cpu", "fp16"], **IN_FP16)
    assert await said(client) == expected


async def test_too_little_memory_on_the_gpu_is_refused_with_numbers(gpu_mesh: Mesh, client: Client) -> None:
    small = "[0-9.]+ [GM]B of [0-9.]+ [GM]B free; .* stay free"
    with pytest.raises(CliError, match=rf"(?s)does not fit.*gpu, .*\({small}.*available.*needed"):
        await gpu_mesh.session(nodes=["webgpu@gpu"], context=64, cache_tokens=10**8)


async def test_without_a_driver_the_refusal_says_what_is_missing(gpu_mesh: Mesh, client: Client) -> None:
    await gpu_mesh.join("bare", **{ALLOWED: "1", "VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"})
    with pytest.raises(CliError, match=r"'bare' cannot run engine 'webgpu': it shows no GPU \(.*VK_DRIVER_FILES names"):
        await gpu_mesh.session(nodes=["webgpu@bare"])


@pytest.mark.soak
async def test_the_demonstration_names_the_devices_that_wrote_its_text(gpu_mesh: Mesh) -> None:
    asked = ("demo", "--ranks", "2", "--tokens", "8", "--device", "webgpu")
    told = await last_json(*asked, **{ALLOWED_BY_PROVIDER: "0"})  # which Motley says by itself
    assert told["identical_to_single_process"]
    assert len(told["devices"]) == 2
    assert told["devices"][0] != told["devices"][1]


@pytest.mark.soak
async def test_a_device_s_report_has_what_a_reader_needs(gpu_mesh: Mesh) -> None:
    asked = ("bench", "device", "--quant", "int4", "--tokens", "2")
    told = await last_json(*asked, **{ALLOWED: "1"})
    assert told["failures"] == {}
    assert told["engine"] == "webgpu"
    assert told["device"]["name"]
    assert told["device"]["driver"].startswith("Vulkan")
    assert told["device"]["memory_bandwidth"] > 0
    assert {"motley", "onnxruntime", "python"} <= told["versions"].keys()
    assert told["ms_per_token"].keys() == {"int4"}
    assert 0 < told["ms_per_token"]["int4"]["p50"] <= told["ms_per_token"]["int4"]["p99"]


async def test_a_device_that_is_not_there_is_refused_with_what_to_install() -> None:
    status, _, err = await motley(
        "bench", "device", "--device", "webgpu", VK_DRIVER_FILES="/nonexistent", VK_ICD_FILENAMES="/nonexistent"
    )
    assert status == 1
    assert "--device webgpu: " in err
    assert "it needs the drivers that VK_DRIVER_FILES names, of which /nonexistent is not there" in err
    measured = ("bench", "device", "--quant", "int4", "--tokens", "1")
    status, out, err = await motley(*measured, VK_DRIVER_FILES="/nonexistent", VK_ICD_FILENAMES="/nonexistent")
    assert (status, "processor" in out) == (0, True), "without a GPU the processor is measured"
    assert err.startswith("asking drivers and engines, and measuring\n"), "it says what it does where it may take long"


async def test_an_answer_goes_on_when_the_gpu_is_lost(gpu_mesh: Mesh, client: Client, tmp_path: Path) -> None:
    """Vulkan says so in the middle of it, and again to whoever opens that GPU anew."""
    lost = tmp_path / "lost"
    await gpu_mesh.join("losing", **{ALLOWED: "1", LOST: str(lost), **layer_environment(tmp_path)})
    alone = await gpu_mesh.session(nodes=["cpu"], context=64)
    body = {**GREEDY, "max_tokens": 40, "ignore_eos": True}
    expected = (await client.call("POST", "/v1/completions", body))["choices"][0]["text"]
    await client.call("DELETE", f"/api/sessions/{alone['id']}")
    session = await gpu_mesh.session(nodes=["cpu", "webgpu@losing"], **SHORT)
    pieces = []
    async for event in client.stream("/v1/completions", body):
        pieces += [choice["text"] for choice in event["choices"]]
        if len(pieces) == 3:
            lost.touch()
    assert "".join(pieces) == expected
    anew = await client.call("GET", f"/api/sessions/{session['id']}")
    assert anew["state"] == "ready"
    (loss, *_) = anew["losses"]
    assert (loss["node"], loss["code"]) == ("losing", "device_lost")
