"""Measurements taken during a run."""

from types import SimpleNamespace
from typing import Any

from streamlearn.bench.learn.recorder import RunRecorder
from streamlearn.bench.learn.suite import Suite, TaskSegment


def test_each_evaluation_is_of_the_next_segment() -> None:
    """Steps add losses and tokens; every evaluation adds a row and reports progress."""
    suite = Suite("two", (TaskSegment(("a",), ()), TaskSegment(("b",), ())), {})
    evaluator: Any = SimpleNamespace(evaluate=lambda _, tasks, __: dict.fromkeys(tasks))
    texts: list[str] = []
    recorder = RunRecorder(suite, evaluator, texts.append)
    step: Any = SimpleNamespace(record_losses=[1.0, 2.0], tokens=7)
    learner: Any = None
    for _ in suite.segments:
        recorder.record(step)
        recorder.evaluate(learner, lambda *_: None)
    assert (recorder.losses, recorder.tokens) == ([1.0, 2.0] * 2, 14)
    assert [list(row) for row in recorder.matrix] == [["a", "b"], ["a", "b"]]
    assert texts == ["segment 1 of 2 done", "segment 2 of 2 done"]
