"""Responses: JSON by orjson, and one format for every error.

    {"error": {"code": "queue_full", "message": "at most 8 jobs may be queued, found 8", "hint": "retry after ..."}}

On the paths of OpenAI's API an error has the form that its clients read:

    {"error": {"message": "...; retry after ...", "type": "server_error", "param": null, "code": "queue_full"}}
"""

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from streamlearn.events import Event, get_logger

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
