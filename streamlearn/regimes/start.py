"""How a new regime gets its adapter, and what the same measurement says about requests that match no regime.

Before anything is learned from the first records of a regime, they are scored under the frozen backbone and under the
adapters of known regimes. The new adapter starts as a copy of the one with the lowest loss. An untrained adapter equals
the backbone, so a copy is only made where it starts lower. The mean of all adapters is scored as well, for requests; a
start from it, as an adapter of the same rank, gained nothing over the best copy.

Requests that match no regime are answered with the mean of the regimes' adapters, the nearest one, or the backbone.
None is best on every backbone and stream. A weak backbone gains from the experts of a similar task, a strong one is
disturbed by them. What many tasks have in common, such as the form of an answer, remains when their adapters are
averaged. The daemon measures it where it meets the unknown itself, at every new regime:

    l_a = mean over new regimes of the loss of their first records, answered by a, nats per learned token   (1)

The lowest wins. Until a second regime begins there is nothing to compare, and the backbone answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from streamlearn.adapters.context import NO_REGIME, Slot
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.settings.serving import Unknown
from streamlearn.status import FallbackStatus
from streamlearn.stream.record import Example

MAX_CANDIDATES = 8
"""Maximum number of known regimes that are tried: those whose inputs are most like the new one's."""


@dataclass(frozen=True)
class HeadStart:
    """Losses of the first records of a regime under each start, nats per learned token."""

    backbone_loss: float
    """Under the frozen backbone."""
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
        return sum(result.loss_sum for result in scores) / sum(result.tokens for result in scores)

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
    """Decides what answers requests that match no regime."""

    def __init__(self, setting: Unknown, *, has_regimes: bool) -> None:
        """`has_regimes`: whether routing depends on the regime; if not, the adapter answers unless set otherwise."""
        self._setting = setting
        self._has_regimes = has_regimes
        self.losses: list[dict[str, float]] = []
        """Losses of the first records of the newest regimes, by alternative; part of `RegimesState`."""

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
            regimes=len(self.losses),
        )

    def slot_for(self, likeliest: int, averaged: tuple[int, ...]) -> Slot:
        """What adapts an input that matches no regime: the slot of the likeliest one, those of the mean, or none."""
        if self.answered_by == "backbone":
            return NO_REGIME
        return averaged if self.answered_by == "mean" else likeliest

    def add(self, measured: HeadStart) -> None:
        """Take in the losses of a new regime's first records, if all are finite."""
        nearest = next(iter(measured.losses.values()), None)
        losses = {"backbone": measured.backbone_loss, "mean": measured.mean_loss, "nearest": nearest}
        known = {name: loss for name, loss in losses.items() if loss is not None}
        # Without a nearest one the new regime took the slot of the only one.
        if "nearest" in known and all(map(math.isfinite, known.values())):
            self.losses.append(known)
            del self.losses[:-MAX_REGIMES]

    def _mean_losses(self) -> dict[Alternative, float]:
        """Eq. (1) of each alternative; empty before a measurement."""
        known = [name for name in ALTERNATIVES if any(name in losses for losses in self.losses)]
        return {name: sum(losses[name] for losses in self.losses) / len(self.losses) for name in known}
