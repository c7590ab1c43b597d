"""Partitions without a leader beside others that have one."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from kafka.errors import LeaderNotAvailableError
from structlog.testing import capture_logs

from connectors.kafka.admin import (
    available_beginning_offsets,
    available_end_offsets,
    beginning_offsets,
    end_offsets,
)
from connectors.kafka.clients import CLIENT_ERRORS
from connectors.kafka.dead_letters import KafkaDeadLetters
from connectors.kafka.source import KafkaSource
from streamlearn.errors import DeadLetterError, OffsetGapError, Reason, SourceError
from streamlearn.events import Event
from streamlearn.stream.record import Position, Record, TopicPartition
from streamlearn.stream.source import DeadLetter
from tests.connectors.kafka.fake_cluster import FakeConsumer
from tests.connectors.kafka.kit import SteppingClock, settings

A0, A1, A2 = (TopicPartition("a", number) for number in range(3))


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> FakeConsumer:
    """In place of kafka-python's."""
    fake = FakeConsumer({A0: (2, 10), A1: (3, 20), A2: (4, 30)})
    fake.install(monkeypatch, "source")
    return fake


def source(clock: SteppingClock, **overrides: Any) -> KafkaSource:
    """A source of topic a."""
    return KafkaSource(settings(**overrides), start_timeout_s=60.0, clock=clock, sleep=clock.sleep)


def changes(logs: list[Any]) -> list[list[str]]:
    """The partitions without a leader at each change."""
    return [entry["without_leader"] for entry in logs if entry["event"] == Event.PARTITIONS_CHANGED]


def test_offsets_of_all_partitions_need_all_leaders(consumer: FakeConsumer) -> None:
    """kafka-python's KeyError becomes an error that is handled like any other of the cluster."""
    assert beginning_offsets(consumer, [A0, A1, A2]) == {A0: 2, A1: 3, A2: 4}
    assert end_offsets(consumer, [A0, A1, A2]) == {A0: 10, A1: 20, A2: 30}
    consumer.leaderless = {A0, A2}
    for request in (beginning_offsets, end_offsets):
        with pytest.raises(LeaderNotAvailableError, match="a-0, a-2 has none") as raised:
            request(consumer, [A0, A1, A2])
        assert isinstance(raised.value, CLIENT_ERRORS)


def test_offsets_of_those_that_have_a_leader(consumer: FakeConsumer) -> None:
    """The others are left out; if none has one, the cluster counts as silent."""
    consumer.leaderless = {A0, A2}
    assert available_beginning_offsets(consumer, [A0, A1, A2]) == {A1: 3}
    assert available_end_offsets(consumer, [A0, A1, A2], timeout_ms=7) == {A1: 20}
    with pytest.raises(CLIENT_ERRORS, match="in 7 ms"):
        available_end_offsets(consumer, [A0, A2], timeout_ms=7)


