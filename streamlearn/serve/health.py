"""Liveness and readiness: routes of the main endpoint, and an application of their own for probes.

A probe by pod IP sends that address as its Host, which the main endpoint refuses. `health_app` accepts every Host: it
needs no token and reports nothing but whether the daemon is alive and ready.
"""

from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.responses import Response

from streamlearn import __version__
from streamlearn.http.guards import FaultShield, OrjsonResponse, unavailable
from streamlearn.http.server import HeadAsGet
from streamlearn.serve import errors as replies
from streamlearn.serve.models import ErrorBody, Liveness, Readiness
from streamlearn.status import Board

RETRY_AFTER_S = 5


def health_app(board: Board) -> FastAPI:
    """An application that serves `/livez` and `/readyz` and nothing else."""
    app = FastAPI(
        title="streamlearn health",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[Middleware(FaultShield), Middleware(HeadAsGet)],
    )
    replies.install_error_handlers(app, paths_hint="this port serves only GET /livez and GET /readyz")
    app.include_router(health_routes(board))
    return app


def health_routes(board: Board) -> APIRouter:
    """`/livez` and `/readyz`."""
    routes = APIRouter(tags=["health"])
    not_alive = _unavailable("The daemon failed, or its training loop has not reported in time.")
    not_ready = _unavailable("The daemon is not ready; the message has the reason.")

    @routes.get("/livez", response_model=Liveness, summary="Liveness", responses=not_alive)
    async def livez() -> Response:
        """200 while the training loop reports within its time limit, else 503. Restart the daemon on a 503."""
        why = board.why_not_alive()
        if why is not None:
            hint = "see the last events in the log; a restart resumes from the last snapshot"
            raise unavailable("not_alive", why, hint=hint, retry_after_s=RETRY_AFTER_S)
        age, bound = round(board.heartbeat_age_s, 3), board.heartbeat_bound_s
        return OrjsonResponse(Liveness(alive=True, heartbeat_age_s=age, heartbeat_bound_s=bound))

    @routes.get("/readyz", response_model=Readiness, summary="Readiness", responses=not_ready)
    async def readyz() -> Response:
        """200 once the model is loaded and the loop runs jobs, else 503 with the reason."""
        require_ready(board)
        status = board.read()
        return OrjsonResponse(Readiness(ready=True, phase=status.phase, step=status.step))

    return routes


def require_ready(board: Board) -> None:
    """Raise ApiError 503 unless the daemon accepts jobs."""
    why = board.why_not_ready()
    if why is not None:
        hint = "retry once /readyz returns 200"
        raise unavailable("not_ready", why, hint=hint, retry_after_s=RETRY_AFTER_S)


def _unavailable(description: str) -> dict[int | str, dict[str, Any]]:
    return {503: {"model": ErrorBody, "description": description}}
