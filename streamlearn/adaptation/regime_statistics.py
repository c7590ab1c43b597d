"""What happened to regimes and experts, counted for those who ask. Nothing that learns reads it.

A step changes the regimes of its own records alone, so of the published status only those are built anew.
"""
# Shape suffixes: H heads, K experts a head.

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from streamlearn.adaptation.forgetting import Forgetting, Trace
from streamlearn.adaptation.holdout import HoldoutReservoirs
from streamlearn.adapters.model import Bank
from streamlearn.shift.shift import Shift
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


class RegimeStatistics:
    """Counts, and the status that they make together with the hold-out scores. The loop's thread calls it."""

    def __init__(self, banks: Sequence[Bank], holdouts: HoldoutReservoirs, forgetting: Forgetting) -> None:
        self.visits_by_slot: dict[int, RegimeVisits] = {}
        """By slot."""
        self.num_shifts: Counter[str] = Counter()
        self._of_step = {bank.name: bank.load_HK for bank in banks if bank.load_HK is not None}
        self.load = {name: torch.zeros_like(load_HK) for name, load_HK in self._of_step.items()}
        """Tokens that each expert was trained on, (H, K) by bank; sequences where those are routed."""
        self._holdouts = holdouts
        self._forgetting = forgetting
        self._regimes: dict[int, RegimeStatus] = {}
        self._shifts: tuple[ShiftStatus, ...] = ()
        self._stale: set[int] = set()
        self._transfer: tuple[float | None, float | None] | None = None

    def entered(self, shift: Shift, left: int | None) -> None:
        """The stream goes over to a regime from the one in slot `left`."""
        if not shift.known:
            self.visits_by_slot[shift.slot] = RegimeVisits(shift.regime)
        self.visits_by_slot[shift.slot].visits += 1
        self.changed(shift.slot)
        if left is not None:
            self.changed(left)

    def declared(self, shift: ShiftStatus) -> None:
        """A shift of any kind was acted on."""
        self.num_shifts[shift.kind] += 1
        self._shifts = (*self._shifts[1 - MAX_SHIFTS :], shift)

    def met(self, slots: Sequence[int], first: int) -> None:
        """Records of these regimes are done with; `first` is the ordinal of the first."""
        for ordinal, slot in enumerate(slots, start=first):
            visits = self.visits_by_slot.get(slot)
            if visits is None:
                continue
            visits.records += 1
            visits.first_record = visits.first_record or ordinal
            visits.last_record = ordinal
            self._stale.add(slot)

    def trained(self) -> None:
        """An update was made: what each expert got in it is added up, before the next step forgets it."""
        if self.load:
            torch._foreach_add_(list(self.load.values()), list(self._of_step.values()))

    def changed(self, slot: int) -> None:
        """The scores of a regime are others, or it is another one."""
        self._stale.add(slot)
        self._transfer = None

    def status(self, current: int | None, probe_seconds: float) -> AdaptationStatus:
        """What is published; `current` is the slot of the stretch under way."""
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
            num_shifts=MappingProxyType(dict(self.num_shifts)),
            average_forgetting=forgetting,
            backward_transfer=transfer,
            probe_seconds=probe_seconds,
            holdout_seconds=self._forgetting.seconds,
        )

    def _regime(self, slot: int, current: int | None) -> RegimeStatus:
        visits, trace = self.visits_by_slot[slot], self._forgetting.traces.get(slot, Trace())
        return RegimeStatus(
            number=visits.number,
            slot=slot,
            current=slot == current,
            visits=visits.visits,
            records=visits.records,
            first_record=visits.first_record,
            last_record=visits.last_record,
            holdout_records=len(self._holdouts.examples(slot)),
            history=tuple(trace.points),
            best_accuracy=trace.best_accuracy,
            end_accuracy=trace.at_end.accuracy if trace.at_end is not None else None,
        )

    def state(self) -> dict[str, Tensor]:
        """Arrays for a snapshot; live tensors."""
        return {f"{_LOAD}{name}": load_HK for name, load_HK in self.load.items()}

    def to_json(self) -> dict[str, Any]:
        """The rest of it, for the manifest; shifts are kept elsewhere."""
        visits_by_slot = {str(slot): asdict(visits) for slot, visits in self.visits_by_slot.items()}
        return {"presences": visits_by_slot, "num_shifts": dict(self.num_shifts)}

    def restore(self, tensors: Mapping[str, Tensor], room: Mapping[str, Any], shifts: Sequence[ShiftStatus]) -> None:
        """The inverse of `state` and `to_json`."""
        for name, load_HK in self.load.items():
            load_HK.copy_(tensors[f"{_LOAD}{name}"])
        self.visits_by_slot = {int(slot): RegimeVisits(**row) for slot, row in room["presences"].items()}
        self.num_shifts = Counter(room["num_shifts"])
        self._shifts = tuple(shifts)[-MAX_SHIFTS:]
        self._regimes = {}
        self._stale = set(self.visits_by_slot)
        self._transfer = None
