"""From the source to the batch: which records form a batch, what becomes a dead letter, and when a flush is due."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from streamlearn.errors import DeadLetterError, Reason, RecordError
from streamlearn.events import Event
from streamlearn.settings import StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.intake import (
    MAX_DEAD_LETTERED,
    BatchEnd,
    Batcher,
    FlushReason,
    GivenUp,
    Intake,
    RecordFilter,
    runs_of,
)
from streamlearn.stream.position import OffsetRange, PartitionRun, Position, RecordId, TopicPartition
from streamlearn.stream.record import Batch, DeadLetteredRecord, Example, Record
from streamlearn.stream.source import DeadLetter
from tests.doubles import SetClock, example
from tests.memory import MemoryDeadLetters, MemorySource

ONE, TWO = TopicPartition("t", 1), TopicPartition("t", 2)
SETTINGS = StreamSettings(batch_records=4, batch_tokens=20, max_tokens=20)
BAD = -1
"""The length of a record that cannot be decoded."""

lengths_of_records = st.lists(st.sampled_from([BAD, 1, 2, 5, 9, 20]), max_size=40)


class LengthDecoder(Decoder):
    """A record's value is its length in tokens."""

    def __init__(self) -> None:
        self.decoded: list[RecordId] = []

    def decode(self, record: Record) -> Example:
        self.decoded.append(record.id)
        assert record.value is not None
        if int(record.value) == BAD:
            raise RecordError(Reason.EMPTY, "made to fail")
        return example([9] * int(record.value))


class ChunkedSource(MemorySource):
    """Returns its records in polls of given sizes, some of them empty; then in polls of any size."""

    def __init__(self, records: Sequence[Record], sizes: Sequence[int]) -> None:
        super().__init__(records)
        self._sizes = list(sizes)

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        size = self._sizes.pop(0) if self._sizes else max_records
        return super().poll(max_records=min(size, max_records), timeout_s=timeout_s)


def records_of(lengths: Sequence[int], origin: TopicPartition = ONE) -> list[Record]:
    return [Record(origin, offset, str(length).encode()) for offset, length in enumerate(lengths)]


def batches_of(source: MemorySource) -> list[Batch]:
    """All batches of a finite source, read in the same way as by the daemon's loop."""
    intake = Intake(source, Position(), LengthDecoder(), MemoryDeadLetters(), SETTINGS)
    batches: list[Batch] = []
    while True:
        batch = intake.next_batch(timeout_s=0.0)
        if batch is not None:
            batches.append(batch)
        elif source.exhausted:
            return batches + intake.flush()


def shape(batch: Batch) -> tuple[Any, ...]:
    """The parts of a batch that a replay must repeat: the records, their order, and their lengths."""
    lengths = [len(e) for e in batch.examples]
    return [record.id for record in batch.records], lengths, batch.dead_lettered, batch.runs


def fill(lengths: Sequence[int], settings: StreamSettings = SETTINGS) -> list[list[int]]:
    """Lengths of the examples of each batch, including the last, partly filled one."""
    batcher, batches = Batcher(settings), []
    for record, length in zip(records_of(lengths), lengths, strict=True):
        batches += batcher.add(record, example([9] * length))
    return [[len(e) for e in batch.examples] for batch in batches + batcher.flush()]


@given(lengths_of_records, st.lists(st.integers(0, 7), max_size=30))
def test_polls_do_not_decide_where_a_batch_ends(lengths: list[int], sizes: list[int]) -> None:
    """The same records form the same batches, however they are split into polls."""
    records = records_of(lengths)
    in_one_poll = batches_of(MemorySource(records))
    in_pieces = batches_of(ChunkedSource(records, sizes))
    assert list(map(shape, in_pieces)) == list(map(shape, in_one_poll))


