"""Merging of several partitions into one order, which is the same after a restart."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from connectors.memory import MemorySource
from streamlearn.events import Event
from streamlearn.stream import intake as merge
from streamlearn.stream.batch import PartitionRun, runs_of
from streamlearn.stream.intake import Mark, Merger
from streamlearn.stream.record import Gap, Record, TopicPartition
from tests.stream.test_linger import SetClock

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


def take_all(merger: Merger, max_records: int) -> list[Record]:
    taken: list[Record] = []
    while not merger.exhausted:
        records = merger.take(max_records=max_records, timeout_s=0.0)
        assert len(records) <= max_records
        taken += records
    return taken


@given(orders, st.integers(1, 9))
def test_live_records_come_as_the_source_returns_them(order: list[TopicPartition], max_records: int) -> None:
    """Without a journal the order is the source's."""
    source = MemorySource(records_of(order))
    assert take_all(Merger(source), max_records) == records_of(order)


@given(restarts(), st.integers(1, 9))
def test_a_journalled_order_is_repeated_exactly(
    restart: tuple[list[Record], list[Record], int], max_records: int
) -> None:
    """The journalled records keep their old order in whatever order they arrive; the others follow, none is lost."""
    before, now, journalled = restart
    source = MemorySource(now)
    merger = Merger(source, runs_of([record.id for record in before[:journalled]]))
    taken = take_all(merger, max_records)
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


@given(restarts(), st.integers(1, 9), st.sets(st.integers(0, 29)))
def test_records_that_are_gone_change_nothing_in_the_order_of_the_others(
    restart: tuple[list[Record], list[Record], int], max_records: int, gone: set[int]
) -> None:
    """Compaction removes single records: those that are left come in their old order, and none is lost."""
    before, now, journalled = restart
    removed = {record.id for place, record in enumerate(before) if place in gone}
    merger = Merger(
        MemorySource([record for record in now if record.id not in removed]),
        runs_of([record.id for record in before[:journalled]]),
    )
    with capture_logs() as logs:
        taken = [*take_all(merger, max_records), *merger.take(max_records=max_records, timeout_s=0.0)]
    left = [record for record in before[:journalled] if record.id not in removed]
    assert taken[: len(left)] == left
    assert sorted(record.id for record in taken) == sorted({record.id for record in now} - removed)
    assert [entry["event"] for entry in logs] == [Event.JOURNAL_TRUNCATED] * (len(left) < journalled)


def test_a_later_record_ends_the_run_of_one_that_is_gone() -> None:
    """And the flush after it is where it was."""
    a0, a1, _ = ORIGINS
    plan: list[PartitionRun | Mark] = [
        *runs_of([Record(a0, 5, b"").id, Record(a0, 6, b"").id, Record(a1, 3, b"").id]),
        Mark.FLUSH,
    ]
    source = MemorySource([Record(a0, 5, b"{}"), Record(a1, 3, b"{}")], endless=True)  # a0 6 is gone
    merger = Merger(source, plan)
    assert [record.id for record in merger.take(max_records=8, timeout_s=0.0)] == [(a0, 5)]
    assert not merger.at_flush
    source.append(Record(a0, 9, b"{}"))
    with capture_logs() as logs:
        assert [record.id for record in merger.take(max_records=8, timeout_s=0.0)] == [(a1, 3)]
    assert merger.at_flush
    (entry,) = logs
    assert entry["event"] == Event.JOURNAL_TRUNCATED
    assert entry["fault"] == "2 records of a-0 in [5, 7) must be read again, found 1"
    merger.pass_flush()
    assert [record.id for record in merger.take(max_records=8, timeout_s=0.0)] == [(a0, 9)]


def test_records_that_were_not_visible_before_do_not_shift_the_order() -> None:
    """With `read_uncommitted` instead of `read_committed` a run holds more records, and ends where it did."""
    a0, a1, _ = ORIGINS
    plan = [PartitionRun("a", 0, 5, 9, 2), PartitionRun("a", 1, 3, 4, 1), PartitionRun("a", 0, 9, 10, 1)]
    source = MemorySource([Record(a0, offset, b"{}") for offset in range(5, 10)] + [Record(a1, 3, b"{}")])
    taken = take_all(Merger(source, plan), 8)
    assert [record.id for record in taken] == [*((a0, offset) for offset in range(5, 9)), (a1, 3), (a0, 9)]


