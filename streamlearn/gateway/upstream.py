"""One model server: which models it serves, and requests to it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NamedTuple

import aiohttp
import orjson

from streamlearn.events import Event, get_logger

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
