"""Evaluation of a request's examples, in pieces."""

import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from statistics import fmean
from typing import Protocol
from unicodedata import east_asian_width

import numpy as np
from numpy.typing import NDArray

from streamlearn.errors import RecordError
from streamlearn.jobs.queue import EvalJob, ExampleError
from streamlearn.jobs.results import EvalResult, ExampleResult
from streamlearn.learner.evaluate import ExampleScore, prompt_of, reference_of
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner
from streamlearn.regimes.requested import Requested
from streamlearn.regimes.route import RoutedInput
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
