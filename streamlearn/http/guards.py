"""Checks of a request before it reaches a handler, outermost first.

    FaultShield   unexpected exceptions become an error response   500
    HostGuard     the Host header names an allowed host            400   (DNS rebinding)
    OriginGuard   a browser's Origin is an allowed host            403   (cross-site requests)
    TokenGuard    the bearer token is correct where it is required 401   (other users and other machines)
    JsonGuard     the content type is application/json             415   (HTML forms and beacons cannot send it)
    BodyGuard     the body is complete and within its limit        413   (counted as it arrives)

Each is one ASGI middleware; `guards` lists them.
"""

import asyncio
import hmac
import os
import re
import secrets
import stat
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamlearn.errors import ConfigError
from streamlearn.events import Event, get_logger
from streamlearn.settings import ListenSettings, Settings

# Responses: JSON by orjson, and one format for every error.
#
#     {"error": {"code": "queue_full", "message": "at most 8 jobs may be queued, found 8", "hint": "retry after ..."}}
#
# On the paths of OpenAI's API an error has the form that its clients read:
#
#     {"error": {"message": "...; retry after ...", "type": "server_error", "param": null, "code": "queue_full"}}


OPENAI_PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions")
"""Paths of OpenAI's API; `/v1/models/NAME` belongs to the first."""

_log = get_logger("http")


class OrjsonResponse(Response):
    """JSON of a value, a pydantic model or a dataclass. NaN and infinity become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Serialize to bytes."""
        value = content.model_dump() if isinstance(content, BaseModel) else content
        return orjson.dumps(value, option=orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE)


class ApiError(Exception):
    """Ends a request with an error response."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`param` names the field that is wrong, for OpenAI's clients."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.hint = hint
        self.param = param
        self.headers = dict(headers or {})

    def response(self, path: str = "") -> Response:
        """The response for this error, in OpenAI's form on its paths."""
        if is_openai(path):
            status = 400 if self.status == 422 else self.status  # OpenAI's answer to every invalid request
            return OrjsonResponse({"error": self.openai_form}, status, self.headers)
        return OrjsonResponse({"error": self.form}, self.status, self.headers)

    @property
    def form(self) -> dict[str, str]:
        """The error on the daemon's own paths."""
        return {"code": self.code, "message": str(self), "hint": self.hint}

    @property
    def openai_form(self) -> dict[str, str | None]:
        """The error on OpenAI's paths. Its message ends with the hint, for which OpenAI has no field."""
        return {
            "message": "; ".join(part for part in (str(self), self.hint) if part),
            "type": "server_error" if self.status >= 500 else "invalid_request_error",
            "param": self.param,
            "code": self.code,
        }


def unavailable(code: str, message: str, *, hint: str, retry_after_s: int) -> ApiError:
    """503 with Retry-After."""
    return ApiError(503, code, message, hint=hint, headers={"retry-after": str(retry_after_s)})


def internal_error() -> ApiError:
    """500 without details: those are in the log."""
    return ApiError(
        500, "internal", "the request failed inside the server", hint="see the traceback in the server's log"
    )


class FaultShield:
    """Outermost middleware: logs unexpected exceptions and returns a 500, so that the connection stays usable."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        try:
            await self.app(scope, receive, send)
        except Exception:  # noqa: BLE001 - every unexpected exception gets the same response
            _log.exception(Event.HTTP_FAILED, path=scope.get("path"))
            await internal_error().response(scope.get("path", ""))(scope, receive, send)


def is_openai(path: str) -> bool:
    """Whether errors at this path have OpenAI's form."""
    return path in OPENAI_PATHS or path.startswith(f"{OPENAI_PATHS[0]}/")


DRAIN_BYTES = 16 << 20  # sixteen times the default limit; takes about 10 ms over loopback
DRAIN_S = 1.0  # for a slow client
_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d{0,5})?", re.IGNORECASE)

