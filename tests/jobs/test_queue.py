"""The queue of jobs, and text on its way from the thread that owns the model."""

import threading

import pytest

from streamlearn.controls import Control, Requester
from streamlearn.jobs.queue import (
    ControlJob,
    EvalJob,
    GenerationStream,
    JobQueue,
    QueueClosedError,
    QueueFullError,
    SnapshotJob,
    SnapshotResult,
    Ticket,
)

JOB = EvalJob(examples=({"text": "a"},), generate=False, max_new_tokens=1)
DONE = SnapshotResult(name="a", step=1)


def test_jobs_are_taken_in_the_order_of_submission_and_no_more_wait_than_the_limit() -> None:
    jobs = JobQueue(2)
    jobs.submit(JOB)
    jobs.submit(SnapshotJob())
    with pytest.raises(QueueFullError, match="at most 2 jobs may be queued, found 2"):
        jobs.submit(JOB)
    taken = [ticket.job for ticket in (jobs.take(), jobs.take()) if ticket is not None]
    assert (taken, jobs.take()) == ([JOB, SnapshotJob()], None)


def test_a_cancelled_job_frees_its_place_and_is_never_taken() -> None:
    jobs = JobQueue(1)
    jobs.submit(JOB).cancel()
    assert len(jobs) == 0
    wanted = jobs.submit(SnapshotJob())
    ticket = jobs.take()
    assert ticket is not None
    assert ticket.future is wanted


def test_a_running_job_can_be_cancelled_and_finishing_it_later_has_no_effect() -> None:
    jobs = JobQueue(1)
    future = jobs.submit(JOB)
    ticket = jobs.take()
    assert ticket is not None
    assert not ticket.cancelled
    assert future.cancel()
    assert ticket.cancelled
    ticket.finish(DONE)
    ticket.fail(ValueError("late"))
    assert future.cancelled()


def test_a_control_that_has_begun_cannot_be_cancelled() -> None:
    job = ControlJob(Control.run("pause"), Requester(user="ann@box"))
    begun, waits = Ticket(job), Ticket(job)
    assert begun.begin()
    assert not begun.future.cancel()
    assert waits.future.cancel()
    assert not waits.begin()


def test_closing_fails_queued_jobs_and_refuses_new_ones() -> None:
    jobs = JobQueue(2)
    future = jobs.submit(JOB)
    jobs.close()
    jobs.close()
    with pytest.raises(QueueClosedError, match="stopped before it ran this job"):
        future.result(timeout=0)
    with pytest.raises(QueueClosedError, match="accepts no more jobs"):
        jobs.submit(JOB)
    assert jobs.take() is None


def test_no_piece_is_lost_between_threads() -> None:
    """A writer that never waits, and a reader that takes what there is."""
    stream, found = GenerationStream(lambda: None), ""
    stream.write("")

    def write() -> None:
        for i in range(20_000):
            stream.write(f"{i} ")

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        found += stream.take()
    writer.join()
    assert found + stream.take() == "".join(f"{i} " for i in range(20_000))
