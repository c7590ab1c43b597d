"""The headers of a dead letter."""

from connectors.dead_letters import PREFIX, headers_of, own_headers, record_of
from streamlearn.errors import Reason
from streamlearn.stream.record import Record, RecordId, TopicPartition
from streamlearn.stream.source import DeadLetter

RECORD = Record(TopicPartition("events", 2), 5, b"{", headers=(("trace", b"1"), (f"{PREFIX}offset", b"666")))


def test_headers_identify_their_record() -> None:
    """As text, and as the bytes that Kafka stores."""
    headers = headers_of(DeadLetter(RECORD, Reason.NOT_JSON, "no JSON"))
    assert record_of(headers) == RECORD.id == RecordId(TopicPartition("events", 2), 5)
    assert record_of([(name, value.encode()) for name, value in headers.items()]) == RECORD.id


def test_a_record_cannot_forge_the_headers() -> None:
    """Its own headers with the prefix are removed."""
    assert own_headers(RECORD) == [("trace", b"1")]


def test_other_headers_identify_no_record() -> None:
    """Without one of the names, or with an offset that is not a number."""
    assert record_of({}) is None
    assert record_of([(f"{PREFIX}topic", b"a"), (f"{PREFIX}partition", b"0"), (f"{PREFIX}offset", b"x")]) is None


def test_a_header_without_a_value_is_absent() -> None:
    """Kafka allows it, and a foreign writer's must not stop a start; headers beside those needed are not read."""
    headers: list[tuple[str, bytes | None]] = [
        (name, value.encode()) for name, value in headers_of(DeadLetter(RECORD, Reason.NOT_JSON, "")).items()
    ]
    assert record_of([*headers, ("trace", None), (f"{PREFIX}stage", None)]) == RECORD.id
    assert record_of([("trace", None)]) is None
    assert record_of([(name, None if name.endswith("offset") else value) for name, value in headers]) is None


def test_an_update_that_was_refused_has_its_own_stage() -> None:
    """Kafka Connect's TASK_PUT; every other reason is a fault of the value."""
    stages = {reason: headers_of(DeadLetter(RECORD, reason, ""))[f"{PREFIX}stage"] for reason in Reason}
    assert [reason for reason, stage in stages.items() if stage == "TASK_PUT"] == [
        Reason.NOT_FINITE_UPDATE,
        Reason.SKIPPED,
    ]
    assert set(stages.values()) == {"TASK_PUT", "VALUE_CONVERTER"}
