"""How well a task-free run found its boundaries."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

WITHIN = 64
"""Records after a boundary in which a shift counts as having found it."""


def detection(declared: Sequence[int], boundaries: Sequence[int]) -> dict[str, Any]:
    """`declared`: records, from 1, at which shifts of the inputs were declared; `boundaries`: records before each.

    The first declaration of a stream is its first regime and no shift. Each shift finds at most one boundary.

    >>> detection([1, 205, 300], [200, 400])
    {'boundaries': 2, 'found': 1, 'false': 1, 'mean_delay_records': 5.0}
    """
    left = [at for at in declared if at > 1]
    delays = []
    for boundary in boundaries:
        hit = next((at for at in left if boundary < at <= boundary + WITHIN), None)
        if hit is not None:
            left.remove(hit)
            delays.append(hit - boundary)
    return {
        "boundaries": len(boundaries),
        "found": len(delays),
        "false": len(left),
        "mean_delay_records": fmean(delays) if delays else None,
    }
