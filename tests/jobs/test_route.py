"""Routes of prompts, without a forward pass."""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.errors import Reason
from streamlearn.jobs.queue import ExampleError, PromptInput, RouteJob
from streamlearn.jobs.runner import route
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.regimes.route import Requested, RoutedInput
from streamlearn.stream.decode import Decoder
from tests.jobs.conftest import first_regime

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
    assert [each.tolist() for each in received] == [decoder.prompt("the quick brown").ids, decoder.prompt(TURNS).ids]
    assert result.routes == tuple(each.route for each in first_regime(received))
    assert result.step == learner.number


def test_a_prompt_that_cannot_be_encoded_is_named(learner: Learner, decoder: Decoder) -> None:
    job = RouteJob((PromptInput("fine", None), PromptInput(None, ({"role": "nobody", "content": "x"},))))
    with pytest.raises(ExampleError, match=r"prompts\[1\] is unusable") as caught:
        run_to_end(route(job, learner, decoder, first_regime))
    assert caught.value.reason == Reason.BAD_FORM
