"""In which order records became batches, so that a stream of several partitions replays bit for bit.

    {"step":7,"runs":[["orders",0,118,122,4],["orders",1,57,58,1]],"crc32":2774563121}

One line a batch; a run is topic, partition, first offset, next offset and number of records that follow each other in
the batch, runs in training order.
"""

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from streamlearn.errors import SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.snapshot.files import Files
from streamlearn.stream.batch import Run

log = get_logger("snapshot")


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One batch: the step that it becomes, and its records."""

    step: int
    runs: tuple[Run, ...]

    def to_line(self) -> bytes:
        """One line of JSON, its newline included."""
        body = {"step": self.step, "runs": [list(run) for run in self.runs]}
        return orjson.dumps({**body, "crc32": _checksum(self)}, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_line(cls, line: bytes) -> "JournalEntry":
        """The inverse of `to_line`. Raises ValueError, KeyError or TypeError for anything else."""
        values = orjson.loads(line)
        entry = cls(int(values["step"]), tuple(Run(*run) for run in values["runs"]))
        if values["crc32"] != _checksum(entry):
            raise ValueError("the checksum differs")
        return entry


class Journal:
    """The file of batch compositions, written by one thread.

    A line is appended by one `write` and no fsync: kill -9 loses nothing that was written, a power loss may lose the
    last lines. That costs no record, only the order in which several partitions are replayed after it: the snapshot's
    position alone decides what is trained.
    """

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self._path = path
        self._files = files if files is not None else Files()
        self._descriptor: int | None = None
        self._unwritten: list[JournalEntry] = []
        self.fault: SnapshotError | None = None
        """Why the newest lines are not in the file; None when they are."""

    def append(self, step: int, runs: Iterable[Run]) -> None:
        """Write down the batch of `step` before it is trained; steps only grow.

        A line that cannot be written leaves nothing in the file and is tried again before the next one; see `fault`.
        """
        self._unwritten.append(JournalEntry(step, tuple(runs)))
        lines = b"".join(entry.to_line() for entry in self._unwritten)
        try:
            descriptor = self._open()
            size = os.fstat(descriptor).st_size
            if os.write(descriptor, lines) != len(lines):
                os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, f"no room for {len(lines)} bytes")
        except OSError as error:
            self.fault = SnapshotError(
                f"{self._path}: must be writable, found: {error.strerror}; see that the disk works"
            )
        except SnapshotError as error:
            self.fault = error
        else:
            self.fault = None
            self._unwritten.clear()

    def entries(self, after_step: int) -> list[JournalEntry]:
        """The batches of later steps, in order; empty when there is no journal. A torn end is cut off the file.

        Raises:
            SnapshotError: the file cannot be read or cut.
        """
        return [entry for entry in [*self._whole(), *self._unwritten] if entry.step > after_step]

    def truncate(self, before_step: int) -> None:
        """Forget the batches of earlier steps: pass the oldest kept snapshot's. Atomic and durable.

        Raises:
            SnapshotError: the file cannot be rewritten; no line that was to stay is lost.
        """
        self._keep(lambda entry: entry.step >= before_step)

    def rewind(self, to_step: int) -> None:
        """Forget the batches of later steps, so that other batches may take their numbers. Atomic and durable.

        Raises:
            SnapshotError: the file cannot be rewritten; no line that was to stay is lost.
        """
        self._keep(lambda entry: entry.step <= to_step)

    def close(self) -> None:
        """Release the file. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        """The file for appending, its torn end cut off first: a line after it would be lost with it."""
        if self._descriptor is None:
            self._whole()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        return self._descriptor

    def _whole(self) -> list[JournalEntry]:
        try:
            data = self._path.read_bytes()
            found, end = _parse(data)
            if end < len(data):
                log.warning(
                    Event.JOURNAL_TRUNCATED,
                    fault=f"{self._path}: whole lines must follow byte {end}, found {len(data) - end} other bytes",
                    lost="the replay order of the batches after that",
                )
                os.truncate(self._path, end)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SnapshotError(f"{self._path}: must be readable and writable, found: {error.strerror}") from error
        return found

    def _keep(self, wanted: Callable[[JournalEntry], bool]) -> None:
        self._unwritten = list(filter(wanted, self._unwritten))
        found = self._whole()
        kept = [entry for entry in found if wanted(entry)]
        if len(kept) < len(found):
            self._rewrite(kept)

    def _rewrite(self, entries: Sequence[JournalEntry]) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            if fresh.exists():
                self._files.remove(fresh)
            self._files.write(fresh, b"".join(entry.to_line() for entry in entries))
            self._files.sync(fresh)
            self._files.rename(fresh, self._path)
            self.close()  # the descriptor is of the old file
            self._files.sync(self._path.parent)
        except OSError as error:
            raise SnapshotError(f"{self._path}: could not be rewritten: {error.strerror}") from error


def _parse(data: bytes) -> tuple[list[JournalEntry], int]:
    """The entries up to the first line that is not whole, or does not follow, and where that line begins."""
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
    return zlib.crc32(orjson.dumps([entry.step, [list(run) for run in entry.runs]]))
