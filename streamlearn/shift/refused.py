"""What the losses spoke against: records that look like a known regime's, and are not its."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RefusedReturn:
    """The shift declared at one record, which must not be to the regime in one slot."""

    declared_at: int
    """Ordinal of the record at which the shift is declared."""
    slot: int
    """Slot of the regime that does not return."""


@dataclass(frozen=True)
class RefusedRecord:
    """A single record, which must not be assigned to the regime in one slot."""

    ordinal: int
    slot: int
    """Slot of the regime that the record is not of."""
