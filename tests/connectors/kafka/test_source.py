"""Against a real broker: failures of Kafka and kafka-python, and how the source handles them."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from connectors.kafka.clients import new_consumer
from connectors.kafka.source import KafkaSource
from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.events import Event
from streamlearn.settings import KafkaSettings
from streamlearn.stream.position import Gap, OffsetRange, Position, TopicPartition
from streamlearn.stream.record import Record
from tests.broker import Broker
from tests.connectors.kafka.doubles import HeaderName
from tests.memory import after

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("leaked_sockets")]

QUICK = {"lag_interval_s": 0.05, "metadata_max_age_ms": 100}

Opener = Callable[..., KafkaSource]


@pytest.fixture
def opened(broker: Broker) -> Iterator[Opener]:
    """Return a function that opens sources; they are closed after the test."""
    sources: list[KafkaSource] = []

    def open_source(*topics: str, position: Position | None = None, **overrides: Any) -> KafkaSource:
        source = KafkaSource(broker.settings(*topics, **{**QUICK, **overrides}), start_timeout_s=10.0)
        sources.append(source)
        source.seek(position or Position())
        return source

    yield open_source
    for source in sources:
        source.close()


def read(source: KafkaSource, count: int, timeout_s: float = 60.0) -> list[Record]:
    records: list[Record] = []
    deadline = time.monotonic() + timeout_s
    while len(records) < count and time.monotonic() < deadline:
        records += source.poll(max_records=100, timeout_s=0.2)
    return records


def poll_for(source: KafkaSource, seconds: float) -> list[Record]:
    return read(source, 1 << 30, seconds)


def values(records: list[Record]) -> list[bytes | None]:
    return [record.value for record in records]


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]


def events(logs: list[Any]) -> list[str]:
    return [entry["event"] for entry in logs]


def test_records_are_returned_unchanged(broker: Broker, opened: Opener) -> None:
    """Key, value, headers and timestamp are the producer's; a tombstone is a record without a value."""
    topic = broker.new_topic()
    broker.produce(topic, [b"\xff{", None], key=b"\x00", headers=[("h", b"\x01")], timestamp_ms=17)
    first, tombstone = read(opened(topic), 2)
    assert first == Record(TopicPartition(topic, 0), 0, b"\xff{", b"\x00", (("h", b"\x01"),), 17)
    assert tombstone.value is None


def test_a_partition_created_later_is_read_from_its_first_record(broker: Broker, opened: Opener) -> None:
    """Even if new topics are read from their end: records before the discovery must not be lost."""
    topic = broker.new_topic()
    source = opened(topic, offset_start="latest")
    broker.add_partitions(topic, 2)
    broker.produce(topic, numbered(0, 3), partition=1)
    with capture_logs() as logs:
        records = read(source, 3)
    assert values(records) == numbered(0, 3)
    assert events(logs) == [Event.PARTITIONS_CHANGED]


def test_topics_that_match_a_pattern_are_read_from_their_first_record(broker: Broker, opened: Opener) -> None:
    """Those created later too, while reading and between two runs, although reading starts at the end of topics.

    Deleting one stops nothing.
    """
    name = broker.new_topic()
    pattern = {"topics_pattern": rf"{name}-[a-z]+", "offset_start": "latest"}
    source = opened(**pattern)
    assert source.poll(max_records=1, timeout_s=0.1) == []
    for topic in (f"{name}-a", f"x{name}-a", f"{name}-9"):
        broker.create_topic(topic)
        broker.produce(topic, numbered(0, 3))
    records = read(source, 3)
    broker.create_topic(f"{name}-b")
    broker.produce(f"{name}-b", numbered(3, 6))
    records += read(source, 3)
    assert [(record.origin.topic, record.offset) for record in records] == [
        (f"{name}-{letter}", offset) for letter in "ab" for offset in range(3)
    ]
    position, identity = after(Position(), records), source.identity
    source.close()
    broker.delete_topic(f"{name}-a")
    broker.create_topic(f"{name}-c")
    broker.produce(f"{name}-c", numbered(6, 9))
    again = KafkaSource(broker.settings(**QUICK, **pattern))
    assert dict(again.seek(position, identity)) == {
        TopicPartition(f"{name}-b", 0): 3,
        TopicPartition(f"{name}-c", 0): 0,
    }
    assert values(read(again, 3)) == numbered(6, 9)
    broker.delete_topic(f"{name}-c")
    poll_for(again, 1.0)
    broker.produce(f"{name}-b", numbered(9, 10))
    assert values(read(again, 1)) == numbered(9, 10)
    with capture_logs() as logs:
        again.commit(after(position, records), "note")
    assert events(logs) == [Event.OFFSETS_COMMITTED]
    again.close()


