"""Shifts of the answers: suspected when a regime's losses rise, confirmed when no shift of the inputs explains it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamlearn.settings import ShiftSettings
from streamlearn.shift.concept_drift_detector import ConceptDriftDetector
from streamlearn.shift.shift import Shift

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
        return self.detector.state()

    def to_json(self) -> list[dict[str, Any]]:
        """The rest of the state, for the manifest."""
        return [shift.to_json() for shift in self.suspected]

    def restore(self, arrays: Mapping[str, NDArray[np.generic]], rows: Sequence[Mapping[str, Any]]) -> None:
        """The inverse of `state` and `to_json`."""
        self.detector.load_state(arrays)
        self.suspected = [Shift.from_json(row) for row in rows]
