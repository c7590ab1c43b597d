"""Each dead letter is put back once, across calls and kills."""

from pathlib import Path

import pytest

from connectors.dead_letters import DeadLetterId, parse_where
from connectors.replay import JsonlTarget, LedgerReplayer, ReplayLedger
from streamlearn.errors import DeadLetterError, UsageError

from .replay_kit import KilledError, ListTarget, repairs


def opened(path: Path, target: ListTarget) -> LedgerReplayer:
    return LedgerReplayer(ReplayLedger(path), target)


def test_what_was_put_back_is_known_to_the_next_process(tmp_path: Path) -> None:
    path, target = tmp_path / "state" / "replayed.jsonl", ListTarget()
    replayer = opened(path, target)
    replayer.put_back(repairs(1, 2))
    replayer.put_back(repairs(5))
    replayer.close()
    replayer.close()
    later = opened(path, target)
    assert sorted(each.record.offset for each in later.replayed()) == [1, 2, 5]
    later.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"text" not in path.read_bytes()  # no content


@pytest.mark.parametrize("moment", ["kill_before", "kill_after"])
def test_a_kill_around_the_write_neither_loses_nor_repeats_one(moment: str, tmp_path: Path) -> None:
    """The next process asks the target."""
    path, target = tmp_path / "replayed.jsonl", ListTarget()
    replayer = opened(path, target)
    setattr(target, moment, True)
    with pytest.raises(KilledError):
        replayer.put_back(repairs(1, 2))
    replayer.close()
    setattr(target, moment, False)
    later = opened(path, target)
    missing = [each for each in repairs(1, 2, 3) if each.dead_letter.id not in later.replayed()]
    assert len(missing) == (1 if moment == "kill_after" else 3)
    later.put_back(missing)
    later.close()
    assert target.values == [b'{"text": "1"}', b'{"text": "2"}', b'{"text": "3"}']


def test_a_ledger_line_that_was_cut_short_is_dropped(tmp_path: Path) -> None:
    """It was not durable, so what it announces was not begun."""
    path, target = tmp_path / "replayed.jsonl", ListTarget()
    replayer = opened(path, target)
    replayer.put_back(repairs(1))
    replayer.close()
    with path.open("ab") as file:
        file.write(b'{"begun":["records:0:2')
    later = opened(path, target)
    later.put_back(repairs(2))
    later.close()
    last = opened(path, target)
    assert len(last.replayed()) == 2
    last.close()


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "replayed.jsonl"
    path.write_bytes(b'{"arrived":true}\nnonsense\n')
    with pytest.raises(DeadLetterError, match=r"replayed\.jsonl: line 2 is damaged"):
        ReplayLedger(path)


def test_two_replays_at_once_are_refused(tmp_path: Path) -> None:
    first = ReplayLedger(tmp_path / "replayed.jsonl")
    with pytest.raises(DeadLetterError, match="another replay runs"):
        ReplayLedger(tmp_path / "replayed.jsonl")
    first.close()
    ReplayLedger(tmp_path / "replayed.jsonl").close()


def test_lines_are_appended_to_the_source_file(tmp_path: Path) -> None:
    """After a last line without its newline, too."""
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"text": "0"}')
    target = JsonlTarget(path)
    plan = target.plan(repairs(1, 2))
    assert not target.arrived(plan)
    with path.open("ab") as other:
        other.write(b'\n{"text": "of another program"}\n')
    assert not target.arrived(plan)
    target.put(repairs(1, 2))
    assert target.arrived(plan)
    assert path.read_bytes().splitlines()[2:] == [b'{"text": "1"}', b'{"text": "2"}']


def test_an_append_that_was_cut_short_is_not_guessed_about(tmp_path: Path) -> None:
    """The message says how to undo it; after that nothing arrived."""
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"text": "0"}\n')
    target = JsonlTarget(path)
    plan = target.plan(repairs(1, 2))
    target.put(repairs(1, 2))
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with pytest.raises(DeadLetterError, match=r"cut short after 1 of 2 lines.*truncate --size=14 "):
        target.arrived(plan)
    path.write_bytes(content[:14])
    assert not target.arrived(plan)


def test_a_compressed_file_cannot_be_appended_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a plain file only, found .*a\.jsonl\.gz"):
        JsonlTarget(tmp_path / "a.jsonl.gz")


def test_an_identity_survives_text() -> None:
    """Topics may hold anything but the order of the parts."""
    [repair] = repairs(7)
    assert DeadLetterId.parse(str(repair.dead_letter.id)) == repair.dead_letter.id
    assert parse_where(repair.dead_letter.where) == repair.dead_letter.record.id
    for text in ("records", "records:0", "records:x:1", ""):
        with pytest.raises(UsageError, match="expected TOPIC:PARTITION:OFFSET"):
            parse_where(text)
