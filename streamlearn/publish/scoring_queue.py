"""Hold-out records scored by the thread that owns the model, for the thread that publishes.

1. The publisher: `queue.score(examples, lora)` waits for the scores.
2. The loop, between steps: `queue.serve()` makes forward passes while the time budget allows.
3. The loop, at its end: `queue.close()`; who waits gets PublishingStoppedError.
"""

import queue
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from streamlearn.adaptation.time_budget import TimeBudget
from streamlearn.adapters.sequences import NO_REGIME
from streamlearn.errors import StreamlearnError
from streamlearn.export.plain_lora import PlainLora
from streamlearn.export.plain_lora_adapter import PlainLoraAdapter
from streamlearn.learner.evaluation import ExampleScore, score
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Example


class PublishingStoppedError(StreamlearnError):
    """The daemon is stopping; what was not published is tested again after the next start."""


@dataclass(frozen=True)
class _Request:
    examples: Sequence[Example]
    lora: PlainLora | None
    future: Future[list[ExampleScore]] = field(default_factory=Future)


class ScoringQueue:
    """Requests in their order, each served in pieces. `score` may be called from any thread."""

    def __init__(self, learner: Learner, budget: TimeBudget, *, pack_tokens: int) -> None:
        self._learner = learner
        self.budget = budget
        self._pack_tokens = pack_tokens
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._running: tuple[_Request, Generator[None, None, list[ExampleScore]]] | None = None
        self._closed = threading.Event()

    def score(self, examples: Sequence[Example], lora: PlainLora | None) -> list[ExampleScore]:
        """Score examples under a plain LoRA, or under the untouched backbone; blocks until it is done.

        Raises:
            PublishingStoppedError: the loop ended first.
        """
        request = _Request(examples, lora)
        self._waiting.put(request)
        if self._closed.is_set():
            self._abandon()
        return request.future.result()

    def serve(self, *, idle: bool) -> bool:
        """Make one forward pass if there is a request and the budget allows, or always if `idle`.

        Returns whether there was one.
        """
        if not (idle or self.budget.affordable):
            return False
        running = self._running or self._next()
        if running is None:
            return False
        request, work = running
        self._running = running
        try:
            with self.budget.spending(idle=idle):
                next(work)
        except StopIteration as finished:
            self._running = None
            request.future.set_result(finished.value)
        except Exception as error:  # noqa: BLE001 - a version that cannot be scored must not end the training run
            self._running = None
            request.future.set_exception(error)
        return True

    def close(self) -> None:
        """End every wait. Safe to call twice."""
        self._closed.set()
        if self._running is not None:
            self._fail(self._running[0])
            self._running = None
        self._abandon()

    def _next(self) -> tuple[_Request, Generator[None, None, list[ExampleScore]]] | None:
        try:
            request = self._waiting.get_nowait()
        except queue.Empty:
            return None
        work = score(
            self._learner.model,
            request.examples,
            self._learner.device,
            pack_tokens=self._pack_tokens,
            slots=[NO_REGIME] * len(request.examples),
            parallel_adapter=None if request.lora is None else PlainLoraAdapter(request.lora),
        )
        return request, work

    def _abandon(self) -> None:
        while True:
            try:
                self._fail(self._waiting.get_nowait())
            except queue.Empty:
                return

    @staticmethod
    def _fail(request: _Request) -> None:
        request.future.set_exception(PublishingStoppedError("the daemon is stopping"))
