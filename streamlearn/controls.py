"""The controls: what an operator can ask of a run."""

import getpass
import os
import secrets
import socket
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

import orjson

from streamlearn.errors import SnapshotDamagedError, SnapshotError, StreamlearnError, UsageError
from streamlearn.events import Event, get_logger
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.journal import Journal
from streamlearn.snapshot.manifest import Manifest
from streamlearn.snapshot.parts import Snapshot
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.batch import Batch
from streamlearn.stream.record import OffsetRange, Position, TopicPartition


@dataclass(frozen=True, slots=True)
class Control:
    """Something that an operator asks of a run."""

    name: ClassVar[str]

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields, for the audit log."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Pause(Control):
    """Take no step and read no record until `Resume`."""

    name = "pause"


@dataclass(frozen=True, slots=True)
class Resume(Control):
    """Go on after `Pause`."""

    name = "resume"


@dataclass(frozen=True, slots=True)
class Pin(Control):
    """Never prune a snapshot."""

    name = "pin"
    snapshot: str


@dataclass(frozen=True, slots=True)
class Unpin(Control):
    """Let a snapshot be pruned again."""

    name = "unpin"
    snapshot: str


@dataclass(frozen=True, slots=True)
class RollBack(Control):
    """Go on from an earlier snapshot, and never train on some records."""

    name = "rollback"
    snapshot: str
    skip_records: tuple[str, ...] = ()
    """Offsets, each `TOPIC:PARTITION:FROM..TO`, or `FROM..TO` where there is one partition."""


@dataclass(frozen=True, slots=True)
class RegimeControl(Control):
    """A change of one regime: training state, which a snapshot makes durable before the answer."""

    number: int


@dataclass(frozen=True, slots=True)
class FreezeRegime(RegimeControl):
    """Train no more on a regime's records."""

    name = "freeze"


@dataclass(frozen=True, slots=True)
class UnfreezeRegime(RegimeControl):
    """Train on a regime's records again."""

    name = "unfreeze"


@dataclass(frozen=True, slots=True)
class RenameRegime(RegimeControl):
    """Give a regime a name."""

    name = "rename"
    new_name: str


@dataclass(frozen=True, slots=True)
class ApproveRegime(RegimeControl):
    """Publish what a regime learned although its answers changed."""

    name = "approve"


@dataclass(frozen=True, slots=True)
class DropRegime(RegimeControl):
    """Forget a regime."""

    name = "drop"


MAX_AGENT_CHARS = 200


@dataclass(frozen=True, slots=True)
class Requester:
    """A user of the command line, or a client of the HTTP endpoint."""

    user: str | None = None
    """User and host of a command, as `USER@HOST`."""
    peer: str | None = None
    """Address that a request came from."""
    token: bool | None = None
    """Whether the request gave the right bearer token."""
    agent: str | None = None
    """What the client calls itself; not verified."""

    @classmethod
    def of_this_process(cls) -> Self:
        """The user who runs this process."""
        try:
            name = getpass.getuser()
        except (KeyError, OSError):  # a user without a name, as in a container
            name = str(os.getuid())
        return cls(user=f"{name}@{socket.gethostname()}")

    @classmethod
    def of_request(cls, peer: str | None, *, token: bool, agent: str) -> Self:
        """The client of an HTTP request."""
        return cls(peer=peer or "unknown", token=token, agent=agent[:MAX_AGENT_CHARS])

    def to_json(self) -> dict[str, Any]:
        """The known fields."""
        fields = {"user": self.user, "peer": self.peer, "token": self.token, "agent": self.agent}
        return {name: value for name, value in fields.items() if value is not None}


# The audit log, `audit.jsonl` in the state folder: who asked for what, when, and what became of it.
#
#     {"at":"2026-01-31T12:00:00.000+00:00","id":"5f0c...","who":{"user":"ann@box"},"control":"pause","arguments":{},
#      "result":"asked"}
#     {..., "id":"5f0c...", "result":"done"}
#
# A control that is carried out has two lines with one id: `asked`, durable before anything changes, and its outcome,
# durable before it is answered. After `asked` without an outcome the process died meanwhile: the control took effect
# completely or not at all, and what a start finished has a line of its own. A refusal may be the only line.


NAME = "audit.jsonl"
_log = get_logger("controls")


