"""A static file as HTTP sends it: compressed once, and named by its content."""

import gzip
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import Self

from fastapi import APIRouter, Request
from starlette.responses import Response

from streamlearn.http.guards import SAFE_METHODS
from streamlearn.http.responses import ApiError


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, in memory."""

    media_type: str
    body: bytes
    gzipped: bytes
    etag: str
    """Changes with the content, so that a browser asks whether its copy is current and downloads nothing if it is."""

    @classmethod
    def of(cls, media_type: str, body: bytes) -> Self:
        """Compress and hash the content."""
        digest = hashlib.sha256(body).hexdigest()[:32]
        return cls(media_type, body, gzip.compress(body, mtime=0), f'W/"{digest}"')  # weak: two encodings share it

    def response(self, request: Request, headers: dict[str, str]) -> Response:
        """200 with the content, or 304 where the client has it."""
        both = {**headers, "etag": self.etag, "cache-control": "no-cache"}
        if self.etag in _listed(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=both)
        if _accepts_gzip(request.headers.get("accept-encoding", "")):
            return Response(self.gzipped, headers={**both, "content-encoding": "gzip"}, media_type=self.media_type)
        return Response(self.body, headers=both, media_type=self.media_type)


def _accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header names gzip, not with weight 0, which refuses it."""
    for value in header.split(","):
        encoding, *parameters = (part.strip().lower() for part in value.split(";"))
        if encoding == "gzip":
            return not any(re.fullmatch(r"q=0(\.0*)?", each) for each in parameters)
    return False


def _listed(header: str) -> set[str]:
    """The values of a comma-separated header, without their parameters."""
    return {value.partition(";")[0].strip() for value in header.split(",")}


# uPlot, the page's chart library. The distribution uplot-python (extra `page`) brings its files along.
#
# They are read where they were installed. The distribution's Python code is never imported: it draws charts of its own
# from a Python prompt, for which it needs IPython.


DISTRIBUTION = "uplot-python"
FILES = {"uplot.js": "uplot/static/uPlot.iife.js", "uplot.css": "uplot/static/uPlot.min.css"}
"""Name under which the page asks for a file: its path in the distribution."""


def chart_library() -> dict[str, bytes]:
    """The files by name; all empty where the distribution is not installed, and then the page has tables only."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return dict.fromkeys(FILES, b"")
    return {name: Path(str(installed.locate_file(path))).read_bytes() for name, path in FILES.items()}


# The routes of the page. Its files are public code and hold no figure, so they never need the token.
#
# What a browser asks for at `/` is the page; a program gets the list of endpoints there.


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
    """Whether a request is for the page or one of its files."""
    if request.method not in SAFE_METHODS:
        return False
    path: str = request.scope["path"]  # what the routes see; `url` is made of the Host header too
    return path.startswith(PREFIX) or (path == "/" and _is_browser(request))


def page_routes(list_endpoints: Callable[[], str]) -> APIRouter:
    """The routes; `list_endpoints` is what programs get at `/`."""
    routes = APIRouter(include_in_schema=False)
    assets = _load()

    @routes.get("/")
    async def index(request: Request) -> Response:
        if not _is_browser(request):
            return Response(list_endpoints(), media_type="text/plain", headers={"vary": "Accept"})
        return assets[_INDEX].response(request, {**_PAGE_HEADERS, "vary": "Accept, Accept-Encoding"})

    @routes.get(PREFIX + "{name}")
    async def read_asset(request: Request, name: str) -> Response:
        asset = assets.get(name)
        if asset is None or name == _INDEX:
            raise ApiError(404, "not_found", f"the page has no file {name[:100]!r}", hint="open / in a browser")
        return asset.response(request, {**_PAGE_HEADERS, "vary": "Accept-Encoding"})

    return routes


def _load() -> dict[str, Asset]:
    """Every file of the page by name."""
    own = {each.name: each.read_bytes() for each in (files(__package__) / "static").iterdir() if each.is_file()}
    held = {**own, **chart_library()}
    return {name: Asset.of(_MEDIA_TYPES[name[name.rindex(".") :]], body) for name, body in held.items()}


def _is_browser(request: Request) -> bool:
    """Whether the client asks for HTML by name; `*/*`, as curl sends it, does not."""
    return "text/html" in request.headers.get("accept", "")
