"""Kafka code without a broker: clients that find none, topics and their permissions, stalled partitions."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from kafka.admin import ACLOperation
from structlog.testing import capture_logs

from connectors.kafka.admin import Topic, check_identity, identity_of, topic_of
from connectors.kafka.clients import new_admin, new_consumer, new_producer
from connectors.kafka.offsets import PartitionMonitor
from connectors.kafka.source import KafkaSource
from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.events import Event
from streamlearn.stream.position import Position, TopicPartition
from streamlearn.stream.record import Record
from tests.connectors.kafka.doubles import SteppingClock, settings


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


@pytest.mark.parametrize("build", [new_consumer, new_producer, new_admin])
def test_a_client_that_finds_no_kafka_leaves_nothing_behind(build: Callable[..., Any]) -> None:
    """Its peer accepts connections and never answers, as a load balancer without brokers does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers = f"127.0.0.1:{silent.getsockname()[1]}"
        before = (*threading.enumerate(), *descriptors())
        with pytest.raises(SourceError, match=f"{servers} accepts TCP connections but no PLAINTEXT connection"):
            build(settings(bootstrap_servers=servers), 0.2)
        assert {*threading.enumerate(), *descriptors()} <= {*before}, "what earlier tests left may go meanwhile"


def descriptors() -> set[str]:
    """What the process's descriptors are open on; a socket has a number that no later one gets."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself, or closed meanwhile
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def test_a_consumer_is_not_rebuilt_at_every_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the cluster accepts connections and does not answer, the pauses between attempts grow to ten seconds."""
    clock = SteppingClock()
    attempts: list[float] = []

    def fail(*_: Any) -> None:
        attempts.append(clock.now)
        raise SourceError("no answer")

    monkeypatch.setattr("connectors.kafka.source.new_consumer", fail)
    monkeypatch.setattr("connectors.kafka.source.is_reachable", lambda _: True)
    source = KafkaSource(settings(), clock=clock, sleep=clock.sleep)
    while clock.now < 60.0:
        assert source.poll(max_records=8, timeout_s=0.25) == ()
    assert attempts == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 25.5, 35.5, 45.5, 55.5]
    source.close()


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
