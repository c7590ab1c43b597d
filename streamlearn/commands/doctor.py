"""Everything that a start needs, looked at one after the other, with what to do about what is wrong.

Nothing is changed: no offset is committed, no snapshot written, no record trained, no model fetched. Every check goes
through the same door as a start does; one that needs another that failed is left out and says so.
"""

import importlib.util
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum

from rich.table import Table

from connectors.open import open_dead_letters, open_source
from streamlearn.adapters.check import check as check_adapter
from streamlearn.backbone import load as backbone_room
from streamlearn.backbone.arithmetic import choose
from streamlearn.backbone.load import Outline, device_of
from streamlearn.errors import (
    ConfigError,
    DeadLetterError,
    SnapshotDamagedError,
    SnapshotMismatchError,
    SourceError,
    StateLockedError,
    StreamlearnError,
)
from streamlearn.runtime.checkpoint import source_identity
from streamlearn.runtime.model import adapter_of, adapter_shape
from streamlearn.serve.token import obtain, token_path
from streamlearn.settings import Settings, fingerprint, with_backbone_defaults
from streamlearn.snapshot import compatibility
from streamlearn.snapshot.lock import StateLock
from streamlearn.snapshot.snapshot import Snapshot
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.record import Position

CODECS = {"lz4": "lz4", "snappy": "snappy", "zstd": "zstandard"}
"""Kafka's name of a codec -> the module that unpacks it; gzip is Python's own."""
SPARE = 2
"""Snapshots beyond snapshot.keep that may be on the disk: the one being written, and the one that it replaces."""
POLL_S, PATIENCE_S = 3.0, 10.0
EARLIEST_CLOCK = 1_767_225_600  # 2026: an unset clock says 1970
UNKNOWN_BYTES = 1 << 30


class Level(StrEnum):
    """How it stands."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Finding:
    """One check's."""

    name: str
    level: Level
    text: str
    """What was found and, where something is wrong, what to do."""
    exit_code: int = 0


