"""The gateway's application: OpenAI's paths, health and metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamlearn.gateway import gateway_metrics
from streamlearn.gateway.completion_request import CHAT, TEXT
from streamlearn.gateway.completions import RETRY_AFTER_S, Completions
from streamlearn.gateway.fleet import Fleet
from streamlearn.gateway.publication_watch import PublicationWatch
from streamlearn.gateway.upstream import Upstream
from streamlearn.http.guards import guards
from streamlearn.http.replies import ApiError, OrjsonResponse, unavailable
from streamlearn.settings import GatewaySettings


def create_app(settings: GatewaySettings, *, token: str, upstream_token: str = "") -> Starlette:
    """The application. Its lifespan polls the upstreams and watches the published folder.

    Args:
        settings: Where upstreams and publications are.
        token: Bearer token of the gateway, if it needs one.
        upstream_token: Bearer token of the upstreams, if they need one.
    """
    return _Gateway(settings, token, upstream_token).app


class _Gateway:
    """The parts of an application, and the paths that are not completions."""

    def __init__(self, settings: GatewaySettings, token: str, upstream_token: str) -> None:
        counted = gateway_metrics.GatewayMetrics()
        upstreams = [Upstream(url, timeout_s=settings.timeout_s, token=upstream_token) for url in settings.upstreams]
        self._metrics = counted
        self._fleet = Fleet(upstreams, counted)
        self._watch = PublicationWatch(settings.published, self._fleet, counted)
        self._completions = Completions(self._watch, self._fleet, counted)
        counted.watch(lambda: iter(self._fleet.upstreams))
        self.app = Starlette(
            routes=[
                Route("/livez", _livez),
                Route("/readyz", self._readyz),
                Route("/metrics", self._read_metrics),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._describe_model),
                Route(TEXT, self._completions.handle, methods=["POST"]),
                Route(CHAT, self._completions.handle, methods=["POST"]),
            ],
            middleware=guards(settings, token, has_writes=False),
            exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error},
            lifespan=self._lifespan,
        )
        self.app.router.redirect_slashes = False

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        running = asyncio.gather(self._fleet.run(), self._watch.run())
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await self._fleet.close()

    async def _readyz(self, _: Request) -> Response:
        """200 once a publication is loaded and an upstream serves its backbone."""
        if self._watch.current is None:
            message = f"no publication is loaded: {self._watch.refusal}"
            raise unavailable("not_ready", message, hint="see the log", retry_after_s=RETRY_AFTER_S)
        publication = self._watch.current.publication
        if not self._fleet.has_all([publication.backbone]):
            message = f"at least one upstream must serve {publication.backbone}, found none"
            raise unavailable("not_ready", message, hint="see the log", retry_after_s=RETRY_AFTER_S)
        return OrjsonResponse({"ready": True, "publication": publication.sequence})

    async def _read_metrics(self, _: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": gateway_metrics.CONTENT_TYPE})

    async def _list_models(self, _: Request) -> Response:
        rows = self._completions.publication().names.rows(self._fleet.models)
        return OrjsonResponse({"object": "list", "data": rows})

    async def _describe_model(self, request: Request) -> Response:
        names, name = self._completions.publication().names, request.path_params["name"]
        if not names.is_routed(name):
            names.named(name, self._fleet.models)
        return OrjsonResponse(next(row for row in names.rows(self._fleet.models) if row["id"] == name))


async def _livez(_: Request) -> Response:
    return OrjsonResponse({"alive": True})


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.scope["path"])


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    code, message = {
        404: ("not_found", f"nothing is served at {path[:200]}"),
        405: ("method_not_allowed", f"{path[:200]} does not accept {request.method}"),
    }.get(error.status_code, ("bad_request", str(error.detail)))
    return ApiError(error.status_code, code, message, headers=error.headers).response(path)
