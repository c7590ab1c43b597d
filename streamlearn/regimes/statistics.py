"""Counts of what happened to regimes and experts, for the status. Nothing that learns reads them.

A step changes only the regimes of its own records, so only their published status is rebuilt after it.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import nsmallest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from streamlearn.adapters.presets import regime_adapter
from streamlearn.errors import RegimeError
from streamlearn.learner.learner import Learner
from streamlearn.regimes.holdout import Forgetting, HoldoutReservoirs, ScoreHistory
from streamlearn.shift.detector import Shift
from streamlearn.status import AdaptationStatus, RegimeStatus, ShiftStatus


@dataclass(frozen=True)
class ShiftReport:
    """A shift that was acted on, and what its probe cost and found."""

    shift: Shift
    step: int
    """Steps taken before it."""
    probe_tokens: int = 0
    probe_seconds: float = 0.0
    mean_similarity: float | None = None
    """Mean CKA over all banks, heads and experts; None when experts were not compared."""
    started_from: int | None = None
    """Number of the regime whose adapter was copied; None: the regime starts from nothing, or has no adapter."""
    refused_return: int | None = None
    """Number of the known regime that the inputs look like, whose losses say otherwise; None: there is none."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {**self.__dict__, "shift": self.shift.to_json()}

    @property
    def status(self) -> ShiftStatus:
        """The shift as it is published."""
        own = {name: value for name, value in self.__dict__.items() if name != "shift"}
        fields = {name: value for name, value in self.shift.to_json().items() if name != "slot"}
        return ShiftStatus(**fields, **own)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ShiftReport":
        """The inverse of `to_json`."""
        return cls(**{**fields, "shift": Shift.from_json(fields["shift"])})


# What an operator decided about regimes: their names, which are frozen, and which may be published.
#
# A frozen regime keeps its slot: it is neither dropped nor merged when a new regime needs one. Decisions about slots
# are made when a record is read, ahead of training, and are made again when it is read again after a restart. So what
# counts is whether the regime was frozen when the record was read first.


NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9 ._:/+-]{0,62}[A-Za-z0-9._:/+-])?")
"""Begins with a letter, so that no name is taken for a number."""


class RegimeControls:
    """Names and frozen regimes, by the number of the regime, which is never reused."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """Those of the regimes that have one."""
        self.num_changes = 0
        """By the operator, ever. A snapshot of the same step with another number is another state."""
        self.approved: dict[int, int] = {}
        """Step at which an operator let a regime be published although its answers changed."""
        self._toggles: dict[int, list[int]] = {}
        """Records that had been read when a regime was frozen, unfrozen, frozen again and so on."""

    @property
    def frozen(self) -> frozenset[int]:
        """Numbers of the regimes that are frozen."""
        return frozenset(number for number, toggles in self._toggles.items() if len(toggles) % 2)

    def frozen_at(self, ordinal: int) -> set[int]:
        """Numbers of the regimes that were frozen when the record was read first."""
        return {number for number, toggles in self._toggles.items() if bisect_left(toggles, ordinal) % 2}

    def rename(self, number: int, name: str) -> None:
        """Give a regime a name; an empty one removes it.

        Raises:
            RegimeError: the name has other characters or another length, or is another regime's.
        """
        if name:
            self._check(number, name)
        self.num_changes += name != self.names.get(number, "")
        self.names.pop(number, None)
        if name:
            self.names[number] = name

    def set_frozen(self, number: int, is_frozen: bool, *, read: int, trained: int) -> None:
        """Freeze or unfreeze a regime. Safe to repeat.

        Args:
            number: The regime's.
            is_frozen: Whether it is frozen from now on.
            read: Records read so far, those ahead of training among them.
            trained: Records that are done and will not be read again.
        """
        toggles = self._toggles.setdefault(number, [])
        if (number in self.frozen) != is_frozen:
            toggles.append(read)
            self.num_changes += 1
        while len(toggles) > 1 and toggles[1] <= trained:
            del toggles[:2]

    def inherit(self, parent: int, number: int, *, declared_at: int) -> None:
        """A regime was split from another: if that one is frozen, so is this one, from the split on.

        Its first record that is read as frozen does not depend on how far was read ahead, unlike with an operator.
        """
        if parent in self.frozen:
            self._toggles[number] = [declared_at]

    def approve(self, number: int, step: int) -> None:
        """Let versions of a regime from this step on replace earlier ones. Safe to repeat."""
        self.num_changes += self.approved.get(number) != step
        self.approved[number] = step

    def drop(self, number: int) -> None:
        """Forget what was decided about a regime that is dropped."""
        self.names.pop(number, None)
        self.approved.pop(number, None)
        self._toggles.pop(number, None)
        self.num_changes += 1

    def keep(self, numbers: Collection[int]) -> None:
        """Forget what was decided about all other regimes: they are no longer remembered."""
        self.names = {number: name for number, name in self.names.items() if number in numbers}
        self.approved = {number: step for number, step in self.approved.items() if number in numbers}
        self._toggles = {number: toggles for number, toggles in self._toggles.items() if number in numbers}

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        toggles = {str(number): self._toggles[number] for number in sorted(self._toggles) if self._toggles[number]}
        names = {str(number): self.names[number] for number in sorted(self.names)}
        approved = {str(number): self.approved[number] for number in sorted(self.approved)}
        values = {"names": names, "frozen": toggles, "num_changes": self.num_changes}
        return {**values, "approved": approved} if approved else values

    def load_json(self, values: Mapping[str, Any]) -> None:
        """The inverse of `to_json`; an empty mapping where nothing was decided."""
        self.names = {int(number): name for number, name in values.get("names", {}).items()}
        self._toggles = {int(number): list(toggles) for number, toggles in values.get("frozen", {}).items()}
        self.approved = {int(number): step for number, step in values.get("approved", {}).items()}
        self.num_changes = values.get("num_changes", 0)

    def _check(self, number: int, name: str) -> None:
        if not NAME.fullmatch(name):
            raise RegimeError(
                "a regime's name must be 1 to 64 letters, digits, spaces and . _ : / + -, begin with a letter and not "
                f"end with a space, found {name[:80]!r}; choose another, or an empty one to remove the name"
            )
        owner = next((other for other, own in self.names.items() if own == name and other != number), None)
        if owner is not None:
            raise RegimeError(
                f"a regime's name must be unique, found {name!r} at regime {owner}; choose another, or rename regime "
                f"{owner} first"
            )


# Shape suffixes: H heads, K experts a head.


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
