"""The decision on one record."""

from dataclasses import dataclass

from streamlearn.shift.shift import Shift


@dataclass(frozen=True)
class AssignedRecord:
    """A record's regime, and the shifts that were declared at it."""

    slot: int
    shifts: tuple[Shift, ...] = ()
    reassigned: tuple[tuple[int, int], ...] = ()
    """Ordinal and new slot of each record that a shift moves to its regime; the last one counts."""
