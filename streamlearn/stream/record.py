"""Records before decoding, and positions in the stream."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, order=True, slots=True)
class TopicPartition:
    """One ordered log. A file is a topic with the single partition 0."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class RecordId(NamedTuple):
    """The identity of a record, without its content."""

    origin: TopicPartition
    offset: int


@dataclass(frozen=True, slots=True)
class Record:
    """One message as read from the log, bytes unchanged."""

    origin: TopicPartition
    offset: int
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: int = 0

    @property
    def id(self) -> RecordId:
        """The record's identity."""
        return RecordId(self.origin, self.offset)


class Gap(NamedTuple):
    """Offsets of one partition, from `lost_from` up to but excluding `lost_to`, that will never be trained."""

    origin: TopicPartition
    lost_from: int
    lost_to: int


@dataclass(frozen=True)
class Position(Mapping[TopicPartition, int]):
    """Per partition, the offset of the next record to train on. Immutable; `after` returns the position that follows.

    >>> here = Position({TopicPartition("t", 0): 4})
    >>> here.after(Record(TopicPartition("t", 0), offset=7, value=b"{}"))[TopicPartition("t", 0)]
    8
    """

    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)

    def __getitem__(self, origin: TopicPartition) -> int:
        return self.offsets[origin]

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(sorted(self.offsets))

    def __len__(self) -> int:
        return len(self.offsets)

    def __str__(self) -> str:
        return ", ".join(f"{origin} at {self[origin]}" for origin in self) or "nowhere yet"

    def after(self, *records: Record | RecordId) -> "Position":
        """The position after these records, given in log order. Logs have gaps: it is offset + 1, not a count."""
        return Position({**self.offsets, **{record.origin: record.offset + 1 for record in records}})

    def gaps_to(self, later: Mapping[TopicPartition, int]) -> list[Gap]:
        """The offsets skipped by continuing at `later`, in the partitions that both positions name."""
        return [Gap(origin, self[origin], later[origin]) for origin in self if later.get(origin, 0) > self[origin]]

    def to_json(self) -> list[list[str | int]]:
        """Rows of topic, partition, next offset, sorted."""
        return [[origin.topic, origin.partition, self[origin]] for origin in self]

    @classmethod
    def from_json(cls, rows: Iterable[Iterable[str | int]]) -> "Position":
        """The inverse of `to_json`."""
        return cls({TopicPartition(str(topic), int(part)): int(offset) for topic, part, offset in rows})
