"""The decision on one record."""

from dataclasses import dataclass

from streamlearn.shift.shift import Shift


@dataclass(frozen=True)
class AssignedRecord:
    """A record's regime, and the shift that was declared at it."""

    slot: int
    shift: Shift | None = None
    reassigned: tuple[tuple[int, int], ...] = ()
    """Ordinal and new slot of each record that the shift moves to its regime."""
