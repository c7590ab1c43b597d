"""A file of dead letters to mend by hand: one JSON object per line.

`value` is the record as an object where it is one, else as text; what is not text is in `value_base64`. `topic`,
`partition`, `offset` and `timestamp` say which dead letter a line mends, and must stay as they are. `left_out_bytes` is
the size of a value that was too large for the dead-letter topic; `value` is then null.
"""

import base64
import binascii
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from connectors.lines import read_lines
from connectors.stored_dead_letter import DeadLetterId, StoredDeadLetter
from streamlearn.errors import RecordError, UsageError
from streamlearn.settings import StreamSettings
from streamlearn.stream.parse import parse
from streamlearn.stream.record import RecordId, TopicPartition


class Mended(NamedTuple):
    """A value to put back."""

    line: int
    id: DeadLetterId
    value: bytes | None


def write(path: Path, dead_letters: Iterable[StoredDeadLetter], limits: StreamSettings) -> int:
    """Write dead letters to a new file that only its owner may read; return their number.

    Raises:
        UsageError: the file exists, or its folder does not.
    """
    number = 0
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for dead_letter in dead_letters:
                file.write(orjson.dumps(_entry(dead_letter, limits), option=orjson.OPT_APPEND_NEWLINE))
                number += 1
    except OSError as error:
        raise UsageError(f"{path} must be a new file in an existing folder: {error.strerror}") from error
    return number


def read(path: Path, limits: StreamSettings) -> Iterator[Mended]:
    """Yield the mended values.

    Raises:
        UsageError: a line names no dead letter, names one twice, or has a value that would be refused again.
        SourceError: the file cannot be read.
    """
    seen: dict[DeadLetterId, int] = {}
    for number, line in enumerate(read_lines(path), start=1):
        mended = _mended(path, number, line)
        if mended.id in seen:
            raise UsageError(f"{path} line {number} mends the same record as line {seen[mended.id]}: keep one of them")
        seen[mended.id] = number
        try:
            parse(mended.value, limits)
        except RecordError as error:
            raise UsageError(
                f"{path} line {number} would be a dead letter again ({error.reason}): {error}. Mend its value, or "
                "remove the line"
            ) from error
        yield mended


def _entry(dead_letter: StoredDeadLetter, limits: StreamSettings) -> dict[str, Any]:
    record = dead_letter.record
    identity = {
        "topic": record.origin.topic,
        "partition": record.origin.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
    }
    left_out = {} if dead_letter.left_out_bytes is None else {"left_out_bytes": dead_letter.left_out_bytes}
    why = {"reason": dead_letter.reason, "message": dead_letter.message}
    return identity | why | left_out | _shown(record.value, limits)


def _shown(value: bytes | None, limits: StreamSettings) -> dict[str, Any]:
    try:
        return {"value": parse(value, limits)}
    except RecordError:
        if value is None:
            return {"value": None}
    try:
        return {"value": value.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(value).decode()}


def _mended(path: Path, number: int, line: bytes) -> Mended:
    try:
        entry = orjson.loads(line)
        record = RecordId(TopicPartition(str(entry["topic"]), int(entry["partition"])), int(entry["offset"]))
        identity = DeadLetterId(record, int(entry["timestamp"]))
        if "value" not in entry:
            return Mended(number, identity, base64.b64decode(entry["value_base64"], validate=True))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UsageError(
            f"{path} line {number} must be one that `dead-letters export` wrote, with topic, partition, offset, "
            f"timestamp and value, found {error!r}"
        ) from error
    value = entry["value"]
    if value is None or isinstance(value, str):
        return Mended(number, identity, None if value is None else value.encode())
    return Mended(number, identity, orjson.dumps(value))
