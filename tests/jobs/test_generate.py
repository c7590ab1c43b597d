"""Text generation, compared with transformers' own greedy decoding; its pieces and stop strings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models

from streamlearn.jobs.queue import GenerateJob, GenerateResult, GenerationStart, GenerationStream, Sampling
from streamlearn.jobs.runner import IncrementalText, StopStrings, generate
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.regimes.route import RoutedInput
from streamlearn.status import Requested
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


def test_the_routing_gets_the_tokens_and_what_the_request_names(learner: Learner, decoder: Decoder) -> None:
    """Of a conversation, with its template."""
    received: list[Requested] = []
    inputs_received: list[list[int]] = []

    def route_inputs(inputs: Sequence[NDArray[np.int32]], requested: Requested) -> list[RoutedInput]:
        received.append(requested)
        inputs_received.extend(tokens.tolist() for tokens in inputs)
        return first_regime(inputs)

    messages = ({"role": "user", "content": "hello"},)
    run_to_end(generate(GenerateJob(None, messages, max_new_tokens=1, requested=3), learner, decoder, route_inputs))
    assert received == [3]
    assert inputs_received == [decoder.prompt(messages).ids]


def by_definition(text: str, strings: list[str]) -> str:
    """Character by character: the text in front of the first string that is complete, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def cut(pieces: list[str], strings: list[str]) -> str:
    stop, text = StopStrings(strings), ""
    for piece in pieces:
        text += stop.add(piece)
        if stop.found:
            return text
    return text + stop.flush()


few = st.text("ab\n", max_size=5)


@given(st.lists(few, max_size=8), st.lists(few.filter(bool), max_size=4))
def test_a_text_is_cut_as_by_definition_in_any_pieces(pieces: list[str], strings: list[str]) -> None:
    """Strings that overlap, contain each other, or lie across several pieces."""
    assert cut(pieces, strings) == by_definition("".join(pieces), strings)


@pytest.mark.parametrize(
    ("pieces", "written"),
    [
        (["one", " two"], ["one", " two"]),
        (["one ST", "ART"], ["one ", "START"]),
        (["one ST", "OP two"], ["one ", ""]),
        (["SSTO", "P"], ["S", ""]),
    ],
)
def test_only_what_may_begin_a_stop_string_waits(pieces: list[str], written: list[str]) -> None:
    """It is written with the first piece that makes it something else."""
    stop = StopStrings(["STOP"])
    assert [stop.add(piece) for piece in pieces] == written


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def byte_tokens() -> Tokenizer:
    """A byte-level tokenizer with a token per byte and a control token."""
    letters = sorted(_letters().values())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def _letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + i) for i, byte in enumerate(rest)}}


BYTES = byte_tokens()
END = BYTES.get_vocab_size() - 1
"""The control token."""


def text_of(ids: Sequence[int]) -> str:
    return str(BYTES.decode(list(ids), skip_special_tokens=True))


def tokens_of(data: bytes) -> list[int]:
    letters = _letters()
    return [int(BYTES.token_to_id(letters[byte]) or 0) for byte in data]


def pieces_of(ids: Sequence[int]) -> list[str]:
    text = IncrementalText(text_of)
    return [*(text.add(token) for token in ids), text.flush()]


@given(st.lists(st.integers(0, END), max_size=24) | st.text(max_size=8).map(lambda text: tokens_of(text.encode())))
def test_pieces_join_to_the_text_of_all_tokens(ids: list[int]) -> None:
    """Of any tokens, valid or not; every piece but the last ends with a whole character."""
    pieces = pieces_of(ids)
    assert pieces_of(tokens_of("aé模🦊b".encode())) == ["a", "", "é", "", "", "模", "", "", "", "🦊", "b", ""]
    assert "".join(pieces) == text_of(ids)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces[:-1])


@pytest.mark.parametrize("words", [["▁a", "▁b", "c"], ["a", "▁", "b"]])
def test_the_space_in_front_of_a_word_is_kept(words: list[str]) -> None:
    """Tokenizers that drop it at the start of a text keep it in the middle."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Metaspace()
    text = IncrementalText(lambda ids: str(tokenizer.decode(list(ids))))
    assert "".join(text.add(i) for i in range(len(words))) == tokenizer.decode(list(range(len(words))))
    assert "".join(words).lstrip("▁").replace("▁", " ") == tokenizer.decode(list(range(len(words))))
