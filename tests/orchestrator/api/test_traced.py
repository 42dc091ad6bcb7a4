"""Spans of OpenTelemetry: of a request and, in it, of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from motley.orchestrator import traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


async def test_answers_are_spans_of_the_clients_trace(mesh: Any, bard: Any, spans: InMemorySpanExporter) -> None:
    spans.clear()  # of the session that was made
    headers = {"traceparent": PARENT, "X-Request-Id": "mine-7"}
    asked = {"model": "bard", "prompt": "Hi", "n": 2}
    async with mesh.http.post("/v1/completions", json=asked, headers=headers) as response:
        assert response.status == 200
    *answers, whole = spans.get_finished_spans()
    assert whole.name == "POST /v1/completions"
    assert f"{whole.parent.span_id:x}" in PARENT
    assert whole.attributes["http.response.status_code"] == 200
    assert {f"{span.context.trace_id:032x}" in PARENT for span in (*answers, whole)} == {True}
    for answer in answers:
        assert (answer.name, answer.parent.span_id) == ("answer", whole.context.span_id)
        assert [event.name for event in answer.events] == ["asked", "first token"]
        assert {name.removeprefix("motley."): value for name, value in answer.attributes.items()} == {
            "request": "mine-7",
            "model": "bard",
            "session": bard.generated[0].session,
            "outcome": "answered",
            "tokens": 3,
        }
    assert len(answers) == 2
    await mesh.call("GET", "/api/nodes")
    assert len(spans.get_finished_spans()) == 3


async def test_without_the_packages_everything_works(mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "OPENTELEMETRY", None)
    assert (await mesh.call("POST", "/v1/completions", {"model": "bard", "prompt": "Hi"}))[0] == 200


def test_an_endpoint_without_an_exporter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in traces.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert not traces.export_traces()
    monkeypatch.setenv(traces.ENDPOINTS[0], "http://127.0.0.1:4318")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(traces.TracesError, match=r"\[otel\]"):
        traces.export_traces()
