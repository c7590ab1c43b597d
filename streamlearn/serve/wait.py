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
        future.cancel()  # no effect on a finished one
        disconnected.cancel()
    if disconnected.done() and not disconnected.cancelled():
        raise client_left()
    raise too_slow(deadline_s)


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


async def disconnect(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
