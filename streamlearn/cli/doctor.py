"""The doctor command: every precondition of a start, checked in order, with what to do about each fault.

Nothing is changed: no offset is committed, no snapshot written, no record trained on, no model fetched. Each check
calls the code that a start calls. A check is skipped if one that it depends on failed.

`--step` also loads the model, as long as a start takes, and trains on the largest batch that the configuration allows.
Published versions are not verified. Model servers, the hub and MLflow are not asked, because a start does not need
them.
"""

import importlib.util
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from rich.text import Text

from connectors.open import open_dead_letters, open_source
from streamlearn import track as tracking
from streamlearn.adapters.presets import activated_parameters, adapter_bytes, snapshot_bytes
from streamlearn.adapters.presets import check as check_adapter
from streamlearn.backbone.load import Outline, choose, device_of, load_preprocessing, outline
from streamlearn.backbone.load import identity as backbone_identity
from streamlearn.daemon.checkpoint import StreamState
from streamlearn.daemon.model import Model, adapter_of, adapter_shape, decoder_of
from streamlearn.errors import (
    ConfigError,
    DeadLetterError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotMismatchError,
    SourceError,
    StateLockedError,
    StreamlearnError,
    without_credentials,
)
from streamlearn.http.guards import obtain_token, token_path
from streamlearn.http.server import Listener, bind, tls_context
from streamlearn.learner.learner import Rehearsal
from streamlearn.model_files import find_start, locate
from streamlearn.publish import open as publishing
from streamlearn.regimes.canaries import read_canaries
from streamlearn.settings import Settings, fingerprint, with_defaults
from streamlearn.snapshot.files import LOCK, DeadLetterLock, StateLock
from streamlearn.snapshot.manifest import check_compatible
from streamlearn.snapshot.parts import Snapshot
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.position import Position
from streamlearn.stream.record import Example

CODECS = {"lz4": "lz4", "snappy": "snappy", "zstd": "zstandard"}
"""Kafka's name of a codec -> the module that decompresses it; gzip is in the standard library."""
STATE_FILES = ("journal.jsonl", "in_progress", "crashes.json", "history.jsonl")
"""Files of the state folder that a start opens for writing; the lock is checked by taking it."""
SPARE = 2
"""Snapshots beyond snapshot.keep that may be on disk: the one being written, and the one that it replaces."""
COPIES = 3
"""Copies of each offloaded adapter on disk: two in snapshots, to which other snapshots link, and its own file."""
POLL_S, PATIENCE_S = 3.0, 10.0
EARLIEST_CLOCK = 1_767_225_600  # 2026: a clock that was never set reads 1970
UNKNOWN_BYTES = 1 << 30
"""Size assumed for a snapshot before there is one."""


