"""Positions, and ranges of offsets as an operator writes them."""

import re

import pytest

from streamlearn.errors import UsageError
from streamlearn.stream.position import PATTERN, Gap, OffsetRange, Position, RecordId, TopicPartition

A, B = TopicPartition("a", 0), TopicPartition("b", 1)
ORDERS = TopicPartition("orders", 0)


def test_gaps_are_the_skipped_offsets_of_common_partitions() -> None:
    """A partition that only one position names has none, and neither has one that moved back."""
    assert Position({A: 4, B: 9}).gaps_to({A: 6, B: 9}) == [Gap(A, 4, 6)]
    assert Position({A: 4}).gaps_to({A: 2, B: 5}) == []


def test_a_position_survives_json() -> None:
    """As sorted rows of topic, partition and offset."""
    position = Position({B: 1, A: 10})
    assert position.to_json() == [["a", 0, 10], ["b", 1, 1]]
    assert Position.from_json(position.to_json()) == position


def test_both_ends_are_included() -> None:
    skipped = OffsetRange.parse("orders:0:5..7", ())
    assert [offset for offset in range(10) if RecordId(ORDERS, offset) in skipped] == [5, 6, 7]
    assert RecordId(TopicPartition("orders", 1), 6) not in skipped


def test_a_topic_may_hold_colons() -> None:
    """The name of a file may."""
    assert OffsetRange.parse("a:1:b:2:5..7", ()).origin == TopicPartition("a:1:b", 2)


@pytest.mark.parametrize(
    "text", ["", "5", "7..5", "5..", "orders:5..7", "orders:x:5..7", "5..99999999999999999999", "-1..4"]
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"must be given as TOPIC:PARTITION:FROM\.\.TO"):
        OffsetRange.parse(text, [ORDERS])


@pytest.mark.parametrize("partitions", [(), (ORDERS, TopicPartition("orders", 1))])
def test_a_range_without_partition_needs_exactly_one(partitions: tuple[TopicPartition, ...]) -> None:
    with pytest.raises(UsageError, match=f"the stream has {len(partitions)} partitions"):
        OffsetRange.parse("5..7", partitions)


def test_the_pattern_admits_what_is_parsed() -> None:
    for text in ("5..7", "orders:0:5..7", "a:1:b:2:5..7"):
        assert re.match(PATTERN, text)
