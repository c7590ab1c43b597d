"""Controls: what an operator can change about a run, their audit log, and their durable state.

`VERBS` declares each control once. The HTTP routes, the paths that the client requests, the names in the audit log, the
methods that apply a control and the commands all follow from it.
"""

import errno
import getpass
import os
import secrets
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import orjson

from streamlearn.errors import SnapshotDamagedError, SnapshotError, StreamlearnError, UsageError
from streamlearn.events import Event, get_logger
from streamlearn.snapshot.files import Files
from streamlearn.stream.position import OffsetRange, Position, TopicPartition

if TYPE_CHECKING:  # commands import this module for --help
    from streamlearn.snapshot.journal import Journal
    from streamlearn.snapshot.parts import Snapshot
    from streamlearn.snapshot.store import SnapshotStore
    from streamlearn.stream.record import Batch

_log = get_logger("controls")


class Scope(StrEnum):
    """What a control changes; the value is its part of the HTTP path."""

    RUN = "/v1"
    SNAPSHOT = "/v1/snapshots/{snapshot}"
    REGIME = "/v1/regimes/{number}"


@dataclass(frozen=True, slots=True)
class Verb:
    """One kind of control."""

    name: str
    """In the audit log, in the path, on the command line, and the name of the method that applies it."""
    scope: Scope
    title: str
    help: str
    """One or two sentences, for the command line and the OpenAPI document."""
    done: str
    """What holds afterwards, for people, with the names of arguments in braces."""
    body: dict[str, str] = field(default_factory=dict)
    """Fields of the request's body, by the name of the argument in the audit log."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Arguments that a request may leave out."""
    change: "Callable[[ControlState, str], ControlState] | None" = None
    """The new control state, given the old one and the snapshot; None for what changes more than that."""

    @property
    def route(self) -> str:
        """Path with `{snapshot}` or `{number}` as a placeholder."""
        return f"{self.scope}/{self.name}"


VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            "pause",
            Scope.RUN,
            "Pause",
            "Take no step and read no record until `resume`, also after a restart.",
            "paused: no step is taken and no record is read until `streamlearn resume`",
            change=lambda state, _: replace(state, paused=True),
        ),
        Verb(
            "resume",
            Scope.RUN,
            "Resume",
            "Resume a paused daemon.",
            "resumed",
            change=lambda state, _: replace(state, paused=False),
        ),
        Verb(
            "pin",
            Scope.SNAPSHOT,
            "Pin a snapshot",
            "Never prune a snapshot.",
            "{snapshot} is pinned: it is never pruned",
            change=lambda state, snapshot: replace(state, pins=state.pins | {snapshot}),
        ),
        Verb(
            "unpin",
            Scope.SNAPSHOT,
            "Unpin a snapshot",
            "Let a snapshot be pruned again.",
            "{snapshot} is not pinned: it is pruned once snapshot.keep newer ones exist",
            change=lambda state, snapshot: replace(state, pins=state.pins - {snapshot}),
        ),
        Verb(
            "rollback",
            Scope.SNAPSHOT,
            "Roll back",
            "Continue from an earlier snapshot. Newer ones are moved aside; skipped records become dead letters.",
            "rolled back to {snapshot}",
            {"skip_records": "skip_records"},
            {"skip_records": ()},
        ),
        Verb(
            "freeze",
            Scope.REGIME,
            "Freeze a regime",
            "Stop training on a regime's records. It still answers.",
            "regime {number} is frozen",
        ),
        Verb(
            "unfreeze",
            Scope.REGIME,
            "Unfreeze a regime",
            "Train on a regime's records again.",
            "regime {number} is trained on again",
        ),
        Verb(
            "rename",
            Scope.REGIME,
            "Rename a regime",
            "Give a regime a name.",
            "regime {number} is named {new_name}",
            {"new_name": "name"},
        ),
        Verb(
            "approve",
            Scope.REGIME,
            "Approve a regime",
            "Publish a regime although its answers changed.",
            "regime {number} is published if it is no worse than the backbone",
        ),
        Verb(
            "drop",
            Scope.REGIME,
            "Drop a regime",
            "Forget a regime and its adapter. Older snapshots keep it.",
            "regime {number} is forgotten",
        ),
    )
}


