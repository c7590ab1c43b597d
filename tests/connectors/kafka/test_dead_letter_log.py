"""Messages of a dead-letter topic that other writers left there."""

from types import SimpleNamespace

from connectors.dead_letters import PREFIX, DeadLetterId
from connectors.kafka.dead_letters import REPLAY_OF, _dead_letter, replay_of
from streamlearn.stream.record import RecordId, TopicPartition

PLACE = [(f"{PREFIX}topic", b"a"), (f"{PREFIX}partition", b"0"), (f"{PREFIX}offset", b"7")]


def message(*headers: tuple[str, bytes | None]) -> SimpleNamespace:
    """A message as kafka-python returns it."""
    return SimpleNamespace(value=b"{", key=None, headers=list(headers), timestamp=17, partition=0)


def test_a_mark_without_a_value_is_none() -> None:
    """It marks nothing as put back."""
    mark = (REPLAY_OF, b"a:0:7:17")
    assert replay_of(message((REPLAY_OF, None))) is None
    assert replay_of(message(mark, ("trace", None))) == DeadLetterId(RecordId(TopicPartition("a", 0), 7), 17)


def test_headers_without_a_value_are_read() -> None:
    """The record's own become empty, as the source reads them; the reason's count as absent."""
    found = _dead_letter(message(*PLACE, (f"{PREFIX}exception.message", None), ("trace", None)))
    assert found is not None
    assert (found.where, found.message, found.record.headers) == ("a:0:7", "", (("trace", b""),))
    assert _dead_letter(message(*PLACE[:2], (f"{PREFIX}offset", None))) is None
