"""Parts of the Kafka source that need no broker: offsets, topics, the partition monitor, the start."""

import socket

import pytest
from kafka.admin import ACLOperation
from structlog.testing import capture_logs

from connectors.kafka.offsets import GapPolicy, starting_offsets
from connectors.kafka.partition_monitor import PartitionMonitor
from connectors.kafka.source import KafkaSource
from connectors.kafka.topics import Topic, check_identity, identity_of, topic_of
from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.events import Event
from streamlearn.settings import KafkaSettings
from streamlearn.stream.record import Position, Record, TopicPartition

A, B, NEW = TopicPartition("a", 0), TopicPartition("b", 0), TopicPartition("a", 1)


def settings(**overrides: object) -> KafkaSettings:
    """Settings for a broker that does not exist."""
    values = {"bootstrap_servers": "127.0.0.1:9", "security_protocol": "PLAINTEXT", "topics": ("a",), **overrides}
    return KafkaSettings.model_validate(values)


class SteppingClock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the time."""
        self.pauses.append(seconds)
        self.now += seconds


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


def test_a_topic_is_identified_by_its_id() -> None:
    """Another id under the same name is another topic; an id that one side lacks is not checked."""
    now = identity_of([Topic("a", "7f", (0,)), Topic("old", "", (0,))])
    assert now == {"a": "7f"}
    for before in ({}, {"a": "7f"}, {"old": "3c"}, {"no longer read": "3c"}):
        check_identity(before, now)
    with pytest.raises(
        OffsetGapError, match=r"topic a must have the same id as .* 3c, found 7f: .* created again.* --fresh"
    ):
        check_identity({"a": "3c"}, now)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (
            2,
            r"a-0 must resume at offset 2, its log begins at 3: the 1 offsets \[2, 3\) .*offset\.gap\.policy.*--fresh",
        ),
        (31, r"a-0 must resume at offset 31, its log ends at 30: \[30, 31\) was trained and is gone.* --fresh"),
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


@pytest.mark.parametrize(
    "reported", [{}, {"authorized_operations": []}, {"authorized_operations": ["DESCRIBE", "READ"]}]
)
def test_without_reported_operations_all_are_assumed_to_be_allowed(reported: dict[str, list[str]]) -> None:
    """Brokers before Kafka 2.3 do not report them; a forbidden operation fails later."""
    entry = {
        "error_code": 0,
        "topic_id": None,
        "partitions": [{"partition_index": 1}, {"partition_index": 0}],
        **reported,
    }
    assert topic_of(settings(), "t", entry, [ACLOperation.READ]) == Topic("t", "", (0, 1))


def test_no_broker_at_the_start_is_logged_once_and_then_fatal() -> None:
    """The source retries with growing pauses, then raises an error with the address."""
    clock = SteppingClock()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        servers = f"127.0.0.1:{free.getsockname()[1]}"
        source = KafkaSource(settings(bootstrap_servers=servers), start_timeout_s=9.0, clock=clock, sleep=clock.sleep)
        with (
            capture_logs() as logs,
            pytest.raises(SourceError, match=f"broker must be reachable at {servers}, none accepted"),
        ):
            source.seek(Position())
    assert [entry["event"] for entry in logs] == [Event.SOURCE_UNREACHABLE]
    assert clock.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    source.close()
