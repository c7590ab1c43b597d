"""The durability protocol step by step, and the ledger; killed runs are in test_daemon and tests/crash."""

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamlearn.daemon.build import Components
from streamlearn.daemon.checkpoint import Checkpoint, Ledger, RunState
from streamlearn.errors import DeadLetterError, Reason, SnapshotError
from streamlearn.settings import Settings, StreamSettings
from streamlearn.snapshot.journal import JournalEntry
from streamlearn.stream.intake import Batcher, FlushReason
from streamlearn.stream.position import Gap, Position, TopicPartition
from streamlearn.stream.record import Batch, Record
from tests.daemon.test_daemon import PER_BATCH, RUBBISH, backbone, make, opened, records
from tests.doubles import example

__all__ = ["backbone", "make"]

FILE = TopicPartition("stream.jsonl", 0)


class Recorded:
    """An object whose calls of some methods are noted, or fail."""

    def __init__(self, inner: Any, name: str, calls: list[str], *methods: str, fail: Exception | None = None) -> None:
        self._inner, self._name, self._calls, self._methods, self._fail = inner, name, calls, methods, fail

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._inner, method)
        if method not in self._methods:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls.append(f"{self._name}.{method}")
            if self._fail is not None:
                raise self._fail
            return found(*args, **kwargs)

        return call


def recorded(
    components: Components, *, sink_fails: Exception | None = None, store_fails: Exception | None = None
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint of `components` again, over the same files, and the calls that it makes."""
    calls: list[str] = []
    checkpoint = copy(components.checkpoint)
    faults = {"sink": sink_fails, "store": store_fails}
    for name, methods in {
        "sink": ["flush"],
        "store": ["save", "prune"],
        "source": ["commit"],
        "journal": ["append", "append_flush", "rewind", "truncate"],
        "crash_guard": ["passed"],
    }.items():
        inner = getattr(checkpoint, f"_{name}")
        setattr(checkpoint, f"_{name}", Recorded(inner, name, calls, *methods, fail=faults.get(name)))
    return checkpoint, calls


def train(components: Components, batch: Batch) -> None:
    """One step, journalled and accounted for, as the loop does it."""
    components.checkpoint.journal(batch)
    step = components.learner.step(batch.examples)
    components.state.account(batch, step)


def next_batch(components: Components) -> Batch:
    batch = components.checkpoint.intake.next_batch(timeout_s=0.0)
    assert batch is not None
    return batch


def test_a_save_is_in_the_order_of_the_protocol(make: Callable[..., Settings]) -> None:
    """Dead letters, snapshot, broker, then what is no longer needed."""
    with opened(make(records(8))) as components:
        checkpoint, calls = recorded(components)
        checkpoint.save(components.state)
    assert calls == [
        "sink.flush",
        "store.save",
        "source.commit",
        "store.prune",
        "journal.truncate",
        "crash_guard.passed",
    ]


def test_dead_letters_that_are_not_durable_stop_the_save(make: Callable[..., Settings]) -> None:
    """No snapshot may cover their records, and nothing is committed."""
    with opened(make(records(8))) as components:
        checkpoint, calls = recorded(components, sink_fails=DeadLetterError("full"))
        with pytest.raises(DeadLetterError, match="full"):
            checkpoint.save(components.state)
        assert calls == ["sink.flush"]
        assert components.store.names() == []


def test_a_snapshot_that_is_not_durable_is_not_committed(make: Callable[..., Settings]) -> None:
    """The broker is told of no position that a restart could not start from."""
    with opened(make(records(8))) as components:
        checkpoint, calls = recorded(components, store_fails=SnapshotError("full"))
        with pytest.raises(SnapshotError, match="full"):
            checkpoint.save(components.state)
    assert calls == ["sink.flush", "store.save"]


def test_what_is_restored_is_what_was_saved(make: Callable[..., Settings]) -> None:
    """Position, ledger and the next batch; a batch journalled after the snapshot is formed again, not written again."""
    settings = make([*records(2), RUBBISH, *records(14)])
    with opened(settings) as components:
        train(components, next_batch(components))
        info = components.checkpoint.save(components.state)
        after = next_batch(components)
        components.checkpoint.journal(after)  # and the process dies in this step
        rows = components.state.ledger.rows()
    with opened(settings) as components:
        assert components.state.ledger.rows() == rows == [("stream.jsonl", 0, PER_BATCH, 1, 0, 0)]
        assert components.state.ledger.position == info.position == Position({FILE: PER_BATCH + 1})
        checkpoint, calls = recorded(components)
        checkpoint.restore(components.store.newest())
        again = checkpoint.intake.next_batch(timeout_s=0.0)
        assert again is not None
        assert again.runs == after.runs
        assert checkpoint.journal(again) is None
        assert "journal.append" not in calls


def test_a_flush_is_journalled_once_and_repeated(make: Callable[..., Settings]) -> None:
    """With every batch that was read, before the first of them is trained; their steps write nothing more."""
    settings = make(records(10))
    with opened(settings) as components:
        components.checkpoint.save(components.state)
        read = [next_batch(components) for _ in range(2)]
        checkpoint, calls = recorded(components)
        compositions = [*(batch.runs for batch in read), components.checkpoint.intake.open_runs]
        assert checkpoint.journal_flush(compositions) is None
        assert checkpoint.journal(read[0]) is None
        assert calls == ["journal.append_flush"]
        assert components.journal.entries(after_step=0) == [
            JournalEntry(1, read[0].runs),
            JournalEntry(2, read[1].runs),
            JournalEntry(3, compositions[2], flush=True),
        ]  # and the process dies
    with opened(settings) as components:
        checkpoint, calls = recorded(components)
        checkpoint.restore(components.store.newest())
        again = [checkpoint.intake.next_batch(timeout_s=0.0) for _ in range(3)]
        assert [batch and batch.runs for batch in again] == [*compositions[:2], None]
        assert checkpoint.intake.flush_due is FlushReason.JOURNAL
        assert checkpoint.journal_flush(compositions) is None
        assert [batch.runs for batch in checkpoint.intake.flush()] == compositions[2:]
        assert not [call for call in calls if call.startswith("journal")]


def test_another_flush_replaces_what_was_journalled(make: Callable[..., Settings]) -> None:
    """The same batches without a flush, or other batches after an accepted change of their size: the newest counts."""
    settings = make(records(8))
    with opened(settings) as components:
        components.checkpoint.save(components.state)
        first, second = next_batch(components), next_batch(components)
        components.journal.append(1, first.runs)
        components.journal.append(2, second.runs)
    with opened(settings) as components:
        checkpoint, calls = recorded(components)
        checkpoint.restore(components.store.newest())
        assert checkpoint.journal_flush([first.runs]) is None
        assert calls[-2:] == ["journal.rewind", "journal.append_flush"]
        assert components.journal.entries(after_step=0) == [JournalEntry(1, first.runs, flush=True)]


def test_a_rollback_reads_the_stream_again_without_the_refused_records(make: Callable[..., Settings]) -> None:
    """The intake starts at the snapshot's position; a refused record is a dead letter with its reason."""
    with opened(make(records(20))) as components:
        train(components, next_batch(components))
        components.checkpoint.save(components.state)
        snapshot = components.store.newest()
        assert snapshot is not None
        bad = next_batch(components)
        train(components, bad)
        old = components.checkpoint.intake
        state = components.checkpoint.roll_back(snapshot, frozenset([bad.records[0].id]))
        assert components.checkpoint.intake is not old
        assert state.ledger.position == snapshot.manifest.position
        assert components.learner.number == snapshot.manifest.step
        assert components.journal.entries(after_step=snapshot.manifest.step) == []
        again = next_batch(components)
    assert [found[:2] for found in again.dead_lettered] == [(bad.records[0].id, Reason.NOT_FINITE_UPDATE)]
    assert again.records[0].id == bad.records[1].id


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


ORIGINS = [TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)]
SETTINGS = StreamSettings(batch_records=3, batch_tokens=100, max_tokens=50)

