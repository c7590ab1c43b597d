"""Serves queued jobs between two training steps, in pieces, within a time budget.

A job that is not finished when the budget is spent goes on after the next step, on the weights with which it began.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from streamlearn.errors import StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.jobs.evaluate import SlotsOf, evaluate
from streamlearn.jobs.generate import generate
from streamlearn.jobs.queue import EvalJob, ExpertsJob, GenerateJob, JobQueue, SnapshotJob, Ticket
from streamlearn.jobs.results import EvalResult, ExpertsResult, GenerateResult, SnapshotResult
from streamlearn.learner.evaluation import PinnedWeights
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Decoder

_log = get_logger("serve")

Work = Generator[None, None, EvalResult | GenerateResult | ExpertsResult]
"""A job in pieces."""


@dataclass
class _Open:
    """The job in hand."""

    ticket: Ticket
    work: Work
    weights: PinnedWeights
    seconds: float = 0.0
    """Worked on it so far; training steps in between do not count."""


class JobRunner:
    """Takes one job at a time from the queue. Only the thread that owns the model calls it."""

    def __init__(
        self,
        jobs: JobQueue,
        learner: Learner,
        decoder: Decoder,
        slots_of: SlotsOf,
        experts: Callable[[ExpertsJob], Work],
        save: Callable[[], SnapshotResult],
        *,
        pack_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._learner = learner
        self._decoder = decoder
        self._slots_of = slots_of
        self._experts = experts
        self._save = save
        self._row_tokens = pack_tokens
        self._clock = clock
        self._open: _Open | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is in hand or waits."""
        return self._open is not None or len(self._jobs) > 0

    def serve(self, budget_s: float) -> float:
        """Work on jobs for about `budget_s` seconds, at most one piece longer; return the seconds spent."""
        started = self._clock()
        while self._clock() - started < budget_s and self.busy:
            if self._open is not None:
                self._work_on(self._open, started + budget_s)
            elif (ticket := self._jobs.take()) is not None:
                self._pick_up(ticket, started + budget_s)
        return self._clock() - started

    def _pick_up(self, ticket: Ticket, deadline: float) -> None:
        if isinstance(ticket.job, SnapshotJob):  # at once and with the live weights: it is no piecewise work
            with self._answering(ticket):
                ticket.finish(self._save())
            return
        work = self._run(ticket.job)
        # The first piece follows at once: it takes down the step that the copied weights belong to.
        self._work_on(_Open(ticket, work, PinnedWeights(self._learner.inference_state())), deadline)

    def _run(self, job: EvalJob | GenerateJob | ExpertsJob) -> Work:
        if isinstance(job, ExpertsJob):
            return self._experts(job)
        if isinstance(job, EvalJob):
            return evaluate(job, self._learner, self._decoder, self._slots_of, pack_tokens=self._row_tokens)
        return generate(job, self._learner, self._decoder, self._slots_of)

    def _work_on(self, job: _Open, deadline: float) -> None:
        self._open = None
        began = self._clock()
        with self._answering(job.ticket), job.weights.swapped_in():
            while not job.ticket.cancelled:
                try:
                    next(job.work)
                except StopIteration as finished:
                    seconds = job.seconds + self._clock() - began
                    job.ticket.finish(finished.value.model_copy(update={"seconds": seconds}))
                    return
                if self._clock() >= deadline:
                    job.seconds += self._clock() - began
                    self._open = job
                    return

    @contextmanager
    def _answering(self, ticket: Ticket) -> Iterator[None]:
        """Inside, a failure becomes the client's answer; a request must not end the training run."""
        name = type(ticket.job).__name__
        try:
            yield
            if ticket.future.done() and not ticket.cancelled:
                _log.info(Event.JOB_FINISHED, job=name, step=self._learner.number)
        except StreamlearnError as error:
            ticket.fail(error)
            _log.warning(Event.JOB_FAILED, job=name, error=str(error))
        except Exception as error:  # noqa: BLE001 - whatever a request did, the client is told and the loop goes on
            ticket.fail(error)
            _log.exception(Event.JOB_FAILED, job=name, error=str(error))
