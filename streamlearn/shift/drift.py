"""Detection of concept drift: the answers change and the inputs do not, so a regime's loss rises above its own level.

    z_t = clip((loss_t - level_(t-1)) / deviation_(t-1), -CLIP, CLIP)                                       (1)
    level_t = level_(t-1) + (loss_t - level_(t-1)) / w,  w = min(t, EMA_RECORDS); deviation alike           (2)
    U_t = a U_(t-1) + z_t - mean(z) - delta,  alarm if U_t - min U > lambda                                 (3)

Eq. (3) is the test of Page (1954) and Hinkley for a rise of the mean of a series. While a regime is learned its loss
falls, the level lags above it and z is negative, so no rise is detected. An alarm needs SETTLED records of the regime,
counted again after each alarm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from streamlearn.shift.detector import Shift

if TYPE_CHECKING:
    from streamlearn.settings import ShiftSettings

FORGETTING, DELTA, LAMBDA = 0.9999, 0.25, 35.0
"""The a, delta and lambda of eq. (3), the latter two in standard deviations."""
MIN_VALUES = 30
"""Values of z before an alarm."""


@dataclass
class PageHinkley:
    """Eq. (3).

    >>> import random
    >>> rng = random.Random(0)
    >>> series = [rng.gauss(0, 1) for _ in range(300)] + [rng.gauss(2, 1) for _ in range(100)]
    >>> detector = PageHinkley()
    >>> next(t for t, value in enumerate(series) if detector.update(value))
    321
    """

    number: int = 0
    mean: float = 0.0
    sum: float = 0.0
    """The U of eq. (3)."""
    minimum: float = inf

    def update(self, z: float) -> bool:
        """Process the next value; return whether the mean has risen. The detector restarts then."""
        self.number += 1
        self.mean += (1.0 / self.number) * (z - self.mean)
        self.sum = FORGETTING * self.sum + (z - self.mean) - DELTA
        self.minimum = min(self.minimum, self.sum)
        has_risen = self.number >= MIN_VALUES and self.sum - self.minimum > LAMBDA
        if has_risen:
            self.number, self.mean, self.sum, self.minimum = 0, 0.0, 0.0, inf
        return has_risen


CLIP = 4.0
EMA_RECORDS = 128
SETTLED = 64
RECENT = 16
"""Records whose mean z must be positive at an alarm: a falling loss is no change of the answers."""


@dataclass
class LossLevel:
    """A regime's smoothed loss, and the detector of rises above it."""

    regime: int
    records: int = 0
    level: float = 0.0
    square: float = 0.0
    recent: list[float] = field(default_factory=list)
    rise: PageHinkley = field(default_factory=PageHinkley)

    def update(self, loss: float) -> bool:
        """Process the next loss by eq. (1) to (3); return whether losses have risen."""
        has_risen = False
        if self.records >= RECENT:
            z = float(np.clip((loss - self.level) / max(self.square, 1e-12) ** 0.5, -CLIP, CLIP))
            self.recent = [*self.recent[1 - RECENT :], z]
            has_risen = self.rise.update(z) and sum(self.recent) > 0.0 and self.records >= SETTLED
        weight = min(self.records + 1, EMA_RECORDS)
        difference = loss - self.level
        self.level += difference / weight
        self.square += (difference**2 * (1 - 1 / weight) - self.square) / weight
        self.records += 1
        return has_risen

    def shift(self, number: int, slot: int, ordinal: int) -> Shift:
        """The shift of the answers that a rise at the record `ordinal` declares."""
        num_positive = next((i for i, z in enumerate(reversed(self.recent)) if z <= 0.0), len(self.recent))
        onset, statistic = max(ordinal - num_positive + 1, 1), sum(self.recent) / len(self.recent)
        return Shift("answers", number, self.regime, slot, True, self.regime, ordinal, onset, statistic, 0.0)


@dataclass
class LossLevels:
    """What is saved of `ConceptDriftDetector`."""

    num_shifts: int = 0
    by_slot: dict[int, LossLevel] = field(default_factory=dict)


class ConceptDriftDetector:
    """Reads the prequential loss of every record after its training step. It never creates a regime."""

    def __init__(self, settings: "ShiftSettings") -> None:
        self._enabled = settings.enabled
        self.state = LossLevels()

    def update(self, slot: int, regime: int, ordinal: int, losses: Sequence[float]) -> list[Shift]:
        """Process the losses of consecutive records of one regime, the first of them record `ordinal`."""
        shifts: list[Shift] = []
        levels = self.state.by_slot
        for i, loss in enumerate(losses if self._enabled else ()):
            if slot not in levels or levels[slot].regime != regime:
                levels[slot] = LossLevel(regime)
            if np.isfinite(loss) and levels[slot].update(float(loss)):
                self.state.num_shifts += 1
                shifts.append(levels[slot].shift(self.state.num_shifts, slot, ordinal + i))
                levels[slot] = LossLevel(regime)
        return shifts

    def level_of(self, slot: int) -> float | None:
        """The smoothed loss of the regime in a slot, nats per token; None before a record since the last alarm."""
        level = self.state.by_slot.get(slot)
        return level.level if level is not None and level.records else None

    def forget(self, slot: int) -> None:
        """Discard the slot's losses: it belongs to another regime now."""
        self.state.by_slot.pop(slot, None)