@dataclass(frozen=True)
class Control:
    """A control that an operator requests, with its arguments as the audit log lists them."""

    verb: str
    arguments: dict[str, Any]

    @classmethod
    def run(cls, verb: str) -> Self:
        """A control of the whole run: `pause` or `resume`."""
        return cls(verb, {})

    @classmethod
    def snapshot(cls, verb: str, snapshot: str, **more: Any) -> Self:
        """A control of a snapshot; `rollback` also takes `skip_records`.

        Offsets are `TOPIC:PARTITION:FROM..TO`, or `FROM..TO` where there is one partition.
        """
        return cls(verb, {"snapshot": snapshot, **VERBS[verb].defaults, **more})

    @classmethod
    def regime(cls, verb: str, number: int, **more: Any) -> Self:
        """A control of a regime: training state, which a snapshot makes durable before the response."""
        return cls(verb, {"number": number, **more})

    @property
    def scope(self) -> Scope:
        return VERBS[self.verb].scope

    @property
    def path(self) -> str:
        return VERBS[self.verb].route.format(**{name: quote(str(value), "") for name, value in self.arguments.items()})

    @property
    def body(self) -> dict[str, Any]:
        return {key: self.arguments[name] for name, key in VERBS[self.verb].body.items()}


MAX_AGENT_CHARS = 200


@dataclass(frozen=True, slots=True)
class Requester:
    """A user of the command line, or a client of the HTTP endpoint."""

    user: str | None = None
    """User and host of a command, as `USER@HOST`."""
    peer: str | None = None
    """Address that a request came from."""
    token: bool | None = None
    """Whether the request had the right bearer token."""
    agent: str | None = None
    """User agent of the client; not verified."""

    @classmethod
    def from_process(cls) -> Self:
        """The user who runs this process."""
        try:
            name = getpass.getuser()
        except (KeyError, OSError):  # a user without a name, as in a container
            name = str(os.getuid())
        return cls(user=f"{name}@{socket.gethostname()}")

    @classmethod
    def from_request(cls, peer: str | None, *, token: bool, agent: str) -> Self:
        """The client of an HTTP request."""
        return cls(peer=peer or "unknown", token=token, agent=agent[:MAX_AGENT_CHARS])

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


# The audit log, `audit.jsonl` in the state folder: who requested what, when, and the outcome.
#
#     {"at":"2026-01-31T12:00:00.000+00:00","id":"5f0c...","who":{"user":"ann@box"},"control":"pause","arguments":{},
#      "result":"asked"}
#     {..., "id":"5f0c...", "result":"done"}
#
# A control that is applied has two lines with one id: `asked`, durable before anything changes, and its outcome,
# durable before the response. `asked` without an outcome means that the process died in between: the control took
# effect completely or not at all, and what the next start finished has its own line. A refusal may be the only line.


AUDIT_FILE_NAME = "audit.jsonl"


class Result(StrEnum):
    """Outcome of a control."""

    ASKED = "asked"
    """It is about to be applied."""
    DONE = "done"
    UNCHANGED = "unchanged"
    """The run was in that state already."""
    REFUSED = "refused"
    """Nothing was changed; the message says why."""
    FAILED = "failed"
    """It could not be applied, or not completely; the message says what holds."""


class ControlOutcome:
    """Outcome of a control in progress; whoever applies it sets `unchanged`."""

    unchanged = False


