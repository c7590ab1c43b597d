"""Dead letters against a real broker."""

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from connectors.kafka.dead_letters import KafkaDeadLetters, read_topic
from streamlearn.errors import DeadLetterError, Reason
from streamlearn.events import Event
from streamlearn.settings import KafkaSettings
from streamlearn.stream.position import RecordId, TopicPartition
from streamlearn.stream.record import Record
from streamlearn.stream.source import DeadLetter
from tests.broker import Broker

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("leaked_sockets")]

ORIGIN = TopicPartition("events", 2)


def test_a_dead_letter_is_the_record_with_the_reason_in_headers(broker: Broker) -> None:
    """Key, value and own headers unchanged, then Kafka Connect's names under both prefixes; forged ones are removed."""
    topic = broker.new_topic()
    sink = KafkaDeadLetters(broker.settings("events"), topic)
    headers = (("trace", b"\xff"), ("null", None), ("__streamlearn.errors.offset", b"666"))
    record = Record(ORIGIN, 5, b"\x00{", key=b"k", headers=headers, timestamp_ms=17)
    sink.send(DeadLetter(record, Reason.NOT_JSON, "no JSON"))
    sink.flush()
    sink.close()
    (message,) = broker.read_all(topic)
    assert (message.key, message.value) == (b"k", b"\x00{")
    assert message.headers == [
        ("trace", b"\xff"),
        ("null", None),
        ("__streamlearn.errors.topic", b"events"),
        ("__streamlearn.errors.partition", b"2"),
        ("__streamlearn.errors.offset", b"5"),
        ("__streamlearn.errors.stage", b"VALUE_CONVERTER"),
        ("__streamlearn.errors.exception.class.name", b"not_json"),
        ("__streamlearn.errors.exception.message", b"no JSON"),
        ("__streamlearn.errors.timestamp", b"17"),
        ("__connect.errors.topic", b"events"),
        ("__connect.errors.partition", b"2"),
        ("__connect.errors.offset", b"5"),
        ("__connect.errors.stage", b"VALUE_CONVERTER"),
        ("__connect.errors.exception.class.name", b"not_json"),
        ("__connect.errors.exception.message", b"no JSON"),
        ("__connect.errors.connector.name", b"streamlearn"),
        ("__connect.errors.task.id", b"0"),
        ("__connect.errors.class.name", b"streamlearn.stream.decode.Decoder"),
    ]
    (read_back,) = stored(broker.settings("events"), topic)
    assert read_back.record == replace(record, headers=headers[:2])


def test_messages_that_are_no_dead_letters_are_ignored(broker: Broker) -> None:
    """Other messages in the topic do not matter."""
    topic = broker.new_topic()
    broker.produce(topic, [b"hello"])
    sink = KafkaDeadLetters(broker.settings("events"), topic)
    assert sink.recall(None) == frozenset()
    sink.close()


def test_a_missing_dead_letter_topic_is_an_error_at_the_start(broker: Broker) -> None:
    """The message contains the command that creates it."""
    with pytest.raises(
        DeadLetterError, match=r"the dead-letter topic nowhere must be usable: .*--create --topic nowhere"
    ):
        KafkaDeadLetters(broker.settings("events"), "nowhere")


def test_what_is_too_large_for_the_topic_is_written_without_its_content(broker: Broker) -> None:
    """A compressed record has its full size here. Its headers stay, so that a restart finds it, and its neighbors."""
    topic = broker.new_topic()
    settings = broker.settings("events")
    large = Record(ORIGIN, 1, b"x" * (3 << 20), key=b"k", headers=(("trace", b"1"),), timestamp_ms=17)
    sink = KafkaDeadLetters(settings, topic)
    sink.send(dead_letter(0))
    sink.send(DeadLetter(large, Reason.TOO_LARGE, "too long " * 1000))
    sink.send(dead_letter(2))
    with capture_logs() as logs:
        sink.flush()
    sink.close()
    assert logs == [
        {
            "event": Event.DEAD_LETTER_SHORTENED,
            "log_level": "warning",
            "component": "connectors",
            "origin": "events-2",
            "offset": 1,
            "value_bytes": 3 << 20,
        }
    ]
    first, shortened, last = stored(settings, topic)
    assert [first.record.value, last.record.value] == [b"{", b"{"]
    assert shortened.record == Record(ORIGIN, 1, None, timestamp_ms=17)
    assert (shortened.left_out_bytes, shortened.reason) == (3 << 20, "too_large")
    assert shortened.message.startswith("too long too long")
    again = KafkaDeadLetters(settings, topic)
    assert again.recall(None) == {RecordId(ORIGIN, offset) for offset in range(3)}
    again.close()


def test_what_the_client_does_not_send_is_written_without_its_content(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a request is the client's own."""
    monkeypatch.setattr("connectors.kafka.clients._MAX_REQUEST_BYTES", 10_000)
    topic = broker.new_topic()
    sink = KafkaDeadLetters(broker.settings("events"), topic)
    sink.send(DeadLetter(Record(ORIGIN, 0, None, key=b"x" * 20_000), Reason.EMPTY, "no value"))
    sink.flush()
    sink.close()
    (shortened,) = stored(broker.settings("events"), topic)
    assert (shortened.record.key, shortened.left_out_bytes) == (None, 0)


def test_a_refused_dead_letter_is_an_error(broker: Broker) -> None:
    """A dead letter that its topic does not accept even without its content never counts as written."""
    topic = broker.new_topic(max_message_bytes="100")
    sink = KafkaDeadLetters(broker.settings("events"), topic)
    sink.send(DeadLetter(Record(ORIGIN, 0, b"x" * 5000), Reason.NOT_JSON, "no JSON"))
    with pytest.raises(DeadLetterError, match=rf"cannot be written: topic {topic}: .*MessageSizeTooLarge"):
        sink.flush()
    sink.close()


def test_dead_letters_survive_an_outage(broker: Broker) -> None:
    """Those sent during the outage are written once after it, including one that arrived unacknowledged."""
    topic = broker.new_topic()
    sink = KafkaDeadLetters(broker.settings("events", request_timeout_ms=1500), topic)
    sink.send(dead_letter(0))
    sink.flush()
    sink.send(dead_letter(1))
    sink._producer.flush()  # it arrives, and its acknowledgement is not read
    broker.kill()
    sink.send(dead_letter(2))
    for _ in range(2):
        with pytest.raises(DeadLetterError, match="cannot be written"):
            sink.flush()
    sink.send(dead_letter(3))
    broker.start()
    sink.flush()
    sink.send(dead_letter(4))
    sink.flush()
    sink.close()
    written = [dict(message.headers)["__streamlearn.errors.offset"] for message in broker.read_all(topic)]
    assert sorted(written) == [b"0", b"1", b"2", b"3", b"4"]


def stored(settings: KafkaSettings, topic: str) -> list[DeadLetter]:
    return sorted(read_topic(settings, topic), key=lambda dead_letter: dead_letter.record.offset)


def dead_letter(offset: int) -> DeadLetter:
    return DeadLetter(Record(ORIGIN, offset, b"{"), Reason.NOT_JSON, "no JSON")
