"""The closing table: where stretches begin and end, and which figures stand for them."""

from collections.abc import Sequence

import orjson
import pytest

from streamlearn.display import FIRST, LAST, Stretches, frozen_loss, mean_loss
from streamlearn.learner.evaluation import ExampleScore
from streamlearn.learner.learner import Step
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example
from streamlearn.stream.record import Record, TopicPartition
from tests.doubles import example


def batch(labels: list[str | None], learned: int = 3) -> Batch:
    """Records whose meta names a task, or that have no meta."""
    values = [orjson.dumps({"text": "x", **({"meta": {"task": label}} if label else {})}) for label in labels]
    records = tuple(Record(TopicPartition("t", 0), offset, value) for offset, value in enumerate(values))
    return Batch(records, tuple(example(range(8, 9 + learned)) for _ in labels))


def step(losses: list[float]) -> Step:
    return Step(1, 0.0, tuple(losses), tokens=10 * len(losses), learned_tokens=1, grad_norm=0.0, seconds=1.0)


def test_a_stretch_ends_where_the_label_changes() -> None:
    """A label that comes back begins a new stretch; a batch across a border is shared out."""
    stretches = Stretches("task")
    stretches.enter(batch(["a", "a"]), step([1, 1]))
    stretches.enter(batch(["a", "b"]), step([1, 2]))
    stretches.enter(batch(["a"]), step([1]))
    assert [(row.label, row.records, row.steps, row.tokens) for row in stretches.rows] == [
        ("a", 3, 2, 30),
        ("b", 1, 1, 10),
        ("a", 1, 1, 10),
    ]


def test_losses_are_means_over_learned_tokens() -> None:
    """A record with three times the tokens counts three times; first and last look at their own records alone."""
    stretches = Stretches("task")
    stretches.enter(batch(["a"], learned=1), step([5.0]))
    stretches.enter(batch(["a"], learned=3), step([1.0]))
    assert mean_loss(stretches.rows[0].first) == pytest.approx((5 + 3) / 4)
    for _ in range(LAST):
        stretches.enter(batch(["a"]), step([7.0]))
    assert mean_loss(stretches.rows[0].last) == pytest.approx(7.0)
    assert mean_loss(stretches.rows[0].first) == pytest.approx(
        (5 + 3 + 7 * 3 * (FIRST - 2)) / (1 + 3 + 3 * (FIRST - 2))
    )


def test_without_a_key_or_a_label_the_run_is_one_stretch() -> None:
    """Records are not even parsed without a key."""
    cases: list[tuple[str | None, list[str | None]]] = [
        (None, ["a", "b"]),
        ("task", [None, None]),
        ("other", ["a", "b"]),
    ]
    for key, labels in cases:
        stretches = Stretches(key)
        stretches.enter(batch(labels), step([1, 1]))
        assert [row.label for row in stretches.rows] == ["stream"]


def test_the_frozen_loss_is_over_the_same_records() -> None:
    """The scorer gets the stretch's examples in order, and its sums are divided by its tokens."""
    stretches = Stretches("task")
    stretches.enter(batch(["a", "a"], learned=2), step([1.0, 1.0]))
    seen: list[Example] = []

    def frozen(examples: Sequence[Example]) -> list[ExampleScore]:
        seen.extend(examples)
        return [ExampleScore(loss_sum=6.0, correct=0, tokens=2) for _ in examples]

    assert frozen_loss(stretches.rows[0].first, frozen) == pytest.approx(3.0)
    assert [len(example) for example in seen] == [3, 3]
