"""Traces in OpenTelemetry's sense: a span for each HTTP request that asks for something, and in it one for each answer.

Where the packages are not installed (the extra ``otel``), or nobody has said where spans go, nothing
happens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from motley.protocol.installing import how_to_install

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Variables of the environment that say where spans go, as OpenTelemetry has them; its others count too."""
_NAME = "motley.orchestrator"

Value = str | int | float | bool


def _opentelemetry() -> Any:
    """OpenTelemetry's package; None: it is not installed."""
    try:
        import opentelemetry.propagate
        import opentelemetry.trace
    except ImportError:
        return None
    return opentelemetry


OPENTELEMETRY = _opentelemetry()


class TracesError(Exception):
    """Spans shall go somewhere and cannot; the message says what to install."""


def export_traces() -> bool:
    """Send spans where the environment says, from now on; whether it says so.

    Raises:
        TracesError: packages for that are missing.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return False
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        why = f"{ENDPOINTS[0]} is set, but {error.name} is not installed"
        raise TracesError(f"{why}: `{how_to_install('otel')}`, or unset it") from error
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "motley"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    OPENTELEMETRY.trace.set_tracer_provider(provider)
    return True


class Span:
    """Something that takes a while; of no effect where there is no OpenTelemetry."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        """Something happened in it, now."""
        if self._span is not None:
            self._span.add_event(name, attributes)

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Say more of it."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def end(self) -> None:
        """It is over."""
        if self._span is not None:
            self._span.end()


def begin(name: str, attributes: Mapping[str, Value]) -> Span:
    """A span in the one that is current, if there is one; it must be ended."""
    if OPENTELEMETRY is None:
        return Span()
    return Span(OPENTELEMETRY.trace.get_tracer(_NAME).start_span(name, attributes=attributes))


@contextmanager
def serving(name: str, headers: Mapping[str, str], attributes: Mapping[str, Value]) -> Iterator[Span]:
    """A span of an HTTP request, which is current in the context; it is part of the client's trace, if its headers say
    so (``traceparent``)."""
    if OPENTELEMETRY is None:
        yield Span()
        return
    trace, parent = OPENTELEMETRY.trace, OPENTELEMETRY.propagate.extract(headers)
    tracer, kind = trace.get_tracer(_NAME), trace.SpanKind.SERVER
    with tracer.start_as_current_span(name, context=parent, kind=kind, attributes=attributes) as span:
        yield Span(span)
