"""Which declared shift detects which true boundary."""

from collections.abc import Sequence
from itertools import pairwise


def matches(boundaries: Sequence[int], end: int, declared: Sequence[int], reach: int) -> dict[int, int]:
    """Match each boundary with the first shift after it, before the next boundary; each shift matches one at most.

    >>> matches([31, 61], 91, [20, 70, 75], reach=64)
    {1: 1}

    Args:
        boundaries: Ordinal of the first record after each boundary, ascending.
        end: Ordinal after the last record of the stream.
        declared: Ordinals of the records at which shifts were declared, ascending.
        reach: Number of records from a boundary on in which a shift counts as its detection.

    Returns:
        Index of a boundary -> index of its shift; boundaries that were missed are not in it.
    """
    found = {}
    for number, (start, following) in enumerate(pairwise([*boundaries, end])):
        last = min(start + reach, following)
        hit = next((index for index, at in enumerate(declared) if start <= at < last), None)
        if hit is not None:
            found[number] = hit
    return found
