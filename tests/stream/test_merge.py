"""One order out of several partitions, the same again after a restart."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from connectors.memory import MemorySource
from streamlearn.events import Event
from streamlearn.stream.batch import runs_of
from streamlearn.stream.merge import Merger
from streamlearn.stream.record import Gap, Record, TopicPartition

ORIGINS = [TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)]

orders = st.lists(st.sampled_from(ORIGINS), max_size=30)
"""Whose record comes next; offsets count up in each partition."""


def records_of(order: Sequence[TopicPartition]) -> list[Record]:
    ends = dict.fromkeys(ORIGINS, 0)
    records = []
    for origin in order:
        records.append(Record(origin, ends[origin], b"{}"))
        ends[origin] += 1
    return records


@st.composite
def restarts(draw: st.DrawFn) -> tuple[list[Record], list[Record], int]:
    """Records in the order first taken, the same in another order, and how many of the first are journalled."""
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
    """Without a journal the order is the source's own."""
    source = MemorySource(records_of(order))
    assert take_all(Merger(source), source, max_records) == records_of(order)


@given(restarts(), st.integers(1, 9))
def test_a_journalled_order_is_repeated_exactly(
    restart: tuple[list[Record], list[Record], int], max_records: int
) -> None:
    """Whatever order the records come in now, those of the journal are taken as then; the others follow, none lost."""
    before, now, journalled = restart
    source = MemorySource(now)
    merger = Merger(source, runs_of([record.id for record in before[:journalled]]))
    taken = take_all(merger, source, max_records)
    assert taken[:journalled] == before[:journalled]
    for origin in ORIGINS:
        assert [r.offset for r in taken if r.origin == origin] == [r.offset for r in before if r.origin == origin]


@given(restarts(), orders, st.integers(1, 9))
def test_behind_the_journal_it_is_live(
    restart: tuple[list[Record], list[Record], int], later: list[TopicPartition], max_records: int
) -> None:
    """Once the journal is used up, records come in the source's order again."""
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


def test_others_wait_for_the_journalled_record() -> None:
    """Records that came too early are kept until the awaited one is there, then all are taken, in partition order."""
    a0, a1, b0 = ORIGINS
    source = MemorySource(endless=True)
    merger = Merger(source, runs_of([Record(a1, 0, b"").id, Record(a0, 0, b"").id]))
    early = [Record(b0, 0, b"{}"), Record(a0, 0, b"{}"), Record(a0, 1, b"{}")]
    source.append(*early)
    assert list(merger.take(max_records=8, timeout_s=0.0)) == []
    awaited = Record(a1, 0, b"{}")
    source.append(awaited)
    assert list(merger.take(max_records=8, timeout_s=0.0)) == [awaited, early[1], early[2], early[0]]


class Gappy(MemorySource):
    """Jumps over what it is told."""

    gaps: Sequence[Gap] = ()


def test_a_journalled_record_that_is_gone_is_not_waited_for() -> None:
    """Its partition may stay silent for good: the order ends, and every record that is there is taken."""
    a0, a1, b0 = ORIGINS
    source = Gappy(endless=True)
    merger = Merger(source, runs_of([Record(a1, 0, b"").id, Record(a0, 0, b"").id]))
    early = [Record(b0, 0, b"{}"), Record(a0, 0, b"{}")]
    source.append(*early)
    source.gaps = [Gap(b0, 1, 9)]
    assert list(merger.take(max_records=8, timeout_s=0.0)) == []  # none of b is awaited
    source.gaps = [Gap(b0, 1, 9), Gap(a1, 0, 4)]
    with capture_logs() as logs:
        assert list(merger.take(max_records=8, timeout_s=0.0)) == [early[1], early[0]]
    assert [entry["event"] for entry in logs] == [Event.JOURNAL_TRUNCATED]
    late = Record(a1, 4, b"{}")
    source.append(late)
    assert list(merger.take(max_records=8, timeout_s=0.0)) == [late]


def test_nothing_ready_is_nothing_taken() -> None:
    """An idle source gives an empty turn, with a journal and without."""
    for journalled in ((), runs_of([Record(ORIGINS[0], 0, b"").id])):
        assert list(Merger(MemorySource(endless=True), journalled).take(max_records=8, timeout_s=0.0)) == []
