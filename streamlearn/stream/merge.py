"""One order out of several partitions.

Live, records are taken in the order in which the source returns them. Which order that was is journalled with each
batch; after a restart the journalled runs are taken first, in the same order, so several partitions replay as exactly
as one. A single partition has one order only and needs no journal.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from streamlearn.events import Event, get_logger
from streamlearn.stream.batch import Run
from streamlearn.stream.record import Record, TopicPartition
from streamlearn.stream.source import Source

_log = get_logger("stream")


class Merger:
    """Takes records from a source in the journalled order while there is one, then as they come."""

    def __init__(self, source: Source, journalled: Iterable[Run] = ()) -> None:
        self._source = source
        self._plan: deque[TopicPartition] = deque(
            TopicPartition(run.topic, run.partition) for run in journalled for _ in range(run.num_records)
        )
        self._waiting: dict[TopicPartition, deque[Record]] = defaultdict(deque)

    def take(self, *, max_records: int, timeout_s: float) -> Iterator[Record]:
        """Records that are ready, in order; nothing when none came within `timeout_s`.

        While a journalled order is followed, records of other partitions wait in memory: as many as the source returns
        before the awaited one comes. One that the source jumped over never comes: the order ends there.
        """
        records = self._source.poll(max_records=max_records, timeout_s=timeout_s)
        self._drop_order_at_gap()
        for record in records:
            self._waiting[record.origin].append(record)
            if not self._plan:
                yield from self._drain(record.origin)
        yield from self._follow()

    def _drop_order_at_gap(self) -> None:
        gap = next((gap for gap in self._source.gaps if gap.origin in self._plan), None) if self._plan else None
        if gap is not None:
            _log.warning(
                Event.JOURNAL_TRUNCATED,
                fault=f"records of {gap.origin} must be read again, [{gap.lost_from}, {gap.lost_to}) is gone",
                lost=f"the replay order of {len(self._plan)} records",
            )
            self._plan.clear()

    def _follow(self) -> Iterator[Record]:
        while self._plan and self._waiting[self._plan[0]]:
            yield self._waiting[self._plan.popleft()].popleft()
        if not self._plan:
            for origin in sorted(self._waiting):
                yield from self._drain(origin)

    def _drain(self, origin: TopicPartition) -> Iterator[Record]:
        waiting = self._waiting[origin]
        while waiting:
            yield waiting.popleft()