@given(lengths_of_records)
def test_every_record_is_in_one_batch_in_order(lengths: list[int]) -> None:
    """All batches together hold each record of the stream once, decoded and dead-lettered ones each in order."""
    records = records_of(lengths)
    batches = batches_of(MemorySource(records))
    assert [r for batch in batches for r in batch.records] == [r for r in records if r.value != b"-1"]
    dead_lettered = [DeadLetteredRecord(r.id, Reason.EMPTY, "made to fail") for r in records if r.value == b"-1"]
    assert [r for batch in batches for r in batch.dead_lettered] == dead_lettered
    in_runs = [(run.first_offset, run.next_offset) for batch in batches for run in batch.runs]
    assert [offset for first, after in in_runs for offset in range(first, after)] == list(range(len(records)))


@given(lengths_of_records)
def test_a_batch_is_as_full_as_its_limits_allow(lengths: list[int]) -> None:
    """No batch exceeds its limits, and no batch but the last could have held the next example too."""
    batches = batches_of(MemorySource(records_of(lengths)))
    for batch in batches:
        assert len(batch.examples) <= SETTINGS.batch_records
        assert batch.num_tokens == sum(map(len, batch.examples)) <= SETTINGS.batch_tokens
    for batch, following in pairwise(batches):
        if following.examples and len(batch.examples) < SETTINGS.batch_records:
            assert batch.num_tokens + len(following.examples[0]) > SETTINGS.batch_tokens


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([], []),
        ([1, 1, 1, 1, 1], [[1, 1, 1, 1], [1]]),  # by count
        ([9, 9, 9], [[9, 9], [9]]),  # the third would exceed 20 tokens and opens the next batch
        ([10, 10, 1], [[10, 10], [1]]),  # exactly full
        ([5, 20, 5], [[5], [20], [5]]),  # one record closes two batches
        ([20, 20], [[20], [20]]),
    ],
)
def test_batches_close_by_count_or_tokens(lengths: list[int], batches: list[list[int]]) -> None:
    """The cases of the rule, worked out by hand."""
    assert fill(lengths) == batches


def test_a_record_may_close_two_batches_at_once() -> None:
    """A record that would exceed one batch's limit and fills the next closes both."""
    batcher = Batcher(SETTINGS)
    short, long = records_of([5, 20])
    assert batcher.add(short, example([9] * 5)) == []
    first, second = batcher.add(long, example([9] * 20))
    assert (first.records, second.records) == ((short,), (long,))
    assert batcher.flush() == []


def test_many_dead_lettered_records_close_a_batch() -> None:
    """MAX_DEAD_LETTERED of them close it, however full it is, so that the position advances."""
    batcher = Batcher(SETTINGS)
    good, *bad = records_of([3] + [BAD] * (2 * MAX_DEAD_LETTERED + 1))
    assert batcher.add(good, example([9] * 3)) == []
    closed = [batcher.add_dead_lettered(record, Reason.EMPTY) for record in bad]
    assert [len(batches) for batches in closed].count(1) == 2
    assert [i for i, batches in enumerate(closed, start=1) if batches] == [MAX_DEAD_LETTERED, 2 * MAX_DEAD_LETTERED]
    first, second = (batches[0] for batches in closed if batches)
    assert (first.records, second.records) == ((good,), ())
    assert len(first.dead_lettered) == len(second.dead_lettered) == MAX_DEAD_LETTERED
    assert second.runs == (PartitionRun("t", 1, MAX_DEAD_LETTERED + 1, 2 * MAX_DEAD_LETTERED + 1, MAX_DEAD_LETTERED),)
    (last,) = batcher.flush()
    assert len(last.dead_lettered) == 1


def test_a_batch_lists_its_records_in_reading_order() -> None:
    """Dead-lettered records are part of a run; another partition ends it, gaps in the offsets do not."""
    batcher = Batcher(SETTINGS)
    batcher.add(Record(ONE, 3, b""), example([9, 9]))
    batcher.add_dead_lettered(Record(ONE, 7, b""), Reason.EMPTY)
    batcher.add(Record(TWO, 0, b""), example([9, 9]))
    batcher.add(Record(ONE, 8, b""), example([9, 9]))
    (batch,) = batcher.flush()
    assert batch.runs == (PartitionRun("t", 1, 3, 8, 2), PartitionRun("t", 2, 0, 1, 1), PartitionRun("t", 1, 8, 9, 1))
    assert [run.origin for run in batch.runs] == [ONE, TWO, ONE]


