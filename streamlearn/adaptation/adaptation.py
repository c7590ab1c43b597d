"""What the daemon does about regimes: sights them, enters them, keeps records of each out, and heeds their losses.

look      shift/: each record's regime, a little ahead of the learner
enter     at a shift: hold on to the old regime, probe the new one, give it its bias
keep_out  every Nth record of a regime is scored and never trained on
heed      shift/: what only the loss can show, after the step
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from streamlearn.adaptation.expert_evidence import ExpertEvidence
from streamlearn.adaptation.forgetting import Forgetting
from streamlearn.adaptation.holdout import HoldoutReservoirs
from streamlearn.adaptation.regime_statistics import RegimeStatistics
from streamlearn.consolidate.consolidator import Consolidator
from streamlearn.events import Event, get_logger
from streamlearn.learner.learner import Learner, Step
from streamlearn.probe.probe import ProbeReport, probe
from streamlearn.settings import Settings
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.concept_drift_detector import ConceptDriftDetector
from streamlearn.shift.monitor import Monitor
from streamlearn.shift.monitor_state import MonitorState
from streamlearn.shift.shift import Shift
from streamlearn.status.status import AdaptationStatus, ShiftStatus
from streamlearn.stream.decode import Example

CONFIRM_RECORDS = 64
"""Records that a shift of the answers waits. A shift of the inputs that is declared late, or by a regime whose records
still went to others, raises losses too; when one turns up meanwhile, the answers are not to blame."""
MAX_ENTRIES = 256  # shifts that are remembered for those who ask

_log = get_logger("shift")


@dataclass(frozen=True)
class ShiftReport:
    """A shift that was entered, and what its probe cost and found."""

    shift: Shift
    step: int
    """Steps before it."""
    probe_tokens: int = 0
    probe_seconds: float = 0.0
    mean_similarity: float | None = None
    """CKA over all banks, heads and experts; None when nothing was probed."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**self.__dict__, "shift": self.shift.to_json()}

    @property
    def status(self) -> ShiftStatus:
        """As it is published."""
        own = {name: value for name, value in self.__dict__.items() if name != "shift"}
        fields = {name: value for name, value in self.shift.to_json().items() if name != "slot"}
        return ShiftStatus(**fields, **own)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "ShiftReport":
        """The inverse of `to_json`."""
        return cls(**{**row, "shift": Shift.from_json(row["shift"])})