def test_retention_that_overtakes_a_reader_is_a_gap(broker: Broker, opened: Opener) -> None:
    """The same while reading: poll raises with the exact offsets."""
    topic = broker.new_topic()
    broker.produce(topic, numbered(0, 10))
    source = opened(topic)
    broker.delete_records(topic, 0, before=6)
    with pytest.raises(OffsetGapError, match=r"must resume at offset 0, its log begins at 6"):
        read(source, 1)


def skipped(logs: list[Any]) -> list[tuple[str, int, int, str]]:
    """Partition, exact offsets and policy of each skipped gap; each is logged as a warning."""
    found = [entry for entry in logs if entry["event"] == Event.OFFSETS_SKIPPED]
    assert all(entry["log_level"] == "warning" for entry in found)
    return [(entry["partition"], entry["lost_from"], entry["lost_to"], entry["policy"]) for entry in found]


def test_retention_while_the_daemon_was_down_may_be_skipped(broker: Broker) -> None:
    """The lost offsets are logged once, and reading begins where the policy says; other partitions are not moved."""
    policy, resumed_at, topic = "latest", 10, broker.new_topic(partitions=2)
    one, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
    for partition in (0, 1):
        broker.produce(topic, numbered(0, 10), partition)
    broker.delete_records(topic, 0, before=6)
    source = KafkaSource(broker.settings(topic, **QUICK, offset_gap_policy=policy))
    with capture_logs() as logs:
        start = source.seek(Position({one: 2, other: 8}))
    assert dict(start) == {one: resumed_at, other: 8}
    assert skipped(logs) == [(f"{topic}-0", 2, resumed_at, policy)]
    broker.produce(topic, numbered(10, 12))
    records = read(source, 12 - resumed_at + 2)
    assert [r.offset for r in records if r.origin == one] == list(range(resumed_at, 12))
    assert list(source.gaps) == []
    source.close()


def test_retention_that_overtakes_a_reader_may_be_skipped(broker: Broker, opened: Opener) -> None:
    """The same while reading; `gaps` lists it."""
    policy, resumed_at, topic = "earliest", 6, broker.new_topic()
    for value in numbered(0, 10):
        broker.produce(topic, [value])  # one batch each, fetched one at a time
    source = opened(topic, offset_gap_policy=policy, max_partition_fetch_bytes=1, max_poll_records=1)
    (first,) = read(source, 1)
    broker.delete_records(topic, 0, before=6)
    with capture_logs() as logs:
        records = [first, *poll_for(source, 2.0)]
        broker.produce(topic, numbered(10, 12))
        records += read(source, 2 + 10 - resumed_at - len([r for r in records if r.offset >= resumed_at]))
    lost_from = max(r.offset for r in records if r.offset < 6) + 1  # records fetched before are still returned
    assert [r.offset for r in records] == [*range(lost_from), *range(resumed_at, 12)]
    assert skipped(logs) == [(f"{topic}-0", lost_from, resumed_at, policy)]
    assert list(source.gaps) == [Gap(TopicPartition(topic, 0), lost_from, resumed_at)]


def test_a_topic_created_again_between_two_runs_is_a_gap(broker: Broker, opened: Opener) -> None:
    """Its id differs, even if the offsets fit and gaps may be skipped; a snapshot without an id cannot detect it."""
    topic = broker.new_topic()
    broker.produce(topic, numbered(0, 10))
    before = opened(topic)
    position, identity = Position({TopicPartition(topic, 0): 4}), before.identity
    assert list(identity) == [topic]
    assert dict(before.seek(position, identity)) == dict(position)
    broker.delete_topic(topic)
    broker.create_topic(topic)
    broker.produce(topic, numbered(0, 20))
    for begin in (0, 6):
        broker.delete_records(topic, 0, before=begin)
        after = KafkaSource(broker.settings(topic, offset_gap_policy="earliest"))
        with capture_logs() as logs, pytest.raises(OffsetGapError, match=rf"{topic} .*created again.* --fresh"):
            after.seek(position, identity)
        assert skipped(logs) == []
        after.close()
    unaware = opened(topic, offset_gap_policy="earliest")
    assert dict(unaware.seek(position)) == {TopicPartition(topic, 0): 6}


