"""Evaluation of a request's examples, in pieces."""

import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from statistics import fmean
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from streamlearn.errors import RecordError
from streamlearn.jobs.queue import EvalJob, ExampleError
from streamlearn.jobs.results import EvalResult, ExampleResult
from streamlearn.learner.evaluate import ExampleScore, exact_match, prompt_of, reference_of, rouge_l
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner
from streamlearn.regimes.route import Requested, RoutedInput
from streamlearn.shift.features import input_of
from streamlearn.status import Route
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Example


class RouteInputs(Protocol):
    """Finds what answers each input, which the request may have chosen."""

    def __call__(self, inputs: Sequence[NDArray[np.int32]], requested: Requested = "routed", /) -> list[RoutedInput]:
        """Raise UnknownRegimeError if the requested regime cannot answer."""


def evaluate(
    job: EvalJob,
    learner: Learner,
    decoder: Decoder,
    route_inputs: RouteInputs,
    *,
    pack_tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[None, None, EvalResult]:
    """Score examples with the current weights; with `generate` also compare generated answers with the expected ones.

    Raises:
        ExampleError: an example is unusable; the message has its index.
    """
    started, step = clock(), learner.number
    examples = _decode(job, decoder)
    routed = route_inputs([input_of(example) for example in examples])
    slots = [each.slot for each in routed]
    scores = yield from learner.score(examples, slots, pack_tokens=pack_tokens)
    outputs: list[str | None] = [None] * len(examples)
    if job.generate:
        decoded = yield from decode(
            learner.model,
            [prompt_of(example) for example in examples],
            [job.max_new_tokens] * len(examples),
            decoder.stop,
            learner.device,
            slots,
        )
        outputs = [decoder.text(ids) for ids in decoded]
    references = [decoder.text(reference_of(example)) for example in examples]
    routes = [each.route for each in routed]
    return _result(scores, outputs, references, routes, step=step, seconds=clock() - started)


def _decode(job: EvalJob, decoder: Decoder) -> list[Example]:
    examples = []
    for index, value in enumerate(job.examples):
        try:
            examples.append(decoder.decode_value(value))
        except RecordError as error:
            raise ExampleError(index, error) from error
    return examples


def _result(
    scores: Sequence[ExampleScore],
    outputs: Sequence[str | None],
    references: Sequence[str],
    routes: Sequence[Route],
    *,
    step: int,
    seconds: float,
) -> EvalResult:
    tokens = sum(s.tokens for s in scores)
    loss = sum(s.loss_sum for s in scores) / tokens
    pairs = [(output, reference) for output, reference in zip(outputs, references, strict=True) if output is not None]
    return EvalResult(
        step=step,
        examples=len(scores),
        tokens=tokens,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),  # exp overflows a float above 709
        token_accuracy=sum(s.correct for s in scores) / tokens,
        exact_match=fmean(exact_match(*pair) for pair in pairs) if pairs else None,
        rouge_l=fmean(rouge_l(*pair) for pair in pairs) if pairs else None,
        num_known=sum(route.known for route in routes),
        num_unknown=sum(not route.known for route in routes),
        answered_by=dict(Counter(str(route.answered_by) for route in routes)),
        per_example=tuple(
            ExampleResult(loss=s.loss_sum / s.tokens, tokens=s.tokens, output=output, route=route)
            for s, output, route in zip(scores, outputs, routes, strict=True)
        ),
        seconds=seconds,
    )