@dataclass
class Doctor:
    """One configuration's checks, in the order of a start."""

    settings: Settings
    _shape: Outline | None = None
    _snapshot: Snapshot | None = None
    _locked: bool = False
    _failed: set[str] = field(default_factory=set)

    def examine(self) -> Iterator[Finding]:
        """Each finding as soon as it is there."""
        checks: tuple[tuple[str, Callable[[], tuple[Level, str]], tuple[str, ...]], ...] = (
            ("clock", self._clock, ()),
            ("backbone", self._backbone, ()),
            ("arithmetic", self._arithmetic, ()),
            ("state folder", self._state, ()),
            ("snapshots", self._snapshots, ("state folder", "backbone")),
            ("disk", self._disk, ("state folder",)),
            ("codecs", self._codecs, ()),
            ("source", self._source, ("snapshots",)),
            ("dead letters", self._dead_letters, ("state folder",)),
            ("http", self._http, ("state folder",)),
        )
        for name, check, needs in checks:
            missing = sorted(self._failed & set(needs))
            if missing:
                yield Finding(name, Level.LEFT_OUT, f"needs {', '.join(missing)}")
                continue
            try:
                level, text = check()
            except StreamlearnError as error:
                self._failed.add(name)
                yield Finding(name, Level.FAILED, str(error), error.exit_code)
            else:
                yield Finding(name, level, text)

    def _clock(self) -> tuple[Level, str]:
        now = time.time()
        said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
        if now < EARLIEST_CLOCK:
            return Level.WARNING, f"{said}: not set; TLS certificates will look invalid. Training does not depend on it"
        return Level.OK, said

    def _backbone(self) -> tuple[Level, str]:
        config = adapter_of(self.settings)
        if backbone_room.would_be_fetched(self.settings.backbone):
            self._failed.add("backbone")
            return Level.WARNING, (
                f"{self.settings.backbone.model} is not on this machine: the first start fetches it from the hub"
            )
        shape = self._shape = backbone_room.outline(self.settings.backbone)
        self.settings = with_backbone_defaults(self.settings, is_vision=shape.is_vision)
        check_adapter(config, shape.linears, shape.tower_linears)
        return (
            Level.OK,
            f"{self.settings.backbone.model} in {shape.folder}, adapter {self.settings.adapter.preset} fits",
        )

    def _arithmetic(self) -> tuple[Level, str]:
        device = device_of(self.settings.backbone)
        chosen = choose(self.settings.backbone.dtype, device)
        return Level.OK, f"{chosen.name} on {device}: {chosen.reason}"

    def _state(self) -> tuple[Level, str]:
        folder = self.settings.state
        if not folder.exists():
            above = next(parent for parent in folder.parents if parent.exists())
            if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
                raise ConfigError(f"{folder}: cannot be made, {above} takes no folders from this user; set state")
            return Level.OK, f"{folder} will be made"
        try:
            StateLock(folder).release()
        except StateLockedError as error:
            self._locked = True
            return Level.WARNING, f"a daemon is running on it: {error}"
        started = time.monotonic()
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
                file.write(b"0" * 4096)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{folder}: must take files, found: {error.strerror}") from error
        return Level.OK, f"{folder}, a durable write took {1e3 * (time.monotonic() - started):.1f} ms"

    def _snapshots(self) -> tuple[Level, str]:
        store = SnapshotStore(self.settings.state / "snapshots", keep=self.settings.snapshot.keep)
        names = store.names()
        if not names:
            return Level.OK, "none yet: a start begins a new run"
        damaged = []
        for name in reversed(names):
            try:
                store.verify(name)
            except SnapshotDamagedError as error:
                damaged.append(str(error))
                continue
            self._snapshot = store.load(name)
            break
        if self._snapshot is None:
            raise ConfigError(f"all {len(names)} are damaged, first {damaged[0]}; --fresh sets them aside")
        assert self._shape is not None
        backbone = backbone_room.identity(self.settings.backbone, self._shape)
        adapter = adapter_shape(adapter_of(self.settings))
        compatibility.check(self._snapshot.manifest, fingerprint(self.settings), backbone, adapter, accept=False)
        text = (
            f"{len(names)}, a start goes on from {self._snapshot.manifest.step} at {self._snapshot.manifest.position}"
        )
        return (Level.WARNING, f"{text}; damaged: {'; '.join(damaged)}") if damaged else (Level.OK, text)

    def _disk(self) -> tuple[Level, str]:
        folder = self.settings.state
        free = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
        store = SnapshotStore(folder / "snapshots", keep=self.settings.snapshot.keep)
        try:
            largest = max((info.bytes for info in store.infos()), default=UNKNOWN_BYTES)
        except SnapshotMismatchError:  # another format's; the check of snapshots says so
            largest = UNKNOWN_BYTES
        wanted = largest * (self.settings.snapshot.keep + SPARE)
        text = f"{free / 2**30:.1f} GiB free, {wanted / 2**30:.1f} GiB may be wanted for snapshots"
        if free < largest * SPARE:
            raise ConfigError(f"{folder}: {text}; make room, or point state to another disk")
        return (Level.OK if free >= wanted else Level.WARNING), text

    def _codecs(self) -> tuple[Level, str]:
        if self.settings.source.kafka is None:
            return Level.OK, "not needed: the source is a file"
        missing = [name for name, module in CODECS.items() if importlib.util.find_spec(module) is None]
        if missing:
            return Level.WARNING, (
                f"records compressed with {', '.join(missing)} cannot be read: pip install 'streamlearn[codecs]'"
            )
        return Level.OK, f"gzip, {', '.join(CODECS)}"

    def _source(self) -> tuple[Level, str]:
        position = self._snapshot.manifest.position if self._snapshot else Position({})
        remembered = source_identity(self._snapshot) if self._snapshot else {}
        with closing(open_source(self.settings.source, start_timeout_s=PATIENCE_S)) as source:
            found = source.seek(position, remembered)
            deadline = time.monotonic() + POLL_S
            read = 0
            while not read and not source.exhausted and time.monotonic() < deadline:
                read = len(source.poll(max_records=1, timeout_s=POLL_S / 4))
            lag = sum(source.lag(found).values())
        text = f"next {found}, {lag} offsets behind the end"
        if lag and not read:
            raise SourceError(f"{text}, but no record came in {POLL_S:g} s: is reading the topics allowed (ACL READ)?")
        lost = "; ".join(f"{origin} [{start}, {stop})" for origin, start, stop in position.gaps_to(found))
        return (
            (Level.WARNING, f"{text}; a start leaves out {lost}, as the configuration says")
            if lost
            else (Level.OK, text)
        )

    def _dead_letters(self) -> tuple[Level, str]:
        if self.settings.dead_letters.topic is not None:
            with closing(open_dead_letters(self.settings)) as sink:
                sink.mark()
            return Level.OK, f"topic {self.settings.dead_letters.topic}"
        file = self.settings.dead_letters.file or self.settings.state / "dead_letters.jsonl"
        above = next(each for each in (file, *file.parents) if each.exists())
        if not os.access(above, os.W_OK):
            raise DeadLetterError(f"{file}: {above} cannot be written; set dead_letters.file or dead_letters.topic")
        return Level.OK, f"{file}"

    def _http(self) -> tuple[Level, str]:
        serve = self.settings.serve
        if not serve.enabled:
            return Level.OK, "serve.enabled is false"
        if serve.token_file is not None or token_path(self.settings).exists():
            obtain(self.settings)
        for path in (serve.tls_certfile, serve.tls_keyfile):
            if path is not None and not os.access(path, os.R_OK):
                raise ConfigError(f"{path}: cannot be read, and serve.tls_certfile and serve.tls_keyfile need it")
        if self._locked or serve.port == 0:
            return Level.OK, f"{serve.host}:{serve.port or 'any port'}"
        family = socket.AF_INET6 if ":" in serve.host else socket.AF_INET
        try:
            socket.create_server((serve.host.strip("[]"), serve.port), family=family).close()
        except OSError as error:
            raise ConfigError(
                f"serve: {serve.host}:{serve.port} cannot be bound: {error.strerror}; set serve.port, 0 is any free one"
            ) from error
        return Level.OK, f"{serve.host}:{serve.port} is free"


STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "red", Level.LEFT_OUT: "dim"}


def row(finding: Finding) -> Table:
    """One line for a person; long texts wrap beneath themselves."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=12)
    table.add_column(width=8)
    table.add_column(overflow="fold")
    table.add_row(finding.name, f"[{STYLES[finding.level]}]{finding.level}[/]", _escaped(finding.text))
    return table


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
