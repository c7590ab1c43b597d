"""Records and positions."""

from streamlearn.stream.record import Gap, Position, RecordId, TopicPartition

A, B = TopicPartition("a", 0), TopicPartition("b", 1)


def test_a_position_follows_the_last_record_of_each_partition() -> None:
    """It is the last offset plus one, whatever gaps the log has."""
    position = Position({A: 4}).after(RecordId(A, 7), RecordId(B, 0), RecordId(A, 9))
    assert dict(position) == {A: 10, B: 1}
    assert str(position) == "a-0 at 10, b-1 at 1"
    assert str(Position()) == "nowhere yet"


def test_gaps_are_the_skipped_offsets_of_common_partitions() -> None:
    """A partition that only one position names has none, and neither has one that moved back."""
    assert Position({A: 4, B: 9}).gaps_to({A: 6, B: 9}) == [Gap(A, 4, 6)]
    assert Position({A: 4}).gaps_to({A: 2, B: 5}) == []


def test_a_position_survives_json() -> None:
    """As sorted rows of topic, partition and offset."""
    position = Position({B: 1, A: 10})
    assert position.to_json() == [["a", 0, 10], ["b", 1, 1]]
    assert Position.from_json(position.to_json()) == position