@given(st.lists(st.tuples(st.sampled_from([ONE, TWO]), st.integers(1, 3)), max_size=30))
def test_runs_hold_each_record_once(steps: list[tuple[TopicPartition, int]]) -> None:
    """Neighboring runs differ in partition, counts add up, and each run ends after its last record, despite gaps."""
    ends, ids = {ONE: 0, TWO: 0}, []
    for origin, gap in steps:
        ids.append(RecordId(origin, ends[origin] + gap))
        ends[origin] += gap
    runs = runs_of(ids)
    assert all(one.origin != other.origin for one, other in pairwise(runs))
    taken = iter(ids)
    for run in runs:
        of_run = [next(taken) for _ in range(run.num_records)]
        assert {origin for origin, _ in of_run} == {run.origin}
        assert (run.first_offset, run.next_offset) == (of_run[0].offset, of_run[-1].offset + 1)
    assert next(taken, None) is None


PAIRS = StreamSettings(batch_records=2, batch_tokens=20, max_tokens=20, linger_s=10.0)


class Bench:
    """An intake with access to its source and its sink."""

    decodes_ahead = False
    """Set by the fixture `both_ways`."""

    def __init__(
        self,
        lengths: list[int],
        *,
        sink: MemoryDeadLetters | None = None,
        given_up: GivenUp = MappingProxyType({}),
        endless: bool = False,
        journalled: Sequence[BatchEnd] = (),
        skipped: Sequence[OffsetRange] = (),
    ) -> None:
        self.records = records_of(lengths)
        self.source = MemorySource(self.records, endless=endless)
        self.clock = SetClock()
        self.sink = sink or MemoryDeadLetters()
        self.decoder = LengthDecoder()
        self.intake = Intake(
            self.source,
            Position(),
            self.decoder,
            self.sink,
            PAIRS,
            known=self.sink.recall(None),
            journalled=journalled,
            skipped=skipped,
            given_up=given_up,
            ahead=ThreadPoolExecutor(1) if self.decodes_ahead else None,
            clock=self.clock,
        )

    def batches(self) -> list[Batch]:
        """All batches to the end of the source; dead letters are flushed then."""
        batches = []
        while (batch := self.intake.next_batch(timeout_s=0.0)) is not None or not self.source.exhausted:
            batches += [] if batch is None else [batch]
        batches += self.intake.flush()
        self.sink.flush()
        return batches

    def dead_lettered_offsets(self) -> list[int]:
        return [dead_letter.record.offset for dead_letter in self.sink.flushed]


