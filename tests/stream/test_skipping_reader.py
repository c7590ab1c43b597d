"""A stream without skipped records, and a position that moves past them."""

from connectors.memory import MemoryDeadLetters, MemorySource, records_from
from streamlearn.stream.intake import DeadLetterWriter, SkippingReader
from streamlearn.stream.record import OffsetRange, Position, TopicPartition

ONE, TWO = TopicPartition("memory", 0), TopicPartition("memory", 1)


def reader_of(
    offsets: list[int], *ranges: tuple[int, int], start: Position | None = None
) -> tuple[SkippingReader, MemoryDeadLetters]:
    """A reader of records with these offsets of `ONE`, and where its dead letters are."""
    records = [each for offset in offsets for each in records_from([b"{}"], start=offset)]
    source, sink = MemorySource(records), MemoryDeadLetters()
    position = source.seek(start or Position({ONE: offsets[0]}))
    skipped = [OffsetRange(ONE, *each) for each in ranges]
    return SkippingReader(source, position, skipped, DeadLetterWriter(sink)), sink


def poll(reader: SkippingReader) -> list[int]:
    return [record.offset for record in reader.poll(max_records=99, timeout_s=0.0)]


def test_skipped_records_are_dead_letters_and_nothing_else() -> None:
    """The rest of the stream is returned unchanged."""
    reader, sink = reader_of(list(range(10)), (3, 5))
    assert poll(reader) == [0, 1, 2, 6, 7, 8, 9]
    sink.flush()
    assert [(each.record.offset, each.reason) for each in sink.flushed] == [
        (3, "skipped"),
        (4, "skipped"),
        (5, "skipped"),
    ]


def test_the_position_passes_them_once_all_before_are_accounted_for() -> None:
    """And once only."""
    reader, _ = reader_of(list(range(10)), (3, 5))
    poll(reader)
    assert reader.take_passed(Position({ONE: 2})) == []
    (run,) = reader.take_passed(Position({ONE: 3}))
    assert (run.origin, run.first_offset, run.next_offset, run.num_records) == (ONE, 3, 6, 3)
    assert reader.take_passed(Position({ONE: 6})) == []


def test_a_log_with_gaps_is_passed_too() -> None:
    """Offsets 4 and 6 do not exist, as after compaction."""
    reader, _ = reader_of([0, 1, 5, 7, 8], (4, 7))
    assert poll(reader) == [0, 1, 8]
    (run,) = reader.take_passed(Position({ONE: 2}))
    assert (run.next_offset, run.num_records) == (8, 2)


def test_skipped_records_at_the_very_start_are_passed_at_once() -> None:
    reader, _ = reader_of([4, 5, 6], (0, 5))
    assert poll(reader) == [6]
    assert reader.take_passed(Position({ONE: 4}))[0].next_offset == 6


def test_a_partition_that_no_position_names_is_not_passed_before_its_first_record() -> None:
    """Its first record was returned and is not accounted for yet."""
    source, sink = MemorySource(records_from([b"{}"] * 4)), MemoryDeadLetters()
    source.seek(Position())
    reader = SkippingReader(source, Position(), [OffsetRange(ONE, 1, 2)], DeadLetterWriter(sink))
    assert poll(reader) == [0, 3]
    assert reader.take_passed(Position({TWO: 9})) == []
    assert len(reader.take_passed(Position({ONE: 1}))) == 1
