"""Evaluation at the segments' ends while the daemon runs."""

from types import SimpleNamespace
from typing import Any

from benchmarks.learn.daemon_run import SegmentObserver
from benchmarks.learn.suite import Suite, TaskSegment

SUITE = Suite("three", tuple(TaskSegment((task,), ({},) * 4) for task in ("a", "b", "c")), {})


def test_a_batch_across_a_boundary_ends_the_earlier_segment() -> None:
    """The last segment is left to the end of the run; one batch may end two segments."""
    adaptation = SimpleNamespace(records=0)
    components: Any = SimpleNamespace(adaptation=adaptation, learner=None)
    matrix: list[int] = []
    recorder: Any = SimpleNamespace(
        suite=SUITE, matrix=matrix, record=lambda _: None, evaluate=lambda *_: matrix.append(adaptation.state.records)
    )
    observer = SegmentObserver(recorder, components, lambda *_: None)
    ignored: Any = None
    for records in (3, 5, 12):
        adaptation.state.records = records
        observer.on_step(ignored, ignored, ignored)
    assert matrix == [5, 12]
