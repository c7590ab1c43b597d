"""Counters of one process, from the totals of its run."""

from collections import Counter
from collections.abc import Mapping

from streamlearn.status.process_counts import ProcessCounts
from streamlearn.status.status import Status


class ProcessCounter:
    """Adds up what the totals of a run grow by from one status to the next. Where they fall, in a rollback, nothing.

    >>> from streamlearn.status.status import Phase
    >>> counter = ProcessCounter()
    >>> [counter.update(Status(Phase.RUNNING, step=step)).steps for step in (100, 103, 90, 91)]
    [0, 3, 3, 4]
    """

    def __init__(self) -> None:
        self._before: Status | None = None
        self._counts = ProcessCounts()

    def update(self, status: Status) -> ProcessCounts:
        """The counts up to `status`; the first one has the totals that the process began with."""
        before, self._before = self._before or status, status
        counts = self._counts
        self._counts = ProcessCounts(
            steps=counts.steps + _growth(before.step, status.step),
            records_trained=counts.records_trained + _growth(before.records_trained, status.records_trained),
            records_held_out=counts.records_held_out + _growth(before.records_held_out, status.records_held_out),
            tokens_trained=counts.tokens_trained + _growth(before.tokens_trained, status.tokens_trained),
            update_refusals=counts.update_refusals + _growth(before.update_refusals, status.update_refusals),
            dead_letters=_added(counts.dead_letters, before.dead_letters, status.dead_letters),
            shifts=_added(counts.shifts, before.adaptation.num_shifts, status.adaptation.num_shifts),
        )
        return self._counts


def _growth(before: int, now: int) -> int:
    return max(0, now - before)


def _added(counts: Mapping[str, int], before: Mapping[str, int], now: Mapping[str, int]) -> Mapping[str, int]:
    return Counter(counts) + (Counter(now) - Counter(before))  # the difference keeps what is positive
