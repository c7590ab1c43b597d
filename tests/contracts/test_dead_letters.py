"""The contract of `DeadLetters`, tested on every implementation."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from connectors.dead_letters import FileDeadLetters
from connectors.kafka.dead_letters import KafkaDeadLetters
from streamlearn.errors import Reason
from streamlearn.stream.position import RecordId, TopicPartition
from streamlearn.stream.record import Record
from streamlearn.stream.source import DeadLetter, DeadLetters
from tests.memory import MemoryDeadLetters

if TYPE_CHECKING:
    from tests.broker import Broker

ORIGIN = TopicPartition("events", 1)

Open = Callable[[], DeadLetters]


def dead(offset: int, value: bytes | None = b"{", key: bytes | None = None, message: str = "no JSON") -> DeadLetter:
    record = Record(ORIGIN, offset, value, key, headers=(("trace", b"\x00\xff"),), timestamp_ms=1_700_000_000_000)
    return DeadLetter(record, Reason.NOT_JSON, message)


def written(*offsets: int) -> frozenset[RecordId]:
    return frozenset(RecordId(ORIGIN, offset) for offset in offsets)


@pytest.fixture(
    params=[
        "memory",
        "file",
        pytest.param("kafka, two partitions", marks=pytest.mark.broker),
    ]
)
def open_sink(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Return a function that opens the same sink, as a restarted daemon does."""
    if request.param == "memory":
        flushed: list[DeadLetter] = []
        return lambda: MemoryDeadLetters(flushed)
    if request.param == "file":
        return lambda: FileDeadLetters(tmp_path / "state" / "dead.jsonl")
    broker: Broker = request.getfixturevalue("broker")
    request.getfixturevalue("leaked_sockets")
    topic = broker.new_topic(partitions=2)
    return lambda: KafkaDeadLetters(broker.settings("events"), topic)


def test_recalls_what_was_flushed_after_the_mark(open_sink: Open) -> None:
    """A restarted daemon gets the dead letters that were written after its snapshot's mark."""
    sink = open_sink()
    sink.send(dead(1))
    sink.flush()
    mark = orjson.loads(orjson.dumps(sink.mark()))
    sink.send(dead(2))
    sink.send(dead(5))
    sink.flush()
    sink.close()

    again = open_sink()
    assert again.recall(mark) == written(2, 5)
    assert again.recall(None) == written(1, 2, 5)
    assert again.recall(again.mark()) == frozenset()
    again.close()


def test_mark_waits_for_flush(open_sink: Open) -> None:
    """The mark does not cover a dead letter that was sent and not flushed."""
    sink = open_sink()
    mark = sink.mark()
    assert sink.recall(None) == sink.recall(mark) == frozenset()
    sink.send(dead(3))
    assert sink.mark() == mark
    sink.flush()
    assert sink.mark() != mark
    sink.close()
    sink.close()


def test_nothing_is_written_twice_after_crashes(open_sink: Open) -> None:
    """A daemon that may crash after any dead letter, and sends only those not recalled, writes each once."""
    snapshot = None
    for crashes_after in (0, 1, 3):
        sink = open_sink()
        known = sink.recall(snapshot)
        for offset in itertools.islice(range(4), crashes_after):
            if RecordId(ORIGIN, offset) not in known:
                sink.send(dead(offset))
        sink.flush()
        sink.close()  # before a snapshot could move the mark
    last = open_sink()
    assert last.recall(snapshot) == written(0, 1, 2)
    mark = last.mark()
    last.close()
    assert open_and_recall(open_sink, mark) == frozenset()


def open_and_recall(open_sink: Open, mark: object) -> frozenset[RecordId]:
    assert isinstance(mark, dict)
    sink = open_sink()
    found = sink.recall(mark)
    sink.close()
    return found


def test_accepts_any_bytes(open_sink: Open) -> None:
    """What made the record unusable does not make its dead letter unwritable."""
    sink = open_sink()
    sink.send(dead(0, value=None))
    sink.send(dead(1, value=b""))
    sink.send(dead(2, value=bytes(range(256)) + b"\r\n", key=b"\x00"))
    sink.send(dead(3, message="lone \ud800 surrogate\nand a newline"))
    sink.send(dead(4, value=b"x" * 300_000))
    sink.flush()
    assert sink.recall(None) == written(0, 1, 2, 3, 4)
    sink.close()


def test_a_mark_of_another_sink_recalls_everything(open_sink: Open) -> None:
    """Without information about this sink, recalling less would write dead letters twice."""
    sink = open_sink()
    sink.send(dead(7))
    sink.flush()
    assert sink.recall({"file": "elsewhere.jsonl", "bytes": 1, "letters": 0}) == written(7)
    sink.close()
