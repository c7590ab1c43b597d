"""Bounded, thinned with age, and a function of the number of rows only."""

from itertools import accumulate

import pytest

from streamlearn.history import ThinnedSeries

Span = tuple[int, int]
"""First and last of the rows that a row stands for."""


def joined(older: Span, newer: Span) -> Span:
    assert older[1] + 1 == newer[0], "neighbours are joined"
    return older[0], newer[1]


def series(num_rows: int, *, per_level: int = 4, num_levels: int = 6) -> ThinnedSeries[Span]:
    built = ThinnedSeries[Span](joined, per_level=per_level, num_levels=num_levels)
    for number in range(1, num_rows + 1):
        built.append((number, number))
    return built


@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 100, 1000])
def test_every_row_is_kept_once_and_in_order(num_rows: int) -> None:
    """Joining loses nothing, and repeats nothing."""
    covered = [number for first, last in series(num_rows).rows for number in range(first, last + 1)]
    assert covered == list(range(1, num_rows + 1))


def test_it_never_holds_more_rows_than_eq_1() -> None:
    """Also long after the last level is full."""
    built = ThinnedSeries[int](lambda older, newer: older + newer, per_level=4, num_levels=3)
    sizes = []
    for _ in range(500):
        built.append(1)
        sizes.append(len(built.rows))
    assert max(sizes) == 4 * 3
    assert sum(built.rows) == 500


def test_a_row_stands_for_no_more_than_its_age_allows() -> None:
    """Eq. 2."""
    for num_rows in range(1, 120):
        widths = [last - first + 1 for first, last in series(num_rows).rows]
        ages = [num_rows - end for end in accumulate(widths)]
        assert all(width <= 1 + age / 3 for width, age in zip(widths, ages, strict=True))


def test_the_newest_row_can_be_replaced() -> None:
    """Whatever was joined before."""
    built = series(23)
    built.newest[-1] = (23, 99)
    assert built.last == built.rows[-1] == (23, 99)
    assert series(0).last is None