class Passing(MemorySource):
    """Reports how far it has come as a test sets it."""

    reached: Mapping[TopicPartition, int] = {}


def test_a_source_that_has_passed_a_run_ends_it() -> None:
    """Nothing else would, where the last records of a partition are gone."""
    a0, a1, _ = ORIGINS
    source = Passing([Record(a1, 0, b"{}")], endless=True)
    merger = Merger(source, runs_of([Record(a0, 0, b"").id, Record(a1, 0, b"").id]))
    assert merger.take(max_records=8, timeout_s=0.0) == []
    source.reached = {a0: 1}
    assert [record.id for record in merger.take(max_records=8, timeout_s=0.0)] == [(a1, 0)]


@pytest.mark.parametrize(("limit", "value"), [("MAX_WAITING_RECORDS", 20), ("MAX_WAITING_BYTES", 20 * len(b"{}"))])
def test_the_order_is_dropped_when_too_much_waits(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    """The leader of one partition is down: memory stays bounded, no record is lost, and few are returned at a time."""
    monkeypatch.setattr(merge, limit, value)
    a0, a1, b0 = ORIGINS
    others = [Record((a1, b0)[offset % 2], offset // 2, b"{}") for offset in range(60)]
    source = MemorySource(others, endless=True)
    merger = Merger(source, [*runs_of([Record(a0, 0, b"").id, Record(a1, 0, b"").id]), Mark.FLUSH])
    with capture_logs() as logs:
        assert [merger.take(max_records=8, timeout_s=0.0) for _ in range(2)] == [[], []]
        taken = merger.take(max_records=8, timeout_s=0.0)
    assert [record.id for record in taken] == [(a1, offset) for offset in range(8)]
    assert not merger.follows_journal
    (entry,) = logs
    assert entry["event"] == Event.JOURNAL_TRUNCATED
    assert entry["fault"] == (
        "records of a-0 before offset 1 must be read again and did not come in 0 s, while 24 others of 48 bytes wait"
    )
    late = Record(a0, 0, b"{}")
    source.append(late)
    while len(taken) < 61:
        records = merger.take(max_records=8, timeout_s=0.0)
        assert 0 < len(records) <= 8
        taken += records
    assert sorted(record.id for record in taken) == sorted(record.id for record in [*others, late])


class Slow(MemorySource):
    """Each poll takes a minute."""

    def __init__(self, records: Sequence[Record], clock: SetClock) -> None:
        super().__init__(records, endless=True)
        self._clock = clock

    def poll(self, *, max_records: int, timeout_s: float) -> Sequence[Record]:
        self._clock.now += 60.0
        return super().poll(max_records=max_records, timeout_s=0.0)


def test_the_order_is_dropped_when_others_have_waited_for_long() -> None:
    """Time between polls, in which the model is trained, does not count."""
    a0, a1, b0 = ORIGINS
    clock = SetClock()
    source = Slow([Record(a1, 0, b"{}"), Record(b0, 0, b"{}")], clock)
    merger = Merger(source, runs_of([Record(a1, 0, b"").id, Record(a0, 0, b"").id]), clock=clock)
    assert [record.id for record in merger.take(max_records=8, timeout_s=0.0)] == [(a1, 0)]
    for _ in range(9):
        clock.now += 3600.0
        assert merger.take(max_records=8, timeout_s=0.0) == []
        assert merger.follows_journal
    with capture_logs() as logs:
        assert [record.id for record in merger.take(max_records=8, timeout_s=0.0)] == [(b0, 0)]
    assert [entry["event"] for entry in logs] == [Event.JOURNAL_TRUNCATED]
    assert not merger.follows_journal


def test_the_order_is_kept_while_nothing_waits_for_it() -> None:
    """The broker may be down for hours: dropping the order would help no record, and one partition replays exactly."""
    clock = SetClock()
    source = Slow([], clock)
    merger = Merger(source, runs_of([Record(ORIGINS[0], 0, b"").id]), clock=clock)
    assert [merger.take(max_records=8, timeout_s=0.0) for _ in range(1000)] == [[]] * 1000
    assert merger.follows_journal
