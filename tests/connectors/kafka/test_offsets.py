"""Offsets: where logs begin and end, where reading begins, and partitions without a leader."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from kafka.errors import LeaderNotAvailableError
from structlog.testing import capture_logs

from connectors.kafka.clients import CLIENT_ERRORS
from connectors.kafka.dead_letters import KafkaDeadLetters
from connectors.kafka.offsets import (
    GapPolicy,
    beginning_offsets,
    end_offsets,
    starting_offsets,
)
from connectors.kafka.source import KafkaSource
from streamlearn.errors import DeadLetterError, OffsetGapError, Reason, SourceError
from streamlearn.events import Event
from streamlearn.stream.position import Position, TopicPartition
from streamlearn.stream.record import Record
from streamlearn.stream.source import DeadLetter
from tests.connectors.kafka.doubles import FakeConsumer, SteppingClock, settings

A, B, NEW = TopicPartition("a", 0), TopicPartition("b", 0), TopicPartition("a", 1)


def test_named_partitions_continue_and_others_begin_where_the_setting_says() -> None:
    """A new topic follows offset.start; a new partition of a known topic begins at its first record."""
    begins, ends = {A: 3, B: 5, NEW: 7}, {A: 30, B: 50, NEW: 70}
    assert starting_offsets({A: 10}, begins, ends, "latest") == {A: 10, NEW: 7, B: 50}
    assert starting_offsets({}, begins, ends, "latest") == {A: 30, NEW: 70, B: 50}
    assert starting_offsets({}, begins, ends, "earliest") == begins


@pytest.mark.parametrize("policy", ["fail", "earliest", "latest"])
@pytest.mark.parametrize("offset", [3, 30])
def test_the_ends_of_the_log_are_no_gap(offset: int, policy: GapPolicy) -> None:
    """Resuming at the first record, or after the last one, misses nothing."""
    assert starting_offsets({A: offset}, {A: 3}, {A: 30}, "earliest", policy) == {A: offset}


def test_after_a_gap_reading_continues_where_the_policy_says() -> None:
    """At the first remaining record or at the log's end; a partition without a gap is not moved."""
    begins, ends = {A: 3, NEW: 0}, {A: 30, NEW: 9}
    assert starting_offsets({A: 2, NEW: 5}, begins, ends, "latest", "earliest") == {A: 3, NEW: 5}
    assert starting_offsets({A: 2, NEW: 5}, begins, ends, "earliest", "latest") == {A: 30, NEW: 5}


@pytest.mark.parametrize("policy", ["fail", "earliest", "latest"])
def test_no_policy_goes_back(policy: GapPolicy) -> None:
    """Trained records past the log's end mean another log; going back would train their offsets again."""
    with pytest.raises(OffsetGapError, match=r"\[30, 31\) was trained and is gone"):
        starting_offsets({A: 31}, {A: 3}, {A: 30}, "earliest", policy)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (
            2,
            r"a-0 must resume at offset 2, its log begins at 3: the 1 offsets \[2, 3\) .*offset\.gap\.policy.*--fresh",
        ),
        (31, r"a-0 must resume at offset 31, its log ends at 30\. .*\[30, 31\) was trained and is gone.* --fresh"),
    ],
)
def test_a_gap_is_named_exactly(offset: int, message: str) -> None:
    """The message names the missing offsets and the remedies."""
    with pytest.raises(OffsetGapError, match=message):
        starting_offsets({A: offset}, {A: 3}, {A: 30}, "earliest")


def test_a_partition_that_is_gone_is_a_gap() -> None:
    """A trained partition of a configured topic must exist; a topic that is no longer configured may be gone."""
    with pytest.raises(OffsetGapError, match="a-1 was trained up to offset 9 and no longer exists"):
        starting_offsets({A: 5, NEW: 9}, {A: 3}, {A: 30}, "earliest")
    assert starting_offsets({A: 5, B: 9}, {A: 3}, {A: 30}, "earliest") == {A: 5}


def test_an_offset_past_committed_records_may_lie_in_an_open_transaction() -> None:
    """After a change from read_uncommitted the log seems to end where the transaction begins; then nothing is gone."""
    position, begins, ends = {A: 31}, {A: 3}, {A: 30}
    with pytest.raises(
        OffsetGapError, match=r"transaction may be open there .*: restart when it has ended\. Otherwise"
    ):
        starting_offsets(position, begins, ends, "earliest", isolation_level="read_committed")
    with pytest.raises(OffsetGapError, match=r"its log ends at 30\. \[30, 31\) was trained and is gone"):
        starting_offsets(position, begins, ends, "earliest", isolation_level="read_uncommitted")


A0, A1, A2 = (TopicPartition("a", number) for number in range(3))


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> FakeConsumer:
    fake = FakeConsumer({A0: (2, 10), A1: (3, 20), A2: (4, 30)})
    fake.install(monkeypatch, "source")
    return fake


def source(clock: SteppingClock, **overrides: Any) -> KafkaSource:
    return KafkaSource(settings(**overrides), start_timeout_s=60.0, clock=clock, sleep=clock.sleep)


def changes(logs: list[Any]) -> list[list[str]]:
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
    assert beginning_offsets(consumer, [A0, A1, A2], partial=True) == {A1: 3}
    assert end_offsets(consumer, [A0, A1, A2], timeout_ms=7, partial=True) == {A1: 20}
    with pytest.raises(CLIENT_ERRORS, match="in 7 ms"):
        end_offsets(consumer, [A0, A2], timeout_ms=7, partial=True)


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
