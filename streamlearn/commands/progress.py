"""What a person at a terminal sees of a run: a live line while it learns, a table at its end."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamlearn.adaptation.adaptation import ShiftReport
from streamlearn.learner.evaluation import ExampleScore
from streamlearn.learner.learner import Step
from streamlearn.snapshot.snapshot import SnapshotInfo
from streamlearn.status.status import AdaptationStatus, Status
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example
from streamlearn.stream.encode import IGNORED

FIRST, LAST = 2, 50
"""Records whose loss stands for the beginning and for the end of a stretch: the first few already teach most."""

Scorer = Callable[[Sequence[Example]], Sequence[ExampleScore]]
"""The frozen backbone's score of each example."""


class Measured(NamedTuple):
    """A record and its prequential loss, nats per learned token."""

    loss: float
    example: Example

    @property
    def learned(self) -> int:
        """Its learned tokens."""
        return int((self.example.labels != IGNORED).sum())


@dataclass
class Segment:
    """Consecutive records with one label."""

    label: str
    records: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first: list[Measured] = field(default_factory=list)
    last: deque[Measured] = field(default_factory=lambda: deque(maxlen=LAST))

    def enter(self, measured: Sequence[Measured], step: Step, share: float) -> None:
        """Add a batch's records of this stretch; `share` is their part of the batch."""
        self.records += len(measured)
        self.first += measured[: FIRST - len(self.first)]
        self.last.extend(measured)
        self.steps += 1
        self.tokens += round(step.tokens * share)
        self.seconds += step.seconds * share


def mean_loss(measured: Iterable[Measured]) -> float:
    """Over the learned tokens of all records, nats per token."""
    rows = list(measured)
    return sum(row.loss * row.learned for row in rows) / sum(row.learned for row in rows)


def frozen_loss(measured: Iterable[Measured], frozen: Scorer) -> float:
    """What the untouched backbone loses on the same records, nats per token."""
    scores = frozen([row.example for row in measured])
    return sum(score.loss_sum for score in scores) / sum(score.tokens for score in scores)


class Segments:
    """The run cut where the label changes.

    The label is `meta[key]` of each record. It is read here, for people, from the record's bytes, after the step:
    nothing that learns ever sees it. Without a key the run is one stretch.
    """

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.rows: deque[Segment] = deque(maxlen=100)  # of an endless stream the last hundred

    def enter(self, batch: Batch, step: Step) -> None:
        """Sort one step's records into stretches."""
        groups: dict[str, list[Measured]] = {}
        for record, example, loss in zip(batch.records, batch.examples, step.record_losses, strict=True):
            groups.setdefault(self._label(record.value), []).append(Measured(loss, example))
        for label, measured in groups.items():
            if not self.rows or self.rows[-1].label != label:
                self.rows.append(Segment(label))
            self.rows[-1].enter(measured, step, len(measured) / len(batch.records))

    def _label(self, value: bytes | None) -> str:
        if self.key is None or value is None:
            return "stream"
        return str((orjson.loads(value).get("meta") or {}).get(self.key, "stream"))


