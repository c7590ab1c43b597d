"""The model servers of a gateway: which models they serve, requests to them, and what is counted."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Literal, NamedTuple

import httpx2
import orjson
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from streamlearn.events import Event, get_logger
from streamlearn.http.responses import EVENT_STREAM, ApiError, unavailable
from streamlearn.http.tracing import request_to
from streamlearn.publish.servers import VLLM, kind_of

POLL_S = 1.0
DNS_S = 5.0
POLL_TIMEOUT_S = 6.0  # a busy server answers late
CONNECT_TIMEOUT_S = 2.0
KEEP_ALIVE_S = 2.0  # vLLM closes idle connections after 5 s; a connection that both ends close at once loses a request
RETRY_AFTER_S = 2

Outcome = Literal["answered", "refused", "unavailable", "broken", "cancelled"]
"""answered: with a status below 400; refused: 4xx; unavailable: 5xx; broken: a stream ended early; cancelled: the
client left."""
UNKNOWN = "unknown"
"""Label of requests whose model is unknown."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_ANSWER_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_DONE = b"data: [DONE]"
# vLLM's resolver and SGLang take what they have not loaded for the client's fault
_NOT_LOADED = (b"was found but could not be loaded", b"has never been loaded")
_RETURNED = ("retry-after", "retry-after-ms", "x-request-id")

_log = get_logger("gateway")


class UpstreamFailedError(Exception):
    """A request to this server failed before its answer began; another server may answer it."""


class UpstreamTimeoutError(Exception):
    """The server accepted a request and did not continue its answer in time."""


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str]
    """Those that are passed on."""


class EventStream:
    """Server-sent events whose first part has arrived. It must be closed."""

    def __init__(
        self,
        upstream: "Upstream",
        first: bytes,
        rest: AsyncIterator[bytes],
        headers: Mapping[str, str],
        resources: AsyncExitStack,
    ) -> None:
        self.headers = headers
        """Those that are passed on."""
        self._upstream = upstream
        self._first = first
        self._rest = rest
        self._resources = resources
        self.outcome: Outcome = "cancelled"
        """Outcome of the stream, once it is closed."""

    async def parts(self) -> AsyncIterator[bytes]:
        """The stream as it arrives. One that breaks off ends with an error event and without `[DONE]`."""
        end = self._first
        self._note_end(end)
        yield self._first
        try:
            with self._upstream.translated():
                async for part in self._rest:
                    end = (end + part)[-len(_DONE) - 4 :]  # and line breaks after it
                    self._note_end(end)
                    yield part
            if self.outcome != "answered":
                raise UpstreamFailedError(f"the stream ended without {_DONE.decode()}")
        except (UpstreamFailedError, UpstreamTimeoutError) as error:
            _log.warning(Event.STREAM_BROKEN, upstream=self._upstream.url, reason=str(error))
            self.outcome = "broken"
            message = "the model server broke the stream off"
            broken = unavailable("stream_broken", message, hint="send it again", retry_after_s=0)
            yield b"\n\ndata: " + orjson.dumps({"error": broken.openai_form}) + b"\n\n"  # ends a line that broke off

    def _note_end(self, end: bytes) -> None:
        """The stream is complete with `[DONE]`, at which clients may leave."""
        self.outcome = "answered" if end.rstrip().endswith(_DONE) else "cancelled"

    async def close(self) -> None:
        """Close the connection to the model server, which then stops generating. Safe to call twice."""
        await self._resources.aclose()


