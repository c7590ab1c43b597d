"""Ranges of offsets that are skipped."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self

from streamlearn.errors import UsageError
from streamlearn.stream.record import RecordId, TopicPartition

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
            listed = ", ".join(f"{each.topic}:{each.partition}" for each in sorted(partitions)[:8]) or "none"
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
        """The inverse of `to_json`. Raises ValueError or TypeError for anything else."""
        topic, partition, first, last = row
        return cls(TopicPartition(str(topic), int(partition)), int(first), int(last))
