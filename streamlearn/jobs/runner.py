"""Runs queued jobs between two training steps, in pieces, within a time budget.

A job that is unfinished when the budget is spent continues after the next step, on the weights it started with. If an
adapter that it needs was removed or replaced by then, it fails with an error that asks to repeat the request.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from unicodedata import east_asian_width

import numpy as np
import torch
from numpy.typing import NDArray

from streamlearn.controls import Control, StateControls
from streamlearn.errors import RecordError, StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.jobs.queue import (
    ControlJob,
    ControlResult,
    EvalJob,
    EvalResult,
    ExampleError,
    ExampleResult,
    FinishReason,
    GenerateJob,
    GenerateResult,
    GenerationStart,
    GenerationStream,
    JobQueue,
    PromptInput,
    QueueClosedError,
    Result,
    RouteJob,
    RouteResult,
    Sampling,
    SnapshotJob,
    SnapshotResult,
    Ticket,
)
from streamlearn.learner.cache import PinnedWeights
from streamlearn.learner.evaluate import ExampleScore, prompt_of, reference_of
from streamlearn.learner.generate import NucleusSampler, TokenChoice, decode, most_likely
from streamlearn.learner.learner import Learner
from streamlearn.regimes.route import RoutedInput
from streamlearn.shift.features import input_of, input_of_prompt
from streamlearn.status import AnsweredBy, Requested, Route
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Example, Prompt

_log = get_logger("jobs")

RouteInputs = Callable[[Sequence[NDArray[np.int32]], Requested], list[RoutedInput]]
"""Finds what answers each input; raises UnknownRegimeError if the requested regime cannot answer."""
Work = Generator[None, None, EvalResult | GenerateResult | RouteResult]
"""A job in pieces: yields after each piece and returns the result."""


@dataclass
class _RunningJob:
    """The current job, between two pieces of its work."""

    ticket: Ticket
    work: Work
    weights: PinnedWeights | None = None
    """Those it started with, once a training step comes between two of its pieces."""
    seconds: float = 0.0
    """Time spent on it so far, not counting the training steps between its pieces."""


class JobRunner:
    """Runs one job at a time from the queue. Called only by the thread that owns the model."""

    def __init__(
        self,
        jobs: JobQueue,
        learner: Learner,
        decoder: Decoder,
        route_inputs: RouteInputs,
        save: Callable[[], SnapshotResult],
        control: Callable[[ControlJob], ControlResult],
        *,
        pack_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._learner = learner
        self._decoder = decoder
        self._route_inputs = route_inputs
        self._save = save
        self._control = control
        self._pack_tokens = pack_tokens
        self._clock = clock
        self._running: _RunningJob | None = None
        self.requests: Counter[tuple[bool, AnsweredBy]] = Counter()
        """Prompts and examples of finished evaluations and generations, by whether a regime explained them and by what
        answered."""

    @property
    def busy(self) -> bool:
        return self._running is not None or len(self._jobs) > 0

    def serve(self, budget_s: float) -> float:
        """Work on jobs for `budget_s` seconds, exceeded by one piece at most; return the seconds spent."""
        started = self._clock()
        while self._clock() - started < budget_s and self.busy:
            if (control := self._jobs.take_control()) is not None:
                self._start(control, started + budget_s)
            elif self._running is not None:
                self._continue(self._running, started + budget_s)
            elif (ticket := self._jobs.take()) is not None:
                self._start(ticket, started + budget_s)
        return self._clock() - started

    def close(self) -> None:
        """Fail the job that is unfinished: no further piece of it will be run. Safe to call twice."""
        job, self._running = self._running, None
        if job is not None:
            with self._failures_reported_to(job.ticket):
                raise QueueClosedError("the daemon stopped before it finished this job")

    def _start(self, ticket: Ticket, deadline: float) -> None:
        if isinstance(ticket.job, SnapshotJob):  # in one piece, and with the live weights
            with self._failures_reported_to(ticket):
                ticket.finish(self._save())
        elif isinstance(ticket.job, ControlJob):
            if ticket.begin():
                with self._failures_reported_to(ticket):
                    ticket.finish(self._control(ticket.job))
        else:  # the first piece runs at once: it records the step
            self._continue(_RunningJob(ticket, self._begin(ticket.job)), deadline)

    def _begin(self, job: EvalJob | GenerateJob | RouteJob) -> Work:
        if isinstance(job, EvalJob):
            return evaluate(job, self._learner, self._decoder, self._route_inputs, pack_tokens=self._pack_tokens)
        if isinstance(job, RouteJob):
            return route(job, self._learner, self._decoder, self._route_inputs)
        return generate(job, self._learner, self._decoder, self._route_inputs)

    def _continue(self, job: _RunningJob, deadline: float) -> None:
        """Run pieces of a job until it is finished or cancelled, or the deadline has passed."""
        self._running = None
        began = self._clock()
        with self._failures_reported_to(job.ticket), nullcontext() if job.weights is None else job.weights.swapped_in():
            while not job.ticket.cancelled:
                try:
                    next(job.work)
                except StopIteration as finished:
                    result = finished.value
                    if not isinstance(result, GenerateResult):
                        result = result.model_copy(update={"seconds": job.seconds + self._clock() - began})
                    job.ticket.finish(result)
                    self.requests.update((route.known, route.answered_by) for route in _answered(result))
                    return
                if self._clock() >= deadline:
                    job.weights = job.weights or self._learner.pin()
                    job.seconds += self._clock() - began
                    self._running = job
                    return

    @contextmanager
    def _failures_reported_to(self, ticket: Ticket) -> Iterator[None]:
        """Log how the job ended, and report a failure to the client: a request must not end the training run."""
        name = type(ticket.job).__name__
        try:
            yield
            if ticket.future.done() and not ticket.cancelled:
                _log.info(Event.JOB_FINISHED, job=name, step=self._learner.number)
        except StreamlearnError as error:
            ticket.fail(error)
            _log.warning(Event.JOB_FAILED, job=name, error=str(error))
        except Exception as error:  # noqa: BLE001 - whatever the request caused, the client gets an error and the loop goes on
            ticket.fail(error)
            _log.exception(Event.JOB_FAILED, job=name, error=str(error))


def _answered(result: Result) -> Iterator[Route]:
    """The routes of what a job computed an answer to."""
    if isinstance(result, EvalResult):
        yield from (example.route for example in result.per_example)
    elif isinstance(result, GenerateResult):
        yield result.route


def evaluate(
    job: EvalJob, learner: Learner, decoder: Decoder, route_inputs: RouteInputs, *, pack_tokens: int
) -> Generator[None, None, EvalResult]:
    """Score examples with the current weights; with `generate` also compare generated answers with the expected ones.

    Raises:
        ExampleError: an example is unusable; the message has its index.
    """
    step = learner.number
    examples = _decode(job, decoder)
    routed = route_inputs([input_of(example) for example in examples], "routed")
    slots = [answerer.slot for answerer in routed]
    scores = yield from learner.score(examples, slots, pack_tokens=pack_tokens)
    outputs: list[str | None] = [None] * len(examples)
    if job.generate:
        prompts = [prompt_of(example) for example in examples]
        lengths = [job.max_new_tokens] * len(examples)
        decoded = yield from decode(learner.model, prompts, lengths, decoder.stop, learner.device, slots)
        outputs = [decoder.text(ids) for ids in decoded]
    references = [decoder.text(reference_of(example)) for example in examples]
    return _eval_result(step, scores, outputs, references, [answerer.route for answerer in routed])


def _decode(job: EvalJob, decoder: Decoder) -> list[Example]:
    examples = []
    for index, value in enumerate(job.examples):
        try:
            examples.append(decoder.decode_value(value))
        except RecordError as error:
            raise ExampleError(index, error) from error
    return examples


def _eval_result(
    step: int,
    scores: Sequence[ExampleScore],
    outputs: Sequence[str | None],
    references: Sequence[str],
    routes: Sequence[Route],
) -> EvalResult:
    tokens = sum(score.tokens for score in scores)
    loss = sum(score.loss_sum for score in scores) / tokens
    pairs = [(output, reference) for output, reference in zip(outputs, references, strict=True) if output is not None]
    overlaps = [rouge_l(*pair) for pair in pairs]
    return EvalResult(
        step=step,
        examples=len(scores),
        tokens=tokens,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),  # exp overflows a float above 709
        token_accuracy=sum(score.correct for score in scores) / tokens,
        exact_match=fmean(exact_match(*pair) for pair in pairs) if pairs else None,
        rouge_l=fmean(overlaps) if overlaps else None,
        num_known=sum(route.known for route in routes),
        num_unknown=sum(not route.known for route in routes),
        answered_by=dict(Counter(str(route.answered_by) for route in routes)),
        per_example=tuple(
            ExampleResult(
                loss=score.loss_sum / score.tokens,
                tokens=score.tokens,
                token_accuracy=score.correct / score.tokens,
                output=output,
                rouge_l=overlaps[index] if overlaps else None,
                route=route,
            )
            for index, (score, output, route) in enumerate(zip(scores, outputs, routes, strict=True))
        ),
    )


def generate(
    job: GenerateJob, learner: Learner, decoder: Decoder, route_inputs: RouteInputs
) -> Generator[None, None, GenerateResult]:
    """Continue a prompt or answer a conversation.

    Raises:
        RecordError: the prompt cannot be encoded.
        UnknownRegimeError: the requested regime cannot answer.
    """
    step = learner.number
    prompt = encoded(job, decoder)
    [routed] = route_inputs([input_of_prompt(prompt)], job.requested)
    if job.stream is not None:
        job.stream.begin(GenerationStart(step, len(prompt), routed.route))
    text = _Text(decoder, job.stop, job.stream)
    [output] = yield from decode(
        learner.model,
        [prompt],
        [job.max_new_tokens],
        decoder.stop,
        learner.device,
        [routed.slot],
        choose=_choice(job.sampling, learner.device),
        on_token=text.add,
    )
    text.finish()
    reason: FinishReason = "length" if len(output) == job.max_new_tokens and not text.stopped else "stop"
    return GenerateResult(step, len(prompt), routed.route, "".join(text.pieces), len(output), reason)


def encoded(given: PromptInput, decoder: Decoder) -> Prompt:
    """The tokens and images of a prompt or a conversation.

    Raises:
        RecordError: it cannot be encoded.
    """
    return decoder.prompt(given.prompt if given.prompt is not None else given.messages or (), given.image)


def _choice(sampling: Sampling | None, device: torch.device) -> TokenChoice:
    if sampling is None:
        return most_likely
    return NucleusSampler(sampling.temperature, sampling.top_p, sampling.seed, device)


class _Text:
    """The text of the tokens up to a stop string, in pieces that hold whole characters."""

    def __init__(self, decoder: Decoder, stop: tuple[str, ...], stream: GenerationStream | None) -> None:
        self._incremental = IncrementalText(decoder.text)
        self._stop = StopStrings(stop)
        self._stream = stream
        self.pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        return self._stop.found

    def add(self, _: int, token: int) -> bool:
        """Add the next token; return whether the text continues."""
        self._write(self._stop.add(self._incremental.add(token)))
        return not self.stopped

    def finish(self) -> None:
        if not self.stopped:
            self._write(self._stop.add(self._incremental.flush()))
        if not self.stopped:
            self._write(self._stop.flush())

    def _write(self, piece: str) -> None:
        self.pieces.append(piece)
        if self._stream is not None:
            self._stream.write(piece)


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for bytes that are not a character, or not yet


class IncrementalText:
    """Decodes tokens to pieces of text that join to the text of all tokens.

    A token is decoded after those of the piece before, because tokenizers treat the first token of a text differently.
    """

    def __init__(self, to_text: Callable[[Sequence[int]], str]) -> None:
        """`to_text` decodes tokens; the text of more tokens extends the text of fewer."""
        self._to_text = to_text
        self._tokens: list[int] = []  # those of the last piece, then those without a piece yet
        self._num_written = 0
        self._written = ""

    def add(self, token: int) -> str:
        """The text that the token completes; empty in the middle of a character."""
        self._tokens.append(token)
        piece = self.flush()
        if piece.endswith(_INCOMPLETE):
            return ""
        if piece:
            self._tokens = self._tokens[self._num_written :]
            self._num_written = len(self._tokens)
            self._written = self._to_text(self._tokens)
        return piece

    def flush(self) -> str:
        """The rest at the end of the text: incomplete characters."""
        return self._to_text(self._tokens)[len(self._written) :]


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces.

    The first is the one that ends first, the longest of several that end together: the result depends on the text, not
    on its pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._pending = ""
        self.found = False
        """Whether the text has ended."""

    def add(self, piece: str) -> str:
        """The next part of the text that certainly precedes a stop string."""
        text = self._pending + piece
        places = [(start + len(string), start) for string in self._strings if (start := text.find(string)) >= 0]
        if places:
            _, start = min(places)
            self.found, self._pending = True, ""
            return text[:start]
        cut = len(text) - self._beginning_at_end_of(text)
        self._pending = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The rest of a text that ends without a stop string."""
        rest, self._pending = self._pending, ""
        return rest

    def _beginning_at_end_of(self, text: str) -> int:
        """Length of the longest end of `text` with which a string begins."""
        lengths = (n for string in self._strings for n in range(1, len(string)) if text.endswith(string[:n]))
        return max(lengths, default=0)