class Upstream:
    """A model server that speaks OpenAI's API, as vLLM and SGLang do. Used by one event loop."""

    def __init__(self, url: str, *, timeout_s: float, token: str = "") -> None:
        """Build a client; it connects when it is used.

        Args:
            url: Base URL, without /v1.
            timeout_s: Maximum time between two parts of an answer.
            token: Bearer token of the server, if it needs one.
        """
        self.url = url.rstrip("/")
        self.models: frozenset[str] = frozenset()
        """Models that it served at the last poll; none while it is unreachable."""
        self.kind = VLLM
        self._backbones: dict[str, str] = {}
        """What each adapter is loaded on."""
        self.in_flight = 0
        """Requests in progress."""
        self.is_reachable = False
        self._was_reported = False
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={"accept-encoding": "identity", **({"authorization": f"Bearer {token}"} if token else {})},
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,
        )

    async def poll(self) -> None:
        """Ask which models it serves."""
        try:
            response = await self._client.get("/v1/models", timeout=POLL_TIMEOUT_S)
            if response.status_code != 200:
                raise ValueError(f"GET /v1/models was answered {response.status_code}")
            rows = orjson.loads(response.content)["data"]
            models = frozenset(str(row["id"]) for row in rows)
            self._backbones = {str(row["id"]): str(row["parent"]) for row in rows if row.get("parent")}
            self.kind = kind_of(rows)
        except (httpx2.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._unreachable(error)
        else:
            self.models = models
            if not self.is_reachable:
                self.is_reachable, self._was_reported = True, False
                _log.info(Event.UPSTREAM_REACHABLE, upstream=self.url, models=len(models))

    def name_of(self, model: str) -> str:
        """What a request for a model must name here."""
        backbone = self._backbones.get(model)
        return model if backbone is None else self.kind.model.format(backbone=backbone, adapter=model)

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer | EventStream:
        """Send a request with these headers; return the whole answer, or a stream once its first part is there.

        Raises:
            UpstreamFailedError: it cannot be reached, does not have the model, failed (404, 5xx) or broke off.
            UpstreamTimeoutError: it was reached, but did not answer in time.
        """
        async with AsyncExitStack() as resources:
            response = await resources.enter_async_context(self._open(path, body, headers))
            status, content_type = response.status_code, response.headers.get("content-type", "")
            if status == 404 or status >= 500:
                raise UpstreamFailedError(f"answered {status}")
            returned = {name: value for name, value in response.headers.items() if _is_returned(name, value)}
            with self.translated():
                if not content_type.startswith(EVENT_STREAM):
                    content = await response.aread()
                    if status == 400 and any(words in content for words in _NOT_LOADED):
                        raise UpstreamFailedError("it cannot load the version; its log says why")
                    return Answer(status, content_type, content, returned)
                parts = response.aiter_raw()
                first = await anext(parts, b"")
            if not first:
                raise UpstreamFailedError("the answer ended before it began")
            return EventStream(self, first, parts, returned, resources.pop_all())

    @asynccontextmanager
    async def _open(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[httpx2.Response]:
        """Send a request; yields the response before its body is read."""
        headers = {**headers, "content-type": "application/json"}
        request = self._client.build_request("POST", path, content=body, headers=headers)
        self.in_flight += 1
        try:
            with self.translated():
                response = await self._client.send(request, stream=True)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            self.in_flight -= 1

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate errors of the client, and note a server that refuses connections.

        Raises:
            UpstreamFailedError: the connection failed.
            UpstreamTimeoutError: a part of the answer did not come in time.
        """
        try:
            yield
        except httpx2.ConnectTimeout as error:  # a busy server too: whether it is gone, the next poll says
            raise UpstreamFailedError(_described(error)) from error
        except httpx2.ConnectError as error:
            self._unreachable(error)
            raise UpstreamFailedError(_described(error)) from error
        except httpx2.TimeoutException as error:
            raise UpstreamTimeoutError(_described(error)) from error
        except httpx2.HTTPError as error:
            raise UpstreamFailedError(_described(error)) from error

    async def close(self) -> None:
        """Close its connections. Safe to call twice."""
        await self._client.aclose()

    def _unreachable(self, error: Exception) -> None:
        self.models, self.is_reachable = frozenset(), False
        if not self._was_reported:
            self._was_reported = True
            _log.warning(Event.UPSTREAM_UNREACHABLE, upstream=self.url, reason=_described(error))


def _is_returned(name: str, value: str) -> bool:
    """Whether a header of an answer is passed on to the client."""
    return value.isascii() and (name in _RETURNED or name.startswith("x-ratelimit-"))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Fleet:
    """The model servers of a gateway. Used by one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str], Upstream],
        metrics: "GatewayMetrics",
        *,
        dns: tuple[str, int] | None = None,
        on_demand: bool = False,
    ) -> None:
        """Build the fleet; it connects to nothing yet.

        Args:
            urls: Base URLs of its servers.
            connect: Makes the client of a server.
            metrics: What is counted.
            dns: Host and port of further servers: one at each address of the host, looked up again every `DNS_S`.
            on_demand: Whether servers load a published version when it is asked for, so that they need not list it.
        """
        self.upstreams = [connect(url) for url in urls]
        self._connect = connect
        self._named = frozenset(self.upstreams)
        self._metrics = metrics
        self._dns, self._dns_fault = dns, ""
        self._on_demand = on_demand

    async def run(self) -> None:
        """Poll every server repeatedly, until cancelled; then close their connections."""
        async with asyncio.TaskGroup() as tasks:
            for upstream in self.upstreams:
                tasks.create_task(self._keep_polling(upstream))
            while self._dns is not None:
                for upstream in await self._look_up(*self._dns):
                    tasks.create_task(self._keep_polling(upstream))
                await asyncio.sleep(DNS_S)

    async def poll(self) -> None:
        await asyncio.gather(*(upstream.poll() for upstream in self.upstreams))

    @property
    def models(self) -> frozenset[str]:
        """Models that at least one server has."""
        return frozenset().union(*(upstream.models for upstream in self.upstreams))

    def has_all(self, versions: Iterable[str]) -> bool:
        """Whether each of these versions can be asked for."""
        return all(any(self._can_answer(upstream, version) for upstream in self.upstreams) for version in versions)

    async def send(
        self, model: str, path: str, body: Callable[[str], bytes], headers: Mapping[str, str]
    ) -> Answer | EventStream:
        """Have one server that has the model answer; `body` makes the request, with the model's name there.

        The one with the fewest requests in flight is tried first, then the others, each once.

        Raises:
            ApiError: 503, none has the model or all failed; 504, one did not answer in time.
        """
        reason = f"no model server has {model}"
        tried: list[Upstream] = []
        while (upstream := self._least_busy(model, tried)) is not None:
            tried.append(upstream)
            try:
                with request_to(upstream.url, model) as trace:
                    return await upstream.send(path, body(upstream.name_of(model)), {**headers, **trace})
            except UpstreamFailedError as error:
                reason = f"every model server that has {model} failed, the last with: {error}"
                self._metrics.retries.labels(upstream.url).inc()
                _log.warning(Event.REQUEST_RETRIED, upstream=upstream.url, model=model, reason=str(error))
            except UpstreamTimeoutError as error:
                _log.warning(Event.UPSTREAM_TIMED_OUT, upstream=upstream.url, model=model, reason=str(error))
                raise ApiError(504, "upstream_timeout", f"{model} did not answer in time: {error}") from error
        hint = "retry after the seconds in Retry-After"
        raise unavailable("no_upstream", reason, hint=hint, retry_after_s=RETRY_AFTER_S)

    async def _keep_polling(self, upstream: Upstream) -> None:
        """Poll a server until it is gone from the DNS and has answered what it was asked."""
        try:
            while upstream in self.upstreams or upstream.in_flight:
                await upstream.poll()
                await asyncio.sleep(POLL_S)
        finally:
            self._metrics.forget(upstream)
            await upstream.close()

    async def _look_up(self, host: str, port: int) -> list[Upstream]:
        """Take up the addresses of a host; return the servers that are new. Without an answer all are kept."""
        try:
            rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if str(error) != self._dns_fault:
                self._dns_fault = str(error)
                _log.warning(Event.UPSTREAM_UNREACHABLE, upstream=f"{host}:{port}", reason=_described(error))
            return []
        self._dns_fault = ""
        addresses = sorted({str(row[4][0]) for row in rows})
        urls = [f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}" for address in addresses]
        kept = [upstream for upstream in self.upstreams if upstream in self._named or upstream.url in urls]
        known = {upstream.url for upstream in kept}
        new = [self._connect(url) for url in urls if url not in known]
        self.upstreams = kept + new
        return new

    def _can_answer(self, upstream: Upstream, model: str) -> bool:
        if model in upstream.models:
            return True
        return self._on_demand and upstream.is_reachable and upstream.kind.may_load_on_demand

    def _least_busy(self, model: str, tried: Collection[Upstream]) -> Upstream | None:
        able = [own for own in self.upstreams if own not in tried and self._can_answer(own, model)]
        return min(able, key=lambda upstream: upstream.in_flight, default=None)


