"""What daemon and gateway answer alike: errors, headers that name what answered, and event streams.

    {"error": {"code": "queue_full", "message": "at most 8 jobs may be queued, found 8", "hint": "retry after ..."}}

On the paths of OpenAI's API an error has the form that its clients read:

    {"error": {"message": "...; retry after ...", "type": "server_error", "param": null, "code": "queue_full"}}
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

OPENAI_PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions")
"""Paths of OpenAI's API; `/v1/models/NAME` belongs to the first."""
EVENT_STREAM = "text/event-stream"

T = TypeVar("T")


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

    def response(self, path: str) -> Response:
        """The response to a request for `path`."""
        status: int = self.status
        detail: dict[str, str | None] = {"code": self.code, "message": str(self), "hint": self.hint}
        if path in OPENAI_PATHS or path.startswith("/v1/models/"):
            detail = self.openai_form
            status = 400 if status == 422 else status  # OpenAI's response to every invalid request
        body = json.dumps({"error": detail})  # ASCII: a message may repeat half a surrogate pair of the request
        return Response(body, status, self.headers, media_type="application/json")

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
    return ApiError(503, code, message, hint=hint, headers={"retry-after": str(retry_after_s)})


def from_http(request: Request, error: HTTPException, *, body_limit: str, hint: str = "") -> ApiError:
    """An error of the framework in our form; `body_limit` is the setting that limits the body."""
    path = request.scope["path"][:200]
    code, message = {
        400: ("not_json", "the body must be JSON"),
        404: ("not_found", f"nothing is served at {path}"),
        405: ("method_not_allowed", f"{path} does not accept {request.method}"),
        413: ("body_too_large", f"the body is larger than {body_limit}"),
    }.get(error.status_code, ("bad_request", str(error.detail)))
    return ApiError(error.status_code, code, message, hint=hint, headers=error.headers)


def internal_error() -> ApiError:
    """500 without details, which are in the log."""
    hint = "see the traceback in the server's log"
    return ApiError(500, "internal", "the request failed inside the server", hint=hint)


def client_left() -> ApiError:
    """499: the client disconnected; no one reads this."""
    return ApiError(499, "client_left", "the client closed the connection; its request was cancelled")


async def disconnect(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        ApiError: 499, the client disconnected.
    """
    working, left = asyncio.ensure_future(work), asyncio.ensure_future(disconnect(receive))
    try:
        waiting: set[asyncio.Future[Any]] = {working, left}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        left.cancel()
    raise client_left()


def answer_headers(model: str, regime: int | None, score: float | None) -> dict[str, str]:
    """The model that answered, the likeliest regime of the prompt, and how well that explains it, 0 to 1.

    Names of models are percent-encoded where a header cannot hold them. What is None has no header.
    """
    headers = {"x-streamlearn-model": quote(model, safe="/:@+,=~ ")}
    if score is not None:
        headers["x-streamlearn-score"] = repr(score)
    if regime is not None:
        headers["x-streamlearn-regime"] = str(regime)
    return headers


class EventStreamResponse(StreamingResponse):
    """Server-sent events whose source is closed when they end or the client leaves."""

    media_type = EVENT_STREAM

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]], headers: Mapping[str, str]
    ) -> None:
        super().__init__(events, headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()
