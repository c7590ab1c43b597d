"""Page-Hinkley: the mean of a series has risen.

    U_t = a U_(t-1) + z_t - mean(z) - delta,  alarm when U_t - min U > lambda                               (1)

Page 1954; values are in standard deviations.

    >>> import random
    >>> rng = random.Random(0)
    >>> series = [rng.gauss(0, 1) for _ in range(300)] + [rng.gauss(2, 1) for _ in range(100)]
    >>> detector = PageHinkley()
    >>> [t for t, value in enumerate(series) if detector.update(value)][0]
    321
"""

from river import drift

from streamlearn.shift.detector import ReplayedDetector


class PageHinkley(ReplayedDetector):
    """river's detector, for rises alone; values in standard deviations."""

    def __init__(self, *, delta: float = 0.25, threshold: float = 35.0) -> None:
        super().__init__(lambda: drift.PageHinkley(min_instances=30, delta=delta, threshold=threshold, mode="up"))
