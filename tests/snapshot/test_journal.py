"""The journal of batches: appended, read back, truncated."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from streamlearn.errors import SnapshotError
from streamlearn.snapshot.journal import Journal, JournalEntry
from streamlearn.stream.position import PartitionRun

from .kit import FailingFiles

RUNS = (
    PartitionRun("orders", 0, 118, 122, 4),
    PartitionRun("orders", 1, 57, 58, 1),
    PartitionRun("orders", 0, 122, 125, 2),
)


def filled(path: Path, steps: int = 6) -> Journal:
    journal = Journal(path)
    for step in range(1, steps + 1):
        journal.append(step, RUNS)
    return journal


def steps(journal: Journal, after_step: int = 0) -> list[int]:
    return [entry.step for entry in journal.entries(after_step)]


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.jsonl")
    assert journal.entries(after_step=4) == [JournalEntry(5, RUNS), JournalEntry(6, RUNS)]
    assert Journal(tmp_path / "journal.jsonl").entries(after_step=5) == [JournalEntry(6, RUNS)]
    journal.close()
    journal.close()


def test_a_missing_journal_is_an_empty_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.entries(after_step=0) == []
    journal.truncate(before_step=3)
    journal.rewind(to_step=3)
    assert not list(tmp_path.iterdir())


def test_lines_of_earlier_releases_are_read() -> None:
    """They have no `flush`; this one was written before there was any."""
    line = b'{"step":7,"runs":[["orders",0,118,122,4],["orders",1,57,58,1]],"crc32":325759481}\n'
    assert JournalEntry.from_line(line) == JournalEntry(7, RUNS[:2])
    assert JournalEntry(7, RUNS[:2]).to_line() == line


@given(topic=st.text(st.characters(exclude_categories=["Cs"])), offset=st.integers(0, (1 << 63) - 1))
def test_every_topic_and_offset_fits_one_line(topic: str, offset: int) -> None:
    for flush in (False, True):
        entry = JournalEntry(1, (PartitionRun(topic, 0, offset, offset, 0),), flush)
        line = entry.to_line()
        assert line.count(b"\n") == 1
        assert JournalEntry.from_line(line) == entry


def test_every_incomplete_end_is_removed_and_appending_continues(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    filled(path, 3).close()
    data = path.read_bytes()
    begin = data.rindex(b"\n", 0, -1) + 1
    for size in range(begin + 1, len(data)):
        path.write_bytes(data[:size])
        with capture_logs() as events:
            journal = Journal(path)
            journal.append(3, RUNS)
        assert steps(journal) == [1, 2, 3]
        assert path.read_bytes() == data
        assert f"found {size - begin} other bytes" in events[0]["fault"]
        journal.close()


def test_the_journal_is_truncated_at_every_flipped_byte(tmp_path: Path) -> None:
    """Each line has a checksum, because a wrong offset or a lost flush would silently replay other batches."""
    path = tmp_path / "journal.jsonl"
    lines = [JournalEntry(1, RUNS), JournalEntry(2, RUNS, flush=True), JournalEntry(3, RUNS)]
    path.write_bytes(b"".join(entry.to_line() for entry in lines))
    data = path.read_bytes()
    begin, end = (data.index(b"\n") + 1, data.rindex(b"\n", 0, -1) + 1)
    for index in range(begin, end):
        path.write_bytes(data[:index] + bytes([data[index] ^ 0x01]) + data[index + 1 :])
        assert steps(Journal(path)) == [1]
        assert path.read_bytes() == data[:begin]


def test_truncate_keeps_what_a_snapshot_needs_and_rewind_frees_steps_for_other_batches(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.jsonl")
    journal.truncate(before_step=3)
    journal.rewind(to_step=4)
    journal.append(5, RUNS[:1])
    assert Journal(tmp_path / "journal.jsonl").entries(after_step=0) == [
        JournalEntry(3, RUNS),
        JournalEntry(4, RUNS),
        JournalEntry(5, RUNS[:1]),
    ]


def test_a_line_that_does_not_fit_is_removed_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk may accept half a line; the half is removed, and the line is written before the next one."""
    journal_path = tmp_path / "journal.jsonl"
    journal = filled(journal_path, 2)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 2]))
        journal.append(3, RUNS)
        assert "no room for" in str(journal.fault)
        assert steps(Journal(journal_path)) == [1, 2]
        assert steps(journal) == [1, 2, 3]
    journal.append(4, RUNS)
    assert journal.fault is None
    assert steps(Journal(journal_path)) == [1, 2, 3, 4]


FLUSHED = [JournalEntry(3, RUNS[:1]), JournalEntry(4, RUNS[1:2], flush=True)]


def test_a_flush_is_in_the_journal_with_all_its_batches(tmp_path: Path) -> None:
    """Lines that could not be written before come first; later ones follow."""
    journal = filled(tmp_path / "journal.jsonl", 1)
    journal._unwritten.append(JournalEntry(2, RUNS))
    journal.append_flush(FLUSHED)
    assert journal.fault is None
    journal.append(5, RUNS)
    assert Journal(tmp_path / "journal.jsonl").entries(after_step=1) == [
        JournalEntry(2, RUNS),
        *FLUSHED,
        JournalEntry(5, RUNS),
    ]


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_flush_that_is_not_durable_is_not_in_the_journal(tmp_path: Path, nth: int) -> None:
    """Whatever fails: a restart finds none of it, and other batches can take its steps."""
    filled(tmp_path / "journal.jsonl", 2).close()
    journal = Journal(tmp_path / "journal.jsonl", FailingFiles(nth, errno.ENOSPC))
    journal.append_flush(FLUSHED)
    assert "made to fail" in str(journal.fault)
    assert steps(Journal(tmp_path / "journal.jsonl")) == [1, 2]
    journal.append(3, RUNS)
    assert journal.fault is None
    assert steps(Journal(tmp_path / "journal.jsonl")) == [1, 2, 3]
    journal.rewind(to_step=2)
    journal.append_flush(FLUSHED)
    assert Journal(tmp_path / "journal.jsonl").entries(after_step=2) == FLUSHED


def test_unwritten_lines_are_rewound_like_written_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other batches of those steps can replace them."""
    journal = filled(tmp_path / "journal.jsonl", 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: 0)
        journal.append(3, RUNS)
        journal.append(4, RUNS)
        journal.rewind(to_step=3)
    journal.append(4, RUNS[:1])
    assert steps(Journal(tmp_path / "journal.jsonl")) == [1, 2, 3, 4]
    assert journal.entries(after_step=3)[0].runs == RUNS[:1]


def test_an_unreadable_journal_is_a_snapshot_error(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(SnapshotError, match="must be readable and writable"):
        Journal(tmp_path / "journal.jsonl").entries(after_step=0)
