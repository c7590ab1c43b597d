"""Waiting for a job: its result, its error, a client that disconnects, a deadline."""

import asyncio
from concurrent.futures import Future

import pytest
from starlette.types import Message

from streamlearn.http.responses import ApiError
from streamlearn.jobs.queue import Result, SnapshotResult
from streamlearn.serve.errors import wait_for_result

DONE = SnapshotResult(name="a", step=1)


async def connected() -> Message:
    """A client that stays."""
    await asyncio.Event().wait()
    raise AssertionError


async def disconnected() -> Message:
    return {"type": "http.disconnect"}


def wait(future: Future[Result], receive: object = connected, deadline_s: float = 5.0) -> Result:
    return asyncio.run(wait_for_result(receive, future, deadline_s))  # type: ignore[arg-type]


def test_a_result_counts_even_if_the_client_disconnected_meanwhile() -> None:
    future: Future[Result] = Future()
    future.set_result(DONE)
    assert wait(future, disconnected) == DONE


def test_a_control_that_has_begun_is_not_reported_as_cancelled() -> None:
    """The loop completes it."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    with pytest.raises(ApiError, match="it has begun and will be completed") as caught:
        wait(future, deadline_s=0.01)
    assert (caught.value.status, future.cancelled()) == (504, False)
    assert "audit.jsonl" in caught.value.hint
    future.set_result(DONE)
