"""Progress of a run for a terminal: one live line while it trains, tables at its end."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from streamlearn.cli.status import FittedColumn, FittedTable
from streamlearn.learner.evaluate import ExampleScore
from streamlearn.learner.learner import Step
from streamlearn.regimes.statistics import ShiftReport
from streamlearn.snapshot.parts import SnapshotInfo
from streamlearn.status import AdaptationStatus, Status
from streamlearn.stream.batch import Batch
from streamlearn.stream.record import IGNORED, Example

FIRST, LAST = 2, 50
"""Records over which a segment's first and last loss are averaged: most is learned from the first few."""

Scorer = Callable[[Sequence[Example]], Sequence[ExampleScore]]
"""Scores each example with the frozen backbone."""


class Measured(NamedTuple):
    """A record and its prequential loss, in nats per learned token."""

    loss: float
    example: Example

    @property
    def learned(self) -> int:
        """The number of learned tokens."""
        return int((self.example.labels != IGNORED).sum())


@dataclass
class LabelledSegment:
    """Consecutive records with the same label."""

    label: str
    records: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first: list[Measured] = field(default_factory=list)
    last: deque[Measured] = field(default_factory=lambda: deque(maxlen=LAST))

    def add(self, measured: Sequence[Measured], step: Step, share: float) -> None:
        """Add the records of a batch that belong to this segment; `share` is their fraction of the batch."""
        self.records += len(measured)
        self.first += measured[: FIRST - len(self.first)]
        self.last.extend(measured)
        self.steps += 1
        self.tokens += round(step.tokens * share)
        self.seconds += step.seconds * share


def mean_loss(measured: Iterable[Measured]) -> float:
    """Mean loss over the learned tokens of all records, in nats per token."""
    records = list(measured)
    return sum(each.loss * each.learned for each in records) / sum(each.learned for each in records)


def frozen_loss(measured: Iterable[Measured], frozen: Scorer) -> float:
    """Mean loss of the frozen backbone on the same records, in nats per token."""
    scores = frozen([each.example for each in measured])
    return sum(score.loss_sum for score in scores) / sum(score.tokens for score in scores)


class LabelledSegments:
    """The run, split where the label changes.

    The label is `meta[key]` of each record. It is parsed here from the record's bytes, after the step and for display
    only: training never reads it. Without a key the whole run is one segment.
    """

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.all: deque[LabelledSegment] = deque(maxlen=100)  # the stream may be endless

    def add(self, batch: Batch, step: Step) -> None:
        """Assign one step's records to segments."""
        groups: dict[str, list[Measured]] = {}
        for record, example, loss in zip(batch.records, batch.examples, step.record_losses, strict=True):
            groups.setdefault(self._label(record.value), []).append(Measured(loss, example))
        for label, measured in groups.items():
            if not self.all or self.all[-1].label != label:
                self.all.append(LabelledSegment(label))
            self.all[-1].add(measured, step, len(measured) / len(batch.records))

    def _label(self, value: bytes | None) -> str:
        if self.key is None or value is None:
            return "stream"
        return str((orjson.loads(value).get("meta") or {}).get(self.key, "stream"))


