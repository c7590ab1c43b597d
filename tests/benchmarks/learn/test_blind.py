"""Blind answers and the table of tokens."""

import pytest

from benchmarks.learn.blind import best_answer, blind_accuracy, blind_answers
from benchmarks.learn.suite import Json, Reference, Suite
from streamlearn.stream.decode import Decoder
from tests.benchmarks.learn.decoders import LetterDecoder


def references(*answers: str) -> tuple[Reference, ...]:
    return tuple(Reference((answer,)) for answer in answers)


def record(answer: str) -> Json:
    return {"prompt": "?", "completion": answer, "meta": {"task": "t"}}


def test_a_label_is_the_most_frequent_one() -> None:
    """Of equally frequent ones the first."""
    assert best_answer("exact_match", references("a", "b", "b", "c")) == "b"
    assert best_answer("exact_match", references("a", "b", "b", "a")) == "a"
    assert best_answer("exact_match", references("a")) == "a"


def test_a_text_is_the_one_nearest_to_the_others() -> None:
    """By the task's metric."""
    assert best_answer("rouge_l", references("x y", "the cat sat", "the cat ran", "the cat sat down")) == "the cat sat"


def test_every_scored_record_gets_the_same_answer() -> None:
    """It is chosen from training answers only."""
    suite = Suite(
        "s",
        (),
        {},
        references={"t": references("no", "no", "yes")},
        train_references={"t": references("yes", "yes", "yes", "no", "no", "yes")},
        metrics={"t": "exact_match"},
    )
    found = blind_answers(suite)["t"]
    assert (found.metric, found.scores, found.texts) == ("exact_match", (0.0, 0.0, 1.0), ("yes",) * 3)


def test_the_table_knows_position_and_previous_token() -> None:
    """ab, ab and cd give a first, b after a, d after c; after an unknown e the second letter is b."""
    train = tuple(map(record, ("ab", "ab", "cd")))
    suite = Suite("s", (), {"t": tuple(map(record, ("ab", "cd", "eb")))}, train={"t": train})
    decoder: Decoder = LetterDecoder()
    assert blind_accuracy(suite, decoder, "t") == pytest.approx((2 + 1 + 1) / 6)
