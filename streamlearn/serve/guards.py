"""What a request must satisfy before a handler sees it, outermost first.

    FaultShield   whatever happens further in is answered          500
    HostGuard     the Host header names this machine's loopback    400   (DNS rebinding)
    OriginGuard   a browser's Origin is on loopback                403   (cross-site requests)
    TokenGuard    what needs the bearer token has it               401   (others on this machine, or of the network)
    JsonGuard     a question declares application/json             415   (forms and beacons cannot)
    BodyGuard     the body is complete and within its limit        413   (counted while it arrives)

Each is one ASGI middleware; what else a request must satisfy joins the list in `guards`.
"""

import asyncio
import hmac
from collections import deque
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamlearn.serve.replies import ApiError, FaultShield
from streamlearn.settings import ServeSettings

DRAIN_BYTES = 16 << 20  # sixteen times the default limit; loopback carries it in some ten milliseconds
DRAIN_S = 1.0  # for a client that trickles


OPEN_PATHS = frozenset({"/livez", "/readyz"})
"""What a supervisor asks; it never needs the token."""
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ASKING_PATHS = frozenset({"/v1/eval", "/v1/generate"})
"""POST because they have a body; they change nothing."""


def guards(settings: ServeSettings, token: str) -> list[Middleware]:
    """The list, for an application that is bound as `settings` say."""
    hosts = frozenset({"127.0.0.1", "localhost", "::1", settings.host.strip("[]").lower(), *settings.names})
    return [
        Middleware(FaultShield),
        Middleware(HostGuard, hosts=hosts),
        Middleware(OriginGuard, hosts=hosts),
        Middleware(TokenGuard, token=token, always=settings.require_token or settings.open_to_others),
        Middleware(JsonGuard),
        Middleware(BodyGuard, max_bytes=settings.max_body_bytes),
    ]


class _Guard:
    """A check of the request's head: `check` raises ApiError or returns."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.check(Request(scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def check(self, request: Request) -> None:
        """Refuse by raising ApiError."""
        raise NotImplementedError


class HostGuard(_Guard):
    """A page that rebinds its own name to 127.0.0.1 still sends that name as Host."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str]) -> None:
        super().__init__(app)
        self.hosts = hosts

    def check(self, request: Request) -> None:
        """Host must be one of ours, with any port."""
        host = request.headers.get("host", "")
        if _hostname(f"//{host}") not in self.hosts:
            message = f"the Host header must name {', '.join(sorted(self.hosts))}, found {host[:100]!r}"
            raise ApiError(
                400, "bad_host", message, hint="the endpoint serves this machine alone: use http://127.0.0.1"
            )


class OriginGuard(_Guard):
    """A browser says which site a request comes from; other sites have no business here."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str]) -> None:
        super().__init__(app)
        self.hosts = hosts

    def check(self, request: Request) -> None:
        """Origin may be absent or on loopback."""
        for origin in request.headers.getlist("origin"):
            if _hostname(origin) not in self.hosts:
                message = f"requests from other sites are refused, found Origin {origin[:100]!r}"
                raise ApiError(403, "foreign_origin", message, hint="leave Origin out, or open the page from localhost")


class TokenGuard(_Guard):
    """A bearer token for what changes something; for everything but health where `always` is set."""

    def __init__(self, app: ASGIApp, *, token: str, always: bool) -> None:
        super().__init__(app)
        self._expected = f"Bearer {token}".encode()
        self._always = always

    def check(self, request: Request) -> None:
        """Compared in constant time."""
        path = request.url.path
        harmless = request.method in READING_METHODS or path in ASKING_PATHS
        if path in OPEN_PATHS or (harmless and not self._always):
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), self._expected):
            found = "another" if given else "none"
            raise ApiError(
                401,
                "no_token",
                f"{request.method} {path[:100]} needs the daemon's bearer token, found {found}",
                hint="send 'Authorization: Bearer TOKEN' with what stands in serve.token_file (or STATE/http.token)",
                headers={"www-authenticate": "Bearer"},
            )


class JsonGuard(_Guard):
    """A form, an image or a beacon of a foreign page can POST, but not with this content type."""

    def check(self, request: Request) -> None:
        """What asks without a token must be application/json, also when it has no body."""
        found = request.headers.get("content-type", "none")
        if (
            request.method == "POST"
            and request.url.path in ASKING_PATHS
            and found.partition(";")[0].strip().lower() != "application/json"
        ):
            message = f"POST needs content-type application/json, found {found[:100]}"
            raise ApiError(415, "wrong_content_type", message, hint="add -H 'content-type: application/json'")


class BodyGuard:
    """Receives the whole body before the application runs, and stops at the first byte too many."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what fits."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            received = await self._receive_all(Headers(scope=scope), receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if received is not None:
            await self.app(scope, _replay(received, receive), send)

    async def _receive_all(self, headers: Headers, receive: Receive) -> Message | None:
        """The body as one message; None when the client left."""
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.max_bytes:
            if "expect" not in headers:  # a client that waits for 100 Continue has sent nothing yet
                await _drain(receive)
            raise self._too_large(declared)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_bytes:
                if more:
                    await _drain(receive)
                raise self._too_large(f"at least {len(body)}")
            if not more:
                return {"type": "http.request", "body": bytes(body), "more_body": False}

    def _too_large(self, found: str) -> ApiError:
        return ApiError(
            413,
            "body_too_large",
            f"a body may hold {self.max_bytes} bytes, found {found}",
            hint="send fewer examples at a time, or raise serve.max_body_bytes",
            headers={"connection": "close"},  # whatever comes after the drain stays unread
        )


async def _drain(receive: Receive) -> None:
    """Read and drop a little of what still comes: a client that is cut off while it sends may never see the answer."""
    dropped = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while dropped < DRAIN_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                if not message.get("more_body", False):  # a disconnect has none either
                    return


def _replay(message: Message, receive: Receive) -> Receive:
    ready = deque([message])

    async def replay() -> Message:
        return ready.popleft() if ready else await receive()

    return replay


def _hostname(url: str) -> str | None:
    """The lower-case host of an URL without brackets and port; None when it is not one."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises on a port that is no number
    except ValueError:
        return None
    return None if parts.username is not None or parts.path not in ("", "/") else parts.hostname
