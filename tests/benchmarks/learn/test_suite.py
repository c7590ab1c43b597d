"""The order of evaluation in a suite."""

from benchmarks.learn.suite import Metric, Reference, Suite, TaskSegment

SUITE = Suite(
    "three",
    tuple(TaskSegment((task,), ({"text": task},) * number) for task, number in (("a", 2), ("b", 3), ("c", 1))),
    {},
    unseen=("u",),
    checkpoints=frozenset({0}),
)


def test_a_boundary_is_the_first_record_of_a_later_segment() -> None:
    """The first segment has none."""
    assert SUITE.boundaries == [2, 5]


def test_everything_seen_is_evaluated_at_checkpoints_and_at_the_end() -> None:
    """After other segments, only their own tasks and the next; unseen tasks only at the end."""
    assert SUITE.evaluated_after(0) == ["a", "b"]
    assert SUITE.evaluated_after(1) == ["b", "c"]
    assert SUITE.evaluated_after(2) == ["a", "b", "c", "u"]


def test_a_suite_scored_at_the_end_has_nothing_before_it() -> None:
    """No task is evaluated after the first segment, and unseen tasks are gone with all that is theirs."""
    by_task = {task: ({"prompt": task},) for task in ("a", "b", "new")}
    references = {task: (Reference((task,)),) for task in by_task}
    segments = (TaskSegment(("a",), by_task["a"]), TaskSegment(("b",), by_task["b"]))
    metrics: dict[str, Metric] = dict.fromkeys(by_task, "rouge_l")
    suite = Suite("s", segments, by_task, ("new",), None, frozenset({0}), references, by_task, references, metrics)
    short = suite.scored_at_end()
    assert [short.evaluated_after(number) for number in range(2)] == [[], ["a", "b"]]
    for part in (short.tests, short.references, short.train, short.train_references, short.metrics):
        assert set(part) == {"a", "b"}
    assert short.segments == suite.segments
