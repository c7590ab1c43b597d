"""What is written to a tracker at a time."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self


class Point(NamedTuple):
    """One value of a series."""

    series: str
    step: int
    value: float


class Note(NamedTuple):
    """Something that happened, for people."""

    series: str
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class TrackedSample:
    """What was new in the status."""

    step: int
    at: float
    """Unix time."""
    points: tuple[Point, ...] = ()
    notes: tuple[Note, ...] = ()
    rewound_to: int | None = None
    """The run went back to this step before: values of later steps that were written belong to what was undone."""

    def without_points(self, follower: Self) -> Self:
        """Merge into the next sample what must not be lost: notes and the mark of a rewind."""
        rewinds = [each.rewound_to for each in (self, follower) if each.rewound_to is not None]
        return replace(follower, notes=self.notes + follower.notes, rewound_to=min(rewinds) if rewinds else None)
