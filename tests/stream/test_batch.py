"""Batch boundaries depend on the records only."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.memory import MemoryDeadLetters, MemorySource
from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.batch import MAX_DEAD_LETTERED, Batch, Batcher, DeadLetteredRecord, PartitionRun, runs_of
from streamlearn.stream.decode import Decoder
from streamlearn.stream.intake import DeadLetterWriter, Intake, Merger
from streamlearn.stream.record import Example, Record, RecordId, TopicPartition
from tests.doubles import example

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


def batches_of(source: MemorySource, settings: StreamSettings = SETTINGS, max_records: int = 32) -> list[Batch]:
    """All batches of a finite source, read in the same way as by the daemon's loop."""
    intake = Intake(
        Merger(source),
        LengthDecoder(),
        Batcher(settings),
        DeadLetterWriter(MemoryDeadLetters()),
        max_records=max_records,
    )
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


@given(lengths_of_records, st.lists(st.integers(0, 7), max_size=30), st.integers(1, 50))
def test_polls_do_not_decide_where_a_batch_ends(lengths: list[int], sizes: list[int], max_records: int) -> None:
    """The same records form the same batches, however they are split into polls."""
    records = records_of(lengths)
    in_one_poll = batches_of(MemorySource(records), max_records=1000)
    in_pieces = batches_of(ChunkedSource(records, sizes), max_records=max_records)
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
    """Neighbouring runs differ in partition, counts add up, and each run ends after its last record, despite gaps."""
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