def test_a_topic_created_again_is_no_gap_to_skip(broker: Broker, opened: Opener) -> None:
    """If the new log begins past the position it looks like retention; the id is checked first."""
    topic = broker.new_topic()
    broker.produce(topic, numbered(0, 2))
    source = opened(topic, offset_gap_policy="earliest", metadata_max_age_ms=60_000)
    read(source, 2)
    broker.delete_topic(topic)
    broker.create_topic(topic)
    broker.produce(topic, numbered(0, 20))
    broker.delete_records(topic, 0, before=15)
    with capture_logs() as logs, pytest.raises(OffsetGapError, match="deleted and created again"):
        read(source, 5, timeout_s=10.0)
    assert skipped(logs) == []


def test_aborted_records_are_skipped_and_markers_are_neither_lag_nor_stall(broker: Broker, opened: Opener) -> None:
    """Transaction markers have offsets and are no records: a log that ends with them has been read completely."""
    topic = broker.new_topic()
    broker.transact(topic, numbered(0, 3), commit=True)
    broker.transact(topic, numbered(3, 6), commit=False)
    source = opened(topic, stall_timeout_s=0.3)
    records = read(source, 3)
    assert values(records) == numbered(0, 3)
    with capture_logs() as logs:
        assert poll_for(source, 1.0) == []
    assert events(logs) == []
    assert source.lag(after(Position(), records)) == {TopicPartition(topic, 0): 0}


def test_a_topic_deleted_beside_another_does_not_stop_it(broker: Broker, opened: Opener) -> None:
    """The deleted one has no leader any more, which is logged; created again it is a gap, as alone."""
    topic, deleted = broker.new_topic(), broker.new_topic()
    broker.produce(topic, numbered(0, 3))
    source = opened(topic, deleted)
    records = read(source, 3)
    broker.delete_topic(deleted)
    with capture_logs() as logs:
        poll_for(source, 2.0)
        broker.produce(topic, numbered(3, 6))
        records += read(source, 3)
        lag = source.lag(after(Position(), records))
    assert values(records) == numbered(0, 6)
    assert lag.keys() == {TopicPartition(topic, 0)}
    assert [entry["without_leader"] for entry in logs if "without_leader" in entry] == [[f"{deleted}-0"]]
    broker.create_topic(deleted)
    with pytest.raises(OffsetGapError, match=f"{deleted} must have the same id"):
        poll_for(source, 30.0)


def test_no_lag_is_committed_behind_a_transaction(broker: Broker, opened: Opener) -> None:
    """Where all records are trained, the stored offset lies after the markers, also after those that come later."""
    topic = broker.new_topic(partitions=2)
    origin = TopicPartition(topic, 0)
    broker.transact(topic, numbered(0, 3), commit=True)
    source = opened(topic, group_id="lagging")
    read(source, 3)
    source.commit(Position({origin: 2, TopicPartition(topic, 1): 0}), "not all")
    assert broker.committed("lagging")[topic, 0] == (2, "not all")
    source.commit(Position({origin: 3, TopicPartition(topic, 1): 0}), "all")
    assert broker.committed("lagging") == {(topic, 0): (4, "all"), (topic, 1): (0, "all")}
    broker.transact(topic, numbered(3, 6), commit=False)
    poll_for(source, 1.0)
    assert broker.committed("lagging")[topic, 0] == (8, "all")


def test_a_commit_is_visible_in_the_group(broker: Broker, opened: Opener) -> None:
    """Lag tools show the position and the snapshot's name; the daemon never reads it back."""
    topic = broker.new_topic(partitions=2)
    source = opened(topic, group_id="shown")
    with capture_logs() as logs:
        source.commit(Position({TopicPartition(topic, 0): 3, TopicPartition(topic, 1): 0}), "snapshot-7")
    assert events(logs) == [Event.OFFSETS_COMMITTED]
    assert broker.committed("shown") == {(topic, 0): (3, "snapshot-7"), (topic, 1): (0, "snapshot-7")}


def test_a_missing_topic_is_named_with_the_command_that_creates_it(broker: Broker, opened: Opener) -> None:
    """Reading creates no topic."""
    with pytest.raises(SourceError, match=rf"topic nowhere must exist .*--bootstrap-server {broker.servers} --create"):
        opened("nowhere")


