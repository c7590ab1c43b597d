"""Errors of the daemon's endpoint, translated to responses, and the wait for a job's result."""

import asyncio
import difflib
import re
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Receive

from streamlearn.board import Board
from streamlearn.errors import AdapterGoneError, RecordError, StreamlearnError, UsageError
from streamlearn.events import Event, get_logger
from streamlearn.http.guards import is_json, wrong_content_type
from streamlearn.http.responses import ApiError, from_http, internal_error, unavailable, while_connected
from streamlearn.jobs.queue import ExampleError, QueueClosedError, QueueFullError, Result
from streamlearn.settings.faults import in_words, real_faults
from streamlearn.status import UnknownRegimeError

RETRY_AFTER_S = 5
_log = get_logger("serve")

_RECORD_HINT = (
    'expected {"text"}, {"prompt","completion"}, {"messages":[...]} or {"input_ids",["labels"]}; '
    "see /openapi.json for a complete request"
)


def install_error_handlers(
    app: FastAPI, *, retry_after_s: int = 1, paths_hint: str = "GET / lists the endpoints, /openapi.json describes them"
) -> None:
    """Make every error of `app` use the error format.

    Args:
        app: The application.
        retry_after_s: Retry-After of a full queue.
        paths_hint: The hint for an unknown path, method or body.
    """

    def api_error(request: Request, error: Exception) -> ApiError:
        match error:
            case ApiError():
                return error
            case HTTPException():
                found = from_http(request, error, body_limit="serve.max_body_bytes", hint=paths_hint)
                if found.status == 405:
                    found.headers = {"allow": _allowed(request)}
                return found
            case RequestValidationError():
                return _from_invalid(request, error)
            case StreamlearnError():
                return _from_streamlearn(request, error, retry_after_s)
        return internal_error()  # uvicorn logs the traceback

    async def respond(request: Request, error: Exception) -> Response:
        return api_error(request, error).response(request.scope["path"])

    for kind in (ApiError, HTTPException, RequestValidationError, StreamlearnError, Exception):
        app.add_exception_handler(kind, respond)


def _allowed(request: Request) -> str:
    """All methods of the path; Starlette names only those of the first route. Undocumented paths accept GET."""
    paths = request.app.openapi()["paths"]
    matched = [methods for path, methods in paths.items() if compile_path(path)[0].match(request.scope["path"])]
    methods = {method.upper() for described in matched or [{"get": None}] for method in described}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))


def _from_invalid(request: Request, error: RequestValidationError) -> ApiError:
    faults = real_faults(error)
    first = faults[0]
    if first["type"] == "json_invalid":
        message = f"the body must be JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
        return ApiError(400, "not_json", message, hint="/openapi.json describes the fields")
    content_type = request.headers.get("content-type", "none")
    if first["loc"] == ("body",) and first["type"] != "missing" and not is_json(content_type):
        return wrong_content_type(content_type)
    field = getattr(getattr(request.scope.get("route"), "body_field", None), "field_info", None)
    model = next(_models_in(field.annotation), None) if field is not None else None
    message = "; ".join(_explain(fault, model) for fault in faults[:5])
    return ApiError(422, "invalid", message, hint="/openapi.json describes the fields", param=_where(first) or None)


def _where(fault: Mapping[str, Any]) -> str:
    """The place of a fault, for example `messages[0].content`; empty for the body as a whole."""
    location = fault["loc"][1:]  # without "body"
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _explain(fault: Mapping[str, Any], model: Any) -> str:
    """One line, for example `messages[0].contnt: unknown field, did you mean content?`."""
    location, where = fault["loc"][1:], _where(fault)
    if fault["type"] == "extra_forbidden":
        for name in location[:-1]:
            if isinstance(name, str):
                model = next(_models_in(model.model_fields[name].annotation), None)
        near = difflib.get_close_matches(str(location[-1]), model.model_fields, n=1, cutoff=0.5)
        return f"{where}: unknown field" + (f", did you mean {near[0]}?" if near else "")
    if fault["type"] == "missing":
        return f"{where or 'body'}: required, found none"
    value = fault["input"]
    found = f", found {value!r}" if isinstance(value, str | int | float | bool) and len(str(value)) < 80 else ""
    return f"{where or 'body'}: {in_words(fault)}{found}"


