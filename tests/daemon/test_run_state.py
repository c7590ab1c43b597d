"""The loop's own state: the counts of records add up, and the position moves over gaps."""

from hypothesis import given
from hypothesis import strategies as st

from streamlearn.daemon.checkpoint import Ledger, RunState
from streamlearn.errors import Reason
from streamlearn.settings import StreamSettings
from streamlearn.stream.intake import Batcher
from streamlearn.stream.record import Batch, Gap, Position, Record, TopicPartition
from tests.doubles import example

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


ORIGINS = [TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)]
SETTINGS = StreamSettings(batch_records=3, batch_tokens=100, max_tokens=50)

streams = st.lists(st.tuples(st.sampled_from(ORIGINS), st.integers(1, 4), st.booleans()), max_size=40)
"""For each record: its partition, its distance from the previous offset, and whether it can be decoded."""


def batches_of(stream: list[tuple[TopicPartition, int, bool]]) -> tuple[list[Record], list[Batch]]:
    batcher, ends, records = Batcher(SETTINGS), dict.fromkeys(ORIGINS, -1), []
    batches: list[Batch] = []
    for origin, gap, good in stream:
        ends[origin] += gap
        records.append(Record(origin, ends[origin], b"{}"))
        if good:
            batches += batcher.add(records[-1], example([9, 9]))
        else:
            batches += batcher.add_dead_lettered(records[-1], Reason.EMPTY)
    return records, batches + batcher.flush()


@given(streams, st.data())
def test_records_read_are_trained_or_dead_lettered(
    stream: list[tuple[TopicPartition, int, bool]], data: st.DataObject
) -> None:
    """After every batch, per partition: read = trained + dead-lettered, and the position follows the last record."""
    records, batches = batches_of(stream)
    ledger, num_read = Ledger(), 0
    wanted = {"trained": dict.fromkeys(ORIGINS, 0), "dead": dict.fromkeys(ORIGINS, 0)}
    for batch in batches:
        refused = data.draw(st.booleans())
        ledger.account(batch, refused=refused)
        for record in batch.records:
            wanted["dead" if refused else "trained"][record.origin] += 1
        for dead_lettered in batch.dead_lettered:
            wanted["dead"][dead_lettered.id.origin] += 1
        num_read += len(batch.records) + len(batch.dead_lettered)
        seen = records[:num_read]
        assert ledger.position == Position({record.origin: record.offset + 1 for record in seen})
        for origin in ORIGINS:
            expected = sum(record.origin == origin for record in seen)
            assert ledger.trained[origin] + ledger.dead_lettered[origin] == expected
            assert (ledger.trained[origin], ledger.dead_lettered[origin]) == (
                wanted["trained"][origin],
                wanted["dead"][origin],
            )
    assert num_read == len(records)


@given(streams, st.data())
def test_a_restored_ledger_continues_like_the_original(
    stream: list[tuple[TopicPartition, int, bool]], data: st.DataObject
) -> None:
    """Rows and position are its whole state: restored after any batch, it ends with the same rows and position."""
    _, batches = batches_of(stream)
    stop = data.draw(st.integers(0, len(batches)))
    straight, stopped = Ledger(), Ledger()
    for batch in batches:
        straight.account(batch, refused=False)
    for batch in batches[:stop]:
        stopped.account(batch, refused=False)
    position = Position.from_json(stopped.position.to_json())
    resumed = Ledger.restore(position, [*stopped.rows()])
    assert resumed.rows() == stopped.rows()
    for batch in batches[stop:]:
        resumed.account(batch, refused=False)
    assert resumed.rows() == straight.rows()
    assert resumed.position == straight.position


def test_rows_name_every_known_partition_in_order() -> None:
    """A partition without records has a row of zeros; rows are sorted."""
    ledger = Ledger(Position({ORIGINS[2]: 5, ORIGINS[0]: 0}))
    ledger.account(Batch((Record(ORIGINS[1], 4, b"{}"),), (example([9, 9]),)), refused=False)
    assert ledger.rows() == [("a", 0, 0, 0, 0), ("a", 1, 1, 0, 0), ("b", 0, 0, 0, 0)]


def test_a_batch_moves_only_its_own_partitions() -> None:
    """Other positions stay the same; after gaps a position is the last offset plus one, not a count."""
    a0, a1, _ = ORIGINS
    batcher = Batcher(SETTINGS)
    batcher.add(Record(a1, 7, b"{}"), example([9, 9]))
    batcher.add_dead_lettered(Record(a1, 11, b"{}"), Reason.EMPTY)
    ledger = Ledger(Position({a0: 3, a1: 5}))
    (batch,) = batcher.flush()
    ledger.account(batch, refused=True)
    assert ledger.position == Position({a0: 3, a1: 12})
    assert ledger.rows() == [("a", 0, 0, 0, 0), ("a", 1, 0, 2, 0)]


def test_held_out_records_are_counted_separately() -> None:
    """Trained, dead-lettered and held-out records add up to the records read."""
    origin = ORIGINS[0]
    batcher = Batcher(SETTINGS)
    batcher.add_dead_lettered(Record(origin, 0, b"{}"), Reason.EMPTY)
    for offset in (1, 2):
        batcher.add(Record(origin, offset, b"{}"), example([9, 9]))
    (batch,) = batcher.flush()
    ledger = Ledger()
    ledger.account(batch, refused=False, held_out=[1])
    assert ledger.rows() == [("a", 0, 1, 1, 1)]
    assert Ledger.restore(ledger.position, ledger.rows()).rows() == ledger.rows()
