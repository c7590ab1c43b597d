"""From a configuration to a learner that continues where it stopped.

Checks run in this order: the configuration by itself, the backbone's architecture, the state folder (unless the caller
has locked it), the snapshot. Only then are weights loaded and the stream opened.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from connectors.open import open_dead_letters, open_source
from streamlearn import track as tracking
from streamlearn.adapters.presets import HeadLoraConfig, check
from streamlearn.backbone.load import Backbone, Outline, choose, device_of, identity, outline
from streamlearn.board import Clock
from streamlearn.controls import AuditLog, Control, ControlFile, ControlState, Requester, Result, StateControls
from streamlearn.daemon.checkpoint import Checkpoint
from streamlearn.daemon.model import Model, adapter_of, adapter_shape
from streamlearn.events import Event, get_logger
from streamlearn.history import History
from streamlearn.publish import open as publishing
from streamlearn.settings import Settings, fingerprint, with_defaults
from streamlearn.snapshot.crash_guard import CrashGuard
from streamlearn.snapshot.files import DeadLetterLock, StateLock
from streamlearn.snapshot.journal import Journal
from streamlearn.snapshot.manifest import check_compatible
from streamlearn.snapshot.parts import Snapshot
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.source import Source

if TYPE_CHECKING:
    from streamlearn.distributed.processes import Leader

_log = get_logger("daemon")


class Components:
    """Everything that the loop works with, built once.

    `close` releases source, sink, journal and lock; safe to call twice. A caller that holds the state folder's `lock`
    keeps it. `leader` divides the steps among several processes. `clock`: see `Checkpoint`. A Python program may bring
    its own `source`, in place of the configured one, and a `backbone` with its outline that it has loaded already.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        fresh: bool = False,
        accept_config_change: bool = False,
        lock: StateLock | None = None,
        leader: "Leader | None" = None,
        clock: Callable[[], float] = time.monotonic,
        source: Source | None = None,
        backbone: tuple[Outline, Backbone] | None = None,
    ) -> None:
        config = adapter_of(settings)
        self._backbone: Backbone | None = None
        if backbone is None:
            shape = outline(settings.backbone, settings.adapter)
        else:
            shape, self._backbone = backbone
        self._own_source = source
        self.settings = settings = with_defaults(settings, is_vision=shape.is_vision, per_regime=config.per_regime)
        check(config, shape.linears, shape.tower_linears)
        publishing.check(settings, config, shape)
        tracking.check(settings)
        with ExitStack() as opened:  # closes what was opened when a later check fails
            if lock is None:
                opened.enter_context(StateLock(settings.state))
            opened.enter_context(publishing.own_folder(settings))
            if settings.dead_letters.file is not None:  # by default it is in the state folder
                opened.enter_context(DeadLetterLock(settings.dead_letters.file))
            self._open(opened, config, shape, fresh=fresh, accept=accept_config_change, leader=leader, clock=clock)
            self.close = opened.pop_all().close

    def _open(
        self,
        opened: ExitStack,
        config: HeadLoraConfig,
        shape: Outline,
        *,
        fresh: bool,
        accept: bool,
        leader: "Leader | None",
        clock: Callable[[], float],
    ) -> None:
        settings = self.settings
        self.shape, self._config = shape, config
        controls = ControlFile(settings.state)
        self.store = SnapshotStore(
            settings.state / "snapshots", keep=settings.snapshot.keep, pins=lambda: controls.state.pins
        )
        self.audit = AuditLog(settings.state)
        self.journal = opened.enter_context(closing(Journal(settings.state / "journal.jsonl")))
        self.crash_guard = opened.enter_context(closing(CrashGuard(settings.state)))
        self.controls = StateControls(controls, self.store, self.journal)
        if fresh:
            self.store.set_aside()
            self.journal.rewind(to_step=0)
            self.crash_guard.forget()
            publishing.forget_run(settings.state)
            tracking.forget_run(settings.state)
            self._forget_controls(controls.state)
        else:
            self._finish_rollback(controls.state)
        snapshot = self.store.newest()
        if snapshot is not None:
            self.check_compatible(snapshot, accept=accept)
        dtype = snapshot.manifest.dtype if snapshot is not None else None
        if leader is not None:
            dtype = dtype or choose(settings.backbone.dtype, device_of(settings.backbone)).name  # the same in all
            leader.load(dtype)
        mesh, compute = (None, None) if leader is None else (leader.mesh, leader.compute)
        self.model = Model(
            settings,
            shape,
            config,
            dtype,
            settings.state / "offloaded",
            mesh=mesh,
            compute=compute,
            backbone=self._backbone,
        )
        if leader is not None:
            leader.lead(self.model.learner)
        opened.callback(self.model.learner.cache.clear_folder)
        self.learner = self.model.learner
        self.decoder = self.model.decoder
        self.adaptation = self.model.adaptation
        backbone = self.model.backbone
        canaries = self.adaptation.scorer.canary_scores.canaries
        self.adapter_publisher = publishing.open_publisher(settings, config, shape, self.learner, backbone, canaries)
        if self.adapter_publisher is not None:
            opened.callback(self.adapter_publisher.close)
        self.trackers = tracking.open_trackers(settings)
        if self.trackers is not None:
            opened.callback(self.trackers.close)
        sink = opened.enter_context(closing(open_dead_letters(settings)))
        self.source = opened.enter_context(closing(self._own_source or open_source(settings.source)))
        decoding = None
        is_daemon = self._own_source is None  # a program decides about its threads itself
        if is_daemon and self.model.backbone.vision is not None and _has_spare_core(self.model.backbone.device):
            decoding = opened.enter_context(decoding_thread())
        self.history = History(Clock(), settings.state)
        self.checkpoint = Checkpoint(
            self.model,
            settings,
            config,
            store=self.store,
            journal=self.journal,
            crash_guard=self.crash_guard,
            controls=self.controls,
            sink=sink,
            source=self.source,
            history=self.history,
            decoding=decoding,
            clock=clock,
        )
        self.state = self.checkpoint.restore(snapshot)

    def check_compatible(self, snapshot: Snapshot, *, accept: bool = True) -> None:
        """Check that the run may continue from a snapshot with this configuration.

        Raises:
            SnapshotMismatchError: it may not, or only with `accept`.
        """
        settings = self.settings
        loaded = self._backbone
        backbone: dict[str, Any] = dict(identity(settings.backbone, self.shape) if loaded is None else loaded.identity)
        changes = check_compatible(
            snapshot.manifest, fingerprint(settings), backbone, adapter_shape(self._config), accept=accept
        )
        for change in changes:
            _log.warning(Event.CONFIG_CHANGE_ACCEPTED, key=change.key, before=change.old, now=change.new)

    def _forget_controls(self, before: ControlState) -> None:
        """Forget the pins and skipped records of the run that was set aside; a pause goes on."""
        arguments = {"pins": sorted(before.pins), "skip_records": list(map(str, before.skipped))}
        self.controls.forget_run()
        if any(arguments.values()):
            message = "run --fresh: these no longer hold"
            self.audit.write("forget", arguments, Requester.from_process(), Result.DONE, message=message)

    def _finish_rollback(self, before: ControlState) -> None:
        """Finish the rollback that the process before was killed in, if it was."""
        if before.rolling_back_to is not None:
            moved = self.controls.finish_rollback()
            control = Control.snapshot("rollback", before.rolling_back_to, skip_records=tuple(map(str, before.skipped)))
            message = f"finished by the next start; moved aside: {', '.join(moved) or 'nothing more'}"
            self.audit.write(control.verb, control.arguments, Requester.from_process(), Result.DONE, message=message)


@contextmanager
def decoding_thread() -> Iterator[Executor]:
    """A thread that decodes ahead. The end of the block waits for the current record and drops the others."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="decode")
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _has_spare_core(device: torch.device) -> bool:
    """Whether another thread may run during a step.

    On a CPU each core computes a share of every product, so a thread that competes for one core delays all of them.
    """
    return device.type != "cpu" or torch.get_num_threads() < len(os.sched_getaffinity(0))
