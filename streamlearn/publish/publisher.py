"""Regimes of each snapshot, published as plain LoRAs, in a thread of its own.

For the newest snapshot:

1. The gate tests every regime whose weights changed (`regime_gate`); the forward passes are made by the loop, between
   steps and within `publish.time_share`.
2. What passed is written as versions, each complete or absent.
3. An object store gets them, and every replica that answers loads them. If the store or no replica answers, or one
   refuses, nothing is published, and the publisher tries again.
4. The routing state of the snapshot is written.
5. `publication.json` is replaced, in an object store too: from here on gateways send requests to the new versions.
6. The hub gets a commit.
7. After `publish.vllm.drain_s` the replicas unload what was replaced, and old files are removed.

After a rollback, versions of undone steps are withdrawn first: `publication.json` is replaced by one without them,
whatever becomes of the snapshot. `RollbackFile` remembers what is still to be withdrawn. A publication in progress is
abandoned before 4 or before 5.

A process that is killed before 5 has published nothing; its next start unloads and removes what nothing names. A
replica that was unreachable loads what it lacks once it answers: until then it does not list the version, and gateways
do not ask it.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.codec import to_arrays
from streamlearn.errors import PublicationError, SnapshotError, StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.export.formats import BaseModel, ExportedRegime, card
from streamlearn.publish import ROLLBACK
from streamlearn.publish.folder import PublicationFiles
from streamlearn.publish.gate import (
    Candidate,
    Gate,
    HeldBack,
    PublishingStoppedError,
    RegimeDecision,
    RegimeGate,
    ScoringQueue,
)
from streamlearn.publish.objects import ObjectStore
from streamlearn.publish.publication import FILE, Publication, PublishedRegime, Version
from streamlearn.publish.replicas import ReplicaSet
from streamlearn.publish.snapshot import SnapshotRegimes
from streamlearn.regimes.canaries import Canary
from streamlearn.regimes.regime import RegimesState
from streamlearn.settings import Settings
from streamlearn.snapshot.files import Files
from streamlearn.snapshot.parts import Snapshot, read_manifest
from streamlearn.status import PublicationStatus, RegimePublication

RETRY_S = 5.0
"""Interval between attempts where there are no replicas."""
UPLOAD_RETRY_S = 60.0
STOP_S = 60.0
"""Maximum time for the publication in progress when the daemon stops; systemd waits 90 s for everything."""

_log = get_logger("publish")


class RollbackFile:
    """The step that the run went back to: a file of the state folder, until no version of a later step is published.

    Without it a daemon that ends before it withdrew those versions would take them for its own, once it is past their
    steps again. Every method raises PublicationError where the disk is full or broken.
    """

    def __init__(self, state: Path) -> None:
        self._path = state / ROLLBACK
        self._files = Files()

    def read(self) -> float:
        """Return the step; infinity if nothing is to be withdrawn."""
        with self._translated():
            return int(self._path.read_bytes()) if self._path.exists() else math.inf

    def write(self, step: int) -> None:
        """Store a step durably."""
        with self._translated():
            self._files.replace(self._path, b"%d\n" % step)

    def remove(self) -> None:
        with self._translated():
            self._path.unlink(missing_ok=True)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise PublicationError(
                f"{self._path}: expected a writable file with the step that the run went back to, found: {error}; "
                "check the disk and the permissions of the state folder"
            ) from error


@dataclass(frozen=True)
class Targets:
    """Destinations of publications."""

    folder: PublicationFiles
    tokenizer: str
    """Path of the tokenizer in the folder."""
    base: BaseModel
    """The backbone, under the name by which replicas serve it."""
    replicas: ReplicaSet
    upload: Callable[[Publication], None] | None
    """Commits the folder to a repository on the hub."""
    store: ObjectStore | None = None
    """Gets a copy of the folder, from which gateways read."""
    runs: Sequence[str] = ()
    """Runs that may publish in the store."""


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
        canaries: Sequence[Canary] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to publish.

        Args:
            settings: The configuration, with a section `publish`.
            config: The adapter's options: one expert a head, one adapter a regime.
            run: Identity of the daemon's run: regimes of different runs are never compared.
            targets: Destinations of publications.
            scoring: Scores hold-out records and canaries.
            canaries: Records from outside the stream on which no version may be worse.
            clock: Monotonic time in seconds.
        """
        assert settings.publish is not None
        self._settings, self._own, self._config, self._run = settings, settings.publish, config, run
        self._targets = targets
        self.scoring = scoring
        self._clock = clock
        gate = Gate(self._own.level, self._own.min_holdout_records, self._own.max_canary_harm)
        self._gate = RegimeGate(gate, scoring, targets.folder, canaries)
        self._lock = threading.Lock()
        self._pending: Path | None = None
        self._rollback_file = RollbackFile(settings.state)
        self._last_step = self._rollback_file.read()
        """Versions of later steps are withdrawn before anything else is published."""
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._is_abandoned = False
        exists = (targets.folder.folder / FILE).exists()
        self._publication = Publication.read(targets.folder.folder) if exists else None
        self._routing = [] if self._publication is None else [self._publication.routing]
        """Routing states to keep: gateways may still be reading the last but one."""
        self._unpublished: dict[str, Version] = {}
        """Versions that are written but not yet loaded by the replicas, by hash of the weights."""
        self._num_not_loaded = 0
        self._drain_s = 0.0 if self._own.vllm is None else self._own.vllm.drain_s
        self._draining = {version.name: clock() + self._drain_s for version in targets.folder.versions()}
        """Time at which each replaced version is unloaded, by name: requests may still be using it."""
        self._upload_pending = targets.upload is not None and self._publication is not None
        self._upload_at = -math.inf
        self._is_mirrored = targets.store is None
        """Whether the store has the newest publication."""
        self._upload_fault: str | None = None
        self._status = replace(_status(self._publication), replicas=targets.replicas.status)
        self._thread = threading.Thread(target=self._work, name="publish", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def notify(self, snapshot: Path) -> None:
        """Publish this snapshot, the newest, in place of one that still waits."""
        with self._lock:
            self._pending = snapshot
        self._wake.set()

    def withdraw_after(self, step: int) -> None:
        """Withdraw versions of later steps, because the run went back; the next process does it if this one cannot."""
        with self._lock:
            self._pending = None  # the snapshot that the run goes on from follows
            if step < self._last_step:
                self._last_step = step
                try:
                    self._rollback_file.write(step)
                except PublicationError as error:  # this process withdraws them all the same
                    _log.warning(Event.PUBLICATION_FAILED, fault=str(error))
        self._wake.set()

    @property
    def status(self) -> PublicationStatus:
        """The newest publication and the newest fault. Immutable."""
        return self._status

    @property
    def is_idle(self) -> bool:
        """Whether the newest snapshot was published, or cannot be now."""
        return (self._pending is None and not self._wake.is_set()) or self._status.fault is not None

    def close(self) -> None:
        """Stop; what was not published is tested again after the next start. Safe to call twice.

        Waits at most `STOP_S` for a replica, the hub or the disk, then abandons the publication.
        """
        self._stopping.set()
        self._wake.set()
        self.scoring.close()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            self._is_abandoned = True
            _log.warning(Event.PUBLICATION_FAILED, fault=f"abandoned: it did not end within {STOP_S:g} s of the stop")
        self._targets.replicas.close()

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                parts = (self._publish_pending, self._mirror, self._reconcile, self._upload)
                faults = [self._fault_of(part) for part in parts]
            except PublishingStoppedError:
                return
            self._report(next((fault for fault in faults if fault is not None), None))
            self._wake.wait(RETRY_S if self._own.vllm is None else self._own.vllm.interval_s)
            self._wake.clear()

    def _fault_of(self, part: Callable[[], str | None]) -> str | None:
        """Run one part of an iteration; return its error, if any. A failing part does not stop the others."""
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
        """Withdraw undone versions, then publish the newest snapshot; return why it could not be published, if so."""
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
        """Publish without the versions of later, undone steps.

        The rollback is forgotten only if `pending` is still the newest snapshot; otherwise it may be undone too.
        """
        if last_step == math.inf:
            return
        undone = [version for version in self._published().values() if version.step > last_step]
        self._unpublished = {key: version for key, version in self._unpublished.items() if version.step <= last_step}
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
        self._replace_publication(_without(newest, names))
        rows = [replace(row, version=None) if row.version in names else row for row in self._status.regimes]
        self._status = replace(self._status, regimes=tuple(rows))
        for version in undone:
            _log.warning(Event.VERSION_WITHDRAWN, version=version.name, regime=version.regime)
        self._log_written(new=0, started=started)

    def _publish(self, path: Path) -> str | None:
        """Steps 1 to 5; return why versions that passed the gate could not be loaded, if so."""
        started, folder = self._clock(), self._targets.folder
        try:
            snapshot = SnapshotRegimes(Snapshot(path, read_manifest(path)), self._config, self._targets.base)
            decisions = self._gate.decide(snapshot, self._published())  # 1.
            candidates = [decision.candidate for decision in decisions if decision.candidate is not None]
            retried = set(self._unpublished)
            fresh = {candidate.regime.number: self._write(candidate, snapshot) for candidate in candidates}  # 2.
            arrays = to_arrays(snapshot.state.monitor)
        except SnapshotError:
            if path.exists():
                raise
            return None  # it was pruned: a newer one is on its way
        fault = self._fault_of_delivery([version.name for version in fresh.values()])  # 3.
        if self._is_undone(snapshot.step):
            return None
        if fault is not None:
            self._num_not_loaded += sum(version.weights_sha256 not in retried for version in fresh.values())
            self._show(
                replace(row.status, held_back=str(HeldBack.NOT_LOADED)) if row.candidate is not None else row.status
                for row in decisions
            )
            return fault
        routing = folder.write_routing(snapshot.step, arrays)  # 4.
        if self._is_undone(snapshot.step):
            return None
        self._name_versions(snapshot, decisions, fresh, routing)  # 5.
        self._log_written(new=len(fresh), started=started)
        return None

    def _fault_of_delivery(self, names: Collection[str]) -> str | None:
        """Why servers cannot have these versions, or the store nothing at all, if so."""
        if self._targets.store is not None:
            try:
                self._targets.store.upload(self._targets.folder.folder, self._targets.runs)
            except PublicationError as error:
                return str(error)
        return self._targets.replicas.fault_of_loading(names)

    def _is_undone(self, step: int) -> bool:
        """Whether the run went back to before this step since the iteration began, or ended without waiting."""
        with self._lock:
            return self._is_abandoned or step > self._last_step

    def _published(self) -> dict[int, Version]:
        """Versions of this run that the newest publication names, by regime."""
        names = self._publication.adapters if self._publication is not None else ()
        versions = [Version.read(self._targets.folder.path(name)) for name in names]
        return {version.regime: version for version in versions if version.run == self._run}

    def _write(self, candidate: Candidate, snapshot: SnapshotRegimes) -> Version:
        """Write a version, unless an earlier attempt to publish these weights has."""
        folder, regime = self._targets.folder, candidate.regime
        written = self._unpublished.get(regime.weights_sha256)
        if written is not None and written.holdout == tuple(sorted(candidate.losses)):
            return written
        version = Version(
            name=folder.unused_name(f"{self._own.name}-regime-{regime.number}", snapshot.step, self._run),
            run=self._run,
            regime=regime.number,
            step=snapshot.step,
            weights_sha256=regime.weights_sha256,
            holdout=tuple(sorted(candidate.losses)),
            loss=candidate.backbone.loss,
            backbone_loss=candidate.backbone.other_loss,
        )
        complete = self._targets.base.complete(candidate.lora)
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
            rank=complete.rank,
            alpha=complete.alpha,
            num_linears=len(complete.layers),
            is_approximate=False,
            losses=None,  # the gate's are in version.json
            canaries=candidate.canaries,
        )
        folder.write_version(version, candidate.lora, card(exported))
        self._unpublished[regime.weights_sha256] = version
        return version

    def _name_versions(
        self,
        snapshot: SnapshotRegimes,
        decisions: Sequence[RegimeDecision],
        fresh: Mapping[int, Version],
        routing: str,
    ) -> None:
        """Step 5, and the status that follows from it."""
        versions = {row.regime.number: fresh.get(row.regime.number, row.version) for row in decisions}
        named = {number: version.name for number, version in versions.items() if version is not None}
        self._replace_publication(
            Publication(
                name=self._own.name,
                run=self._run,
                sequence=0 if self._publication is None else self._publication.sequence + 1,
                written_at=datetime.now(UTC),  # noqa: TID251 - for people
                snapshot=snapshot.snapshot.name,
                backbone=self._targets.base.name,
                seed=self._settings.seed,
                max_known_rejected=self._settings.serve.max_known_rejected,
                routing=routing,
                tokenizer=self._targets.tokenizer,
                regimes=published_regimes(snapshot.state, named),
            )
        )
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
        self._show(replace(row.status, version=named.get(row.regime.number)) for row in decisions)
        self._status = replace(self._status, num_published=self._status.num_published + len(fresh))

    def _replace_publication(self, publication: Publication) -> None:
        """Write a publication; versions that it no longer names are unloaded after `publish.vllm.drain_s`."""
        before = self._publication
        publication.write(self._targets.folder.folder, self._targets.folder.files)
        self._publication = publication
        self._upload_pending = self._targets.upload is not None
        self._is_mirrored = self._targets.store is None
        dropped = set(before.adapters if before is not None else ()) - set(publication.adapters)
        self._draining |= dict.fromkeys(dropped, self._clock() + self._drain_s)
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

    def _mirror(self) -> None:
        """Step 5 in the object store."""
        if self._targets.store is not None and self._publication is not None and not self._is_mirrored:
            self._targets.store.mirror(self._targets.folder.folder, self._targets.runs)
            self._is_mirrored = True

    def _reconcile(self) -> None:
        """Step 7: have replicas load and unload versions, and remove old files.

        While an object store has an older publication, gateways send requests to what that names.
        """
        now = self._clock()
        if not self._is_mirrored:
            self._draining = dict.fromkeys(self._draining, now + self._drain_s)
        self._draining = {name: due for name, due in self._draining.items() if due > now}
        current = self._publication.adapters if self._publication is not None else ()
        self._targets.replicas.reconcile(current, self._draining)
        self._status = replace(self._status, replicas=self._targets.replicas.status)
        if self._publication is not None and self._is_mirrored:
            waiting = {version.name for version in self._unpublished.values()}
            kept = self._targets.folder.newest_names(self._own.keep, run=self._run)
            self._targets.folder.prune({*current, *self._draining, *waiting, *kept}, self._routing)

    def _upload(self) -> str | None:
        """Step 6, retried after `UPLOAD_RETRY_S`; return why it failed, if so."""
        upload, publication = self._targets.upload, self._publication
        if upload is None or publication is None or not self._upload_pending:
            return None
        if self._clock() < self._upload_at:
            return self._upload_fault
        try:
            upload(publication)
        except Exception as error:  # noqa: BLE001 - what the hub's client raises depends on its release
            self._upload_fault = f"publish.hub: expected to commit to the hub, found: {type(error).__name__}: {error}"
            self._upload_at = self._clock() + UPLOAD_RETRY_S
            return self._upload_fault
        self._upload_pending, self._upload_fault = False, None
        return None

    def _show(self, regimes: Iterable[RegimePublication]) -> None:
        """Put the gate's results into the status."""
        counts = Counter(self._gate.num_held_back)
        if self._num_not_loaded:
            counts[str(HeldBack.NOT_LOADED)] = self._num_not_loaded
        self._status = replace(self._status, regimes=tuple(regimes), num_held_back=tuple(sorted(counts.items())))

    def _report(self, fault: str | None) -> None:
        """Put a fault into the status, and log it once."""
        if fault is not None and fault != self._status.fault:
            _log.warning(Event.PUBLICATION_FAILED, fault=fault)
        self._status = replace(self._status, fault=fault)


