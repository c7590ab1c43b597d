"""The live line and the closing tables: segments, their losses, and the detected shifts."""

import io
from dataclasses import replace

import orjson
import pytest
from rich.console import Console

from streamlearn.cli.progress import FIRST, LAST, LabeledSegments, ProgressDisplay, mean_loss
from streamlearn.learner.learner import Step
from streamlearn.regimes.report import ShiftReport
from streamlearn.shift.detector import Shift
from streamlearn.status import Phase, Status
from streamlearn.stream.position import TopicPartition
from streamlearn.stream.record import Batch, Record
from tests.doubles import example
from tests.serve.doubles import ADAPTATION, RUNNING


def batch(labels: list[str | None], learned: int = 3) -> Batch:
    values = [orjson.dumps({"text": "x", **({"meta": {"task": label}} if label else {})}) for label in labels]
    records = tuple(Record(TopicPartition("t", 0), offset, value) for offset, value in enumerate(values))
    return Batch(records, tuple(example(range(8, 9 + learned)) for _ in labels))


def step(losses: list[float]) -> Step:
    return Step(1, 0.0, tuple(losses), tokens=10 * len(losses), learned_tokens=1, grad_norm=0.0, seconds=1.0)


def test_a_segment_ends_where_the_label_changes() -> None:
    """A returning label starts a new segment; a batch across a boundary is split between both."""
    segments = LabeledSegments("task")
    segments.add(batch(["a", "a"]), step([1, 1]))
    segments.add(batch(["a", "b"]), step([1, 2]))
    segments.add(batch(["a"]), step([1]))
    assert [(row.label, row.records, row.steps, row.tokens) for row in segments.all] == [
        ("a", 3, 2, 30),
        ("b", 1, 1, 10),
        ("a", 1, 1, 10),
    ]


def test_losses_are_means_over_learned_tokens() -> None:
    """A record with three times the tokens counts three times; first and last use only their own records."""
    segments = LabeledSegments("task")
    segments.add(batch(["a"], learned=1), step([5.0]))
    segments.add(batch(["a"], learned=3), step([1.0]))
    assert mean_loss(segments.all[0].first) == pytest.approx((5 + 3) / 4)
    for _ in range(LAST):
        segments.add(batch(["a"]), step([7.0]))
    assert mean_loss(segments.all[0].last) == pytest.approx(7.0)
    assert mean_loss(segments.all[0].first) == pytest.approx((5 + 3 + 7 * 3 * (FIRST - 2)) / (1 + 3 + 3 * (FIRST - 2)))


def test_without_a_key_or_a_label_the_run_is_one_segment() -> None:
    """Without a key, records are not even parsed."""
    cases: list[tuple[str | None, list[str | None]]] = [
        (None, ["a", "b"]),
        ("task", [None, None]),
        ("other", ["a", "b"]),
    ]
    for key, labels in cases:
        segments = LabeledSegments(key)
        segments.add(batch(labels), step([1, 1]))
        assert [row.label for row in segments.all] == ["stream"]


def report_of(regime: int, onset: int, *, known: bool = False) -> ShiftReport:
    previous = None if onset == 1 else 1
    return ShiftReport(Shift("inputs", 1, regime, 0, known, previous, onset + 5, onset, 1.0, 0.5), step=onset)


def display_of(width: int = 100, key: str | None = None) -> tuple[ProgressDisplay, io.StringIO]:
    display = ProgressDisplay(key, "http://127.0.0.1:8083")
    text = io.StringIO()
    display.console = Console(file=text, width=width)
    return display, text


def test_the_live_line_names_the_regime_and_counts_shifts() -> None:
    """Both are absent before the first regime."""
    display, _ = display_of()
    assert "regime 3, 2 shifts" in display._line(Status(Phase.RUNNING, adaptation=ADAPTATION)).plain
    one = replace(ADAPTATION, num_shifts={"inputs": 1})
    assert "regime 3, 1 shift " in display._line(Status(Phase.RUNNING, adaptation=one)).plain + " "
    assert "regime" not in display._line(Status(Phase.RUNNING)).plain


def test_the_closing_report_lists_the_shifts() -> None:
    """First record, regime and new words of each, and AF and BWT if they are known."""
    display, text = display_of()
    second = replace(report_of(2, 91), tokens_came=("sum", "add"))
    for each in (report_of(1, 1), second, report_of(1, 181, known=True)):
        display.on_shift(each)
    display.report(Status(Phase.STOPPING, adaptation=ADAPTATION), "state")
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert [row for row in rows if {"inputs", "start"} & {*row}] == [
        ["1", "start", "1", "new"],
        ["91", "inputs", "2", "new", "sum,", "add"],
        ["181", "inputs", "1", "known"],
    ]
    assert "average forgetting 0.2500, backward transfer -0.1250" in text.getvalue()


def test_the_closing_report_leaves_out_what_is_unknown() -> None:
    """Without a shift there is no table of shifts; with one regime there is no forgetting."""
    display, text = display_of()
    display.report(Status(Phase.STOPPING), "state")
    assert "regime" not in text.getvalue()
    display.on_shift(report_of(1, 1))
    display.report(Status(Phase.STOPPING), "state")
    assert "from" in text.getvalue().split()
    assert "start" in text.getvalue()
    assert "forgetting" not in text.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_live_line_leaves_out_what_does_not_fit(width: int) -> None:
    """Whole parts, from the right; the address is the first to go."""
    display, _ = display_of(width, "task")
    display.segments.add(batch(["a_long_label"]), step([1.0]))
    line = display._line(replace(RUNNING, adaptation=ADAPTATION)).plain
    assert len(line) <= width
    assert line.startswith("step 42  336 records")
    assert ("http://127.0.0.1:8083" in line) is (width == 200)
    assert ("a_long_label" in line) is (width == 200)
