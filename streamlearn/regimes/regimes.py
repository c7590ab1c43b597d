"""Regime handling, in the order in which a batch meets it.

look_ahead   a batch was read: assign its records to regimes, ahead of training
next_batch   the next batch to train on, its regimes decided
enter        a shift begins in it: close the old regime, measure the new one, give it its adapter
divide       each record gets a role: trained, held out, or only measured
rehearse     draw the earlier records that are trained on again
after_step   the batch is done: detect changed answers by the losses, count

Between two steps an operator may `rename`, `freeze`, `unfreeze`, `approve` and `drop` regimes.
"""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamlearn.adapters.context import Slot
from streamlearn.errors import RegimeBusyError, RegimeError
from streamlearn.events import Event, get_logger
from streamlearn.learner.evaluate import first_tokens
from streamlearn.learner.learner import Learner, Rehearsal, Step
from streamlearn.regimes.canaries import Canary
from streamlearn.regimes.holdout import DividedBatch, KeptRecord, Role
from streamlearn.regimes.regime import NAME, NUM_LOSSES, Regime, RegimesState, slot_of
from streamlearn.regimes.report import ShiftReport, with_records
from streamlearn.regimes.returns import ReturnChecks, Upcoming
from streamlearn.regimes.route import (
    MAX_CANDIDATES,
    Fallback,
    HeadStart,
    RequestRouter,
    RoutedInput,
    largest,
    measure_head_start,
)
from streamlearn.regimes.scoring import Scorer
from streamlearn.settings import Settings
from streamlearn.shift.detector import NO_SLOT, Shift
from streamlearn.shift.drift import ConceptDriftDetector
from streamlearn.shift.features import Featurizer, input_of
from streamlearn.shift.monitor import AssignedBatch, Monitor
from streamlearn.status import AdaptationStatus, RegimeExperts, Requested, ShiftStatus
from streamlearn.stream.record import Batch, Example

CONFIRM_RECORDS = 64
"""Records that a suspected shift of the answers waits for confirmation. A shift of the inputs that is declared late, or
whose first records were assigned to other regimes, raises losses too; when one is declared within these records, it is
the cause, and the answers have not changed."""
MAX_REPORTS = 256  # newest shifts kept for the status and the snapshot

_log = get_logger("shift")


