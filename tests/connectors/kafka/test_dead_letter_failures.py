"""Dead letters in a topic without a broker: a cluster that fails at a chosen request, and messages of other writers."""

from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from connectors.dead_letters import PREFIX
from connectors.kafka.clients import wait_until_reachable
from connectors.kafka.dead_letters import KafkaDeadLetters, _dead_letter
from streamlearn.errors import DeadLetterError, Reason
from streamlearn.events import Event
from streamlearn.stream.position import RecordId, TopicPartition
from streamlearn.stream.record import Record
from streamlearn.stream.source import DeadLetter
from tests.connectors.kafka.doubles import FakeCluster, SteppingClock, settings

ORIGIN = TopicPartition("events", 2)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A cluster that answers everything, until a test says otherwise."""
    fake = FakeCluster()
    fake.install(monkeypatch)
    return fake


def dead_letter(offset: int, size: int = 1) -> DeadLetter:
    return DeadLetter(Record(ORIGIN, offset, b"{" * size), Reason.NOT_JSON, "no JSON")


def test_what_arrived_is_found_after_a_reading_that_failed(cluster: FakeCluster) -> None:
    """The reconnection reads from the last `flush`, however often it takes."""
    sink = KafkaDeadLetters(settings(), "dead")
    cluster.acknowledges = False
    sink.send(dead_letter(7))
    with pytest.raises(DeadLetterError, match="cannot be written"):
        sink.flush()
    cluster.acknowledges = True
    cluster.is_readable = False
    for _ in range(2):
        with pytest.raises(DeadLetterError, match="cannot be read"):
            sink.flush()
    cluster.is_readable = True
    sink.flush()
    assert cluster.records == [RecordId(ORIGIN, 7)]
    sink.close()


def test_a_cluster_that_does_not_tell_its_offsets_is_an_error(cluster: FakeCluster) -> None:
    """At the start too, where nothing may stay open."""
    cluster.tells_offsets = False
    with pytest.raises(DeadLetterError, match=r"the dead-letter topic dead must be usable: .*Failed to get offsets"):
        KafkaDeadLetters(settings(), "dead")
    assert cluster.open_clients == 0


def test_many_large_dead_letters_are_written_between_two_snapshots(cluster: FakeCluster) -> None:
    """The backlog is full only if the brokers accept none."""
    sink = KafkaDeadLetters(settings(), "dead")
    for offset in range(5):
        sink.send(dead_letter(offset, size=30 << 20))
    sink.flush()
    assert cluster.records == [RecordId(ORIGIN, offset) for offset in range(5)]
    cluster.acknowledges = False
    sink.send(dead_letter(5, size=30 << 20))
    sink.send(dead_letter(6, size=30 << 20))
    with pytest.raises(DeadLetterError, match=r"must accept dead letters, found 2 waiting \(60 MiB\)"):
        sink.send(dead_letter(7, size=30 << 20))
    sink.close()


def test_a_broker_that_starts_later_is_waited_for(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the source does, because after a power cut the machines come back in any order."""
    clock = SteppingClock()
    monkeypatch.setattr("connectors.kafka.dead_letters.wait_until_reachable", wait_until_reachable)
    monkeypatch.setattr("connectors.kafka.clients.is_reachable", lambda _: clock.now > 50.0)
    with capture_logs() as logs:
        sink = KafkaDeadLetters(settings(), "dead", clock=clock, sleep=clock.sleep)
    assert [entry["event"] for entry in logs] == [Event.SOURCE_UNREACHABLE]
    assert cluster.open_clients == 2
    sink.close()


def test_without_a_broker_the_start_fails_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the topic and the address."""
    clock = SteppingClock()
    monkeypatch.setattr("connectors.kafka.clients.is_reachable", lambda _: False)
    message = (
        r"the dead-letter topic dead must be usable: a Kafka broker must be reachable at 127\.0\.0\.1:9, .* for 60 s"
    )
    with pytest.raises(DeadLetterError, match=message):
        KafkaDeadLetters(settings(), "dead", clock=clock, sleep=clock.sleep)
    assert 55.0 < clock.now <= 60.0


def test_headers_without_a_value_are_read() -> None:
    """The record's own stay as they are; the reason's count as absent."""
    place: list[tuple[str, bytes | None]] = [
        (f"{PREFIX}topic", b"a"),
        (f"{PREFIX}partition", b"0"),
        (f"{PREFIX}offset", b"7"),
    ]

    def read(*headers: tuple[str, bytes | None]) -> DeadLetter | None:
        return _dead_letter(SimpleNamespace(value=b"{", key=None, headers=list(headers), timestamp=17, partition=0))

    dead_letter = read(*place, (f"{PREFIX}exception.message", None), ("trace", None))
    assert dead_letter is not None
    assert (dead_letter.record.id, dead_letter.message) == (RecordId(TopicPartition("a", 0), 7), "")
    assert dead_letter.record.headers == (("trace", None),)
    assert read(*place[:2], (f"{PREFIX}offset", None)) is None
    assert read(("__streamlearn.replay.of", b"a:0:7:17")) is None  # a mark that release 0.1 wrote
