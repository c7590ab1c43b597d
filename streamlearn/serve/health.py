"""Liveness and readiness: two paths of the endpoint, and a separate application for plain HTTP probes."""

from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware

from streamlearn.http.guards import Defaults
from streamlearn.http.responses import unavailable
from streamlearn.serve.errors import install_error_handlers
from streamlearn.serve.models import ErrorBody, Liveness, Readiness
from streamlearn.status import Board

RETRY_AFTER_S = 5


def health_app(board: Board) -> FastAPI:
    """An application that serves `/livez` and `/readyz` and nothing else."""
    app = FastAPI(openapi_url=None, redirect_slashes=False, middleware=[Middleware(Defaults)])
    install_error_handlers(app, paths_hint="this port serves only GET /livez and GET /readyz")
    app.include_router(health_routes(board))
    return app


def health_routes(board: Board) -> APIRouter:
    routes = APIRouter(tags=["health"])

    def fails(description: str) -> dict[int | str, dict[str, Any]]:
        return {503: {"model": ErrorBody, "description": description}}

    not_alive = "The daemon failed, or its training loop has not reported in time."

    @routes.get("/livez", summary="Liveness", responses=fails(not_alive))
    async def livez() -> Liveness:
        """200 while the training loop reports within its time limit, else 503. Restart the daemon on a 503."""
        why = board.why_not_alive()
        if why is not None:
            hint = "see the last events in the log; a restart resumes from the last snapshot"
            raise unavailable("not_alive", why, hint=hint, retry_after_s=RETRY_AFTER_S)
        age, bound = round(board.heartbeat_age_s, 3), board.heartbeat_bound_s
        return Liveness(alive=True, heartbeat_age_s=age, heartbeat_bound_s=bound)

    @routes.get("/readyz", summary="Readiness", responses=fails("The daemon is not ready; the message has the reason."))
    async def readyz() -> Readiness:
        """200 once the model is loaded and the loop runs jobs, else 503 with the reason."""
        require_ready(board)
        status = board.read()
        return Readiness(ready=True, phase=status.phase, step=status.step)

    return routes


def require_ready(board: Board) -> None:
    """Raise ApiError 503 unless the daemon accepts jobs."""
    why = board.why_not_ready()
    if why is not None:
        raise unavailable("not_ready", why, hint="retry once /readyz returns 200", retry_after_s=RETRY_AFTER_S)
