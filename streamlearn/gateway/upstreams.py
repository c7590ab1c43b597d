"""One model server: which models it serves, and requests to it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Literal, NamedTuple, TypeVar

import aiohttp
import orjson
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

from streamlearn.events import Event, get_logger
from streamlearn.http.guards import ApiError, unavailable

POLL_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2.0
MAX_LATE_POLLS = 3
"""Polls in a row that a busy server may answer too late before it counts as unreachable."""
MAX_WORDS_CHARS = 200
"""Of what a server says about its failure."""
WORDS_TIMEOUT_S = 1.0
KEEP_ALIVE_S = 2.0  # vLLM closes idle connections after 5 s; a connection that both ends close at once loses a request

_JSON = {"content-type": "application/json"}

_log = get_logger("gateway")


class UpstreamFailedError(Exception):
    """A request to this server failed before its answer began; another server may answer it."""

    def __init__(self, message: str, *, words: str = "") -> None:
        """`words` are what the server said, for the client only: they may repeat a part of its prompt."""
        super().__init__(message)
        self.words = words


class UpstreamTimeoutError(Exception):
    """The server accepted a request and did not go on with its answer in time."""


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    content_type: str
    body: bytes


class Upstream:
    """A model server that speaks OpenAI's API, as vLLM does. Used by one event loop."""

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
        self.in_flight = 0
        """Requests that are under way."""
        self.is_reachable = False
        self._late_polls = 0
        self._was_reported = False
        self._headers = {"accept-encoding": "identity"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def poll(self) -> None:
        """Ask which models it serves."""
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                status, content = await self._list_models()
            if status != 200:
                raise ValueError(f"GET /v1/models was answered {status}")
            models = frozenset(str(row["id"]) for row in orjson.loads(content)["data"])
        except TimeoutError as error:
            self._late_polls += 1
            if self._late_polls >= MAX_LATE_POLLS or not self.is_reachable:
                self._unreachable(f"no answer within {POLL_TIMEOUT_S:g} s: {type(error).__name__}")
        except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
            self._unreachable(_described(error))
        else:
            self._reachable(models)

    async def complete(self, path: str, body: bytes) -> Answer:
        """Send a request and return the whole answer.

        Raises:
            UpstreamFailedError: see `open`; also when the answer breaks off, which nobody has seen yet.
            UpstreamTimeoutError: see `open`.
        """
        async with self.open(path, body) as response:
            with self.translated():
                content = await response.read()
            return Answer(response.status, response.headers.get("content-type", ""), content)

    @asynccontextmanager
    async def open(self, path: str, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; yields the response before its body is read.

        Raises:
            UpstreamFailedError: it cannot be reached, does not have the model, or failed (404, 5xx).
            UpstreamTimeoutError: it was reached, but did not answer in time.
        """
        self.in_flight += 1
        try:
            with self.translated():
                response = await self._client().post(self.url + path, data=body, headers=_JSON, allow_redirects=False)
            try:
                if response.status == 404 or response.status >= 500:
                    raise UpstreamFailedError(f"answered {response.status}", words=await _words(response))
                yield response
            finally:
                response.close()  # a connection whose answer was read to its end has been given back before
        finally:
            self.in_flight -= 1

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate errors of the client, and take note of a server that refuses connections.

        Raises:
            UpstreamFailedError: the connection failed.
            UpstreamTimeoutError: a part of the answer did not come in time.
        """
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._unreachable(_described(error))
            raise UpstreamFailedError(_described(error)) from error
        except TimeoutError as error:
            raise UpstreamTimeoutError(_described(error)) from error
        except aiohttp.ClientError as error:
            raise UpstreamFailedError(_described(error)) from error

    async def close(self) -> None:
        """Close its connections. Safe to call twice."""
        if self._session is not None:
            await self._session.close()

    async def _list_models(self) -> tuple[int, bytes]:
        """Status and body."""
        async with self._client().get(f"{self.url}/v1/models", allow_redirects=False) as answer:
            return answer.status, await answer.read()

    def _client(self) -> aiohttp.ClientSession:
        """The session, which belongs to the event loop that it is made in."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                headers=self._headers,
                skip_auto_headers=("user-agent",),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    def _reachable(self, models: frozenset[str]) -> None:
        self._late_polls = 0
        self.models = models
        if not self.is_reachable:
            self.is_reachable, self._was_reported = True, False
            _log.info(Event.UPSTREAM_REACHABLE, upstream=self.url, models=len(models))

    def _unreachable(self, reason: str) -> None:
        self.models, self.is_reachable = frozenset(), False
        if not self._was_reported:
            self._was_reported = True
            _log.warning(Event.UPSTREAM_UNREACHABLE, upstream=self.url, reason=reason)


async def _words(response: aiohttp.ClientResponse) -> str:
    """The beginning of an answer as one line of printable text; empty where none comes in time."""
    content = b""
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(WORDS_TIMEOUT_S):
            content = await response.content.read(4 * MAX_WORDS_CHARS)  # bytes of the longest characters
    line = " ".join(content.decode(errors="replace").split())
    return "".join(each if each.isprintable() else "?" for each in line)[:MAX_WORDS_CHARS]


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


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


ROUNDS = 2
"""Times that each server is tried; the second time is for connections that an idle server has just closed."""
POLL_S = 1.0
PAUSE_S = 0.2
"""Pause between two rounds."""
RETRY_AFTER_S = 2

T = TypeVar("T")


class Fleet:
    """The model servers of a gateway. Used by one event loop."""

    def __init__(self, upstreams: Sequence[Upstream], metrics: GatewayMetrics) -> None:
        self.upstreams = upstreams
        self._metrics = metrics

    async def run(self) -> None:
        """Ask every server again and again which models it serves, until cancelled."""
        await asyncio.gather(*(_poll_again(each) for each in self.upstreams))

    async def poll(self) -> None:
        """Ask every server once which models it serves."""
        await asyncio.gather(*(each.poll() for each in self.upstreams))

    @property
    def models(self) -> frozenset[str]:
        """Models that at least one server has."""
        return frozenset().union(*(each.models for each in self.upstreams))

    def has_all(self, models: Iterable[str]) -> bool:
        """Whether each of the models is served somewhere."""
        return self.models.issuperset(models)

    async def send(self, model: str, send: Callable[[Upstream], Awaitable[T]]) -> T:
        """Let one server that has the model answer.

        The one with the fewest requests in flight is tried first, then the others. `send` must not fail once a client
        has seen a part of its answer.

        Raises:
            ApiError: 503, none has the model or all failed; 504, one did not answer in time.
        """
        reason = f"no model server has {model}"
        for attempt in range(ROUNDS):
            tried: list[Upstream] = []
            while (upstream := self._least_busy(model, tried)) is not None:
                tried.append(upstream)
                try:
                    return await send(upstream)
                except UpstreamFailedError as error:
                    said = f": {error.words}" if error.words else ""
                    reason = f"every model server that has {model} failed, the last with: {error}{said}"
                    self._metrics.retries.labels(upstream.url).inc()
                    _log.warning(Event.REQUEST_RETRIED, upstream=upstream.url, model=model, reason=str(error))
                except UpstreamTimeoutError as error:
                    _log.warning(Event.UPSTREAM_TIMED_OUT, upstream=upstream.url, model=model, reason=str(error))
                    raise ApiError(504, "upstream_timeout", f"{model} did not answer in time: {error}") from error
            if attempt + 1 < ROUNDS:
                await asyncio.sleep(PAUSE_S)
        raise unavailable(
            "no_upstream", reason, hint="retry after the seconds in Retry-After", retry_after_s=RETRY_AFTER_S
        )

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        await asyncio.gather(*(each.close() for each in self.upstreams))

    def _least_busy(self, model: str, tried: Collection[Upstream]) -> Upstream | None:
        able = [each for each in self.upstreams if model in each.models and each not in tried]
        return min(able, key=lambda each: each.in_flight, default=None)


async def _poll_again(upstream: Upstream) -> None:
    while True:
        await upstream.poll()
        await asyncio.sleep(POLL_S)