class AuditLog:
    """An append-only file. Each line is one write, so lines of several threads and processes do not mix."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._path = folder / AUDIT_FILE_NAME
        self._files = files if files is not None else Files()

    @contextmanager
    def applying(self, control: Control, who: Requester) -> Iterator[ControlOutcome]:
        """Write the two lines of a control around the block that applies it. Errors of the block pass through.

        Raises:
            SnapshotError: a line could not be written. If it is the first, the block was not entered.
        """
        number, outcome = secrets.token_hex(8), ControlOutcome()

        def write(result: Result, message: str = "") -> None:
            self.write(control.verb, control.arguments, who, result, message=message, number=number)

        write(Result.ASKED)
        try:
            yield outcome
        except StreamlearnError as error:
            write(Result.REFUSED if isinstance(error, UsageError) else Result.FAILED, str(error))
            raise
        except Exception as error:
            write(Result.FAILED, repr(error))
            raise
        write(Result.UNCHANGED if outcome.unchanged else Result.DONE)

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
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),  # noqa: TID251 - for people
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
                "No control is applied without its line"
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
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            self._files.sync(self._path.parent)


VERSION = 1
CONTROL_FILE_NAME = "controls.json"


class OtherVersionError(ValueError):
    """The content is intact, and of another version."""


@dataclass(frozen=True, slots=True)
class ControlState:
    """Pause, pins, skipped records, and a rollback in progress."""

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
            "skipped": [offsets.to_json() for offsets in self.skipped],
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


class ControlFile:
    """The control state, on disk and in memory. `write` requires the state lock; other processes may `read`."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        """Read the file; without one no control was applied yet.

        Raises:
            SnapshotError: see `read`.
        """
        self._path = folder / CONTROL_FILE_NAME
        self._files = files if files is not None else Files()
        self.state = read(folder)
        """The durable state."""

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
# A batch is trained on once later records were examined for shifts, so a snapshot may depend on records at and after
# its position. A record can be skipped exactly only if it lies at or after the offsets here; lying at or after the
# position is not enough.


def advanced(before: Position, position: Position, waiting: "Iterable[Batch]") -> Position:
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

      1. The snapshot is verified, and it is checked that no skipped record can have influenced it.
      2. Snapshot and skipped records are durable in the control file. Before this the run is the old one; from here on
         it is the rolled-back one: whoever takes the lock next repeats 3 to 5.
      3. Newer snapshots are moved aside, newest first.
      4. The journal is cut at the snapshot's step.
      5. The rollback is noted as finished. The skipped records stay in the control file.
      6. The run is restored from its newest snapshot, which is now that of the rollback; its reader leaves out the
         skipped records. A daemon does that next, or the next start.
    """

    def __init__(self, file: ControlFile, store: "SnapshotStore", journal: "Journal") -> None:
        self._file = file
        self._store = store
        self._journal = journal

    @property
    def state(self) -> ControlState:
        return self._file.state

    def apply(self, control: Control) -> bool:
        """Apply `pause`, `resume`, `pin` or `unpin`; return whether that changes anything.

        Raises:
            UsageError: there is no such snapshot.
            SnapshotError: it cannot be made durable.
        """
        old, change = self.state, VERBS[control.verb].change
        if change is None:
            raise UsageError(
                f"{control.verb} changes what a daemon has learned: start the daemon first; it may be paused"
            )
        snapshot = control.arguments.get("snapshot", "")
        if control.scope is Scope.SNAPSHOT:
            self._require(snapshot, [*self._store.names(), *old.pins])
        new = change(old, snapshot)
        self._file.write(new)
        return new != old

    def check_rollback(self, name: str, skip_records: Sequence[str]) -> tuple["Snapshot", tuple[OffsetRange, ...]]:
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
        position, examined = snapshot.manifest.position, snapshot.manifest.read_ahead
        ranges = tuple(OffsetRange.parse(text, position.keys()) for text in skip_records)
        for skipped in ranges:
            _require_topic(skipped, position)
            self._require_unread(skipped, name, position, examined)
        return snapshot, ranges

    def roll_back(self, name: str, skipped: Sequence[OffsetRange]) -> list[str]:
        """Apply a rollback that was checked, steps 2 to 5; return the snapshots that were moved aside.

        Raises:
            SnapshotError: it could not be completed. If it was decided by then, the next start completes it, and this
                process must not continue.
        """
        union = tuple(sorted({*self.state.skipped, *skipped}))
        self._file.write(replace(self.state, skipped=union, rolling_back_to=name))  # 2.
        return self.finish_rollback()

    def finish_rollback(self) -> list[str]:
        """Repeat steps 3 to 5 of an unfinished rollback, if any; raises and returns like `roll_back`."""
        name = self.state.rolling_back_to
        if name is None:
            return []
        moved = self._store.move_newer_aside(name)  # 3.
        self._journal.rewind(to_step=int(name))  # 4.
        pins = frozenset(pin for pin in self.state.pins if int(pin) <= int(name))  # later ones will be other snapshots
        self._file.write(replace(self.state, pins=pins, rolling_back_to=None))  # 5.
        return moved

    def forget_run(self) -> None:
        """Forget what belongs to a run that is being set aside: pins, skipped records, a rollback. A pause stays.

        Raises:
            SnapshotError: it cannot be made durable.
        """
        self._file.write(replace(self.state, pins=frozenset(), skipped=(), rolling_back_to=None))

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
            reached = self._store.manifest(info.name).read_ahead
            if int(info.name) < int(name) and reached.get(skipped.origin, 0) <= skipped.first:
                return f"roll back to {info.name}"
        return "every earlier snapshot depends on it too, so these records can no longer be skipped exactly"


def _require_topic(skipped: OffsetRange, position: Position) -> None:
    topics = sorted({origin.topic for origin in position})
    if skipped.origin.topic not in topics:
        raise UsageError(
            f"skipped records must be of a topic of this stream ({', '.join(topics) or 'none yet'}), found "
            f"{TopicPartition(skipped.origin.topic, skipped.origin.partition)}"
        )
