"""Feed against a real broker."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from connectors.kafka.feed import FeedResult, feed
from connectors.rows import FeedRecord, Place
from streamlearn.errors import SourceError
from tests.broker import Broker

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("leaked_sockets")]


def records(values: Iterable[bytes]) -> list[FeedRecord]:
    return [FeedRecord(value, Place(Path("a.jsonl"), "line", number)) for number, value in enumerate(values, start=1)]


def test_feed_keeps_the_order_and_counts_acknowledged_lines(broker: Broker) -> None:
    """Every line is in the topic, in order, without a key; the last report is the result."""
    topic = broker.new_topic()
    lines = [b'{"text": "%d"}' % number for number in range(4500)]
    reports: list[FeedResult] = []
    result = feed(broker.settings(topic), topic, iter(records(lines)), report=reports.append)
    assert (result.sent, result.acknowledged) == (4500, 4500)
    counts = [report.acknowledged for report in reports]
    assert counts == sorted(counts)
    assert counts[-1] == 4500
    messages = broker.read_all(topic)
    assert [message.value for message in messages] == lines
    assert {message.key for message in messages} == {None}


@pytest.mark.parametrize("max_message_bytes", ["1048588", "2000"])
def test_feed_names_a_refused_line(broker: Broker, max_message_bytes: str) -> None:
    """A line that is too large for the client or for the broker, and how to go on."""
    topic = broker.new_topic(max_message_bytes=max_message_bytes)
    broken = [b"a", b"b", b"x" * (2 << 20 if max_message_bytes == "1048588" else 5000), b"c"]
    with pytest.raises(SourceError, match=r"refused a\.jsonl line 3: .*TooLarge.* The 2 records before it are in"):
        feed(broker.settings(topic), topic, records(broken))


def test_feed_requires_the_topic(broker: Broker) -> None:
    """Feeding a misspelled topic creates nothing."""
    with pytest.raises(SourceError, match="topic nowhere must exist"):
        feed(broker.settings("nowhere"), "nowhere", records([b"a"]))


def test_what_was_sent_is_acknowledged_when_the_records_end_early(broker: Broker) -> None:
    """As they do when the command is interrupted."""
    topic = broker.new_topic()
    source = iter(records([b"a", b"b", b"c"]))
    result = feed(broker.settings(topic), topic, (next(source) for _ in range(2)))
    assert result.acknowledged == len(broker.read_all(topic)) == 2
