"""Dead letters for people and as JSON. Content is shown only on request, since it may be private."""

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import RenderableType

from connectors.stored_dead_letter import StoredDeadLetter
from streamlearn.commands.fitted_table import FittedColumn, FittedTable


def row(dead_letter: StoredDeadLetter) -> dict[str, Any]:
    """Everything but the content; `left_out` says that the dead-letter topic was too small for it."""
    record = dead_letter.record
    return {
        "where": dead_letter.where,
        "topic": record.origin.topic,
        "partition": record.origin.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "set_aside_at": _time(dead_letter.written_ms),
        "reason": dead_letter.reason,
        "stage": dead_letter.stage,
        "message": dead_letter.message,
        "value_bytes": _value_bytes(dead_letter),
        "left_out": dead_letter.left_out_bytes is not None,
    }


def details(dead_letter: StoredDeadLetter, *, content: bool) -> dict[str, Any]:
    """One dead letter, with key, headers and value if `content` is asked for, else with their sizes."""
    record = dead_letter.record
    shown = row(dead_letter) | {
        "key_bytes": None if record.key is None else len(record.key),
        "headers": [{"name": name, "bytes": len(value)} for name, value in record.headers],
    }
    if content:
        shown["key"] = readable(record.key)
        shown["headers"] = [{"name": name, "value": readable(value)} for name, value in record.headers]
        shown["value"] = readable(record.value)
    return shown


def table(dead_letters: Sequence[StoredDeadLetter], total: int) -> RenderableType:
    """One row per dead letter; `total` is how many there are."""
    if not dead_letters:
        return "no dead letters" if not total else f"none of {total} dead letters is selected"
    left_out = total - len(dead_letters)
    return FittedTable(
        [
            FittedColumn("record", [each.where for each in dead_letters], 9, is_text=True),
            FittedColumn("time (UTC)", [_shown_time(each) for each in dead_letters], 1, is_text=True),
            FittedColumn("reason", [each.reason for each in dead_letters], 9, is_text=True),
            FittedColumn("bytes", [_bytes(each) for each in dead_letters]),
            FittedColumn("message", [_message(each) for each in dead_letters], 8, is_text=True),
        ],
        caption=f"The newest {len(dead_letters)}; {left_out} older ones are left out." if left_out > 0 else "",
    )


def readable(value: bytes | None) -> str | None:
    """Text, or base64 after `base64:` where it is none."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(value).decode()}"


def _value_bytes(dead_letter: StoredDeadLetter) -> int | None:
    """Size of the record's value, also of one that was left out; None for a record without a value."""
    value = dead_letter.record.value
    return dead_letter.left_out_bytes if value is None else len(value)


def _bytes(dead_letter: StoredDeadLetter) -> str:
    size = _value_bytes(dead_letter)
    return "-" if size is None else str(size)


def _message(dead_letter: StoredDeadLetter) -> str:
    return dead_letter.message if dead_letter.left_out_bytes is None else f"content left out; {dead_letter.message}"


def _shown_time(dead_letter: StoredDeadLetter) -> str:
    """When it was set aside, or, from a file, the record's own time."""
    time = _time(dead_letter.written_ms or dead_letter.record.timestamp_ms)
    return "-" if time is None else time[:19].replace("T", " ")


def _time(milliseconds: int | None) -> str | None:
    if not milliseconds or milliseconds < 0:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()
    except (ValueError, OverflowError):
        return None
