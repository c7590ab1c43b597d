"""A file that says which dead letters were put back."""

import fcntl
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from connectors.stored_dead_letter import DeadLetterId
from streamlearn.errors import DeadLetterError


@dataclass(frozen=True)
class Pending:
    """Dead letters that were about to be put back."""

    ids: frozenset[DeadLetterId]
    plan: dict[str, Any]
    """How to find them in the target."""


class ReplayLedger:
    """Append-only JSON Lines, each line durable before `begin` and `finish` return. One process at a time."""

    def __init__(self, path: Path) -> None:
        """Open or create the ledger.

        Raises:
            DeadLetterError: it cannot be read or written, it is damaged, or another process replays.
        """
        self._path = path
        self.done: frozenset[DeadLetterId] = frozenset()
        self.pending: Pending | None = None
        """What was begun and neither done nor undone."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file: IO[bytes] = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b")
        except OSError as error:
            raise self._fault(error.strerror or str(error)) from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def begin(self, ids: Collection[DeadLetterId], plan: dict[str, Any]) -> None:
        """Note that these are about to be put back."""
        assert self.pending is None, "finish the entry before first"
        self.pending = Pending(frozenset(ids), plan)
        self._append({"begun": sorted(map(str, ids)), "plan": plan})

    def finish(self, *, arrived: bool) -> None:
        """Note whether those that were begun were put back."""
        assert self.pending is not None, "begin first"
        self._append({"arrived": arrived})
        self._apply(arrived)

    def close(self) -> None:
        """Release the lock. Safe to call twice."""
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DeadLetterError(f"{self._path} is in use: another replay runs. Wait until it has ended") from error

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        complete = content.rfind(b"\n") + 1
        os.truncate(self._file.fileno(), complete)  # a line that a kill cut short
        for number, line in enumerate(content[:complete].splitlines(), start=1):
            try:
                entry = orjson.loads(line)
                if "begun" in entry:
                    self.pending = Pending(frozenset(map(DeadLetterId.parse, entry["begun"])), entry["plan"])
                else:
                    self._apply(entry["arrived"])
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise self._fault(f"line {number} is damaged; restore the file, it says what was put back") from error

    def _apply(self, arrived: bool) -> None:
        if arrived and self.pending is not None:
            self.done |= self.pending.ids
        self.pending = None

    def _append(self, entry: dict[str, Any]) -> None:
        try:
            self._file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._fault(error.strerror or str(error)) from error

    def _fault(self, what: str) -> DeadLetterError:
        return DeadLetterError(f"the ledger of replayed dead letters must be usable: {self._path}: {what}")
