"""From a configuration to a learner that stands where it stopped.

Checks run in this order: the configuration by itself, the backbone's architecture, the state folder, the snapshot. Only
then are weights loaded and the stream opened.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import torch

from connectors.open import open_dead_letters, open_source
from streamlearn.adapters.check import check
from streamlearn.adapters.config import HeadLoraConfig
from streamlearn.backbone.load import Outline, identity, outline
from streamlearn.events import Event, get_logger
from streamlearn.publish import open_publisher as publishing
from streamlearn.runtime.checkpoint import Checkpoint, Durable
from streamlearn.runtime.model import Model, adapter_of, adapter_shape
from streamlearn.settings import Settings, fingerprint, with_defaults
from streamlearn.snapshot import compatibility
from streamlearn.snapshot.crash_guard import CrashGuard
from streamlearn.snapshot.journal import Journal
from streamlearn.snapshot.lock import StateLock
from streamlearn.snapshot.snapshot import Snapshot
from streamlearn.snapshot.store import SnapshotStore

_log = get_logger("daemon")


class Components:
    """Everything that the loop works with, built once.

    `close` releases source, sink, journal and lock; safe to call twice. `clock` is that of `Checkpoint`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        fresh: bool = False,
        accept_config_change: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = adapter_of(settings)
        shape = outline(settings.backbone)
        self.settings = settings = with_defaults(settings, is_vision=shape.is_vision, per_regime=config.per_regime)
        check(config, shape.linears, shape.tower_linears)
        publishing.check(settings, config, shape)
        with ExitStack() as opened:  # closes what was opened when a later check fails
            opened.enter_context(StateLock(settings.state))
            self._open(opened, config, shape, fresh=fresh, accept=accept_config_change, clock=clock)
            self.close = opened.pop_all().close

    def _open(
        self,
        opened: ExitStack,
        config: HeadLoraConfig,
        shape: Outline,
        *,
        fresh: bool,
        accept: bool,
        clock: Callable[[], float],
    ) -> None:
        settings = self.settings
        self.store = SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep)
        self.journal = opened.enter_context(closing(Journal(settings.state / "journal.jsonl")))
        self.crash_guard = opened.enter_context(closing(CrashGuard(settings.state)))
        if fresh:
            self.store.set_aside()
            self.journal.rewind(to_step=0)
            self.crash_guard.forget()
            publishing.forget_run(settings.state)
        snapshot = self.store.newest()
        if snapshot is not None:
            _check_compatible(snapshot, settings, shape, config, accept=accept)
        dtype = snapshot.manifest.dtype if snapshot is not None else None
        self.model = Model(settings, shape, config, dtype, settings.state / "resting")
        opened.callback(self.model.learner.cache.clear_folder)
        self.learner = self.model.learner
        self.decoder = self.model.decoder
        self.adaptation = self.model.adaptation
        tokenizer = self.model.backbone.tokenizer
        self.publisher = publishing.open_publisher(settings, config, shape, self.learner, tokenizer)
        if self.publisher is not None:
            opened.enter_context(closing(self.publisher))
        sink = opened.enter_context(closing(open_dead_letters(settings)))
        self.source = opened.enter_context(closing(open_source(settings.source)))
        decoding = None
        if self.model.backbone.vision is not None and _has_spare_core(self.model.backbone.device):
            decoding = opened.enter_context(ThreadPoolExecutor(1, thread_name_prefix="decode"))
        durable = Durable(self.store, self.journal, self.crash_guard, sink, self.source)
        self.checkpoint = Checkpoint(self.model, durable, settings, config, decoding=decoding, clock=clock)
        self.state = self.checkpoint.restore(snapshot)


def _has_spare_core(device: torch.device) -> bool:
    """Whether another thread may run beside a step.

    On a CPU where each core computes a share of every product, a thread that competes for one core delays them all.
    """
    return device.type != "cpu" or torch.get_num_threads() < len(os.sched_getaffinity(0))


def _check_compatible(
    snapshot: Snapshot, settings: Settings, shape: Outline, config: HeadLoraConfig, *, accept: bool
) -> None:
    backbone: dict[str, Any] = identity(settings.backbone, shape)
    changes = compatibility.check(
        snapshot.manifest, fingerprint(settings), backbone, adapter_shape(config), accept=accept
    )
    for change in changes:
        _log.warning(Event.CONFIG_CHANGE_ACCEPTED, key=change.key, before=change.old, now=change.new)
