"""A bounded queue of jobs from HTTP to the thread that owns the model.

1. HTTP: `future = jobs.submit(EvalJob(...))`; raises QueueFullError when the queue is full.
2. The loop, between steps: `ticket = jobs.take()`, which never blocks.
3. The loop works in pieces within its time budget and drops the ticket once `ticket.cancelled` is true.
4. The loop: `ticket.finish(result)` or `ticket.fail(error)`.

Controls are taken before any other job and wait in their own places, so a full queue cannot keep an operator from
pausing the daemon. One that has begun cannot be cancelled. The module also has the jobs and their results.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from streamlearn.controls import Control, Requester
from streamlearn.errors import RecordError, StreamlearnError
from streamlearn.status import Requested, Route


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """Weights and route of a generation, known before its first token."""

    step: int
    """Optimizer updates made before the job."""
    prompt_tokens: int
    """Tokens of the prompt."""
    route: Route
    """The prompt's regime, and what generates the text."""


class GenerationStream:
    """Text from the loop to a client. Thread-safe; no method blocks.

    A slow reader gets several pieces as one. At most the text of the job waits for it, which `max_new_tokens` bounds.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        """`notify` is called in the writer's thread after every change, and must not block."""
        self._notify = notify
        self._lock = threading.Lock()
        self._pieces: list[str] = []
        self.start: GenerationStart | None = None
        """None before the job runs."""

    def begin(self, start: GenerationStart) -> None:
        self.start = start
        self._notify()

    def write(self, piece: str) -> None:
        if piece:
            with self._lock:
                self._pieces.append(piece)
            self._notify()

    def take(self) -> str:
        """Remove and return what was written since the last call."""
        with self._lock:
            pieces, self._pieces = self._pieces, []
        return "".join(pieces)


class QueueFullError(StreamlearnError):
    """The queue is full; the client may retry later."""


class QueueClosedError(StreamlearnError):
    """The daemon is stopping and will not run the job."""


class ExampleError(StreamlearnError):
    """An example of an eval job, or a prompt of a route job, is not usable."""

    def __init__(self, index: int, error: RecordError, *, field: str = "examples") -> None:
        super().__init__(f"{field}[{index}] is unusable ({error.reason}): {error}")
        self.index = index
        self.reason = error.reason


@dataclass(frozen=True, slots=True)
class EvalJob:
    """Evaluate the model on examples in the record formats, in their order."""

    examples: tuple[Mapping[str, Any], ...]
    generate: bool
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A prompt to continue or a conversation to answer; exactly one of `prompt` and `messages` is set."""

    prompt: str | None
    messages: tuple[Mapping[str, Any], ...] | None
    image: str | list[str] | None = None
    """In base64, as in a record."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled; see `NucleusSampler`."""

    temperature: float
    """Above 0."""
    top_p: float
    seed: int
    """From 0 to 2**63 - 1."""


@dataclass(frozen=True, slots=True)
class GenerateJob(PromptInput):
    """Continue a prompt or answer a conversation."""

    max_new_tokens: int = field(kw_only=True)
    requested: Requested = field(default="routed", kw_only=True)
    sampling: Sampling | None = field(default=None, kw_only=True)
    """None: greedy."""
    stop: tuple[str, ...] = field(default=(), kw_only=True)
    """Strings that end the text."""
    stream: GenerationStream | None = field(default=None, kw_only=True)
    """Gets the text as it is generated."""


@dataclass(frozen=True, slots=True)
class RouteJob:
    """Find the regime of each prompt, and what would answer it. Needs no weights."""

    prompts: tuple[PromptInput, ...]


@dataclass(frozen=True, slots=True)
class SnapshotJob:
    """Write a snapshot now."""


@dataclass(frozen=True, slots=True)
class ControlJob:
    """Apply a control."""

    control: Control
    who: Requester


# Results, as HTTP returns them and the OpenAPI document describes them.

FinishReason = Literal["stop", "length"]


class ApiModel(BaseModel):
    """Base class of request and response models: frozen, no unknown fields, docstrings as field descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ExampleResult(ApiModel):
    """The result of one example of an evaluation."""

    loss: float
    """Mean over the example's scored tokens, nats per token."""
    tokens: int
    """Scored tokens."""
    token_accuracy: float
    """Share of its scored tokens that were the most probable ones, 0 to 1."""
    output: str | None = None
    """Generated text; null without generate."""
    rouge_l: float | None = None
    """ROUGE-L F1 of the generated text, 0 to 1; null without generate."""
    route: Route
    """Its regime, and what computed the loss and the output."""


class EvalResult(ApiModel):
    """Evaluation of the request's examples on the weights of one step."""

    step: int
    """Optimizer updates made before the job."""
    examples: int
    """Number of examples."""
    tokens: int
    """Scored tokens."""
    loss: float
    """Mean over all scored tokens, nats per token."""
    perplexity: float
    """exp(loss)."""
    token_accuracy: float
    """Share of scored tokens that were the most probable ones, 0 to 1."""
    exact_match: float | None = None
    """Share of generated answers that equal the expected one, 0 to 1; null without generate."""
    rouge_l: float | None = None
    """Mean ROUGE-L F1 of the generated answers, 0 to 1; null without generate."""
    num_known: int
    """Examples that a regime explains."""
    num_unknown: int
    """Examples that no regime explains."""
    answered_by: dict[str, int]
    """Number of examples by what computed them: regime, adapter, mean or backbone."""
    per_example: tuple[ExampleResult, ...]
    """In the order of the request."""
    seconds: float = 0.0
    """Time spent on the job, not counting the time in the queue."""


