"""From a configuration to a learner that stands where it stopped.

What can be refused is refused in this order: the configuration alone, the backbone's architecture, the state folder,
the snapshot. Only then are weights loaded and the stream opened.
"""

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file

from connectors.open import open_dead_letters, open_source
from streamlearn.adaptation.adaptation import Adaptation
from streamlearn.adapters.check import check
from streamlearn.adapters.config import HeadLoraConfig
from streamlearn.adapters.model import attach
from streamlearn.adapters.presets import objective, resolve
from streamlearn.backbone import load as backbone_room
from streamlearn.backbone.load import Backbone, Outline
from streamlearn.errors import Reason
from streamlearn.events import Event, get_logger
from streamlearn.learner.learner import Learner
from streamlearn.runtime.run_state import RunState
from streamlearn.settings import Settings, fingerprint, with_backbone_defaults
from streamlearn.snapshot import compatibility
from streamlearn.snapshot.crash_guard import MAX_CRASHES, CrashGuard
from streamlearn.snapshot.journal import Journal, JournalEntry
from streamlearn.snapshot.lock import StateLock
from streamlearn.snapshot.manifest import ManifestDraft
from streamlearn.snapshot.snapshot import Snapshot, SnapshotInfo
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.batch import Batcher, PartitionRun
from streamlearn.stream.decode import Decoder
from streamlearn.stream.intake import DeadLetterWriter, Intake
from streamlearn.stream.merge import Merger
from streamlearn.stream.record import Position, RecordId, TopicPartition

_REFUSED = (Reason.NOT_FINITE_UPDATE, "its update was refused before the rollback")
_KILLED = (Reason.KILLED_PROCESS, f"the process died of it {MAX_CRASHES} times")
_log = get_logger("daemon")