class ProgressDisplay:
    """Observer of a run that prints a live line on a terminal, and closing tables everywhere.

    Where standard output is no terminal, the log reports progress.
    """

    def __init__(self, key: str | None, endpoint: str | None) -> None:
        self.console = Console(file=sys.stdout)
        self.segments = LabelledSegments(key)
        self.snapshots = 0
        self.shifts: deque[ShiftReport] = deque(maxlen=100)  # the stream may be endless
        self._endpoint = endpoint
        self._started = time.monotonic()
        self._first_records = 0
        self._live = (
            Live(console=self.console, refresh_per_second=4, transient=True) if self.console.is_terminal else None
        )

    def on_start(self, status: Status) -> None:
        """Start the live line."""
        self._started = time.monotonic()
        self._first_records = status.records_trained
        if self._live:
            self._live.start()

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Count the step and refresh the line."""
        if step.refusal is None:
            self.segments.add(batch, step)
        if self._live:
            self._live.update(self._line(status))

    def on_shift(self, entry: ShiftReport) -> None:
        """Keep the shift for the closing table."""
        self.shifts.append(entry)

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """Count the snapshot."""
        del info
        self.snapshots += 1

    def close(self) -> None:
        """Remove the live line. Safe to call twice."""
        if self._live:
            self._live.stop()

    def _line(self, status: Status) -> Text:
        """The live line; what does not fit the terminal is left out from the right."""
        lags = [partition.lag for partition in status.partitions if partition.lag is not None]
        parts = [
            f"step {status.step}",
            f"{status.records_trained:,} records",
            f"lag {sum(lags):,}" if lags else "",
            f"{status.tokens_per_s:,.0f} tokens/s",
            f"loss {status.loss_smoothed:.3f}" if status.loss_smoothed is not None else "",
            f"{status.records_dead_lettered:,} dead letters" if status.records_dead_lettered else "",
            _regime(status.adaptation),
            self.segments.all[-1].label if self.segments.key and self.segments.all else "",
            self._endpoint or "",
        ]
        shown = [part for part in parts if part]
        while len(shown) > 1 and cell_len("  ".join(shown)) > self.console.width:
            shown.pop()
        return Text("  ".join(shown), overflow="ellipsis", no_wrap=True)

    def report(self, status: Status, state_folder: str, frozen: Scorer | None) -> None:
        """Print the closing tables; with `frozen`, also the frozen backbone's loss on the same records."""
        if self.segments.all:
            self.console.print(_segments(list(self.segments.all), frozen))
        trained = status.records_trained - self._first_records
        self.console.print(
            f"{trained:,} records trained, {status.records_dead_lettered:,} dead letters, {status.step:,} steps, "
            f"{time.monotonic() - self._started:.0f} s"
        )
        if self.shifts:
            self.console.print(_shifts(list(self.shifts), status.adaptation))
        self.console.print(f"{self.snapshots} snapshots in {state_folder}/snapshots", soft_wrap=True)
        if self._endpoint:
            self.console.print(f"HTTP was served at {self._endpoint}", soft_wrap=True)


def _regime(adaptation: AdaptationStatus) -> str:
    """Current regime and number of shifts, for the live line."""
    if adaptation.current is None:
        return ""
    count = sum(adaptation.num_shifts.values())
    return f"regime {adaptation.current.number}, {count} shift{'s' if count != 1 else ''}"


def _segments(segments: Sequence[LabelledSegment], frozen: Scorer | None) -> FittedTable:
    """One row per segment."""
    speeds = [f"{segment.tokens / segment.seconds:,.0f}" if segment.seconds else "-" for segment in segments]
    columns = [
        FittedColumn("segment", [segment.label for segment in segments], 9, is_text=True),
        FittedColumn("records", [f"{segment.records:,}" for segment in segments], 8),
        FittedColumn("steps", [f"{segment.steps:,}" for segment in segments], 2),
        FittedColumn("tokens/s", speeds, 3),
    ]
    for name, importance, measured in (
        (f"first {FIRST}", 6, [segment.first for segment in segments]),
        (f"last {LAST}", 7, [segment.last for segment in segments]),
    ):
        columns.append(FittedColumn(f"loss\n{name}", [f"{mean_loss(each):.2f}" for each in measured], 9))
        if frozen is not None:
            columns.append(
                FittedColumn(f"frozen\n{name}", [f"{frozen_loss(each, frozen):.2f}" for each in measured], importance)
            )
    return FittedTable(columns, caption=_LOSS + (_FROZEN if frozen is not None else ""))


def _shifts(reports: Sequence[ShiftReport], adaptation: AdaptationStatus) -> Group:
    """The regimes that the stream entered, and how much was forgotten."""
    shifts = [report.shift for report in reports]
    parts: list[RenderableType] = [
        FittedTable(
            [
                FittedColumn("from\nrecord", [f"{shift.onset:,}" for shift in shifts], 9),
                FittedColumn(
                    "kind", ["start" if shift.previous is None else shift.kind for shift in shifts], 9, is_text=True
                ),
                FittedColumn("regime", [f"{shift.regime}" for shift in shifts], 9),
                FittedColumn("", ["known" if shift.known else "new" for shift in shifts], 9, is_text=True),
            ]
        )
    ]
    figures = {
        "average forgetting": adaptation.average_forgetting,
        "backward transfer": adaptation.backward_transfer,
    }
    known = [f"{name} {figure:.4f}" for name, figure in figures.items() if figure is not None]
    if known:
        parts.append(f"{', '.join(known)} (hold-out accuracy of past regimes)")
    return Group(*parts)


_LOSS = (
    f"loss: prequential (each batch is measured before it is trained on), in nats per learned token, over the first "
    f"{FIRST} and the last {LAST} records of a segment."
)
_FROZEN = " frozen: the same records under the frozen backbone."
