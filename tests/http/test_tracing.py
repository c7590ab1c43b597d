"""Spans of requests: one trace from the client through the gateway to the model server."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from streamlearn.errors import ConfigError
from streamlearn.http import tracing
from tests.gateway.conftest import published, upstreams
from tests.gateway.kit import TEXT, prompts_of_each_task, ready_gateway, wait_until
from tests.gateway.stub_upstream import StubUpstream

__all__ = ["published", "upstreams"]  # fixtures
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use_tracer(provider.get_tracer("test"))
    yield exporter
    tracing.use_tracer(None)


def test_a_request_is_one_trace_from_client_to_server(
    published: Path, upstreams: list[StubUpstream], spans: InMemorySpanExporter
) -> None:
    """Also where the first server fails. Probes and scrapes have no spans, and no span has a prompt."""
    for upstream in upstreams:
        upstream.script.append("500")
    upstreams[1].script.clear()
    prompt = prompts_of_each_task()[0]
    with ready_gateway(published, *upstreams) as client:
        body = {"model": "streamlearn", "prompt": prompt}
        answer = client.post(TEXT, json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        assert answer.status_code == 200
        wait_until(lambda: len(spans.get_finished_spans()) >= 2, "the spans")
    [server] = [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]
    asked = [span for span in spans.get_finished_spans() if span.kind is SpanKind.CLIENT]
    assert server.parent is not None
    assert (f"{server.parent.trace_id:032x}", f"{server.parent.span_id:016x}") == (TRACE, PARENT)
    assert server.attributes is not None
    assert server.attributes["streamlearn.model"] == answer.headers["x-streamlearn-model"]
    assert server.attributes["http.response.status_code"] == 200
    heads = "".join(head for upstream in upstreams for head in upstream.heads)
    received = re.findall(r"\ntraceparent: (\S+)", heads)
    assert sorted(received) == sorted(
        f"00-{TRACE}-{span.context.span_id:016x}-01" for span in asked if span.context is not None
    )
    assert {span.parent.span_id for span in asked if span.parent is not None} == {server.context.span_id}
    assert prompt[:40] not in "".join(span.to_json() for span in spans.get_finished_spans())


def test_a_collector_without_the_extra_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"streamlearn\[otel\]"):
        tracing.configure_tracing("streamlearn")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    tracing.configure_tracing("streamlearn")
