"""Feed against a real broker."""

import pytest

from connectors.kafka.feed import feed
from streamlearn.errors import SourceError
from tests.broker import Broker

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("leaked_sockets")]


def test_feed_keeps_the_order_and_counts_acknowledged_lines(broker: Broker) -> None:
    """Every line is in the topic, in order, without a key; the last report is the count."""
    topic = broker.new_topic()
    lines = [b'{"text": "%d"}' % number for number in range(4500)]
    reports: list[int] = []
    assert feed(broker.settings(topic), topic, iter(lines), report=reports.append) == 4500
    assert reports == sorted(reports)
    assert reports[-1] == 4500
    messages = broker.read_all(topic)
    assert [message.value for message in messages] == lines
    assert {message.key for message in messages} == {None}


@pytest.mark.parametrize("max_message_bytes", ["1048588", "2000"])
def test_feed_names_a_refused_line(broker: Broker, max_message_bytes: str) -> None:
    """A line that is too large for the client or for the broker."""
    topic = broker.new_topic(max_message_bytes=max_message_bytes)
    broken = [b"a", b"b", b"x" * (2 << 20 if max_message_bytes == "1048588" else 5000), b"c"]
    with pytest.raises(SourceError, match=r"refused line 2: .*TooLarge"):
        feed(broker.settings(topic), topic, broken)


def test_feed_requires_the_topic(broker: Broker) -> None:
    """Feeding a misspelled topic creates nothing."""
    with pytest.raises(SourceError, match="topic nowhere must exist"):
        feed(broker.settings("nowhere"), "nowhere", [b"a"])
