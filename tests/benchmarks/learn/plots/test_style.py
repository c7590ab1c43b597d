"""Labels that do not overlap."""

from itertools import pairwise

import pytest

pytest.importorskip("matplotlib")

from benchmarks.learn.plots.style import spaced


@pytest.mark.parametrize("heights", [[0.5] * 5, [0.0] * 4, [1.0] * 4, [0.1, 0.11, 0.5, 0.9, 0.95, 1.0], [0.3], []])
def test_labels_keep_their_order_and_their_distance(heights: list[float]) -> None:
    """They stay within the axes."""
    moved = spaced(heights, 0.1, 0.0, 1.0)
    assert len(moved) == len(heights)
    assert all(0 <= y <= 1 + 1e-9 for y in moved)
    assert all(second - first >= 0.1 - 1e-9 for first, second in pairwise(moved))