Stream = list[tuple[TopicPartition, int, Reason | None]]
outcomes = st.sampled_from([None, Reason.EMPTY, Reason.DELETION])
streams = st.lists(st.tuples(st.sampled_from(ORIGINS), st.integers(1, 4), outcomes), max_size=40)
"""For each record: its partition, its distance from the previous offset, and why it cannot be decoded, if so."""


def batches_of(stream: Stream) -> tuple[list[Record], list[Batch]]:
    batcher, ends, records = Batcher(SETTINGS), dict.fromkeys(ORIGINS, -1), []
    batches: list[Batch] = []
    for origin, gap, reason in stream:
        ends[origin] += gap
        records.append(Record(origin, ends[origin], b"{}"))
        if reason is None:
            batches += batcher.add(records[-1], example([9, 9]))
        elif reason is Reason.DELETION:
            batches += batcher.add_ignored(records[-1], reason)
        else:
            batches += batcher.add_dead_lettered(records[-1], reason)
    return records, batches + batcher.flush()


@given(streams, st.data())
def test_records_read_are_trained_dead_lettered_or_ignored(stream: Stream, data: st.DataObject) -> None:
    """After every batch the counts of a partition add up to what was read, and the position follows the last record."""
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
        num_read += len(batch.records) + len(batch.dead_lettered) + len(batch.ignored)
        seen = records[:num_read]
        assert ledger.position == Position({record.origin: record.offset + 1 for record in seen})
        for origin in ORIGINS:
            expected = sum(record.origin == origin for record in seen)
            assert ledger.trained[origin] + ledger.dead_lettered[origin] + ledger.ignored[origin] == expected
            assert (ledger.trained[origin], ledger.dead_lettered[origin]) == (
                wanted["trained"][origin],
                wanted["dead"][origin],
            )
    assert num_read == len(records)


@given(streams, st.data())
def test_a_restored_ledger_continues_like_the_original(stream: Stream, data: st.DataObject) -> None:
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
