"""A JSONL file that dead letters are put back into: the end of the file that a source reads."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from connectors.stored_dead_letter import Repair
from streamlearn.errors import DeadLetterError, UsageError


class JsonlTarget:
    """Appends lines with one write. A source that follows the file reads them; another does so at its next start."""

    def __init__(self, path: Path) -> None:
        """Check the file.

        Raises:
            UsageError: it is gzip, which cannot be appended to.
        """
        if path.suffix == ".gz":
            raise UsageError(f"dead letters can be put back into a plain file only, found {path}: decompress it")
        self._path = path

    def plan(self, repairs: Sequence[Repair]) -> dict[str, Any]:
        """The file's length, and the hash of each line that is to follow."""
        try:
            size = self._path.stat().st_size
        except OSError as error:
            raise self._fault(error) from error
        return {"bytes": size, "lines": [_hash(_line(repair)) for repair in repairs]}

    def put(self, repairs: Sequence[Repair]) -> None:
        """Append each value as a line; see `ReplayTarget`."""
        try:
            with self._path.open("a+b", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                first = b"" if file.read(1) in (b"", b"\n") else b"\n"
                data = first + b"".join(map(_line, repairs))
                if (written := file.write(data)) != len(data):
                    raise DeadLetterError(f"{self._path} had space for {written} of {len(data)} bytes only")
                os.fsync(file.fileno())
        except OSError as error:
            raise self._fault(error) from error

    def arrived(self, plan: dict[str, Any]) -> bool:
        """Whether the lines are in the file after its length then; see `ReplayTarget`."""
        wanted = set(plan["lines"])
        try:
            with self._path.open("rb") as file:
                file.seek(plan["bytes"])
                found = wanted & {_hash(line) for line in file}
        except OSError as error:
            raise self._fault(error) from error
        if found and found != wanted:
            raise DeadLetterError(
                f"a replay into {self._path} was cut short after {len(found)} of {len(wanted)} lines. Remove them "
                f"after byte {plan['bytes']} (if nothing else was appended: truncate --size={plan['bytes']} "
                f"{self._path}), then replay again"
            )
        return bool(found)

    def close(self) -> None:
        """Nothing is kept open."""

    def _fault(self, error: OSError) -> DeadLetterError:
        return DeadLetterError(f"{self._path} must be readable and writable: {error.strerror or error}")


def _line(repair: Repair) -> bytes:
    return repair.value.replace(b"\n", b" ") + b"\n"  # strict JSON has line breaks between tokens only


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
