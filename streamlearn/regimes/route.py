"""Which regime an input of a request resembles, and what answers it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import Any, NamedTuple

from numpy.typing import NDArray

from streamlearn.adapters.context import NO_REGIME, Slot
from streamlearn.regimes.regime import Regime, slot_of
from streamlearn.regimes.start import Fallback
from streamlearn.shift.monitor import Monitor
from streamlearn.shift.routing import Assignment
from streamlearn.status import AnsweredBy, Requested, Route, UnknownRegimeError

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
