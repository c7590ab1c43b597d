"""Page-Hinkley: a rise of the mean of a series.

    U_t = a U_(t-1) + z_t - mean(z) - delta,  alarm when U_t - min U > lambda                               (1)

Page 1954; values in standard deviations.

    >>> import random
    >>> rng = random.Random(0)
    >>> series = [rng.gauss(0, 1) for _ in range(300)] + [rng.gauss(2, 1) for _ in range(100)]
    >>> detector = PageHinkley()
    >>> for t, value in enumerate(series):
    ...     detector.update(value)
    ...     if detector.drift_detected:
    ...         print(t)
    ...         break
    321
"""

from river import drift

from streamlearn.shift.detector import ReplayedDetector


class PageHinkley(ReplayedDetector):
    """river's detector, for rises only."""

    def __init__(self, *, delta: float = 0.25, threshold: float = 35.0) -> None:
        super().__init__(lambda: drift.PageHinkley(min_instances=30, delta=delta, threshold=threshold, mode="up"))
