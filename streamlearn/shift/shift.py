"""What the room says: from this record on, the inputs or the answers are others."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self


@dataclass(frozen=True)
class Shift:
    """A change that was declared. Ordinals count the records that the monitor saw, from 1."""

    kind: Literal["inputs", "answers"]
    number: int
    """Counts all shifts of this kind, from 1."""
    regime: int
    """The regime entered, or the one whose answers changed; numbers are never used again."""
    slot: int
    """Where the regime's state is kept, below `max_regimes`; slots are used again."""
    known: bool
    """Whether the regime was met before."""
    previous: int | None
    """The regime before; None for the first of all."""
    declared_at: int
    """The record at which it was declared."""
    onset: int
    """The first record that is believed to belong to it."""
    statistic: float
    threshold: float
    dropped: int | None = None
    """A regime that was forgotten, or merged into another, to make room."""

    def to_json(self) -> dict[str, Any]:
        """Fields by name, JSON-ready."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**fields)
