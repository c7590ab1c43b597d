"""What the daemon does about regimes, in the order of a batch's way.

look_ahead   a batch was read: assign its records to regimes, ahead of training
next_batch   the next batch to train on, its regimes decided
enter        a shift begins in it: close the old regime, probe the new one, give it its bias
hold_out     every Nth record of a regime is kept for scoring and never trained on
after_step   the batch is done: what only its losses show, and the counts

What an operator does between two steps is in `operated_regimes`.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamlearn.adapters.context import Slot
from streamlearn.codec import from_arrays, to_arrays
from streamlearn.errors import RegimeBusyError, RegimeError
from streamlearn.events import Event, get_logger
from streamlearn.learner.learner import Learner, Step
from streamlearn.regimes.holdout import Forgetting, HoldoutReservoirs, TimeBudget
from streamlearn.regimes.regime_probe import Probed, RegimeProbe
from streamlearn.regimes.requested import Requested
from streamlearn.regimes.returns import ReturnChecks, Upcoming
from streamlearn.regimes.route import RequestRouter, RoutedInput
from streamlearn.regimes.start import Fallback
from streamlearn.regimes.statistics import RegimeControls, RegimeStatistics, ShiftReport
from streamlearn.settings import Settings, ShiftSettings
from streamlearn.shift.detector import NO_SLOT, Shift
from streamlearn.shift.drift import ConceptDriftDetector, LossLevels
from streamlearn.shift.features import input_of
from streamlearn.shift.monitor import AssignedBatch, Monitor, MonitorState
from streamlearn.status import AdaptationStatus
from streamlearn.stream.record import Batch, Example

CONFIRM_RECORDS = 64
"""Records that a suspected shift of the answers waits for confirmation. A shift of the inputs that is declared late, or
whose first records were assigned to other regimes, raises losses too; when one is declared within these records, it is
the cause, and the answers have not changed."""


class AnswerShifts:
    """The detector of rising losses, and the shifts that wait for confirmation."""

    def __init__(self, settings: ShiftSettings) -> None:
        self.detector = ConceptDriftDetector(settings)
        self.suspected: list[Shift] = []
        """In the order of their alarms."""

    def update(self, slot: int, regime: int, ordinal: int, loss: float) -> None:
        """Process the prequential loss of a regime's next record, nats per token."""
        self.suspected += self.detector.update(slot, regime, ordinal, [loss])

    def explained_by(self, shift: Shift) -> None:
        """Drop what is suspected where this shift of the inputs is the cause."""
        self.suspected = [each for each in self.suspected if each.declared_at < shift.onset - CONFIRM_RECORDS]

    def due(self, records: int) -> list[Shift]:
        """Remove and return what has waited long enough after `records` records."""
        due = [each for each in self.suspected if records - each.declared_at >= CONFIRM_RECORDS]
        self.suspected = [each for each in self.suspected if each not in due]
        return due

    def forget(self, slot: int) -> None:
        """Discard a slot's losses, and what is suspected there: it belongs to no regime, or to another one now."""
        self.detector.forget(slot)
        self.suspected = [each for each in self.suspected if each.slot != slot]

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Arrays for a snapshot."""
        return to_arrays(self.detector.state)

    def to_json(self) -> list[dict[str, Any]]:
        """The rest of the state, for the manifest."""
        return [shift.to_json() for shift in self.suspected]

    def restore(self, arrays: Mapping[str, NDArray[np.generic]], rows: Sequence[Mapping[str, Any]]) -> None:
        """The inverse of `state` and `to_json`."""
        self.detector.state = from_arrays(LossLevels, arrays)
        self.suspected = [Shift.from_json(row) for row in rows]


MAX_REPORTS = 256  # newest shifts kept for the status and the manifest

_log = get_logger("shift")


class Adaptation:
    """Everything kept about regimes beside the weights. Only the thread that owns the model calls it."""

    def __init__(
        self,
        learner: Learner,
        settings: Settings,
        restored: Callable[[Example, Sequence[bytes]], Example],
    ) -> None:
        """`restored`: see `HoldoutReservoirs`."""
        slots = settings.shift.max_regimes
        self._learner = learner
        self._settings = settings
        self.monitor = Monitor(settings.shift, settings.seed)
        self.answer_shifts = AnswerShifts(settings.shift)
        self.return_checks = ReturnChecks(learner, settings, self.monitor)
        self.holdouts = HoldoutReservoirs(settings.holdout, regimes=slots, seed=settings.seed, restored=restored)
        self.budget = TimeBudget(settings.holdout.time_share / 2)
        """For scoring hold-out records; the other half is for `BackboneComparison`."""
        self.forgetting = Forgetting(learner, pack_tokens=settings.stream.batch_tokens)
        self.fallback = Fallback(settings.serve.unknown, has_regimes=learner.routes_by_regime)
        self.controls = RegimeControls()
        self.statistics = RegimeStatistics(
            learner, self.holdouts, self.forgetting, self.controls, self.answer_shifts.detector.level_of
        )
        self.numbers: dict[int, int] = {}
        """Slot of each regime that was entered -> its number."""
        self.router = RequestRouter(
            self.monitor,
            self.fallback,
            self.statistics,
            self.numbers,
            routes_by_regime=learner.routes_by_regime,
            max_known_rejected=settings.serve.max_known_rejected,
        )
        self.probe = RegimeProbe(learner, settings, self.monitor, self.router, self.fallback)
        self.current: int | None = None
        """Slot of the segment that is being trained on; None before the first, and after its regime was dropped."""
        self.reports: deque[ShiftReport] = deque(maxlen=MAX_REPORTS)
        self.undivided: list[Shift] = []
        """Splits whose regimes' hold-out records are not divided yet."""
        self._left: list[int] = []
        """Slots whose segments end within the batch under way."""
        self.records = 0
        """Ordinal of the last record that was trained on, held out or only measured."""
        self._trained = MonitorState()

    def look_ahead(self, batch: Batch) -> None:
        """Assign the records of the next batch read from the stream to regimes."""
        self.monitor.update(batch, self.controls.frozen_at)

    def next_batch(self) -> AssignedBatch | None:
        """The next batch to train on.

        None while too few records follow it to decide its regimes, or to probe the new regime that begins in it or
        check the return of a known one, unless the stream was flushed. What looks like a known regime's and is not by
        its losses is decided again.
        """
        assigned = self.monitor.take(self._probe_tokens)
        if assigned is not None and self.return_checks.refuse(self._upcoming(assigned)):
            return self.monitor.taken
        return assigned

    def _upcoming(self, assigned: AssignedBatch) -> Upcoming:
        profiles = self._trained.detector.regimes
        return Upcoming(
            assigned,
            first=self.records + 1,
            current=self.current,
            numbers=self.numbers,
            last_records={slot: each.last_record for slot, each in enumerate(profiles) if each is not None},
            kept_at=self.controls.frozen_at,
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

    def enter(self, shift: Shift, examples: Sequence[Example]) -> ShiftReport:
        """Close the regime under way and open, or return to, the one of `shift`; `examples` are its first records.

        A regime that was split from another goes on beside it: nothing is closed, and the stream stays where it is.
        """
        self.answer_shifts.explained_by(shift)
        report = ShiftReport(shift, self._learner.number)
        if shift.parent is not None:
            return self._enter_split(report)
        if self.current is not None:
            self._close(self.current)
        if not shift.known:
            report = replace(report, refused_return=self.return_checks.refused_at(shift.declared_at))
            report = self._open(report, examples if self.probe.applies(shift) else ())
        self._learner.hooks.enter(shift.slot)
        self._take_slot(shift)
        self.statistics.entered(report, self.current)
        self.current = shift.slot
        self._publish(report)
        return report

    def _enter_split(self, report: ShiftReport) -> ShiftReport:
        """Open a regime that was split from another, with a copy of the adapter that learned the records of both.

        The other one's losses are those of other records from now on. Its hold-out records are divided once the batch
        is trained on at which the split was declared: only then are the profiles that tell them apart part of the
        state.
        """
        shift = report.shift
        parent = self._slot_of(shift.parent)
        report = self._open(report, (), parent=parent)
        self._take_slot(shift)
        if parent is not None:
            self.controls.inherit(self.numbers[parent], shift.regime, declared_at=shift.declared_at)
            self.answer_shifts.detector.forget(parent)
            self.return_checks.losses.forget(parent)
            self.undivided.append(shift)
        self.statistics.entered(report, self.current)
        self._publish(report)
        return report

    def _take_slot(self, shift: Shift) -> None:
        self.numbers[shift.slot] = shift.regime
        self.controls.keep(self.numbers.values())  # another regime may have been forgotten for it

    def hold_out(self, assigned: AssignedBatch) -> frozenset[int]:
        """Count the batch's records and return the indices of those that are not trained on."""
        pairs = enumerate(zip(assigned.slots, assigned.batch.examples, strict=True))
        for slot in filter(self.forgetting.has_ended, set(assigned.slots)):  # with the weights and records of its end
            self._score_at_end(slot)
        self.statistics.count(assigned.slots, self.records + 1)
        self.records += len(assigned.slots)
        return frozenset([index for index, (slot, example) in pairs if self.holdouts.take(slot, example)])

    def frozen(self, assigned: AssignedBatch) -> frozenset[int]:
        """Indices of the batch's records whose regimes are frozen."""
        numbers = self.controls.frozen
        return frozenset(index for index, slot in enumerate(assigned.slots) if self.numbers.get(slot) in numbers)

    def after_step(
        self, assigned: AssignedBatch, held_out: Collection[int], step: Step | None, measured: Mapping[int, float]
    ) -> list[ShiftReport]:
        """Everything that follows from a batch being done.

        Args:
            assigned: The batch.
            held_out: Indices of the records that were held out.
            step: Its step; None when no record of it was trained on.
            measured: Losses of the records of frozen regimes, which were not trained on, by index.

        Returns:
            The shifts of the answers that are confirmed now.
        """
        confirmed: list[ShiftReport] = []
        losses = dict(measured)
        if step is not None:
            self.budget.trained(step.seconds)
        if step is not None and step.refusal is None:
            trained = [i for i in range(len(assigned.slots)) if i not in held_out and i not in measured]
            losses.update(zip(trained, step.record_losses, strict=True))
            self.statistics.trained()
            self.forgetting.trained({assigned.slots[index] for index in trained})
        for slot in self._left:
            if slot != self.current and self.holdouts.examples(slot):
                self.forgetting.end(slot)
        self._left.clear()
        self.return_checks.clear()
        if losses:
            self._detect_drift(assigned, losses)
            confirmed = self._confirm()
        self._trained = (
            assigned.after
        )  # requests and snapshots see the regimes as of this batch, not as of the look-ahead
        for shift in [each for each in self.undivided if each.declared_at <= self.records]:
            self._divide_holdouts(shift)
            self.undivided.remove(shift)
        return confirmed

    @property
    def is_settled(self) -> bool:
        """Whether the monitor knew, as of the last trained batch, of every regime that was entered by then."""
        assert self._trained is not None, "a regime is under way"
        detector, current = self._trained.detector, NO_SLOT if self.current is None else self.current
        return detector.numbers == self.numbers and detector.segment.slot == current

    def forget(self, slot: int) -> None:
        """Forget the regime in `slot`: all that is kept of it here, its adapter and its optimizer state.

        Only while `is_settled`. The batches that wait are assigned again, as if the regime had never been.
        """
        assert self._trained is not None, "a regime is under way"
        number = self.numbers.pop(slot)
        if slot == self.current:
            self.current = None
        self.controls.drop(number)
        self.undivided = [each for each in self.undivided if slot != each.slot and number != each.parent]
        self._clear(slot)
        self.return_checks.clear()
        self.statistics.forget(slot)
        self._learner.hooks.drop(slot)
        if self._learner.per_regime:
            self._learner.remove_regime(slot)
        self._trained = self.monitor.forget(slot, self._trained, self.controls.frozen_at)

    def route(self, inputs: Sequence[NDArray[Any]], requested: Requested = "routed") -> list[RoutedInput]:
        """The regime of each input of a request, and what answers it, see `RequestRouter.route`."""
        return self.router.route(inputs, self._trained, requested)

    def slots_of(self, inputs: Sequence[NDArray[Any]]) -> list[Slot]:
        """What adapts each input, see `RoutedInput`."""
        return [each.slot for each in self.route(inputs)]

    def score_stalest(self, *, idle: bool) -> bool:
        """Score the hold-out records of one regime when the time budget allows; return whether one was scored."""
        if not (idle or self.budget.affordable):
            return False
        slot = self.forgetting.stalest([slot for slot in self.numbers if self.holdouts.examples(slot)])
        if slot is None:
            return False
        with self.budget.spending(idle=idle):
            self._score(slot, at_end=self.forgetting.has_ended(slot), idle=idle)
        return True

    def status(self) -> AdaptationStatus:
        """What is published about regimes and shifts."""
        return replace(
            self.statistics.status(self.current),
            probe_seconds=self.probe.seconds,
            holdout_seconds=self.budget.spent_s,
            adapters_in_memory=self._learner.cache.num_in_memory,
            adapter_reads=self._learner.cache.num_reads,
            fallback=self.fallback.status,
            routes_by_regime=self._learner.routes_by_regime,
        )

    def _open(self, report: ShiftReport, examples: Sequence[Example], *, parent: int | None = None) -> ShiftReport:
        """Give a new regime its adapter or its bias.

        `examples` are the records to probe it with, if any; `parent` is the slot of the regime it was split from.
        """
        if parent is not None and self._learner.per_regime:
            report = replace(report, started_from=self.numbers[parent])
        found = Probed(report, start=parent)
        if examples:
            found = self.probe.measure(report, examples, self.numbers, self._trained)
        shift = report.shift
        self._clear(shift.slot)
        if self._learner.per_regime:
            self._learner.add_regime(shift.slot, self._settings.seed * 1_000_003 + shift.regime, start=found.start)
        self._learner.hooks.open(shift.slot, start=found.start)
        return found.report

    def _divide_holdouts(self, shift: Shift) -> None:
        """Move the hold-out records of a regime that was split to the new one, where they are the new one's.

        Records that other regimes explain best stay.
        """
        parent = self._slot_of(shift.parent)
        if parent is None or self.numbers.get(shift.slot) != shift.regime:
            return
        inputs = [input_of(each) for each in self.holdouts.examples(parent)]
        assigned = self.monitor.assign(inputs, self._trained)
        self.holdouts.move(parent, shift.slot, [each.slot == shift.slot for each in assigned])
        for slot in (parent, shift.slot):  # their scores were those of other records
            self.forgetting.forget(slot)
            self.statistics.changed(slot)

    def _slot_of(self, number: int | None) -> int | None:
        """Slot of the regime with this number; None if it was forgotten."""
        return next((slot for slot, own in self.numbers.items() if own == number), None)

    def _probe_tokens(self, shift: Shift) -> int:
        is_checked = self.probe.applies(shift) or self.return_checks.applies(shift, self.numbers)
        return self.probe.tokens_needed if is_checked else 0

    def _close(self, slot: int) -> None:
        if self._learner.per_regime:
            self._left.append(slot)  # the batch may have more of its records
        elif self.holdouts.examples(slot):
            self._score_at_end(slot)
        self._learner.hooks.leave(slot)

    def _score_at_end(self, slot: int) -> None:
        """Score a regime whose segment ended, also where no time is left for it."""
        with self.budget.spending():
            self._score(slot, at_end=True)

    def _clear(self, slot: int) -> None:
        self.return_checks.losses.forget(slot)
        self.holdouts.clear(slot)
        self.forgetting.forget(slot)
        self.answer_shifts.forget(slot)

    def _detect_drift(self, assigned: AssignedBatch, losses: Mapping[int, float]) -> None:
        """Update each regime's detector with the prequential losses of its records, by index, in order."""
        first = self.records - len(assigned.slots) + 1
        for index, loss in sorted(losses.items()):
            slot = assigned.slots[index]
            number = self.numbers.get(slot)
            if number is not None:
                self.return_checks.losses.add(slot, loss)
                self.answer_shifts.update(slot, number, first + index, loss)

    def _confirm(self) -> list[ShiftReport]:
        """Act on suspected shifts of the answers that no shift of the inputs has explained: the newest are right."""
        reports = []
        for each in self.answer_shifts.due(self.records):
            if self.numbers.get(each.slot) != each.regime:
                continue
            self._learner.hooks.release(each.slot)
            self.return_checks.losses.forget(each.slot)
            self.holdouts.clear(each.slot)
            self.forgetting.forget(each.slot)
            self.statistics.changed(each.slot)
            report = ShiftReport(replace(each, declared_at=self.records), self._learner.number)
            self._publish(report)
            reports.append(report)
        return reports

    def _score(self, slot: int, *, at_end: bool = False, idle: bool = False) -> None:
        examples = self.holdouts.examples(slot)
        scoring = self.forgetting.measure(slot, examples, at_end=at_end)
        self.statistics.changed(slot)
        if scoring is None:
            _log.warning(Event.HOLDOUT_NOT_FINITE, regime=self.numbers[slot], records=len(examples))
            return
        _log.debug(
            Event.HOLDOUT_SCORED,
            regime=self.numbers[slot],
            step=scoring.step,
            loss=round(scoring.loss, 4),
            accuracy=round(scoring.accuracy, 4),
            records=len(examples),
            at_end=at_end,
            idle=idle,
        )

    def _publish(self, report: ShiftReport) -> None:
        self.reports.append(report)
        self.statistics.declared(report.status)
        shift = report.shift
        _log.info(
            Event.FIRST_REGIME_ENTERED if shift.previous is None else Event.SHIFT_DETECTED,
            kind=shift.kind,
            regime=shift.regime,
            known=shift.known,
            parent=shift.parent,
            step=report.step,
            declared_at=shift.declared_at,
            onset=shift.onset,
            statistic=round(shift.statistic, 3),
            threshold=round(shift.threshold, 3),
            probe_tokens=report.probe_tokens,
            probe_s=round(report.probe_seconds, 2),
            started_from=report.started_from,
            refused_return=report.refused_return,
        )

    def state(self) -> dict[str, Tensor]:
        """Arrays for a snapshot, as of the last trained batch."""
        parts: dict[str, Mapping[str, NDArray[Any]]] = {
            "monitor": to_arrays(self._trained),
            "answers": self.answer_shifts.state(),
            "losses": self.return_checks.losses.state(),
            "holdouts": self.holdouts.state(),
        }
        tensors = {
            f"regimes.{part}.{name}": torch.from_numpy(array)
            for part, held in parts.items()
            for name, array in held.items()
        }
        return {**tensors, **self.statistics.state()}

    def to_json(self) -> dict[str, Any]:
        """The rest of the state, for the manifest; keys are those of snapshot format 2."""
        return {
            "numbers": {str(slot): number for slot, number in self.numbers.items()},
            "current": self.current,
            "records": self.records,
            "entries": [report.to_json() for report in self.reports],
            "suspected": self.answer_shifts.to_json(),
            "undivided": [shift.to_json() for shift in self.undivided],
            "forgetting": self.forgetting.to_json(),
            "unknown": self.fallback.to_json(),
            "chronicle": self.statistics.to_json(),
            "controls": self.controls.to_json(),
        }

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The inverse of `state` and `to_json`. What was looked at ahead is dropped: it will be read again."""

        def arrays(part: str) -> dict[str, NDArray[Any]]:
            prefix = f"regimes.{part}."
            return {name.removeprefix(prefix): t.numpy() for name, t in tensors.items() if name.startswith(prefix)}

        self._trained = from_arrays(MonitorState, arrays("monitor"))
        self.monitor.load(self._trained)
        self.answer_shifts.restore(arrays("answers"), values["suspected"])
        self.return_checks.clear()
        self._left.clear()
        self.return_checks.losses.load_state(arrays("losses"))
        self.holdouts.load_state(arrays("holdouts"))
        self.numbers.clear()  # others have a view of it
        self.numbers.update({int(slot): number for slot, number in values["numbers"].items()})
        self.current = values["current"]
        self.records = values["records"]
        self.reports = deque((ShiftReport.from_json(fields) for fields in values["entries"]), maxlen=MAX_REPORTS)
        self.undivided = [Shift.from_json(fields) for fields in values.get("undivided", [])]  # older snapshots: none
        self.forgetting.load_json(values["forgetting"])
        self.fallback.load_json(values.get("unknown", []))  # older snapshots have none
        self.controls.load_json(values.get("controls", {}))
        self.statistics.restore(tensors, values["chronicle"], [report.status for report in self.reports])


# What an operator does to regimes, between two steps.
#
# Only regimes that are remembered have a number here; every other number is refused. What is decided is part of the
# state, and durable with the next snapshot.


class OperatedRegimes:
    """The regimes of a run, as an operator may change them. Only the thread that owns the model calls it."""

    def __init__(self, adaptation: Adaptation, learner: Learner, settings: Settings) -> None:
        self._adaptation, self._learner, self._settings = adaptation, learner, settings

    def rename(self, number: int, name: str) -> None:
        """Give a regime a name for people; an empty one removes it.

        Raises:
            RegimeError: no regime has this number, or the name cannot be its name.
        """
        slot = self._slot_of(number)
        self._adaptation.controls.rename(number, name)
        self._adaptation.statistics.changed(slot)
        _log.info(Event.REGIME_RENAMED, regime=number, name=name)

    def freeze(self, number: int) -> None:
        """Keep every bit of a regime's adapter and optimizer state. Its records are measured and not trained on.

        Raises:
            RegimeError: no regime has this number, or regimes share their experts.
        """
        slot = self._slot_of(number)
        if not self._learner.per_regime:
            raise RegimeError(
                f"regime {number} must have an adapter of its own to be frozen, found preset "
                f"{self._settings.adapter.preset}, whose experts all regimes share; start a new run with "
                "adapter.per_regime: true, or stop feeding the regime's records"
            )
        self._set_frozen(number, slot, True)

    def unfreeze(self, number: int) -> None:
        """Train on a regime's records again.

        Raises:
            RegimeError: no regime has this number.
        """
        self._set_frozen(number, self._slot_of(number), False)

    def approve(self, number: int) -> None:
        """Let a regime be published although its answers changed: the next version need not be as good as the last.

        Raises:
            RegimeError: no regime has this number, or nothing is published.
        """
        self._slot_of(number)
        if self._settings.publish is None:
            raise RegimeError(f"regime {number} cannot be approved: nothing is published; add a section publish")
        self._adaptation.controls.approve(number, self._learner.number)
        _log.info(Event.REGIME_APPROVED, regime=number, step=self._learner.number)

    def drop(self, number: int) -> None:
        """Forget a regime: its profile, adapter, optimizer state, hold-out records, scores, name.

        Experts that regimes share keep their weights. If its records come again, they begin a new regime, or belong to
        another that explains them. If it is the regime of the present segment, the next record begins a new one.

        Raises:
            RegimeError: no regime has this number.
            RegimeBusyError: the stream is entering a regime; it can be dropped a few batches later.
        """
        slot = self._slot_of(number)
        if not self._adaptation.is_settled:
            linger_s = self._settings.stream.linger_s
            raise RegimeBusyError(
                f"regime {number} cannot be dropped while the stream enters another regime, which lasts up to "
                f"shift.lookahead_records ({self._settings.shift.lookahead_records}) records"
                + (f" or stream.linger_s ({linger_s:g} s)" if linger_s is not None else "")
                + "; try again then"
            )
        self._adaptation.forget(slot)
        _log.info(Event.REGIME_DROPPED, regime=number, left=sorted(self._adaptation.numbers.values()))

    def _set_frozen(self, number: int, slot: int, is_frozen: bool) -> None:
        read, trained = self._adaptation.monitor.records_read, self._adaptation.records
        self._adaptation.controls.set_frozen(number, is_frozen, read=read, trained=trained)
        self._adaptation.statistics.changed(slot)
        _log.info(Event.REGIME_FROZEN if is_frozen else Event.REGIME_UNFROZEN, regime=number)

    def _slot_of(self, number: int) -> int:
        numbers = self._adaptation.numbers
        slot = next((slot for slot, own in numbers.items() if own == number), None)
        if slot is None:
            known = ", ".join(map(str, sorted(numbers.values()))) or "none yet"
            raise RegimeError(f"regime: must be the number of a remembered regime, which are {known}, found {number}")
        return slot
