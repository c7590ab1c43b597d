"""How a new regime gets its adapter, and what answers requests.

Before anything is learned from the first records of a regime, they are scored under the frozen backbone and under the
adapters of known regimes. The new adapter starts as a copy of the one with the lowest loss. An untrained adapter equals
the backbone, so a copy is only made where it starts lower. The mean of all adapters is scored as well, for requests; a
start from it, as an adapter of the same rank, gained nothing over the best copy.

A request goes to the regime that it resembles. One that matches no regime is answered with the mean of the regimes'
adapters, the nearest one, or the backbone. None is best on every backbone and stream. A weak backbone gains from the
experts of a similar task, a strong one is disturbed by them. What many tasks have in common, such as the form of an
answer, remains when their adapters are averaged. The daemon measures it at every new regime:

    l_a = mean over new regimes of the loss of their first records, answered by a, nats per learned token   (1)

The lowest wins. Until a second regime begins there is nothing to compare, and the backbone answers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any, Literal, NamedTuple

from numpy.typing import NDArray

from streamlearn.adapters.context import NO_REGIME, Slot
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.regimes.regime import Regime, slot_of
from streamlearn.settings.serving import Unknown
from streamlearn.shift.monitor import Monitor
from streamlearn.shift.routing import Assignment
from streamlearn.status import AnsweredBy, FallbackStatus, Requested, Route, UnknownRegimeError
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


MAX_AVERAGED = 16
"""Adapters in the mean: those of the regimes with the most records. Each takes time in every forward pass."""
_UNKNOWN = Route(None, 0.0, known=False, answered_by="backbone")


class RoutedInput(NamedTuple):
    """A route, and the slot for the forward pass."""

    slot: Slot
    route: Route


def largest(regimes: Mapping[int, Regime], *, without: int | None = None) -> tuple[int, ...]:
    """Slots of the regimes whose adapters the mean is of, most records first, except for the one in slot `without`."""
    others = [slot for slot in regimes if slot != without]
    return tuple(nsmallest(MAX_AVERAGED, others, lambda slot: (-regimes[slot].records, regimes[slot].number)))


class RequestRouter:
    """Routes inputs by the regimes that were trained on. Changes nothing."""

    def __init__(
        self, monitor: Monitor, fallback: Fallback, *, routes_by_regime: bool, max_known_rejected: float
    ) -> None:
        """`max_known_rejected`: the setting of `serve`."""
        self._monitor = monitor
        self._fallback = fallback
        self._routes_by_regime = routes_by_regime
        self._max_known_rejected = max_known_rejected

    def route(
        self, inputs: Sequence[NDArray[Any]], regimes: Mapping[int, Regime], requested: Requested = "routed"
    ) -> list[RoutedInput]:
        """The regime of each input, and what answers it.

        Before the first record nothing is known, and the backbone answers.

        Raises:
            UnknownRegimeError: the requested regime is not remembered, or the preset's routing is the same for all.
        """
        if isinstance(requested, int):
            return self._by_number(inputs, regimes, requested)
        if not regimes:
            return [RoutedInput(NO_REGIME, _UNKNOWN)] * len(inputs)
        averaged = largest(regimes)
        routed = [self._routed(assigned, regimes, averaged) for assigned in self._monitor.assign(inputs)]
        if requested == "backbone":
            return [RoutedInput(NO_REGIME, replace(found.route, answered_by="backbone")) for found in routed]
        return routed

    def _by_number(
        self, inputs: Sequence[NDArray[Any]], regimes: Mapping[int, Regime], number: int
    ) -> list[RoutedInput]:
        """The regime with this number for each input, with its own score."""
        slot = slot_of(regimes, number) if self._routes_by_regime else None
        if slot is None:
            known = sorted(regime.number for regime in regimes.values()) if self._routes_by_regime else []
            raise UnknownRegimeError(
                f"regime {number} cannot answer, expected one of {', '.join(map(str, known)) or 'none'}"
            )
        if not self._is_described(regimes[slot]):
            assigned = [Assignment(slot, 1.0)] * len(inputs)
        else:
            assigned = self._monitor.assign(inputs, slot)
        return [RoutedInput(slot, self._route(result, regimes, "regime")) for result in assigned]

    def _is_described(self, regime: Regime | None) -> bool:
        """Whether the slot's profile is this regime's.

        A regime is entered before its first batch is trained on. Until then the slot has no profile, or that of the
        regime that had the slot before.
        """
        numbers = self._monitor.trained.detector.numbers
        return not numbers or (regime is not None and numbers.get(regime.slot) == regime.number)

    def _routed(self, assigned: Assignment, regimes: Mapping[int, Regime], averaged: tuple[int, ...]) -> RoutedInput:
        if not self._is_described(regimes.get(assigned.slot)):  # the likeliest regime was dropped for another one
            if self._fallback.answered_by == "mean":
                return RoutedInput(averaged, Route(None, 0.0, known=False, answered_by="mean"))
            return RoutedInput(NO_REGIME, _UNKNOWN)
        route = self._route(assigned, regimes, "regime" if self._routes_by_regime else "adapter")
        if route.known:
            return RoutedInput(assigned.slot, route)
        if self._fallback.answered_by != "nearest":
            route = replace(route, answered_by=self._fallback.answered_by)
        return RoutedInput(self._fallback.slot_for(assigned.slot, averaged), route)

    def _route(self, assigned: Assignment, regimes: Mapping[int, Regime], answered_by: AnsweredBy) -> Route:
        known = assigned.p_value >= self._max_known_rejected
        return Route(regimes[assigned.slot].number, assigned.p_value, known=known, answered_by=answered_by)
