"""Partitions, offsets and positions in the stream. Imports nothing heavy: commands need it for their help."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from streamlearn.errors import UsageError


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

    def __str__(self) -> str:
        return f"{self.origin.topic}:{self.origin.partition}:{self.offset}"


class PartitionRun(NamedTuple):
    """Consecutive records of one partition. Logs have gaps: `num_records` may be less than the offset difference."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int
    num_records: int

    @property
    def origin(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class Gap(NamedTuple):
    """Offsets of one partition, from `lost_from` up to but excluding `lost_to`, that will never be trained."""

    origin: TopicPartition
    lost_from: int
    lost_to: int


@dataclass(frozen=True)
class Position(Mapping[TopicPartition, int]):
    """Per partition, the offset of the next record to train on. Logs have gaps: it is no count of records."""

    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)

    def __getitem__(self, origin: TopicPartition) -> int:
        return self.offsets[origin]

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(sorted(self.offsets))

    def __len__(self) -> int:
        return len(self.offsets)

    def __str__(self) -> str:
        return ", ".join(f"{origin} at {self[origin]}" for origin in self) or "nowhere yet"

    def gaps_to(self, later: Mapping[TopicPartition, int]) -> list[Gap]:
        """The offsets skipped by continuing at `later`, in the partitions that both positions name."""
        return [Gap(origin, self[origin], later[origin]) for origin in self if later.get(origin, 0) > self[origin]]

    def to_json(self) -> list[list[str | int]]:
        """Rows of topic, partition, next offset, sorted."""
        return [[origin.topic, origin.partition, self[origin]] for origin in self]

    @classmethod
    def from_json(cls, rows: Iterable[Iterable[str | int]]) -> "Position":
        return cls({TopicPartition(str(topic), int(part)): int(offset) for topic, part, offset in rows})


PATTERN = r"^(?:.+:[0-9]+:)?[0-9]+\.\.[0-9]+$"
"""The form of a range as text."""
_PARTS = re.compile(r"(?:(?P<topic>.+):(?P<partition>[0-9]{1,10}):)?(?P<first>[0-9]{1,19})\.\.(?P<last>[0-9]{1,19})")
_MAX_OFFSET = (1 << 63) - 1


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Consecutive offsets of one partition.

    >>> OffsetRange.parse("orders:0:118..122", ())
    OffsetRange(origin=TopicPartition(topic='orders', partition=0), first=118, last=122)
    >>> str(OffsetRange.parse("7..7", [TopicPartition("orders", 3)]))
    'orders:3:7..7'
    """

    origin: TopicPartition
    first: int
    last: int
    """Included."""

    def __str__(self) -> str:
        return f"{self.origin.topic}:{self.origin.partition}:{self.first}..{self.last}"

    def __contains__(self, record: RecordId) -> bool:
        return record.origin == self.origin and self.first <= record.offset <= self.last

    @classmethod
    def parse(cls, text: str, partitions: Collection[TopicPartition]) -> Self:
        """Read `TOPIC:PARTITION:FROM..TO`, or `FROM..TO` if there is only one of `partitions`.

        Raises:
            UsageError: the text has another form, or does not say which partition it means.
        """
        found = _PARTS.fullmatch(text)
        if found is None or not int(found["first"]) <= int(found["last"]) <= _MAX_OFFSET:
            raise UsageError(
                f"skipped records must be given as TOPIC:PARTITION:FROM..TO with FROM <= TO, found {text!r:.200}"
            )
        if found["topic"] is not None:
            origin = TopicPartition(found["topic"], int(found["partition"]))
        elif len(partitions) == 1:
            (origin,) = partitions
        else:
            listed = ", ".join(f"{origin.topic}:{origin.partition}" for origin in sorted(partitions)[:8]) or "none"
            raise UsageError(
                f"skipped records must name their partition, as in TOPIC:PARTITION:{text}, because the stream has "
                f"{len(partitions)} partitions: {listed}"
            )
        return cls(origin, int(found["first"]), int(found["last"]))

    def to_json(self) -> list[str | int]:
        """Topic, partition, first and last offset."""
        return [self.origin.topic, self.origin.partition, self.first, self.last]

    @classmethod
    def from_json(cls, row: Iterable[str | int]) -> Self:
        topic, partition, first, last = row
        return cls(TopicPartition(str(topic), int(partition)), int(first), int(last))
