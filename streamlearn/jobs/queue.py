"""Work for the thread that owns the model: HTTP puts a job on a bounded queue, the loop serves it between steps.

1. HTTP: `future = jobs.submit(EvalJob(...))`, or QueueFullError at once.
2. The loop, between steps: `ticket = jobs.take()`, never blocking.
3. The loop works in pieces within its budget, and drops the ticket when `ticket.cancelled`: nobody waits any more.
4. The loop: `ticket.finish(result)` or `ticket.fail(error)`.
"""

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from streamlearn.errors import RecordError, StreamlearnError
from streamlearn.jobs.results import Result


class QueueFullError(StreamlearnError):
    """As many jobs wait as may; the client tries again later."""


class QueueClosedError(StreamlearnError):
    """The daemon stops, so nobody will serve the job."""


class ExampleError(StreamlearnError):
    """One example of an eval job is unusable as a record."""

    def __init__(self, index: int, error: RecordError) -> None:
        super().__init__(f"examples[{index}] is unusable ({error.reason}): {error}")
        self.index = index
        self.reason = error.reason


class LayerError(StreamlearnError):
    """No adapted layer is called as the request says."""


@dataclass(frozen=True, slots=True)
class EvalJob:
    """Measure the model on examples in the record forms, in their order."""

    examples: tuple[Mapping[str, Any], ...]
    generate: bool
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Continue a prompt, or answer messages: exactly one of the two is given."""

    prompt: str | None
    messages: tuple[Mapping[str, Any], ...] | None
    max_new_tokens: int
    image: str | list[str] | None = None
    """Base64, as in a record."""


@dataclass(frozen=True, slots=True)
class SnapshotJob:
    """Write a snapshot now."""


@dataclass(frozen=True, slots=True)
class ExpertsJob:
    """Describe the experts of the layers that have `layer` in their name; of all without one."""

    layer: str | None


Job = EvalJob | GenerateJob | SnapshotJob | ExpertsJob


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job and its waiting client. The future stays pending until settled, so that it can be cancelled at any time."""

    job: Job
    future: Future[Result] = field(default_factory=Future)

    @property
    def cancelled(self) -> bool:
        """Whether the client went away or ran out of time."""
        return self.future.cancelled()

    def finish(self, result: Result) -> None:
        """Hand over the result; nothing happens when the client is gone."""
        with suppress(InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Hand over what went wrong; nothing happens when the client is gone.

        RecordError and ExampleError are the client's (400), LayerError too (422); any other StreamlearnError is shown
        as it is (500); the rest is hidden (500), so log it.
        """
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class JobQueue:
    """At most `size` waiting jobs, first come first served. Any thread may call any method; none blocks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._waiting: deque[Ticket] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Jobs that wait, without the cancelled ones."""
        with self._lock:
            self._forget_cancelled()
            return len(self._waiting)

    def submit(self, job: Job) -> Future[Result]:
        """Append a job; cancel the future to take it back.

        Raises:
            QueueFullError: `size` jobs wait already.
            QueueClosedError: the daemon stops.
        """
        with self._lock:
            if self._closed:
                raise QueueClosedError("the daemon is stopping and takes no more jobs")
            self._forget_cancelled()
            if len(self._waiting) >= self.size:
                raise QueueFullError(f"at most {self.size} jobs may wait and {len(self._waiting)} do")
            ticket = Ticket(job)
            self._waiting.append(ticket)
            return ticket.future

    def take(self) -> Ticket | None:
        """The job that waited longest and is still wanted, or None."""
        with self._lock:
            self._forget_cancelled()
            return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        """Take no more jobs and fail those that wait. Safe to call twice."""
        with self._lock:
            self._closed = True
            abandoned, self._waiting = self._waiting, deque()
        for ticket in abandoned:  # outside the lock: a future's callbacks are foreign code
            ticket.fail(QueueClosedError("the daemon stopped before it came to this job"))

    def _forget_cancelled(self) -> None:
        self._waiting = deque(ticket for ticket in self._waiting if not ticket.cancelled)
