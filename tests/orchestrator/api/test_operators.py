"""What operators ask an orchestrator, over real sockets: whether it lives, and its numbers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from motley.orchestrator.api import operators
from motley.orchestrator.app import Orchestrator, OrchestratorConfig
from motley.protocol.mesh_pb2 import Activity, Delta, Failure, Generate, Gpu, Probed
from tests.test_layers import ROOT

from ..conftest import of_kind

COMPLETION = {"model": "bard", "prompt": "Hi"}


async def numbers(mesh: Any) -> dict[tuple[str, ...], float]:
    """What `/metrics` tells: by the name of a sample and the values of its labels, in the order of their names."""
    async with mesh.http.get("/metrics") as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        text = await response.text()
    told: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
            assert key not in told, "Prometheus takes no sample twice"
            told[key] = sample.value
    return told


async def test_it_says_that_it_lives_and_asks_for_no_key(mesh: Any, tmp_path: Any) -> None:
    assert await mesh.call("GET", "/health") == (200, {"status": "ok"})
    guarded = Orchestrator(
        OrchestratorConfig(host="127.0.0.1", grpc_port=0, http_port=0, state_dir=tmp_path / "other", api_key="key")
    )
    await guarded.start()
    try:
        async with aiohttp.ClientSession(guarded.http_url) as http:
            assert (await http.get("/health")).status == 200
            assert (await http.get("/metrics")).status == 401
            assert (await http.get("/metrics", headers={"Authorization": "Bearer key"})).status == 200
    finally:
        await guarded.stop()


async def test_the_numbers_of_an_empty_mesh(mesh: Any) -> None:
    told = await numbers(mesh)
    assert told["motley_nodes", "alive"] == told["motley_sessions", "ready"] == 0
    assert {key[0] for key in told} == {"motley_build_info", "motley_nodes", "motley_sessions"}


async def test_how_requests_ended_and_how_long_their_clients_waited(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())
    await mesh.serve(sequences=1, queue=0)
    await mesh.call("POST", "/v1/completions", COMPLETION)

    async def fail(generate: Generate) -> AsyncIterator[Delta]:
        code = "peer_lost" if generate.prompt == "Hi" else "context_length_exceeded"
        yield Delta(finish="error", failure=Failure(code=code, message="no"))

    async def hang(_: Generate) -> AsyncIterator[Delta]:
        yield Delta(text="Once", ids=[1])
        await asyncio.Event().wait()

    node.answer = fail
    assert (await mesh.call("POST", "/v1/completions", COMPLETION))[0] == 503
    assert (await mesh.call("POST", "/v1/completions", {**COMPLETION, "prompt": "long"}))[0] == 400
    node.answer = hang
    async with mesh.http.post("/v1/completions", json={**COMPLETION, "stream": True}) as response:
        await response.content.readany()
        assert (await mesh.call("POST", "/v1/completions", COMPLETION))[0] == 429
        assert (await numbers(mesh))["motley_requests_taken", "bard"] == 1
    await node.cancelled.get()
    told = await numbers(mesh)
    outcomes = {key[2]: value for key, value in told.items() if key[0] == "motley_requests_total"}
    assert outcomes == {"answered": 1, "failed": 1, "refused": 1, "cancelled": 1, "too_many": 1}
    assert (told["motley_requests_taken", "bard"], told["motley_requests_limit", "bard"]) == (0, 1)
    for wait, count in (("first_token", 2), ("token_gap", 2)):
        assert told[f"motley_{wait}_seconds_count", "bard"] == count
        assert told[f"motley_{wait}_seconds_bucket", "+Inf", "bard"] == count
        assert 0 < told[f"motley_{wait}_seconds_sum", "bard"] < 60


async def test_what_nodes_ranks_and_caches_tell(mesh: Any, bard: Any) -> None:
    activity = Activity(active=2, waiting=3, blocks=10, blocks_used=4, blocks_kept=1, generated_tokens=7)
    await bard.event(of_kind(bard, "assign")[0], activity=activity)
    await mesh.call("POST", "/v1/completions", COMPLETION)
    await mesh.poll("/api/sessions", lambda body: body["sessions"][0]["ranks"][0]["timing"])
    told = await numbers(mesh)
    assert (told["motley_nodes", "alive"], told["motley_sessions", "ready"]) == (1, 1)
    assert told["motley_node_memory_bytes", "total", "pc"] == 1e9
    assert 0 < told["motley_node_memory_bytes", "reserved", "pc"] < 1e9
    uses = [told["motley_cache_blocks", "bard", use] for use in ("used", "kept", "free")]
    assert uses == [4, 1, 5]
    assert [told["motley_requests_scheduled", "bard", state] for state in ("active", "waiting")] == [2, 3]
    assert told["motley_generated_tokens_total", "bard"] == 7
    assert told["motley_rank_seconds_total", "bard", "pc", "compute", "0"] == 0.02
    assert told["motley_rank_share_bytes", "bard", "pc", "0"] == 100
    assert told["motley_step_seconds", "bard", "0.5"] == 0.012


async def test_a_session_that_is_gone_is_told_of_no_more(mesh: Any, bard: Any) -> None:
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    await mesh.call("POST", "/v1/completions", COMPLETION)
    await mesh.call("DELETE", f"/api/sessions/{session['id']}")
    assert not any("bard" in key for key in await numbers(mesh))
    await mesh.serve()
    assert (await numbers(mesh))["motley_requests_total", "bard", "answered"] == 0


async def test_links_epochs_and_recoveries_are_told(mesh: Any, new_node: Any) -> None:
    names = {"a": "b", "b": "a"}
    nodes = {name: new_node(name) for name in names}
    nodes["a"].ways["b"] = Probed(latency_s=0.001, bandwidth=1e8)
    nodes["b"].ways["a"] = Probed(failure="a firewall")
    nodes["a"].gpus_now = [Gpu(name="GPU", memory_bytes=10, free_bytes=4)]
    for name, node in nodes.items():
        node.address = name
        await mesh.join(node)
    await mesh.poll(
        "/api/nodes", lambda body: all(node["links"] for node in body["nodes"]) and body["nodes"][0]["gpus"]
    )
    session = await mesh.serve(nodes=["a"])
    await nodes["a"].event(of_kind(nodes["a"], "assign")[0], failed=Failure(code="worker_died", message="it died"))
    await mesh.poll(f"/api/sessions/{session['id']}", lambda body: body["epoch"] == 2 and body["state"] == "ready")
    told = await numbers(mesh)
    assert [told["motley_link_up", *pair] for pair in names.items()] == [1, 0]
    assert told["motley_link_latency_seconds", "a", "b"] == 0.001
    assert told["motley_link_bytes_per_second", "a", "b"] == 1e8
    assert ("motley_link_latency_seconds", "b", "a") not in told
    assert [told["motley_node_gpu_memory_bytes", "0", kind, "a"] for kind in ("total", "free")] == [10, 4]
    totals = [told[f"motley_{name}", "bard"] for name in ("session_epoch", "rank_losses_total", "recoveries_total")]
    assert totals == [2, 1, 1]
    assert told["motley_node_silence_seconds", "a"] < 60


@pytest.fixture
async def families(mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch) -> list[Metric]:
    """All metrics that there are, those without a value now, too."""
    found: list[Metric] = []

    def note(numbers: Any) -> bytes:
        found.extend(numbers.collect())
        return b""

    monkeypatch.setattr(operators, "generate_latest", note)
    async with mesh.http.get("/metrics"):
        return found


def labels_of(family: Metric) -> set[str]:
    return set(family._labelnames)  # type: ignore[attr-defined]  # which nothing else tells of one without a value


def queries() -> list[tuple[str, str]]:
    """Of the dashboard, each with its legend."""
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text("utf-8"))["panels"]
    return [(target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_for_what_there_is(families: list[Metric]) -> None:
    """Every metric in its queries exists, and every label that they and their legends name is one of its metrics'."""
    ends = {"counter": ("_total",), "histogram": ("_bucket",), "gauge": ("",)}
    known = {family.name + end: labels_of(family) for family in families for end in ends[family.type]}
    asked = {expression: re.findall(r"\bmotley_\w+", expression) for expression, _ in queries()}
    assert len({name for names in asked.values() for name in names}) > 20
    for expression, legend in queries():
        assert set(asked[expression]) <= set(known)
        labels = {label for name in asked[expression] for label in known[name]}
        grouped = {
            label for inner in re.findall(r"\b(?:by|ignoring) ?\((.*?)\)", expression) for label in inner.split(", ")
        }
        assert grouped - {"le"} | set(re.findall(r"{{(\w+)}}", legend)) <= labels, expression
    documented = (ROOT / "docs" / "operating.md").read_text("utf-8")
    assert set(re.findall(r"\bmotley_\w+", documented)) <= set(known) | {family.name for family in families}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")
def test_prometheus_answers_what_the_dashboard_asks(families: list[Metric], tmp_path: Path) -> None:
    """Each query has an answer where each metric has one series, and that keeps the labels of the legend."""
    series = []
    for family in families:
        labels = ",".join(f'{label}="ready"' for label in sorted(labels_of(family)))
        names = {
            "counter": [f"{family.name}_total{{{labels}}}"],
            "histogram": [f'{family.name}_bucket{{{labels},le="{le}"}}' for le in ("0.1", "+Inf")],
            "gauge": [f"{family.name}{{{labels}}}"],
        }[family.type]
        steps = "0x20" if family.name == "motley_link_up" else "0+5x20"  # a link that is down
        series += [{"series": name, "values": steps} for name in names]
    tests = []
    for expression, legend in queries():
        labels = ", ".join(told := re.findall(r"{{(\w+)}}", legend))
        asked = f"count by ({labels}) ({expression.replace('$__rate_interval', '1m')})"
        answer = {"labels": "{" + ", ".join(f'{label}="ready"' for label in told) + "}", "value": 1}
        tests.append({"expr": asked, "eval_time": "5m", "exp_samples": [answer]})
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": tests}]}))
    told = subprocess.run(("promtool", "test", "rules", str(file)), capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
