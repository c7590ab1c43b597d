"""The routes of the page. Its files are public code and hold no figure, so they never need the token.

What a browser asks for at `/` is the page; a program gets the list of endpoints there.
"""

from collections.abc import Callable
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from streamlearn.http.guards import SAFE_METHODS
from streamlearn.http.replies import ApiError
from streamlearn.serve.page.asset import Asset
from streamlearn.serve.page.chart_library import chart_library

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
