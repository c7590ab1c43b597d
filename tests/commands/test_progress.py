"""The live line and the closing table: where stretches begin and end, which figures stand for them, what shifted."""

import io
from collections.abc import Sequence
from dataclasses import replace

import orjson
import pytest
from rich.console import Console

from streamlearn.adaptation.adaptation import ShiftReport
from streamlearn.commands.progress import FIRST, LAST, ProgressDisplay, Segments, frozen_loss, mean_loss
from streamlearn.learner.evaluation import ExampleScore
from streamlearn.learner.learner import Step
from streamlearn.shift.shift import Shift
from streamlearn.status.status import Phase, Status
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example
from streamlearn.stream.record import Record, TopicPartition
from tests.doubles import example
from tests.serve.doubles import ADAPTATION


def batch(labels: list[str | None], learned: int = 3) -> Batch:
    """Records whose meta names a task, or that have no meta."""
    values = [orjson.dumps({"text": "x", **({"meta": {"task": label}} if label else {})}) for label in labels]
    records = tuple(Record(TopicPartition("t", 0), offset, value) for offset, value in enumerate(values))
    return Batch(records, tuple(example(range(8, 9 + learned)) for _ in labels))


def step(losses: list[float]) -> Step:
    return Step(1, 0.0, tuple(losses), tokens=10 * len(losses), learned_tokens=1, grad_norm=0.0, seconds=1.0)


def test_a_stretch_ends_where_the_label_changes() -> None:
    """A label that comes back begins a new stretch; a batch across a border is shared out."""
    segments = Segments("task")
    segments.enter(batch(["a", "a"]), step([1, 1]))
    segments.enter(batch(["a", "b"]), step([1, 2]))
    segments.enter(batch(["a"]), step([1]))
    assert [(row.label, row.records, row.steps, row.tokens) for row in segments.rows] == [
        ("a", 3, 2, 30),
        ("b", 1, 1, 10),
        ("a", 1, 1, 10),
    ]


def test_losses_are_means_over_learned_tokens() -> None:
    """A record with three times the tokens counts three times; first and last look at their own records alone."""
    segments = Segments("task")
    segments.enter(batch(["a"], learned=1), step([5.0]))
    segments.enter(batch(["a"], learned=3), step([1.0]))
    assert mean_loss(segments.rows[0].first) == pytest.approx((5 + 3) / 4)
    for _ in range(LAST):
        segments.enter(batch(["a"]), step([7.0]))
    assert mean_loss(segments.rows[0].last) == pytest.approx(7.0)
    assert mean_loss(segments.rows[0].first) == pytest.approx((5 + 3 + 7 * 3 * (FIRST - 2)) / (1 + 3 + 3 * (FIRST - 2)))


def test_without_a_key_or_a_label_the_run_is_one_stretch() -> None:
    """Records are not even parsed without a key."""
    cases: list[tuple[str | None, list[str | None]]] = [
        (None, ["a", "b"]),
        ("task", [None, None]),
        ("other", ["a", "b"]),
    ]
    for key, labels in cases:
        segments = Segments(key)
        segments.enter(batch(labels), step([1, 1]))
        assert [row.label for row in segments.rows] == ["stream"]


def test_the_frozen_loss_is_over_the_same_records() -> None:
    """The scorer gets the stretch's examples in order, and its sums are divided by its tokens."""
    segments = Segments("task")
    segments.enter(batch(["a", "a"], learned=2), step([1.0, 1.0]))
    seen: list[Example] = []

    def frozen(examples: Sequence[Example]) -> list[ExampleScore]:
        seen.extend(examples)
        return [ExampleScore(loss_sum=6.0, correct=0, tokens=2) for _ in examples]

    assert frozen_loss(segments.rows[0].first, frozen) == pytest.approx(3.0)
    assert [len(example) for example in seen] == [3, 3]


def entry(regime: int, onset: int, *, known: bool = False) -> ShiftReport:
    return ShiftReport(Shift("inputs", 1, regime, 0, known, None, onset + 5, onset, 1.0, 0.5), step=onset)


def watched() -> tuple[ProgressDisplay, io.StringIO]:
    """A watch whose console is a text of 100 columns."""
    watch = ProgressDisplay(None, None)
    text = io.StringIO()
    watch.console = Console(file=text, width=100)
    return watch, text


def test_the_live_line_names_the_regime_and_counts_shifts() -> None:
    """From the status; before the first regime it says nothing of either."""
    watch, _ = watched()
    assert "regime 3, 2 shifts" in watch._line(Status(Phase.RUNNING, adaptation=ADAPTATION)).plain
    one = replace(ADAPTATION, num_shifts={"inputs": 1})
    assert "regime 3, 1 shift " in watch._line(Status(Phase.RUNNING, adaptation=one)).plain + " "
    assert "regime" not in watch._line(Status(Phase.RUNNING)).plain


def test_the_closing_report_lists_the_shifts() -> None:
    """Where each began, its regime, and AF and BWT where they are known."""
    watch, text = watched()
    for each in (entry(1, 1), entry(2, 91), entry(1, 181, known=True)):
        watch.on_shift(each)
    watch.report(Status(Phase.STOPPING, adaptation=ADAPTATION), "state", None)
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert [row for row in rows if "inputs" in row] == [
        ["1", "inputs", "1", "new"],
        ["91", "inputs", "2", "new"],
        ["181", "inputs", "1", "known"],
    ]
    assert "average forgetting 0.2500, backward transfer -0.1250" in text.getvalue()


def test_the_closing_report_is_silent_about_what_is_not_known() -> None:
    """No shift, no block; one regime, no forgetting."""
    watch, text = watched()
    watch.report(Status(Phase.STOPPING), "state", None)
    assert "shift" not in text.getvalue()
    watch.on_shift(entry(1, 1))
    watch.report(Status(Phase.STOPPING), "state", None)
    assert "shift at" in text.getvalue()
    assert "forgetting" not in text.getvalue()
