"""What answers requests that no regime explains: a mean of the regimes' adapters, the nearest one, or the backbone.

None is best on every backbone and stream. A weak backbone gains from the experts of a similar task, a strong one is
disturbed by them. What many tasks have in common, such as the form of an answer, remains when their adapters are
averaged. The daemon measures it where it meets the unknown itself: the first records of every new regime are scored
under each alternative, before anything is learned from them (`probe.head_start`).

    l_a = mean over new regimes of the loss of their first records, answered by a, nats per learned token   (1)

The lowest wins. Until a second regime begins there is nothing to compare, and the backbone answers.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

from streamlearn.adapters.sequences import NO_REGIME, Slot
from streamlearn.probe.head_start import HeadStart
from streamlearn.settings.service import Unknown
from streamlearn.status.status import FallbackStatus

MAX_REGIMES = 32
"""New regimes that eq. (1) is over, the newest. With the number of known regimes the alternatives change."""
Alternative = Literal["backbone", "mean", "nearest"]
ALTERNATIVES: tuple[Alternative, ...] = ("backbone", "mean", "nearest")


class Fallback:
    """Keeps the losses, and decides."""

    def __init__(self, setting: Unknown, *, has_regimes: bool) -> None:
        """`has_regimes`: whether routing depends on the regime; if not, the adapter answers unless set otherwise."""
        self._setting = setting
        self._has_regimes = has_regimes
        self._losses: deque[dict[Alternative, float]] = deque(maxlen=MAX_REGIMES)

    @property
    def answered_by(self) -> Alternative:
        """What answers. Where all regimes share the adapter and its routing, `nearest` is the adapter."""
        if self._setting != "auto":
            return self._setting
        if not self._has_regimes:
            return "nearest"
        means = self._mean_losses()
        return min(means, key=means.__getitem__, default="backbone")

    @property
    def status(self) -> FallbackStatus:
        """The decision, and eq. (1)."""
        means = self._mean_losses()
        return FallbackStatus(
            setting=self._setting,
            answered_by=self.answered_by,
            mean_loss=means.get("mean"),
            nearest_loss=means.get("nearest"),
            backbone_loss=means.get("backbone"),
            regimes=len(self._losses),
        )

    def slot_for(self, likeliest: int, averaged: tuple[int, ...]) -> Slot:
        """What adapts an input that no regime explains: the slot of the likeliest one, those of the mean, or none."""
        if self.answered_by == "backbone":
            return NO_REGIME
        return averaged if self.answered_by == "mean" else likeliest

    def add(self, found: HeadStart) -> None:
        """Take in the losses of a new regime's first records, if all are finite."""
        losses: dict[Alternative, float | None] = {
            "backbone": found.backbone_loss,
            "mean": found.mean_loss,
            "nearest": next(iter(found.losses.values()), None),
        }
        measured = {name: loss for name, loss in losses.items() if loss is not None}
        # Without a nearest one the new regime took the slot of the only one.
        if "nearest" in measured and all(map(math.isfinite, measured.values())):
            self._losses.append(measured)

    def to_json(self) -> list[dict[Alternative, float]]:
        """For the manifest."""
        return [*self._losses]

    def load_json(self, rows: Sequence[dict[Alternative, float]]) -> None:
        """The inverse of `to_json`."""
        self._losses = deque(rows, maxlen=MAX_REGIMES)

    def _mean_losses(self) -> dict[Alternative, float]:
        """Eq. (1) of each alternative; empty before a measurement."""
        known = [name for name in ALTERNATIVES if any(name in losses for losses in self._losses)]
        return {name: sum(losses[name] for losses in self._losses) / len(self._losses) for name in known}