HEALTH_PATHS = frozenset({"/livez", "/readyz"})
"""For supervisors; they never need the token."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
QUERY_PATHS = frozenset({"/v1/eval", "/v1/generate", "/v1/route", "/v1/completions", "/v1/chat/completions"})
"""POST because they have a body; they change no state."""


OnRefused = Callable[[Request, str], None]
"""Told of each request without the token, with the reason; called in a worker thread, so it may block."""


IsPublic = Callable[[Request], bool]
"""Whether a request never needs the token, because its answer holds nothing of the run."""


def guards(
    settings: ListenSettings,
    token: str,
    on_no_token: OnRefused | None = None,
    is_public: IsPublic = lambda _request: False,
    *,
    has_writes: bool = True,
) -> list[Middleware]:
    """The middleware for an application served with these settings.

    Args:
        settings: Where it is served.
        token: The bearer token; no request has an empty one.
        on_no_token: Told of requests without the token.
        is_public: Which requests never need the token.
        has_writes: Whether the application has paths that change state, which always need the token.
    """
    hosts = frozenset({"127.0.0.1", "localhost", "::1", settings.host.strip("[]").lower(), *settings.names})
    return [
        Middleware(FaultShield),
        Middleware(HostGuard, hosts=hosts, hint=settings.host_hint),
        Middleware(OriginGuard, hosts=hosts),
        Middleware(
            TokenGuard,
            token=token,
            always=settings.require_token or settings.open_to_others,
            hint=settings.token_hint,
            on_no_token=on_no_token,
            is_public=is_public,
            has_writes=has_writes,
        ),
        Middleware(JsonGuard),
        Middleware(BodyGuard, max_bytes=settings.max_body_bytes, limit_key=settings.key("max_body_bytes")),
    ]


class _Guard:
    """A check of the request line and headers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request and pass it on, or send the error."""
        if scope["type"] == "http":
            request = Request(scope)
            try:
                self.check(request)
            except ApiError as error:
                await self.on_refused(request, error)
                await error.response(scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def check(self, request: Request) -> None:
        """Raise ApiError to refuse the request."""
        raise NotImplementedError

    async def on_refused(self, request: Request, error: ApiError) -> None:
        """A request was refused."""


class HostGuard(_Guard):
    """Requires an allowed Host: a page that rebinds its own name to 127.0.0.1 still sends that name."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str], hint: str) -> None:
        super().__init__(app)
        self.hosts = hosts
        self._hint = hint

    def check(self, request: Request) -> None:
        """Require an allowed host, with any port."""
        host = request.headers.get("host", "")
        if _hostname(host) not in self.hosts:
            message = f"expected a Host header of {', '.join(sorted(self.hosts))}, found {host[:100]!r}"
            raise ApiError(400, "bad_host", message, hint=self._hint)


class OriginGuard(_Guard):
    """Refuses requests that a browser sends on behalf of another site."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str]) -> None:
        super().__init__(app)
        self.hosts = hosts

    def check(self, request: Request) -> None:
        """Require every Origin, if there is one, to be an allowed host."""
        for origin in request.headers.getlist("origin"):
            if _hostname(origin.partition("://")[2]) not in self.hosts:
                message = f"cross-site requests are not allowed, found Origin {origin[:100]!r}"
                raise ApiError(
                    403, "foreign_origin", message, hint="remove the Origin header, or open the page from localhost"
                )


class TokenGuard(_Guard):
    """Requires the bearer token for what changes state; with `always`, for everything but health and public code."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str,
        always: bool,
        hint: str,
        on_no_token: OnRefused | None,
        is_public: IsPublic,
        has_writes: bool,
    ) -> None:
        super().__init__(app)
        self._hint = hint
        self._is_public = is_public
        self._on_no_token = on_no_token
        self._expected = f"Bearer {token}".encode() if token else None
        self._always = always
        self._has_writes = has_writes

    def check(self, request: Request) -> None:
        """Compare the token in constant time."""
        path: str = request.scope["path"]  # what the routes see; `url` would be parsed
        read_only = not self._has_writes or request.method in SAFE_METHODS or path in QUERY_PATHS
        if path in HEALTH_PATHS or self._is_public(request) or (read_only and not self._always):
            return
        given = request.headers.get("authorization", "")
        if self._expected is None or not hmac.compare_digest(given.encode(), self._expected):
            found = "a different one" if given else "none"
            raise ApiError(
                401,
                "no_token",
                f"{request.method} {path[:100]} requires the bearer token, found {found}",
                hint=self._hint,
                headers={"www-authenticate": "Bearer"},
            )

    async def on_refused(self, request: Request, error: ApiError) -> None:
        """Tell who wants to know."""
        if self._on_no_token is not None:
            await asyncio.to_thread(self._on_no_token, request, str(error))