def route(
    job: RouteJob, learner: Learner, decoder: Decoder, route_inputs: RouteInputs
) -> Generator[None, None, RouteResult]:
    """Route prompts by their tokens, without a forward pass; yields after every prompt.

    Raises:
        ExampleError: a prompt cannot be encoded; the message has its index.
    """
    inputs = []
    for index, prompt in enumerate(job.prompts):
        try:
            inputs.append(input_of_prompt(encoded(prompt, decoder)))
        except RecordError as error:
            raise ExampleError(index, error, field="prompts") from error
        yield
    routes = tuple(answerer.route for answerer in route_inputs(inputs, "routed"))
    return RouteResult(step=learner.number, routes=routes)


def control_result(
    control: Control, controls: StateControls, *, changed: bool, moved: list[str], newest: str | None
) -> ControlResult:
    """What holds after a control."""
    return ControlResult(
        control=control.verb,
        changed=changed,
        paused=controls.state.paused,
        pinned=tuple(sorted(controls.state.pins)),
        skipped_records=tuple(map(str, controls.state.skipped)),
        moved_aside=tuple(moved),
        snapshot=newest,
    )


_PUNCTUATION = ".,;:!?\"'()[]。，、；：！？「」（）"


def normalize(text: str) -> list[str]:
    """Split into lower-case words without surrounding punctuation; wide characters (Chinese, Japanese) are words.

    >>> normalize("The  Answer: 42.")
    ['the', 'answer', '42']
    """
    spaced = "".join(f" {letter} " if east_asian_width(letter) in "WF" else letter for letter in text.lower())
    stripped = (word.strip(_PUNCTUATION) for word in spaced.split())
    return [word for word in stripped if word]


def exact_match(output: str, reference: str) -> float:
    """Return 1.0 if both have the same words after `normalize`, else 0.0.

    >>> exact_match("Positive.", " positive")
    1.0
    """
    return float(normalize(output) == normalize(reference))


def rouge_l(output: str, reference: str) -> float:
    """Compute the F1 of the longest common subsequence of words, in [0, 1] (Lin 2004, eq. 2-4 with beta = 1).

    >>> round(rouge_l("the cat sat", "the cat lay down"), 3)
    0.571
    """
    found, expected = normalize(output), normalize(reference)
    if not found or not expected:
        return float(found == expected)
    common = _longest_common_subsequence(found, expected)
    return 2 * common / (len(found) + len(expected))


def _longest_common_subsequence(left: list[str], right: list[str]) -> int:
    lengths = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for column, other in enumerate(right, start=1):
            above = lengths[column]
            lengths[column] = diagonal + 1 if word == other else max(above, lengths[column - 1])
            diagonal = above
    return lengths[-1]
