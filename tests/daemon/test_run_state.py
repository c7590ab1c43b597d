"""The position and gaps in the loop's own state."""

from streamlearn.daemon.checkpoint import RunState
from streamlearn.stream.batch import Ledger
from streamlearn.stream.record import Gap, Position, TopicPartition

A, B = TopicPartition("a", 0), TopicPartition("b", 0)


def test_the_position_moves_over_a_gap_once_all_before_it_is_accounted_for() -> None:
    """Records read before the gap may still be untrained: until then a snapshot must name their position."""
    state = RunState(Ledger(Position({A: 4, B: 7})))
    gaps = [Gap(A, 6, 9), Gap(A, 9, 12)]
    state.skip_gaps(gaps)
    assert dict(state.ledger.position) == {A: 4, B: 7}
    assert not state.moved_since_save

    state.ledger.position = Position({A: 6, B: 7})
    state.skip_gaps(gaps)
    assert dict(state.ledger.position) == {A: 12, B: 7}
    assert state.moved_since_save


def test_what_is_not_read_keeps_its_place_in_the_position() -> None:
    """Only what is read is published and committed."""
    state = RunState(Ledger(Position({A: 4, B: 7})), not_read=frozenset([B]))
    assert state.read_position == Position({A: 4})
    assert state.ledger.position == Position({A: 4, B: 7})


def test_a_gap_is_passed_once() -> None:
    """After it, the same list changes nothing."""
    state = RunState(Ledger(Position({A: 14})))
    state.skip_gaps([Gap(A, 6, 9), Gap(A, 9, 12)])
    assert dict(state.ledger.position) == {A: 14}
    assert not state.moved_since_save
