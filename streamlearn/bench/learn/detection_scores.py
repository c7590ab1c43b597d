"""Boundary detection of a run that was given no task boundaries."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

WITHIN = 64
"""Maximum records between a boundary and the shift that counts as its detection."""


def detection_scores(declared: Sequence[int], boundaries: Sequence[int]) -> dict[str, Any]:
    """Match declared input shifts to true boundaries.

    Each shift matches at most one boundary. The declaration at record 1 opens the first regime and is not a shift.

    >>> detection_scores([1, 205, 300], [200, 400])
    {'boundaries': 2, 'found': 1, 'false': 1, 'mean_delay_records': 5.0}

    Args:
        declared: Ordinals, from 1, of the records at which input shifts were declared.
        boundaries: Number of records before each boundary.
    """
    unmatched = [at for at in declared if at > 1]
    delays = []
    for boundary in boundaries:
        hit = next((at for at in unmatched if boundary < at <= boundary + WITHIN), None)
        if hit is not None:
            unmatched.remove(hit)
            delays.append(hit - boundary)
    return {
        "boundaries": len(boundaries),
        "found": len(delays),
        "false": len(unmatched),
        "mean_delay_records": fmean(delays) if delays else None,
    }
