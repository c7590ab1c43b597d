"""The order of evaluation in a suite."""

from streamlearn.bench.learn.suite import Suite, TaskSegment

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
