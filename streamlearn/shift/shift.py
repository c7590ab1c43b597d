"""A declared change of the inputs or of the answers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self


@dataclass(frozen=True)
class Shift:
    """A declared change. Ordinals count the records that the monitor has read, from 1."""

    kind: Literal["inputs", "answers"]
    """Covariate shift, or concept drift."""
    number: int
    """Counts the shifts of this kind, from 1."""
    regime: int
    """Number of the regime entered, or of the one whose answers changed. Numbers are never reused."""
    slot: int
    """Where the regime's state is kept, below `max_regimes`. Slots are reused."""
    known: bool
    """Whether the regime occurred before."""
    previous: int | None
    """Number of the previous regime, which may have been dropped since; None for the first regime of the stream."""
    declared_at: int
    """Ordinal of the record at which the shift was declared."""
    onset: int
    """Estimated ordinal of its first record."""
    statistic: float
    threshold: float
    parent: int | None = None
    """Number of the regime that it was split from, which goes on beside it; None if the stream moved to it."""
    dropped: int | None = None
    """Number of the regime that was dropped, or merged into another, to free the slot."""

    def to_json(self) -> dict[str, Any]:
        """Fields by name, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(**fields)
