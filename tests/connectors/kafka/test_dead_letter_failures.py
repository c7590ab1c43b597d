"""Dead letters in a topic whose cluster fails at a chosen request."""

import pytest

from connectors.kafka.dead_letters import KafkaDeadLetters
from streamlearn.errors import DeadLetterError, Reason
from streamlearn.stream.record import Record, RecordId, TopicPartition
from streamlearn.stream.source import DeadLetter
from tests.connectors.kafka.fake_cluster import FakeCluster
from tests.connectors.kafka.kit import settings

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
