"""Which records make a batch: a function of their order and their lengths, never of time.

So one partition replays bit for bit: the same records form the same batches however often the daemon dies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamlearn.errors import Reason
from streamlearn.settings import StreamSettings
from streamlearn.stream.decode import Example
from streamlearn.stream.record import Record, RecordId, TopicPartition

MAX_REJECTED = 1000


class Run(NamedTuple):
    """Neighbours of one partition in the order taken. Logs have gaps: `num_records` may be less than the distance."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int
    num_records: int

    @property
    def origin(self) -> TopicPartition:
        """Whose records they are."""
        return TopicPartition(self.topic, self.partition)


class Rejected(NamedTuple):
    """A record that was set aside, and why."""

    id: RecordId
    reason: Reason


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on, and every record that training on it is done with."""

    records: tuple[Record, ...]
    """The records trained on, in order; `examples[i]` is `records[i]` decoded."""
    examples: tuple[Example, ...]
    rejected: tuple[Rejected, ...] = ()
    """Records set aside while the batch was filled; content not kept."""
    runs: tuple[Run, ...] = ()
    """All of them in the order taken, for the journal."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return sum(len(example.input_ids) for example in self.examples)


@dataclass
class Batcher:
    """Fills batches in record order.

    A batch is closed when it holds `batch_records` records, or by the record that would lift it over `batch_tokens`;
    that record opens the next one. It is also closed, however full, after MAX_REJECTED rejected records, so that the
    position moves on through a stretch of rubbish.
    """

    settings: StreamSettings
    _records: list[Record] = field(default_factory=list)
    _examples: list[Example] = field(default_factory=list)
    _rejected: list[Rejected] = field(default_factory=list)
    _order: list[RecordId] = field(default_factory=list)
    _tokens: int = 0

    def add(self, record: Record, example: Example) -> list[Batch]:
        """Take a decoded record; return the batches that it closes: none, one, or two."""
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

    def reject(self, record: Record, reason: Reason) -> list[Batch]:
        """Enter a record that is not trained on into the batch being filled; return the batch if that closes it."""
        self._order.append(record.id)
        self._rejected.append(Rejected(record.id, reason))
        return [self._close()] if len(self._rejected) == MAX_REJECTED else []

    def flush(self) -> list[Batch]:
        """Close what is there at the end of a finite stream; it may hold rejected records alone."""
        return [self._close()] if self._order else []

    def _close(self) -> Batch:
        batch = Batch(tuple(self._records), tuple(self._examples), tuple(self._rejected), runs_of(self._order))
        self._records, self._examples, self._rejected, self._order, self._tokens = [], [], [], [], 0
        return batch


def runs_of(records: Sequence[RecordId]) -> tuple[Run, ...]:
    """Consecutive records of one partition folded into runs."""
    runs: list[Run] = []
    for origin, offset in records:
        last = runs[-1] if runs else None
        if last is not None and last.origin == origin:
            runs[-1] = last._replace(next_offset=offset + 1, num_records=last.num_records + 1)
        else:
            runs.append(Run(origin.topic, origin.partition, offset, offset + 1, 1))
    return tuple(runs)
