"""Putting dead letters back into their stream, each once: the protocols, and the way by a ledger.

A dead-letter topic holds the marks of what was put back, and each mark is written in one Kafka transaction with its
record: see `connectors.kafka.topic_replayer`. A dead-letter file has no transactions. There a ledger makes it exact:

1. The ledger names the dead letters that are about to be put back, and what is needed to find them there.
2. They are put back, all or none, durably.
3. The ledger says that it is done.

A process that is killed between 1. and 3. leaves an entry that is not done. The next replay looks at the target after
the place in the entry and finds out whether 2. took effect.
"""

import fcntl
import hashlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

from connectors.dead_letters import DeadLetterId, Repair
from streamlearn.errors import DeadLetterError, UsageError


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


class Replayer(Protocol):
    """Puts dead letters back and knows which were."""

    def replayed(self) -> frozenset[DeadLetterId]:
        """Those that were put back, by this or any earlier process."""

    def put_back(self, repairs: Sequence[Repair]) -> None:
        """Put back all or none, durably.

        Raises:
            DeadLetterError: it is not known to be done; the next process finds out.
        """

    def close(self) -> None:
        """Release everything. Safe to call twice."""


class ReplayTarget(Protocol):
    """Where records are put back."""

    def plan(self, repairs: Sequence[Repair]) -> dict[str, Any]:
        """What is needed to find them there later, JSON-ready, without their content. Raises DeadLetterError."""

    def put(self, repairs: Sequence[Repair]) -> None:
        """Append all or none, durably. Raises DeadLetterError."""

    def arrived(self, plan: dict[str, Any]) -> bool:
        """Whether what an earlier process planned was put. Raises DeadLetterError if that cannot be known."""

    def close(self) -> None:
        """Release the target. Safe to call twice."""


class LedgerReplayer:
    """The three steps."""

    def __init__(self, ledger: ReplayLedger, target: ReplayTarget) -> None:
        """Find out what became of an entry that is not done.

        Raises:
            DeadLetterError: that cannot be known, or the ledger cannot be written.
        """
        self._ledger = ledger
        self._target = target
        if ledger.pending is not None:
            ledger.finish(arrived=target.arrived(ledger.pending.plan))

    def replayed(self) -> frozenset[DeadLetterId]:
        """Those that the ledger calls done."""
        return self._ledger.done

    def put_back(self, repairs: Sequence[Repair]) -> None:
        """Put back all or none, durably; see `Replayer`."""
        self._ledger.begin([repair.dead_letter.id for repair in repairs], self._target.plan(repairs))  # 1.
        self._target.put(repairs)  # 2.
        self._ledger.finish(arrived=True)  # 3.

    def close(self) -> None:
        """Release ledger and target. Safe to call twice."""
        self._target.close()
        self._ledger.close()


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