class Result(StrEnum):
    """What became of a control."""

    ASKED = "asked"
    """It is about to be carried out."""
    DONE = "done"
    UNCHANGED = "unchanged"
    """It was so already."""
    REFUSED = "refused"
    """Nothing was changed; the message says why."""
    FAILED = "failed"
    """It could not be carried out, or not completely; the message says what holds."""


class ControlOutcome:
    """The outcome of a control under way; `unchanged` is set by who carries it out."""

    unchanged = False


class AuditLog:
    """An append-only file. Lines of several threads and processes do not mix: each is one write."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._path = folder / NAME
        self._files = files if files is not None else Files()

    @contextmanager
    def carrying_out(self, control: Control, who: Requester) -> Iterator[ControlOutcome]:
        """Write the two lines of a control around the block that carries it out; its errors pass.

        Raises:
            SnapshotError: a line could not be written. If it is the first, the block was not entered.
        """
        number, outcome = secrets.token_hex(8), ControlOutcome()
        self.write(control.name, control.arguments, who, Result.ASKED, number=number)
        try:
            yield outcome
        except StreamlearnError as error:
            result = Result.REFUSED if isinstance(error, UsageError) else Result.FAILED
            self.write(control.name, control.arguments, who, result, message=str(error), number=number)
            raise
        except Exception as error:
            self.write(control.name, control.arguments, who, Result.FAILED, message=repr(error), number=number)
            raise
        result = Result.UNCHANGED if outcome.unchanged else Result.DONE
        self.write(control.name, control.arguments, who, result, number=number)

    def write(
        self,
        control: str,
        arguments: dict[str, Any],
        who: Requester,
        result: Result,
        *,
        message: str = "",
        number: str | None = None,
    ) -> None:
        """Append one line; it is durable when this returns. `number` identifies the control among its lines.

        Raises:
            SnapshotError: it could not be written.
        """
        line = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": number or secrets.token_hex(8),
            "who": who.to_json(),
            "control": control,
            "arguments": arguments,
            "result": result,
            **({"message": message} if message else {}),
        }
        try:
            self._append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        except OSError as error:
            raise SnapshotError(
                f"{self._path}: must be writable, found: {error.strerror}; check the disk's free space and health. "
                "No control is carried out without its line"
            ) from error
        if result is not Result.ASKED:
            event = Event.CONTROL_REFUSED if result in (Result.REFUSED, Result.FAILED) else Event.CONTROL_APPLIED
            _log.info(event, control=control, arguments=arguments, who=who.to_json(), result=result, message=message)

    def _append(self, line: bytes) -> None:
        is_new = not self._path.exists()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # by a power loss
            data = b"\n" + line if torn else line
            if os.write(descriptor, data) != len(data):
                os.ftruncate(descriptor, size)
                raise OSError(28, "No space left on device")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            self._files.sync(self._path.parent)


VERSION = 1


class OtherVersionError(ValueError):
    """The content is intact, and of another version."""


@dataclass(frozen=True, slots=True)
class ControlState:
    """Pause, pins, skipped records, and a rollback that is under way."""

    paused: bool = False
    """Whether no step is taken and no record is read."""
    pins: frozenset[str] = frozenset()
    """Names of the snapshots that are never pruned."""
    skipped: tuple[OffsetRange, ...] = ()
    """Records that are never trained on from here on, sorted."""
    rolling_back_to: str | None = None
    """Name of the snapshot of a rollback that was decided and is not finished."""

    def to_bytes(self) -> bytes:
        """One line of JSON with a checksum."""
        body = {
            "version": VERSION,
            "paused": self.paused,
            "pins": sorted(self.pins),
            "skipped": [each.to_json() for each in self.skipped],
            "rolling_back_to": self.rolling_back_to,
        }
        return orjson.dumps({**body, "crc32": _checksum(body)}, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of `to_bytes`.

        Raises:
            OtherVersionError: another release wrote it.
            ValueError, KeyError, TypeError: it is damaged.
        """
        body = orjson.loads(data)
        if body.pop("crc32") != _checksum(body):
            raise ValueError("the checksum differs")
        if body["version"] != VERSION:
            raise OtherVersionError(body["version"])
        skipped = tuple(OffsetRange.from_json(row) for row in body["skipped"])
        return cls(bool(body["paused"]), frozenset(body["pins"]), skipped, body["rolling_back_to"])


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))


CONTROL_FILE_NAME = "controls.json"


