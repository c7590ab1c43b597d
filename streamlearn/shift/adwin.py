"""ADWIN: two halves of an adaptive window have different means.

    |mean(W0) - mean(W1)| > eps(delta, |W0|, |W1|) for some cut of the window                               (1)

Bifet and Gavalda 2007.

    >>> import random
    >>> rng = random.Random(0)
    >>> series = [rng.gauss(0, 1) for _ in range(300)] + [rng.gauss(2, 1) for _ in range(100)]
    >>> detector = Adwin()
    >>> [t for t, value in enumerate(series) if detector.update(value)][0]
    327
"""

from river import drift

from streamlearn.shift.detector import Replayed


class Adwin(Replayed):
    """river's detector; it tells rises and falls alike."""

    def __init__(self, *, delta: float = 1e-5) -> None:
        super().__init__(lambda: drift.ADWIN(delta=delta, clock=8))
