"""The queue of jobs, and text on its way from the thread that owns the model."""

import threading

import pytest

from streamlearn.errors import Reason, RecordError
from streamlearn.jobs.queue import (
    EvalJob,
    ExampleError,
    GenerationStart,
    GenerationStream,
    JobQueue,
    QueueClosedError,
    QueueFullError,
    SnapshotJob,
    SnapshotResult,
)
from tests.serve.doubles import KNOWN

JOB = EvalJob(examples=({"text": "a"},), generate=False, max_new_tokens=1)
DONE = SnapshotResult(name="a", step=1)


def test_jobs_are_taken_in_the_order_of_submission() -> None:
    jobs = JobQueue(3)
    jobs.submit(JOB)
    jobs.submit(SnapshotJob())
    first, second = jobs.take(), jobs.take()
    assert first is not None
    assert second is not None
    assert [first.job, second.job] == [JOB, SnapshotJob()]
    assert jobs.take() is None


def test_a_full_queue_refuses_with_its_limit() -> None:
    jobs = JobQueue(1)
    jobs.submit(JOB)
    with pytest.raises(QueueFullError, match="at most 1 jobs may be queued, found 1"):
        jobs.submit(JOB)


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


def test_results_and_errors_reach_the_waiting_thread() -> None:
    jobs = JobQueue(2)
    futures = [jobs.submit(JOB), jobs.submit(JOB)]

    def serve() -> None:
        first, second = jobs.take(), jobs.take()
        assert first is not None
        assert second is not None
        first.finish(DONE)
        second.fail(ExampleError(2, RecordError(Reason.EMPTY, "nothing in it")))

    thread = threading.Thread(target=serve)
    thread.start()
    assert futures[0].result(timeout=1) == DONE
    with pytest.raises(ExampleError, match=r"examples\[2\] is unusable \(empty\): nothing in it"):
        futures[1].result(timeout=1)
    thread.join()


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


START = GenerationStart(step=3, prompt_tokens=2, route=KNOWN)


def test_a_slow_reader_finds_several_pieces_as_one() -> None:
    """And nothing twice."""
    stream = GenerationStream(lambda: None)
    for piece in ("a", "b", "", "c"):
        stream.write(piece)
    assert (stream.take(), stream.take()) == ("abc", "")


def test_the_reader_is_told_of_every_change() -> None:
    """The start and each piece; an empty piece is no change."""
    told: list[GenerationStart | None] = []
    stream = GenerationStream(lambda: told.append(stream.start))
    stream.write("")
    assert told == []
    stream.begin(START)
    stream.write("a")
    assert told == [START, START]


def test_no_piece_is_lost_between_threads() -> None:
    """A writer that never waits, and a reader that takes what there is."""
    stream, found = GenerationStream(lambda: None), ""

    def write() -> None:
        for i in range(20_000):
            stream.write(f"{i} ")

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        found += stream.take()
    writer.join()
    assert found + stream.take() == "".join(f"{i} " for i in range(20_000))
