"""What a dead process had in hand: counted, and given up when it killed for the third time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamlearn.errors import Reason, RecordError, SnapshotError
from streamlearn.events import Event
from streamlearn.snapshot.crash_guard import CrashGuard
from streamlearn.stream.record import Position, RecordId, TopicPartition

ORIGIN = TopicPartition("orders", 3)
BATCH = tuple(RecordId(ORIGIN, offset) for offset in (4, 5, 9))


class DeadError(BaseException):
    """The process ends here."""


@contextmanager
def dying() -> Iterator[None]:
    with pytest.raises(DeadError):
        yield


def decode(hand: CrashGuard, record: RecordId = BATCH[1]) -> None:
    with dying(), hand.decoding(record):
        raise DeadError


def train(hand: CrashGuard, step: int = 7, records: Sequence[RecordId] = BATCH) -> None:
    with dying(), hand.training(step, records):
        raise DeadError


def lives(state: Path, *deaths: Callable[[CrashGuard], None]) -> None:
    """One process after the other, each with its death."""
    for death in deaths:
        with closing(CrashGuard(state)) as hand:
            death(hand)


def given_up(state: Path) -> list[int]:
    with closing(CrashGuard(state)) as hand:
        return sorted(record.offset for record in hand.given_up)


def test_a_record_that_killed_three_times_in_decoding_is_given_up(tmp_path: Path) -> None:
    """Not after the second death, and only that record; the log tells each death."""
    lives(tmp_path, decode, decode)
    assert given_up(tmp_path) == []
    with capture_logs() as logs:
        lives(tmp_path, decode)
        assert given_up(tmp_path) == [5]
    assert [(log["deaths"], log["given_up"]) for log in logs if log["event"] == Event.CRASH_DETECTED] == [(3, True)]


def test_deaths_of_different_causes_do_not_add_up(tmp_path: Path) -> None:
    """Whoever is killed at random times gives nothing up."""
    for step in range(1, 12):
        lives(tmp_path, lambda hand, at=step: train(hand, at // 2), lambda hand, at=step: decode(hand, BATCH[at % 3]))  # type: ignore[misc]
        assert given_up(tmp_path) == []


def test_what_was_done_is_not_in_hand(tmp_path: Path) -> None:
    """Records and batches that were finished with, or refused with an error of ours, are nobody's death."""
    for _ in range(4):
        with closing(CrashGuard(tmp_path)) as hand:
            with hand.decoding(BATCH[0]):
                pass
            with pytest.raises(RecordError), hand.decoding(BATCH[1]):
                raise RecordError(Reason.EMPTY, "no use")
            with hand.training(3, BATCH):
                pass
    assert not (tmp_path / "deaths.json").exists()


def test_an_error_that_nobody_expected_is_a_death(tmp_path: Path) -> None:
    """It ends the process as surely as a signal does."""

    def broken(hand: CrashGuard) -> None:
        with pytest.raises(ZeroDivisionError), hand.training(7, BATCH[:1]):
            raise ZeroDivisionError

    lives(tmp_path, broken, broken, broken)
    assert given_up(tmp_path) == [4]


def test_a_batch_is_taken_record_by_record_after_two_deaths(tmp_path: Path) -> None:
    """The third death then names one record, and that alone is given up."""
    lives(tmp_path, train, train)
    with closing(CrashGuard(tmp_path)) as hand:
        with hand.training(8, BATCH) as other:
            assert not other.one_by_one
        with dying(), hand.training(7, BATCH) as batch:
            assert batch.one_by_one
            batch.on_record(0)
            batch.on_record(1)
            raise DeadError
    assert given_up(tmp_path) == [5]


def test_a_batch_without_a_culprit_is_given_up_whole(tmp_path: Path) -> None:
    """When it dies where no single record is being looked at."""
    lives(tmp_path, train, train, train)
    assert given_up(tmp_path) == [4, 5, 9]


def test_what_a_snapshot_covers_is_forgotten(tmp_path: Path) -> None:
    """Given up records are kept until none of them can come again, over any number of starts."""
    lives(tmp_path, train, train, train)
    with closing(CrashGuard(tmp_path)) as hand:
        hand.passed(Position({ORIGIN: 9}))
    assert given_up(tmp_path) == [9]
    with closing(CrashGuard(tmp_path)) as hand:
        hand.passed(Position({ORIGIN: 10}))
    assert given_up(tmp_path) == []


def test_a_new_run_knows_of_no_deaths(tmp_path: Path) -> None:
    """Nothing is given up any more, and counting begins anew."""
    lives(tmp_path, train, train, train)
    with closing(CrashGuard(tmp_path)) as hand:
        hand.forget()
    lives(tmp_path, train, train)
    assert given_up(tmp_path) == []


def test_half_a_slot_blames_nobody(tmp_path: Path) -> None:
    """A process that died while it wrote a slot leaves rubbish there."""
    for _ in range(4):
        with closing(CrashGuard(tmp_path)) as hand:
            train(hand)
        with (tmp_path / "in-hand").open("r+b") as file:
            file.seek(1 << 16)
            file.write(b'{"step":7,"reco\0\0')
    assert given_up(tmp_path) == []


def test_a_batch_too_long_for_its_slot_blames_nobody(tmp_path: Path) -> None:
    """Writing it down would overwrite what lies behind."""
    many = [RecordId(ORIGIN, offset) for offset in range(20_000)]
    lives(tmp_path, *[lambda hand: train(hand, records=many)] * 4)
    assert given_up(tmp_path) == []


def test_a_damaged_tally_is_told(tmp_path: Path) -> None:
    """With the file's name, and what to do."""
    (tmp_path / "deaths.json").write_bytes(b'{"decode":{}')
    with pytest.raises(SnapshotError, match=r"deaths\.json.*Remove the file"):
        CrashGuard(tmp_path)
