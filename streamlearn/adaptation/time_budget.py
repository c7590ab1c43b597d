"""A share of the training time, for work that training does not need."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeBudget:
    """Seconds earned by training and spent on other work. Idle time is free."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` is the maximum fraction of the training time that may be spent."""
        self.spent_s = 0.0
        """Since the process started."""
        self._share = share
        self._training_s = 0.0
        self._clock = clock

    def trained(self, seconds: float) -> None:
        """Add the duration of a step."""
        self._training_s += seconds

    @property
    def affordable(self) -> bool:
        """Whether work may be done between two steps."""
        return self.spent_s < self._share * self._training_s

    @contextmanager
    def spending(self, *, idle: bool = False) -> Iterator[None]:
        """Count the time in the block as spent; `idle`: no record is waiting for training."""
        started = self._clock()
        try:
            yield
        finally:
            self.spent_s += 0.0 if idle else self._clock() - started
