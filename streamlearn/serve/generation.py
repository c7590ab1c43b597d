"""A running generation as a handler follows it: its start, its text in pieces, its result."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace

from starlette.types import Receive

from streamlearn.jobs.generation_stream import GenerationStart, GenerationStream
from streamlearn.jobs.queue import GenerateJob, JobQueue
from streamlearn.jobs.results import GenerateResult
from streamlearn.serve.wait import client_left, disconnect, too_slow, unwrap


async def follow(
    jobs: JobQueue, job: GenerateJob, receive: Receive, deadline_s: float
) -> AsyncGenerator[GenerationStart | str | GenerateResult]:
    """Queue the job and follow it. It is cancelled when the client disconnects or the deadline passes.

    Raises:
        ApiError: 499 when the client disconnected, 504 after the deadline, 500 when the job failed unexpectedly.
        StreamlearnError: the queue is full, or the job failed with this error.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            loop.call_soon_threadsafe(changed.set)

    stream, started = GenerationStream(notify), False
    future = jobs.submit(replace(job, stream=stream))
    future.add_done_callback(lambda _: notify())
    disconnected = asyncio.ensure_future(disconnect(receive))
    disconnected.add_done_callback(lambda _: changed.set())
    ends = loop.time() + deadline_s
    try:
        while True:
            changed.clear()
            finished = future.done()  # first: what was written before is then in the stream
            if stream.start is not None and not started:
                started = True
                yield stream.start
            if piece := stream.take():
                yield piece
            if finished:
                result = unwrap(future)
                assert isinstance(result, GenerateResult)
                yield result
                return
            if disconnected.done():
                raise client_left()
            async with asyncio.timeout_at(ends):  # not around a yield: each part may run in a task of its own
                await changed.wait()
    except TimeoutError:
        raise too_slow(deadline_s) from None
    finally:
        future.cancel()  # no effect on a finished one
        disconnected.cancel()