class Level(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    level: Level
    text: str
    """The result and, if something is wrong, what to do."""
    exit_code: int = 0
    """What `run` would exit with; 0 unless the check failed."""


@dataclass
class Doctor:
    """The checks of one configuration, in the order of a start."""

    settings: Settings
    takes_step: bool = False
    """Whether the model is loaded and takes its largest step; minutes for a large one."""
    _shape: Outline | None = None
    _snapshot: Snapshot | None = None
    _locked: bool = False
    _failed: set[str] = field(default_factory=set)

    def examine(self) -> Iterator[Finding]:
        """Run the checks; yields each finding as soon as it is known."""
        checks: tuple[tuple[str, Callable[[], tuple[Level, str]], tuple[str, ...]], ...] = (
            ("clock", self._clock, ()),
            ("backbone", self._backbone, ()),
            ("trackers", self._trackers, ()),
            ("arithmetic", self._arithmetic, ()),
            ("state folder", self._state, ()),
            ("publishing", self._publishing, ()),
            ("snapshots", self._snapshots, ("state folder", "backbone")),
            ("disk", self._disk, ("state folder",)),
            ("regimes", self._regimes, ("backbone", "state folder")),
            ("codecs", self._codecs, ()),
            ("source", self._source, ("snapshots",)),
            ("dead letters", self._dead_letters, ("state folder",)),
            ("http", self._http, ("state folder",)),
        )
        if self.takes_step:
            checks += (("step", self._step, ("backbone", "arithmetic")),)
        for name, run_check, needs in checks:
            missing = sorted(self._failed & set(needs))
            if missing:
                yield Finding(name, Level.SKIPPED, f"needs {', '.join(missing)}")
                continue
            try:
                level, text = run_check()
            except StreamlearnError as error:
                self._failed.add(name)
                yield Finding(name, Level.FAILED, str(error), error.exit_code)
            else:
                yield Finding(name, level, without_credentials(text))

    def _clock(self) -> tuple[Level, str]:
        now = time.time()  # noqa: TID251 - warns that the clock is not set
        text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
        if now < EARLIEST_CLOCK:
            return Level.WARNING, (
                f"{text}: the clock is not set, so TLS certificates will look invalid. Training does not depend on it"
            )
        return Level.OK, text

    def _backbone(self) -> tuple[Level, str]:
        config, model = adapter_of(self.settings), self.settings.backbone.model
        if missing := _not_here(self.settings):
            self._failed.add("backbone")
            return Level.WARNING, f"{missing} is not on this machine: the first start fetches it from the hub"
        shape = self._shape = outline(self.settings.backbone, self.settings.adapter)
        self.settings = with_defaults(self.settings, is_vision=shape.is_vision, per_regime=config.per_regime)
        check_adapter(config, shape.linears, shape.tower_linears)
        decoder_of(self.settings, load_preprocessing(self.settings.backbone, shape))  # template, registry
        return Level.OK, f"{model} in {shape.folder}, adapter {self.settings.adapter.preset} fits"

    def _publishing(self) -> tuple[Level, str]:
        own = self.settings.publish
        if own is None:
            return Level.OK, "off: there is no section publish"
        publishing.check(self.settings, adapter_of(self.settings), self._shape)
        publishing.check_disk(self.settings)
        folder = self.settings.published_folder
        assert folder is not None
        if (folder / LOCK).exists() and not self._locked:
            publishing.folder_lock(folder).release()
        targets = [f"{folder}{'' if folder.exists() else ', which will be created'}"]
        if isinstance(own.folder, str):
            targets.append(f"copied to {own.folder}")
        if own.vllm is not None:
            targets.append(f"model servers: {len(own.vllm.replicas)}, not asked")
        if own.hub is not None:
            targets.append(f"hub repository {own.hub.repository}")
        if (fault := publishing.fault_of_store(self.settings)) is not None:
            return Level.WARNING, f"{fault}; training does not depend on it, and nothing is published until it answers"
        return Level.OK, "; ".join(targets)

    def _trackers(self) -> tuple[Level, str]:
        track = self.settings.track
        if track is None:
            return Level.OK, "off: there is no section track"
        tracking.check(self.settings)
        targets = [f"{track.tensorboard}"] if track.tensorboard is not None else []
        targets += [f"{track.mlflow.uri}, not asked"] if track.mlflow is not None else []
        obstacle = None if track.tensorboard is None else _obstacle_to_create(track.tensorboard / "events")
        if obstacle:
            return Level.WARNING, f"{track.tensorboard} cannot be written, {obstacle}; training does not depend on it"
        return Level.OK, "; ".join(targets)

    def _arithmetic(self) -> tuple[Level, str]:
        device = device_of(self.settings.backbone)
        chosen = choose(self.settings.backbone.dtype, device)
        return Level.OK, f"{chosen.name} on {device}: {chosen.reason}"

    def _state(self) -> tuple[Level, str]:
        folder = self.settings.state
        if not folder.exists():
            if obstacle := _obstacle_to_create(folder):
                raise SnapshotError(f"{folder}: cannot be created, {obstacle}; set state to another folder")
            return Level.OK, f"{folder} will be created"
        try:
            StateLock(folder).release()
        except StateLockedError as error:
            self._locked = True
            return Level.WARNING, f"a daemon is running: {error}"
        started = time.monotonic()
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
                file.write(b"0" * 4096)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{folder}: expected a writable folder, found: {error.strerror}; set state") from error
        seconds = time.monotonic() - started
        for path in (folder / name for name in STATE_FILES):
            if obstacle := _obstacle_to_append(path):
                raise SnapshotError(f"{path}: must be readable and writable, found: {obstacle}")
        return Level.OK, f"{folder}, a durable write took {1e3 * seconds:.1f} ms"

    def _snapshots(self) -> tuple[Level, str]:
        store = SnapshotStore(self.settings.state / "snapshots", keep=self.settings.snapshot.keep)
        names, damaged = store.names(), list[str]()
        for name in reversed(names):
            try:
                store.verify(name)
            except SnapshotDamagedError as error:
                damaged.append(str(error))
                continue
            self._snapshot = store.load(name)
            break
        if self._snapshot is None:
            moved_aside = sorted(map(str, store.folder.glob("damaged-*")))
            if not damaged and not moved_aside:
                return Level.OK, "none yet: a start begins a new run"
            raise SnapshotError(
                f"expected a valid snapshot in {store.folder}, found only damaged ones: "
                f"{'; '.join(damaged or moved_aside)}; restore one from a copy, or start again with --fresh, which "
                "keeps them"
            )
        assert self._shape is not None
        backbone = backbone_identity(self.settings.backbone, self._shape)
        adapter = adapter_shape(adapter_of(self.settings))
        manifest = self._snapshot.manifest
        check_compatible(manifest, fingerprint(self.settings), backbone, adapter, accept=False)
        text = f"{len(names)}, a start resumes after step {manifest.step} at {manifest.position}"
        return (Level.WARNING, f"{text}; damaged: {'; '.join(damaged)}") if damaged else (Level.OK, text)

    def _disk(self) -> tuple[Level, str]:
        folder = self.settings.state
        free = _free_disk(folder)
        store = SnapshotStore(folder / "snapshots", keep=self.settings.snapshot.keep)
        try:
            largest = max((info.bytes for info in store.infos()), default=UNKNOWN_BYTES)
        except SnapshotMismatchError:  # of another format; the check of snapshots reports it
            largest = UNKNOWN_BYTES
        needed = largest * (self.settings.snapshot.keep + SPARE)
        text = f"{free / 2**30:.1f} GiB free, snapshots may need {needed / 2**30:.1f} GiB"
        if free < largest * SPARE:
            raise ConfigError(f"{folder}: {text}; free some space, or set state to a folder on another disk")
        return (Level.OK if free >= needed else Level.WARNING), text

    def _regimes(self) -> tuple[Level, str]:
        config, limit = adapter_of(self.settings), self.settings.shift.max_regimes
        if not config.per_regime:
            return Level.OK, f"at most {limit}, which share one adapter"
        assert self._shape is not None, "the check of the backbone came before"
        one = adapter_bytes(config, self._shape.linears)
        in_memory = min(limit, self.settings.adapter.max_in_memory)
        disk, free = snapshot_bytes(config, self._shape.linears) * limit * COPIES, _free_disk(self.settings.state)
        text = f"at most {limit} adapters of {one / 2**20:.1f} MiB: {_gib(disk)} of disk, "
        text += f"{_gib(one * in_memory)} of memory for {in_memory} of them (adapter.max_in_memory)"
        if disk > free:
            return Level.WARNING, f"{text}; {_gib(free)} of disk are free: lower shift.max_regimes"
        return Level.OK, text

    def _step(self) -> tuple[Level, str]:
        """Take the largest step twice; the second time the optimizer has its moments from the start."""
        assert self._shape is not None, "the check of the backbone came before"
        settings, device = self.settings, device_of(self.settings.backbone)
        with tempfile.TemporaryDirectory(prefix="streamlearn-") as folder:
            model = Model(settings, self._shape, adapter_of(settings), None, Path(folder))
            learner, batch = model.learner, _largest_batch(settings, model.backbone.vocab_size)
            slots = [0] * len(batch) if learner.routes_by_regime else None
            rehearses = settings.learner.rehearsal > 0
            rehearsed = [Rehearsal(batch, slots or ())] * settings.learner.updates_per_batch if rehearses else []
            started = time.monotonic()
            for _ in range(2):
                step = learner.step(batch, slots, rehearsed=rehearsed)
            seconds = (time.monotonic() - started) / 2
        text = (
            f"{settings.stream.batch_tokens:,} tokens in records of {settings.stream.max_tokens:,} took "
            f"{seconds:.1f} s; peak memory {_gib(_peak_memory(device))}"
        )
        if rehearses:
            text += ", with as many rehearsed"
        if self._shape.is_vision:
            text += ", without images"
        if step.refusal is not None:
            return Level.WARNING, f"{text}; {step.refusal}"
        return Level.OK, text

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
        remembered = self._snapshot.component("stream", StreamState).source_identity if self._snapshot else {}
        with closing(open_source(self.settings.source, start_timeout_s=PATIENCE_S)) as source:
            start = source.seek(position, remembered)
            deadline = time.monotonic() + POLL_S
            num_read = 0
            while not num_read and not source.exhausted and time.monotonic() < deadline:
                num_read = len(source.poll(max_records=1, timeout_s=POLL_S / 4))
            lag = sum(source.lag(start).values())
        if not start:
            return Level.WARNING, "no topic matches source.kafka.topics.pattern yet"
        text = f"next {start}, {lag} offsets behind the end"
        if lag and not num_read:
            raise SourceError(
                f"{text}, but no record arrived in {POLL_S:g} s: check that this user may read the topics (ACL READ)"
            )
        lost = "; ".join(f"{origin} [{first}, {stop})" for origin, first, stop in position.gaps_to(start))
        if lost:
            return Level.WARNING, f"{text}; a start skips {lost}, as source.kafka.offset.gap.policy allows"
        return Level.OK, text

    def _dead_letters(self) -> tuple[Level, str]:
        if self.settings.dead_letters.topic is not None:
            with closing(open_dead_letters(self.settings, start_timeout_s=PATIENCE_S)) as sink:
                sink.mark()
            return Level.OK, f"topic {self.settings.dead_letters.topic}"
        file = self.settings.dead_letter_file
        assert file is not None, "no topic is set"
        obstacle = _obstacle_to_append(file) if file.exists() else _obstacle_to_create(file)
        if obstacle:
            raise DeadLetterError(f"{file}: cannot be written, {obstacle}; set dead_letters.file or dead_letters.topic")
        if self.settings.dead_letters.file is not None and file.exists() and not self._locked:
            DeadLetterLock(file).release()
        return Level.OK, f"{file}"

    def _http(self) -> tuple[Level, str]:
        serve = self.settings.serve
        listeners = []
        if serve.enabled:
            if serve.token_file is not None or token_path(self.settings).exists():
                obtain_token(self.settings)
            listeners.append(Listener.for_requests(serve))
        if serve.health_port is not None:
            listeners.append(Listener.for_health(serve))
        if not listeners:
            return Level.OK, "off: serve.enabled is false"
        for listener in listeners:
            tls_context(listener)
        if self._locked:
            return Level.OK, "in use by the running daemon"
        for listener in listeners:
            bind(listener).close()
        free = [f"{to.host}:{to.port} is free" if to.port else f"{to.host}, any free port" for to in listeners]
        return Level.OK, ", ".join(free)


def _free_disk(folder: Path) -> int:
    """Bytes free on the disk of a folder that may not exist yet."""
    return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free


def _largest_batch(settings: Settings, vocab_size: int) -> list[Example]:
    """Records of `stream.max_tokens` random tokens, all learned, that fill `stream.batch_tokens`."""
    generator = np.random.default_rng(0)
    length, total = settings.stream.max_tokens, settings.stream.batch_tokens
    lengths = [min(length, total - start) for start in range(0, total, length)]
    ids = [generator.integers(0, vocab_size, size=tokens, dtype=np.int32) for tokens in lengths]
    return [Example(input_ids=tokens, labels=tokens.copy()) for tokens in ids]


def _peak_memory(device: torch.device) -> int:
    """The most that this process has had on the device, bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def _obstacle_to_create(path: Path) -> str | None:
    """The reason that this user cannot create a file or folder; None if it can."""
    above = next(parent for parent in path.parents if parent.exists())
    if not above.is_dir():
        return f"{above} is not a folder"
    return None if os.access(above, os.W_OK | os.X_OK) else f"no write permission in {above}"


def _obstacle_to_append(file: Path) -> str | None:
    """The reason that this user cannot read and append to a file; None if it can, or if there is no such file."""
    try:
        file.open("r+b").close()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror
    return None


STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "red", Level.SKIPPED: "dim"}


def finding_table(finding: Finding) -> Table:
    """A finding as one row for a terminal; a long text wraps within its column."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=12)
    table.add_column(width=8)
    table.add_column(overflow="fold")
    table.add_row(finding.name, Text(finding.level, style=STYLES[finding.level]), Text(finding.text))
    return table


def check_backbone(settings: Settings) -> str:
    """Check backbone, adapter, publication and trackers as a start does, and return the result as one sentence.

    What is on the hub and not on this machine is not fetched; the adapter is then not checked.

    Raises:
        ConfigError: `run` would refuse one of them.
    """
    config = adapter_of(settings)
    _check_device_name(settings.backbone.device)
    name = settings.backbone.model
    missing = _not_here(settings)
    shape = None if missing else outline(settings.backbone, settings.adapter)
    if shape is not None:
        check_adapter(config, shape.linears, shape.tower_linears)
        decoder = decoder_of(settings, load_preprocessing(settings.backbone, shape))  # also checks the chat template
        publishing.check_canaries(settings, read_canaries(settings.holdout.canaries, decoder, settings.stream))
    publishing.check(settings, config, shape)
    tracking.check(settings)
    if shape is None:
        unchecked = "adapter and canaries" if settings.holdout.canaries else "adapter"
        return f"valid; {missing} would be fetched on first start, {unchecked} not checked"
    activated = activated_parameters(config, shape.linears)
    return f"valid; adapter {settings.adapter.preset} fits {name}, {activated:,} parameters activated per token"


def _not_here(settings: Settings) -> str | None:
    """Name of what the first start would fetch from the hub, if anything.

    Raises:
        ConfigError: see `locate` and `find_start`.
    """
    backbone, adapter = settings.backbone, settings.adapter
    if locate(backbone) is None:
        return f"backbone {backbone.model}"
    return f"adapter {adapter.start}" if adapter.start and find_start(adapter, download=False) is None else None


def _check_device_name(name: str) -> None:
    """Refuse a device that no machine has. Whether this machine has it is for `doctor` to check."""
    if name == "auto":
        return
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"backbone.device: expected auto, cpu, cuda or cuda:N, found {name!r}") from error
