"""KSWIN: the newest values follow another distribution than those before them.

    dist(R, W) > sqrt(-ln(alpha) / r), Kolmogorov and Smirnov's distance of r values each                   (1)

Raab, Heusinger and Schleif 2020.

    >>> import random
    >>> rng = random.Random(0)
    >>> series = [rng.gauss(0, 1) for _ in range(300)] + [rng.gauss(2, 1) for _ in range(100)]
    >>> detector = Kswin()
    >>> [t for t, value in enumerate(series) if detector.update(value)][0]
    328
"""

from river import drift

from streamlearn.shift.detector import Replayed


class Kswin(Replayed):
    """river's detector; it tells rises and falls alike. Its draws are seeded."""

    def __init__(self, *, alpha: float = 1e-6) -> None:
        super().__init__(lambda: drift.KSWIN(alpha=alpha, window_size=100, stat_size=30, seed=0))
