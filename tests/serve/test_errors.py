"""Waiting for a job: its result, its error, a client that disconnects, a deadline."""

import asyncio
from concurrent.futures import Future

import pytest
from starlette.types import Message

from streamlearn.errors import SnapshotError
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


def test_a_result_is_returned() -> None:
    future: Future[Result] = Future()
    future.set_result(DONE)
    assert wait(future) == DONE


def test_a_result_counts_even_if_the_client_disconnected_meanwhile() -> None:
    future: Future[Result] = Future()
    future.set_result(DONE)
    assert wait(future, disconnected) == DONE


def test_a_client_that_disconnects_cancels_the_job() -> None:
    future: Future[Result] = Future()
    with pytest.raises(ApiError) as caught:
        wait(future, disconnected)
    assert (caught.value.status, future.cancelled()) == (499, True)


def test_a_deadline_cancels_the_job() -> None:
    future: Future[Result] = Future()
    with pytest.raises(ApiError, match=r"must finish within 0\.01 s") as caught:
        wait(future, deadline_s=0.01)
    assert (caught.value.status, future.cancelled()) == (504, True)


def test_a_control_that_has_begun_is_not_reported_as_cancelled() -> None:
    """The loop completes it."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    with pytest.raises(ApiError, match="it has begun and will be completed") as caught:
        wait(future, deadline_s=0.01)
    assert (caught.value.status, future.cancelled()) == (504, False)
    assert "audit.jsonl" in caught.value.hint
    future.set_result(DONE)


def test_an_error_of_ours_is_raised_and_any_other_is_hidden() -> None:
    ours: Future[Result] = Future()
    ours.set_exception(SnapshotError("disk full"))
    with pytest.raises(SnapshotError, match="disk full"):
        wait(ours)
    other: Future[Result] = Future()
    other.set_exception(KeyError("secret"))
    with pytest.raises(ApiError) as caught:
        wait(other)
    assert (caught.value.status, "secret" in str(caught.value)) == (500, False)