@pytest.fixture(params=["on request", "ahead"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "decodes_ahead", request.param == "ahead")


@pytest.mark.usefixtures("both_ways")
def test_a_record_is_batched_or_dead_lettered() -> None:
    """Unusable records become dead letters, with the reason and in order, and are listed in the current batch."""
    bench = Bench([3, BAD, 3, BAD, 3])
    first, last = bench.batches()
    assert first.records == (bench.records[0], bench.records[2])
    assert first.dead_lettered == (DeadLetteredRecord(RecordId(ONE, 1), Reason.EMPTY, "made to fail"),)
    assert (last.records, last.dead_lettered) == (
        (bench.records[4],),
        (DeadLetteredRecord(RecordId(ONE, 3), Reason.EMPTY, "made to fail"),),
    )
    assert bench.sink.flushed == [DeadLetter(bench.records[offset], Reason.EMPTY, "made to fail") for offset in (1, 3)]


@pytest.mark.usefixtures("both_ways")
def test_dead_letters_are_not_sent_again_after_a_restart() -> None:
    """The same records fail again, and each still has one dead letter."""
    before = Bench([BAD, 3, BAD, 3])
    wanted = before.batches()
    again = Bench([BAD, 3, BAD, 3, BAD], sink=MemoryDeadLetters(before.sink.flushed))
    first, last = again.batches()
    assert [first.dead_lettered] == [batch.dead_lettered for batch in wanted]
    assert [dead_lettered.id.offset for dead_lettered in last.dead_lettered] == [4]
    assert again.dead_lettered_offsets() == [0, 2, 4]


@pytest.mark.usefixtures("both_ways")
def test_a_given_up_record_is_not_decoded() -> None:
    """Records given up for a reason become dead letters with that reason, without being decoded."""
    bench = Bench([3, 3, 3], given_up={RecordId(ONE, 1): (Reason.NOT_FINITE_UPDATE, "refused before")})
    (batch,) = bench.batches()
    assert batch.records == (bench.records[0], bench.records[2])
    assert batch.dead_lettered == (DeadLetteredRecord(RecordId(ONE, 1), Reason.NOT_FINITE_UPDATE, "refused before"),)
    assert [(sent.record.offset, sent.reason) for sent in bench.sink.flushed] == [(1, Reason.NOT_FINITE_UPDATE)]
    assert RecordId(ONE, 1) not in bench.decoder.decoded


@pytest.mark.usefixtures("both_ways")
def test_one_poll_may_fill_several_batches() -> None:
    """Each call returns one batch; the source is polled again after the last of them."""
    bench = Bench([1] * 5)
    assert [len(batch.records) for batch in bench.batches()] == [2, 2, 1]


def test_no_batch_until_it_is_full() -> None:
    """Only a flush closes a partly filled one, and only the caller flushes."""
    bench = Bench([3])
    assert bench.intake.next_batch(timeout_s=0.0) is None
    assert bench.intake.next_batch(timeout_s=0.0) is None
    assert bench.intake.flush_due is FlushReason.END
    assert bench.intake.open_runs == runs_of([bench.records[0].id])
    (batch,) = bench.intake.flush()
    assert batch.records == tuple(bench.records)
    assert bench.intake.open_runs == ()
    assert bench.intake.flush() == []


@pytest.mark.usefixtures("both_ways")
def test_a_flush_is_due_after_the_linger() -> None:
    """Not while a full batch is ready; again after another quiet time."""
    bench = Bench([3, 3, 3], endless=True)
    assert bench.intake.next_batch(timeout_s=0.0) is not None
    for wait_s, due in ((0.0, None), (9.0, None), (1.0, FlushReason.LINGER)):
        bench.clock.now += wait_s
        assert bench.intake.next_batch(timeout_s=0.0) is None
        assert bench.intake.flush_due is due
    (batch,) = bench.intake.flush()
    assert batch.records == (bench.records[2],)
    assert bench.intake.flush_due is None
    bench.source.append(*records_of([3] * 6)[3:])
    bench.clock.now += 60.0
    assert bench.intake.next_batch(timeout_s=0.0) is not None
    assert bench.intake.flush_due is None
    bench.intake.next_batch(timeout_s=0.0)
    bench.clock.now += 10.0
    assert bench.intake.flush_due is FlushReason.LINGER
    bench.intake.postpone_flush()
    assert bench.intake.flush_due is None


def ends_of(*lasts: int, flush: int | None = None) -> list[BatchEnd]:
    """Journalled batches that end with these offsets; after the last record `flush` the stream was flushed."""
    return [BatchEnd(RecordId(ONE, last), flush=last == flush) for last in lasts]


@pytest.mark.usefixtures("both_ways")
def test_a_journalled_flush_is_repeated_without_waiting() -> None:
    """At the same record, although more have arrived since; the next batches are formed from those after it."""
    bench = Bench([3] * 6, endless=True, journalled=ends_of(1, 2, flush=2))
    first = bench.intake.next_batch(timeout_s=0.0)
    assert first is not None
    assert bench.intake.next_batch(timeout_s=0.0) is None
    assert bench.intake.flush_due is FlushReason.JOURNAL
    (second,) = bench.intake.flush()
    third = bench.intake.next_batch(timeout_s=0.0)
    assert third is not None
    assert [batch.records for batch in (first, second, third)] == [
        tuple(bench.records[:2]),
        (bench.records[2],),
        tuple(bench.records[3:5]),
    ]
    assert bench.intake.flush_due is None


@given(
    lengths_of_records,
    st.sets(st.integers(0, 39)),
    st.integers(0, 40),
    st.lists(st.integers(0, 7), max_size=30),
)
def test_a_restart_forms_the_same_batches(
    lengths: list[int], flushes: set[int], journalled: int, sizes: list[int]
) -> None:
    """Flushed after any records and killed after any batch: the batches are those of the process that was killed."""
    records = records_of(lengths)
    whole, ends = Batcher(SETTINGS), list[BatchEnd]()
    before: list[Batch] = []
    for record, length in zip(records, lengths, strict=True):
        bad = length == BAD
        closed = (
            whole.add_dead_lettered(record, Reason.EMPTY, "made to fail")
            if bad
            else whole.add(record, example([9] * length))
        )
        closed += whole.flush() if record.offset in flushes else []
        before += closed
        ends += [BatchEnd(RecordId(ONE, batch.runs[-1].next_offset - 1), flush=False) for batch in closed]
        if record.offset in flushes and closed:
            ends[-1] = BatchEnd(record.id, flush=True)
    ends = ends[:journalled]
    source = ChunkedSource(records, sizes)
    intake = Intake(source, Position(), LengthDecoder(), MemoryDeadLetters(), SETTINGS, journalled=ends)
    again: list[Batch] = []
    while len(again) < len(ends):
        batch = intake.next_batch(timeout_s=0.0)
        if batch is not None:
            again.append(batch)
        elif intake.flush_due is not None:
            again += intake.flush()
    assert list(map(shape, again)) == list(map(shape, before[: len(ends)]))


def test_records_that_must_be_read_again_are_waited_for() -> None:
    """They are in the log: a broker that takes long to return them is not a quiet stream."""
    records = records_of([3] * 3)
    bench = Bench([3], endless=True, journalled=ends_of(2))
    for _ in range(3):
        assert bench.intake.next_batch(timeout_s=0.0) is None
        bench.clock.now += 60.0
        assert bench.intake.flush_due is None
    bench.source.append(*records[1:])
    assert bench.intake.next_batch(timeout_s=0.0) is not None
    bench.intake.next_batch(timeout_s=0.0)
    bench.clock.now += 10.0
    assert bench.intake.flush_due is FlushReason.LINGER


def test_a_journalled_record_that_is_gone_holds_up_no_flush() -> None:
    """Compaction removed two of five: the others are a batch and a flushed rest, as soon as the last has come."""
    bench = Bench([], endless=True, journalled=ends_of(4, flush=4))
    bench.source.append(*(record for record in records_of([3] * 5) if record.offset not in (1, 3)))
    first = bench.intake.next_batch(timeout_s=0.0)
    assert first is not None
    assert bench.intake.next_batch(timeout_s=0.0) is None
    assert bench.intake.flush_due is FlushReason.JOURNAL
    (second,) = bench.intake.flush()
    assert [[record.offset for record in batch.records] for batch in (first, second)] == [[0, 2], [4]]


def test_a_source_that_has_passed_a_flush_is_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last records before it are gone, and none comes after it: nothing else would show that it is reached."""
    bench = Bench([3], endless=True, journalled=ends_of(4, flush=4))
    assert bench.intake.next_batch(timeout_s=0.0) is None
    assert bench.intake.flush_due is None
    monkeypatch.setattr(MemorySource, "reached", {ONE: 5})
    assert bench.intake.flush_due is FlushReason.JOURNAL


def test_skipped_records_are_dead_letters_and_in_no_batch() -> None:
    """The position can move past them once the batch before them is accounted for."""
    bench = Bench([3] * 6, skipped=[OffsetRange(ONE, 1, 2)])
    batches = bench.batches()
    assert [[record.offset for record in batch.records] for batch in batches] == [[0, 3], [4, 5]]
    assert [(sent.record.offset, sent.reason, sent.message) for sent in bench.sink.flushed] == [
        (offset, Reason.SKIPPED, "an operator rolled back and skipped offsets t:1:1..2") for offset in (1, 2)
    ]
    assert bench.intake.take_skipped(Position({ONE: 0})) == []
    assert bench.intake.take_skipped(Position({ONE: 1})) == [PartitionRun("t", 1, 1, 3, 2)]


@pytest.mark.usefixtures("both_ways")
def test_a_segment_of_unusable_records_makes_batches_without_examples() -> None:
    """The position advances by MAX_DEAD_LETTERED records per batch, each with its dead letter."""
    bench = Bench([BAD] * (MAX_DEAD_LETTERED + 50))
    full = None
    while full is None:
        full = bench.intake.next_batch(timeout_s=0.0)
    assert (len(full.dead_lettered), full.examples) == (MAX_DEAD_LETTERED, ())
    (rest,) = bench.batches()
    assert len(rest.dead_lettered) == 50
    assert bench.dead_lettered_offsets() == list(range(MAX_DEAD_LETTERED + 50))


class FullSink(MemoryDeadLetters):
    """Accepts nothing."""

    def send(self, dead_letter: DeadLetter) -> None:
        raise DeadLetterError("the disk is full")


def test_a_dead_letter_that_cannot_be_sent_stops_the_stream() -> None:
    """Going on would lose the record, so the error is raised."""
    bench = Bench([3, BAD, 3], sink=FullSink())
    with pytest.raises(DeadLetterError, match="the disk is full"):
        bench.intake.next_batch(timeout_s=0.0)


def test_a_payload_is_never_logged() -> None:
    """The log names the record's offset and the reason, not its content."""
    record = Record(ONE, 5, b"private words", key=b"private key", headers=(("name", b"private header"),))
    with capture_logs() as events:
        Bench([]).intake.set_aside(record, Reason.NOT_JSON, "not JSON")
    (event,) = events
    assert event["event"] == Event.RECORD_DEAD_LETTERED
    assert (event["origin"], event["offset"], event["reason"]) == ("t-1", 5, Reason.NOT_JSON)
    assert "private" not in repr(event)


def observed(
    offsets: list[int], *ranges: tuple[int, int], start: Position | None = None
) -> tuple[RecordFilter, list[int]]:
    """A filter that has seen records with these offsets, and the offsets of those that stay."""
    records = RecordFilter(
        Position({ONE: offsets[0]}) if start is None else start, [OffsetRange(ONE, *span) for span in ranges]
    )
    return records, [offset for offset in offsets if records.observe(Record(ONE, offset, b"{}")) is None]


def test_the_position_passes_skipped_records_once_all_before_are_accounted_for() -> None:
    """And once only."""
    records, stay = observed(list(range(10)), (3, 5))
    assert stay == [0, 1, 2, 6, 7, 8, 9]
    assert records.take_skipped(Position({ONE: 2})) == []
    (run,) = records.take_skipped(Position({ONE: 3}))
    assert (run.origin, run.first_offset, run.next_offset, run.num_records) == (ONE, 3, 6, 3)
    assert records.take_skipped(Position({ONE: 6})) == []


def test_a_log_with_gaps_is_passed_too() -> None:
    """Offsets 4 and 6 do not exist, as after compaction."""
    records, stay = observed([0, 1, 5, 7, 8], (4, 7))
    assert stay == [0, 1, 8]
    (run,) = records.take_skipped(Position({ONE: 2}))
    assert (run.next_offset, run.num_records) == (8, 2)


def test_skipped_records_at_the_very_start_are_passed_at_once() -> None:
    records, stay = observed([4, 5, 6], (0, 5))
    assert stay == [6]
    assert records.take_skipped(Position({ONE: 4}))[0].next_offset == 6


def test_a_partition_that_no_position_names_is_not_passed_before_its_first_record() -> None:
    """Its first record was returned and is not accounted for yet."""
    records, stay = observed([0, 1, 2, 3], (1, 2), start=Position())
    assert stay == [0, 3]
    assert records.take_skipped(Position({TWO: 9})) == []
    assert len(records.take_skipped(Position({ONE: 1}))) == 1
