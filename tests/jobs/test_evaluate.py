"""Evaluation and routing of a request's examples, compared with transformers' own loss."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from streamlearn.errors import Reason
from streamlearn.jobs.queue import EvalJob, EvalResult, ExampleError, GenerateJob, PromptInput, RouteJob
from streamlearn.jobs.runner import evaluate, generate, route
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.regimes.route import RoutedInput
from streamlearn.status import Requested
from streamlearn.stream.decode import Decoder
from tests.jobs.conftest import first_regime

EXAMPLES: tuple[dict[str, Any], ...] = (
    {"prompt": "what is the capital", "completion": " of France?"},
    {"text": "hello world"},
)


def evaluated(learner: Learner, decoder: Decoder, job: EvalJob, **kwargs: Any) -> EvalResult:
    return run_to_end(
        evaluate(job, learner, decoder, kwargs.pop("route_inputs", first_regime), pack_tokens=64, **kwargs)
    )


def test_the_loss_is_that_of_transformers(learner: Learner, decoder: Decoder) -> None:
    """The mean over all scored tokens; per example the mean over its own."""
    result = evaluated(learner, decoder, EvalJob(EXAMPLES, generate=False, max_new_tokens=1))
    for value, row in zip(EXAMPLES, result.per_example, strict=True):
        example = decoder.decode_value(value)
        ids, labels = (torch.from_numpy(np.array(a, dtype=np.int64))[None] for a in (example.input_ids, example.labels))
        with torch.no_grad():
            expected = learner.model.get_base_model()(input_ids=ids, labels=labels).loss
        assert row.loss == pytest.approx(float(expected), rel=1e-5)
    total = sum(row.loss * row.tokens for row in result.per_example)
    assert result.loss == pytest.approx(total / result.tokens)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert (result.exact_match, result.rouge_l) == (None, None)


def test_an_answer_that_the_model_generates_is_an_exact_match(learner: Learner, decoder: Decoder) -> None:
    job = GenerateJob("the quick brown", None, max_new_tokens=4)
    text = run_to_end(generate(job, learner, decoder, first_regime)).text
    right = {"prompt": "the quick brown", "completion": text}
    wrong = {"prompt": "the quick brown", "completion": f"{text} not"}
    result = evaluated(learner, decoder, EvalJob((right, wrong), generate=True, max_new_tokens=4))
    assert [row.output for row in result.per_example] == [text, text]
    assert result.exact_match == 0.5


def test_an_unusable_example_is_named(learner: Learner, decoder: Decoder) -> None:
    job = EvalJob((*EXAMPLES, {"txt": "no such form"}), generate=False, max_new_tokens=1)
    with pytest.raises(ExampleError, match=r"examples\[2\] is unusable") as caught:
        evaluated(learner, decoder, job)
    assert caught.value.reason == Reason.BAD_FORM
    prompts = RouteJob((PromptInput("fine", None), PromptInput(None, ({"role": "nobody", "content": "x"},))))
    with pytest.raises(ExampleError, match=r"prompts\[1\] is unusable"):
        run_to_end(route(prompts, learner, decoder, first_regime))


TURNS = ({"role": "user", "content": "hello"},)


def refuse(*_: Any) -> NoReturn:
    raise AssertionError("the model was called")


def test_prompts_are_routed_by_their_tokens_only(learner: Learner, decoder: Decoder) -> None:
    """In the order of the request; the model is not called."""
    received: list[NDArray[np.int32]] = []

    def route_inputs(inputs: Sequence[NDArray[np.int32]], _: Requested = "routed") -> list[RoutedInput]:
        received.extend(inputs)
        return first_regime(inputs)

    handle = learner.forward.register_forward_pre_hook(refuse)
    try:
        job = RouteJob((PromptInput("the quick brown", None), PromptInput(None, TURNS)))
        result = run_to_end(route(job, learner, decoder, route_inputs))
    finally:
        handle.remove()
    assert [tokens.tolist() for tokens in received] == [
        decoder.prompt("the quick brown").ids,
        decoder.prompt(TURNS).ids,
    ]
    assert result.routes == tuple(routed.route for routed in first_regime(received))
    assert result.step == learner.number