class Adaptation:
    """Everything that is remembered about regimes, beside the weights."""

    def __init__(
        self,
        learner: Learner,
        settings: Settings,
        vocab_size: int,
        restored: Callable[[Example, Sequence[bytes]], Example],
    ) -> None:
        """`restored`: see `HoldoutReservoirs`."""
        slots = settings.shift.max_regimes
        self._learner = learner
        self._settings = settings
        self.monitor = Monitor(settings.shift, vocab_size, settings.seed)
        self.drift_detector = ConceptDriftDetector(settings.shift)
        self.holdouts = HoldoutReservoirs(settings.holdout, regimes=slots, seed=settings.seed, restored=restored)
        self.forgetting = Forgetting(
            learner, pack_tokens=settings.stream.batch_tokens, time_share=settings.holdout.time_share
        )
        self.consolidator = Consolidator(
            learner,
            settings.consolidate,
            experts_claimed=settings.adapter.experts_claimed,
            regimes=slots,
            seed=settings.seed,
        )
        self.statistics = RegimeStatistics(learner.banks, self.holdouts, self.forgetting)
        self.numbers: dict[int, int] = {}
        """Slot of each entered regime -> its number."""
        self.current: int | None = None
        """Slot of the stretch that is being trained on."""
        self.entries: deque[ShiftReport] = deque(maxlen=MAX_ENTRIES)
        self.suspected: list[Shift] = []
        """Shifts of the answers that wait to be confirmed."""
        self.records = 0
        """Ordinal of the last record that was trained on or kept out."""
        self.probe_seconds = 0.0
        self._trained: MonitorState | None = self.monitor.released

    def wants_probe(self, shift: Shift) -> bool:
        """Whether this shift is entered with a transient expert; before the first there is none to compare with."""
        objective, transient = self._learner.objective, self._settings.consolidate.importance == "transient"
        if shift.known or not self._settings.probe.enabled or not objective.remembers:
            return False
        return shift.previous is not None or (transient and objective.anchor_strength > 0)

    def enter(self, shift: Shift, examples: Sequence[Example]) -> ShiftReport:
        """Close the regime under way and open or return to another; `examples` are its first records."""
        self.suspected = [each for each in self.suspected if each.declared_at < shift.onset - CONFIRM_RECORDS]
        if self.current is not None:
            self._leave(self.current)
        report: ProbeReport | None = None
        if examples and self.wants_probe(shift):
            settings = self._settings
            report = probe(
                self._learner,
                examples,
                settings.probe,
                settings.consolidate,
                seed=settings.seed * 1_000_003 + shift.regime,
            )
            self.probe_seconds += report.seconds
        if not shift.known:
            self._clear(shift.slot)
            self.consolidator.open(shift.slot, shift.regime, report)
        self.numbers[shift.slot] = shift.regime
        self.statistics.entered(shift, self.current)
        self.current = shift.slot
        if self._learner.stages is not None:
            self._learner.stages.restart()
        entry = ShiftReport(shift, self._learner.number)
        if report is not None:
            similarity = float(torch.stack([each.mean() for each in report.similarity.values()]).mean())
            entry = ShiftReport(shift, self._learner.number, report.tokens, report.seconds, similarity)
        self._note(entry)
        return entry

    def keep_out(self, assigned: AssignedBatch) -> frozenset[int]:
        """Indices of the batch's records that are not trained on."""
        pairs = enumerate(zip(assigned.slots, assigned.batch.examples, strict=True))
        self.statistics.met(assigned.slots, self.records + 1)
        self.records += len(assigned.slots)
        return frozenset([index for index, (slot, example) in pairs if self.holdouts.take(slot, example)])

    def heed(self, assigned: AssignedBatch, held_out: Collection[int], losses: Sequence[float]) -> list[ShiftReport]:
        """After a step: prequential losses of the batch's records that were not held out, in order.

        Returns the shifts of the answers that are believed by now.
        """
        first = self.records - len(assigned.slots) + 1
        trained = [index for index in range(len(assigned.slots)) if index not in held_out]
        for index, loss in zip(trained, losses, strict=True):
            slot = assigned.slots[index]
            number = self.numbers.get(slot)
            if number is None:
                continue
            self.suspected += self.drift_detector.update(slot, number, first + index, [loss])
        return self._confirm()

    def _confirm(self) -> list[ShiftReport]:
        """Believe the suspicions that no shift of the inputs has explained: the newest answers are right."""
        old = [each for each in self.suspected if self.records - each.declared_at >= CONFIRM_RECORDS]
        self.suspected = [each for each in self.suspected if each not in old]
        entries = []
        for each in old:
            if self.numbers.get(each.slot) != each.regime:
                continue
            self.consolidator.release(each.slot)
            self.holdouts.clear(each.slot)
            self.forgetting.forget(each.slot)
            self.statistics.changed(each.slot)
            entry = ShiftReport(replace(each, declared_at=self.records), self._learner.number)
            self._note(entry)
            entries.append(entry)
        return entries

    def trained(self, assigned: AssignedBatch, step: Step | None) -> None:
        """The batch is done with: what is asked and saved from now on is as of it, not of what was looked at ahead."""
        self._trained = assigned.after
        if step is not None and step.refusal is None:
            self.statistics.trained()

    def slots_of(self, inputs: Sequence[NDArray[Any]]) -> list[int] | None:
        """The regime slot of each request; None where routing knows no regimes."""
        if self._learner.objective.bias == "none" or not self.numbers:
            return None
        return self.monitor.assign(inputs, self._trained)

    def score_stalest(self, *, idle: bool) -> bool:
        """Score one regime's hold-out records when time allows; tell whether one was."""
        if not (idle or self.forgetting.affordable):
            return False
        slot = self.forgetting.stalest([slot for slot in self.numbers if self.holdouts.examples(slot)])
        if slot is None:
            return False
        self._score(slot, idle=idle)
        return True

    def status(self) -> AdaptationStatus:
        """What is published about regimes and shifts."""
        return self.statistics.status(self.current, self.probe_seconds)

    def expert_evidence(self) -> ExpertEvidence:
        """What is known about the experts beside their weights: load, similarity, hold-out records."""
        return ExpertEvidence(
            numbers=dict(self.numbers),
            load=self.statistics.load,
            similarity=self.consolidator.similarity,
            holdouts={slot: self.holdouts.examples(slot) for slot in self.numbers},
        )

    def _leave(self, slot: int) -> None:
        if self.holdouts.examples(slot):
            self._score(slot, at_end=True)
        self.consolidator.close(slot)

    def _score(self, slot: int, *, at_end: bool = False, idle: bool = False) -> None:
        examples = self.holdouts.examples(slot)
        scoring = self.forgetting.measure(slot, examples, at_end=at_end, idle=idle)
        self.statistics.changed(slot)
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

    def _clear(self, slot: int) -> None:
        self.holdouts.clear(slot)
        self.forgetting.forget(slot)
        self.drift_detector.forget(slot)

    def _note(self, entry: ShiftReport) -> None:
        self.entries.append(entry)
        self.statistics.declared(entry.status)
        shift = entry.shift
        _log.info(
            Event.SHIFT_DETECTED,
            kind=shift.kind,
            regime=shift.regime,
            known=shift.known,
            step=entry.step,
            declared_at=shift.declared_at,
            onset=shift.onset,
            statistic=round(shift.statistic, 3),
            threshold=round(shift.threshold, 3),
            probe_tokens=entry.probe_tokens,
            probe_s=round(entry.probe_seconds, 2),
        )

    def state(self) -> dict[str, Tensor]:
        """Arrays for a snapshot, as of the last trained batch."""
        parts: dict[str, Mapping[str, NDArray[Any]]] = {
            "monitor": self.monitor.state(self._trained),
            "answers": self.drift_detector.state(),
            "holdouts": self.holdouts.state(),
        }
        tensors = {
            f"regimes.{part}.{name}": torch.from_numpy(array)
            for part, held in parts.items()
            for name, array in held.items()
        }
        return {**tensors, **self.consolidator.state(), **self.statistics.state()}

    def to_json(self) -> dict[str, Any]:
        """The rest of it, for the manifest."""
        return {
            "numbers": {str(slot): number for slot, number in self.numbers.items()},
            "current": self.current,
            "records": self.records,
            "entries": [entry.to_json() for entry in self.entries],
            "suspected": [shift.to_json() for shift in self.suspected],
            "forgetting": self.forgetting.to_json(),
            "chronicle": self.statistics.to_json(),
        }

    def restore(self, tensors: Mapping[str, Tensor], room: Mapping[str, Any]) -> None:
        """The inverse of `state` and `to_json`."""

        def arrays(part: str) -> dict[str, NDArray[Any]]:
            prefix = f"regimes.{part}."
            return {name.removeprefix(prefix): t.numpy() for name, t in tensors.items() if name.startswith(prefix)}

        self.monitor.load_state(arrays("monitor"))
        self._trained = self.monitor.released
        self.drift_detector.load_state(arrays("answers"))
        self.holdouts.load_state(arrays("holdouts"))
        self.consolidator.load_state(tensors)
        self.numbers = {int(slot): number for slot, number in room["numbers"].items()}
        self.current = room["current"]
        self.records = room["records"]
        self.entries = deque((ShiftReport.from_json(row) for row in room["entries"]), maxlen=MAX_ENTRIES)
        self.suspected = [Shift.from_json(row) for row in room["suspected"]]
        self.forgetting.load_json(room["forgetting"])
        self.statistics.restore(tensors, room["chronicle"], [entry.status for entry in self.entries])