def test_a_dead_letter_topic_without_a_leader_is_not_usable(
    consumer: FakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start fails with the partition; while learning, dead letters wait in the backlog."""
    consumer.install(monkeypatch, "dead_letters")
    monkeypatch.setattr("connectors.kafka.dead_letters.new_producer", lambda *_, **__: MagicMock())
    consumer.leaderless = {A1}
    with pytest.raises(DeadLetterError, match=r"topic a must be usable: .*must have a leader, a-1 has none"):
        KafkaDeadLetters(settings(), "a")
    consumer.leaderless = set()
    sink = KafkaDeadLetters(settings(), "a")
    sink.send(DeadLetter(Record(A0, 0, b"{"), Reason.NOT_JSON, ""))
    consumer.leaderless = {A1}
    with pytest.raises(DeadLetterError, match=r"cannot be written: .*a-1 has none"):
        sink.flush()
    sink.close()


def test_a_restart_does_not_wait_for_a_leader(consumer: FakeConsumer) -> None:
    """The partition continues at its position, even if that cannot be checked yet; the others are checked."""
    consumer.leaderless = {A1}
    clock = SteppingClock()
    reader = source(clock)
    with capture_logs() as logs:
        assert dict(reader.seek(Position({A0: 5, A1: 1, A2: 30}))) == {A0: 5, A1: 1, A2: 30}
    assert changes(logs) == [["a-1"]]
    assert clock.now == 0.0
    assert dict(reader.lag(Position({A0: 5, A1: 1, A2: 30}))) == {A0: 5, A2: 0}
    with pytest.raises(OffsetGapError, match="a-0 must resume at offset 1"):
        reader.seek(Position({A0: 1, A1: 1, A2: 30}))
    reader.close()


def test_a_partition_without_position_waits_for_its_leader(consumer: FakeConsumer) -> None:
    """Where it begins is not known before; without a leader the start fails, with its name."""
    clock = SteppingClock()
    reader = source(clock, offset_start="latest")
    consumer.leaderless = {A2}
    message = r"must have a leader, a-2 had none for 60 s\. Start .*--unavailable-partitions"
    with capture_logs() as logs, pytest.raises(SourceError, match=message):
        reader.seek(Position())
    assert changes(logs) == [["a-2"]]
    assert 59.0 < clock.now <= 60.0

    sleep = clock.sleep

    def elect(seconds: float) -> None:
        sleep(seconds)
        if clock.now > 80.0:
            consumer.leaderless = set()

    reader = KafkaSource(settings(offset_start="latest"), clock=clock, sleep=elect)
    assert dict(reader.seek(Position())) == {A0: 10, A1: 20, A2: 30}
    reader.close()


def test_no_leader_at_all_is_an_error_that_names_the_partitions(consumer: FakeConsumer) -> None:
    """kafka-python has waited for the start's whole timeout then."""
    consumer.leaderless = {A0, A1, A2}
    with pytest.raises(SourceError, match=r"offsets of a-0, a-1, a-2 in 60 s: none of them has a leader"):
        source(SteppingClock()).seek(Position({A0: 5}))


def test_the_others_are_still_observed(consumer: FakeConsumer) -> None:
    """Their lag is known, and a stall among them is noticed; that of the partition itself is unknown."""
    clock = SteppingClock()
    reader = source(clock, lag_interval_s=10.0, stall_timeout_s=60.0)
    position = reader.seek(Position({A0: 5, A1: 20, A2: 30}))
    rebuilt = []
    with capture_logs() as logs:
        consumer.leaderless = {A1}
        for _ in range(9):
            clock.now += 10.0
            reader.poll(max_records=8, timeout_s=0.0)
            reader._monitor.observe_poll(10.0, [])
            rebuilt = [entry["reason"] for entry in logs if entry["event"] == Event.SOURCE_REBUILT]
        assert dict(reader.lag(position)) == {A0: 5, A2: 0}
        consumer.leaderless = set()
        clock.now += 10.0
        assert dict(reader.lag(position)) == {A0: 5, A1: 0, A2: 0}
    assert changes(logs) == [["a-1"], []]
    assert [reason.split(" although")[0] for reason in rebuilt] == ["no record of a-0 for 60 s"]
    assert Event.SOURCE_UNREACHABLE not in [entry["event"] for entry in logs]
    reader.close()


def test_new_partitions_are_read_once_they_have_a_leader(consumer: FakeConsumer) -> None:
    """One that has none does not hold up another."""
    clock = SteppingClock()
    new = consumer.logs.pop(A1), consumer.logs.pop(A2)
    reader = source(clock, metadata_max_age_ms=1_000)
    reader.seek(Position({A0: 5}))
    consumer.logs |= {A1: new[0], A2: new[1]}
    for leaderless, found in ({A1}, {A0: 5, A2: 4}), (set(), {A0: 5, A1: 3, A2: 4}):
        consumer.leaderless = leaderless
        clock.now += 2.0
        reader.poll(max_records=8, timeout_s=0.0)
        assert dict(reader.reached) == found
    reader.close()


def test_a_gap_beside_a_partition_without_leader_is_skipped(consumer: FakeConsumer) -> None:
    """Each partition with a leader moves past its gap; the other stays where it is."""
    reader = source(SteppingClock(), offset_gap_policy="earliest")
    reader.seek(Position({A0: 5, A1: 6, A2: 7}))
    consumer.logs |= {A0: (8, 10), A1: (9, 20)}
    consumer.leaderless = {A1}
    assert reader._skip_gaps()
    assert dict(reader.reached) == {A0: 8, A1: 6, A2: 7}
    consumer.leaderless = set()
    assert reader._skip_gaps()
    assert dict(reader.reached) == {A0: 8, A1: 9, A2: 7}
    reader.close()
