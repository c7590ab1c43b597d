"""The headers of a dead letter: Kafka Connect's header names under this project's prefix.

A dead letter is identified by these headers only. A record's own headers with the prefix are removed, so that a record
cannot forge them.
"""

from collections.abc import Iterable, Mapping

from streamlearn.errors import Reason
from streamlearn.stream.record import Record, RecordId, TopicPartition
from streamlearn.stream.source import DeadLetter

PREFIX = "__streamlearn.errors."
LEFT_OUT_BYTES = PREFIX + "left.out.bytes"
"""Size of the value of a record whose value, key and headers were left out because the sink refused them."""


def headers_of(dead_letter: DeadLetter) -> dict[str, str]:
    """Return the headers in Kafka Connect's order. Text that is not valid Unicode is escaped."""
    record = dead_letter.record
    fields = {
        "topic": record.origin.topic,
        "partition": str(record.origin.partition),
        "offset": str(record.offset),
        "stage": _stage(dead_letter.reason),
        "exception.class.name": dead_letter.reason.value,
        "exception.message": dead_letter.message.encode("utf-8", "backslashreplace").decode(),
        "timestamp": str(record.timestamp_ms),
    }
    return {PREFIX + name: value for name, value in fields.items()}


def own_headers(record: Record) -> list[tuple[str, bytes]]:
    """Return the record's own headers, without any that has the prefix."""
    return [(name, value) for name, value in record.headers if not name.startswith(PREFIX)]


def record_of(headers: Mapping[str, str] | Iterable[tuple[str, bytes]]) -> RecordId | None:
    """Return the record of a dead letter, or None when the headers are not those of a dead letter."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    fields = {name: value if isinstance(value, str) else value.decode("utf-8", "replace") for name, value in pairs}
    try:
        origin = TopicPartition(fields[PREFIX + "topic"], int(fields[PREFIX + "partition"]))
        return RecordId(origin, int(fields[PREFIX + "offset"]))
    except (KeyError, ValueError):
        return None


def _stage(reason: Reason) -> str:
    """Kafka Connect's stage: the converter could not read the record, or the task could not use it."""
    return "TASK_PUT" if reason in (Reason.NOT_FINITE_UPDATE, Reason.SKIPPED) else "VALUE_CONVERTER"
