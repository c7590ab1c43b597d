"""Batching: which records form a batch depends on their order and lengths, and on where the stream was flushed.

Flushes are journalled. A single partition therefore replays bit for bit: the same records form the same batches after
any number of restarts.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamlearn.errors import Reason
from streamlearn.settings import StreamSettings
from streamlearn.stream.record import Example, Position, Record, RecordId, TopicPartition

MAX_DEAD_LETTERED = 1000
"""Maximum number of dead-lettered records per batch."""


class PartitionRun(NamedTuple):
    """Consecutive records of one partition. Logs have gaps: `num_records` may be less than the offset difference."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int
    num_records: int

    @property
    def origin(self) -> TopicPartition:
        """The partition of these records."""
        return TopicPartition(self.topic, self.partition)


class DeadLetteredRecord(NamedTuple):
    """A record that became a dead letter, and the reason."""

    id: RecordId
    reason: Reason
    message: str = ""
    """For people; nothing of the record's content."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The records of one training step, and the records that became dead letters while the batch was filled."""

    records: tuple[Record, ...]
    """The records trained on, in order; `examples[i]` is `records[i]` decoded."""
    examples: tuple[Example, ...]
    dead_lettered: tuple[DeadLetteredRecord, ...] = ()
    """The records that became dead letters; their content is not kept."""
    runs: tuple[PartitionRun, ...] = ()
    """All of these records in the order in which they were read, for the journal."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return sum(len(example.input_ids) for example in self.examples)


@dataclass
class Batcher:
    """Fills batches in record order.

    A batch is closed when it holds `batch_records` records or exactly `batch_tokens` tokens, or by the record that
    would exceed `batch_tokens`; that record starts the next batch. A batch is also closed after MAX_DEAD_LETTERED
    dead-lettered records, so that the position advances through a segment of unusable records, and by `flush`.
    """

    settings: StreamSettings
    _records: list[Record] = field(default_factory=list)
    _examples: list[Example] = field(default_factory=list)
    _dead_lettered: list[DeadLetteredRecord] = field(default_factory=list)
    _order: list[RecordId] = field(default_factory=list)
    _tokens: int = 0

    def add(self, record: Record, example: Example) -> list[Batch]:
        """Add a decoded record; return the batches that it closes: none, one, or two."""
        closed = []
        if self._records and self._tokens + len(example.input_ids) > self.settings.batch_tokens:
            closed.append(self._close())
        self._order.append(record.id)
        self._records.append(record)
        self._examples.append(example)
        self._tokens += len(example.input_ids)
        if len(self._records) == self.settings.batch_records or self._tokens == self.settings.batch_tokens:
            closed.append(self._close())
        return closed

    def add_dead_lettered(self, record: Record, reason: Reason, message: str = "") -> list[Batch]:
        """Add a record that became a dead letter; return the batch if this closes it."""
        self._order.append(record.id)
        self._dead_lettered.append(DeadLetteredRecord(record.id, reason, message))
        return [self._close()] if len(self._dead_lettered) == MAX_DEAD_LETTERED else []

    @property
    def open_runs(self) -> tuple[PartitionRun, ...]:
        """The records of the open batch in the order in which they were read; empty if none is open."""
        return runs_of(self._order)

    def flush(self) -> list[Batch]:
        """Close the open batch, if there is one; it may hold only dead-lettered records."""
        return [self._close()] if self._order else []

    def _close(self) -> Batch:
        batch = Batch(tuple(self._records), tuple(self._examples), tuple(self._dead_lettered), runs_of(self._order))
        self._records, self._examples, self._dead_lettered, self._order, self._tokens = [], [], [], [], 0
        return batch


def runs_of(records: Sequence[RecordId]) -> tuple[PartitionRun, ...]:
    """Group consecutive records of one partition into runs."""
    runs: list[PartitionRun] = []
    for origin, offset in records:
        last = runs[-1] if runs else None
        if last is not None and last.origin == origin:
            runs[-1] = last._replace(next_offset=offset + 1, num_records=last.num_records + 1)
        else:
            runs.append(PartitionRun(origin.topic, origin.partition, offset, offset + 1, 1))
    return tuple(runs)


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
    def restore(cls, position: Position, rows: Iterable[tuple[str, int, int, int, int]]) -> "Ledger":
        """The inverse of `rows`, with the position of the same snapshot."""
        ledger = cls(position)
        for topic, partition, trained, dead_lettered, held_out in rows:
            origin = TopicPartition(topic, partition)
            ledger.trained[origin], ledger.dead_lettered[origin] = trained, dead_lettered
            ledger.held_out[origin] = held_out
        return ledger
