"""Waiting for a job without forgetting that its client may leave."""

import asyncio
from concurrent.futures import Future
from typing import Any

from starlette.types import Receive

from streamlearn.errors import StreamlearnError
from streamlearn.jobs.results import Result
from streamlearn.serve.replies import ApiError, internal


async def outcome(receive: Receive, future: Future[Result], deadline_s: float) -> Result:
    """The job's result. A client that leaves and a deadline that passes cancel the job, which the loop sees."""
    answer = asyncio.wrap_future(future)
    left = asyncio.ensure_future(_disconnected(receive))
    try:
        waiting: set[asyncio.Future[Any]] = {answer, left}
        await asyncio.wait(waiting, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and not answer.cancelled():
            return _unwrap(answer)
    finally:
        future.cancel()  # does nothing to a settled one
        left.cancel()
    if left.done() and not left.cancelled():
        raise ApiError(499, "client_left", "the client closed the connection, the job is cancelled")  # nobody reads it
    raise ApiError(
        504, "too_slow", f"the job was not done within {deadline_s:g} s", hint="send fewer examples at a time"
    )


def _unwrap(answer: asyncio.Future[Result]) -> Result:
    error = answer.exception()
    if error is not None and not isinstance(error, StreamlearnError):
        raise internal() from error  # the loop has logged it
    return answer.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