class JsonGuard(_Guard):
    """Requires application/json, which a form, an image or a beacon of a foreign page cannot send."""

    def check(self, request: Request) -> None:
        """Require the content type on paths that need no token, even without a body."""
        found = request.headers.get("content-type", "none")
        if (
            request.method == "POST"
            and request.scope["path"] in QUERY_PATHS
            and found.partition(";")[0].strip().lower() != "application/json"
        ):
            message = f"expected content-type application/json, found {found[:100]}"
            raise ApiError(415, "wrong_content_type", message, hint="add -H 'content-type: application/json'")


class BodyGuard:
    """Receives the whole body before the application runs, up to a maximum size."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, limit_key: str) -> None:
        self.app = app
        self._limit_key = limit_key
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body, or send the error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            received = await self._receive_all(Headers(scope=scope), receive)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        if received is not None:
            await self.app(scope, _replay(received, receive), send)

    async def _receive_all(self, headers: Headers, receive: Receive) -> Message | None:
        """The body as one message; None when the client disconnected."""
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.max_bytes:
            if "expect" not in headers:  # a client waiting for 100 Continue has sent nothing yet
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
            f"expected a body of at most {self.max_bytes} bytes, found {found}",
            hint=f"send less per request, or raise {self._limit_key}",
            headers={"connection": "close"},  # what follows the drained part stays unread
        )


async def _drain(receive: Receive) -> None:
    """Read and discard a bounded part of the body: a client cut off while sending may never read the response."""
    dropped = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while dropped < DRAIN_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                if not message.get("more_body", False):  # a disconnect message has no more_body either
                    return


def _replay(message: Message, receive: Receive) -> Receive:
    ready = deque([message])

    async def replay() -> Message:
        return ready.popleft() if ready else await receive()

    return replay


def _hostname(authority: str) -> str | None:
    """The lower-case host of HOST[:PORT], without brackets; None for anything else, user information and paths too.

    >>> _hostname("LOCALHOST:8083"), _hostname("[::1]"), _hostname("localhost/?")
    ('localhost', '::1', None)
    """
    found = _AUTHORITY.fullmatch(authority)
    return None if found is None else (found["ipv6"] or found["name"]).lower()


NAME = "http.token"
MIN_CHARS = 32
_BYTES = 32


def token_path(settings: Settings) -> Path:
    """Path of the token file."""
    return settings.serve.token_file or settings.state / NAME


def obtain(settings: Settings) -> str:
    """The daemon's token. Without `serve.token_file` it is created in the state folder if missing.

    Raises:
        ConfigError: the file cannot be read, its token is too short, or other users may read it.
    """
    path = token_path(settings)
    if settings.serve.token_file is None and not path.exists():
        _create(path)
    return read(path)


def read(path: Path) -> str:
    """Read the token from a file.

    Raises:
        ConfigError: see `obtain`.
    """
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the token cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"{path}: expected a file readable by its owner only, found mode {stat.S_IMODE(mode):o}; run chmod 600"
        )
    if len(token) < MIN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{path}: expected at least {MIN_CHARS} printable characters without spaces, found {len(token)}; "
            "create one with openssl rand -hex 32"
        )
    return token


def _create(path: Path) -> None:
    """Write the file atomically."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the state folder, at the first start
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError as error:
        raise ConfigError(f"{path}: the token cannot be written: {error}") from error
