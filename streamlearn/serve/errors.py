"""Errors of the daemon's endpoint: exceptions of the application and of FastAPI as responses.

They are translated here and nowhere else; `http.replies` has the format.
"""

import asyncio
import difflib
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, get_args

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Receive

from streamlearn.errors import AdapterGoneError, RecordError, StreamlearnError, UsageError
from streamlearn.events import Event, get_logger
from streamlearn.http.guards import ApiError, internal_error, unavailable
from streamlearn.jobs.queue import ExampleError, QueueClosedError, QueueFullError
from streamlearn.jobs.results import Result
from streamlearn.regimes.route import UnknownRegimeError

_log = get_logger("serve")

_RECORD_HINT = (
    'expected {"text"}, {"prompt","completion"}, {"messages":[...]} or {"input_ids",["labels"]}; '
    "see /openapi.json for a complete request"
)
_PATHS_HINT = "GET / lists the endpoints, /openapi.json describes them"


def install_error_handlers(app: FastAPI, *, retry_after_s: int = 1, paths_hint: str = _PATHS_HINT) -> None:
    """Make every error of `app` use the error format.

    Args:
        app: The application.
        retry_after_s: Retry-After of a full queue.
        paths_hint: The hint for an unknown path, method or body.
    """

    async def on_api_error(request: Request, error: ApiError) -> Response:
        return error.response(request.scope["path"])

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        return _from_http(request, error, paths_hint).response(request.scope["path"])

    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return _from_invalid(request, error, paths_hint).response(request.scope["path"])

    async def on_streamlearn_error(request: Request, error: StreamlearnError) -> Response:
        return _from_streamlearn(request, error, retry_after_s).response(request.scope["path"])

    handlers: dict[type[Exception], Any] = {
        ApiError: on_api_error,
        HTTPException: on_http_error,
        RequestValidationError: on_invalid,
        StreamlearnError: on_streamlearn_error,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _from_http(request: Request, error: HTTPException, hint: str) -> ApiError:
    path = request.scope["path"]
    if error.status_code == 404:
        return ApiError(404, "not_found", f"nothing is served at {path}", hint=hint)
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        message = f"{path} accepts {allowed}, found {request.method}"
        return ApiError(405, "method_not_allowed", message, hint=hint, headers={"allow": allowed})
    return ApiError(error.status_code, "bad_request", str(error.detail), hint=hint, headers=error.headers)


def _methods(request: Request) -> list[str]:
    """All methods of the path; a route only has its own. Paths outside the OpenAPI document accept GET."""
    paths = request.app.openapi()["paths"]
    matched = [methods for path, methods in paths.items() if compile_path(path)[0].match(request.scope["path"])]
    methods = {method.upper() for described in matched or [{"get": None}] for method in described}
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


def _from_invalid(request: Request, error: RequestValidationError, hint: str) -> ApiError:
    faults = error.errors()
    if faults[0]["type"] == "json_invalid":
        reason, position = faults[0]["ctx"]["error"], faults[0]["loc"][-1]
        return ApiError(400, "not_json", f"the body must be JSON: {reason} at character {position}", hint=hint)
    if _is_no_json(request, faults[0]):
        found = request.headers.get("content-type", "none")
        message = f"expected content-type application/json, found {found[:100]}"
        return ApiError(415, "wrong_content_type", message, hint="add -H 'content-type: application/json'")
    model = getattr(getattr(request.scope.get("route"), "body_field", None), "field_info", None)
    expected = next(_models_in(model.annotation), None) if model is not None else None
    faults = [fault for fault in faults if not _follows(fault, faults)]
    lines = [_explain(fault, expected) for fault in faults[:5]]
    if len(faults) > len(lines):
        lines.append(f"and {len(faults) - len(lines)} more")
    hint = "/openapi.json describes the fields"
    return ApiError(422, "invalid", "; ".join(lines), hint=hint, param=_where(faults[0]) or None)


def _is_no_json(request: Request, fault: Mapping[str, Any]) -> bool:
    """Whether the body as a whole is at fault because it was not declared as JSON, and was not parsed."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return fault["loc"] == ("body",) and fault["type"] != "missing" and declared != "application/json"


def _follows(fault: Mapping[str, Any], faults: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list is too short only because an item of it is wrong."""
    location = fault["loc"]
    others = (each["loc"] for each in faults if len(each["loc"]) > len(location))
    return bool(fault["type"] == "too_short" and any(each[: len(location)] == location for each in others))


def _where(fault: Mapping[str, Any]) -> str:
    """The place of a fault, for example `messages[0].content`; empty for the body as a whole."""
    location = fault["loc"][1:]  # without "body"
    return re.sub(r"^\.", "", "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location))


def _explain(fault: Mapping[str, Any], model: Any) -> str:
    """One line, for example `messages[0].contnt: unknown field, did you mean content?`."""
    location, where = fault["loc"][1:], _where(fault)
    if fault["type"] == "extra_forbidden":
        names = _fields(model, [part for part in location[:-1] if isinstance(part, str)])
        near = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        return f"{where}: unknown field, " + (f"did you mean {near[0]}?" if near else f"expected {', '.join(names)}")
    if fault["type"] == "missing":
        return f"{where or 'body'}: required, found none"
    found = fault["input"]
    shown = f", found {found!r}" if isinstance(found, str | int | float | bool) and len(str(found)) < 80 else ""
    return f"{where or 'body'}: {fault['msg'].removeprefix('Value error, ')}{shown}"


def _fields(model: Any, parents: list[str]) -> list[str]:
    for name in parents:
        model = next(_models_in(model.model_fields[name].annotation), None)
    return list(model.model_fields) if model is not None else []


def _models_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _from_streamlearn(request: Request, error: StreamlearnError, retry_after_s: int) -> ApiError:
    refusal = _refusal(error, retry_after_s)
    if refusal is not None:
        return refusal
    _log.error(Event.HTTP_FAILED, path=request.scope["path"], error=type(error).__name__, message=str(error))
    code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower() + "_failed"
    return ApiError(500, code, str(error), hint="see the daemon's log")


def _refusal(error: StreamlearnError, retry_after_s: int) -> ApiError | None:
    """The answer to a request that the client may mend or repeat; None if the daemon is at fault."""
    text, answer = str(error), None
    match error:
        case QueueFullError():
            hint = "retry after the seconds in Retry-After, or raise serve.queue_size"
            answer = unavailable("queue_full", text, hint=hint, retry_after_s=retry_after_s)
        case QueueClosedError():
            answer = unavailable("stopping", text, hint="retry once /readyz returns 200", retry_after_s=5)
        case AdapterGoneError():
            answer = unavailable("regime_changed", text, hint="repeat the request", retry_after_s=1)
        case UnknownRegimeError():
            answer = ApiError(404, "model_not_found", text, hint="GET /v1/models lists the models", param="model")
        case UsageError():
            hint = "nothing was changed; GET /v1/snapshots and /v1/regimes list what there is"
            answer = ApiError(409, "refused", text, hint=hint)
        case ExampleError():
            answer = ApiError(400, "unusable_record", text, hint=_RECORD_HINT)
        case RecordError():
            answer = ApiError(400, "unusable_record", f"unusable ({error.reason}): {error}", hint=_RECORD_HINT)
    return answer


def require_at_most(limit: int, found: int, *, field: str, setting: str) -> int:
    """Return `found`.

    Raises:
        ApiError: 422 when it is more than `limit`, which `serve.{setting}` sets.
    """
    if found > limit:
        message = f"{field}: expected at most {limit}, found {found}"
        raise ApiError(422, "invalid", message, hint=f"request fewer, or raise serve.{setting}", param=field)
    return found


class _OrjsonRequest(Request):
    """A request whose JSON is parsed by orjson: strict UTF-8, no NaN, bounded depth."""

    async def json(self) -> Any:
        return orjson.loads(await self.body())


class OrjsonRoute(APIRoute):
    """A route that reads its body with orjson."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a request that orjson reads."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_OrjsonRequest(request.scope, request.receive))

        return handler


async def wait_for_result(receive: Receive, future: Future[Result], deadline_s: float) -> Result:
    """The job's result. The job is cancelled when the client disconnects or the deadline passes.

    A control that has begun cannot be cancelled, and the error says so.

    Raises:
        ApiError: 499 when the client disconnected, 504 after the deadline, 500 when the job failed unexpectedly.
        StreamlearnError: the job failed with this error.
    """
    result = asyncio.wrap_future(future)
    disconnected = asyncio.ensure_future(disconnect(receive))
    try:
        waiting: set[asyncio.Future[Any]] = {result, disconnected}
        await asyncio.wait(waiting, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if result.done() and not result.cancelled():
            return unwrap(result)
    finally:
        future.cancel()  # no effect on a finished one, or on a control that has begun
        result.cancel()
        disconnected.cancel()
    if disconnected.done() and not disconnected.cancelled():
        raise client_left()
    if future.cancelled():
        raise too_slow(deadline_s)
    raise unfinished(deadline_s)


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


def client_left() -> ApiError:
    """The client disconnected; no one reads this."""
    return ApiError(499, "client_left", "the client closed the connection; the job was cancelled")


def too_slow(deadline_s: float) -> ApiError:
    """The deadline passed."""
    message = f"the job must finish within {deadline_s:g} s and was cancelled"
    return ApiError(504, "too_slow", message, hint="send fewer examples per request")


def unfinished(deadline_s: float) -> ApiError:
    """The deadline passed while a control was carried out."""
    message = f"the control was not finished within {deadline_s:g} s; it has begun and will be completed"
    return ApiError(504, "too_slow", message, hint="its outcome will be in audit.jsonl in the state folder")


async def disconnect(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
