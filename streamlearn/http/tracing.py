"""OpenTelemetry spans of requests: the extra `otel`, switched on by OTEL_EXPORTER_OTLP_ENDPOINT.

A request's span belongs to the trace that its `traceparent` names. The gateway's requests to model servers have spans
of their own, whose `traceparent` they carry. Spans hold names, numbers and durations, never a prompt or an answer.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamlearn.errors import ConfigError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_UNTRACED = frozenset({"/livez", "/readyz", "/metrics"})

# OpenTelemetry is imported where it is used: most processes have no collector.
# ruff: noqa: PLC0415


def configure_tracing(service: str) -> None:
    """Send spans to the collector that the environment names; without one none are made.

    Args:
        service: `service.name` of the spans, unless OTEL_SERVICE_NAME names another.

    Raises:
        ConfigError: the extra is not installed.
    """
    if not any(map(os.environ.get, _ENDPOINTS)):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{' or '.join(_ENDPOINTS)} is set, which needs OpenTelemetry: pip install 'streamlearn[otel]', or unset it"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    use_tracer(trace.get_tracer("streamlearn"))


_tracer: Any = None


def use_tracer(tracer: Any) -> None:
    """Make spans with this tracer; None makes none."""
    global _tracer  # noqa: PLW0603 - one of the process, as in OpenTelemetry
    _tracer = tracer


class Traced:
    """Makes a span of each request but those of probes and scrapes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _tracer is None or scope["type"] != "http" or scope["path"] in _UNTRACED:
            await self.app(scope, receive, send)
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        attributes = {"http.request.method": scope["method"], "url.path": scope["path"][:200]}
        context = extract(dict(Request(scope).headers))
        with _tracer.start_as_current_span(
            scope["method"], context=context, kind=SpanKind.SERVER, attributes=attributes
        ) as span:

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self.app(scope, receive, send_noted)


@contextmanager
def request_to(server: str, model: str) -> Iterator[Mapping[str, str]]:
    """A span of a request to a model server, until its answer begins; yields the headers that name it, if any."""
    if _tracer is None:
        yield {}
        return
    from opentelemetry.propagate import inject
    from opentelemetry.trace import SpanKind

    headers: dict[str, str] = {}
    values = {"server.address": server, "streamlearn.model": model}
    with _tracer.start_as_current_span("POST", kind=SpanKind.CLIENT, attributes=values):
        inject(headers)
        yield headers


def annotate(**attributes: str | int | float | None) -> None:
    """Add attributes to the current span, as `streamlearn.NAME`; those that are None are left out."""
    if _tracer is not None:
        from opentelemetry.trace import get_current_span

        get_current_span().set_attributes({f"streamlearn.{k}": v for k, v in attributes.items() if v is not None})
