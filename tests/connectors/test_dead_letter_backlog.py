"""The backlog of dead letters."""

import pytest

from connectors.dead_letters import DeadLetterBacklog
from streamlearn.errors import DeadLetterError, Reason
from streamlearn.stream.record import Record, RecordId, TopicPartition
from streamlearn.stream.source import DeadLetter

ORIGIN = TopicPartition("events", 0)


def dead_letter(offset: int, size: int = 100) -> DeadLetter:
    return DeadLetter(Record(ORIGIN, offset, b"x" * size), Reason.NOT_JSON, "no JSON")


def offsets(backlog: DeadLetterBacklog) -> list[int]:
    return [each.record.offset for each in backlog]


def test_dead_letters_keep_their_order_until_they_are_written() -> None:
    """`drop` removes those of the written records, `clear` all of them."""
    backlog = DeadLetterBacklog()
    for offset in range(4):
        backlog.add(dead_letter(offset))
    size = backlog.bytes
    backlog.drop({RecordId(ORIGIN, 1), RecordId(ORIGIN, 2)})
    assert offsets(backlog) == [0, 3]
    assert backlog.bytes == size // 2
    backlog.clear()
    assert (len(backlog), backlog.bytes) == (0, 0)


def test_a_full_backlog_refuses_the_next_dead_letter() -> None:
    """One that alone exceeds the limit is accepted, so that it can be written at all."""
    backlog = DeadLetterBacklog(max_bytes=1000)
    backlog.add(dead_letter(0, size=5000))
    with pytest.raises(DeadLetterError, match="must accept dead letters, found 1 waiting"):
        backlog.add(dead_letter(1))
    assert offsets(backlog) == [0]
