"""The durability protocol step by step, and the ledger; killed runs are in test_daemon and tests/crash."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamlearn.daemon.build import Components
from streamlearn.daemon.checkpoint import Checkpoint, Ledger
from streamlearn.errors import DeadLetterError, Reason, SnapshotError
from streamlearn.settings import Settings, StreamSettings
from streamlearn.snapshot.journal import JournalEntry
from streamlearn.stream.intake import Batcher
from streamlearn.stream.position import Position, TopicPartition
from streamlearn.stream.record import Batch, Record
from tests.daemon.test_daemon import backbone, make, opened, records
from tests.doubles import example

__all__ = ["backbone", "make"]


def record_calls(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, **faults: Exception) -> list[str]:
    """Calls of the checkpoint's parts from now on; those of a part in `faults` fail."""
    calls: list[str] = []

    def recording(name: str, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{name}.{method}")
            if name in faults:
                raise faults[name]
            return real(*args, **kwargs)

        return call

    for name, methods in {
        "sink": ["flush"],
        "store": ["save", "prune"],
        "source": ["commit"],
        "journal": ["append", "append_flush", "rewind", "truncate"],
        "crash_guard": ["passed"],
    }.items():
        part = getattr(checkpoint, f"_{name}")
        for method in methods:
            monkeypatch.setattr(part, method, recording(name, method, getattr(part, method)))
    return calls


PROTOCOL = ["sink.flush", "store.save", "source.commit", "store.prune", "journal.truncate", "crash_guard.passed"]


def test_a_save_is_in_the_order_of_the_protocol_and_ends_at_a_failure(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No snapshot covers dead letters that are not durable, and the broker gets no position without a snapshot."""
    with opened(make(records(8))) as components:
        for fault in (DeadLetterError("full"), SnapshotError("full")):
            failing = "sink" if isinstance(fault, DeadLetterError) else "store"
            with monkeypatch.context() as patch:
                calls = record_calls(components.checkpoint, patch, **{failing: fault})
                with pytest.raises(type(fault), match="full"):
                    components.checkpoint.save(components.state)
            assert calls == PROTOCOL[: 1 if failing == "sink" else 2]
            assert components.store.names() == []
        calls = record_calls(components.checkpoint, monkeypatch)
        components.checkpoint.save(components.state)
    assert calls == PROTOCOL


def next_batch(components: Components) -> Batch:
    batch = components.checkpoint.intake.next_batch(timeout_s=0.0)
    assert batch is not None
    return batch


def test_another_flush_replaces_what_was_journalled(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches without a flush, or other batches after an accepted change of their size: the newest counts."""
    settings = make(records(8))
    with opened(settings) as components:
        components.checkpoint.save(components.state)
        first, second = next_batch(components), next_batch(components)
        components.journal.append(1, first.runs)
        components.journal.append(2, second.runs)
    with opened(settings) as components:
        checkpoint = components.checkpoint
        checkpoint.restore(components.store.newest())
        calls = record_calls(checkpoint, monkeypatch)
        assert checkpoint.journal_flush([first.runs]) is None
        assert calls == ["journal.rewind", "journal.append_flush"]
        assert components.journal.entries(after_step=0) == [JournalEntry(1, first.runs, flush=True)]


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
    """After every batch the counts of a partition add up to what was read, and the position follows the last record.

    Rows and position are a ledger's whole state: restored after any batch, it goes on alike.
    """
    records, batches = batches_of(stream)
    ledger, num_read = Ledger(), 0
    trained, dead, ignored = (Counter[TopicPartition]() for _ in range(3))
    for batch in batches:
        refused = data.draw(st.booleans())
        ledger.account(batch, refused=refused)
        (dead if refused else trained).update(record.origin for record in batch.records)
        dead.update(dead_lettered.id.origin for dead_lettered in batch.dead_lettered)
        ignored.update(record.id.origin for record in batch.ignored)
        num_read += len(batch.records) + len(batch.dead_lettered) + len(batch.ignored)
        read = records[:num_read]
        assert ledger.position == Position({record.origin: record.offset + 1 for record in read})
        assert (+ledger.trained, +ledger.dead_lettered, +ledger.ignored) == (trained, dead, ignored)
        assert trained + dead + ignored == Counter(record.origin for record in read)
        if data.draw(st.booleans()):
            ledger = Ledger.restore(Position.from_json(ledger.position.to_json()), [*ledger.rows()])
    assert num_read == len(records)
