"""Regimes of each snapshot, published as plain LoRAs, in a thread of its own.

For the newest snapshot:

1. The gate tests every regime whose weights changed (`regime_gate`); the forward passes are made by the loop, between
   steps and within `publish.time_share`.
2. What passed is written as versions, each complete or absent.
3. Every replica that answers loads them. If none answers, or one refuses, nothing is published, and all is tried
   again.
4. The routing state of the snapshot is written.
5. `publication.json` is replaced: from here on gateways send requests to the new versions.
6. The hub gets a commit.
7. After `publish.vllm.drain_s` the replicas unload what was replaced, and old files are removed.

After a rollback versions of steps that were undone are withdrawn first: `publication.json` is replaced by one without
them, whatever becomes of the snapshot. What is still to be withdrawn is noted in the state folder. A publication that
was under way is given up, before 4 or before 5.

A process that is killed before 5 has published nothing; its next start unloads and removes what nothing names. A
replica that was away loads what it lacks when it is back: until then it does not list the version, and gateways do not
ask it.
"""

import math
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.backbone.load import Outline
from streamlearn.codec import from_arrays
from streamlearn.errors import ConfigError, PublicationError, SnapshotError, StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.export.formats import BaseModel, ExportedRegime, card
from streamlearn.learner.learner import Learner
from streamlearn.publish import folder as publication_files
from streamlearn.publish.folder import ADAPTERS, ROUTING, TOKENIZER, PublicationFiles
from streamlearn.publish.gate import Gate, HeldBack
from streamlearn.publish.publication import FILE, Publication, PublishedRegime, RollbackFile, Version
from streamlearn.publish.regime_gate import Candidate, PublishingStoppedError, RegimeDecision, RegimeGate, ScoringQueue
from streamlearn.publish.replicas import Replica, ReplicaSet
from streamlearn.publish.snapshot import SnapshotRegimes
from streamlearn.regimes.holdout import TimeBudget
from streamlearn.settings import HubSettings, PublishSettings, Settings
from streamlearn.shift.memory import Profiles
from streamlearn.shift.monitor import MonitorState
from streamlearn.snapshot.parts import Snapshot, read_manifest
from streamlearn.status import PublicationStatus, RegimePublication

RETRY_S = 5.0
"""Time between two looks at what is pending, where there are no replicas."""
UPLOAD_RETRY_S = 60.0
STOP_S = 60.0
"""Maximum time for what is under way when the daemon stops; systemd waits 90 s for all of it."""

_log = get_logger("publish")


@dataclass(frozen=True)
class Targets:
    """Where publications go."""

    folder: PublicationFiles
    tokenizer: str
    """Path of the tokenizer in the folder."""
    base: BaseModel
    """The backbone as users of the versions find it; its name is that under which replicas serve it."""
    replicas: ReplicaSet
    upload: Callable[[Publication], None] | None
    """Commits the folder to a repository on the hub."""


