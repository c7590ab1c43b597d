"""The loop's own state: the ledger and running figures. A snapshot's manifest holds it."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from streamlearn.errors import Reason
from streamlearn.learner.learner import Step
from streamlearn.snapshot.manifest import Manifest
from streamlearn.snapshot.parts import snapshot_name
from streamlearn.status import SnapshotStatus, Timing
from streamlearn.stream.record import Batch, Gap, PartitionRun, Position, Record, RecordId, TopicPartition

SMOOTHING = 0.98  # of the published loss: an average over about 50 batches


@dataclass
class Ledger:
    """Counts that add up: records read = trained + dead-lettered + held out. The position follows the last of them."""

    position: Position = field(default_factory=Position)
    trained: Counter[TopicPartition] = field(default_factory=Counter)
    dead_lettered: Counter[TopicPartition] = field(default_factory=Counter)
    held_out: Counter[TopicPartition] = field(default_factory=Counter)

    def account(self, batch: Batch, *, refused: bool, held_out: Collection[int] = ()) -> None:
        """Count a batch: its records were trained on, or dead-lettered if the update was refused.

        `held_out` holds the indices of records that were evaluated only.
        """
        self.dead_lettered.update(dead_lettered.id.origin for dead_lettered in batch.dead_lettered)
        column = self.dead_lettered if refused else self.trained
        for index, record in enumerate(batch.records):
            (self.held_out if index in held_out else column)[record.origin] += 1
        self.position = Position({**self.position, **{run.origin: run.next_offset for run in batch.runs}})

    def skip(self, run: PartitionRun) -> None:
        """Count records that became dead letters outside of any batch."""
        self.dead_lettered[run.origin] += run.num_records
        self.position = Position({**self.position, run.origin: run.next_offset})

    def rows(self) -> list[tuple[str, int, int, int, int]]:
        """Topic, partition, trained, dead-lettered, held out: one row per partition, sorted."""
        origins = sorted(set(self.position) | set(self.trained) | set(self.dead_lettered) | set(self.held_out))
        return [(o.topic, o.partition, self.trained[o], self.dead_lettered[o], self.held_out[o]) for o in origins]

    @classmethod
    def restore(cls, position: Position, rows: Iterable[tuple[str, int, int, int, int]]) -> Self:
        """The inverse of `rows`, with the position of the same snapshot."""
        ledger = cls(position)
        for topic, partition, trained, dead_lettered, held_out in rows:
            origin = TopicPartition(topic, partition)
            ledger.trained[origin], ledger.dead_lettered[origin] = trained, dead_lettered
            ledger.held_out[origin] = held_out
        return ledger


@dataclass
class RunState:
    """Only the loop changes it."""

    ledger: Ledger = field(default_factory=Ledger)
    tokens: int = 0
    """Tokens trained on."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Dead letters by reason."""
    refusals: int = 0
    """Updates refused because of a non-finite loss or gradient."""
    bad_in_a_row: int = 0
    """Updates refused since the last one that was made."""
    loss: float | None = None
    """Prequential loss of the last batch, nats per token."""
    loss_smoothed: float | None = None

    last_snapshot: SnapshotStatus | None = None
    records_since_save: int = 0
    refused_since_save: set[RecordId] = field(default_factory=set)
    moved_since_save: bool = False
    """Whether the position skipped records that are lost, or got the start of a partition that no snapshot names."""
    changed_since_save: bool = False
    """Whether an operator changed regimes, and the snapshot after it could not be written."""
    not_read: frozenset[TopicPartition] = frozenset()
    """Partitions that the position names and the source does not read: their topic was taken out of the stream."""
    rolled_back_to: str | None = None
    """The snapshot that the last rollback restored, until a later one is written."""
    step_seconds: Timing = field(default_factory=Timing)
    snapshot_seconds: Timing = field(default_factory=Timing)
    job_seconds: Timing = field(default_factory=Timing)

    def account(self, batch: Batch, step: Step | None, held_out: Collection[int] = ()) -> None:
        """Count a batch and its step; `step` is None when no record of the batch was trained on."""
        refused = step is not None and step.refusal is not None
        self.ledger.account(batch, refused=refused, held_out=held_out)
        self.reasons.update(str(dead_lettered.reason) for dead_lettered in batch.dead_lettered)
        self.records_since_save += len(batch.records) + len(batch.dead_lettered)
        if step is None:
            return
        self.step_seconds = self.step_seconds.observe(step.seconds)
        if refused:
            self._refuse([r for i, r in enumerate(batch.records) if i not in held_out])
        else:
            self.bad_in_a_row = 0
            self.tokens += step.tokens
            self.loss = step.loss
            before = step.loss if self.loss_smoothed is None else self.loss_smoothed
            self.loss_smoothed = SMOOTHING * before + (1 - SMOOTHING) * step.loss

    def skip_gaps(self, gaps: Iterable[Gap]) -> None:
        """Move the position past what the source skipped, where every record before it is accounted for."""
        for gap in gaps:
            position = self.ledger.position
            if position.get(gap.origin) == gap.lost_from:
                self.ledger.position = Position({**position, gap.origin: gap.lost_to})
                self.moved_since_save = True

    def skip(self, runs: Iterable[PartitionRun]) -> None:
        """Count records that an operator skips, and move the position past them: all before are accounted for."""
        for run in runs:
            self.ledger.skip(run)
            self.reasons[str(Reason.SKIPPED)] += run.num_records
            self.records_since_save += run.num_records

    def _refuse(self, records: Sequence[Record]) -> None:
        self.refusals += 1
        self.bad_in_a_row += 1
        self.reasons[str(Reason.NOT_FINITE_UPDATE)] += len(records)
        self.refused_since_save.update(record.id for record in records)

    def saved(self, snapshot: SnapshotStatus, seconds: float) -> None:
        """A snapshot of this state is durable."""
        self.last_snapshot = snapshot
        self.snapshot_seconds = self.snapshot_seconds.observe(seconds)
        self.records_since_save = 0
        self.refused_since_save = set()
        self.moved_since_save = False
        self.changed_since_save = False
        self.rolled_back_to = None

    def to_json(self) -> dict[str, Any]:
        """Figures that outlive the process, for the manifest, which stores the ledger separately."""
        return {
            "tokens": self.tokens,
            "reasons": dict(self.reasons),
            "refusals": self.refusals,
            "bad_in_a_row": self.bad_in_a_row,
            "loss": self.loss,
            "loss_smoothed": self.loss_smoothed,
        }

    @classmethod
    def restored(cls, manifest: Manifest) -> Self:
        """The state in a snapshot's manifest."""
        figures = {**manifest.learner, "reasons": Counter(manifest.learner["reasons"])}
        written = datetime.fromisoformat(manifest.created_at).timestamp()
        return cls(
            ledger=Ledger.restore(manifest.position, manifest.ledger),
            last_snapshot=SnapshotStatus(snapshot_name(manifest.step), manifest.step, written),
            **figures,
        )

    @property
    def read_position(self) -> Position:
        """The position, without partitions that are not read. They keep their offset until they are read again."""
        position = self.ledger.position
        return Position({origin: position[origin] for origin in position if origin not in self.not_read})

    @property
    def records(self) -> int:
        """Records that are done: trained on, dead-lettered or held out."""
        return self.ledger.trained.total() + self.ledger.dead_lettered.total() + self.ledger.held_out.total()
