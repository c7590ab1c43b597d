"""Exactly once, through any crash: what is made durable, in which order, and how a run resumes from it.

A snapshot names one position per partition. Every record before it was trained on, held out, dead-lettered or ignored;
every record from it on is read again after a restart, and the same batches are formed from it. The classes in
`snapshot/` make single files durable; the order among them is decided here and nowhere else.

    RESTORE, at start and by a rollback
      1. Weights, optimizer, detectors and ledger are those of the snapshot; a new run has none. The history is cut at
         the snapshot's step.
      2. Dead letters already in the sink for records after its position are recalled, so that none is sent twice.
      3. The source is positioned by the snapshot. The consumer group's offset is never read. Where a partition that the
         snapshot does not name begins is durable before its first record is read: the loop saves first. A partition
         that is not read at present keeps its position for the time when it is read again.
      4. A stream of one partition is flushed again where the journal says so, and the batches after the snapshot are
         formed again as they were. Of several partitions each record is read once; the batches may differ.

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
     12. See `StateControls`; then the newest snapshot is restored (1 to 4). The intake leaves out skipped records from
         then on: they become dead letters, and the position moves past them.

A crash between any two steps repeats work and loses none: after 5 the flush is repeated by 4, after 7 the letters are
recalled by 2, after 8 the commit and the removals are repeated by the next save.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self

from torch import Tensor

from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.codec import NOT_SAVED
from streamlearn.controls import StateControls, advanced
from streamlearn.daemon.model import Model, adapter_shape
from streamlearn.daemon.process import return_freed_memory, versions
from streamlearn.errors import Reason, SnapshotError, StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.history import History
from streamlearn.learner.learner import Step
from streamlearn.settings import Settings, fingerprint
from streamlearn.snapshot.crash_guard import MAX_CRASHES, CrashGuard
from streamlearn.snapshot.files import is_disk_full
from streamlearn.snapshot.journal import Journal, JournalEntry
from streamlearn.snapshot.manifest import LedgerRow, ManifestDraft
from streamlearn.snapshot.parts import Snapshot, SnapshotInfo, dump_components
from streamlearn.snapshot.store import SnapshotStore
from streamlearn.status import SnapshotStatus
from streamlearn.stream.intake import BatchEnd, Intake
from streamlearn.stream.position import Gap, PartitionRun, Position, RecordId, TopicPartition
from streamlearn.stream.record import Batch, Record
from streamlearn.stream.source import DeadLetters, Source

_REFUSED = (Reason.NOT_FINITE_UPDATE, "its update was refused before the rollback")
_KILLED = (Reason.KILLED_PROCESS, f"the process died of it {MAX_CRASHES} times")
_log = get_logger("checkpoint")


SMOOTHING = 0.98  # of the published loss: an average over about 50 batches
RETRY_S = 10.0  # between attempts to write a snapshot, and missing journal lines on a quiet stream
MIN_SNAPSHOTS = 2  # kept even when the disk is full


@dataclass
class Ledger:
    """Counts that add up: read = trained + dead-lettered + held out + ignored. The position follows the last one."""

    position: Position = field(default_factory=Position)
    trained: Counter[TopicPartition] = field(default_factory=Counter)
    dead_lettered: Counter[TopicPartition] = field(default_factory=Counter)
    held_out: Counter[TopicPartition] = field(default_factory=Counter)
    ignored: Counter[TopicPartition] = field(default_factory=Counter)

    def account(self, batch: Batch, *, refused: bool, held_out: Collection[int] = ()) -> None:
        """Count a batch: its records were trained on, or dead-lettered if the update was refused.

        `held_out` holds the indices of records that were evaluated only.
        """
        self.dead_lettered.update(dead_lettered.id.origin for dead_lettered in batch.dead_lettered)
        self.ignored.update(ignored.id.origin for ignored in batch.ignored)
        column = self.dead_lettered if refused else self.trained
        for index, record in enumerate(batch.records):
            (self.held_out if index in held_out else column)[record.origin] += 1
        self.position = Position({**self.position, **{run.origin: run.next_offset for run in batch.runs}})

    def skip(self, run: PartitionRun) -> None:
        """Count records that became dead letters outside of any batch."""
        self.dead_lettered[run.origin] += run.num_records
        self.position = Position({**self.position, run.origin: run.next_offset})

    def rows(self) -> list[LedgerRow]:
        """One row per partition, sorted."""
        columns = self.trained, self.dead_lettered, self.held_out, self.ignored
        origins = sorted(set(self.position).union(*columns))
        return [LedgerRow(o.topic, o.partition, *(column[o] for column in columns)) for o in origins]

    @classmethod
    def restore(cls, position: Position, rows: Iterable[LedgerRow]) -> Self:
        """The inverse of `rows`, with the position of the same snapshot."""
        ledger = cls(position)
        for row in rows:
            origin = TopicPartition(row.topic, row.partition)
            ledger.trained[origin], ledger.dead_lettered[origin] = row.trained, row.dead_lettered
            ledger.held_out[origin], ledger.ignored[origin] = row.held_out, row.ignored
        return ledger


@dataclass
class RunState:
    """The loop's own state: the ledger and running totals. Only the loop changes it.

    A snapshot has the ledger in its manifest and the other saved fields in the component `run`.
    """

    ledger: Ledger = field(default_factory=Ledger, metadata=NOT_SAVED)
    tokens: int = 0
    """Tokens trained on."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Dead letters by reason."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Ignored records by reason."""
    truncated: Counter[str] = field(default_factory=Counter)
    """Records cut to `stream.max_tokens`, by form."""
    cut_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that they lost, by form."""
    refusals: int = 0
    """Updates refused because of a non-finite loss or gradient."""
    bad_in_a_row: int = 0
    """Updates refused since the last one that was made."""
    loss: float | None = None
    """Prequential loss of the last batch, nats per token."""
    loss_smoothed: float | None = None

    last_snapshot: SnapshotStatus | None = field(default=None, metadata=NOT_SAVED)
    records_since_save: int = field(default=0, metadata=NOT_SAVED)
    refused_since_save: set[RecordId] = field(default_factory=set, metadata=NOT_SAVED)
    moved_since_save: bool = field(default=False, metadata=NOT_SAVED)
    """Whether the position skipped lost records, or got the start of a partition that no snapshot names."""
    changed_since_save: bool = field(default=False, metadata=NOT_SAVED)
    """Whether an operator changed regimes, and the snapshot after it could not be written."""
    not_read: frozenset[TopicPartition] = field(default_factory=frozenset, metadata=NOT_SAVED)
    """Partitions in the position that the source does not read: their topic was taken out of the stream."""
    rolled_back_to: str | None = field(default=None, metadata=NOT_SAVED)
    """The snapshot that the last rollback restored, until a later one is written."""

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Self:
        """The state when a snapshot was written."""
        manifest, state = snapshot.manifest, snapshot.component("run", cls)
        state.ledger = Ledger.restore(manifest.position, manifest.ledger)
        written = datetime.fromisoformat(manifest.created_at).timestamp()
        state.last_snapshot = SnapshotStatus(snapshot.name, manifest.step, written)
        return state

    def account(self, batch: Batch, step: Step | None, held_out: Collection[int] = ()) -> None:
        """Count a batch and its step; `step` is None when no record of the batch was trained on."""
        refused = step is not None and step.refusal is not None
        self.ledger.account(batch, refused=refused, held_out=held_out)
        self.reasons.update(str(dead_lettered.reason) for dead_lettered in batch.dead_lettered)
        self.ignored.update(str(ignored.reason) for ignored in batch.ignored)
        for truncation in batch.truncations:
            self.truncated[truncation.form] += 1
            self.cut_tokens[truncation.form] += truncation.num_cut
        self.records_since_save += len(batch.records) + len(batch.dead_lettered) + len(batch.ignored)
        if step is None:
            return
        if refused:
            self._refuse([record for index, record in enumerate(batch.records) if index not in held_out])
        else:
            self.bad_in_a_row = 0
            self.tokens += step.tokens
            self.loss = step.loss
            before = step.loss if self.loss_smoothed is None else self.loss_smoothed
            self.loss_smoothed = SMOOTHING * before + (1 - SMOOTHING) * step.loss

    def skip_gaps(self, gaps: Iterable[Gap]) -> None:
        """Move the position past what the source skipped, where every record before it is accounted for."""
        for gap in gaps:
            position = self.ledger.position
            if position.get(gap.origin) == gap.lost_from:
                self.ledger.position = Position({**position, gap.origin: gap.lost_to})
                self.moved_since_save = True

    def skip(self, runs: Iterable[PartitionRun]) -> None:
        """Count records that an operator skips, and move the position past them: all before are accounted for."""
        for run in runs:
            self.ledger.skip(run)
            self.reasons[str(Reason.SKIPPED)] += run.num_records
            self.records_since_save += run.num_records

    def _refuse(self, records: Sequence[Record]) -> None:
        self.refusals += 1
        self.bad_in_a_row += 1
        self.reasons[str(Reason.NOT_FINITE_UPDATE)] += len(records)
        self.refused_since_save.update(record.id for record in records)

    def saved(self, snapshot: SnapshotStatus) -> None:
        """A snapshot of this state is durable."""
        self.last_snapshot = snapshot
        self.records_since_save = 0
        self.refused_since_save = set()
        self.moved_since_save = False
        self.changed_since_save = False
        self.rolled_back_to = None

    @property
    def read_position(self) -> Position:
        """The position, without partitions that are not read. They keep their offset until they are read again."""
        position = self.ledger.position
        return Position({origin: position[origin] for origin in position if origin not in self.not_read})

    @property
    def records(self) -> int:
        """Records that are done: trained on, dead-lettered, held out or ignored."""
        ledger = self.ledger
        return sum(column.total() for column in (ledger.trained, ledger.dead_lettered, ledger.held_out, ledger.ignored))


