"""Detection of concept drift: the answers change and the inputs do not, so a regime's loss rises above its own level.

    z_t = clip((loss_t - level_(t-1)) / deviation_(t-1), -CLIP, CLIP)                                       (1)
    level_t = level_(t-1) + (loss_t - level_(t-1)) / w,  w = min(t, EMA_RECORDS); deviation alike           (2)

A detector of rises reads z. While a regime is learned its loss falls, the level lags above it and z is negative, so no
rise is detected. An alarm needs SETTLED records of the regime, counted anew after each alarm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from river import drift

from streamlearn.settings import ShiftSettings
from streamlearn.shift.input_shift import Shift

# Change detectors on a series of numbers, and how one resumes after a restart.
#
# The internal state of a river detector is not saved. Its inputs are, and they are replayed. The history is bounded: at
# `2 * HISTORY` values the detector is rebuilt from the last `HISTORY`. This happens without a restart too, so a
# restored detector has received the same values in the same order as one that never stopped.


HISTORY = 512


class Detector(Protocol):
    """A change detector on a series of numbers, in the manner of river."""

    @property
    def drift_detected(self) -> bool:
        """Whether the last update declared a change. The detector has started afresh then."""

    def update(self, value: float) -> None:
        """Process the next value."""

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Arrays from which `load_state` continues bit for bit."""

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Restore what `state` returned."""


class ReplayedDetector:
    """A river detector that is restored by replaying its inputs."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._detector = build()
        self._history: list[float] = []
        self.drift_detected = False

    def update(self, value: float) -> None:
        """See `Detector.update`."""
        if len(self._history) == 2 * HISTORY:
            self._replay(self._history[HISTORY:])
        self._history.append(value)
        self._detector.update(value)
        self.drift_detected = self._detector.drift_detected
        if self.drift_detected:
            self._replay([])

    def state(self) -> dict[str, NDArray[np.generic]]:
        """See `Detector.state`."""
        return {"history": np.array(self._history, dtype=np.float64)}

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """See `Detector.load_state`."""
        self._replay(arrays["history"].tolist())
        self.drift_detected = False

    def _replay(self, history: list[float]) -> None:
        self._detector, self._history = self._build(), history
        for value in history:
            self._detector.update(value)


# Page-Hinkley: a rise of the mean of a series.
#
#     U_t = a U_(t-1) + z_t - mean(z) - delta,  alarm when U_t - min U > lambda                               (1)
#
# Page 1954; values in standard deviations.
#
#     >>> import random
#     >>> rng = random.Random(0)
#     >>> series = [rng.gauss(0, 1) for _ in range(300)] + [rng.gauss(2, 1) for _ in range(100)]
#     >>> detector = PageHinkley()
#     >>> for t, value in enumerate(series):
#     ...     detector.update(value)
#     ...     if detector.drift_detected:
#     ...         print(t)
#     ...         break
#     321


class PageHinkley(ReplayedDetector):
    """river's detector, for rises only."""

    def __init__(self, *, delta: float = 0.25, threshold: float = 35.0) -> None:
        super().__init__(lambda: drift.PageHinkley(min_instances=30, delta=delta, threshold=threshold, mode="up"))


CLIP = 4.0
EMA_RECORDS = 128
SETTLED = 64
RECENT = 16
"""Records whose mean z must be positive at an alarm: a falling loss is no change of the answers."""
_SCALARS = ("regime", "records", "level", "square")


@dataclass(eq=False)
class LossLevel:
    """A regime's smoothed loss, and the detector of rises above it."""

    regime: int
    detector: Detector
    records: int = 0
    level: float = 0.0
    square: float = 0.0
    recent: list[float] = field(default_factory=list)
    drift_detected: bool = False
    """Whether the last update declared a rise."""

    def update(self, loss: float) -> None:
        """Process the next loss by eq. (1) and (2)."""
        self.drift_detected = False
        if self.records >= RECENT:
            z = float(np.clip((loss - self.level) / max(self.square, 1e-12) ** 0.5, -CLIP, CLIP))
            self.recent = [*self.recent[1 - RECENT :], z]
            self.detector.update(z)
            self.drift_detected = self.detector.drift_detected and sum(self.recent) > 0.0 and self.records >= SETTLED
        weight = min(self.records + 1, EMA_RECORDS)
        difference = loss - self.level
        self.level += difference / weight
        self.square += (difference**2 * (1 - 1 / weight) - self.square) / weight
        self.records += 1


class ConceptDriftDetector:
    """Reads the prequential loss of every record after its training step. It never creates a regime."""

    def __init__(self, settings: ShiftSettings, build: Callable[[], Detector] = PageHinkley) -> None:
        self._enabled = settings.enabled
        self._build = build
        self._levels: dict[int, LossLevel] = {}
        self._num_shifts = 0

    def update(self, slot: int, regime: int, ordinal: int, losses: Sequence[float]) -> list[Shift]:
        """Process the losses of consecutive records of one regime, the first of them record `ordinal`."""
        shifts: list[Shift] = []
        if not self._enabled:
            return shifts
        for i, loss in enumerate(losses):
            level = self._levels.get(slot)
            if level is None or level.regime != regime:
                level = self._levels[slot] = LossLevel(regime, self._build())
            if not np.isfinite(loss):
                continue
            level.update(float(loss))
            if level.drift_detected:
                self._num_shifts += 1
                shifts.append(self._shift(slot, level, ordinal + i))
                self._levels[slot] = LossLevel(regime, self._build())
        return shifts

    def level_of(self, slot: int) -> float | None:
        """The smoothed loss of the regime in a slot, nats per token; None before a record since the last alarm."""
        level = self._levels.get(slot)
        return level.level if level is not None and level.records else None

    def forget(self, slot: int) -> None:
        """Discard the slot's losses: it belongs to another regime now."""
        self._levels.pop(slot, None)

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Arrays for a snapshot."""
        arrays: dict[str, NDArray[np.generic]] = {"num_shifts": np.array([self._num_shifts], dtype=np.int64)}
        for slot, level in self._levels.items():
            scalars = [float(getattr(level, name)) for name in _SCALARS]
            arrays[f"{slot}.level"] = np.array([*scalars, *level.recent], dtype=np.float64)
            arrays |= {f"{slot}.detector.{name}": array for name, array in level.detector.state().items()}
        return arrays

    def load_state(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Restore what `state` returned."""
        self._num_shifts = int(arrays["num_shifts"][0])
        self._levels = {}
        for slot in (name.removesuffix(".level") for name in arrays if name.endswith(".level")):
            regime, records, level, square, *recent = arrays[f"{slot}.level"].tolist()
            made = LossLevel(int(regime), self._build(), int(records), level, square, recent)
            prefix = f"{slot}.detector."
            made.detector.load_state(
                {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            )
            self._levels[int(slot)] = made

    def _shift(self, slot: int, level: LossLevel, ordinal: int) -> Shift:
        num_positive = next((i for i, z in enumerate(reversed(level.recent)) if z <= 0.0), len(level.recent))
        return Shift(
            kind="answers",
            number=self._num_shifts,
            regime=level.regime,
            slot=slot,
            known=True,
            previous=level.regime,
            declared_at=ordinal,
            onset=max(ordinal - num_positive + 1, 1),
            statistic=sum(level.recent) / len(level.recent),
            threshold=0.0,
        )
