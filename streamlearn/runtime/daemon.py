"""The loop: one thread, one turn a batch, every room in the order of the data's way.

`assemble` checks and builds everything; `Daemon.run` learns until the stream ends or a signal asks it to stop.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice, takewhile
from typing import Protocol

from streamlearn.adaptation.adaptation import ShiftReport
from streamlearn.errors import DeadLetterError, DivergedError, Reason, SnapshotError
from streamlearn.events import Event, get_logger
from streamlearn.jobs.experts import experts
from streamlearn.jobs.queue import ExpertsJob, JobQueue
from streamlearn.jobs.results import ExpertsResult, SnapshotResult
from streamlearn.jobs.runner import JobRunner
from streamlearn.learner.learner import Step
from streamlearn.runtime.components import Components
from streamlearn.runtime.degradation import Degradation
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.shift import Shift
from streamlearn.snapshot.snapshot import SnapshotInfo
from streamlearn.status.board import Board
from streamlearn.status.status import PartitionStatus, Phase, SnapshotStatus, Status
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example

RETRY_S = 10.0  # after a snapshot that failed
FEWEST = 2  # snapshots that are kept even when there is no room
POLL_S = 0.2  # longest wait for records in one turn: a stop, a job or a due snapshot waits at most this long
SPEED_WINDOW_S = 30.0  # tokens/s is published over this much time
LOG_EVERY_S = 10.0  # a step is logged at info this often, at debug always

_log = get_logger("daemon")


class Observer(Protocol):
    """Someone who watches the run: the progress line."""

    def on_start(self, status: Status) -> None:
        """The first record is about to be read."""

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """A batch was trained on, or refused; records kept out are not in it."""

    def on_shift(self, entry: ShiftReport) -> None:
        """A regime was entered."""

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """State is durable."""


@dataclass
class _Window:
    """Tokens over the last stretch of time, for the published speed."""

    marks: deque[tuple[float, int]]

    def speed(self, now: float, tokens: int) -> float:
        """Tokens per second since the oldest mark."""
        self.marks.append((now, tokens))
        while len(self.marks) > 2 and now - self.marks[0][0] > SPEED_WINDOW_S:
            self.marks.popleft()
        then, before = self.marks[0]
        return (tokens - before) / (now - then) if now > then else 0.0


class Daemon:
    """Owns the loop. `stop` may be called from a signal handler; everything else belongs to the thread of `run`."""

    def __init__(
        self, components: Components, board: Board, jobs: JobQueue, *, observer: Observer | None = None
    ) -> None:
        self.components = components
        self.state = components.state
        self.board = board
        self.observer = observer
        self.job_runner = JobRunner(
            jobs,
            components.learner,
            components.decoder,
            components.adaptation.slots_of,
            self._experts,
            self._snapshot_on_request,
            pack_tokens=components.settings.stream.batch_tokens,
        )
        self.degradation = Degradation(components.settings.snapshot.max_age_s)
        self._stop_reason: str | None = None
        self._saved_at = time.monotonic()
        self._retry_at = self._saved_at
        self._logged_at = 0.0
        self._window = _Window(deque())
        self._ahead: deque[AssignedBatch] = deque()

    def stop(self, reason: str) -> None:
        """Ask the loop to end after the step in hand."""
        self._stop_reason = self._stop_reason or reason

    @property
    def stopped(self) -> bool:
        """Whether it was asked to end; false when the stream ended."""
        return self._stop_reason is not None

    def run(self) -> None:
        """Learn until asked to stop or until the stream ends; the last thing is a snapshot.

        A new run writes one before the first record too: there is then always a state to come back to.

        Raises:
            StreamlearnError: see errors.py; whatever is on disk by then is whole.
        """
        if self.state.last_snapshot is None:
            self.save()
        self.save_if_due()
        self._publish(Phase.RUNNING, ready=True)
        if self.observer:
            self.observer.on_start(self.board.read())
        for assigned in self.assigned_batches():
            for shift in assigned.shifts:
                self.enter(shift)
            self.learn(assigned)
            self.save_if_due()
            self.serve()
            self.components.adaptation.score_stalest(idle=False)
        self._publish(Phase.STOPPING, reason="the daemon is stopping")
        self.save()

    def score_all(self) -> None:
        """Score the hold-out records of every regime under the weights as they are; for the end of a finite stream."""
        while self.components.adaptation.score_stalest(idle=True):
            self.board.beat()
        self._publish(self.board.read().phase)

    def assigned_batches(self) -> Iterator[AssignedBatch]:
        """shift/: batches with their regimes decided; before one that begins a new regime, what probes it is there.

        A sighting is yielded with the ones after it still in `_ahead`.
        """
        life = None
        while self.state is not life and not self.stopped:  # a rollback near the end makes the stream longer again
            for batch in self.batches():
                self._ahead.extend(self.components.adaptation.monitor.update(batch))
                yield from self._ready()
            life = self.state
            if not self.stopped:
                self._ahead.extend(self.components.adaptation.monitor.flush())
                yield from self._ready(at_end=True)

    def batches(self) -> Iterator[Batch]:
        """stream/: batches as they fill; while none does, jobs and due snapshots are served here."""
        while self._stop_reason is None:
            batch = self.components.intake.next_batch(timeout_s=0.0 if self.job_runner.busy else POLL_S)
            if batch is not None:
                yield batch
            elif self.components.source.exhausted:
                _log.info(Event.SOURCE_EXHAUSTED, records=self.state.records)
                before = self.state
                for last in self.components.intake.flush():
                    if self.state is before:
                        yield last
                if self.state is before:  # else a rollback: the source stands where there is more
                    return
            else:
                self._publish(Phase.IDLE, ready=True)
                self.save_if_due()
                self.serve()
                if not self.job_runner.busy:
                    self.components.adaptation.score_stalest(idle=True)
        _log.info(Event.STOP_REQUESTED, reason=self._stop_reason)

    def _ready(self, *, at_end: bool = False) -> Iterator[AssignedBatch]:
        while self._ahead and not self.stopped and (at_end or self._enough_to_probe()):
            yield self._ahead[0]
            if self._ahead:  # empty after a rollback
                self._ahead.popleft()

    def _enough_to_probe(self) -> bool:
        """Whether the oldest sighting may be trained on: a new regime first collects its warm-up."""
        wanted = [shift for shift in self._ahead[0].shifts if self.components.adaptation.wants_probe(shift)]
        if not wanted or any(later.shifts for later in islice(self._ahead, 1, None)):
            return True
        tokens = sum(map(len, self._examples_ahead(wanted[-1].slot)))
        return tokens >= (self.components.settings.probe.warmup_tokens or 0)

    def _examples_ahead(self, slot: int) -> list[Example]:
        """The buffered records of a regime, up to the next shift."""
        stretch = takewhile(lambda pair: pair[0] == 0 or not pair[1].shifts, enumerate(self._ahead))
        return [
            example
            for _, assigned in stretch
            for example, its_slot in zip(assigned.batch.examples, assigned.slots, strict=True)
            if its_slot == slot
        ]

    def enter(self, shift: Shift) -> None:
        """probe/, consolidate/: hold on to the regime before, look at the new one, give it its place."""
        self._tell(self.components.adaptation.enter(shift, self._examples_ahead(shift.slot)))
        self.board.beat()

    def learn(self, assigned: AssignedBatch) -> Step | None:
        """learner/: one step, or none when no record of the batch is to be trained on; then the ledger."""
        learner, state, adaptation = self.components.learner, self.state, self.components.adaptation
        self._journal(assigned.batch)
        held_out = adaptation.keep_out(assigned)
        batch, slots = assigned.without(held_out)
        step = None
        if batch.examples:
            with self.components.crash_guard.training(
                learner.number + 1, [record.id for record in batch.records]
            ) as hand:
                parts = len(batch.examples) if hand.one_by_one else 1
                step = learner.step(batch.examples, slots, parts=parts, on_record=hand.on_record)
            adaptation.forgetting.trained(step.seconds)
        else:
            learner.skip_step()
        if step is not None and step.refusal is not None:
            self._set_aside(batch, step)
        elif step is not None:
            for entry in adaptation.heed(assigned, held_out, step.record_losses):
                self._tell(entry)
        adaptation.trained(assigned, step)
        state.account(assigned.batch, step, held_out)
        if state.bad_in_a_row >= self.components.settings.learner.max_bad_batches:
            self._roll_back()
        self._publish(Phase.RUNNING, ready=True, step=step)
        if step is not None and self.observer:
            self.observer.on_step(batch, step, self.board.read())
        return step

    def _journal(self, batch: Batch) -> None:
        """Without it no record is lost or trained twice, but partitions may replay in another order."""
        self.components.journal_batch(batch.runs)
        if self.components.journal.fault is not None:
            self.degradation.met("journal", self.components.journal.fault)
        else:
            self.degradation.over("journal")

    def _tell(self, entry: ShiftReport) -> None:
        if self.observer:
            self.observer.on_shift(entry)

    def save_if_due(self) -> None:
        """snapshot/: by records or by time, when there is anything new; at once when records were lost.

        Else a death would meet the gap again, and `offset.gap.policy: latest` jump again, over records that came since.
        A failed one is tried again in 10 s.

        Raises:
            SnapshotError or DeadLetterError: it has been failing for `snapshot.max_age_s`.
        """
        settings, state, now = self.components.settings.snapshot, self.state, time.monotonic()
        state.pass_gaps(self.components.source.gaps)
        due = state.records_since_save >= settings.every_records
        due = due or (now - self._saved_at >= settings.every_s and state.records_since_save > 0)
        # Not right after a rollback: until the next regular snapshot a second one means divergence.
        due = due or (state.gap_since_save and state.rolled_back_to is None)
        if not due or now < self._retry_at:
            return
        try:
            self.save()
        except (SnapshotError, DeadLetterError) as error:
            self.degradation.met("snapshot", error)
            self._retry_at = time.monotonic() + RETRY_S
            self.components.store.prune(keep=FEWEST)  # it may be room that is missing
        else:
            self.degradation.over("snapshot")

    def save(self) -> SnapshotInfo:
        """Dead letters first, then the state, then the broker's offsets, then what no snapshot needs any more."""
        started = time.monotonic()
        info = self.components.save(self.state)
        self._saved_at = time.monotonic()
        written = datetime.fromisoformat(info.created_at).timestamp()
        self.state.saved(SnapshotStatus(info.name, info.step, written), self._saved_at - started)
        _log.info(Event.SNAPSHOT_WRITTEN, name=info.name, bytes=info.bytes, seconds=round(self._saved_at - started, 3))
        if self.observer:
            self.observer.on_snapshot(info)
        self._publish(self.board.read().phase, ready=self.board.read().ready)
        return info

    def serve(self) -> None:
        """serve/: queued jobs, within the budget."""
        if self.job_runner.busy:
            seconds = self.job_runner.serve(self.components.settings.serve.eval_budget_s)
            self.state.job_seconds = self.state.job_seconds.observe(seconds)
        self.board.beat()

    def _experts(self, job: ExpertsJob) -> Generator[None, None, ExpertsResult]:
        adaptation = self.components.adaptation
        pack_tokens = self.components.settings.stream.batch_tokens
        return experts(job, self.components.learner, adaptation.expert_evidence(), pack_tokens=pack_tokens)

    def _snapshot_on_request(self) -> SnapshotResult:
        info = self.save()
        return SnapshotResult(name=info.name, step=info.step)

    def _set_aside(self, batch: Batch, step: Step) -> None:
        _log.error(Event.UPDATE_REFUSED, step=step.number, refusal=step.refusal, records=len(batch.records))
        for record in batch.records:
            self.components.rejects.send(
                record, Reason.NOT_FINITE_UPDATE, f"the update of step {step.number} was refused: {step.refusal}"
            )

    def _roll_back(self) -> None:
        """The weights themselves are suspect: go back to the last snapshot, leave out what did not work, go on."""
        snapshot = self.components.store.newest()
        if snapshot is None or self.state.rolled_back_to == snapshot.name:
            raise DivergedError(
                f"{self.state.bad_in_a_row} batches in a row had a non-finite loss or gradient"
                + (", again after a rollback" if snapshot else ", and every snapshot is gone")
                + ": lower learner.lr, or look at the dead letters"
            )
        refused = frozenset(self.state.refused_since_save)
        self.state = self.components.roll_back(snapshot, refused)
        self._ahead.clear()
        self.state.rolled_back_to = snapshot.name
        _log.warning(Event.ROLLED_BACK, to=snapshot.name, left_out=len(refused))

    def _publish(self, phase: Phase, *, ready: bool = False, reason: str = "", step: Step | None = None) -> None:
        state, before = self.state, self.board.read()
        now = time.monotonic()
        lag = self.components.source.lag(state.ledger.position)
        position = state.ledger.position
        speed = self._window.speed(now, state.tokens) if step is not None else before.tokens_per_s
        status = replace(
            before,
            phase=phase,
            ready=ready,
            reason=reason,
            degraded=self.degradation.reason,
            step=self.components.learner.number,
            records_trained=sum(state.ledger.trained.values()),
            records_held_out=state.ledger.held_out.total(),
            tokens_trained=state.tokens,
            tokens_per_s=0.0 if phase is Phase.IDLE else speed,
            loss=state.loss,
            loss_smoothed=state.loss_smoothed,
            dead_letters=dict(state.reasons),
            update_refusals=state.refusals,
            adaptation=self.components.adaptation.status(),
            partitions=tuple(PartitionStatus(origin, position[origin], lag.get(origin)) for origin in position),
            snapshot=state.last_snapshot,
            step_seconds=state.step_seconds,
            snapshot_seconds=state.snapshot_seconds,
            job_seconds=state.job_seconds,
        )
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
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            _log.info(Event.STEP_TAKEN, **fields)
        else:
            _log.debug(Event.STEP_TAKEN, **fields)