class GatewayMetrics(Collector):
    """What is counted while requests are answered; collects the state of the servers, as of the scrape."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the start of the process says the same
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "streamlearn_gateway_requests",
            "Finished requests by the model that answered, without its version, and by outcome: answered (below 400), "
            "refused (4xx), unavailable (5xx), broken (a stream ended early), cancelled (the client left).",
            ["model", "outcome"],
            registry=self.registry,
        )
        self.retries = Counter(
            "streamlearn_gateway_retries",
            "Attempts that failed before their answer began, by upstream.",
            ["upstream"],
            registry=self.registry,
        )
        self.routing_seconds = Histogram(
            "streamlearn_gateway_routing_seconds",
            "Time to encode and classify the prompts of a request.",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "streamlearn_gateway_request_seconds",
            "Time from a request to the end of its answer, for answers below 400, by the publication that was used: "
            "newest, or previous during a canary.",
            ["publication"],
            buckets=_ANSWER_BUCKETS_S,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "streamlearn_gateway_first_token_seconds",
            "Time from a request to the first part of its answer, for streams, by the publication that was used.",
            ["publication"],
            buckets=_ANSWER_BUCKETS_S,
            registry=self.registry,
        )
        self.publication = Gauge(
            "streamlearn_gateway_publication_sequence",
            "Sequence number of the publication in use; 0 before the first.",
            registry=self.registry,
        )
        self.refusals = Counter(
            "streamlearn_gateway_publication_refusals",
            "Publications that could not be read.",
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)
        self._fleet: Fleet | None = None
        self.registry.register(self)

    def watch(self, fleet: Fleet) -> None:
        """Report the state of its servers too."""
        self._fleet = fleet

    def forget(self, upstream: Upstream) -> None:
        """Drop the series of a server that is gone."""
        with suppress(KeyError):
            self.retries.remove(upstream.url)

    def collect(self) -> Iterator[Metric]:
        gauges: list[tuple[str, str, Callable[[Upstream], float]]] = [
            ("up", "Whether the upstream can be used: 0 after a failed poll.", lambda server: server.is_reachable),
            ("models", "Models that the upstream serves.", lambda server: len(server.models)),
            ("in_flight", "Requests that the upstream is answering.", lambda server: server.in_flight),
        ]
        for name, description, read in gauges:
            family = GaugeMetricFamily(f"streamlearn_gateway_upstream_{name}", description, labels=["upstream"])
            for upstream in self._fleet.upstreams if self._fleet is not None else ():
                family.add_metric([upstream.url], read(upstream))
            yield family

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