class AdapterPublisher:
    """The thread. `notify`, `withdraw_after` and `status` may be used by any other."""

    def __init__(
        self,
        settings: Settings,
        config: HeadLoraConfig,
        run: str,
        targets: Targets,
        scoring: ScoringQueue,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to publish.

        Args:
            settings: The configuration, with a section `publish`.
            config: The adapter's options: one expert a head, one adapter a regime.
            run: Identifies the daemon's run: regimes of another are not compared with its own.
            targets: Where publications go.
            scoring: Where hold-out records are scored.
            clock: Monotonic time in seconds.
        """
        assert settings.publish is not None
        self._settings, self._own, self._config, self._run = settings, settings.publish, config, run
        self._targets = targets
        self.scoring = scoring
        self._clock = clock
        self._gate = RegimeGate(Gate(self._own.level, self._own.min_holdout_records), scoring, targets.folder)
        self._lock = threading.Lock()
        self._pending: Path | None = None
        self._rollback_file = RollbackFile(settings.state)
        self._last_step = self._rollback_file.read()
        """Versions of later steps are withdrawn before anything else is published."""
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._is_abandoned = False
        self._publication = _newest(targets.folder.folder)
        self._routing = [] if self._publication is None else [self._publication.routing]
        """Routing states that are kept: gateways may still be reading the one before the newest."""
        self._unpublished: dict[str, Version] = {}
        """Versions that are written and not loaded everywhere, by hash of the weights."""
        self._held_back: set[tuple[int, str, str]] = set()
        """What is held back: number of the regime, hash of the weights, reason."""
        drain_s = 0.0 if self._own.vllm is None else self._own.vllm.drain_s
        self._draining = {version.name: clock() + drain_s for version in targets.folder.versions()}
        """When each version that replicas may still be asked for is unloaded, by name."""
        self._upload_pending = targets.upload is not None and self._publication is not None
        self._upload_at = -math.inf
        self._upload_fault: str | None = None
        self._status = replace(_status(self._publication), replicas=targets.replicas.status)
        self._thread = threading.Thread(target=self._work, name="publish", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def notify(self, snapshot: Path) -> None:
        """Publish this snapshot, the newest; one that waits is skipped."""
        with self._lock:
            self._pending = snapshot
        self._wake.set()

    def withdraw_after(self, step: int) -> None:
        """The run goes on from a snapshot: versions of later steps are withdrawn, by the next process if need be."""
        with self._lock:
            self._pending = None  # the snapshot that the run goes on from follows
            if step < self._last_step:
                self._last_step = step
                self._note_rollback(step)
        self._wake.set()

    @property
    def status(self) -> PublicationStatus:
        """What is published, and what is wrong. Immutable."""
        return self._status

    @property
    def is_started(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """Whether the newest snapshot was published, or cannot be now."""
        return (self._pending is None and not self._wake.is_set()) or self._status.fault is not None

    def close(self) -> None:
        """Stop; what was not published is tested again after the next start. Safe to call twice.

        Waits at most `STOP_S` for a replica, the hub or the disk; then what was under way is given up.
        """
        self._stopping.set()
        self._wake.set()
        self.scoring.close()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            self._is_abandoned = True
            _log.warning(Event.PUBLICATION_FAILED, fault=f"given up: it did not end within {STOP_S:g} s of the stop")
        self._targets.replicas.close()

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                faults = [self._attempt(part) for part in (self._publish_pending, self._reconcile, self._upload)]
            except PublishingStoppedError:
                return
            self._note(next((fault for fault in faults if fault is not None), None))
            self._wake.wait(RETRY_S if self._own.vllm is None else self._own.vllm.interval_s)
            self._wake.clear()

    def _attempt(self, part: Callable[[], str | None]) -> str | None:
        """Do one part of a turn. Returns what is wrong; the other parts are done all the same."""
        if self._is_abandoned:
            raise PublishingStoppedError("the daemon has stopped")
        try:
            return part()
        except PublishingStoppedError:
            raise
        except StreamlearnError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - the training run goes on, whatever happens to a publication
            _log.exception(Event.PUBLICATION_FAILED)
            return f"{type(error).__name__}: {error}"

    def _publish_pending(self) -> str | None:
        """Withdraw what was undone, then publish the newest snapshot. Returns why it could not be published, if so."""
        with self._lock:
            pending, last_step = self._pending, self._last_step
        self._withdraw(last_step, pending)
        fault = None
        if pending is not None:
            fault = self._publish(pending)
            with self._lock:
                if fault is None and self._pending is pending:  # another of the same name may have come
                    self._pending = None
        return fault

    def _withdraw(self, last_step: float, pending: Path | None) -> None:
        """Publish without the versions of later steps, which were undone.

        The rollback is forgotten only if `pending` is still the newest snapshot: else it may be undone by another one.
        """
        if last_step == math.inf:
            return
        undone = [version for version in self._published().values() if version.step > last_step]
        self._unpublished = {key: each for key, each in self._unpublished.items() if each.step <= last_step}
        if undone:
            self._publish_without(undone)
        with self._lock:
            if self._last_step == last_step and self._pending is pending:
                self._rollback_file.remove()
                self._last_step = math.inf

    def _publish_without(self, undone: Sequence[Version]) -> None:
        """Replace the publication by one without these versions; the backbone answers their regimes."""
        started, newest = self._clock(), self._publication
        assert newest is not None
        names = {version.name for version in undone}
        self._put(_without(newest, names))
        regimes = [replace(each, version=None) if each.version in names else each for each in self._status.regimes]
        self._status = replace(self._status, regimes=tuple(regimes))
        for version in undone:
            _log.warning(Event.VERSION_WITHDRAWN, version=version.name, regime=version.regime)
        self._log_written(new=0, started=started)

    def _note_rollback(self, step: int) -> None:
        """Make a rollback durable. If that fails, this process still withdraws what was undone."""
        try:
            self._rollback_file.write(step)
        except PublicationError as error:
            _log.warning(Event.PUBLICATION_FAILED, fault=str(error))

    def _publish(self, path: Path) -> str | None:
        """Steps 1 to 5. Returns why versions that the gate let pass could not be loaded, if so."""
        started, folder = self._clock(), self._targets.folder
        try:
            snapshot = SnapshotRegimes(Snapshot(path, read_manifest(path)), self._settings, self._config)
            decisions = self._gate.decide(snapshot, self._published())  # 1.
            candidates = [decision.candidate for decision in decisions if decision.candidate is not None]
            fresh = {each.regime.number: self._write(each, snapshot) for each in candidates}  # 2.
            arrays = snapshot.routing_state()
        except SnapshotError:
            if path.exists():
                raise
            return None  # it was pruned: a newer one is on its way
        fault = self._targets.replicas.fault_of_loading([version.name for version in fresh.values()])  # 3.
        if self._is_undone(snapshot.step):
            return None
        if fault is not None:
            self._show([_not_loaded(decision) for decision in decisions])
            return fault
        routing = folder.write_routing(snapshot.step, arrays)  # 4.
        if self._is_undone(snapshot.step):
            return None
        self._replace(snapshot, decisions, fresh, routing, from_arrays(MonitorState, arrays).detector.regimes)  # 5.
        self._log_written(new=len(fresh), started=started)
        return None

    def _is_undone(self, step: int) -> bool:
        """Whether the run went back to before this step since the turn began, or ended without waiting."""
        with self._lock:
            return self._is_abandoned or step > self._last_step

    def _published(self) -> dict[int, Version]:
        """Versions of this run that the newest publication names, by regime."""
        names = self._publication.adapters if self._publication is not None else ()
        versions = [Version.read(self._targets.folder.path(name)) for name in names]
        return {each.regime: each for each in versions if each.run == self._run}

    def _write(self, candidate: Candidate, snapshot: SnapshotRegimes) -> Version:
        """Write a version, unless an earlier attempt to publish these weights has."""
        folder, regime = self._targets.folder, candidate.regime
        written = self._unpublished.get(regime.weights_sha256)
        if written is not None and written.holdout == tuple(sorted(candidate.losses)):
            return written
        version = Version(
            name=folder.unused_name(f"{self._own.name}-regime-{regime.number}", snapshot.step),
            run=self._run,
            regime=regime.number,
            step=snapshot.step,
            weights_sha256=regime.weights_sha256,
            holdout=tuple(sorted(candidate.losses)),
            loss=candidate.backbone.loss,
            backbone_loss=candidate.backbone.other_loss,
        )
        exported = ExportedRegime(
            name=version.name,
            regime=regime.number,
            label=regime.label or "",
            snapshot=snapshot.snapshot.name,
            written=snapshot.snapshot.manifest.created_at,
            records=regime.records,
            visits=regime.visits,
            base=self._targets.base,
            form="peft",
            rank=candidate.lora.rank,
            alpha=candidate.lora.alpha,
            num_linears=len(candidate.lora.layers),
            is_approximate=False,
            losses=None,  # the gate's are in version.json
        )
        folder.write_version(version, candidate.lora, card(exported))
        self._unpublished[regime.weights_sha256] = version
        return version

    def _replace(
        self,
        snapshot: SnapshotRegimes,
        decisions: Sequence[RegimeDecision],
        fresh: Mapping[int, Version],
        routing: str,
        profiles: Profiles,
    ) -> None:
        """Step 5, and what follows from it at once."""
        versions = {each.regime.number: fresh.get(each.regime.number, each.version) for each in decisions}
        named = {number: version.name for number, version in versions.items() if version is not None}
        self._put(self._next_publication(snapshot, routing, published_regimes(profiles, snapshot.labels, named)))
        self._unpublished = {}
        self._routing = [*self._routing[-1:], routing]
        for version in fresh.values():
            _log.info(
                Event.VERSION_PUBLISHED,
                version=version.name,
                regime=version.regime,
                loss=round(version.loss, 4),
                backbone_loss=round(version.backbone_loss, 4),
                records=len(version.holdout),
            )
        self._show([_published_as(decision, named.get(decision.regime.number)) for decision in decisions])
        self._status = replace(self._status, num_published=self._status.num_published + len(fresh))

    def _put(self, publication: Publication) -> None:
        """Replace the publication; what it names no more is unloaded after a while."""
        before = self._publication
        publication.write(self._targets.folder.folder, self._targets.folder.files)
        self._publication = publication
        self._upload_pending = self._targets.upload is not None
        drain_s = 0.0 if self._own.vllm is None else self._own.vllm.drain_s
        gone = set(before.adapters if before is not None else ()) - set(publication.adapters)
        self._draining |= dict.fromkeys(gone, self._clock() + drain_s)
        self._status = replace(
            self._status,
            sequence=publication.sequence,
            snapshot=publication.snapshot,
            written_at=publication.written_at.timestamp(),
        )

    def _log_written(self, *, new: int, started: float) -> None:
        _log.info(
            Event.PUBLICATION_WRITTEN,
            sequence=self._status.sequence,
            snapshot=self._status.snapshot,
            new=new,
            seconds=round(self._clock() - started, 2),
        )

    def _next_publication(
        self, snapshot: SnapshotRegimes, routing: str, regimes: tuple[PublishedRegime, ...]
    ) -> Publication:
        return Publication(
            name=self._own.name,
            sequence=0 if self._publication is None else self._publication.sequence + 1,
            written_at=datetime.now(UTC),  # noqa: TID251 - for people
            snapshot=snapshot.snapshot.name,
            backbone=self._targets.base.name,
            seed=self._settings.seed,
            max_known_rejected=self._settings.serve.max_known_rejected,
            routing=routing,
            tokenizer=self._targets.tokenizer,
            regimes=regimes,
        )

    def _reconcile(self) -> None:
        """Step 7: what replicas should have loaded, and which files are kept."""
        now = self._clock()
        self._draining = {name: due for name, due in self._draining.items() if due > now}
        current = self._publication.adapters if self._publication is not None else ()
        self._targets.replicas.reconcile(current, self._draining)
        self._status = replace(self._status, replicas=self._targets.replicas.status)
        if self._publication is not None:
            waiting = {version.name for version in self._unpublished.values()}
            kept = self._targets.folder.newest_names(self._own.keep, run=self._run)
            self._targets.folder.prune({*current, *self._draining, *waiting, *kept}, self._routing)

    def _upload(self) -> str | None:
        """Step 6, tried again after `UPLOAD_RETRY_S`. Returns why it failed."""
        upload, publication = self._targets.upload, self._publication
        if upload is None or publication is None or not self._upload_pending:
            return None
        if self._clock() < self._upload_at:
            return self._upload_fault
        try:
            upload(publication)
        except Exception as error:  # noqa: BLE001 - what the hub's client raises depends on its release
            found = f"{type(error).__name__}: {error}"
            self._upload_fault = f"publish.hub: expected to commit to the hub, found: {found}"
            self._upload_at = self._clock() + UPLOAD_RETRY_S
            return self._upload_fault
        self._upload_pending, self._upload_fault = False, None
        return None

    def _show(self, decisions: Sequence[RegimeDecision]) -> None:
        """Publish what the gate found; weights that were held back before for the same reason are not counted again."""
        held_back = {
            (each.regime.number, each.regime.weights_sha256, each.status.held_back)
            for each in decisions
            if each.status.held_back is not None
        }
        counts = Counter(dict(self._status.num_held_back))
        counts.update(reason for *_, reason in held_back - self._held_back)
        self._held_back = held_back
        rows = tuple(decision.status for decision in decisions)
        self._status = replace(self._status, regimes=rows, num_held_back=tuple(sorted(counts.items())))

    def _note(self, fault: str | None) -> None:
        """Log a fault once."""
        if fault is not None and fault != self._status.fault:
            _log.warning(Event.PUBLICATION_FAILED, fault=fault)
        self._status = replace(self._status, fault=fault)


def published_regimes(
    profiles: Profiles, labels: Mapping[int, str], versions: Mapping[int, str]
) -> tuple[PublishedRegime, ...]:
    """The regimes of a routing state, with their versions.

    Some have none: those that learned nothing yet, and those whose versions are held back.
    """
    return tuple(
        PublishedRegime(
            slot=slot,
            number=profile.number,
            label=labels.get(profile.number),
            adapter=versions.get(profile.number),
        )
        for slot, profile in enumerate(profiles)
        if profile is not None
    )


def _status(publication: Publication | None) -> PublicationStatus:
    """What an earlier process published: shown until the gate has tested the regimes."""
    if publication is None:
        return PublicationStatus()
    regimes = [RegimePublication(each.number, each.adapter) for each in publication.regimes]
    return PublicationStatus(
        sequence=publication.sequence,
        snapshot=publication.snapshot,
        written_at=publication.written_at.timestamp(),
        regimes=tuple(sorted(regimes, key=lambda regime: regime.number)),
    )


def _without(publication: Publication, names: Collection[str]) -> Publication:
    """The publication that follows another, without some of its versions."""
    regimes = [
        each.model_copy(update={"adapter": None}) if each.adapter in names else each for each in publication.regimes
    ]
    now = datetime.now(UTC)  # noqa: TID251 - for people
    return publication.model_copy(
        update={"sequence": publication.sequence + 1, "written_at": now, "regimes": tuple(regimes)}
    )


def _not_loaded(decision: RegimeDecision) -> RegimeDecision:
    if decision.candidate is None:
        return decision
    return replace(decision, status=replace(decision.status, held_back=str(HeldBack.NOT_LOADED)))


def _published_as(decision: RegimeDecision, name: str | None) -> RegimeDecision:
    return replace(decision, status=replace(decision.status, version=name))


def _newest(folder: Path) -> Publication | None:
    """The publication in a folder; None before the first."""
    return Publication.read(folder) if (folder / FILE).exists() else None


RUN = "publish.run"
"""File of the state folder that names the run."""


def check(settings: Settings, config: HeadLoraConfig, shape: Outline | None) -> None:
    """Check that what the configuration learns can be published.

    `shape` is None where the backbone is not on this machine: what depends on it is then not checked.

    Raises:
        ConfigError: it cannot, or a file with a token or key cannot be read.
    """
    own = settings.publish
    if own is None:
        return
    if not config.per_regime or config.num_experts > 1:
        raise ConfigError(
            f"publish: expected a preset whose regimes are plain LoRAs, found {settings.adapter.preset} with "
            f"{config.num_experts} experts per head, {'one adapter per regime' if config.per_regime else 'shared'}: "
            "use preset streamlearn, or remove the section"
        )
    if shape is not None:
        _check_backbone(settings, own, shape)
    if settings.holdout.every_records == 0:
        raise ConfigError("publish: the gate needs hold-out records, found holdout.every_records 0: set it to 20")
    if settings.holdout.records_per_regime < own.min_holdout_records:
        raise ConfigError(
            f"publish.min_holdout_records must be at most holdout.records_per_regime "
            f"{settings.holdout.records_per_regime}, found {own.min_holdout_records}"
        )
    for file in _secrets(own):
        _read_secret(file)


def check_disk(settings: Settings) -> None:
    """Check that `open_publisher` can use the published folder, and what an earlier process noted. Changes nothing.

    Raises:
        PublicationError: the folder cannot be written, or a file is damaged.
    """
    if settings.publish is None:
        return
    publication_files.check(settings.publish.folder)
    if (settings.publish.folder / FILE).exists():
        Publication.read(settings.publish.folder)
    RollbackFile(settings.state).read()


def _check_backbone(settings: Settings, own: PublishSettings, shape: Outline) -> None:
    if shape.is_vision:
        raise ConfigError(
            f"publish: expected a backbone that reads text only, found {settings.backbone.model}, which reads images: "
            "use `streamlearn export`, or remove the section"
        )
    _check_base_model(own, BaseModel.from_settings(settings.backbone, shape.folder, name=own.base_model))


def _check_base_model(own: PublishSettings, base: BaseModel) -> None:
    """The backbone must not have the name of what is published: a request for one would be answered by the other."""
    if re.fullmatch(rf"{re.escape(own.name)}(-regime-\d+(@.*)?)?", base.name):
        raise ConfigError(
            f"publish.base_model must differ from publish.name and from names of versions, found {base.name} beside "
            f"{own.name}: serve the backbone under another name (vllm serve --served-model-name), or set "
            "publish.name to another one"
        )


def open_publisher(
    settings: Settings, config: HeadLoraConfig, shape: Outline, learner: Learner, tokenizer: Any
) -> AdapterPublisher | None:
    """Open the folder, the replicas and the hub; None without a section `publish`. The thread is not started yet.

    Raises:
        PublicationError: the folder cannot be written, or another backbone was published in it.
    """
    own = settings.publish
    if own is None:
        return None
    base = BaseModel.from_settings(settings.backbone, shape.folder, name=own.base_model)
    folder = PublicationFiles(own.folder, base)
    scoring = ScoringQueue(learner, TimeBudget(own.time_share), pack_tokens=settings.stream.batch_tokens)
    upload = None if own.hub is None else partial(upload_folder, own.hub, folder.folder)
    targets = Targets(folder, folder.write_tokenizer(tokenizer.save_pretrained), base, _replicas(own), upload)
    return AdapterPublisher(settings, config, _run(settings.state), targets, scoring)


def forget_run(state: Path) -> None:
    """Begin a new run: its regimes are not those of the old one, although they have the same numbers."""
    (state / RUN).unlink(missing_ok=True)
    RollbackFile(state).remove()


def _run(state: Path) -> str:
    """The run's identity, made at its first start."""
    path = state / RUN
    try:
        if not path.exists():
            new = path.with_suffix(".new")
            new.write_text(secrets.token_hex(16), encoding="ascii")
            new.rename(path)
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise PublicationError(f"{path}: must be writable, found: {error.strerror}") from error


def _replicas(own: PublishSettings) -> ReplicaSet:
    vllm = own.vllm
    if vllm is None:
        return ReplicaSet([], str, own.name)
    key = None if vllm.token_file is None else _read_secret(vllm.token_file)
    seen_at = vllm.folder or str(own.folder)
    return ReplicaSet(
        [Replica(url, key=key, timeout_s=vllm.timeout_s) for url in vllm.replicas],
        lambda name: f"{seen_at}/{ADAPTERS}/{name}",
        own.name,
    )


def upload_folder(hub: HubSettings, folder: Path, publication: Publication, *, endpoint: str | None = None) -> None:
    """Make the repository equal to the published folder, in one commit."""
    api = HfApi(endpoint=endpoint, token=_read_secret(hub.token_file))
    api.create_repo(hub.repository, private=hub.private, exist_ok=True)
    api.upload_folder(
        repo_id=hub.repository,
        folder_path=folder,
        allow_patterns=[
            FILE,
            publication.routing,
            f"{publication.tokenizer}/*",
            *(f"{ADAPTERS}/{version}/*" for version in publication.adapters),
        ],
        delete_patterns=[f"{ADAPTERS}/*", f"{ROUTING}/*", f"{TOKENIZER}*"],
        commit_message=f"Publication {publication.sequence}, snapshot {publication.snapshot}",
    )


def _secrets(own: PublishSettings) -> list[Path]:
    files = [section.token_file for section in (own.vllm, own.hub) if section is not None]
    return [file for file in files if file is not None]


def _read_secret(file: Path) -> str:
    """Read a token.

    Raises:
        ConfigError: the file cannot be read, is empty, or other users may read it.
    """
    try:
        mode, text = file.stat().st_mode, file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the token cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"{file}: expected a file readable by its owner only, found mode {mode & 0o777:o}")
    if not text:
        raise ConfigError(f"{file}: expected a token, found an empty file")
    return text
