"""Text generation, compared with transformers' own greedy decoding."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from streamlearn.errors import RecordError
from streamlearn.jobs.generate import generate
from streamlearn.jobs.queue import GenerateJob, GenerateResult, GenerationStart, GenerationStream, Sampling
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.regimes.route import Requested, RoutedInput
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

    def route_inputs(inputs: Sequence[NDArray[np.int32]], _: Requested) -> list[RoutedInput]:
        received.extend(each.tolist() for each in inputs)
        return first_regime(inputs)

    result = run_to_end(generate(GenerateJob(None, messages, max_new_tokens=3), learner, decoder, route_inputs))
    assert 0 < result.tokens <= 3
    assert received == [decoder.prompt(messages).ids]


PROMPT = "the quick brown"
SAMPLING = Sampling(temperature=1.5, top_p=0.95, seed=3)


def run(learner: Learner, decoder: Decoder, **options: Any) -> GenerateResult:
    job = GenerateJob(PROMPT, None, **{"max_new_tokens": 24, **options})
    return run_to_end(generate(job, learner, decoder, first_regime))


def test_a_text_ends_by_itself_or_at_its_maximum(learner: Learner, decoder: Decoder) -> None:
    """The reason says which; the end is no token of the text."""
    result = run(learner, decoder)
    assert (result.finish_reason, result.tokens, result.prompt_tokens) == ("length", 24, len(decoder.prompt(PROMPT)))
    sampled = (run(learner, decoder, sampling=replace(SAMPLING, seed=seed)) for seed in range(100))
    ended = next(result for result in sampled if result.tokens < 24)
    assert ended.finish_reason == "stop"


def test_a_stop_string_is_cut_off(learner: Learner, decoder: Decoder) -> None:
    """Also in the middle of a token; nothing is generated after it."""
    whole = run(learner, decoder).text
    for start, end in ((3, 5), (1, 9), (len(whole) - 1, len(whole))):
        stop = whole[start:end]
        result = run(learner, decoder, stop=("never there", stop))
        assert result.text == whole[: whole.index(stop)]
        assert result.finish_reason == "stop"
        assert result.tokens <= 24
    assert run(learner, decoder, stop=(whole[3:5],)).tokens < 24
    for absent in ("never there", f"{whole[-2:]} goes on"):  # the latter is held back until the end
        assert run(learner, decoder, stop=(absent,)).text == whole


def test_a_stream_gets_the_text_of_the_result(learner: Learner, decoder: Decoder) -> None:
    """In several pieces, of which none waits for the end; with a stop string its beginning is never written."""
    whole = run(learner, decoder).text
    for stop in ((), (whole[7:10],)):
        pieces: list[str] = []
        stream = GenerationStream(lambda: pieces.append(stream.take()))  # noqa: B023
        result = run(learner, decoder, stream=stream, stop=stop)
        assert "".join(pieces) == result.text
        assert len([piece for piece in pieces if piece]) > 2
        assert stream.start == GenerationStart(learner.number, result.prompt_tokens, result.route)


def test_a_seed_fixes_a_sampled_text(learner: Learner, decoder: Decoder) -> None:
    """Bit for bit, whatever the global random state is; another seed gives another text."""
    first = run(learner, decoder, sampling=SAMPLING)
    torch.manual_seed(17)
    before = torch.random.get_rng_state()
    assert run(learner, decoder, sampling=SAMPLING).text == first.text
    assert torch.equal(torch.random.get_rng_state(), before)
    assert run(learner, decoder, sampling=replace(SAMPLING, seed=4)).text != first.text
    assert first.text != run(learner, decoder).text


def test_the_request_says_what_answers(learner: Learner, decoder: Decoder) -> None:
    """The routing gets it unchanged."""
    received: list[Requested] = []

    def route_inputs(inputs: Sequence[NDArray[np.int32]], requested: Requested) -> list[RoutedInput]:
        received.append(requested)
        return first_regime(inputs)

    requests: tuple[Requested, ...] = ("routed", "backbone", 3)
    for requested in requests:
        job = GenerateJob(PROMPT, None, max_new_tokens=1, requested=requested)
        run_to_end(generate(job, learner, decoder, route_inputs))
    assert received == [*requests]


def test_a_conversation_that_cannot_be_encoded_is_refused(learner: Learner, decoder: Decoder) -> None:
    job = GenerateJob(None, ({"role": "nobody", "content": "x"},), max_new_tokens=2)
    with pytest.raises(RecordError):
        run_to_end(generate(job, learner, decoder, first_regime))
