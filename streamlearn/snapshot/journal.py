"""The journal of batch compositions: a stream of one partition replays bit for bit, flushes included.

    {"step":7,"runs":[["orders",0,118,122,4],["orders",1,57,58,1]],"crc32":325759481}
    {"step":8,"runs":[["orders",1,58,59,1]],"flush":true,"crc32":3209051203}

One line per batch. A run is topic, partition, first offset, next offset and number of consecutive records of one
partition in the batch; runs are in training order. `flush` marks the last batch before a flush: nothing that was read
by then waited for more records.
"""

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from streamlearn.errors import SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.snapshot.files import Files
from streamlearn.stream.position import PartitionRun

_log = get_logger("snapshot")


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One batch: its training step, and its records."""

    step: int
    runs: tuple[PartitionRun, ...]
    flush: bool = False
    """Whether the stream was flushed after it."""

    def to_line(self) -> bytes:
        """Return one line of JSON, including the newline."""
        body: dict[str, Any] = {"step": self.step, "runs": [list(run) for run in self.runs]}
        if self.flush:
            body["flush"] = True
        return orjson.dumps({**body, "crc32": _checksum(self)}, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_line(cls, line: bytes) -> "JournalEntry":
        """Read the output of `to_line`. Raises ValueError, KeyError or TypeError for anything else."""
        values = orjson.loads(line)
        runs = tuple(PartitionRun(*run) for run in values["runs"])
        entry = cls(int(values["step"]), runs, values.get("flush", False))
        if values["crc32"] != _checksum(entry):
            raise ValueError("the checksum differs")
        return entry


class Journal:
    """The journal file, written by one thread.

    The line of a batch is appended with one `write` and no fsync. kill -9 loses nothing that was written; a power loss
    may lose the last lines. No record is lost with them, because the snapshot's position decides what is trained. The
    lines of a flush are durable.
    """

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self._path = path
        self._files = files if files is not None else Files()
        self._descriptor: int | None = None
        self._unwritten: list[JournalEntry] = []
        self.fault: SnapshotError | None = None
        """Why the newest lines are not in the file; None when they are."""

    def append(self, step: int, runs: Iterable[PartitionRun]) -> None:
        """Append the batch of `step` before it is trained; steps must increase.

        A line that cannot be written leaves nothing in the file. It is retried before the next line, and by `retry`;
        see `fault`.
        """
        self._unwritten.append(JournalEntry(step, tuple(runs)))
        self.retry()

    @property
    def lags(self) -> bool:
        """Whether lines wait to be written."""
        return bool(self._unwritten)

    def retry(self) -> None:
        """Append the lines that could not be written, all or none; see `fault`."""
        lines = b"".join(entry.to_line() for entry in self._unwritten)
        try:
            descriptor = self._open()
            size = os.fstat(descriptor).st_size
            if os.write(descriptor, lines) != len(lines):
                os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, f"no room for {len(lines)} bytes")
        except OSError as error:
            self.fault = SnapshotError(
                f"{self._path}: must be writable, found: {error.strerror}; check the disk's free space and health"
            )
        except SnapshotError as error:
            self.fault = error
        else:
            self.fault = None
            self._unwritten.clear()

    def append_flush(self, entries: Sequence[JournalEntry]) -> None:
        """Append the batches of a flush before it happens: all of them, durably, or none; see `fault`.

        Nothing is retried: without the flush the records may end in other batches.

        Raises:
            SnapshotError: they are in the file, but neither durable nor removable.
        """
        try:
            self._rewrite([*self._load(), *self._unwritten, *entries])
        except SnapshotError as error:
            self.fault = error
            self.rewind(to_step=entries[0].step - 1)
        else:
            self.fault = None
            self._unwritten.clear()

    def entries(self, after_step: int) -> list[JournalEntry]:
        """Return the batches after `after_step`, in order; empty when there is no journal.

        An incomplete end is removed from the file first.

        Raises:
            SnapshotError: the file cannot be read or truncated.
        """
        return [entry for entry in [*self._load(), *self._unwritten] if entry.step > after_step]

    def truncate(self, before_step: int) -> None:
        """Remove the batches before `before_step`, the oldest kept snapshot's step. Atomic and durable.

        Raises:
            SnapshotError: the file cannot be rewritten; no line that was to be kept is lost.
        """
        self._keep(lambda entry: entry.step >= before_step)

    def rewind(self, to_step: int) -> None:
        """Remove the batches after `to_step`, so that other batches can take their step numbers. Atomic and durable.

        Raises:
            SnapshotError: the file cannot be rewritten; no line that was to be kept is lost.
        """
        self._keep(lambda entry: entry.step <= to_step)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        """Open the file for appending, without its incomplete end: a line after that end would be lost with it."""
        if self._descriptor is None:
            self._load()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        return self._descriptor

    def _load(self) -> list[JournalEntry]:
        """Read the complete lines and truncate the file after them."""
        try:
            data = self._path.read_bytes()
            entries, end = _parse(data)
            if end < len(data):
                _log.warning(
                    Event.JOURNAL_TRUNCATED,
                    fault=f"{self._path}: expected complete lines, found {len(data) - end} other bytes at byte {end}",
                    lost="the composition of the batches after that byte",
                )
                os.truncate(self._path, end)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SnapshotError(f"{self._path}: must be readable and writable, found: {error.strerror}") from error
        return entries

    def _keep(self, wanted: Callable[[JournalEntry], bool]) -> None:
        self._unwritten = list(filter(wanted, self._unwritten))
        entries = self._load()
        kept = [entry for entry in entries if wanted(entry)]
        if len(kept) < len(entries):
            self._rewrite(kept)

    def _rewrite(self, entries: Sequence[JournalEntry]) -> None:
        """Replace the file atomically and durably."""
        try:
            self._files.replace(self._path, b"".join(entry.to_line() for entry in entries))
        except OSError as error:
            raise SnapshotError(f"{self._path}: could not be rewritten: {error.strerror}") from error
        finally:
            self.close()  # the descriptor belongs to the old file


def _parse(data: bytes) -> tuple[list[JournalEntry], int]:
    """Return the entries before the first incomplete or out-of-order line, and the byte where that line begins."""
    entries: list[JournalEntry] = []
    end = 0
    for line in data.splitlines(keepends=True):
        try:
            entry = JournalEntry.from_line(line)
        except (ValueError, KeyError, TypeError):
            break
        if not line.endswith(b"\n") or (entries and entry.step <= entries[-1].step):
            break
        entries.append(entry)
        end += len(line)
    return entries, end


def _checksum(entry: JournalEntry) -> int:
    flush = [True] if entry.flush else []
    return zlib.crc32(orjson.dumps([entry.step, [list(run) for run in entry.runs], *flush]))
