"""Spans of requests: one trace from the client through the gateway to the model server."""

import gzip
import re
import signal
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from streamlearn.errors import ConfigError
from streamlearn.http import tracing
from tests.gateway.conftest import published, upstreams
from tests.gateway.kit import TEXT, prompts_of_each_task, ready_gateway, wait_until
from tests.gateway.stub_upstream import StubUpstream
from tests.gateway.test_process import started

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


def test_the_gateway_sends_its_spans_to_the_collector(
    published: Path, upstreams: list[StubUpstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OTLP over HTTP, at the latest when it stops."""
    received = ExportTraceServiceRequest()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            encoded = self.headers.get("content-encoding") == "gzip"
            received.MergeFromString(gzip.decompress(data) if encoded else data)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_address[1]}")
        with started(published, upstreams[0]) as (process, url):
            answer = httpx2.post(f"{url}{TEXT}", json={"model": "streamlearn-regime-1", "prompt": "a"}, timeout=20)
            assert answer.status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30.0) == 0
        collector.shutdown()
    [resource] = received.resource_spans
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert names["service.name"] == "streamlearn-gateway"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["POST", "POST"]
