"""Measurements taken during a run."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.learn.recorder import RunRecorder
from benchmarks.learn.suite import Suite, TaskSegment

SUITE = Suite(
    "mixed",
    tuple(TaskSegment(tasks, ()) for tasks in (("a", "b"), ("b", "c"), ("a",))),
    {"a": (), "b": (), "c": (), "u": ()},
    unseen=("u",),
)


def recorder(*, answer_after: bool = True) -> tuple[RunRecorder, list[list[str]], list[str]]:
    """A recorder, the tasks of each decoding, and its reports of progress."""
    decoded: list[list[str]] = []
    texts: list[str] = []

    def answer(_: object, tasks: Iterable[str], __: object) -> dict[str, int]:
        decoded.append(list(tasks))
        return dict.fromkeys(decoded[-1], len(decoded))

    evaluator: Any = SimpleNamespace(evaluate=lambda _, tasks, __: dict.fromkeys(tasks), answer=answer)
    return RunRecorder(SUITE, evaluator, texts.append, answer_after=answer_after), decoded, texts


def run(taken: RunRecorder) -> None:
    step: Any = SimpleNamespace(record_losses=[1.0, 2.0], tokens=7)
    learner: Any = None
    for _ in SUITE.segments:
        taken.record(step)
        taken.evaluate(learner, lambda *_: None)


def test_each_evaluation_is_of_the_next_segment() -> None:
    """Steps add losses and tokens; every evaluation adds a row; both report progress."""
    taken, _, texts = recorder()
    run(taken)
    assert (taken.losses, taken.tokens) == ([1.0, 2.0] * 3, 21)
    assert [list(row) for row in taken.matrix] == [["a", "b", "c"], ["b", "c", "a"], ["a", "b", "c", "u"]]
    assert texts == [
        f"segment {number} of 3: {doing}"
        for number, tokens in ((1, 7), (2, 14), (3, 21))
        for doing in (f"trained on {tokens} tokens", "scoring")
    ]


@pytest.mark.parametrize("answer_after", [True, False])
def test_a_task_is_answered_after_its_last_segment_and_at_the_end(answer_after: bool) -> None:
    """The end of the stream is decoded once, for all tasks."""
    taken, decoded, _ = recorder(answer_after=answer_after)
    run(taken)
    end: Any = taken.answers_end
    after: Any = taken.answers_after
    assert list(end) == ["a", "b", "c", "u"]
    if answer_after:
        assert decoded == [[], ["b", "c"], ["a", "b", "c", "u"]]
        assert after == {"b": 2, "c": 2, "a": 3}
    else:
        assert decoded == [["a", "b", "c", "u"]]
        assert after == {}
