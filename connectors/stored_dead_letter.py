"""A dead letter as it is read back from its sink."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from connectors.dead_letter_headers import LEFT_OUT_BYTES, PREFIX, record_of
from streamlearn.errors import UsageError
from streamlearn.stream.record import Record, RecordId, TopicPartition


class DeadLetterId(NamedTuple):
    """The identity of a dead letter: its record, and the record's time, which a topic created again does not repeat."""

    record: RecordId
    timestamp_ms: int

    def __str__(self) -> str:
        origin, offset = self.record
        return f"{origin.topic}:{origin.partition}:{offset}:{self.timestamp_ms}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`.

        >>> DeadLetterId.parse("a:b:0:118:17").record.offset
        118

        Raises:
            ValueError: it is no identity.
        """
        topic, partition, offset, timestamp = text.rsplit(":", 3)
        return cls(RecordId(TopicPartition(topic, int(partition)), int(offset)), int(timestamp))


@dataclass(frozen=True, slots=True)
class StoredDeadLetter:
    """A record that was set aside, and why."""

    record: Record
    """As it was read, with its own headers; without value, key and headers if `left_out_bytes` is set."""
    reason: str
    stage: str
    message: str
    written_ms: int | None = None
    """When the broker got it, Unix time in milliseconds; None in a file."""
    sink_partition: int | None = None
    """Partition of the dead-letter topic; None in a file."""
    left_out_bytes: int | None = None
    """Size of the value, if the record was too large for the dead-letter topic; None if nothing was left out."""

    @property
    def id(self) -> DeadLetterId:
        """Its identity."""
        return DeadLetterId(self.record.id, self.record.timestamp_ms)

    @property
    def where(self) -> str:
        """Topic, partition and offset of the record, as people name it."""
        origin = self.record.origin
        return f"{origin.topic}:{origin.partition}:{self.record.offset}"


class Repair(NamedTuple):
    """A dead letter and the value that is put back in its place."""

    dead_letter: StoredDeadLetter
    value: bytes


def from_headers(
    headers: Mapping[str, str],
    *,
    value: bytes | None,
    key: bytes | None,
    own: tuple[tuple[str, bytes], ...],
    written_ms: int | None = None,
    sink_partition: int | None = None,
) -> StoredDeadLetter | None:
    """Return the dead letter that these headers describe; None if they describe none."""
    record_id = record_of(headers)
    if record_id is None:
        return None
    time = headers.get(f"{PREFIX}timestamp", "0")
    timestamp_ms = int(time) if time.lstrip("-").isdecimal() else 0
    left_out = headers.get(LEFT_OUT_BYTES, "")
    return StoredDeadLetter(
        Record(record_id.origin, record_id.offset, value, key, own, timestamp_ms),
        reason=headers.get(f"{PREFIX}exception.class.name", ""),
        stage=headers.get(f"{PREFIX}stage", ""),
        message=headers.get(f"{PREFIX}exception.message", ""),
        written_ms=written_ms,
        sink_partition=sink_partition,
        left_out_bytes=int(left_out) if left_out.isdecimal() else None,
    )


def parse_where(text: str) -> RecordId:
    """Return the record that TOPIC:PARTITION:OFFSET names.

    Raises:
        UsageError: it is not of this form.
    """
    try:
        topic, partition, offset = text.rsplit(":", 2)
        return RecordId(TopicPartition(topic, int(partition)), int(offset))
    except ValueError as error:
        raise UsageError(f"expected TOPIC:PARTITION:OFFSET as `dead-letters list` shows it, found {text!r}") from error
