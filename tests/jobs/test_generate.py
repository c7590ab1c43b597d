"""Text generation, compared with transformers' own greedy decoding."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from streamlearn.adaptation.routed_input import RoutedInput
from streamlearn.errors import RecordError
from streamlearn.jobs.generate import generate
from streamlearn.jobs.queue import GenerateJob
from streamlearn.learner.evaluation import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Decoder
from tests.jobs.conftest import first_regime


def test_a_prompt_is_continued_as_by_transformers(learner: Learner, decoder: Decoder) -> None:
    ids = decoder.prompt("the quick brown").ids
    with torch.no_grad():
        for _ in range(5):
            logits = learner.model.get_base_model()(input_ids=torch.tensor([ids])).logits[0, -1]
            ids = [*ids, int(logits.argmax())]
    expected = ids[-5:]
    result = run_to_end(
        generate(GenerateJob("the quick brown", None, max_new_tokens=5), learner, decoder, first_regime)
    )
    assert not set(expected) & decoder.stop, "the comparison needs five tokens before the end"
    assert (result.text, result.tokens, result.step) == (decoder.text(expected), 5, learner.number)


def test_a_conversation_is_continued_after_its_template(learner: Learner, decoder: Decoder) -> None:
    messages = ({"role": "user", "content": "hello"},)
    received: list[list[int]] = []

    def route_inputs(inputs: Sequence[NDArray[np.int32]]) -> list[RoutedInput]:
        received.extend(each.tolist() for each in inputs)
        return first_regime(inputs)

    result = run_to_end(generate(GenerateJob(None, messages, max_new_tokens=3), learner, decoder, route_inputs))
    assert 0 < result.tokens <= 3
    assert received == [decoder.prompt(messages).ids]


def test_a_conversation_that_cannot_be_encoded_is_refused(learner: Learner, decoder: Decoder) -> None:
    job = GenerateJob(None, ({"role": "nobody", "content": "x"},), max_new_tokens=2)
    with pytest.raises(RecordError):
        run_to_end(generate(job, learner, decoder, first_regime))


def test_the_time_is_that_of_the_given_clock(learner: Learner, decoder: Decoder) -> None:
    ticks = iter([1.0, 4.0])
    job = GenerateJob("hello", None, max_new_tokens=1)
    assert run_to_end(generate(job, learner, decoder, first_regime, lambda: next(ticks))).seconds == 3.0
