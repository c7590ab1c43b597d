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
from dataclasses import dataclass
from typing import Literal

from streamlearn.adapters.context import NO_REGIME, Slot
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.settings.serving import Unknown
from streamlearn.status import FallbackStatus
from streamlearn.stream.record import Example

# What a new regime's adapter starts from: a copy of a known regime's, or nothing.
#
# The first records of the regime are scored under the frozen backbone and under the adapters of known regimes, before
# anything is learned from them. The lowest loss wins. An adapter without training equals the backbone, so a copy is
# only
# made where it starts lower. The mean of all adapters is scored as well, for `adaptation.fallback`; a start from it, as
# an adapter of the same rank, gained nothing over the best copy.


MAX_CANDIDATES = 8
"""Maximum number of known regimes that are tried: those whose inputs are most like the new one's."""


@dataclass(frozen=True)
class HeadStart:
    """What the first records of a regime cost under each start."""

    backbone_loss: float
    """Under the frozen backbone, nats per learned token."""
    losses: dict[int, float]
    """Under each known regime, by slot, the likeliest first."""
    mean_loss: float | None
    """Under the mean of all adapters; None where regimes share their experts."""
    tokens: int
    """Tokens of the records."""

    @property
    def slot(self) -> int | None:
        """The regime to start from; None: from nothing."""
        lower = {slot: loss for slot, loss in self.losses.items() if loss < self.backbone_loss}  # none of them NaN
        return min(lower, key=lower.__getitem__, default=None)


def measure_head_start(
    learner: Learner,
    examples: Sequence[Example],
    known: Sequence[int],
    averaged: tuple[int, ...],
    *,
    pack_tokens: int,
) -> HeadStart:
    """Score the first records of a new regime under each start; changes nothing.

    Args:
        learner: Its routing depends on the regime.
        examples: The records, at least one.
        known: Slots of the regimes to try, the likeliest first.
        averaged: Slots of the regimes to average; empty: none.
        pack_tokens: Maximum tokens per forward pass.
    """

    def loss(slot: Slot) -> float:
        work = learner.score(examples, [slot] * len(examples), pack_tokens=pack_tokens)
        scores = run_to_end(work)
        return sum(each.loss_sum for each in scores) / sum(each.tokens for each in scores)

    return HeadStart(
        loss(NO_REGIME),
        {slot: loss(slot) for slot in known},
        loss(averaged) if averaged else None,
        sum(map(len, examples)),
    )


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
