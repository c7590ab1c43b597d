"""The training loop: one thread, one batch per iteration, packages called in the order the data flows through them.

`Components` checks and builds everything; `Daemon.run` learns until the stream ends or a signal stops it.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

from threadpoolctl import threadpool_limits

from streamlearn.board import Board
from streamlearn.controls import Control, Scope
from streamlearn.daemon.build import Components
from streamlearn.daemon.process import Degradation
from streamlearn.errors import DeadLetterError, DivergedError, Reason, SnapshotError, StreamlearnError, UsageError
from streamlearn.events import Event, get_logger
from streamlearn.history import BatchOutcome, refusal_message
from streamlearn.jobs.queue import ControlJob, ControlResult, JobQueue, SnapshotResult
from streamlearn.jobs.runner import JobRunner, control_result
from streamlearn.learner.learner import Step
from streamlearn.regimes.holdout import BackboneComparison, Role
from streamlearn.regimes.report import ShiftReport
from streamlearn.shift.detector import Shift
from streamlearn.shift.monitor import AssignedBatch
from streamlearn.snapshot.crash_guard import GuardedBatch
from streamlearn.snapshot.parts import SnapshotInfo, snapshot_name
from streamlearn.status import PartitionStatus, Phase, Status
from streamlearn.stream.intake import FlushReason
from streamlearn.stream.record import Batch

_log = get_logger("daemon")

PUBLISH_POLL_S = 0.02  # between two checks whether the publisher has something to score, at the end of the stream
POLL_S = 0.2  # maximum wait for records in one iteration: a stop, a job or a due snapshot waits at most this long
SPEED_WINDOW_S = 30.0  # tokens/s is an average over this time
LOG_INTERVAL_S = 10.0  # one step per interval is logged at level info, every step at level debug


class Observer(Protocol):
    """Called by the loop, in its thread: the progress display."""

    def on_start(self, status: Status) -> None:
        """The first record is about to be read."""

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """A batch was trained on or refused; held-out records are not in it."""

    def on_shift(self, report: ShiftReport) -> None:
        """A shift was acted on, or the first regime was entered."""

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """A snapshot is durable."""


class Daemon:
    """Owns the loop. `stop` may be called from a signal handler; everything else belongs to the thread of `run`."""

    def __init__(
        self, components: Components, board: Board, jobs: JobQueue, *, observer: Observer | None = None
    ) -> None:
        self.components = components
        self.checkpoint = components.checkpoint
        self.learner = components.learner
        self.adaptation = components.adaptation
        self.adapter_publisher = components.adapter_publisher
        self.history = components.history
        self.comparison = BackboneComparison(components.learner, components.settings.holdout)
        self.state = components.state
        self.board = board
        self.observer = observer
        self.controls = components.controls
        self.job_runner = JobRunner(
            jobs,
            components.learner,
            components.decoder,
            components.adaptation.route,
            self._snapshot_on_request,
            self.control,
            pack_tokens=components.settings.stream.batch_tokens,
        )
        self.degradation = Degradation(components.settings.snapshot.max_age_s)
        self._throughput = Throughput()
        self._has_published = False
        self._logged_at = 0.0
        self._truncates = False
        """Whether the last batch had truncated records."""
        self._stop_reason: str | None = None
        self._fault: StreamlearnError | None = None
        """Why the process must end: memory may differ from disk."""

    def stop(self, reason: str) -> None:
        """Make the loop end after the current step."""
        self._stop_reason = self._stop_reason or reason

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called; False when the stream ended by itself."""
        return self._stop_reason is not None

    def run(self) -> None:
        """Learn until `stop` is called or the stream ends, then write a last snapshot.

        Raises:
            StreamlearnError: see errors.py. What is on disk by then is whole.
        """
        try:
            # NumPy's threads keep a core busy for milliseconds after each product, into the next training step.
            with threadpool_limits(1, user_api="blas"):
                self.start()
                for batch in self.batches():
                    self.advance(batch)
                self._finish()
        finally:
            self.job_runner.close()

    def advance(self, batch: AssignedBatch) -> Step | None:
        """Learn one batch, and do what is due after it; see `learn`."""
        for shift in (*self.adaptation.not_entered(batch.late), *batch.shifts):
            self.enter(shift)
        step = self.learn(batch)
        self.save_if_due()
        self.serve_jobs()
        self.adaptation.score_stalest(idle=False)
        self._compare_with_backbone(idle=False)
        self._score_versions(idle=False)
        return step

    def batches(self) -> Iterator[AssignedBatch]:
        """stream/, shift/: the batches with their regimes decided, until the stream ends or `stop` is called.

        While none is ready, and while the daemon is paused, jobs are served and due snapshots written.
        """
        while not self.stopped:
            if self.controls.state.paused:
                if not self._idle(Phase.PAUSED):
                    time.sleep(POLL_S)
            elif (batch := self.adaptation.next_batch()) is not None:
                yield batch
            elif not self._read():
                return

    def start(self) -> None:
        """Make the start durable and announce it, before the first batch."""
        self.save_start()
        self.save_if_due()
        self._publish(self._phase, ready=True)
        if self.observer:
            self.observer.on_start(self.board.read())
        if self.adapter_publisher is not None:
            last = self.state.last_snapshot
            assert last is not None, "the start is saved"
            self._publish_versions_of(last.name, last.step)  # an earlier process may not have got to it
            self.adapter_publisher.start()

    def _finish(self) -> None:
        if self.stopped:
            _log.info(Event.STOP_REQUESTED, reason=self._stop_reason)
        self._publish(Phase.STOPPING, reason="the daemon is stopping")
        self.save()
        if not self.stopped:
            self._finish_publishing()

    def score_all(self) -> None:
        """Score the hold-out records of every regime under the current weights, at the end of a finite stream."""
        while self.adaptation.score_stalest(idle=True):
            self.board.beat()
        self._publish(self.board.read().phase)

    def _read(self) -> bool:
        """Pass one batch from the source to the look-ahead, or flush; do other work while the stream is quiet.

        Returns False at the end of the stream, when nothing is left to train on.
        """
        intake = self.checkpoint.intake
        batch = intake.next_batch(timeout_s=0.0 if self.job_runner.busy else POLL_S)
        if batch is not None:
            self.adaptation.look_ahead(batch)
            return True
        reason = intake.flush_due
        if reason is not None and self._flush(reason):
            return True
        if reason is FlushReason.END:
            _log.info(Event.SOURCE_EXHAUSTED, records=self.state.records)
            return False
        self._idle()
        return True

    def _flush(self, reason: FlushReason) -> bool:
        """Make everything that was read ready for training without waiting for more; return whether there was any."""
        intake = self.checkpoint.intake
        compositions = [batch.runs for batch in self.adaptation.waiting]
        compositions += [intake.open_runs] if intake.open_runs else []
        if compositions:
            fault = self.checkpoint.journal_flush(compositions)
            self._note_journal(fault)
            if fault is not None and reason is FlushReason.LINGER:  # a replay would not know of it
                intake.postpone_flush()
                return False
            _log.info(Event.STREAM_FLUSHED, reason=reason, batches=len(compositions))
        elif reason is not FlushReason.JOURNAL:
            return False
        for last in intake.flush():
            self.adaptation.look_ahead(last)
        self.adaptation.flush()
        return True

    def _idle(self, phase: Phase = Phase.IDLE) -> bool:
        """Do other work than training; return whether more of it may wait."""
        self._publish(phase, ready=True)
        self.save_if_due()
        if self.checkpoint.journal_lags:  # on a quiet stream no batch comes whose line would be written after them
            self._note_journal(self.checkpoint.retry_journal())
        self.serve_jobs()
        self._compare_with_backbone(idle=True)
        return self.job_runner.busy or self._score_versions(idle=True) or self.adaptation.score_stalest(idle=True)

    @property
    def _phase(self) -> Phase:
        return Phase.PAUSED if self.controls.state.paused else Phase.RUNNING

    def enter(self, shift: Shift) -> None:
        """regimes/: close the current regime, and open or return to another."""
        self._notify(self.adaptation.enter(shift, self.adaptation.upcoming(shift.slot)))
        self.board.beat()

    def learn(self, assigned: AssignedBatch) -> Step | None:
        """learner/: one step, or none when no record of the batch is trained on; then the ledger."""
        self._note_journal(self.checkpoint.journal(assigned.batch))
        divided = self.adaptation.divide(assigned)
        measured = self._measure(*divided.part(Role.MEASURED))
        batch, slots = divided.part(Role.TRAINED)
        step = self._train(batch, slots)
        if step is not None and step.refusal is not None:
            self._dead_letter(batch, step)
        elif step is not None and step.ended is not None:
            _log.error(Event.UPDATE_REFUSED, step=step.number, refusal=step.ended, records=0)
        for report in self.adaptation.after_step(divided, step, measured):
            self._notify(report)
        self.state.account(assigned.batch, step, divided.not_trained)
        self._note_truncations(assigned.batch)
        is_rolled_back = self.state.bad_in_a_row >= self.components.settings.learner.max_bad_batches
        if is_rolled_back:
            self._publish(Phase.RUNNING, ready=True)  # process counters keep what the rollback takes back
            self._roll_back()
        self._publish(Phase.RUNNING, ready=True, step=step)
        if not is_rolled_back:
            self._remember(assigned, batch, step)
        if step is not None:
            self.board.counters.step_seconds.observe(step.seconds)
            self.comparison.add(batch, step)
            if self.observer:
                self.observer.on_step(batch, step, self.board.read())
        return step

    def _remember(self, assigned: AssignedBatch, trained: Batch, step: Step | None) -> None:
        """history/: a point for the batch; `trained` is the part of it that the step was made from."""
        outcome = BatchOutcome(
            batch=assigned.batch,
            shifts=assigned.shifts,
            regimes=tuple(map(self.adaptation.numbers.get, assigned.slots)),
            last_record=self.adaptation.state.records,
            number=self.learner.number,
            step=step,
            refused=tuple(record.id for record in trained.records),
        )
        self.history.add(outcome, self.board.read())

    def _compare_with_backbone(self, *, idle: bool) -> None:
        """history/: the frozen backbone's loss of a record next to the model's, when time allows."""
        pair = self.comparison.measure(idle=idle)
        if pair is not None:
            self.history.add_pair(pair)

    def _measure(self, batch: Batch, slots: tuple[int, ...]) -> list[float]:
        """Losses of records that are not trained on, in nats per learned token."""
        if not batch.examples:
            return []
        with self._guarded(batch) as guarded:
            return self.learner.measure(batch.examples, slots, parts=guarded.parts, on_record=guarded.on_record)

    def _train(self, batch: Batch, slots: tuple[int, ...]) -> Step | None:
        if not batch.examples:
            self.learner.skip_step()
            return None
        with self._guarded(batch) as guarded:
            return self.learner.step(
                batch.examples,
                slots,
                parts=guarded.parts,
                on_record=guarded.on_record,
                # Without rehearsal after two crashes: the record at fault is one of the batch.
                rehearsed=() if guarded.one_by_one else self.adaptation.rehearse(slots),
            )

    def _guarded(self, batch: Batch) -> AbstractContextManager[GuardedBatch]:
        ids = [record.id for record in batch.records]
        return self.components.crash_guard.training(self.learner.number + 1, ids)

    def _note_truncations(self, batch: Batch) -> None:
        """Log the first of consecutive batches with truncated records."""
        truncations = batch.truncations
        if truncations and not self._truncates:
            _log.info(
                Event.RECORDS_TRUNCATED,
                forms=dict(Counter(truncation.form for truncation in truncations)),
                tokens=sum(truncation.num_cut for truncation in truncations),
                max_tokens=self.components.settings.stream.max_tokens,
                overlong=self.components.settings.stream.overlong,
            )
        self._truncates = bool(truncations)

    def _note_journal(self, fault: SnapshotError | None) -> None:
        if fault is not None:
            self.degradation.failed("journal", fault)
        else:
            self.degradation.recovered("journal")

    def _notify(self, report: ShiftReport) -> None:
        if self.observer:
            self.observer.on_shift(report)

    def save_start(self) -> None:
        """snapshot/: make the start of reading durable before the first record, unless the newest snapshot has it.

        A rollback then always has a snapshot. A new partition that begins at the end of its log would begin at a later
        offset after a crash, and the records in between would be lost.

        Raises:
            SnapshotError or DeadLetterError: it cannot be written.
        """
        if self.state.last_snapshot is None or self.state.moved_since_save:
            self.save()

    def save_if_due(self) -> None:
        """snapshot/: write one if it is due; see `Checkpoint.is_due`.

        Raises:
            SnapshotError or DeadLetterError: it has been failing for `snapshot.max_age_s`.
        """
        if not self.checkpoint.is_due(self.state):
            return
        try:
            self.save()
        except (SnapshotError, DeadLetterError) as error:
            self.degradation.failed("snapshot", error)
            self.checkpoint.postpone_save(error)

    def save(self) -> SnapshotInfo:
        """snapshot/: write one now; see `Checkpoint`."""
        started = time.monotonic()
        info = self.checkpoint.save(self.state)
        self.board.counters.snapshot_write_seconds.observe(time.monotonic() - started)
        self.degradation.recovered("snapshot")
        if self.observer:
            self.observer.on_snapshot(info)
        if self.adapter_publisher is not None:
            self.adapter_publisher.notify(self.components.store.folder / info.name)
        self._publish(self.board.read().phase, ready=self.board.read().ready)
        return info

    def serve_jobs(self) -> None:
        """jobs/: queued requests and controls, within the time budget.

        Raises:
            SnapshotError: a control could not be completed, and the run must not continue.
        """
        if self.job_runner.busy:
            seconds = self.job_runner.serve(self.components.settings.serve.eval_budget_s)
            self.board.counters.job_pause_seconds.observe(seconds)
        if self._fault is not None:
            raise self._fault
        self.board.beat()

    def control(self, job: ControlJob) -> ControlResult:
        """controls/: apply an operator's control, with its lines in the audit log; it is durable when this returns.

        Raises:
            UsageError: it is refused; nothing was changed.
            StreamlearnError: it failed.
        """
        control, moved = job.control, list[str]()
        with self.components.audit.applying(control, job.who) as outcome:
            if control.scope is Scope.REGIME:
                with self._must_succeed("the change", but=(UsageError, SnapshotError)):
                    outcome.unchanged = not self._change_regimes(control)
            elif control.verb == "rollback":
                moved = self._roll_back_to(**control.arguments)
            else:
                outcome.unchanged = not self.controls.apply(control)
            if control.scope is Scope.RUN:
                self.checkpoint.intake.postpone_flush()  # a pause does not count as a quiet stream
                self._publish(self._phase, ready=True)
        last = self.state.last_snapshot
        newest = None if last is None else last.name
        return control_result(control, self.controls, changed=not outcome.unchanged, moved=moved, newest=newest)

    def _roll_back_to(self, snapshot: str, skip_records: tuple[str, ...]) -> list[str]:
        """Continue from a snapshot; return the names of later ones, which are moved aside."""
        loaded, skipped = self.controls.check_rollback(snapshot, skip_records)
        self.components.check_compatible(loaded)
        with self._must_succeed(f"the rollback to {snapshot}"):
            moved = self.controls.roll_back(snapshot, skipped)
            self.restore_newest()
        return moved

    def restore_newest(self) -> None:
        """Continue from the newest snapshot, as the next start would."""
        snapshot = self.components.store.newest()
        assert snapshot is not None, "a new run writes a snapshot before its first record"
        self.state = self.checkpoint.restore(snapshot)
        self.comparison.clear()
        self.save_start()
        self._publish_versions_of(snapshot.name, snapshot.manifest.step)
        self._publish(self._phase, ready=True)

    def _change_regimes(self, control: Control) -> bool:
        """Apply a control of a regime and write a snapshot; return whether it changed anything.

        Raises:
            UsageError: the change is refused.
            SnapshotError: the snapshot could not be written; the change holds, and the next snapshot will have it.
        """
        name = snapshot_name(self.learner.number)
        if name in self.controls.state.pins and name in self.components.store.names():
            raise UsageError(
                f"snapshot {name} must stay as it is because it is pinned, and the change would need a snapshot of the "
                f"same step: unpin {name}, or let the daemon take a step first"
            )
        before = self.adaptation.state.num_changes
        getattr(self.adaptation, control.verb)(*control.arguments.values())
        changed = self.adaptation.state.num_changes > before
        self.state.changed_since_save |= changed
        try:
            if self.state.changed_since_save:  # also where an earlier change could not be written
                self.save()
        except (SnapshotError, DeadLetterError) as error:
            raise SnapshotError(
                f"the change holds and must be in a snapshot to outlive the daemon, which cannot be written: {error}; "
                "the daemon retries, and /v1/status reports `degraded` until it is written"
            ) from error
        return changed

    @contextmanager
    def _must_succeed(self, what: str, *, but: tuple[type[StreamlearnError], ...] = ()) -> Iterator[None]:
        """Note that the process must end if the block fails, except with the errors in `but`."""
        try:
            yield
        except but:
            raise
        except Exception as error:
            self._fault = SnapshotError(
                f"{what} must be completed before the run continues, and was not: {error}; restart: a start continues "
                "from the durable state, and finishes a rollback that was decided"
            )
            raise self._fault from error

    def _publish_versions_of(self, name: str, step: int) -> None:
        """publish/: the run continues from this snapshot; versions of later ones are withdrawn."""
        if self.adapter_publisher is not None:
            self.adapter_publisher.withdraw_after(step)
            self.adapter_publisher.notify(self.components.store.folder / name)

    def _score_versions(self, *, idle: bool) -> bool:
        """publish/: one forward pass over hold-out records for a new version; return whether there was one."""
        return self.adapter_publisher is not None and self.adapter_publisher.scoring.serve(idle=idle)

    def _finish_publishing(self) -> None:
        """Publish the last snapshot of a finite stream, as far as replicas respond."""
        while self.adapter_publisher is not None and not (self.adapter_publisher.is_idle or self.stopped):
            if not self._score_versions(idle=True):
                time.sleep(PUBLISH_POLL_S)
            self.board.beat()
        self._publish(self.board.read().phase)

    def _snapshot_on_request(self) -> SnapshotResult:
        info = self.save()
        return SnapshotResult(name=info.name, step=info.step)

    def _dead_letter(self, batch: Batch, step: Step) -> None:
        _log.error(Event.UPDATE_REFUSED, step=step.number, refusal=step.refusal, records=len(batch.records))
        for record in batch.records:
            self.checkpoint.intake.set_aside(record, Reason.NOT_FINITE_UPDATE, refusal_message(step))

    def _roll_back(self) -> None:
        """Restore the last snapshot, because the weights themselves are suspect, and leave out the refused records."""
        snapshot = self.components.store.newest()
        if snapshot is None or self.state.rolled_back_to == snapshot.name:
            raise DivergedError(
                f"{self.state.bad_in_a_row} batches in a row had a non-finite loss or gradient"
                + (", again after a rollback" if snapshot else ", and every snapshot is gone")
                + ": lower learner.lr, or look at the dead letters"
            )
        refused = frozenset(self.state.refused_since_save)
        self.state = self.checkpoint.roll_back(snapshot, refused)
        self.state.rolled_back_to = snapshot.name
        self.comparison.clear()
        self._publish_versions_of(snapshot.name, snapshot.manifest.step)
        _log.warning(Event.ROLLED_BACK, to=snapshot.name, left_out=len(refused))

    def _publish(self, phase: Phase, *, ready: bool = False, reason: str = "", step: Step | None = None) -> None:
        """Put the loop's state on the board; `step` is the one just taken, if any."""
        before, now, state, updates = self.board.read(), time.monotonic(), self.state, self.learner.number
        trackers, position = self.components.trackers, state.read_position
        if trackers is not None and updates < before.step:
            trackers.note_rewind(updates)
        lag = self.components.source.lag(position)
        adaptation = self.adaptation.status()
        self.history.complete_rows(adaptation.regimes)
        speed = self._throughput.update(now, state.tokens) if step is not None else before.tokens_per_s
        status = replace(
            before,
            phase=phase,
            ready=ready,
            reason=reason,
            degraded=self.degradation.reason,
            step=updates,
            last_step_at=before.last_step_at if step is None or step.refusal is not None else now,
            records_trained=sum(state.ledger.trained.values()),
            records_held_out=state.ledger.held_out.total(),
            tokens_trained=state.tokens,
            tokens_per_s=0.0 if phase in (Phase.IDLE, Phase.PAUSED) else speed,
            loss=state.loss,
            loss_smoothed=state.loss_smoothed,
            learning_rate=self.learner.learning_rate,
            dead_letters=dict(state.reasons),
            ignored=dict(state.ignored),
            truncated_records=dict(state.truncated),
            truncated_tokens=dict(state.cut_tokens),
            update_refusals=state.refusals,
            adaptation=adaptation,
            history=self.history.status,
            publication=None if self.adapter_publisher is None else self.adapter_publisher.status,
            trackers=() if trackers is None else trackers.status,
            partitions=tuple(
                PartitionStatus(origin.topic, origin.partition, offset, lag.get(origin))
                for origin, offset in position.items()
            ),
            snapshot=state.last_snapshot,
            records_since_snapshot=state.records_since_save,
            step_seconds=before.step_seconds if step is None else step.seconds,
            requests=dict(self.job_runner.requests),
        )
        if self._has_published:  # the totals that the process began with are not its own
            self.board.counters.update(before, status)
        self._has_published = True
        self.board.publish(status)
        if step is not None:
            self._log_step(step, status, now)

    def _log_step(self, step: Step, status: Status, now: float) -> None:
        fields = {
            "step": step.number,
            "loss": round(step.loss, 4),
            "smoothed": round(status.loss_smoothed or step.loss, 4),
            "records": status.records_trained,
            "tokens_per_s": round(status.tokens_per_s),
        }
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            _log.info(Event.STEP_TAKEN, **fields)
        else:
            _log.debug(Event.STEP_TAKEN, **fields)


class Throughput:
    """Tokens per second over the last `SPEED_WINDOW_S`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def update(self, now: float, tokens: int) -> float:
        """The average up to `now`, when `tokens` have been trained on in all; fewer than before after a rollback."""
        if self._marks and tokens < self._marks[-1][1]:
            self._marks.clear()
        self._marks.append((now, tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > SPEED_WINDOW_S:
            self._marks.popleft()
        then, before = self._marks[0]
        return (tokens - before) / (now - then) if now > then else 0.0
