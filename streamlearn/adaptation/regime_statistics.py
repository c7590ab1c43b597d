"""Counts of what happened to regimes and experts, for the status. Nothing that learns reads them.

A step changes only the regimes of its own records, so only their published status is rebuilt after it.
"""
# Shape suffixes: H heads, K experts a head.

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import nsmallest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from streamlearn.adaptation.forgetting import Forgetting, ScoreHistory
from streamlearn.adaptation.holdout import HoldoutReservoirs
from streamlearn.adaptation.regime_controls import RegimeControls
from streamlearn.adaptation.shift_report import ShiftReport
from streamlearn.adapters.config import regime_adapter
from streamlearn.learner.learner import Learner
from streamlearn.status.status import AdaptationStatus, RegimeStatus, ShiftStatus

MAX_SHIFTS = 256  # that are published

_LOAD = "experts.load."


@dataclass
class RegimeVisits:
    """When a regime was in the stream."""

    number: int
    visits: int = 0
    records: int = 0
    first_record: int | None = None
    last_record: int | None = None
    refused_return: int | None = None
    """Number of the regime that its first records looked like, see `ShiftReport`."""


class RegimeStatistics:
    """Counts, and the status that they and the hold-out scores add up to. Only the loop's thread calls it."""

    def __init__(
        self,
        learner: Learner,
        holdouts: HoldoutReservoirs,
        forgetting: Forgetting,
        controls: RegimeControls,
        loss_of: Callable[[int], float | None],
    ) -> None:
        """`loss_of` returns the smoothed prequential loss of the regime in a slot, nats per token."""
        self.visits_by_slot: dict[int, RegimeVisits] = {}
        self.num_regime_entries: Counter[str] = Counter()
        """By kind of shift; the entry into the first regime is among them."""
        self._learner = learner
        self.load: dict[str, Tensor] = {}
        """Tokens that each expert was trained on, (H, K) by bank; sequences where those are routed."""
        self._holdouts = holdouts
        self._forgetting = forgetting
        self._controls = controls
        self._loss_of = loss_of
        self._regimes: dict[int, RegimeStatus] = {}
        self._shifts: tuple[ShiftStatus, ...] = ()
        self._stale: set[int] = set()
        self._transfer: tuple[float | None, float | None] | None = None

    def entered(self, report: ShiftReport, left: int | None) -> None:
        """The stream moved to the regime of a shift from the one in slot `left`."""
        shift = report.shift
        if not shift.known:
            self.visits_by_slot[shift.slot] = RegimeVisits(shift.regime, refused_return=report.refused_return)
            self._forget_load(shift.slot)
        self.visits_by_slot[shift.slot].visits += 1
        self.changed(shift.slot)
        if left is not None:
            self.changed(left)

    def declared(self, shift: ShiftStatus) -> None:
        """A shift of any kind was acted on, or the first regime was entered: listed, and not counted as a shift."""
        self.num_regime_entries[shift.kind] += 1
        self._shifts = (*self._shifts[1 - MAX_SHIFTS :], shift)

    def count(self, slots: Sequence[int], first: int) -> None:
        """Count records that are done; `first` is the ordinal of the first."""
        for ordinal, slot in enumerate(slots, start=first):
            visits = self.visits_by_slot.get(slot)
            if visits is None:
                continue
            visits.records += 1
            visits.first_record = visits.first_record or ordinal
            visits.last_record = ordinal
            self._stale.add(slot)

    def trained(self) -> None:
        """An update was made: add up what each expert received, before the next step resets it."""
        loads = {bank.name: bank.load_HK for bank in self._learner.active_banks if bank.load_HK is not None}
        if loads:
            totals = [self.load.setdefault(name, torch.zeros_like(load_HK)) for name, load_HK in loads.items()]
            torch._foreach_add_(totals, list(loads.values()))

    def changed(self, slot: int) -> None:
        """A regime's scores changed, or its slot holds another regime now."""
        self._stale.add(slot)
        self._transfer = None

    def largest(self, count: int, *, without: int | None = None) -> tuple[int, ...]:
        """Slots of the regimes with the most records, at most `count`, except for the one in slot `without`."""
        others = [slot for slot in self.visits_by_slot if slot != without]
        visits = self.visits_by_slot
        return tuple(nsmallest(count, others, lambda slot: (-visits[slot].records, visits[slot].number)))

    def forget(self, slot: int) -> None:
        """The regime in a slot was dropped."""
        del self.visits_by_slot[slot]
        self._regimes.pop(slot, None)
        self._forget_load(slot)
        self.changed(slot)

    def _forget_load(self, slot: int) -> None:
        own = f"{regime_adapter(slot)}/"
        self.load = {name: load_HK for name, load_HK in self.load.items() if not name.startswith(own)}

    def status(self, current: int | None) -> AdaptationStatus:
        """What is published about regimes and shifts; `current` is the slot of the segment under way."""
        for slot in self._stale & self.visits_by_slot.keys():
            self._regimes[slot] = self._regime(slot, current)
        self._stale.clear()
        if self._transfer is None:
            past = [slot for slot in self.visits_by_slot if slot != current]
            self._transfer = self._forgetting.average_forgetting(past), self._forgetting.backward_transfer(past)
        forgetting, transfer = self._transfer
        return AdaptationStatus(
            regimes=tuple(sorted(self._regimes.values(), key=lambda regime: regime.number)),
            shifts=self._shifts,
            num_shifts=MappingProxyType(self._num_shifts()),
            average_forgetting=forgetting,
            backward_transfer=transfer,
        )

    def _num_shifts(self) -> dict[str, int]:
        """By kind; the first regime of all was entered without a shift."""
        counts = dict(self.num_regime_entries)
        if counts.get("inputs"):
            counts["inputs"] -= 1
        return counts

    def _regime(self, slot: int, current: int | None) -> RegimeStatus:
        visits, history = self.visits_by_slot[slot], self._forgetting.histories.get(slot, ScoreHistory())
        return RegimeStatus(
            number=visits.number,
            slot=slot,
            name=self._controls.names.get(visits.number, ""),
            frozen=visits.number in self._controls.frozen,
            current=slot == current,
            visits=visits.visits,
            records=visits.records,
            first_record=visits.first_record,
            last_record=visits.last_record,
            prequential_loss=self._loss_of(slot),
            holdout_records=len(self._holdouts.examples(slot)),
            history=tuple(history.points),
            best_accuracy=history.best_accuracy,
            end_accuracy=history.at_end.accuracy if history.at_end is not None else None,
        )

    def state(self) -> dict[str, Tensor]:
        """Arrays for a snapshot; live tensors."""
        return {f"{_LOAD}{name}": load_HK for name, load_HK in self.load.items()}

    def to_json(self) -> dict[str, Any]:
        """The rest of the state, for the manifest; keys are those of snapshot format 2. Shifts are stored elsewhere."""
        visits_by_slot = {str(slot): asdict(visits) for slot, visits in self.visits_by_slot.items()}
        return {"presences": visits_by_slot, "num_shifts": dict(self.num_regime_entries)}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], shifts: Sequence[ShiftStatus]) -> None:
        """The inverse of `state` and `to_json`."""
        self.load = {
            name.removeprefix(_LOAD): tensor.to(self._learner.device)
            for name, tensor in tensors.items()
            if name.startswith(_LOAD)
        }
        self.visits_by_slot = {int(slot): RegimeVisits(**row) for slot, row in values["presences"].items()}
        self.num_regime_entries = Counter(values["num_shifts"])
        self._shifts = tuple(shifts)[-MAX_SHIFTS:]
        self._regimes = {}
        self._stale = set(self.visits_by_slot)
        self._transfer = None