def published_regimes(state: RegimesState, versions: Mapping[int, str]) -> tuple[PublishedRegime, ...]:
    """The regimes of the routing state, with their versions; without one until the gate lets the first pass."""
    profiles = enumerate(state.monitor.detector.regimes)
    numbers = {slot: profile.number for slot, profile in profiles if profile is not None}
    names = {regime.number: regime.name or None for regime in state.regimes.values()}
    return tuple(
        PublishedRegime(slot=slot, number=number, label=names.get(number), adapter=versions.get(number))
        for slot, number in numbers.items()
    )


def _status(publication: Publication | None) -> PublicationStatus:
    """The status of an earlier process's publication, until the gate has tested the regimes."""
    if publication is None:
        return PublicationStatus()
    regimes = [RegimePublication(regime.number, regime.adapter) for regime in publication.regimes]
    return PublicationStatus(
        sequence=publication.sequence,
        snapshot=publication.snapshot,
        written_at=publication.written_at.timestamp(),
        regimes=tuple(sorted(regimes, key=lambda regime: regime.number)),
    )


def _without(publication: Publication, names: Collection[str]) -> Publication:
    """The publication that follows another, without some of its versions."""
    regimes = [
        regime.model_copy(update={"adapter": None}) if regime.adapter in names else regime
        for regime in publication.regimes
    ]
    now = datetime.now(UTC)  # noqa: TID251 - for people
    return publication.model_copy(
        update={"sequence": publication.sequence + 1, "written_at": now, "regimes": tuple(regimes)}
    )
