"""The page, at `/` for browsers; programs get the list of endpoints there.

Its files are public code and hold no data of the run, so they never need the token.
"""

import hashlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path, PurePath

from fastapi import APIRouter, Request
from starlette.responses import Response

from streamlearn.http.guards import SAFE_METHODS
from streamlearn.http.responses import ApiError


def with_etag(request: Request, body: bytes, media_type: str, headers: dict[str, str] | None = None) -> Response:
    """200 with the body, or 304 where the client has it: the ETag changes with the content."""
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    both = {**(headers or {}), "etag": etag, "cache-control": "no-cache"}
    known = request.headers.get("if-none-match", "").split(",")
    if etag in {value.strip().removeprefix("W/") for value in known}:
        return Response(status_code=304, headers=both)
    return Response(body, headers=both, media_type=media_type)


DISTRIBUTION = "uplot-python"
"""Brings the files of uPlot, the page's chart library (extra `page`). Its Python code is never imported."""
FILES = {"uplot.js": "uplot/static/uPlot.iife.js", "uplot.css": "uplot/static/uPlot.min.css"}
"""Name under which the page asks for a file: its path in the distribution."""


def chart_library() -> dict[str, bytes]:
    """The files by name; empty where the distribution is not installed, and then the page has tables only."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return dict.fromkeys(FILES, b"")
    return {name: Path(str(installed.locate_file(path))).read_bytes() for name, path in FILES.items()}


PREFIX = "/page/"
_INDEX = "index.html"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_POLICY = (
    "default-src 'none'",
    "script-src 'self'",  # no inline code, and no eval
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # no string becomes markup
)
_PAGE_HEADERS = {
    "content-security-policy": "; ".join(_POLICY),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}


def is_page_request(request: Request) -> bool:
    if request.method not in SAFE_METHODS:
        return False
    path: str = request.scope["path"]  # what the routes see; `url` is made of the Host header too
    return path.startswith(PREFIX) or (path == "/" and _is_browser(request))


def page_routes(list_endpoints: Callable[[], str]) -> APIRouter:
    """The routes; `list_endpoints` is what programs get at `/`."""
    routes = APIRouter(include_in_schema=False)
    own = {file.name: file.read_bytes() for file in (files(__package__) / "static").iterdir() if file.is_file()}
    assets = {**own, **chart_library()}

    @routes.get("/")
    async def index(request: Request) -> Response:
        if not _is_browser(request):
            return Response(list_endpoints(), media_type="text/plain", headers={"vary": "Accept"})
        return with_etag(request, assets[_INDEX], _MEDIA_TYPES[".html"], {**_PAGE_HEADERS, "vary": "Accept"})

    @routes.get(PREFIX + "{name}")
    async def read_asset(request: Request, name: str) -> Response:
        if name not in assets or name == _INDEX:
            raise ApiError(404, "not_found", f"the page has no file {name[:100]!r}", hint="open / in a browser")
        return with_etag(request, assets[name], _MEDIA_TYPES[PurePath(name).suffix], _PAGE_HEADERS)

    return routes


def _is_browser(request: Request) -> bool:
    """Whether the client requests HTML by name; `*/*`, as curl sends it, does not."""
    return "text/html" in request.headers.get("accept", "")
