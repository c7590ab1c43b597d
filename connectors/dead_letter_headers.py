"""What a dead letter says about its record: Kafka Connect's header names under this project's prefix.

A letter is read by these names alone; a record's own header that bears the prefix is left out, so nobody forges one.
"""

from collections.abc import Iterable, Mapping

from streamlearn.errors import Reason
from streamlearn.stream.record import Record, TopicPartition
from streamlearn.stream.source import DeadLetter

PREFIX = "__streamlearn.errors."

Origin = tuple[TopicPartition, int]


def headers_of(letter: DeadLetter) -> dict[str, str]:
    """The letter's headers, in Connect's order. Text that is not valid Unicode is escaped, never refused."""
    record = letter.record
    fields = {
        "topic": record.origin.topic,
        "partition": str(record.origin.partition),
        "offset": str(record.offset),
        "stage": _stage(letter.reason),
        "exception.class.name": letter.reason.value,
        "exception.message": letter.message.encode("utf-8", "backslashreplace").decode(),
        "timestamp": str(record.timestamp_ms),
    }
    return {PREFIX + name: value for name, value in fields.items()}


def own_headers(record: Record) -> list[tuple[str, bytes]]:
    """The headers that the record brought along, without forged ones."""
    return [(name, value) for name, value in record.headers if not name.startswith(PREFIX)]


def origin_of(headers: Mapping[str, str] | Iterable[tuple[str, bytes]]) -> Origin | None:
    """Which record a letter is about, or None when the headers are not of a letter."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    fields = {name: value if isinstance(value, str) else value.decode("utf-8", "replace") for name, value in pairs}
    try:
        origin = TopicPartition(fields[PREFIX + "topic"], int(fields[PREFIX + "partition"]))
        return origin, int(fields[PREFIX + "offset"])
    except (KeyError, ValueError):
        return None


def _stage(reason: Reason) -> str:
    """Connect's stages: the converter could not read it, or the task could not use it."""
    return "TASK_PUT" if reason is Reason.NOT_FINITE_UPDATE else "VALUE_CONVERTER"
