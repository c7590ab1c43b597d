"""The gateway's Prometheus metrics, in a registry of their own."""

from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamlearn.gateway.upstream import MAX_LATE_POLLS, Upstream

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Outcome = Literal["answered", "refused", "unavailable", "broken", "cancelled"]
"""answered: with a status below 400; refused: 4xx; unavailable: 5xx; broken: a stream ended early; cancelled: the
client left."""
UNKNOWN = "unknown"
"""Label of requests whose model is unknown."""
_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class GatewayMetrics:
    """What is counted while requests are answered."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the start of the process says the same
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "streamlearn_gateway_requests",
            "Finished requests by the model that answered, without its version, and by outcome: answered (below 400), "
            "refused (4xx), unavailable (5xx), broken (a stream ended early), cancelled (the client left).",
            ["model", "outcome"],
            registry=self._registry,
        )
        self.retries = Counter(
            "streamlearn_gateway_retries",
            "Attempts that failed before their answer began, by upstream.",
            ["upstream"],
            registry=self._registry,
        )
        self.routing_seconds = Histogram(
            "streamlearn_gateway_routing_seconds",
            "Time to encode and classify the prompts of a request.",
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self.publication = Gauge(
            "streamlearn_gateway_publication_sequence",
            "Sequence number of the publication in use; 0 before the first.",
            registry=self._registry,
        )
        self.refusals = Counter(
            "streamlearn_gateway_publication_refusals",
            "Publications that could not be read.",
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)

    def watch(self, upstreams: Callable[[], Iterator[Upstream]]) -> None:
        """Report the state of the upstreams, as of the scrape."""
        self._registry.register(_UpstreamCollector(upstreams))

    @property
    def registry(self) -> CollectorRegistry:
        """What is exported."""
        return self._registry

    def exposition(self) -> bytes:
        """All metrics in the Prometheus text format, `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class _UpstreamCollector(Collector):
    def __init__(self, upstreams: Callable[[], Iterator[Upstream]]) -> None:
        self._upstreams = upstreams

    def collect(self) -> Iterator[Metric]:
        up = _gauge(
            "upstream_up",
            f"Whether the upstream can be used: 0 after a failed poll, or {MAX_LATE_POLLS} late ones in a row.",
        )
        models = _gauge("upstream_models", "Models that the upstream serves.")
        in_flight = _gauge("upstream_in_flight", "Requests that the upstream is answering.")
        for each in self._upstreams():
            up.add_metric([each.url], float(each.is_reachable))
            models.add_metric([each.url], len(each.models))
            in_flight.add_metric([each.url], each.in_flight)
        yield from (up, models, in_flight)


def _gauge(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"streamlearn_gateway_{name}", documentation, labels=["upstream"])
