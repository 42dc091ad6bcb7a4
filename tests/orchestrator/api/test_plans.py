"""``POST /api/plan`` and `motley plan`: what would be done, without doing it; and what is said of sessions that run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from motley.cli.commands.models.fit import usefulness
from motley.protocol.mesh_pb2 import Described, FormatSpeed, Probed
from tests.e2e.processes import in_thread
from tests.orchestrator.conftest import GB
from tests.orchestrator.planning.seven import layered, seven_billion

NONE: Mapping[str, Probed] = MappingProxyType({})


async def house(mesh: Any, new_node: Any, ways: Mapping[str, Probed] = NONE, **memory_gb: int) -> dict[str, Any]:
    """Nodes that have measured how fast they compute, and describe a model of 4 GB.

    Args:
        ways: what nodes find of their ways to others, by ``one-other``.
    """
    nodes = {}
    for name, size in memory_gb.items():
        node = nodes[name] = new_node(name, memory=size * GB)
        node.capabilities.speeds.append(FormatSpeed(format="int8", bytes_per_s=40e9, row_bytes_per_s=200e9))
        node.capabilities.call_s = 1e-6
        node.on_describe = lambda _: Described(profile=seven_billion())
        node.ways = {pair.split("-")[1]: found for pair, found in ways.items() if pair.split("-")[0] == name}
        await mesh.join(node)
    known = sum(pair.split("-")[0] in nodes for pair in ways)
    await mesh.poll("/api/nodes", lambda body: sum(len(node["links"]) for node in body["nodes"]) == known)
    return nodes


def in_layers(nodes: Mapping[str, Any]) -> None:
    """Have nodes tell what each layer of the model costs."""
    for node in nodes.values():
        node.on_describe = lambda _: Described(profile=layered(seven_billion()))


async def test_the_whole_answer(mesh: Any, new_node: Any) -> None:
    await house(mesh, new_node, pc=16)
    status, body = await mesh.call("POST", "/api/plan", {"model": "seven", "what_if": ["RTX 4070 12GB, 1Gbit, 0.1ms"]})
    assert status == 200, body
    assert set(body) == {"parameters", "plan", "forecast", "alternatives", "without", "no_part"}
    assert body["plan"]["kind"] == "tensor"
    (rank,) = body["plan"]["ranks"]
    memory = rank.pop("memory_mb")
    assert rank == {
        "node": "RTX 4070 12GB, 1Gbit, 0.1ms", "layers": 32, "kv_groups": 8, "mlp_blocks": 112, "vocab_blocks": 250,
        "weights_mb": 4282.5,
        "share": {"attention_split": 1, "attention": [0, 8], "mlp": [0, 112], "vocabulary": [0, 250], "layers": None},
    }  # fmt: skip
    assert memory == pytest.approx(4282.5 + 300 + 8 * 32768 * 4096 / 1e6, rel=0.01)
    forecast = body["forecast"]
    assert set(forecast) == {"ms_per_token", "compute_ms", "wire_ms", "wait_ms", "ttft_ms", "prompt_tokens"}
    parts = forecast["compute_ms"] + forecast["wire_ms"] + forecast["wait_ms"]
    assert forecast["ms_per_token"] == pytest.approx(parts, abs=0.01)
    assert body["alternatives"][0].keys() == {"kind", "nodes", "ms_per_token"}
    assert [each["node"] for each in body["without"]] == ["pc", "RTX 4070 12GB, 1Gbit, 0.1ms"]
    beside, alone = (each["ms_per_token"] for each in body["without"])
    assert beside == forecast["ms_per_token"]
    assert alone == pytest.approx(1e3 * 4.2825 / 40, rel=0.1)
    assert (await mesh.call("GET", "/api/sessions"))[1]["sessions"] == []


async def test_a_machine_that_is_not_there_may_do_without_those_that_are_too_small(mesh: Any, new_node: Any) -> None:
    """Nodes without room for what every rank needs, even: it is what people want to know before they buy."""
    node = new_node("pc", memory=GB // 10)
    node.on_describe = lambda _: Described(profile=seven_billion())
    await mesh.join(node)
    asked = {"model": "seven", "what_if": ["RTX 4070 12GB, 1Gbit"]}
    status, body = await mesh.call("POST", "/api/plan", asked)
    assert status == 200, body
    assert [rank["node"] for rank in body["plan"]["ranks"]] == ["RTX 4070 12GB, 1Gbit"]
    status, body = await mesh.call("POST", "/api/plan", {"model": "seven"})
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")


@pytest.mark.parametrize("asked", [{"nodes": ["pc", "box"]}, {"stages": 2}])
async def test_nobody_is_told_to_be_needed_who_was_asked_for(mesh: Any, new_node: Any, asked: dict[str, Any]) -> None:
    """The model fits without them."""
    in_layers(await house(mesh, new_node, pc=16, box=16))
    status, body = await mesh.call("POST", "/api/plan", {"model": "seven", **asked})
    assert (status, len(body["plan"]["ranks"]), body["without"]) == (200, 2, [])


async def test_who_names_a_node_that_gets_nothing_is_told_why(mesh: Any, new_node: Any, motley: Any) -> None:
    nodes = await house(mesh, new_node, pc=16)
    old = new_node("old", memory=16 * GB)
    old.capabilities.speeds.append(FormatSpeed(format="int8", bytes_per_s=1e6, row_bytes_per_s=1e6))
    old.on_describe = nodes["pc"].on_describe
    await mesh.join(old)
    status, body = await mesh.call("POST", "/api/plan", {"model": "seven", "nodes": ["old", "pc"]})
    told = {"node": "old", "why": "the others are sooner done with every piece of the model"}
    assert (status, [rank["node"] for rank in body["plan"]["ranks"]], body["no_part"]) == (200, ["pc"], [told])
    assert body["alternatives"] == []
    line = "old takes no part: the others are sooner done with every piece of the model"
    assert line in (await motley("plan", "seven", "--nodes", "old,pc"))[1]
    for names in ("old,pc", "old,pc", "pc,old"):
        status, _, err = await motley("run", "seven", "--nodes", names)
        assert status == 0
        assert line in err
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    assert [rank["node"] for rank in session["ranks"]] == ["pc"]
    assert (session["no_part"], session["missed_nodes"]) == ([told], [])
    assert line in (await motley("status"))[1]


@pytest.mark.parametrize(
    ("asked", "parameters", "ways"),
    [
        ({}, 4 * 10**9, "a shorter context, caches in fp16 or int8, weights in int4"),
        ({"cache_format": "int8"}, 8 * 10**9, "a shorter context"),
        ({"quantisation": "int4"}, 4 * 10**9, "a shorter context, caches in fp16 or int8"),
    ],
)
async def test_what_takes_less_is_told_of_a_model_as_it_was_named(
    mesh: Any, new_node: Any, asked: dict[str, Any], parameters: int, ways: str
) -> None:
    node = new_node("pc", memory=2 * GB)
    node.capabilities.engines[0].cache_formats.extend(["fp32", "int8"])
    seven = seven_billion()
    seven.name, seven.parameters = "llama", parameters
    node.on_describe = lambda _: Described(profile=seven)
    await mesh.join(node)
    _, body = await mesh.call("POST", "/api/plan", {"model": "seven", **asked})
    assert body["error"]["message"].splitlines()[-1] == f"What takes less: {ways}."
    _, body = await mesh.call("POST", "/api/plan", {"model": "qwen3-8b", "by_shape": True})
    assert body["error"]["message"].startswith("qwen3-8b with caches of ")


async def test_machines_in_place_of_the_nodes(mesh: Any, new_node: Any) -> None:
    await house(mesh, new_node, pc=16)
    machines = [
        {"name": "a", "gb_per_s": 40, "memory_gb": 4, "mbit_per_s": 10000, "latency_ms": 0.05},
        {"name": "b", "device": "ddr5 pc 5GB", "memory_gb": 4},
        {"name": "far", "gb_per_s": 40, "memory_gb": 4, "latency_ms": 20},
    ]
    status, body = await mesh.call("POST", "/api/plan", {"model": "seven", "machines": machines, "requests": 4})
    assert status == 200, body
    assert [rank["node"] for rank in body["plan"]["ranks"]] == ["a", "b"]
    assert all(rank["memory_mb"] <= 4000 for rank in body["plan"]["ranks"])
    assert sum(rank["mlp_blocks"] for rank in body["plan"]["ranks"]) == 112
    assert {each["node"]: each["ms_per_token"] for each in body["without"]}["far"] == body["forecast"]["ms_per_token"]


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"machines": [{"name": "a", "gb_per_s": 1, "memory_gb": 1, "colour": 3}]}, "machines[0].colour", "colour"),
        ({"machines": [{"name": "a", "gb_per_s": 1}]}, "machines[0].gb_per_s", "memory_gb"),
        ({"machines": [{"name": "a", "device": "abacus"}]}, "machines[0].device", "abacus"),
        ({"machines": [{"name": "a", "device": "rtx 4070"}] * 2}, "machines[1].name", "of another"),
        ({"machines": []}, "machines", "must not be empty"),
        ({"what_if": ["RTX 4070 12GB, string"]}, "what_if", "'string' is no link"),
        ({"what_if": ["RTX 9999"]}, "what_if", "rtx 2060"),
        ({"what_if": ["rtx 4070"], "machines": [{"name": "a"}]}, "what_if", "leave out one"),
        ({"requests": 0}, "requests", "at least 1"),
        ({"request": 2}, "request", "known parameter"),
        ({"experts": "parallel"}, "experts", "no experts"),
    ],
)
async def test_what_cannot_be_planned_is_refused_by_name(
    mesh: Any, new_node: Any, wrong: dict[str, Any], param: str, says: str
) -> None:
    await house(mesh, new_node, pc=16)
    status, body = await mesh.call("POST", "/api/plan", {"model": "seven", **wrong})
    assert status == 400
    assert says in body["error"]["message"]
    if param != "experts":
        assert body["error"]["param"] == param


async def test_as_long_as_links_are_not_measured_everybody_takes_part(mesh: Any, new_node: Any) -> None:
    """Nobody is left out by guess."""
    await house(mesh, new_node, a=16, b=16, c=16)
    status, body = await mesh.call("POST", "/api/sessions?wait=ready", {"model": "seven"})
    assert status == 201
    assert len(body["ranks"]) == 3


async def test_a_node_on_a_slow_link_is_left_out_unless_it_is_named(mesh: Any, new_node: Any) -> None:
    far, near = Probed(latency_s=8e-3, bandwidth=1e9), Probed(latency_s=5e-5, bandwidth=1e9)
    ways = {f"{one}-{other}": far if "c" in (one, other) else near for one, other in permutations("abc", 2)}
    await house(mesh, new_node, ways, a=16, b=16, c=16)
    status, body = await mesh.call("POST", "/api/sessions?wait=ready", {"model": "seven"})
    assert status == 201
    assert [rank["node"] for rank in body["ranks"]] == ["a", "b"]
    forecast = body["forecast"]
    assert forecast["compute_ms"] == pytest.approx(1e3 * 4.2825 / 80, rel=0.2)
    assert body["measured_ms_per_token"] is None
    assert (await mesh.call("DELETE", f"/api/sessions/{body['id']}"))[0] == 200
    everybody = {"model": "seven", "nodes": ["a", "b", "c"]}
    status, body = await mesh.call("POST", "/api/sessions?wait=ready", everybody)
    assert len(body["ranks"]) == 3
    assert body["forecast"]["ms_per_token"] > 3 * forecast["ms_per_token"]


async def test_nodes_that_are_too_small_alone_form_stages_over_a_slow_link(mesh: Any, new_node: Any) -> None:
    """Until the links are measured nobody knows that it is slow, and every layer is on all."""
    far = Probed(latency_s=4e-3, bandwidth=1e8)
    ways = {f"{one}-{other}": far for one, other in permutations("ab", 2)}
    nodes = await house(mesh, new_node, ways, a=3, b=3)
    in_layers(nodes)
    status, body = await mesh.call("POST", "/api/plan", {"model": "seven", "context": 512})
    assert status == 200, body
    assert body["plan"]["kind"] == "pipeline"
    assert sum(rank["layers"] for rank in body["plan"]["ranks"]) == 32
    assert [rank["vocab_blocks"] for rank in body["plan"]["ranks"]] == [0, 250]
    assert "tensor" in [other["kind"] for other in body["alternatives"]]
    status, made = await mesh.call("POST", "/api/sessions?wait=ready", {"model": "seven", "context": 512})
    assert (status, made["kind"]) == (201, "pipeline")
    first, last = (nodes[rank["node"]].commands[0].assign for rank in made["ranks"])
    assert [share.layers.stop - share.layers.start for share in first.shares] == [
        rank["layers"] for rank in body["plan"]["ranks"]
    ]
    assert first.shares == last.shares
    planned = made["forecast"]["ms_per_token"]
    assert planned == pytest.approx(body["forecast"]["ms_per_token"], rel=0.05)
    assert (await mesh.call("DELETE", f"/api/sessions/{made['id']}"))[0] == 200
    status, made = await mesh.call(
        "POST", "/api/sessions?wait=ready", {"model": "seven", "context": 512, "stages": 1, "nodes": ["a", "b"]}
    )
    assert (status, made["kind"]) == (201, "tensor")
    assert made["forecast"]["ms_per_token"] > 2 * planned


async def test_stages_that_are_asked_for(mesh: Any, new_node: Any) -> None:
    in_layers(await house(mesh, new_node, a=16, b=16, c=16))
    asked = {"model": "seven", "nodes": ["b", "a", "c"], "stages": [1, 2]}
    status, made = await mesh.call("POST", "/api/sessions?wait=ready", asked)
    assert (status, made["kind"], made["stages"]) == (201, "mixed", [1, 2])
    assert [rank["node"] for rank in made["ranks"]] == ["b", "a", "c"]
    layers = [tuple(rank["share"]["layers"]) for rank in made["ranks"]]
    assert layers[0][1] == layers[1][0]
    assert layers[1] == layers[2]
    _, out, _ = await in_thread("status", "--url", mesh.orchestrator.http_url)
    last = layers[0][1] - 1
    assert (f"layers 0-{last}" if last else "layer 0") in out
    status, body = await mesh.call("POST", "/api/plan", {"model": "seven", "stages": 4})
    assert status == 422
    assert "does not fit in 4 stages" in body["error"]["message"]


@pytest.mark.parametrize("request_", [{"nodes": ["a", "b"]}, {"shares": [1, 1]}])
async def test_nodes_that_cannot_reach_each_other_are_refused_before_anything_is_loaded(
    mesh: Any, new_node: Any, request_: dict[str, Any]
) -> None:
    ways = {
        "a-b": Probed(latency_s=1e-4, bandwidth=1e8),
        "b-a": Probed(failure="nothing answers at 10.0.0.1:4000 within 2.5 s"),
    }
    nodes = await house(mesh, new_node, ways, a=16, b=16)
    status, body = await mesh.call("POST", "/api/sessions", {"model": "seven", **request_})
    assert (status, body["error"]["code"]) == (422, "unreachable_nodes")
    assert "b cannot reach a: nothing answers at 10.0.0.1:4000 within 2.5 s" in body["error"]["message"]
    assert not nodes["a"].commands
    if "nodes" in request_:
        _, planned = await mesh.call("POST", "/api/plan", {"model": "seven", **request_})
        assert planned["error"] == body["error"]
    status, body = await mesh.call("POST", "/api/sessions?wait=ready", {"model": "seven"})
    assert status == 201
    assert len(body["ranks"]) == 1, "one of them can do it alone"


async def test_nodes_tell_what_they_have_measured(mesh: Any, new_node: Any) -> None:
    ways = {"a-b": Probed(latency_s=1e-4, bandwidth=1e8), "b-a": Probed(failure="nothing answers")}
    await house(mesh, new_node, ways, a=16, b=16)
    _, body = await mesh.call("GET", "/api/nodes")
    a, b = body["nodes"]
    assert a["speeds"] == [{"format": "int8", "bytes_per_s": 40e9, "row_bytes_per_s": 200e9}]
    assert a["links"] == [{"to": "b", "latency_ms": 0.1, "bandwidth": 1e8, "failure": None, "relay": None}]
    assert b["links"] == [
        {"to": "a", "latency_ms": None, "bandwidth": None, "failure": "nothing answers", "relay": None}
    ]
    _, out, _ = await in_thread("status", "--url", mesh.orchestrator.http_url)
    assert "b cannot reach a: nothing answers" in out
    assert "0.10 ms" in out
    assert "int8 40 GB/s" in out


async def test_a_run_says_its_forecast_before_it_loads(mesh: Any, new_node: Any) -> None:
    await house(mesh, new_node, pc=16)
    status, out, err = await in_thread("run", "seven", "hi", "--raw", "--url", mesh.orchestrator.http_url)
    assert (status, out.strip()) == (0, "Hello, world"), err
    assert "forecast: about 109.3 ms per token" in err
    assert err.index("on pc") < err.index("3 tokens")
    _, out, _ = await in_thread("status", "--url", mesh.orchestrator.http_url)
    assert "forecast: about 109.3 ms per token" in out
    assert "measured: 12.0 ms a step" in out


async def test_the_command(mesh: Any, new_node: Any, tmp_path: Path) -> None:
    await house(mesh, new_node, pc=16)
    plan = ("plan", "seven", "--url", mesh.orchestrator.http_url)
    status, out, err = await in_thread(*plan, "--what-if", "GTX 1060, wifi")
    assert status == 0, err
    assert "ms per token (compute" in out
    assert "Left out: GTX 1060, wifi" in out
    file = tmp_path / "house.json"
    file.write_text(json.dumps({"machines": [{"name": "x", "device": "rtx 3090"}, {"name": "y", "device": "ddr4 pc"}]}))
    status, out, err = await in_thread(*plan, "--machines", str(file), "--requests", "8", "--json")
    answer = json.loads(out)
    assert [rank["node"] for rank in answer["plan"]["ranks"]] == ["x"]
    file.write_text(json.dumps({"machines": [{"name": "x", "device": "rtx 3090", "ram": 3}]}))
    status, out, err = await in_thread(*plan, "--machines", str(file))
    assert status != 0
    assert "machines[0].ram is not a known parameter" in err
    for text, says in (("{", "no JSON file"), ("[]", "no list of machines"), ('{"machines": [], "a": 1}', "'a'")):
        file.write_text(text)
        status, out, err = await in_thread(*plan, "--machines", str(file))
        assert status != 0
        assert says in err


async def test_nodes_of_one_machine_are_named(mesh: Any, new_node: Any) -> None:
    nodes = await house(mesh, new_node, pc=3, laptop=3)
    plan = ("plan", "seven", "--url", mesh.orchestrator.http_url)
    status, out, err = await in_thread(*plan)
    assert (status, "pc and laptop are on one machine, and were measured one by one" in out) == (0, True), out + err
    await nodes["laptop"].leave()
    nodes["laptop"].address = "127.0.0.2"
    await mesh.join(nodes["laptop"])
    status, out, err = await in_thread(*plan)
    assert (status, "on one machine" in out) == (0, False), out + err


async def test_what_fits(mesh: Any, new_node: Any) -> None:
    asked = []

    def describe(order: Any) -> Described:
        asked.append(order.model)
        config = json.loads(order.model.config_json or '{"num_hidden_layers": 32}')
        size = config["num_hidden_layers"] / 32 * (9 if "n_routed_experts" in config else 1)
        profile = seven_billion()
        profile.mlp_unit_bytes = int(profile.mlp_unit_bytes * size)
        profile.parameters = int(7e9 * size)
        return Described(profile=profile)

    for node in (await house(mesh, new_node, pc=16)).values():
        node.on_describe = describe
    names = ("tinyllama-1.1b", "llama-3.1-8b", "qwen3-8b", "deepseek-v3")
    fit = ("models", "fit", *names, "--url", mesh.orchestrator.http_url)
    status, out, err = await in_thread(*fit, "--json")
    assert status == 0, err
    found = json.loads(out)["models"]
    assert [(each["name"], each["quantisation"]) for each in found] == [
        ("tinyllama-1.1b", "int8"), ("llama-3.1-8b", "int4"), ("qwen3-8b", "int4"), ("deepseek-v3", "int4"),
    ]  # fmt: skip
    quick = {**found[0], "parameters": 3 * found[0]["parameters"]}
    assert min([*found, quick], key=usefulness) is quick, "the largest of those that are quick"
    slow = [{**found[0], "name": name, "parameters": size, "forecast": {"ms_per_token": ms}} for name, size, ms in (
        ("a", 1, 251.0), ("c", 2, 251.2), ("b", 2, 251.4), ("d", 9, 400.0), ("e", 9, 200.9),
    )]  # fmt: skip
    assert [each["name"] for each in sorted(slow, key=usefulness)] == ["e", "b", "c", "a", "d"], "as it is shown"
    assert [each["why_not"] is None for each in found] == [True, True, True, False]
    assert all(spec.config_json and not spec.source for spec in asked), "no node is to fetch anything"
    status, out, err = await in_thread(*fit)
    assert "does not fit" in out
    assert "motley chat tinyllama-1.1b" in out
    assert "as fast as people read (5 tokens per second), the largest first" in out
    status, out, err = await in_thread("plan", "qwen3-8b", "--url", mesh.orchestrator.http_url)
    assert (status, "sizes of qwen3-8b (Qwen/Qwen3-8B-AWQ): nothing was fetched\n" in out) == (0, True), err
    assert (asked[-1].source, bool(asked[-1].config_json)) == ("", True)
    status, out, err = await in_thread("models", "fit", "mine", "tinyllama-1.1b", "--url", mesh.orchestrator.http_url)
    assert (status, "motley chat tinyllama-1.1b" in out) == (0, True), err
    assert "no short name" in " ".join(out.split())
    status, out, err = await in_thread("models", "fit", "mine", "--url", mesh.orchestrator.http_url)
    assert (status, "mine: no short name of a model; there are: deepseek-v3" in err) == (1, True)

    asked.clear()
    status, _ = await mesh.call("POST", "/api/plan", {"model": "qwen3-8b"})
    assert (status, {(spec.source, spec.config_json) for spec in asked}) == (200, {("Qwen/Qwen3-8B-AWQ", "")})
