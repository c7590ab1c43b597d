"""The partition monitor."""

from connectors.kafka.source import PartitionMonitor
from streamlearn.stream.record import Record, TopicPartition
from tests.connectors.kafka.kit import SteppingClock, settings

A, B = TopicPartition("a", 0), TopicPartition("b", 0)


def test_silence_counts_only_while_polling_a_partition_with_unread_records() -> None:
    """A long training step, an idle log and a partition that returns records are no stall; unread records are."""
    clock = SteppingClock()
    monitor = PartitionMonitor(settings(stall_timeout_s=60.0, lag_interval_s=10.0), clock)

    def round_of(polled_s: float, ends: dict[TopicPartition, int], *active: TopicPartition) -> str:
        clock.now += 600.0
        monitor.observe_poll(polled_s, [Record(origin, 0, b"") for origin in active])
        monitor.update_ends(ends, fetch_offsets={A: 5, B: 5})
        return monitor.stalled_partitions()

    monitor.update_ends({A: 5, B: 9}, fetch_offsets={A: 5, B: 5})
    assert round_of(40.0, {A: 5, B: 9}, B) == ""  # B returned a record
    assert round_of(40.0, {A: 5, B: 9}) == ""
    assert round_of(19.0, {A: 9, B: 9}) == ""  # 59 s, although 1200 s have passed
    assert round_of(1.0, {A: 9, B: 9}) == "b-0"
    assert round_of(58.0, {A: 9, B: 9}) == "b-0"
    assert round_of(2.0, {A: 9, B: 9}) == "a-0, b-0"
    monitor.reset()
    assert monitor.stalled_partitions() == ""
