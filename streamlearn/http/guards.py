"""Checks of a request before it reaches a handler, and the token that one of them compares.

Traced                       nothing is refused: a span of the request, if there is a collector
TrustedHostMiddleware        the Host header names an allowed host              400  (DNS rebinding)
Guard                        a browser's Origin is an allowed host              403  (cross-site requests)
the bearer token is correct where it is required   401  (other users and machines)
the content type is application/json               415  (forms and beacons)
RequestBodyLimitMiddleware   the body is within its limit                       413  (counted as it arrives)
"""

import hmac
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamlearn.errors import ConfigError
from streamlearn.events import Event, get_logger
from streamlearn.http.responses import ApiError
from streamlearn.http.tracing import Traced
from streamlearn.secret_files import read_secret
from streamlearn.settings import ListenSettings, Settings

HEALTH_PATHS = frozenset({"/livez", "/readyz"})
"""For supervisors: no token, and any Host, since a probe sends the address of its pod."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
QUERY_PATHS = frozenset({"/v1/eval", "/v1/route", "/v1/completions", "/v1/chat/completions"})
"""POST because they have a body; they change no state."""
IsPublic = Callable[[Request], bool]
_ORIGIN = re.compile(r"https?://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d*)?", re.IGNORECASE)

_log = get_logger("http")


def guards(
    settings: ListenSettings, token: str, is_public: IsPublic = lambda _request: False, *, has_writes: bool = True
) -> list[Middleware]:
    """The middleware of an application that is served with these settings.

    Args:
        settings: Where it is served.
        token: The bearer token; no request has an empty one.
        is_public: Which requests never need the token, because their responses hold nothing of the run.
        has_writes: Whether the application has paths that change state, which always need the token.
    """
    names = ["127.0.0.1", "localhost", "::1", settings.host.strip("[]").lower(), *settings.names]
    hosts = [f"[{name}]" if ":" in name else name for name in names]  # as headers have them
    always = settings.require_token or settings.open_to_others
    return [
        Middleware(Traced),
        Middleware(Defaults),
        Middleware(TrustedHosts, hosts=hosts),
        Middleware(
            Guard,
            hosts=frozenset(hosts),
            token=token,
            needs_token=lambda request: always or (has_writes and not _is_query(request)),
            is_public=is_public,
            hint=f"send 'Authorization: Bearer TOKEN' with the token in {settings.token_place}",
        ),
        Middleware(RequestBodyLimitMiddleware, max_body_size=settings.max_body_bytes),
    ]


def _is_query(request: Request) -> bool:
    return request.method in SAFE_METHODS or request.scope["path"] in QUERY_PATHS


class Defaults:
    """Routes HEAD as GET and a path with a slash at its end as without, and marks responses as not to be cached."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_uncached(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("cache-control", "no-store")
            await send(message)

        if scope["type"] == "http":
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            # A copy: the server's own scope keeps HEAD and leaves out the body.
            scope = {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}
        await self.app(scope, receive, send_uncached)


class TrustedHosts:
    """Starlette's check of the Host header, for all paths but those of health probes."""

    def __init__(self, app: ASGIApp, *, hosts: list[str]) -> None:
        self.app = app
        self._checked = TrustedHostMiddleware(app, allowed_hosts=hosts, www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app if scope.get("path") in HEALTH_PATHS else self._checked
        await app(scope, receive, send)


class Guard:
    """Checks origin, token and content type."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: frozenset[str],
        token: str,
        needs_token: Callable[[Request], bool],
        is_public: IsPublic,
        hint: str,
    ) -> None:
        self.app = app
        self._hosts = hosts
        self._expected = f"Bearer {token}".encode() if token else None
        self._needs_token = needs_token
        self._is_public = is_public
        self._hint = hint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        try:
            self._check(request)
        except ApiError as error:
            peer = request.client.host if request.client is not None else None
            path: str = scope["path"]
            _log.warning(Event.REQUEST_REFUSED, path=path[:100], code=error.code, message=str(error), peer=peer)
            await error.response(path)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check(self, request: Request) -> None:
        path: str = request.scope["path"]  # what the routes see; `url` is made of the Host header too
        for origin in request.headers.getlist("origin"):
            match = _ORIGIN.fullmatch(origin)
            if match is None or match["host"].lower() not in self._hosts:
                hint = "remove the Origin header, or open the page from localhost"
                message = f"cross-site requests are not allowed, found Origin {origin[:100]!r}"
                raise ApiError(403, "foreign_origin", message, hint=hint)
        if path not in HEALTH_PATHS and not self._is_public(request) and self._needs_token(request):
            self._check_token(request, path)
        content_type = request.headers.get("content-type", "none")
        if request.method == "POST" and path in QUERY_PATHS and not is_json(content_type):
            raise wrong_content_type(content_type)

    def _check_token(self, request: Request, path: str) -> None:
        given = request.headers.get("authorization", "")
        if self._expected is None or not hmac.compare_digest(given.encode(), self._expected):
            found = "a different one" if given else "none"
            message = f"{request.method} {path[:100]} requires the bearer token, found {found}"
            raise ApiError(401, "no_token", message, hint=self._hint, headers={"www-authenticate": "Bearer"})


def is_json(content_type: str) -> bool:
    """Whether a Content-Type header says application/json."""
    return content_type.partition(";")[0].strip().lower() == "application/json"


def wrong_content_type(found: str) -> ApiError:
    """415, with what curl lacks."""
    message = f"expected content-type application/json, found {found[:100]}"
    return ApiError(415, "wrong_content_type", message, hint="add -H 'content-type: application/json'")


TOKEN_FILE = "http.token"  # noqa: S105 - a file name
MIN_CHARS = 32
_BYTES = 32


def token_path(settings: Settings) -> Path:
    return settings.serve.token_file or settings.state / TOKEN_FILE


def obtain_token(settings: Settings) -> str:
    """The daemon's token. Without `serve.token_file` it is created in the state folder if missing.

    Raises:
        ConfigError: the file cannot be read, its token is too short, or other users may read it.
    """
    path = token_path(settings)
    if settings.serve.token_file is None and not path.exists():
        _create(path)
    return read_token(path)


def read_token(path: Path, *, min_chars: int = MIN_CHARS) -> str:
    """Read the token from a file.

    Raises:
        ConfigError: the file cannot be read, its token is too short, or other users may read it.
    """
    token = read_secret(path, what="token").strip()
    if len(token) < min_chars or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{path}: expected at least {min_chars} printable ASCII characters without spaces, found {len(token)}; "
            "create one with openssl rand -hex 32"
        )
    return token


def _create(path: Path) -> None:
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