class Regimes:
    """Owner of everything kept about regimes besides the weights. Only the thread that owns the model calls it."""

    def __init__(
        self,
        learner: Learner,
        settings: Settings,
        with_images: Callable[[Example, Any], Example],
        to_text: Callable[[Sequence[int]], str],
        token_vectors: NDArray[np.float16] | None = None,
        *,
        canaries: Sequence[Canary] = (),
    ) -> None:
        """Build it; `with_images` rebuilds an example's images from the bytes that a snapshot keeps.

        `to_text` decodes tokens.
        `token_vectors`: see `Featurizer`.
        """
        self._learner = learner
        self._settings = settings
        self._with_images = with_images
        self._to_text = to_text
        self.state = RegimesState()
        self.monitor = Monitor(settings.shift, Featurizer(settings.seed, token_vectors))
        self.answers = ConceptDriftDetector(settings.shift)
        self.return_checks = ReturnChecks(learner, settings, self.monitor)
        self.scorer = Scorer(learner, settings, canaries)
        self.fallback = Fallback(settings.serve.unknown, has_regimes=learner.routes_by_regime)
        self.fallback.losses = self.state.start_losses
        self._router = RequestRouter(
            self.monitor,
            self.fallback,
            routes_by_regime=learner.routes_by_regime,
            max_known_rejected=settings.serve.max_known_rejected,
        )
        self.probe_seconds = 0.0
        """Time spent on probes by this process."""
        self._shifts: tuple[ShiftStatus, ...] = ()
        self._left: list[int] = []
        """Slots whose segments end within the batch under way."""

    @property
    def by_slot(self) -> dict[int, Regime]:
        """The regimes that were entered and are remembered."""
        return self.state.regimes

    @property
    def numbers(self) -> dict[int, int]:
        """Their numbers by slot."""
        return {slot: regime.number for slot, regime in self.by_slot.items()}

    def examples(self, slot: int) -> tuple[Example, ...]:
        """The hold-out records of the regime in `slot`."""
        return self.by_slot[slot].holdouts.examples if slot in self.by_slot else ()

    # Reading ahead.

    def look_ahead(self, batch: Batch) -> None:
        """Assign the records of the next batch read from the stream to regimes."""
        self.monitor.update(batch, self._frozen_at)

    def next_batch(self) -> AssignedBatch | None:
        """The next batch to train on.

        None while too few records follow it to decide its regimes, or to probe the new regime that begins in it or
        check the return of a known one, unless the stream was flushed. Records whose inputs match a known regime but
        whose losses do not are assigned again.
        """
        assigned = self.monitor.take(self._tokens_needed)
        if assigned is not None and self.return_checks.refuse(self._upcoming(assigned)):
            return self.monitor.taken
        return assigned

    def _upcoming(self, assigned: AssignedBatch) -> Upcoming:
        profiles = self.monitor.trained.detector.regimes
        return Upcoming(
            assigned,
            first=self.state.records + 1,
            current=self.state.current,
            regimes=self.by_slot,
            last_records={slot: profile.last_record for slot, profile in enumerate(profiles) if profile is not None},
            kept_at=self._frozen_at,
        )

    @property
    def waiting(self) -> list[Batch]:
        """The batches that were looked ahead at and not yet returned by `next_batch`, in order."""
        return self.monitor.waiting

    def flush(self) -> None:
        """Make every waiting batch the next to train on, without waiting for more records."""
        self.monitor.flush()

    def upcoming(self, slot: int) -> list[Example]:
        """Records of the regime in `slot` from the batch that `next_batch` returned up to the next shift."""
        return self.monitor.examples(slot)

    def _frozen_at(self, ordinal: int) -> set[int]:
        """Numbers of the regimes that were frozen when the record was first read."""
        return {regime.number for regime in self.by_slot.values() if regime.was_frozen(ordinal)}

    # Entering regimes.

    def not_entered(self, shifts: Sequence[Shift]) -> list[Shift]:
        """The shifts whose regime was never entered."""
        return [shift for shift in shifts if self.numbers.get(shift.slot) != shift.regime]

    def enter(self, shift: Shift, examples: Sequence[Example]) -> ShiftReport:
        """Close the regime under way and open, or return to, the one of `shift`; `examples` are its first records.

        A regime that was split from another continues next to it: nothing is closed, and the stream stays where it is.
        """
        state = self.state
        self._explain_suspicions(shift)
        report = ShiftReport(shift, self._learner.number)
        if shift.parent is not None:
            report = self._split(report)
        else:
            if state.current is not None:
                self._leave(state.current)
            if not shift.known:
                report = replace(report, refused_return=self.return_checks.refused_at(shift.declared_at))
                report = self._open(report, examples if self._probe_tokens(shift) else ())
            self._learner.hooks.enter(shift.slot)
        regime = self.by_slot[shift.slot]
        regime.visits += 1
        for slot in (shift.slot, state.current):
            if slot in self.by_slot:
                self.by_slot[slot].status = None
        if shift.parent is None:
            state.current = shift.slot
        before = slot_of(self.by_slot, shift.previous if shift.parent is None else shift.parent)
        kept = self.by_slot[before].holdouts.records if before is not None else ()
        report = with_records(report, self.monitor, before, kept, self._to_text)
        self._declare(report)
        return report

    def _split(self, report: ShiftReport) -> ShiftReport:
        """Open a regime that was split from another, with a copy of the adapter that learned the records of both.

        The other regime's losses are those of other records from now on. Its samples of records are divided once the
        batch is trained on at which the split was declared: only then does the state have the profiles that tell the
        two apart.
        """
        shift = report.shift
        parent = slot_of(self.by_slot, shift.parent)
        report = self._open(report, (), parent=parent)
        if parent is not None:
            if self.by_slot[parent].is_frozen:  # from a record that does not depend on how far was read ahead
                self.by_slot[shift.slot].frozen_from = [shift.declared_at]
            self.answers.forget(parent)
            self.by_slot[parent].losses, self.by_slot[parent].status = [], None
            self.state.undivided.append(shift)
        return report

    def _open(self, report: ShiftReport, examples: Sequence[Example], *, parent: int | None = None) -> ShiftReport:
        """Give a new regime its adapter.

        `examples` are the records to measure it with, if any; `parent` is the slot of the regime it was split from.
        """
        shift, learner, start, probed = report.shift, self._learner, parent, []
        began = time.monotonic()
        if examples and self.by_slot and learner.routes_by_regime:
            measured = self._measure_start(shift.slot, examples)
            self.fallback.add(measured)
            if learner.per_regime:
                start = measured.slot
                report = replace(report, probe_tokens=measured.tokens)
        if examples and not learner.per_regime:
            report = replace(report, **vars(learner.hooks.probe(examples, shift.regime)))
            if not report.probe_failed:
                records = first_tokens(examples, self._settings.probe.similarity_tokens)
                probed = [KeptRecord.from_example(example) for example in records]
        if examples:
            report = replace(report, probe_seconds=time.monotonic() - began)
            self.probe_seconds += report.probe_seconds
        if start is not None and learner.per_regime:
            report = replace(report, started_from=self.by_slot[start].number)
        self._discard(shift.slot)
        if learner.per_regime:
            seed = (self._settings.seed * 1_000_003 + shift.regime) % 2**63  # what torch takes
            learner.add_regime(shift.slot, seed, start=start)
        learner.hooks.open(shift.slot, start=start)
        self.by_slot[shift.slot] = Regime(shift.regime, shift.slot, refused_return=report.refused_return, probed=probed)
        return report

    def _measure_start(self, slot: int, examples: Sequence[Example]) -> HeadStart:
        """Compare the known adapters on the first records of the regime that takes `slot`."""
        records = first_tokens(examples, self._settings.probe.similarity_tokens)
        likely = self.monitor.rank([input_of(example) for example in records])
        known = [other for other in dict.fromkeys([*likely, *self.by_slot]) if other in self.by_slot and other != slot]
        per_regime = self._learner.per_regime
        return measure_head_start(
            self._learner,
            records,
            known[: MAX_CANDIDATES if per_regime else 1],
            largest(self.by_slot, without=slot) if per_regime else (),
            pack_tokens=self._settings.stream.batch_tokens,
        )

    def _probe_tokens(self, shift: Shift) -> int:
        """Tokens that the measurement of this shift's regime needs; 0: it is not measured."""
        if shift.known or shift.parent is not None or not self._settings.probe.enabled:
            return 0
        if not self._learner.per_regime:
            return self._learner.hooks.probe_tokens(is_first=shift.previous is None)
        return 0 if shift.previous is None else self._settings.probe.similarity_tokens

    def _tokens_needed(self, shift: Shift) -> int:
        """Tokens of the first records of a shift's regime to wait for."""
        if self.return_checks.applies(shift, self.by_slot):
            return self._settings.probe.similarity_tokens
        return self._probe_tokens(shift)

    def _leave(self, slot: int) -> None:
        """End the segment of the regime in `slot`."""
        if self._learner.per_regime:
            self._left.append(slot)  # the batch may have more of its records
        elif self.examples(slot):
            self.scorer.score_at_end(self.by_slot[slot])
        regime = self.by_slot[slot]
        self._learner.hooks.leave(slot, [record.example for record in regime.probed])
        regime.probed = []

    def _discard(self, slot: int) -> None:
        """Discard the regime in `slot`, if there is one."""
        self.by_slot.pop(slot, None)
        self.answers.forget(slot)
        self._learner.usage.drop(slot)
        self.state.suspected = [shift for shift in self.state.suspected if shift.slot != slot]

    def _declare(self, report: ShiftReport) -> None:
        """List and log a shift of any kind, or the entry into the first regime."""
        shift, state = report.shift, self.state
        state.reports.append(report)
        del state.reports[:-MAX_REPORTS]
        self._shifts = (*self._shifts[1 - MAX_REPORTS :], report.status)
        state.num_entries[shift.kind] += 1
        report.log()

    # A batch.

    def divide(self, assigned: AssignedBatch) -> DividedBatch:
        """Count the batch's records and give each its role."""
        for slot in dict.fromkeys(assigned.slots):  # with the weights and records of the segment's end
            if slot in self.by_slot and self.by_slot[slot].scores.ended:
                self.scorer.score_at_end(self.by_slot[slot])
        roles, holdout = [], self._settings.holdout
        for slot, record, example in zip(assigned.slots, assigned.batch.records, assigned.batch.examples, strict=True):
            self.state.records += 1
            regime = self.by_slot.get(slot)
            role = Role.TRAINED
            if regime is not None:
                regime.count(self.state.records)
                if regime.holdouts.take(
                    example,
                    (self._settings.seed, slot),
                    size=holdout.records_per_regime,
                    every=holdout.every_records,
                    id_=str(record.id),
                ):
                    role = Role.HELD_OUT
                elif regime.is_frozen:
                    role = Role.MEASURED
            roles.append(role)
        return DividedBatch(assigned, tuple(roles))

    def rehearse(self, slots: Sequence[int]) -> list[Rehearsal]:
        """Draw the records that each update of a batch is made with besides its own; `slots` are of its own.

        Each regime of the batch adds to its own records, so none is trained on for another. Together they have at most
        `stream.batch_tokens` tokens.
        """
        learner, stream = self._settings.learner, self._settings.stream
        if not learner.rehearsal:
            return []
        rehearsed = []
        for update in range(learner.updates_per_batch):
            drawn = []
            for slot, new in Counter(slots).items():
                if slot in self.by_slot:
                    regime = self.by_slot[slot]
                    seed = (self._settings.seed, regime.number, update)
                    drawn += [(one, slot) for one in regime.rehearsal.draw(learner.rehearsal, new, seed)]
            ends = list(accumulate(len(example) for example, _ in drawn))
            drawn = drawn[: bisect_right(ends, stream.batch_tokens)]
            rehearsed.append(Rehearsal([example for example, _ in drawn], [slot for _, slot in drawn]))
        return rehearsed

    def after_step(self, batch: DividedBatch, step: Step | None, measured: Sequence[float]) -> list[ShiftReport]:
        """Everything that follows from a batch being done.

        Args:
            batch: The batch.
            step: Its step; None when no record of it was trained on.
            measured: Losses of its measured records, nats per learned token.

        Returns:
            The shifts of the answers that are confirmed now.
        """
        trained: Sequence[float] = ()
        if step is not None:
            self.scorer.budget.trained(step.seconds)
            if step.refusal is None:
                trained = step.record_losses
                part, slots = batch.part(Role.TRAINED)
                for slot in set(slots) & self.by_slot.keys():
                    self.by_slot[slot].scores.trained_at = self._learner.number
                if self._settings.learner.rehearsal:
                    self._keep_for_rehearsal(part.examples, slots)
        for slot in self._left:
            if slot != self.state.current and self.examples(slot):
                self.by_slot[slot].scores.end()
        self._left.clear()
        self.return_checks.clear()
        confirmed = []
        if trained or measured:
            self._detect_changed_answers(batch, trained, measured)
            confirmed = self._confirm()
        # Requests and snapshots see the regimes as of this batch, not as of the look-ahead.
        self.monitor.trained = batch.assigned.after
        due = [shift for shift in self.state.undivided if shift.declared_at <= self.state.records]
        for shift in due:
            self._divide_samples(shift)
            self.state.undivided.remove(shift)
        return confirmed

    def _keep_for_rehearsal(self, examples: Sequence[Example], slots: Sequence[int]) -> None:
        """Let the records of a step enter their regimes' samples."""
        size = self._settings.learner.rehearsal_records
        for example, slot in zip(examples, slots, strict=True):
            if slot in self.by_slot:
                regime = self.by_slot[slot]
                regime.rehearsal.take(example, (self._settings.seed, regime.number), size=size)
        for slot in set(slots) & self.by_slot.keys():
            for record in self.by_slot[slot].rehearsal.records:
                record.drop_inputs()

    def _detect_changed_answers(self, batch: DividedBatch, trained: Sequence[float], measured: Sequence[float]) -> None:
        """Update each regime's detector with the prequential losses of its records, in order."""
        losses = {Role.TRAINED: iter(trained), Role.MEASURED: iter(measured)}
        first = self.state.records - len(batch.roles) + 1
        for ordinal, (slot, role) in enumerate(zip(batch.assigned.slots, batch.roles, strict=True), start=first):
            loss = next(losses[role], None) if role in losses else None  # none of a refused update
            if loss is None or slot not in self.by_slot:
                continue
            regime = self.by_slot[slot]
            if np.isfinite(loss):
                regime.losses = [*regime.losses[1 - NUM_LOSSES :], loss]
            self.state.suspected += self.answers.update(slot, regime.number, ordinal, [loss])

    def _explain_suspicions(self, shift: Shift) -> None:
        """Drop suspected shifts of the answers where this shift of the inputs is the cause."""
        earliest = shift.onset - CONFIRM_RECORDS
        self.state.suspected = [suspect for suspect in self.state.suspected if suspect.declared_at < earliest]

    def _confirm(self) -> list[ShiftReport]:
        """Act on suspected shifts of the answers that no shift of the inputs has explained: the newest are right."""
        state, reports = self.state, []
        due = [shift for shift in state.suspected if state.records - shift.declared_at >= CONFIRM_RECORDS]
        state.suspected = [shift for shift in state.suspected if shift not in due]
        for shift in due:
            regime = self.by_slot.get(shift.slot)
            if regime is None or regime.number != shift.regime:
                continue
            self._learner.hooks.release(shift.slot)
            regime.forget_records()
            report = ShiftReport(replace(shift, declared_at=state.records), self._learner.number)
            self._declare(report)
            reports.append(report)
        return reports

    def _divide_samples(self, shift: Shift) -> None:
        """Move the sampled records of a regime that was split to the new one, where they are the new one's.

        Records that other regimes explain best stay.
        """
        parent, new = slot_of(self.by_slot, shift.parent), self.by_slot.get(shift.slot)
        if parent is None or new is None or new.number != shift.regime:
            return
        old = self.by_slot[parent]
        for sample, other, size in (
            (old.holdouts, new.holdouts, self._settings.holdout.records_per_regime),
            (old.rehearsal, new.rehearsal, self._settings.learner.rehearsal_records),
        ):
            assigned = self.monitor.assign([input_of(example) for example in sample.examples])
            sample.move(other, [route.slot == shift.slot for route in assigned], size=size)
        for regime in (old, new):  # their scores were those of other records
            regime.scores, regime.status = type(regime.scores)(), None

    # Requests, scores and status.

    def route(self, inputs: Sequence[NDArray[Any]], requested: Requested = "routed") -> list[RoutedInput]:
        """The regime of each input of a request, and what answers it, see `RequestRouter.route`."""
        return self._router.route(inputs, self.by_slot, requested)

    def slots_of(self, inputs: Sequence[NDArray[Any]]) -> list[Slot]:
        """What adapts each input, see `RoutedInput`."""
        return [routed.slot for routed in self.route(inputs)]

    def score_stalest(self, *, idle: bool) -> bool:
        """See `Scorer.score_stalest`."""
        return self.scorer.score_stalest(self.by_slot, idle=idle)

    def status(self) -> AdaptationStatus:
        """Regimes and shifts as they are published. Only regimes that changed are described again."""
        state, learner = self.state, self._learner
        for slot, regime in self.by_slot.items():
            if regime.status is None:
                loss = self.answers.level_of(slot)
                regime.status = regime.describe(is_current=slot == state.current, prequential_loss=loss)
        published = [regime.status for regime in self.by_slot.values() if regime.status is not None]
        num_shifts = dict(state.num_entries)
        if num_shifts.get("inputs"):
            num_shifts["inputs"] -= 1  # the first regime of all was entered without a shift
        past = [regime.scores for slot, regime in sorted(self.by_slot.items()) if slot != state.current]
        shared = () if learner.per_regime else learner.banks  # only they have biases
        read = {regime.number: learner.usage.read(slot, shared) for slot, regime in self.by_slot.items()}
        return AdaptationStatus(
            regimes=tuple(sorted(published, key=lambda regime: regime.number)),
            shifts=self._shifts,
            num_shifts=MappingProxyType(num_shifts),
            average_forgetting=self.scorer.forgetting.average_forgetting(past),
            backward_transfer=self.scorer.forgetting.backward_transfer(past),
            probe_seconds=self.probe_seconds,
            holdout_seconds=self.scorer.budget.spent_s,
            adapters_in_memory=learner.cache.num_in_memory,
            adapter_reads=learner.cache.num_reads,
            fallback=self.fallback.status,
            routes_by_regime=learner.routes_by_regime,
            effective_regimes=None if learner.per_regime else learner.usage.effective_regimes(),
            experts=tuple(RegimeExperts(number, *tables) for number, tables in sorted(read.items()) if tables),
        )

    # Controls of an operator. What they decide is part of the state, and durable with the next snapshot.

    def rename(self, number: int, name: str) -> None:
        """Give a regime a name for people; an empty one removes it.

        Raises:
            RegimeError: no regime has this number, or the name has other characters or another length, or is in use.
        """
        regime = self._regime(number)
        if name and not NAME.fullmatch(name):
            raise RegimeError(
                "a regime's name must be 1 to 64 letters, digits, spaces and . _ : / + -, begin with a letter and not "
                f"end with a space, found {name[:80]!r}; choose another, or an empty one to remove the name"
            )
        owner = next((other for other in self.by_slot.values() if name and other.name == name), regime)
        if owner is not regime:
            raise RegimeError(
                f"a regime's name must be unique, found {name!r} at regime {owner.number}; choose another, or rename "
                f"regime {owner.number} first"
            )
        self.state.num_changes += name != regime.name
        regime.name, regime.status = name, None
        _log.info(Event.REGIME_RENAMED, regime=number, name=name)

    def freeze(self, number: int) -> None:
        """Keep every bit of a regime's adapter and optimizer state. Its records are measured and not trained on.

        Raises:
            RegimeError: no regime has this number, or regimes share their experts.
        """
        self._regime(number)
        if not self._learner.per_regime:
            raise RegimeError(
                f"regime {number} must have an adapter of its own to be frozen, found preset "
                f"{self._settings.adapter.preset}, whose experts all regimes share; start a new run with "
                "adapter.per_regime: true, or stop feeding the regime's records"
            )
        self._set_frozen(number, True)

    def unfreeze(self, number: int) -> None:
        """Train on a regime's records again.

        Raises:
            RegimeError: no regime has this number.
        """
        self._set_frozen(number, False)

    def _set_frozen(self, number: int, is_frozen: bool) -> None:
        regime = self._regime(number)
        read, trained = self.monitor.records_read, self.state.records
        self.state.num_changes += regime.set_frozen(is_frozen, read=read, trained=trained)
        regime.status = None
        _log.info(Event.REGIME_FROZEN if is_frozen else Event.REGIME_UNFROZEN, regime=number)

    def approve(self, number: int) -> None:
        """Let a regime be published although its answers changed: the next version need not be as good as the last.

        Raises:
            RegimeError: no regime has this number, or nothing is published.
        """
        regime, step = self._regime(number), self._learner.number
        if self._settings.publish is None:
            raise RegimeError(f"regime {number} cannot be approved: nothing is published; add a section publish")
        self.state.num_changes += regime.approved_at != step
        regime.approved_at = step
        _log.info(Event.REGIME_APPROVED, regime=number, step=step)

    @property
    def can_drop(self) -> bool:
        """True unless the stream is in the middle of entering a regime."""
        detector, current = self.monitor.trained.detector, self.state.current
        return detector.numbers == self.numbers and detector.segment.slot == (NO_SLOT if current is None else current)

    def drop(self, number: int) -> None:
        """Forget a regime: its profile, adapter, optimizer state, hold-out records, scores, name.

        Experts that regimes share keep their weights. If its records come again, they begin a new regime, or belong to
        another that explains them. If it is the regime of the present segment, the next record begins a new one. The
        batches that wait are assigned again, as if the regime had never existed.

        Raises:
            RegimeError: no regime has this number.
            RegimeBusyError: the stream is entering a regime; it can be dropped a few batches later.
        """
        slot, state = self._regime(number).slot, self.state
        if not self.can_drop:
            linger_s = self._settings.stream.linger_s
            raise RegimeBusyError(
                f"regime {number} cannot be dropped while the stream enters another regime, which lasts up to "
                f"shift.lookahead_records ({self._settings.shift.lookahead_records}) records"
                + (f" or stream.linger_s ({linger_s:g} s)" if linger_s is not None else "")
                + "; try again then"
            )
        if slot == state.current:
            state.current = None
        state.num_changes += 1
        state.undivided = [shift for shift in state.undivided if slot != shift.slot and number != shift.parent]
        self._discard(slot)
        self.return_checks.clear()
        self._learner.hooks.drop(slot)
        if self._learner.per_regime:
            self._learner.remove_regime(slot)
        self.monitor.forget(slot, self._frozen_at)
        _log.info(Event.REGIME_DROPPED, regime=number, left=sorted(self.numbers.values()))

    def _regime(self, number: int) -> Regime:
        slot = slot_of(self.by_slot, number)
        if slot is None:
            known = ", ".join(map(str, sorted(self.numbers.values()))) or "none yet"
            raise RegimeError(f"regime: must be the number of a remembered regime, which are {known}, found {number}")
        return self.by_slot[slot]

    # Snapshots.

    def save(self) -> RegimesState:
        """The state for a snapshot, as of the last trained batch; it must be written before anything changes."""
        self.scorer.canary_scores.schedule(self.by_slot.values())
        return replace(self.state, monitor=self.monitor.trained, answers=self.answers.state)

    def restore(self, state: RegimesState) -> None:
        """Continue from what `save` returned. What was looked ahead at is dropped: it will be read again."""
        self.state = state
        self.scorer.canary_scores.clear()
        self.scorer.canary_scores.schedule(state.regimes.values())
        self.fallback.losses = state.start_losses
        self.monitor.load(state.monitor)
        self.answers.state = state.answers
        self.return_checks.clear()
        self._left.clear()
        self._shifts = tuple(report.status for report in state.reports)
        for regime in state.regimes.values():
            for record in [*regime.holdouts.records, *regime.rehearsal.records, *regime.probed]:
                if record.images:
                    record.example = self._with_images(record.example, record.images)
