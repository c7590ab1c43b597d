"""Progress of a run for a terminal: one live line while it trains, a closing report at its end."""

import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamlearn.cli.options import Cell, TextConsole, ignored_counts, render_table
from streamlearn.learner.learner import Step
from streamlearn.regimes.report import ShiftReport
from streamlearn.settings import RecordsSettings, StreamSettings
from streamlearn.snapshot.parts import SnapshotInfo
from streamlearn.status import AdaptationStatus, Status
from streamlearn.stream.mapping import RecordMapping
from streamlearn.stream.record import IGNORED, Batch

FIRST, LAST = 2, 50
"""Records over which a segment's first and last loss are averaged: most is learned from the first few."""


class RecordLoss(NamedTuple):
    """Prequential loss of a record, in nats per learned token."""

    loss: float
    learned: int
    """Learned tokens."""


@dataclass
class LabeledSegment:
    """Consecutive records with the same label."""

    label: str
    records: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first: list[RecordLoss] = field(default_factory=list)
    last: deque[RecordLoss] = field(default_factory=lambda: deque(maxlen=LAST))

    def add(self, losses: Sequence[RecordLoss], step: Step, share: float) -> None:
        self.records += len(losses)
        self.first += losses[: FIRST - len(self.first)]
        self.last.extend(losses)
        self.steps += 1
        self.tokens += round(step.tokens * share)
        self.seconds += step.seconds * share


def mean_loss(losses: Iterable[RecordLoss]) -> float:
    """Mean over the learned tokens of all records, in nats per token."""
    records = list(losses)
    return sum(record.loss * record.learned for record in records) / sum(record.learned for record in records)


class LabeledSegments:
    """The run, split where the label changes.

    The label is `meta[key]` of each record. It is parsed here from the record's bytes, after the step and for display
    only: training never reads it. Without a key the whole run is one segment.
    """

    def __init__(self, key: str | None, mapping: RecordMapping | None = None) -> None:
        self.key = key
        self._mapping = mapping or RecordMapping(RecordsSettings(), StreamSettings())
        self.all: deque[LabeledSegment] = deque(maxlen=100)  # the stream may be endless

    def add(self, batch: Batch, step: Step) -> None:
        groups: dict[str, list[RecordLoss]] = {}
        for record, example, loss in zip(batch.records, batch.examples, step.record_losses, strict=True):
            learned = int((example.labels != IGNORED).sum())
            groups.setdefault(self._label(record.value), []).append(RecordLoss(loss, learned))
        for label, losses in groups.items():
            if not self.all or self.all[-1].label != label:
                self.all.append(LabeledSegment(label))
            self.all[-1].add(losses, step, len(losses) / len(batch.records))

    def _label(self, value: bytes | None) -> str:
        if self.key is None:
            return "stream"
        meta = self._mapping.canonical(self._mapping.parse(value)).get("meta")
        return str(meta.get(self.key, "stream")) if isinstance(meta, dict) else "stream"


