"""The order of the durability protocol, step by step; whole runs that are killed are in test_daemon and tests/crash."""

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest

from streamlearn.daemon.build import Components
from streamlearn.daemon.checkpoint import Checkpoint
from streamlearn.errors import DeadLetterError, Reason, SnapshotError
from streamlearn.settings import Settings
from streamlearn.snapshot.journal import JournalEntry
from streamlearn.stream.intake import FlushReason
from streamlearn.stream.record import Batch, Position, TopicPartition
from tests.daemon.test_daemon import PER_BATCH, RUBBISH, backbone, make, opened, records

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
        assert components.state.ledger.rows() == rows == [("stream.jsonl", 0, PER_BATCH, 1, 0)]
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