@dataclass(frozen=True)
class StreamState:
    """A snapshot's component `stream`: the stream's state apart from positions, which are in the manifest."""

    dead_letters_ahead: tuple[RecordId, ...] = ()
    """Dead letters that were sent before the snapshot was written, for records that it does not cover."""
    source_identity: dict[str, str] = field(default_factory=dict)
    """Identity of the source, and of topics that an earlier process read."""


class Checkpoint:
    """The protocol above for one model and one stream. Only the thread that owns the model calls it."""

    intake: Intake
    """Batches from the restored position on; a new one after each restore."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        config: HeadLoraConfig,
        *,
        store: SnapshotStore,
        journal: Journal,
        crash_guard: CrashGuard,
        controls: StateControls,
        sink: DeadLetters,
        source: Source,
        history: History,
        decoding: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`decoding` decodes records ahead of training; without it they are decoded when a batch is requested.

        `clock`, monotonic and in seconds, measures the linger and the time between snapshots.
        """
        self._model = model
        self._settings = settings
        self._adapter = adapter_shape(config)
        self._store, self._journal, self._crash_guard, self._controls = store, journal, crash_guard, controls
        self._sink, self._source = sink, source
        self._history = history
        self._decoding = decoding
        self._clock = clock
        self._saved_at = clock()
        self._retry_at = self._retry_journal_at = self._saved_at
        self._read_ahead = Position()
        """See `ManifestDraft.read_ahead`."""
        self._identity: Mapping[str, str] = {}
        """See `StreamState.source_identity`."""
        self._journalled: dict[int, JournalEntry] = {}
        """Entries of steps that are still to come, by step: written by an earlier process, or by a flush."""

    def restore(self, snapshot: Snapshot | None, *, refused: frozenset[RecordId] = frozenset()) -> RunState:
        """Return to where `snapshot` was written, or to the beginning of a new run; see RESTORE.

        Records in `refused` become dead letters when they are read again.

        Raises:
            SourceError: the source cannot be positioned.
            DeadLetterError: the sink cannot be read.
        """
        state, ahead = RunState(), StreamState()
        if snapshot is not None:  # 1.
            self._model.restore(snapshot)
            state, ahead = RunState.from_snapshot(snapshot), snapshot.component("stream", StreamState)
            position = str(snapshot.manifest.position)
            _log.info(Event.SNAPSHOT_RESTORED, name=snapshot.name, records=state.records, position=position)
        self._history.restore(None if snapshot is None else snapshot.manifest.step)
        if state.last_snapshot is not None:  # the history was written before it could contain this snapshot
            self._history.add_snapshot(state.last_snapshot, self._model.adaptation.state.records)
        # 2. A new run begins at the sink's end: what an earlier run left there is not its own.
        self._sink.flush()
        mark = snapshot.manifest.dead_letter_mark if snapshot is not None else self._sink.mark()
        known = [*self._sink.recall(mark), *ahead.dead_letters_ahead]
        begins = self._seek(state, ahead.source_identity, is_new=snapshot is None)  # 3.
        self._read_ahead = begins if snapshot is None else snapshot.manifest.read_ahead
        # 4.
        entries = self._replayable(begins)
        self._journalled = {entry.step: entry for entry in entries}
        self.intake = self._open_intake(begins, entries, known, refused)
        not_read = list(map(str, sorted(state.not_read)))
        _log.info(Event.POSITION_SET, position=str(begins), not_read=not_read, journalled_batches=len(entries))
        return state

    def journal_flush(self, compositions: Sequence[tuple[PartitionRun, ...]]) -> SnapshotError | None:
        """Record that the stream is flushed after the next batches, with these compositions; see FLUSH.

        Returns why it could not be made durable, if so: then a replay would not repeat the flush.

        Raises:
            SnapshotError: the journal cannot be rewritten.
        """
        journal, after = self._journal, self._model.learner.number
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

        Returns why it could not be written, if so: no record is lost or trained twice without it.
        """
        journal, step = self._journal, self._model.learner.number + 1
        expected = self._journalled.pop(step, None)
        if expected is None or expected.runs != batch.runs:
            if expected is not None or self._journalled:
                # After an accepted change of the configuration, or where records are gone that must be read again.
                lost = "the composition of the batches from there on"
                _log.warning(Event.JOURNAL_TRUNCATED, fault=f"the batch of step {step} has other records", lost=lost)
                journal.rewind(to_step=step - 1)
                self._journalled = {}
            journal.append(step, batch.runs)
        return journal.fault

    @property
    def journal_lags(self) -> bool:
        """Whether the composition of a batch that was trained on could not be written."""
        return self._journal.lags

    def retry_journal(self) -> SnapshotError | None:
        """Write what the journal lacks, at most every `RETRY_S`; returns like `journal`."""
        if self._clock() >= self._retry_journal_at:
            self._retry_journal_at = self._clock() + RETRY_S
            self._journal.retry()
        return self._journal.fault

    def is_due(self, state: RunState) -> bool:
        """Whether to save: by records or by time, when anything is new; at once after a gap or a change of regimes.

        Otherwise a crash would meet the same gap again, and `offset.gap.policy: latest` would skip the records that
        arrived since; what an operator decided would be forgotten.
        """
        settings, now = self._settings.snapshot, self._clock()
        self.pass_gaps(state)
        by_time = now - self._saved_at >= settings.every_s and state.records_since_save > 0
        # Not right after a rollback: until the next regular snapshot a second rollback means divergence.
        moved = state.moved_since_save and state.rolled_back_to is None
        due = state.records_since_save >= settings.every_records or by_time or moved or state.changed_since_save
        return due and now >= self._retry_at

    def postpone_save(self, error: StreamlearnError) -> None:
        """Retry a failed snapshot after `RETRY_S`; on a full disk, make room for it."""
        self._retry_at = self._clock() + RETRY_S
        if is_disk_full(error):
            self._store.prune(keep=MIN_SNAPSHOTS)

    def save(self, state: RunState) -> SnapshotInfo:
        """Make the present state durable; see SAVE.

        Raises:
            DeadLetterError: dead letters are not durable, so no snapshot may cover their records.
            SnapshotError: the snapshot could not be written; the one before it is untouched.
        """
        started = time.monotonic()
        info = self._save(state)
        return_freed_memory()
        self._saved_at, seconds = self._clock(), time.monotonic() - started
        written = SnapshotStatus(info.name, info.step, datetime.fromisoformat(info.created_at).timestamp(), seconds)
        state.saved(written)
        self._history.add_snapshot(written, self._model.adaptation.state.records)
        sizes = {"bytes": info.bytes, "new_bytes": self._store.new_bytes}
        _log.info(Event.SNAPSHOT_WRITTEN, name=info.name, **sizes, seconds=round(seconds, 3))
        return info

    def _save(self, state: RunState) -> SnapshotInfo:
        self._sink.flush()  # 7.
        self.pass_gaps(state)
        draft, tensors = self._draft(state)  # 8.
        info = self._store.save(draft, self._model.parts(tensors))
        self._source.commit(state.read_position, info.name)  # 9.
        self._store.prune()  # 10.
        # A pinned snapshot needs none: a rollback to it starts a new journal after it.
        oldest = int(self._store.names()[-self._store.keep :][0])
        self._journal.truncate(before_step=oldest)
        self._history.sync(rewind_to=oldest)
        self._crash_guard.passed(state.ledger.position)
        return info

    def pass_gaps(self, state: RunState) -> None:
        """Move the position past what was lost or skipped, where every record before it is accounted for."""
        state.skip_gaps(self._source.gaps)
        state.skip(self.intake.take_skipped(state.ledger.position))

    def roll_back(self, snapshot: Snapshot, refused: frozenset[RecordId]) -> RunState:
        """Restore `snapshot` in this process and leave out the records of refused updates; see ROLL BACK."""
        self._journal.rewind(to_step=snapshot.manifest.step)
        return self.restore(snapshot, refused=refused)

    def _seek(self, state: RunState, identity: Mapping[str, str], *, is_new: bool) -> Position:
        """Position the source and the ledger; return where each partition begins that is read."""
        wanted = state.ledger.position
        position = self._source.seek(wanted, identity, self._controls.state.skipped)
        self._identity = {**identity, **self._source.identity}
        has_new_partition = not is_new and not position.keys() <= wanted.keys()
        state.moved_since_save = has_new_partition or bool(wanted.gaps_to(position))
        state.not_read = frozenset(wanted.keys() - position.keys())
        state.ledger.position = Position({**wanted, **position})
        return position

    def _replayable(self, position: Position) -> list[JournalEntry]:
        """Batches of one partition journalled after the restored step; none when the stream lacks their records."""
        journal, step = self._journal, self._model.learner.number
        entries = journal.entries(after_step=step)
        runs = [run for entry in entries for run in entry.runs]
        gone = next((run for run in runs if run.first_offset < position.get(run.origin, math.inf)), None)
        if gone is not None:
            fault = f"offset {gone.first_offset} of {gone.origin} must be read again and is no longer available"
            if gone.origin not in position:
                fault = f"offset {gone.first_offset} of {gone.origin} must be read again and its topic is not read"
        elif len(position) > 1:
            journal.rewind(to_step=step)
            return []
        elif entries and entries[0].step != step + 1:
            fault = f"the journal must go on after step {step}, found step {entries[0].step}"
        else:
            return entries
        _log.warning(Event.JOURNAL_TRUNCATED, fault=fault, lost=f"the composition of {len(entries)} batches")
        journal.rewind(to_step=step)
        return []

    def _open_intake(
        self, position: Position, entries: list[JournalEntry], known: list[RecordId], refused: frozenset[RecordId]
    ) -> Intake:
        guard = self._crash_guard
        ends = [(entry.runs[-1], entry.flush) for entry in entries if entry.runs]
        return Intake(
            self._source,
            position,
            self._model.decoder,
            self._sink,
            self._settings.stream,
            known=known,
            journalled=[BatchEnd(RecordId(run.origin, run.next_offset - 1), flush) for run, flush in ends],
            skipped=self._controls.state.skipped,
            given_up={**dict.fromkeys(refused, _REFUSED), **dict.fromkeys(guard.given_up, _KILLED)},
            ignored=self._model.decoder.mapping.ignored,
            decoding=guard.decoding,
            ahead=self._decoding,
            clock=self._clock,
        )

    def _draft(self, state: RunState) -> tuple[ManifestDraft, dict[str, Tensor]]:
        """The manifest, and the tensors of the components in it."""
        model, position = self._model, state.ledger.position
        self._read_ahead = advanced(self._read_ahead, position, model.adaptation.waiting)
        ahead = tuple(self.intake.dead_letters_from(position))
        stream = StreamState(ahead, {**self._identity, **self._source.identity})
        tensors, components = dump_components({"run": state, "stream": stream, "regimes": model.adaptation.save()})
        draft = ManifestDraft(
            step=model.learner.number,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),  # noqa: TID251 - for people
            position=position,
            read_ahead=self._read_ahead,
            ledger=tuple(state.ledger.rows()),
            dead_letter_mark=dict(self._sink.mark()),
            config=fingerprint(self._settings),
            backbone=dict(model.backbone.identity),
            adapter=self._adapter,
            dtype=model.backbone.arithmetic.name,
            versions=versions(),
            regime_changes=model.adaptation.state.num_changes,
            components=components,
        )
        return draft, tensors
