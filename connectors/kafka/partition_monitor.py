"""When the next chore is due, how far each log reaches, and which partition is silent although it has records.

kafka-python has had bugs in which a partition stops being fetched for good while its log grows; only a new consumer
helps. Silence counts while polling alone, so a long training step between two polls is no stall.
"""

from collections.abc import Callable, Iterable, Mapping

from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import Record, TopicPartition

_NEVER = float("-inf")


class PartitionMonitor:
    """Clocks and counters of one `KafkaSource`; does no I/O."""

    def __init__(self, settings: KafkaSettings, clock: Callable[[], float]) -> None:
        self.ends: dict[TopicPartition, int] = {}
        """End of each log, `lag_interval_s` old at most; empty when unknown."""
        self.reached: dict[TopicPartition, int] = {}
        """Next offset to fetch, as of `ends`: past markers that follow the last record."""
        self._settings = settings
        self._clock = clock
        self._asked_at = _NEVER
        self._discovered_at = clock()
        self._polled_s = 0.0
        self._heard: set[TopicPartition] = set()
        self._silent_s: dict[TopicPartition, float] = {}

    def restart(self, ends: Mapping[TopicPartition, int] | None = None) -> None:
        """A new consumer: nothing has been silent yet. `ends` are taken over when they are fresh."""
        if ends is not None:
            self.ends = dict(ends)
            self._asked_at = self._discovered_at = self._clock()
        self._polled_s = 0.0
        self._heard.clear()
        self._silent_s.clear()

    def polled(self, seconds: float, records: Iterable[Record]) -> None:
        """A poll took so long and brought these records."""
        self._polled_s += seconds
        self._heard |= {record.origin for record in records}

    def ends_are_due(self) -> bool:
        """Whether `lag_interval_s` has passed since the ends were last asked for, with or without an answer."""
        return self._clock() - self._asked_at >= self._settings.lag_interval_s

    def learned(self, ends: Mapping[TopicPartition, int], reached: Mapping[TopicPartition, int]) -> None:
        """Take over the ends, and count silence for partitions that were behind all along."""
        behind = {origin for origin, end in self.ends.items() if end > reached[origin]}
        for origin in ends:
            silent = origin in behind and origin not in self._heard
            self._silent_s[origin] = self._silent_s.get(origin, 0.0) + self._polled_s if silent else 0.0
        self.ends = dict(ends)
        self.reached = dict(reached)
        self._asked_at = self._clock()
        self._polled_s = 0.0
        self._heard.clear()

    def ends_unknown(self) -> None:
        """The cluster did not answer; ask again after the interval."""
        self.ends.clear()
        self._asked_at = self._clock()

    def stalled(self) -> str:
        """Partitions that were silent for `stall_timeout_s`, comma-separated; usually empty."""
        return ", ".join(
            str(origin) for origin, silent_s in self._silent_s.items() if silent_s >= self._settings.stall_timeout_s
        )

    def discovery_is_due(self) -> bool:
        """Whether `metadata_max_age_ms` has passed since this last said yes."""
        due = self._clock() - self._discovered_at >= self._settings.metadata_max_age_ms / 1000
        if due:
            self._discovered_at = self._clock()
        return due
