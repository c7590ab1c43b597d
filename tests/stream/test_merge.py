"""Merging of several partitions into one order, which is the same after a restart."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from connectors.memory import MemorySource
from streamlearn.events import Event
from streamlearn.stream.batch import PartitionRun, runs_of
from streamlearn.stream.merge import Mark, Merger
from streamlearn.stream.record import Gap, Record, TopicPartition

ORIGINS = [TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)]

orders = st.lists(st.sampled_from(ORIGINS), max_size=30)
"""The partition of each next record; offsets count up in each partition."""


def records_of(order: Sequence[TopicPartition]) -> list[Record]:
    ends = dict.fromkeys(ORIGINS, 0)
    records = []
    for origin in order:
        records.append(Record(origin, ends[origin], b"{}"))
        ends[origin] += 1
    return records


@st.composite
def restarts(draw: st.DrawFn) -> tuple[list[Record], list[Record], int]:
    """Records in the order first taken, the same in another order, and how many of them are journalled."""
    order = draw(orders)
    again = draw(st.permutations(order))
    return records_of(order), records_of(again), draw(st.integers(0, len(order)))


def take_all(merger: Merger, source: MemorySource, max_records: int) -> list[Record]:
    taken: list[Record] = []
    while not source.exhausted:
        taken += merger.take(max_records=max_records, timeout_s=0.0)
    return taken


@given(orders, st.integers(1, 9))
def test_live_records_come_as_the_source_returns_them(order: list[TopicPartition], max_records: int) -> None:
    """Without a journal the order is the source's."""
    source = MemorySource(records_of(order))
    assert take_all(Merger(source), source, max_records) == records_of(order)


@given(restarts(), st.integers(1, 9))
def test_a_journalled_order_is_repeated_exactly(
    restart: tuple[list[Record], list[Record], int], max_records: int
) -> None:
    """The journalled records keep their old order in whatever order they arrive; the others follow, none is lost."""
    before, now, journalled = restart
    source = MemorySource(now)
    merger = Merger(source, runs_of([record.id for record in before[:journalled]]))
    taken = take_all(merger, source, max_records)
    assert taken[:journalled] == before[:journalled]
    for origin in ORIGINS:
        assert [r.offset for r in taken if r.origin == origin] == [r.offset for r in before if r.origin == origin]


@given(restarts(), orders, st.integers(1, 9))
def test_after_the_journal_the_order_is_live(
    restart: tuple[list[Record], list[Record], int], later: list[TopicPartition], max_records: int
) -> None:
    """After the last journalled record, the order is the source's again."""
    before, now, _ = restart
    source = MemorySource(now, endless=True)
    merger = Merger(source, runs_of([record.id for record in before]))
    taken: list[Record] = []
    while len(taken) < len(before):
        taken += merger.take(max_records=max_records, timeout_s=0.0)
    fresh = records_of([r.origin for r in now] + later)[len(now) :]
    source.append(*fresh)
    while len(taken) < len(before) + len(fresh):
        taken += merger.take(max_records=max_records, timeout_s=0.0)
    assert taken == before + fresh


def test_other_records_wait_for_the_journalled_one() -> None:
    """Records that arrive early wait for the journalled one; then all are taken, in partition order."""
    a0, a1, b0 = ORIGINS
    source = MemorySource(endless=True)
    merger = Merger(source, runs_of([Record(a1, 0, b"").id, Record(a0, 0, b"").id]))
    early = [Record(b0, 0, b"{}"), Record(a0, 0, b"{}"), Record(a0, 1, b"{}")]
    source.append(*early)
    assert list(merger.take(max_records=8, timeout_s=0.0)) == []
    expected = Record(a1, 0, b"{}")
    source.append(expected)
    assert list(merger.take(max_records=8, timeout_s=0.0)) == [expected, early[1], early[2], early[0]]


class Gappy(MemorySource):
    """Reports the gaps that a test sets."""

    gaps: Sequence[Gap] = ()


def test_a_journalled_record_that_is_gone_does_not_block() -> None:
    """Its partition may stay silent forever: the order is dropped, and every available record is taken."""
    a0, a1, b0 = ORIGINS
    source = Gappy(endless=True)
    merger = Merger(source, runs_of([Record(a1, 0, b"").id, Record(a0, 0, b"").id]))
    early = [Record(b0, 0, b"{}"), Record(a0, 0, b"{}")]
    source.append(*early)
    source.gaps = [Gap(b0, 1, 9)]
    assert list(merger.take(max_records=8, timeout_s=0.0)) == []  # no record of b is expected
    source.gaps = [Gap(b0, 1, 9), Gap(a1, 0, 4)]
    with capture_logs() as logs:
        assert list(merger.take(max_records=8, timeout_s=0.0)) == [early[1], early[0]]
    assert [entry["event"] for entry in logs] == [Event.JOURNAL_TRUNCATED]
    late = Record(a1, 4, b"{}")
    source.append(late)
    assert list(merger.take(max_records=8, timeout_s=0.0)) == [late]


@given(restarts(), st.integers(1, 9), st.lists(st.integers(0, 30), unique=True))
def test_a_journalled_flush_is_where_it_was(
    restart: tuple[list[Record], list[Record], int], max_records: int, flushes: list[int]
) -> None:
    """Nothing is taken past it before it was repeated, in whatever order records arrive; none is lost."""
    before, now, journalled = restart
    at = sorted({min(place, journalled) for place in flushes})
    plan: list[PartitionRun | Mark] = []
    for start, end in pairwise([0, *at]):
        plan += [*runs_of([record.id for record in before[start:end]]), Mark.FLUSH]
    plan += runs_of([record.id for record in before[at[-1] if at else 0 : journalled]])
    source = MemorySource(now)
    merger = Merger(source, plan)
    taken: list[Record] = []
    for place in at:
        while not merger.at_flush:
            assert merger.follows_journal
            taken += merger.take(max_records=max_records, timeout_s=0.0)
        assert list(merger.take(max_records=max_records, timeout_s=0.0)) == []
        assert taken == before[:place]
        merger.pass_flush()
    while len(taken) < len(before):
        taken += merger.take(max_records=max_records, timeout_s=0.0)
    assert taken[:journalled] == before[:journalled]
    assert not merger.follows_journal
    assert sorted(record.id for record in taken) == sorted(record.id for record in before)


def test_a_place_without_a_flush_is_passed_by_nothing() -> None:
    """`pass_flush` takes away no record of the order."""
    a0, a1, _ = ORIGINS
    records = [Record(a1, 0, b"{}"), Record(a0, 0, b"{}")]
    merger = Merger(MemorySource(reversed(records)), runs_of([record.id for record in records]))
    merger.pass_flush()
    assert list(merger.take(max_records=8, timeout_s=0.0)) == records


def test_an_idle_source_returns_nothing() -> None:
    """With a journal and without one."""
    for journalled in ((), runs_of([Record(ORIGINS[0], 0, b"").id])):
        assert list(Merger(MemorySource(endless=True), journalled).take(max_records=8, timeout_s=0.0)) == []
