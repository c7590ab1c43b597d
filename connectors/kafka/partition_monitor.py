"""Due times of chores, log ends, and the detection of stalled partitions.

Because of bugs in kafka-python, a partition may stop being fetched although its log grows; only a new consumer helps.
Only time spent polling counts as silence, so a long training step between two polls is not a stall.
"""

from collections.abc import Callable, Iterable, Mapping

from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import Record, TopicPartition

_NEVER = float("-inf")


class PartitionMonitor:
    """Clocks and counters of one `KafkaSource`; does no I/O."""

    def __init__(self, settings: KafkaSettings, clock: Callable[[], float]) -> None:
        self.ends: dict[TopicPartition, int] = {}
        """End of each log, at most `lag_interval_s` old; without those that are unknown."""
        self.fetch_offsets: dict[TopicPartition, int] = {}
        """Next offset to fetch at the time of `ends`, past any transaction markers after the last record."""
        self._settings = settings
        self._clock = clock
        self._ends_requested_at = _NEVER
        self._discovered_at = clock()
        self._polled_s = 0.0
        self._active: set[TopicPartition] = set()
        self._silent_s: dict[TopicPartition, float] = {}

    def reset(self, ends: Mapping[TopicPartition, int] | None = None) -> None:
        """Restart the counts of silence for a new consumer; `ends` were just requested, for a new position."""
        if ends is not None:
            self.ends = dict(ends)
            self.fetch_offsets = {}
            self._ends_requested_at = self._discovered_at = self._clock()
        self._polled_s = 0.0
        self._active.clear()
        self._silent_s.clear()

    def observe_poll(self, seconds: float, records: Iterable[Record]) -> None:
        """Count a poll's duration and its records."""
        self._polled_s += seconds
        self._active |= {record.origin for record in records}

    def ends_are_due(self) -> bool:
        """Return whether `lag_interval_s` has passed since the last request for the ends, answered or not."""
        return self._clock() - self._ends_requested_at >= self._settings.lag_interval_s

    def update_ends(self, ends: Mapping[TopicPartition, int], fetch_offsets: Mapping[TopicPartition, int]) -> None:
        """Set the ends, and count silence for partitions that had unread records since the last update."""
        lagging = {origin for origin, end in self.ends.items() if end > fetch_offsets[origin]}
        for origin in ends:
            silent = origin in lagging and origin not in self._active
            self._silent_s[origin] = self._silent_s.get(origin, 0.0) + self._polled_s if silent else 0.0
        self.ends = dict(ends)
        self.fetch_offsets = dict(fetch_offsets)
        self._ends_requested_at = self._clock()
        self._polled_s = 0.0
        self._active.clear()

    def clear_ends(self) -> None:
        """Forget the ends after a request without an answer; the next one is due after the interval."""
        self.ends.clear()
        self._ends_requested_at = self._clock()

    def stalled_partitions(self) -> str:
        """Return the partitions that were silent for `stall_timeout_s`, comma-separated; usually empty."""
        return ", ".join(
            str(origin) for origin, silent_s in self._silent_s.items() if silent_s >= self._settings.stall_timeout_s
        )

    def discovery_is_due(self) -> bool:
        """Return whether `metadata_max_age_ms` has passed since this last returned True."""
        due = self._clock() - self._discovered_at >= self._settings.metadata_max_age_ms / 1000
        if due:
            self._discovered_at = self._clock()
        return due
