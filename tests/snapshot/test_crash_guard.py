"""The crash guard: crashes are counted, and a record is given up after the third."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamlearn.errors import Reason, RecordError, SnapshotError
from streamlearn.events import Event
from streamlearn.snapshot.crash_guard import CrashGuard
from streamlearn.stream.position import Position, RecordId, TopicPartition

ORIGIN = TopicPartition("orders", 3)
BATCH = tuple(RecordId(ORIGIN, offset) for offset in (4, 5, 9))


class CrashError(BaseException):
    """Ends the simulated process."""


@contextmanager
def crashing() -> Iterator[None]:
    with pytest.raises(CrashError):
        yield


def decode(guard: CrashGuard, record: RecordId = BATCH[1]) -> None:
    with crashing(), guard.decoding(record):
        raise CrashError


def train(guard: CrashGuard, step: int = 7, records: Sequence[RecordId] = BATCH) -> None:
    with crashing(), guard.training(step, records):
        raise CrashError


def run_processes(state: Path, *crashes: Callable[[CrashGuard], None]) -> None:
    """Run one process after another; each ends in a crash."""
    for crash in crashes:
        with closing(CrashGuard(state)) as guard:
            crash(guard)


def given_up(state: Path) -> list[int]:
    with closing(CrashGuard(state)) as guard:
        return sorted(record.offset for record in guard.given_up)


def test_a_record_is_given_up_after_three_crashes_in_decoding(tmp_path: Path) -> None:
    """Not after the second crash, and only that record; each crash is logged."""
    run_processes(tmp_path, decode, decode)
    assert given_up(tmp_path) == []
    with capture_logs() as logs:
        run_processes(tmp_path, decode)
        assert given_up(tmp_path) == [5]
    assert [(log["crashes"], log["given_up"]) for log in logs if log["event"] == Event.CRASH_DETECTED] == [(3, True)]


def test_crashes_with_different_causes_do_not_add_up(tmp_path: Path) -> None:
    """A process that is killed at random times gives nothing up."""
    for step in range(1, 12):
        run_processes(tmp_path, partial(train, step=step // 2), partial(decode, record=BATCH[step % 3]))
        assert given_up(tmp_path) == []


def test_finished_work_is_not_a_crash(tmp_path: Path) -> None:
    """Records and batches that were finished, or refused with a StreamlearnError, leave no crash."""
    for _ in range(4):
        with closing(CrashGuard(tmp_path)) as guard:
            with guard.decoding(BATCH[0]):
                pass
            with pytest.raises(RecordError), guard.decoding(BATCH[1]):
                raise RecordError(Reason.EMPTY, "unusable")
            with guard.training(3, BATCH):
                pass
    assert not (tmp_path / "crashes.json").exists()


def test_an_unexpected_error_is_a_crash(tmp_path: Path) -> None:
    """It ends the process just like a signal."""

    def broken(guard: CrashGuard) -> None:
        with pytest.raises(ZeroDivisionError), guard.training(7, BATCH[:1]):
            raise ZeroDivisionError

    run_processes(tmp_path, broken, broken, broken)
    assert given_up(tmp_path) == [4]


def test_a_batch_is_trained_record_by_record_after_two_crashes(tmp_path: Path) -> None:
    """The third crash then names one record, and only that one is given up."""
    run_processes(tmp_path, train, train)
    with closing(CrashGuard(tmp_path)) as guard:
        with guard.training(8, BATCH) as other:
            assert not other.one_by_one
        with crashing(), guard.training(7, BATCH) as batch:
            assert batch.one_by_one
            batch.on_record(0)
            batch.on_record(1)
            raise CrashError
    assert given_up(tmp_path) == [5]


def test_a_batch_without_a_single_cause_is_given_up_completely(tmp_path: Path) -> None:
    """If it crashes outside the training of a single record."""
    run_processes(tmp_path, train, train, train)
    assert given_up(tmp_path) == [4, 5, 9]


def test_given_up_records_that_a_snapshot_covers_are_forgotten(tmp_path: Path) -> None:
    """Given-up records are kept over any number of starts until they cannot be read again."""
    run_processes(tmp_path, train, train, train)
    with closing(CrashGuard(tmp_path)) as guard:
        guard.passed(Position({ORIGIN: 9}))
    assert given_up(tmp_path) == [9]
    with closing(CrashGuard(tmp_path)) as guard:
        guard.passed(Position({ORIGIN: 10}))
    assert given_up(tmp_path) == []


def test_a_new_run_has_no_crash_history(tmp_path: Path) -> None:
    """Nothing stays given up, and counting restarts."""
    run_processes(tmp_path, train, train, train)
    with closing(CrashGuard(tmp_path)) as guard:
        guard.forget()
    run_processes(tmp_path, train, train)
    assert given_up(tmp_path) == []


def test_an_incomplete_slot_blames_no_record(tmp_path: Path) -> None:
    """A process that crashes while it writes a slot leaves an incomplete line."""
    for _ in range(4):
        with closing(CrashGuard(tmp_path)) as guard:
            train(guard)
        with (tmp_path / "in_progress").open("r+b") as file:
            file.seek(1 << 16)
            file.write(b'{"step":7,"reco\0\0')
    assert given_up(tmp_path) == []


def test_a_batch_too_large_for_its_slot_blames_no_record(tmp_path: Path) -> None:
    """Storing it would overwrite what follows the slot."""
    many = [RecordId(ORIGIN, offset) for offset in range(20_000)]
    run_processes(tmp_path, *[lambda guard: train(guard, records=many)] * 4)
    assert given_up(tmp_path) == []


def test_a_damaged_crash_history_is_reported(tmp_path: Path) -> None:
    """The message names the file and what to do."""
    (tmp_path / "crashes.json").write_bytes(b'{"decode":{}')
    with pytest.raises(SnapshotError, match=r"crashes\.json.*Remove the file"):
        CrashGuard(tmp_path)
