"""Waiting for a job's result, for as long as the client is connected."""

import asyncio
from concurrent.futures import Future
from typing import Any

from starlette.types import Receive

from streamlearn.errors import StreamlearnError
from streamlearn.http.replies import ApiError, internal_error
from streamlearn.jobs.results import Result


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