class Model:
    """Backbone, adapter and decoder: all that a snapshot needs to be used, with or without a stream."""

    def __init__(self, settings: Settings, shape: Outline, config: HeadLoraConfig, dtype: str | None) -> None:
        torch.manual_seed(settings.seed)
        self.backbone: Backbone = backbone_room.load(settings.backbone, shape, dtype=dtype)
        arithmetic = self.backbone.arithmetic
        _log.info(Event.DTYPE_CHOSEN, dtype=arithmetic.name, reason=arithmetic.reason)
        self.peft: PeftModel = attach(self.backbone.model, config, settings.seed)
        wanted = objective(settings)
        self.learner = Learner(
            self.peft,
            settings.learner,
            self.backbone.device,
            objective=wanted,
            integrate=wanted.anchor_strength > 0 and settings.consolidate.importance == "path",
        )
        types = settings.learner.sample_types if wanted.localized_balance else ()
        backbone = self.backbone
        self.decoder = Decoder(
            backbone.tokenizer, settings.stream, backbone.vocab_size, types, backbone.vision, backbone.template
        )
        self.adaptation = Adaptation(self.learner, settings, backbone.vocab_size, self.decoder.restored)
        trainable = sum(p.numel() for p in self.learner.optimizer.parameters())
        _log.info(Event.ADAPTER_ATTACHED, preset=settings.adapter.preset, parameters=trainable)

    def restore(self, snapshot: Snapshot) -> RunState:
        """Put a snapshot's weights and optimizer in place and return the rest of its state."""
        tensors = snapshot.tensors()
        load_adapter(self.peft, snapshot.adapter)
        torch.set_rng_state(tensors.pop("rng.torch"))
        self.learner.load_state(tensors)
        manifest = snapshot.manifest
        self.adaptation.restore(tensors, manifest.components["regimes"])
        state = RunState.restored(manifest)
        _log.info(Event.SNAPSHOT_RESTORED, name=snapshot.name, records=state.records, position=str(manifest.position))
        return state


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Copy the weights of a PEFT folder into the live adapter, in place."""
    weights = load_file(folder / "adapter_model.safetensors")
    outcome = set_peft_model_state_dict(model, weights)
    assert not outcome.unexpected_keys, "the manifest was checked against this adapter before"


class Components:
    """Everything that the loop works with, built once; `open_stream` may be called again after a rollback.

    `close` releases source, sink, journal and lock; safe to call twice.
    """

    def __init__(self, settings: Settings, *, fresh: bool = False, accept_config_change: bool = False) -> None:
        config = adapter_of(settings)
        shape = backbone_room.outline(settings.backbone)
        self.settings = settings = with_backbone_defaults(settings, is_vision=shape.is_vision)
        check(config, shape.linears, shape.tower_linears)
        with ExitStack() as opened:  # what was opened is closed again when something later is refused
            opened.enter_context(StateLock(settings.state))
            self._open(opened, config, shape, fresh=fresh, accept=accept_config_change)
            self.close = opened.pop_all().close

    def _open(self, opened: ExitStack, config: HeadLoraConfig, shape: Outline, *, fresh: bool, accept: bool) -> None:
        settings = self.settings
        self.store = SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep)
        self.journal = opened.enter_context(closing(Journal(settings.state / "journal.jsonl")))
        self.crash_guard = opened.enter_context(closing(CrashGuard(settings.state)))
        if fresh:
            self.store.set_aside()
            self.journal.rewind(to_step=0)
            self.crash_guard.forget()
        snapshot = self.store.newest()
        self._adapter = adapter_shape(config)
        if snapshot is not None:
            _accept(snapshot, settings, shape, self._adapter, accept=accept)
        dtype = snapshot.manifest.dtype if snapshot is not None else None
        self.model = Model(settings, shape, config, dtype)
        self.learner = self.model.learner
        self.decoder = self.model.decoder
        self.adaptation = self.model.adaptation
        self.state = self.model.restore(snapshot) if snapshot is not None else RunState()
        self.sink = opened.enter_context(closing(open_dead_letters(settings)))
        # A new run begins at the sink's end: letters of an earlier one are not its own.
        self._mark = snapshot.manifest.dead_letter_mark if snapshot is not None else self.sink.mark()
        self._letters_ahead = letters_ahead(snapshot) if snapshot is not None else []
        self._identity = identity(snapshot) if snapshot is not None else {}
        self.source = opened.enter_context(closing(open_source(settings.source)))
        self._decoding = None
        if self.model.backbone.vision is not None and _has_core_to_spare(self.model.backbone.device):
            self._decoding = opened.enter_context(ThreadPoolExecutor(1, thread_name_prefix="decode"))
        self.open_stream(self.state)

    def open_stream(self, state: RunState, *, refused: frozenset[RecordId] = frozenset()) -> None:
        """Stand at the state's position; letters and batches of a life after it, if there was one, are known again."""
        self.sink.flush()
        self.rejects = DeadLetterWriter(self.sink, [*self.sink.recall(self._mark), *self._letters_ahead])
        here = self.source.seek(state.ledger.position, self._identity)
        state.gap_since_save = bool(state.ledger.position.gaps_to(here))
        state.ledger.position = here
        entries = self._journalled(here)
        self._ahead = {entry.step: entry.runs for entry in entries}
        self.intake = Intake(
            Merger(self.source, [run for entry in entries for run in entry.runs]),
            self.decoder,
            Batcher(self.settings.stream),
            self.rejects,
            max_records=self.settings.stream.batch_records * 8,
            given_up={**dict.fromkeys(refused, _REFUSED), **dict.fromkeys(self.crash_guard.given_up, _KILLED)},
            decoding=self.crash_guard.decoding,
            ahead=self._decoding,
        )
        _log.info(Event.POSITION_SET, position=str(state.ledger.position), journalled_batches=len(entries))

    def _journalled(self, position: Position) -> list[JournalEntry]:
        """The batches of a life after the snapshot; forgotten when the stream does not hold their records any more."""
        last = self.learner.number
        entries = self.journal.entries(after_step=last)
        runs = (run for entry in entries for run in entry.runs)
        gone = next((run for run in runs if run.first_offset < position.get(run.origin, math.inf)), None)
        if gone is None:
            return entries
        _log.warning(
            Event.JOURNAL_TRUNCATED,
            fault=f"{gone.origin} must be read again from offset {gone.first_offset}, which is not to be had any more",
            lost=f"the replay order of {len(entries)} batches",
        )
        self.journal.rewind(to_step=last)
        return []

    def journal_batch(self, runs: tuple[PartitionRun, ...]) -> None:
        """Write down the batch of the next step, unless a life before this one wrote down the same."""
        step = self.learner.number + 1
        before = self._ahead.pop(step, None)
        if before == runs:
            return
        if before is not None or self._ahead:  # other batches than before, after an accepted configuration change
            self.journal.rewind(to_step=step - 1)
            self._ahead = {}
        self.journal.append(step, runs)

    def roll_back(self, snapshot: Snapshot, refused: frozenset[RecordId]) -> RunState:
        """The snapshot's state again, in this process; `refused` records will be set aside when they come."""
        state = self.model.restore(snapshot)
        self._mark, self._letters_ahead = snapshot.manifest.dead_letter_mark, letters_ahead(snapshot)
        self._identity = identity(snapshot)
        self.journal.rewind(to_step=self.learner.number)
        self.open_stream(state, refused=refused)
        return state

    def save(self, state: RunState) -> SnapshotInfo:
        """Make everything durable, in this order: dead letters, the snapshot, the broker's offsets.

        Raises:
            DeadLetterError: the letters are not durable, so no snapshot may cover their records.
            SnapshotError: it could not be written; the one before stays.
        """
        self.sink.flush()
        state.pass_gaps(self.source.gaps)
        mark, ahead = self.sink.mark(), self.rejects.ahead_of(state.ledger.position)
        draft = self._draft(state, dict(mark), ahead)
        tensors = {**self.learner.state(), **self.adaptation.state(), "rng.torch": torch.get_rng_state()}
        info = self.store.save(draft, self.model.peft.save_pretrained, tensors)
        self._mark, self._letters_ahead = mark, ahead
        self.source.commit(state.ledger.position, info.name)
        self.store.prune()
        oldest = self.store.names()[0]
        self.journal.truncate(before_step=int(oldest))
        self.crash_guard.passed(state.ledger.position)
        return info

    def _draft(self, state: RunState, mark: dict[str, Any], ahead: list[RecordId]) -> ManifestDraft:
        return ManifestDraft(
            step=self.learner.number,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            position=state.ledger.position,
            ledger=tuple(state.ledger.rows()),
            dead_letter_mark=mark,
            config=fingerprint(self.settings),
            backbone=dict(self.model.backbone.identity),
            adapter=self._adapter,
            dtype=self.model.backbone.arithmetic.name,
            versions=versions(),
            learner=state.to_json(),
            components={
                "stream": {
                    "letters_ahead": [[o.topic, o.partition, offset] for o, offset in ahead],
                    "identity": dict(self.source.identity),
                },
                "regimes": self.adaptation.to_json(),
            },
        )


