"""What every `DeadLetters` promises, asked of each implementation."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from connectors.dead_letters import FileDeadLetters
from connectors.kafka.dead_letters import KafkaDeadLetters
from connectors.memory import MemoryDeadLetters
from streamlearn.errors import Reason
from streamlearn.stream.record import Record, TopicPartition
from streamlearn.stream.source import DeadLetter, DeadLetters

if TYPE_CHECKING:
    from tests.broker import Broker

ORIGIN = TopicPartition("events", 1)

Open = Callable[[], DeadLetters]


def letter(offset: int, value: bytes | None = b"{", key: bytes | None = None, message: str = "no JSON") -> DeadLetter:
    """A letter about the record at `offset`."""
    record = Record(ORIGIN, offset, value, key, headers=(("trace", b"\x00\xff"),), timestamp_ms=1_700_000_000_000)
    return DeadLetter(record, Reason.NOT_JSON, message)


def written(*offsets: int) -> frozenset[tuple[TopicPartition, int]]:
    """What recall returns for these offsets."""
    return frozenset((ORIGIN, offset) for offset in offsets)


@pytest.fixture(
    params=[
        "memory",
        "file",
        pytest.param("kafka, two partitions", marks=pytest.mark.broker),
    ]
)
def open_letters(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same sink anew, as a restarted daemon would."""
    if request.param == "memory":
        kept: list[DeadLetter] = []
        return lambda: MemoryDeadLetters(kept)
    if request.param == "file":
        return lambda: FileDeadLetters(tmp_path / "state" / "dead.jsonl")
    broker: Broker = request.getfixturevalue("broker")
    request.getfixturevalue("leaked_sockets")
    topic = broker.new_topic(partitions=2)
    return lambda: KafkaDeadLetters(broker.settings("events"), topic)


def test_a_new_sink_recalls_nothing(open_letters: Open) -> None:
    """Before the first letter there is none to skip."""
    sink = open_letters()
    assert sink.recall(None) == frozenset()
    assert sink.recall(sink.mark()) == frozenset()
    sink.close()


def test_recalls_what_was_flushed_after_the_mark(open_letters: Open) -> None:
    """A restarted daemon learns which letters behind its snapshot's mark are written already."""
    sink = open_letters()
    sink.send(letter(1))
    sink.flush()
    mark = orjson.loads(orjson.dumps(sink.mark()))
    sink.send(letter(2))
    sink.send(letter(5))
    sink.flush()
    sink.close()

    again = open_letters()
    assert again.recall(mark) == written(2, 5)
    assert again.recall(None) == written(1, 2, 5)
    assert again.recall(again.mark()) == frozenset()
    again.close()


def test_mark_waits_for_flush(open_letters: Open) -> None:
    """A letter that was sent and not flushed is not covered by the mark."""
    sink = open_letters()
    mark = sink.mark()
    sink.send(letter(3))
    assert sink.mark() == mark
    sink.flush()
    assert sink.mark() != mark
    sink.close()


def test_nothing_is_written_twice_over_crashes(open_letters: Open) -> None:
    """A daemon that dies behind any letter and sends what recall does not name leaves each letter once."""
    snapshot = None
    for dies_after in (0, 1, 3):
        sink = open_letters()
        known = sink.recall(snapshot)
        for offset in itertools.islice(range(4), dies_after):
            if (ORIGIN, offset) not in known:
                sink.send(letter(offset))
        sink.flush()
        sink.close()  # and the snapshot that would have moved the mark was never written
    last = open_letters()
    assert last.recall(snapshot) == written(0, 1, 2)
    marks_move = last.mark()
    last.close()
    assert open_and_recall(open_letters, marks_move) == frozenset()


def open_and_recall(open_letters: Open, mark: object) -> frozenset[tuple[TopicPartition, int]]:
    """What a restart at `mark` finds."""
    assert isinstance(mark, dict)
    sink = open_letters()
    found = sink.recall(mark)
    sink.close()
    return found


def test_takes_any_bytes(open_letters: Open) -> None:
    """Whatever made the record unusable does not make its letter unwritable."""
    sink = open_letters()
    sink.send(letter(0, value=None))
    sink.send(letter(1, value=b""))
    sink.send(letter(2, value=bytes(range(256)) + b"\r\n", key=b"\x00"))
    sink.send(letter(3, message="lone \ud800 surrogate\nand a newline"))
    sink.send(letter(4, value=b"x" * 300_000))
    sink.flush()
    assert sink.recall(None) == written(0, 1, 2, 3, 4)
    sink.close()


def test_a_mark_of_another_sink_recalls_everything(open_letters: Open) -> None:
    """Where the mark says nothing about this sink, skipping less would write twice."""
    sink = open_letters()
    sink.send(letter(7))
    sink.flush()
    assert sink.recall({"file": "elsewhere.jsonl", "bytes": 1, "letters": 0}) == written(7)
    sink.close()


def test_close_twice_is_safe(open_letters: Open) -> None:
    """A sink may be closed again."""
    sink = open_letters()
    sink.close()
    sink.close()
