"""One model server: which models it serves, and requests to it.

Requests are given to the transport of httpx. Its client adds cookies, redirects and proxies, of which a server needs
none, and takes a third longer for a request.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import httpx
import orjson

from streamlearn.events import Event, get_logger

POLL_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2.0
MAX_LATE_POLLS = 3
"""Polls in a row that a busy server may answer too late before it counts as unreachable."""
KEEP_ALIVE_S = 2.0  # vLLM closes idle connections after 5 s; a connection that both ends close at once loses a request

_log = get_logger("gateway")


class UpstreamFailedError(Exception):
    """A request to this server failed before its answer began; another server may answer it."""


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
        self._base = httpx.URL(self.url)
        self._headers = {"host": self._base.netloc.decode(), "accept-encoding": "identity"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
        self._transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,
            verify=self.url.startswith("https:"),  # without TLS, certificates need not be loaded
        )

    async def poll(self) -> None:
        """Ask which models it serves."""
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                answer = await self._send("GET", "/v1/models")
                try:
                    content = await answer.aread()
                finally:
                    await answer.aclose()
            if answer.status_code != 200:
                raise ValueError(f"GET /v1/models was answered {answer.status_code}")
            models = frozenset(str(row["id"]) for row in orjson.loads(content)["data"])
        except (TimeoutError, httpx.TimeoutException) as error:
            self._late_polls += 1
            if self._late_polls >= MAX_LATE_POLLS or not self.is_reachable:
                self._unreachable(f"no answer within {POLL_TIMEOUT_S:g} s: {type(error).__name__}")
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
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
                content = await response.aread()
            return Answer(response.status_code, response.headers.get("content-type", ""), content)

    @asynccontextmanager
    async def open(self, path: str, body: bytes) -> AsyncIterator[httpx.Response]:
        """Send a request; yields the response before its body is read.

        Raises:
            UpstreamFailedError: it cannot be reached, does not have the model, or failed (404, 5xx).
            UpstreamTimeoutError: it was reached, but did not answer in time.
        """
        self.in_flight += 1
        try:
            with self.translated():
                response = await self._send("POST", path, body)
            try:
                if response.status_code == 404 or response.status_code >= 500:
                    raise UpstreamFailedError(f"answered {response.status_code}")
                yield response
            finally:
                await response.aclose()
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
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._unreachable(_described(error))
            raise UpstreamFailedError(_described(error)) from error
        except httpx.TimeoutException as error:
            raise UpstreamTimeoutError(_described(error)) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise UpstreamFailedError(_described(error)) from error

    async def close(self) -> None:
        """Close its connections. Safe to call twice."""
        await self._transport.aclose()

    async def _send(self, method: str, path: str, body: bytes = b"") -> httpx.Response:
        headers = {**self._headers, "content-type": "application/json"} if body else self._headers
        request = httpx.Request(
            method,
            self._base.copy_with(path=path),
            headers=headers,
            content=body or None,
            extensions={"timeout": self._timeout.as_dict()},
        )
        return await self._transport.handle_async_request(request)

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


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
