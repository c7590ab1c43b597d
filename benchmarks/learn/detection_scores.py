"""Boundary detection of a run that was given no task boundaries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from benchmarks.matches import matches

WITHIN = 64
"""Maximum records between a boundary and the shift that counts as its detection."""


@dataclass(frozen=True)
class DetectionScores:
    """What became of the true boundaries, and of the input shifts that were declared."""

    found: int
    """Boundaries that were detected within `WITHIN` records and before the next one."""
    false: int
    """Shifts that detect no boundary."""
    returns: int
    """Shifts that were declared to be the return of a known regime."""


def detection_scores(run: Mapping[str, Any]) -> DetectionScores | None:
    """Return the scores of a run's JSON object; None where boundaries are given, or the stream has none.

    The declaration at record 1 opens the first regime and is not a shift.
    """
    *boundaries, records = accumulate(segment["records"] for segment in run["segments"])
    if run["detection"] is None or not boundaries:
        return None
    shifts = [report["shift"] for report in run["detection"]["shifts"]]
    declared = [shift for shift in shifts if shift["kind"] == "inputs" and shift["declared_at"] > 1]
    found = _found(boundaries, records, [shift["declared_at"] for shift in declared])
    return DetectionScores(found, len(declared) - found, sum(shift["known"] for shift in declared))


def _found(boundaries: Sequence[int], records: int, declared: Sequence[int]) -> int:
    """The number of boundaries that were detected; `boundaries` are the numbers of records before them."""
    return len(matches([before + 1 for before in boundaries], records + 1, declared, WITHIN))
