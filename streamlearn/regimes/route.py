"""Which regime an input of a request resembles, and what answers it.

A regime is entered before the batch of its first records is trained on, and what is known of inputs is as of the last
trained batch. Until that knows the regime in a slot, nothing there tells whether an input is of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from streamlearn.adapters.context import NO_REGIME, Slot
from streamlearn.regimes.requested import Requested, UnknownRegimeError
from streamlearn.regimes.start import Fallback
from streamlearn.regimes.statistics import RegimeStatistics
from streamlearn.shift.monitor import Monitor, MonitorState
from streamlearn.shift.routing import Assignment
from streamlearn.status import AnsweredBy, Route


class RoutedInput(NamedTuple):
    """A route, and the slot for the forward pass."""

    slot: Slot
    route: Route


MAX_AVERAGED = 16
"""Adapters in the mean: those of the regimes with the most records. Each takes time in every forward pass."""

_UNKNOWN = Route(None, 0.0, known=False, answered_by="backbone")


class RequestRouter:
    """Routes inputs by the regimes that were trained on. Changes nothing."""

    def __init__(
        self,
        monitor: Monitor,
        fallback: Fallback,
        statistics: RegimeStatistics,
        numbers: Mapping[int, int],
        *,
        routes_by_regime: bool,
        max_known_rejected: float,
    ) -> None:
        """`numbers` are those of the regimes by slot, a view; the others are settings of the learner and `serve`."""
        self._monitor = monitor
        self._fallback = fallback
        self._statistics = statistics
        self._numbers = numbers
        self._routes_by_regime = routes_by_regime
        self._max_known_rejected = max_known_rejected

    def route(
        self, inputs: Sequence[NDArray[Any]], trained: MonitorState | None, requested: Requested = "routed"
    ) -> list[RoutedInput]:
        """The regime of each input, and what answers it, which may be requested; `trained`: see `Monitor.assign`.

        Before the first record nothing is known, and the backbone answers.

        Raises:
            UnknownRegimeError: the requested regime is not remembered, or the preset's routing is the same for all.
        """
        if isinstance(requested, int):
            return self._by_number(inputs, trained, requested)
        if not self._numbers:
            return [RoutedInput(NO_REGIME, _UNKNOWN)] * len(inputs)
        averaged = self.averaged()
        routed = [self._routed(each, trained, averaged) for each in self._monitor.assign(inputs, trained)]
        if requested == "backbone":
            return [RoutedInput(NO_REGIME, replace(each.route, answered_by="backbone")) for each in routed]
        return routed

    def averaged(self, *, without: int | None = None) -> tuple[int, ...]:
        """Slots of the regimes whose adapters the mean is of, except for the one in slot `without`."""
        return self._statistics.largest(MAX_AVERAGED, without=without)

    def _by_number(
        self, inputs: Sequence[NDArray[Any]], trained: MonitorState | None, number: int
    ) -> list[RoutedInput]:
        """The regime with this number for each input, with its own score."""
        slots = {known: slot for slot, known in self._numbers.items()} if self._routes_by_regime else {}
        if number not in slots:
            raise UnknownRegimeError(
                f"regime {number} cannot answer, expected one of {', '.join(map(str, sorted(slots))) or 'none'}"
            )
        slot = slots[number]
        if not self._is_described(slot, trained):
            return [RoutedInput(slot, self._route(Assignment(slot, 1.0), "regime"))] * len(inputs)
        assigned = self._monitor.assign(inputs, trained, slot=slot)
        return [RoutedInput(slot, self._route(each, "regime")) for each in assigned]

    def _is_described(self, slot: int, trained: MonitorState | None) -> bool:
        """Whether the state is of the regime that the slot has now; before the first trained batch it is of none."""
        described = {} if trained is None else trained.detector.numbers
        return not described or described.get(slot) == self._numbers.get(slot)

    def _routed(self, assigned: Assignment, trained: MonitorState | None, averaged: tuple[int, ...]) -> RoutedInput:
        if not self._is_described(assigned.slot, trained):  # the likeliest regime was dropped for another one
            if self._fallback.answered_by == "mean":
                return RoutedInput(averaged, Route(None, 0.0, known=False, answered_by="mean"))
            return RoutedInput(NO_REGIME, _UNKNOWN)
        route = self._route(assigned, "regime" if self._routes_by_regime else "adapter")
        if route.known:
            return RoutedInput(assigned.slot, route)
        if self._fallback.answered_by != "nearest":
            route = replace(route, answered_by=self._fallback.answered_by)
        return RoutedInput(self._fallback.slot_for(assigned.slot, averaged), route)

    def _route(self, assigned: Assignment, answered_by: AnsweredBy) -> Route:
        known = assigned.p_value >= self._max_known_rejected
        return Route(self._numbers[assigned.slot], assigned.p_value, known=known, answered_by=answered_by)
