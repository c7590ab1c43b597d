"""Reading of a file of dead letters, also while a daemon appends to it."""

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from connectors.stored_dead_letter import StoredDeadLetter, from_headers
from streamlearn.errors import DeadLetterError


def read_file(path: Path) -> Iterator[StoredDeadLetter]:
    """Yield every dead letter, oldest first; none if there is no file. An incomplete last line is left out.

    Raises:
        DeadLetterError: the file cannot be read, or a line is not a dead letter.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield _dead_letter(path, number, line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DeadLetterError(f"dead letters cannot be read: {path}: {error.strerror or error}") from error


def _dead_letter(path: Path, number: int, line: bytes) -> StoredDeadLetter:
    try:
        entry = orjson.loads(line)
        own = tuple((str(name), _bytes(value) or b"") for name, value in entry["record_headers"])
        found = from_headers(entry["headers"], value=_bytes(entry["value"]), key=_bytes(entry["key"]), own=own)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError, binascii.Error):
        found = None
    if found is None:
        raise DeadLetterError(
            f"{path}: expected a dead letter in line {number}, found another line. Move the file away"
        )
    return found


def _bytes(text: Any) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)