class ProgressDisplay:
    """Observes a run: live line on a terminal, nothing elsewhere (the log speaks there), and the closing table."""

    def __init__(self, key: str | None, endpoint: str | None) -> None:
        self.console = Console(file=sys.stdout)
        self.segments = Segments(key)
        self.snapshots = 0
        self.shifts: deque[ShiftReport] = deque(maxlen=100)  # of an endless stream the last hundred
        self._endpoint = endpoint
        self._started = time.monotonic()
        self._first_records = 0
        self._live = (
            Live(console=self.console, refresh_per_second=4, transient=True) if self.console.is_terminal else None
        )

    def on_start(self, status: Status) -> None:
        """Begin the live line."""
        self._started = time.monotonic()
        self._first_records = status.records_trained
        if self._live:
            self._live.start()

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Count the step and move the line."""
        if step.refusal is None:
            self.segments.enter(batch, step)
        if self._live:
            self._live.update(self._line(status))

    def on_shift(self, entry: ShiftReport) -> None:
        """Remember it for the table."""
        self.shifts.append(entry)

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """Count it."""
        del info
        self.snapshots += 1

    def close(self) -> None:
        """End the live line; safe to call twice."""
        if self._live:
            self._live.stop()

    def _line(self, status: Status) -> Text:
        lag = [row.lag for row in status.partitions if row.lag is not None]
        label = self.segments.rows[-1].label if self.segments.rows else ""
        parts = [
            f"step {status.step}",
            f"{status.records_trained} records" + (f", {sum(lag)} to go" if lag else ""),
            f"{status.tokens_per_s:,.0f} tokens/s",
            f"loss {status.loss_smoothed:.3f}" if status.loss_smoothed is not None else "",
            f"{status.records_dead_lettered} dead letters" if status.records_dead_lettered else "",
            label,
            _regime(status.adaptation),
            self._endpoint or "",
        ]
        return Text("  ".join(part for part in parts if part), overflow="ellipsis", no_wrap=True)

    def report(self, status: Status, state_folder: str, frozen: Scorer | None) -> None:
        """The closing table; with `frozen` also what the untouched backbone would have lost."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("stretch", overflow="fold")
        names = [f"first {FIRST}\nloss", f"last {LAST}\nloss"]
        if frozen is not None:
            names = [names[0], "\nfrozen", names[1], "\nfrozen"]
        for name in ("\nrecords", "\nsteps", "\ntokens/s", *names):
            table.add_column(name, justify="right")
        for row in self.segments.rows:
            speed = f"{row.tokens / row.seconds:,.0f}" if row.seconds else "-"
            losses = [f"{loss:.2f}" for loss in _losses(row, frozen)]
            table.add_row(row.label, f"{row.records}", f"{row.steps}", speed, *losses)
        self.console.print(table)
        trained = status.records_trained - self._first_records
        self.console.print(
            f"{trained} records trained, {status.records_dead_lettered} dead letters, {status.step} steps, "
            f"{time.monotonic() - self._started:.0f} s"
        )
        if self.shifts:
            self.console.print(_shifts(self.shifts, status.adaptation))
        self.console.print(f"{self.snapshots} snapshots in {state_folder}/snapshots", soft_wrap=True)
        if self._endpoint:
            self.console.print(f"endpoint was {self._endpoint}", soft_wrap=True)
        self.console.print(_CAPTION, style="dim")


def _regime(adaptation: AdaptationStatus) -> str:
    """For the live line."""
    if adaptation.current is None:
        return ""
    count = sum(adaptation.num_shifts.values())
    return f"regime {adaptation.current.number}, {count} shift{'s' if count != 1 else ''}"


def _shifts(entries: Iterable[ShiftReport], adaptation: AdaptationStatus) -> Group:
    """What was found in the stream, and what became of its earlier parts."""
    table = Table("shift at\nrecord", "\nkind", "\nregime", "", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].justify = table.columns[2].justify = "right"
    for entry in entries:
        shift = entry.shift
        table.add_row(f"{shift.onset}", shift.kind, f"{shift.regime}", "known" if shift.known else "new")
    figures = {
        "average forgetting": adaptation.average_forgetting,
        "backward transfer": adaptation.backward_transfer,
    }
    known = [f"{name} {figure:.4f}" for name, figure in figures.items() if figure is not None]
    note = [f"{', '.join(known)} (hold-out accuracy of past regimes)"] if known else []
    return Group(table, *note)


def _losses(row: Segment, frozen: Scorer | None) -> list[float]:
    losses = []
    for measured in (row.first, row.last):
        losses.append(mean_loss(measured))
        if frozen is not None:
            losses.append(frozen_loss(measured, frozen))
    return losses


_CAPTION = (
    "loss: prequential (each batch is measured before it is learned), nats per learned token, over the first and the "
    "last records of a stretch; frozen: the same records under the backbone alone."
)