class Tampered:
    """A consumer with another `poll`."""

    def __init__(self, consumer: Any, poll: Callable[[Any], Any]) -> None:
        self._consumer = consumer
        self._poll = poll

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def poll(self, **options: Any) -> Any:
        return self._poll(lambda: self._consumer.poll(**options))


def tamper(monkeypatch: pytest.MonkeyPatch, poll: Callable[[Any], Any]) -> None:

    def built(settings: KafkaSettings, bootstrap_s: float) -> Tampered:
        return Tampered(new_consumer(settings, bootstrap_s), poll)

    monkeypatch.setattr("connectors.kafka.source.new_consumer", built)


def test_an_error_of_the_consumer_replaces_it_and_loses_nothing(
    broker: Broker, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an exception the old consumer might loop forever; the new one continues from our own offsets."""
    topic = broker.new_topic()
    broker.produce(topic, numbered(0, 10))
    polls = iter(range(1000))

    def poll(fetch: Callable[[], Any]) -> Any:
        if next(polls) in (1, 4):
            raise ValueError("a damaged batch")
        return fetch()

    tamper(monkeypatch, poll)
    source = opened(topic, max_poll_records=2)
    with capture_logs() as logs:
        assert values(read(source, 10)) == numbered(0, 10)
    assert events(logs) == [Event.SOURCE_REBUILT] * 2


def test_a_silent_consumer_is_replaced(broker: Broker, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that grows while polls stay empty is a fault of the client: a new client reads it."""
    topic = broker.new_topic()
    broker.produce(topic, numbered(0, 3))
    start = time.monotonic()

    def poll(fetch: Callable[[], Any]) -> Any:
        if time.monotonic() < start + 1.0:
            time.sleep(0.02)
            return {}
        return fetch()

    tamper(monkeypatch, poll)
    source = opened(topic, stall_timeout_s=0.5)
    with capture_logs() as logs:
        assert values(read(source, 3)) == numbered(0, 3)
    assert Event.SOURCE_REBUILT in events(logs)
    assert logs[0]["reason"].startswith(f"no record of {topic}-0 for 0.5 s although its log has unread records. ")


def test_a_batch_that_is_larger_than_the_client_accepts_is_named(broker: Broker, opened: Opener) -> None:
    """kafka-python drops the connection and only logs it; the error names this cause and the setting."""
    topic = broker.new_topic(max_message_bytes=str(16 << 20))
    broker.produce_compressed(topic, "gzip", os.urandom(9 << 20))
    quick = {"fetch_max_bytes": 1 << 20, "stall_timeout_s": 0.3, "lag_interval_s": 0.2}
    message = (
        rf"{topic}-0 at offset 0 failed 4 times: .*batch of more than {9 << 20} bytes is never delivered: .*"
        r"raise source\.kafka\.fetch\.max\.bytes"
    )
    with pytest.raises(SourceError, match=message):
        poll_for(opened(topic, **quick), 60.0)
    assert len(read(opened(topic, **{**quick, "fetch_max_bytes": 9 << 20}), 1)) == 1


def test_damage_on_the_brokers_disk_is_detected_and_named(broker: Broker, opened: Opener) -> None:
    """A flipped byte in a log segment: the records before it are returned, then an error names the offset.

    A partition without unread records is not named.
    """
    topic, idle = broker.new_topic(), broker.new_topic()
    broker.produce(topic, [b"good"])
    broker.produce(topic, [b"target" * 10])
    broker.flip_byte(topic, b"target")
    source = opened(topic, idle)
    assert values(read(source, 1)) == [b"good"]
    with (
        capture_logs() as logs,
        pytest.raises(
            SourceError, match=rf"readable, {topic}-0 at offset 1 failed 4 times: .*--skip-records {topic}:0:1\.\.TO"
        ),
    ):
        poll_for(source, 30.0)
    assert events(logs) == [Event.SOURCE_REBUILT] * 3


def test_an_operator_skips_damage(broker: Broker, opened: Opener) -> None:
    """Skipped offsets that cannot be read are records without content; those after them are read."""
    topic = broker.new_topic(partitions=2)
    broker.produce(topic, [b"good", b"target" * 10, b"good"])
    broker.produce(topic, [b"other"], partition=1)
    broker.flip_byte(topic, b"target")
    origin = TopicPartition(topic, 0)
    broker.produce(topic, [b"after"])
    source = KafkaSource(broker.settings(topic, **QUICK))
    source.seek(Position(), skipped=[OffsetRange(origin, 0, 2)])
    records = [record for record in read(source, 5) if record.origin == origin]
    assert [(record.offset, record.value) for record in records if not record.unreadable] == [(3, b"after")]
    assert [record.offset for record in records if record.unreadable] == [0, 1, 2]
    assert source.reached[origin] == 4
    source.close()


def test_a_header_name_that_is_not_utf8_is_a_record_that_says_so(broker: Broker, opened: Opener) -> None:
    """The records around it are read; it has its value, and the name with replacement."""
    topic = broker.new_topic()
    broker.produce(topic, [b"before"])
    broker.produce(topic, [b"odd"], headers=[(HeaderName(b"Gr\xf6\xdfe"), b"1"), ("h", b"2")])
    broker.produce(topic, [b"after"])
    with capture_logs() as logs:
        before, odd, after = read(opened(topic), 3)
    assert (before.unreadable, after.unreadable, after.value) == ("", "", b"after")
    assert odd.unreadable.startswith("header names must be UTF-8")
    assert (odd.value, odd.headers) == (b"odd", (("Gr\ufffd\ufffde", b"1"), ("h", b"2")))
    assert Event.SOURCE_REBUILT not in events(logs)


def test_a_batch_that_would_fill_the_memory_is_named(broker: Broker, opened: Opener) -> None:
    """8 MiB of zeros in a few kilobytes: the source does not decompress them, and names their offset."""
    topic = broker.new_topic()
    broker.produce(topic, [b"good"])
    broker.produce_compressed(topic, "zstd", bytes(8 << 20))
    source = opened(topic, max_decompressed_bytes=1 << 20)
    assert values(read(source, 1)) == [b"good"]
    with pytest.raises(
        SourceError, match=rf"{topic}-0 at offset 1 failed 4 times: .*a zstd batch must expand to at most"
    ):
        poll_for(source, 30.0)
    assert len(read(opened(topic), 2)) == 2


def test_a_codec_without_its_library_is_named(broker: Broker, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many attempts as for any unreadable offset, with the package to install."""
    topic = broker.new_topic()
    broker.produce_compressed(topic, "zstd", bytes(1000))
    monkeypatch.setattr("kafka.codec.zstd", None)
    source = opened(topic)
    with pytest.raises(SourceError, match=rf"{topic}-0 at offset 0 failed 4 times: .*zstd.*'streamlearn\[codecs\]'"):
        poll_for(source, 30.0)


def test_reading_continues_after_a_killed_broker_restarts(broker: Broker, opened: Opener) -> None:
    """The outage is logged once, and every record is returned once."""
    topic = broker.new_topic(partitions=2)
    broker.produce(topic, numbered(0, 50), partition=0)
    broker.produce(topic, numbered(50, 100), partition=1)
    source = opened(topic, max_poll_records=7, lag_interval_s=0.5, request_timeout_ms=5_000)
    records = read(source, 20)
    broker.kill()
    with capture_logs() as logs:
        records += poll_for(source, 3.0)
        assert source.lag(Position()) == {}
        with capture_logs() as refused:
            source.commit(Position({TopicPartition(topic, 0): 5}), "snapshot-8")
        assert events(refused) == [Event.OFFSET_COMMIT_FAILED]
        broker.start()
        broker.produce(topic, numbered(100, 110), partition=1)
        records += read(source, 110 - len(records), timeout_s=40.0)
    assert sorted(values(records), key=lambda value: int(value or 0)) == numbered(0, 110)
    assert events(logs) == [Event.SOURCE_UNREACHABLE, Event.SOURCE_REACHABLE], logs


def test_half_open_connections_do_not_block(broker: Broker, opened: Opener) -> None:
    """While a broker answers nothing, polls return in time; every record is returned once."""
    topic = broker.new_topic()
    broker.produce(topic, numbered(0, 60))
    source = opened(topic, max_poll_records=7, lag_interval_s=0.5, request_timeout_ms=3_000)
    records = read(source, 20)
    longest = 0.0
    with broker.frozen():
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            started = time.monotonic()
            records += source.poll(max_records=100, timeout_s=0.2)
            longest = max(longest, time.monotonic() - started)
    assert longest < 20.0  # a few seconds beyond the timeout on a busy machine, never forever
    broker.produce(topic, numbered(60, 70))
    records += read(source, 70 - len(records), timeout_s=40.0)
    assert values(records) == numbered(0, 70)
