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
_PLACE = (PREFIX + "topic", PREFIX + "partition", PREFIX + "offset")


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


def record_of(headers: Mapping[str, str] | Iterable[tuple[str, bytes | None]]) -> RecordId | None:
    """Return the record of a dead letter, or None when the headers are not those of a dead letter."""
    fields = headers if isinstance(headers, Mapping) else text_of(pair for pair in headers if pair[0] in _PLACE)
    try:
        topic, partition, offset = (fields[name] for name in _PLACE)
        return RecordId(TopicPartition(topic, int(partition)), int(offset))
    except (KeyError, ValueError):
        return None


def text_of(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """Return the headers as text, without those that Kafka stores without a value."""
    return {name: value.decode("utf-8", "replace") for name, value in headers if value is not None}


def _stage(reason: Reason) -> str:
    """Kafka Connect's stage: the converter could not read the record, or the task could not use it."""
    return "TASK_PUT" if reason in (Reason.NOT_FINITE_UPDATE, Reason.SKIPPED) else "VALUE_CONVERTER"