def _models_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


_REFUSALS: dict[type[StreamlearnError], tuple[int, str, str]] = {
    QueueFullError: (503, "queue_full", "retry after the seconds in Retry-After, or raise serve.queue_size"),
    QueueClosedError: (503, "stopping", "retry once /readyz returns 200"),
    AdapterGoneError: (503, "regime_changed", "repeat the request"),
    UnknownRegimeError: (404, "model_not_found", "GET /v1/models lists the models"),
    UsageError: (409, "refused", "nothing was changed; GET /v1/snapshots and /v1/regimes list what there is"),
    ExampleError: (400, "unusable_record", _RECORD_HINT),
    RecordError: (400, "unusable_record", _RECORD_HINT),
}
"""What the client may fix or repeat."""


def _from_streamlearn(request: Request, error: StreamlearnError, retry_after_s: int) -> ApiError:
    text = f"unusable ({error.reason}): {error}" if isinstance(error, RecordError) else str(error)
    for kind, (status, code, hint) in _REFUSALS.items():
        if isinstance(error, kind):
            retry = retry_after_s if kind is QueueFullError else 1
            headers = {"retry-after": str(retry)} if status == 503 else {}
            param = "model" if kind is UnknownRegimeError else None
            return ApiError(status, code, text, hint=hint, param=param, headers=headers)
    _log.error(Event.HTTP_FAILED, path=request.scope["path"], error=type(error).__name__, message=text)
    code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower() + "_failed"
    return ApiError(500, code, text, hint="see the daemon's log")


def require_ready(board: Board) -> None:
    """Raise ApiError 503 unless the daemon accepts jobs."""
    why = board.why_not_ready()
    if why is not None:
        raise unavailable("not_ready", why, hint="retry once /readyz returns 200", retry_after_s=RETRY_AFTER_S)


def require_at_most(limit: int, found: int, *, field: str, setting: str) -> int:
    """Return `found`.

    Raises:
        ApiError: 422 when it is more than `limit`, which `serve.{setting}` sets.
    """
    if found > limit:
        message = f"{field}: expected at most {limit}, found {found}"
        raise ApiError(422, "invalid", message, hint=f"request fewer, or raise serve.{setting}", param=field)
    return found


async def wait_for_result(receive: Receive, future: Future[Result], deadline_s: float) -> Result:
    """The job's result. The job is cancelled when the client disconnects or the deadline passes.

    A control that has begun cannot be cancelled, and the error says so.

    Raises:
        ApiError: 499 when the client disconnected, 504 after the deadline, 500 when the job failed unexpectedly.
        StreamlearnError: the job failed with this error.
    """
    result = asyncio.wrap_future(future)
    try:
        async with asyncio.timeout(deadline_s):
            await while_connected(receive, asyncio.wait([result]))
            return unwrap(result)
    except TimeoutError:
        pass
    finally:
        future.cancel()  # no effect on a finished one, or on a control that has begun
        result.cancel()
    if future.cancelled():
        raise too_slow(deadline_s)
    message = f"the control was not finished within {deadline_s:g} s; it has begun and will be completed"
    raise ApiError(504, "too_slow", message, hint="its outcome will be in audit.jsonl in the state folder")


def unwrap(finished: asyncio.Future[Result] | Future[Result]) -> Result:
    """The result of a finished job.

    Raises:
        ApiError: 500 when the job failed unexpectedly.
        StreamlearnError: the job failed with this error.
    """
    error = finished.exception()
    if error is not None and not isinstance(error, StreamlearnError):
        raise internal_error() from error  # the loop has logged it
    return finished.result()


def too_slow(deadline_s: float) -> ApiError:
    message = f"the job must finish within {deadline_s:g} s and was cancelled"
    return ApiError(504, "too_slow", message, hint="send fewer examples per request")
