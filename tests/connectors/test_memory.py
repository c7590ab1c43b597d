"""The memory source."""

import threading
import time

import pytest

from streamlearn.stream.record import Position
from tests.memory import MemorySource, records_from


def test_an_endless_source_wakes_up_for_an_append_from_another_thread() -> None:
    """Records may be produced while a poll waits."""
    source = MemorySource(endless=True)
    source.seek(Position())
    producer = threading.Timer(0.05, source.append, records_from([b"late"]))
    producer.start()
    started = time.monotonic()
    (record,) = source.poll(max_records=8, timeout_s=10.0)
    assert record.value == b"late"
    assert time.monotonic() - started < 5.0
    producer.join()


def test_offsets_may_have_gaps_and_must_increase() -> None:
    """A compacted log can be simulated; a log that goes back is a bug in the test."""
    source = MemorySource(records_from([b"a"], start=0) + records_from([b"b"], start=7))
    source.seek(Position())
    assert [record.offset for record in source.poll(max_records=8, timeout_s=0)] == [0, 7]
    with pytest.raises(AssertionError, match="memory-0 is already past 7"):
        source.append(*records_from([b"c"], start=7))


def test_commits_can_be_asserted_on() -> None:
    """The committed positions are kept in order, with the snapshots' names."""
    source = MemorySource()
    source.commit(Position(), "snapshot-1")
    assert source.commits == [(Position(), "snapshot-1")]
