"""A return that the losses spoke against: the records look like a known regime's, and are a new one's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RefusedReturn:
    """The shift declared at one record, which must not be to the regime in one slot."""

    declared_at: int
    """Ordinal of the record at which the shift is declared."""
    slot: int
    """Slot of the regime that does not return."""