def adapter_of(settings: Settings) -> HeadLoraConfig:
    """The adapter that the configuration describes, with a CP bias for each regime where routing knows them."""
    steered = objective(settings).bias != "none"
    return resolve(settings.adapter, regimes=settings.shift.max_regimes if steered else 0)


def _has_core_to_spare(device: torch.device) -> bool:
    """Whether something else than a step may run beside it.

    On a CPU whose every core has its part of each product, the part that waits for another thread holds them all up.
    """
    return device.type != "cpu" or torch.get_num_threads() < len(os.sched_getaffinity(0))


def letters_ahead(snapshot: Snapshot) -> list[RecordId]:
    """Dead letters that were written before this snapshot, of records that it does not cover."""
    rows = snapshot.manifest.components["stream"]["letters_ahead"]
    return [RecordId(TopicPartition(topic, partition), offset) for topic, partition, offset in rows]


def identity(snapshot: Snapshot) -> Mapping[str, str]:
    """The source's identity when the snapshot was written; empty when its release did not write that down."""
    found: Mapping[str, str] = snapshot.manifest.components["stream"].get("identity", {})
    return found


def adapter_shape(config: HeadLoraConfig) -> dict[str, Any]:
    """What of an adapter decides the meaning of its weights."""
    names = ("r", "alpha", "num_heads", "num_experts", "top_k", "gate", "router_gradient", "routes", "target_modules")
    vision = {"vision_modules": config.vision_modules} if config.vision_modules else {}
    return {**{name: asdict(config)[name] for name in names}, **vision}


def versions() -> dict[str, str]:
    """Of the packages that decide what a step computes."""
    return {name: version(name) for name in ("streamlearn", "torch", "transformers", "peft", "kafka-python")}


def _accept(snapshot: Snapshot, settings: Settings, shape: Outline, adapter: dict[str, Any], *, accept: bool) -> None:
    identity = backbone_room.identity(settings.backbone, shape)
    changes = compatibility.check(snapshot.manifest, fingerprint(settings), identity, adapter, accept=accept)
    for change in changes:
        _log.warning(Event.CONFIG_CHANGE_ACCEPTED, key=change.key, before=change.old, now=change.new)
