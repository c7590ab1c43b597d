"""A series in bounded memory whose resolution falls with age.

Level l holds rows that stand for 2**l of the rows that were added. When a level is full, its two oldest rows are joined
into one of the next level; at the last level they stay. So of n rows that were added

    at most num_levels * per_level are kept,                                                              (1)
    and one with a rows after it stands for at most 1 + a / (per_level - 1), until the last level is full.   (2)

Which rows are joined depends on their number only, so a replay builds the same series.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

R = TypeVar("R")


class ThinnedSeries(Generic[R]):
    """Rows, oldest first.

    >>> series = ThinnedSeries[int](lambda older, newer: older + newer, per_level=2, num_levels=3)
    >>> for _ in range(11):
    ...     series.append(1)
    >>> series.rows
    (4, 4, 2, 1)
    """

    def __init__(self, join: Callable[[R, R], R], *, per_level: int, num_levels: int) -> None:
        """`join` makes one row of two neighbours, the older one first."""
        assert per_level >= 2, "two rows are joined"
        self._join = join
        self._per_level = per_level
        self._levels: list[list[R]] = [[] for _ in range(num_levels)]

    @property
    def rows(self) -> tuple[R, ...]:
        """All rows, oldest first."""
        return tuple(row for level in reversed(self._levels) for row in level)

    @property
    def last(self) -> R | None:
        """The newest row; None before the first."""
        return self._levels[0][-1] if self._levels[0] else None

    def append(self, row: R) -> None:
        """Add the newest row."""
        for level in self._levels[:-1]:
            level.append(row)
            if len(level) <= self._per_level:
                return
            row = self._join(level.pop(0), level.pop(0))
        last = self._levels[-1]
        last.append(row)
        if len(last) > self._per_level:
            last[:2] = [self._join(*last[:2])]

    def replace_last(self, row: R) -> None:
        """Put another row in the newest one's place."""
        self._levels[0][-1] = row

    @property
    def newest(self) -> Sequence[R]:
        """The newest rows, oldest first: those that were not joined yet."""
        return self._levels[0]

    def replace_newest(self, index: int, row: R) -> None:
        """Put another row in the place of one of `newest`."""
        self._levels[0][index] = row

    @property
    def levels(self) -> Sequence[Sequence[R]]:
        """The rows by level, for a snapshot."""
        return self._levels

    def load(self, levels: Iterable[Sequence[R]]) -> None:
        """The inverse of `levels`; there may be fewer."""
        loaded = [list(level) for level in levels]
        self._levels = loaded + [[] for _ in range(len(self._levels) - len(loaded))]
