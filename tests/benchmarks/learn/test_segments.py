"""Batches, regime slots and the shuffled order."""

from benchmarks.learn.segments import batches, regime_slots, shuffled
from benchmarks.learn.suite import Suite, TaskSegment
from streamlearn.settings import StreamSettings
from tests.doubles import random_examples

SUITE = Suite(
    "mixed",
    tuple(TaskSegment(tasks, tuple({"text": f"{tasks} {i}"} for i in range(4))) for tasks in (("a",), ("b",), ("a",))),
    {},
)


def test_equal_tasks_share_a_slot() -> None:
    """A task that returns has its earlier slot."""
    assert regime_slots(SUITE) == ([0, 1, 0], {"a": 0, "b": 1})


def test_shuffling_keeps_lengths_and_records() -> None:
    """The seed determines the order; segments mix the tasks."""
    one, two, other = (shuffled(SUITE, seed) for seed in (0, 0, "0 1"))
    assert one == two
    assert one != other
    assert [len(segment.records) for segment in one] == [4, 4, 4]
    records = [record["text"] for segment in SUITE.segments for record in segment.records]
    assert sorted(record["text"] for segment in one for record in segment.records) == sorted(records)


def test_batches_cover_every_example_in_order() -> None:
    """The last batch may be smaller."""
    examples = random_examples([5] * 7)
    found = list(batches(examples, StreamSettings(batch_records=3)))
    assert [len(batch) for batch in found] == [3, 3, 1]
    assert [example for batch in found for example in batch] == list(examples)