@dataclass(frozen=True, slots=True)
class GenerateResult(GenerationStart):
    """Generated text."""

    text: str
    """The continuation, without the prompt."""
    tokens: int
    """Generated tokens."""
    finish_reason: FinishReason
    """stop: the text ended by itself or with a stop string; length: at the maximum number of tokens."""


class RouteResult(ApiModel):
    """Regimes of prompts, and what would answer them."""

    step: int
    """Optimizer updates made before the prompts were routed."""
    routes: tuple[Route, ...]
    """In the order of the request."""
    seconds: float = 0.0
    """Time spent on the job, not counting the time in the queue."""


class SnapshotResult(ApiModel):
    """A new durable snapshot."""

    name: str
    """Name of its folder."""
    step: int
    """Optimizer updates in it."""


class ControlResult(ApiModel):
    """A control that was applied, and the resulting state."""

    control: str
    """pause, resume, pin, unpin, rollback, freeze, unfreeze, rename, approve or drop."""
    changed: bool
    """Whether it changed anything; false when the run was in this state already."""
    paused: bool
    """Whether the daemon takes no step and reads no record."""
    pinned: tuple[str, ...]
    """Names of the snapshots that are never pruned."""
    skipped_records: tuple[str, ...]
    """Offsets that are never trained on, as TOPIC:PARTITION:FROM..TO with both ends included."""
    moved_aside: tuple[str, ...] = ()
    """Names of the snapshots that a rollback moved aside, newest first."""
    snapshot: str | None
    """Name of the newest snapshot; null before the first."""


Result = EvalResult | GenerateResult | RouteResult | SnapshotResult | ControlResult
Job = EvalJob | GenerateJob | RouteJob | SnapshotJob | ControlJob
MAX_CONTROLS = 16
"""Controls that may wait."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job and the future its client waits for. The future can be cancelled until it has a result."""

    job: Job
    future: Future[Result] = field(default_factory=Future)

    @property
    def cancelled(self) -> bool:
        return self.future.cancelled()

    def begin(self) -> bool:
        """Keep the future from being cancelled from here on; false if it was already."""
        return self.future.set_running_or_notify_cancel()

    def finish(self, result: Result) -> None:
        """Set the result; has no effect on a cancelled job."""
        with suppress(InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Set an error; has no effect on a cancelled job.

        A StreamlearnError keeps its message (see `serve.errors`). Any other exception becomes a 500 without one, so
        the caller logs it.
        """
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class JobQueue:
    """A FIFO queue of at most `size` jobs, and one of controls. Thread-safe; no method blocks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._waiting: deque[Ticket] = deque()
        self._controls: deque[Ticket] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Number of queued jobs, not counting cancelled ones."""
        with self._lock:
            self._drop_cancelled()
            return len(self._waiting) + len(self._controls)

    def submit(self, job: Job) -> Future[Result]:
        """Queue a job; cancel the future to withdraw it.

        Raises:
            QueueFullError: `size` jobs, or `MAX_CONTROLS` controls, are queued already.
            QueueClosedError: the daemon is stopping.
        """
        with self._lock:
            if self._closed:
                raise QueueClosedError("the daemon is stopping and accepts no more jobs")
            self._drop_cancelled()
            is_control = isinstance(job, ControlJob)
            waiting, most = (self._controls, MAX_CONTROLS) if is_control else (self._waiting, self.size)
            if len(waiting) >= most:
                what = "controls" if is_control else "jobs"
                raise QueueFullError(f"at most {most} {what} may be queued, found {len(waiting)}")
            ticket = Ticket(job)
            waiting.append(ticket)
            return ticket.future

    def take(self) -> Ticket | None:
        """Remove and return the oldest control, else the oldest job, that was not cancelled; None without any."""
        return self.take_control() or self._take(self._waiting)

    def take_control(self) -> Ticket | None:
        """Remove and return the oldest control that was not cancelled; None when there is none."""
        return self._take(self._controls)

    def _take(self, waiting: deque[Ticket]) -> Ticket | None:
        with self._lock:
            self._drop_cancelled()
            return waiting.popleft() if waiting else None

    def close(self) -> None:
        """Accept no more jobs and fail the queued ones. Safe to call twice."""
        with self._lock:
            self._closed = True
            abandoned = [*self._controls, *self._waiting]
            self._controls.clear()
            self._waiting.clear()
        for ticket in abandoned:  # outside the lock: this runs the callbacks of futures
            ticket.fail(QueueClosedError("the daemon stopped before it ran this job"))

    def _drop_cancelled(self) -> None:
        for waiting in (self._controls, self._waiting):
            kept = [ticket for ticket in waiting if not ticket.cancelled]
            if len(kept) < len(waiting):
                waiting.clear()
                waiting.extend(kept)