class ControlFile:
    """The control state, on disk and in memory. `write` requires the state lock; other processes may `read`."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        """Read the file; without one nothing was asked yet.

        Raises:
            SnapshotError: see `read`.
        """
        self._path = folder / CONTROL_FILE_NAME
        self._files = files if files is not None else Files()
        self.state = read(folder)
        """What is durable."""

    def write(self, state: ControlState) -> None:
        """Replace the state atomically; it is durable when this returns.

        Raises:
            SnapshotError: it could not be written; a start may find the old state or the new one.
        """
        if state == self.state:
            return
        try:
            self._files.replace(self._path, state.to_bytes())
        except OSError as error:
            raise SnapshotError(
                f"{self._path}: must be writable, found: {error.strerror}; check the disk's free space and health"
            ) from error
        self.state = state


def read(folder: Path) -> ControlState:
    """Read the control state of a state folder.

    Raises:
        SnapshotError: the file is damaged, of another version, or cannot be read.
    """
    path = folder / CONTROL_FILE_NAME
    try:
        return ControlState.from_bytes(path.read_bytes())
    except FileNotFoundError:
        return ControlState()
    except OSError as error:
        raise SnapshotError(f"{path}: must be readable, found: {error.strerror}") from error
    except OtherVersionError as error:
        raise SnapshotError(
            f"{path}: this streamlearn reads version {VERSION}, found version {error}: run the release that wrote it"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(
            f"{path}: expected the controls of a run, found {error!r}: restore the file from a backup. If there is "
            "none, move it away, and repeat pause, pins and skipped records as audit.jsonl lists them"
        ) from error


# How far a run had read when it wrote a snapshot.
#
# A batch is trained on once later records were examined for shifts, so what a snapshot holds may depend on records at
# and
# after its position. Only before the offsets here, and not merely before the position, is a record known to have had no
# influence.


def read_ahead(manifest: Manifest) -> Position:
    """Per partition, the offset after the last record that had been examined."""
    return manifest.read_ahead


def advanced(before: Position, position: Position, waiting: Iterable[Batch]) -> Position:
    """The furthest of two positions and of the batches that wait to be trained on."""
    reached = dict(before)
    ends = [(run.origin, run.next_offset) for batch in waiting for run in batch.runs]
    for origin, offset in [*position.items(), *ends]:
        reached[origin] = max(offset, reached.get(origin, 0))
    return Position(reached)


class StateControls:
    """Pause, pins and rollbacks of one state folder, whose lock the process holds.

    Each is durable when its method returns, and leaves either the old state or the new one when the process dies.

    A rollback:

      1. The snapshot is verified, and that no skipped record can have had an influence on it.
      2. Snapshot and skipped records are durable in the control file. Before this the run is the old one; from here on
         it is the rolled-back one: whoever takes the lock next repeats 3 to 5.
      3. Newer snapshots are moved aside, newest first.
      4. The journal is cut at the snapshot's step.
      5. The rollback is noted as finished. The skipped records stay in the control file.
      6. The run is restored from its newest snapshot, which is now that of the rollback; its reader leaves out the
         skipped records. A daemon does that next, or the next start.
    """

    def __init__(self, file: ControlFile, store: SnapshotStore, journal: Journal) -> None:
        self._file = file
        self._store = store
        self._journal = journal

    @property
    def paused(self) -> bool:
        """Whether no step is taken and no record is read."""
        return self._file.state.paused

    @property
    def pins(self) -> Collection[str]:
        """Names of the pinned snapshots."""
        return self._file.state.pins

    @property
    def skipped(self) -> Sequence[OffsetRange]:
        """Records that are never trained on."""
        return self._file.state.skipped

    def pause(self, paused: bool) -> bool:
        """Pause or resume; return whether that changes anything.

        Raises:
            SnapshotError: it cannot be made durable.
        """
        changed = paused != self.paused
        self._file.write(replace(self._file.state, paused=paused))
        return changed

    def pin(self, name: str) -> bool:
        """Keep a snapshot from being pruned; return whether that changes anything.

        Raises:
            UsageError: there is no such snapshot.
            SnapshotError: it cannot be made durable.
        """
        self._require(name, self._store.names())
        return self._set_pins(self._file.state.pins | {name})

    def unpin(self, name: str) -> bool:
        """Let a snapshot be pruned again. Raises and returns like `pin`."""
        self._require(name, [*self._store.names(), *self.pins])
        return self._set_pins(self._file.state.pins - {name})

    def check_rollback(self, name: str, skip_records: Sequence[str]) -> tuple[Snapshot, tuple[OffsetRange, ...]]:
        """Return the snapshot and the offsets that a rollback means; step 1.

        Raises:
            UsageError: there is no such snapshot, it is damaged, an offset range is not usable, or the snapshot may
                depend on records in it.
            SnapshotError: the snapshot cannot be read.
        """
        self._require(name, self._store.names())
        try:
            snapshot = self._store.load(name)
        except SnapshotDamagedError as error:
            raise UsageError(f"snapshot {name} must be intact, found: {error}; roll back to another one") from error
        position, examined = snapshot.manifest.position, read_ahead(snapshot.manifest)
        ranges = tuple(OffsetRange.parse(text, position.keys()) for text in skip_records)
        for skipped in ranges:
            _require_topic(skipped, position)
            self._require_unread(skipped, name, position, examined)
        return snapshot, ranges

    def roll_back(self, name: str, skipped: Sequence[OffsetRange]) -> list[str]:
        """Carry out a rollback that was checked, steps 2 to 5; return the snapshots that were moved aside.

        Raises:
            SnapshotError: it could not be completed. If `rolling_back` is true then, the next start completes it, and
                this process must not go on.
        """
        state = self._file.state
        union = tuple(sorted({*state.skipped, *skipped}))
        self._file.write(replace(state, skipped=union, rolling_back_to=name))  # 2.
        return self.finish_rollback()

    @property
    def rolling_back(self) -> bool:
        """Whether a rollback is decided and not finished."""
        return self._file.state.rolling_back_to is not None

    def finish_rollback(self) -> list[str]:
        """Repeat steps 3 to 5 of a rollback that is under way, if any; raises and returns like `roll_back`."""
        name = self._file.state.rolling_back_to
        if name is None:
            return []
        moved = self._store.move_newer_aside(name)  # 3.
        self._journal.rewind(to_step=int(name))  # 4.
        pins = frozenset(pin for pin in self.pins if int(pin) <= int(name))  # later ones will be other snapshots
        self._file.write(replace(self._file.state, pins=pins, rolling_back_to=None))  # 5.
        return moved

    def forget_run(self) -> None:
        """Forget what belongs to a run that is being set aside: pins, skipped records, a rollback. A pause stays.

        Raises:
            SnapshotError: it cannot be made durable.
        """
        self._file.write(replace(self._file.state, pins=frozenset(), skipped=(), rolling_back_to=None))

    def _set_pins(self, pins: frozenset[str]) -> bool:
        changed = pins != self.pins
        self._file.write(replace(self._file.state, pins=pins))
        return changed

    def _require(self, name: str, names: Sequence[str]) -> None:
        if name not in names:
            listed = ", ".join(names) or "none"
            raise UsageError(f"expected the name of a snapshot in {self._store.folder}, found {name!r:.40}: {listed}")

    def _require_unread(self, skipped: OffsetRange, name: str, position: Position, examined: Position) -> None:
        origin = skipped.origin
        if skipped.first < position.get(origin, 0):
            reason = f"it was trained up to offset {position[origin] - 1} of {origin}"
        elif skipped.first < examined.get(origin, 0):
            reason = (
                f"it was written when offsets up to {examined[origin] - 1} of {origin} had been examined for shifts"
            )
        else:
            return
        raise UsageError(
            f"snapshot {name} must not depend on skipped records, and it may depend on offset {skipped.first}: "
            f"{reason}; {self._advice(skipped, name)}"
        )

    def _advice(self, skipped: OffsetRange, name: str) -> str:
        for info in reversed(self._store.infos()):
            reached = read_ahead(self._store.manifest(info.name))
            if int(info.name) < int(name) and reached.get(skipped.origin, 0) <= skipped.first:
                return f"roll back to {info.name}"
        return "no earlier snapshot does not, so that these records can no longer be skipped exactly"


def _require_topic(skipped: OffsetRange, position: Position) -> None:
    topics = sorted({origin.topic for origin in position})
    if skipped.origin.topic not in topics:
        raise UsageError(
            f"skipped records must be of a topic of this stream ({', '.join(topics) or 'none yet'}), found "
            f"{TopicPartition(skipped.origin.topic, skipped.origin.partition)}"
        )
