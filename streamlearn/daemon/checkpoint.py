"""Exactly once, through any crash: what is made durable, in which order, and how a run resumes from it.

A snapshot names one position per partition. Every record before it was trained on, held out or dead-lettered; every
record from it on is read again after a restart, and the same batches are formed from it. The classes in `snapshot/`
make single files durable; the order among them is decided here and nowhere else.

    RESTORE, at start and by a rollback
      1. Weights, optimizer, detectors, ledger and history are those of the snapshot; a new run has none.
      2. Dead letters already in the sink for records after its position are recalled, so that none is sent twice.
      3. The source is positioned by the snapshot. The consumer group's offset is never read. Where a partition that the
         snapshot does not name begins is durable before its first record is read: the loop saves first. A partition
         that is not read at present keeps its position for the time when it is read again.
      4. Batches journalled after the snapshot are formed again in the same order and flushed at the same places, then
         new ones.

    FLUSH, when the source is quiet or exhausted
      5. The compositions of all batches that were read, and that the stream is flushed after them, are durable in the
         journal before the open one is closed.

    STEP
      6. A batch's composition is in the journal before it is trained on.

    SAVE
      7. Dead letters up to the position are durable in the sink.
      8. The snapshot is durable: whole, or absent and the one before it still there.
      9. The position is committed to the broker, for lag tools.
     10. What no kept snapshot needs is removed: old snapshots, their journal lines, dead records of the crash guard.

    ROLL BACK, when updates stay non-finite
     11. The newest snapshot is restored (1 to 4) with the journal cut at its step; records of refused updates become
         dead letters when they are read again.

    ROLL BACK, when an operator asks
     12. See `StateControls`; then the newest snapshot is restored (1 to 4). The reader leaves out skipped records from
         then on: they become dead letters, and the position moves past them.

A crash between any two steps repeats work and loses none: after 5 the flush is repeated by 4, after 7 the letters are
recalled by 2, after 8 the commit and the removals are repeated by the next save.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from streamlearn import controls as read_ahead
from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.controls import StateControls
from streamlearn.daemon.model import Model, adapter_shape, versions
from streamlearn.daemon.run_state import RunState
from streamlearn.errors import Reason, SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.history import History, history_part, load_history
from streamlearn.settings import Settings, fingerprint
from streamlearn.snapshot.crash_guard import MAX_CRASHES, CrashGuard
from streamlearn.snapshot.journal import Journal, JournalEntry
from streamlearn.snapshot.manifest import ManifestDraft
from streamlearn.snapshot.parts import Snapshot, SnapshotInfo
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.stream.batch import Batch, Batcher, PartitionRun
from streamlearn.stream.intake import DeadLetterWriter, Intake, Mark, Merger, SkippingReader
from streamlearn.stream.record import Position, RecordId, TopicPartition
from streamlearn.stream.source import DeadLetters, Source

_REFUSED = (Reason.NOT_FINITE_UPDATE, "its update was refused before the rollback")
_KILLED = (Reason.KILLED_PROCESS, f"the process died of it {MAX_CRASHES} times")
_POLLED_BATCHES = 8  # records taken from the source at a time, in full batches
_log = get_logger("checkpoint")


@dataclass(frozen=True)
class Durable:
    """Everything that outlives the process."""

    store: SnapshotStore
    journal: Journal
    crash_guard: CrashGuard
    controls: StateControls
    sink: DeadLetters
    source: Source


class Checkpoint:
    """The protocol above over one model and one stream. Only the thread that owns the model calls it."""

    intake: Intake
    """Batches from the restored position on; a new one after each restore."""
    reader: SkippingReader
    """What the intake reads from; a new one after each restore, as the next."""
    dead_letters: DeadLetterWriter

    def __init__(
        self,
        model: Model,
        durable: Durable,
        settings: Settings,
        config: HeadLoraConfig,
        history: History,
        *,
        decoding: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`decoding` decodes records ahead of training; without it they are decoded when a batch is requested.

        `clock`, monotonic and in seconds, measures the linger.
        """
        self._model = model
        self._durable = durable
        self._settings = settings
        self._adapter = adapter_shape(config)
        self._history = history
        self._decoding = decoding
        self._clock = clock
        self._read_ahead = Position()
        """See `read_ahead`."""
        self._identity: Mapping[str, str] = {}
        """The source's, and that of topics which an earlier process read."""
        self._journalled: dict[int, JournalEntry] = {}
        """Entries of steps that are still to come, by step: written by an earlier process, or by a flush."""

    def restore(self, snapshot: Snapshot | None, *, refused: frozenset[RecordId] = frozenset()) -> RunState:
        """Stand where `snapshot` was written, or at the beginning of a new run; see RESTORE.

        Records in `refused` become dead letters when they are read again.

        Raises:
            SourceError: the source cannot be positioned.
            DeadLetterError: the sink cannot be read.
        """
        durable = self._durable
        state = self._model.restore(snapshot) if snapshot is not None else RunState()  # 1.
        load_history(self._history, snapshot)
        if state.last_snapshot is not None:  # it was written before it could hold itself
            self._history.add_snapshot(state.last_snapshot, self._model.adaptation.state.records)
        # 2. A new run begins at the sink's end: what an earlier run left there is not its own.
        durable.sink.flush()
        mark = snapshot.manifest.dead_letter_mark if snapshot is not None else durable.sink.mark()
        ahead = dead_letters_ahead(snapshot) if snapshot is not None else []
        self.dead_letters = DeadLetterWriter(durable.sink, [*durable.sink.recall(mark), *ahead])
        position = self._seek(state, snapshot)  # 3.
        self._read_ahead = position if snapshot is None else read_ahead.read_ahead(snapshot.manifest)
        self.reader = SkippingReader(durable.source, position, durable.controls.state.skipped, self.dead_letters)
        # 4.
        entries = self._replayable(position)
        self._journalled = {entry.step: entry for entry in entries}
        self.intake = self._open_intake(entries, refused)
        not_read = list(map(str, sorted(state.not_read)))
        _log.info(Event.POSITION_SET, position=str(position), not_read=not_read, journalled_batches=len(entries))
        return state

    def journal_flush(self, compositions: Sequence[tuple[PartitionRun, ...]]) -> SnapshotError | None:
        """Record that the stream is flushed after the next batches, with these compositions; see FLUSH.

        Returns why it could not be made durable, if so: then a replay would not repeat the flush.

        Raises:
            SnapshotError: the journal cannot be rewritten.
        """
        journal, after = self._durable.journal, self._model.learner.number
        last = after + len(compositions)
        entries = [JournalEntry(step, runs, step == last) for step, runs in enumerate(compositions, after + 1)]
        if entries != [self._journalled.get(entry.step) for entry in entries]:
            if self._journalled:
                journal.rewind(to_step=after)
            journal.append_flush(entries)
            self._journalled = {entry.step: entry for entry in entries} if journal.fault is None else {}
        return journal.fault

    def journal(self, batch: Batch) -> SnapshotError | None:
        """Record the composition of the next step's batch; see STEP.

        Returns why it could not be written, if so: no record is lost or trained twice without it, but several
        partitions may then replay in another order.
        """
        journal, step = self._durable.journal, self._model.learner.number + 1
        expected = self._journalled.pop(step, None)
        if expected is None or expected.runs != batch.runs:
            if expected is not None or self._journalled:  # batches differ after an accepted configuration change
                journal.rewind(to_step=step - 1)
                self._journalled = {}
            journal.append(step, batch.runs)
        return journal.fault

    @property
    def journal_lags(self) -> bool:
        """Whether the composition of a batch that was trained on could not be written."""
        return self._durable.journal.lags

    def retry_journal(self) -> SnapshotError | None:
        """Write again what the journal lacks; returns like `journal`."""
        self._durable.journal.retry()
        return self._durable.journal.fault

    def save(self, state: RunState) -> SnapshotInfo:
        """Make the present state durable; see SAVE.

        Raises:
            DeadLetterError: dead letters are not durable, so no snapshot may cover their records.
            SnapshotError: the snapshot could not be written; the one before it is untouched.
        """
        durable, model = self._durable, self._model
        durable.sink.flush()  # 7.
        self.pass_gaps(state)
        draft = self._draft(state)  # 8.
        info = durable.store.save(draft, [*model.parts(), history_part(self._history)])
        durable.source.commit(state.read_position, info.name)  # 9.
        durable.store.prune()  # 10.
        # A pinned snapshot needs none: a rollback to it begins anew after it.
        durable.journal.truncate(before_step=int(durable.store.names()[-durable.store.keep :][0]))
        durable.crash_guard.passed(state.ledger.position)
        return info

    def pass_gaps(self, state: RunState) -> None:
        """Move the position past what was lost or skipped, where every record before it is accounted for."""
        state.skip_gaps(self._durable.source.gaps)
        state.skip(self.reader.take_passed(state.ledger.position))

    def roll_back(self, snapshot: Snapshot, refused: frozenset[RecordId]) -> RunState:
        """Restore `snapshot` in this process and leave out the records of refused updates; see ROLL BACK."""
        self._durable.journal.rewind(to_step=snapshot.manifest.step)
        return self.restore(snapshot, refused=refused)

    def _seek(self, state: RunState, snapshot: Snapshot | None) -> Position:
        """Position the source and the ledger; return where each partition begins that is read."""
        source, wanted = self._durable.source, state.ledger.position
        identity = source_identity(snapshot) if snapshot is not None else {}
        position = source.seek(wanted, identity)
        self._identity = {**identity, **source.identity}
        is_new = snapshot is not None and not position.keys() <= wanted.keys()
        state.moved_since_save = is_new or bool(wanted.gaps_to(position))
        state.not_read = frozenset(wanted.keys() - position.keys())
        state.ledger.position = Position({**wanted, **position})
        return position

    def _replayable(self, position: Position) -> list[JournalEntry]:
        """Batches journalled after the restored step; none when the stream no longer holds their records."""
        journal, step = self._durable.journal, self._model.learner.number
        entries = journal.entries(after_step=step)
        runs = (run for entry in entries for run in entry.runs)
        gone = next((run for run in runs if run.first_offset < position.get(run.origin, math.inf)), None)
        if gone is not None:
            fault = f"offset {gone.first_offset} of {gone.origin} must be read again and is no longer available"
            if gone.origin not in position:
                fault = f"offset {gone.first_offset} of {gone.origin} must be read again and its topic is not read"
        elif entries and entries[0].step != step + 1:
            fault = f"the journal must go on after step {step}, found step {entries[0].step}"
        else:
            return entries
        _log.warning(Event.JOURNAL_TRUNCATED, fault=fault, lost=f"the replay order of {len(entries)} batches")
        journal.rewind(to_step=step)
        return []

    def _open_intake(self, entries: list[JournalEntry], refused: frozenset[RecordId]) -> Intake:
        guard, stream = self._durable.crash_guard, self._settings.stream
        return Intake(
            Merger(self.reader, _order(entries), clock=self._clock),
            self._model.decoder,
            Batcher(stream),
            self.dead_letters,
            max_records=stream.batch_records * _POLLED_BATCHES,
            given_up={**dict.fromkeys(refused, _REFUSED), **dict.fromkeys(guard.given_up, _KILLED)},
            decoding=guard.decoding,
            ahead=self._decoding,
            linger_s=stream.linger_s,
            clock=self._clock,
        )

    def _draft(self, state: RunState) -> ManifestDraft:
        durable, model = self._durable, self._model
        self._read_ahead = read_ahead.advanced(self._read_ahead, state.ledger.position, model.adaptation.waiting)
        ahead = self.dead_letters.ahead_of(state.ledger.position)
        return ManifestDraft(
            step=model.learner.number,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),  # noqa: TID251 - for people
            position=state.ledger.position,
            ledger=tuple(state.ledger.rows()),
            dead_letter_mark=dict(durable.sink.mark()),
            config=fingerprint(self._settings),
            backbone=dict(model.backbone.identity),
            adapter=self._adapter,
            dtype=model.backbone.arithmetic.name,
            versions=versions(),
            learner=state.to_json(),
            components={
                "stream": {
                    "letters_ahead": [[o.topic, o.partition, offset] for o, offset in ahead],
                    "identity": {**self._identity, **durable.source.identity},
                    read_ahead.KEY: self._read_ahead.to_json(),
                },
                "regimes": model.adaptation.json(),
            },
        )


def _order(entries: list[JournalEntry]) -> Iterator[PartitionRun | Mark]:
    """The journalled order of records and flushes."""
    for entry in entries:
        yield from entry.runs
        if entry.flush:
            yield Mark.FLUSH


def dead_letters_ahead(snapshot: Snapshot) -> list[RecordId]:
    """Dead letters sent before this snapshot was written, for records that it does not cover."""
    rows = snapshot.manifest.components["stream"]["letters_ahead"]
    return [RecordId(TopicPartition(topic, partition), offset) for topic, partition, offset in rows]


def source_identity(snapshot: Snapshot) -> Mapping[str, str]:
    """The source's identity when the snapshot was written; empty for releases that did not store it."""
    found: Mapping[str, Any] = snapshot.manifest.components["stream"].get("identity", {})
    return found
