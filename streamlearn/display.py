"""What a person at a terminal sees of a run: a live line while it learns, a table at its end."""

import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

import orjson
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamlearn.learner.learner import Step
from streamlearn.serve.status import Status
from streamlearn.snapshot.snapshot import SnapshotInfo
from streamlearn.stream.batch import Batch

EDGE = 24  # records whose mean loss stands for the beginning, and for the end, of a stretch


@dataclass
class Stretch:
    """Consecutive records with one label."""

    label: str
    records: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=EDGE))

    def enter(self, losses: Iterable[float], step: Step, share: float) -> None:
        """Add one batch's records of this stretch; `share` is their part of the batch."""
        for loss in losses:
            self.records += 1
            self.last.append(loss)
            if len(self.first) < EDGE:
                self.first.append(loss)
        self.steps += 1
        self.tokens += round(step.tokens * share)
        self.seconds += step.seconds * share


class Stretches:
    """The run cut where the label changes.

    The label is `meta[key]` of each record. It is read here, for people, from the record's bytes, after the step:
    nothing that learns ever sees it. Without a key the run is one stretch.
    """

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.rows: list[Stretch] = []

    def enter(self, batch: Batch, step: Step) -> None:
        """Sort one step's records into stretches."""
        groups: dict[str, list[float]] = {}
        for record, loss in zip(batch.records, step.record_losses, strict=True):
            groups.setdefault(self._label(record.value), []).append(loss)
        for label, losses in groups.items():
            if not self.rows or self.rows[-1].label != label:
                self.rows.append(Stretch(label))
            self.rows[-1].enter(losses, step, len(losses) / len(batch.records))

    def _label(self, value: bytes | None) -> str:
        if self.key is None or value is None:
            return "stream"
        return str((orjson.loads(value).get("meta") or {}).get(self.key, "stream"))


class Watch:
    """Observes a run: live line on a terminal, nothing elsewhere (the log speaks there), and the closing table."""

    def __init__(self, key: str | None, endpoint: str | None) -> None:
        self.console = Console(file=sys.stdout)
        self.stretches = Stretches(key)
        self.snapshots = 0
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
            self.stretches.enter(batch, step)
        if self._live:
            self._live.update(self._line(status))

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
        label = self.stretches.rows[-1].label if self.stretches.rows else ""
        parts = [
            f"step {status.step}",
            f"{status.records_trained} records" + (f", {sum(lag)} to go" if lag else ""),
            f"{status.tokens_per_s:,.0f} tokens/s",
            f"loss {status.loss_smoothed:.3f}" if status.loss_smoothed is not None else "",
            f"{status.records_dead_lettered} dead letters" if status.records_dead_lettered else "",
            label,
            self._endpoint or "",
        ]
        return Text("  ".join(part for part in parts if part), overflow="ellipsis", no_wrap=True)

    def report(self, status: Status, state_folder: str) -> None:
        """The closing table."""
        table = Table(box=box.SIMPLE_HEAD, title="What was learned", title_justify="left", title_style="bold")
        for name, justify in (("stretch", "left"), *((n, "right") for n in _COLUMNS)):
            table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for row in self.stretches.rows:
            table.add_row(
                row.label,
                f"{row.records}",
                f"{row.steps}",
                f"{row.tokens / row.seconds:,.0f}" if row.seconds else "-",
                f"{fmean(row.first):.3f}",
                f"{fmean(row.last):.3f}",
            )
        self.console.print(table)
        trained = status.records_trained - self._first_records
        self.console.print(
            f"{trained} records trained, {status.records_dead_lettered} dead letters, {status.step} steps, "
            f"{time.monotonic() - self._started:.0f} s"
        )
        self.console.print(f"{self.snapshots} snapshots in {state_folder}/snapshots", soft_wrap=True)
        if self._endpoint:
            self.console.print(f"endpoint was {self._endpoint}", soft_wrap=True)
        self.console.print(
            f"Losses are prequential (each batch is measured before it is learned), nats per token, means over "
            f"the first and last {EDGE} records of a stretch.",
            style="dim",
        )


_COLUMNS = ("records", "steps", "tokens/s", "loss at start", "loss at end")