class ProgressDisplay:
    """Observer of a run that prints a live line on a terminal, and a closing report everywhere.

    Where standard output is no terminal, the log reports progress.
    """

    def __init__(self, key: str | None, endpoint: str | None, mapping: RecordMapping | None = None) -> None:
        self.console: Console = TextConsole(file=sys.stdout)
        self.segments = LabeledSegments(key, mapping)
        self.snapshots = 0
        self.shifts: deque[ShiftReport] = deque(maxlen=100)  # the stream may be endless
        self._endpoint = endpoint
        self._started = time.monotonic()
        self._first_records = 0
        self._live = (
            Live(console=self.console, refresh_per_second=4, transient=True) if self.console.is_terminal else None
        )

    def on_start(self, status: Status) -> None:
        self._started = time.monotonic()
        self._first_records = status.records_trained
        if self._live:
            self._live.start()

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        if step.refusal is None:
            self.segments.add(batch, step)
        if self._live:
            self._live.update(self._line(status))

    def on_shift(self, report: ShiftReport) -> None:
        self.shifts.append(report)

    def on_snapshot(self, info: SnapshotInfo) -> None:
        del info
        self.snapshots += 1

    def close(self) -> None:
        """Remove the live line. Safe to call twice."""
        if self._live:
            self._live.stop()

    def _line(self, status: Status) -> Text:
        """The live line; parts that do not fit the terminal are left out from the right."""
        lags = [partition.lag for partition in status.partitions if partition.lag is not None]
        parts = [
            f"step {status.step}",
            f"{status.records_trained:,} records",
            f"lag {sum(lags):,}" if lags else "",
            f"{status.tokens_per_s:,.0f} tokens/s",
            f"loss {status.loss_smoothed:.3f}" if status.loss_smoothed is not None else "",
            f"{status.records_dead_lettered:,} dead letters" if status.records_dead_lettered else "",
            *ignored_counts(status.ignored),
            _regime(status.adaptation),
            self.segments.all[-1].label if self.segments.key and self.segments.all else "",
            self._endpoint or "",
        ]
        shown = [part for part in parts if part]
        while len(shown) > 1 and cell_len("  ".join(shown)) > self.console.width:
            shown.pop()
        return Text("  ".join(shown), overflow="ellipsis", no_wrap=True)

    def report(self, status: Status, state_folder: str) -> None:
        if self.segments.all:
            self.console.print(_segments(list(self.segments.all)))
        trained = status.records_trained - self._first_records
        counts = [f"{trained:,} records trained", f"{status.records_dead_lettered:,} dead letters"]
        counts += [*ignored_counts(status.ignored), f"{status.step:,} steps"]
        self.console.print(f"{', '.join(counts)}, {time.monotonic() - self._started:.0f} s")
        for form, number in status.truncated_records.items():
            self.console.print(
                f"{number:,} records of form {form} were longer than stream.max_tokens and lost "
                f"{status.truncated_tokens[form]:,} tokens",
                soft_wrap=True,
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


def _segments(segments: Sequence[LabeledSegment]) -> Table:
    columns: dict[str, Cell[LabeledSegment]] = {
        "segment": lambda segment: segment.label,
        "records": lambda segment: f"{segment.records:,}",
        "steps": lambda segment: f"{segment.steps:,}",
        "tokens/s": lambda segment: f"{segment.tokens / segment.seconds:,.0f}" if segment.seconds else "-",
        f"loss\nfirst {FIRST}": lambda segment: f"{mean_loss(segment.first):.2f}",
        f"loss\nlast {LAST}": lambda segment: f"{mean_loss(segment.last):.2f}",
    }
    caption = (
        "loss: prequential (each batch is measured before it is trained on), in nats per learned token, over the "
        f"first {FIRST} and the last {LAST} records of a segment."
    )
    return render_table(segments, columns, text=("segment",), caption=caption)


def _shifts(reports: Sequence[ShiftReport], adaptation: AdaptationStatus) -> Group:
    """The regimes that the stream entered, and how much was forgotten."""
    columns: dict[str, Cell[ShiftReport]] = {
        "from\nrecord": lambda report: f"{report.shift.onset:,}",
        "kind": lambda report: "start" if report.shift.previous is None else report.shift.kind,
        "regime": lambda report: f"{report.shift.regime}",
        "": lambda report: "known" if report.shift.known else "new",
    }
    if any(report.tokens_came for report in reports):
        columns["words that came"] = lambda report: ", ".join(report.tokens_came)
    parts: list[RenderableType] = [render_table(reports, columns, text=("kind", "", "words that came"))]
    values = {
        "average forgetting": adaptation.average_forgetting,
        "backward transfer": adaptation.backward_transfer,
    }
    known = [f"{name} {value:.4f}" for name, value in values.items() if value is not None]
    if known:
        parts.append(f"{', '.join(known)} (hold-out accuracy of past regimes)")
    return Group(*parts)
