import base64
import errno
import os
from pathlib import Path

import orjson
import pytest

from connectors.dead_letters import FileDeadLetters
from streamlearn.errors import DeadLetterError, Reason
from streamlearn.stream.record import Record, TopicPartition
from streamlearn.stream.source import DeadLetter

ORIGIN = TopicPartition("events", 2)


def letter(offset: int, reason: Reason = Reason.NOT_JSON) -> DeadLetter:
    """A letter about the record at `offset`."""
    headers = (("trace", b"\xff"), ("__streamlearn.errors.offset", b"666"))
    record = Record(ORIGIN, offset, b"\x00{", key=b"k", headers=headers, timestamp_ms=17)
    return DeadLetter(record, reason, "no JSON")


def test_a_line_says_everything_about_its_record(tmp_path: Path) -> None:
    """Connect's header names under our prefix, the record's bytes as base64, no header that the record forged."""
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    sink.send(letter(5))
    sink.flush()
    sink.close()
    line = orjson.loads((tmp_path / "dead.jsonl").read_bytes())
    assert line == {
        "headers": {
            "__streamlearn.errors.topic": "events",
            "__streamlearn.errors.partition": "2",
            "__streamlearn.errors.offset": "5",
            "__streamlearn.errors.stage": "VALUE_CONVERTER",
            "__streamlearn.errors.exception.class.name": "not_json",
            "__streamlearn.errors.exception.message": "no JSON",
            "__streamlearn.errors.timestamp": "17",
        },
        "record_headers": [["trace", base64.b64encode(b"\xff").decode()]],
        "key": base64.b64encode(b"k").decode(),
        "value": base64.b64encode(b"\x00{").decode(),
    }


def test_a_torn_last_line_is_cut_wherever_it_was_torn(tmp_path: Path) -> None:
    """After a crash at any byte of the second letter, the first one stands and the second is written again, once."""
    path = tmp_path / "dead.jsonl"
    sink = FileDeadLetters(path)
    sink.send(letter(0))
    sink.flush()
    first = path.stat().st_size
    sink.send(letter(1))
    sink.flush()
    sink.close()
    whole = path.read_bytes()

    for length in (*range(first, len(whole), 23), len(whole) - 1):
        path.write_bytes(whole[:length])
        again = FileDeadLetters(path)
        assert again.recall(None) == {(ORIGIN, 0)}
        again.send(letter(1))
        again.flush()
        again.close()
        assert path.read_bytes() == whole


def test_a_file_of_one_torn_line_is_emptied(tmp_path: Path) -> None:
    """A tail longer than the buffer that looks for its beginning goes too."""
    path = tmp_path / "dead.jsonl"
    path.write_bytes(b"x" * 200_000)
    sink = FileDeadLetters(path)
    assert path.stat().st_size == 0
    assert sink.recall(None) == frozenset()
    sink.close()


def test_a_mark_behind_the_end_recalls_everything(tmp_path: Path) -> None:
    """A file that was replaced by a shorter one has nothing to do with the mark."""
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    sink.send(letter(0))
    sink.flush()
    assert sink.recall({"file": "dead.jsonl", "bytes": 10_000}) == {(ORIGIN, 0)}
    assert sink.recall({"file": "dead.jsonl", "bytes": 7}) == {(ORIGIN, 0)}
    sink.close()


def test_a_foreign_line_is_named(tmp_path: Path) -> None:
    """A line that no daemon wrote is not guessed at."""
    path = tmp_path / "dead.jsonl"
    path.write_bytes(b'{"text": "not a letter"}\n')
    sink = FileDeadLetters(path)
    with pytest.raises(DeadLetterError, match=r"dead\.jsonl: at byte 0 a dead letter must stand"):
        sink.recall(None)
    sink.close()


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    """What cannot be opened fails at the start, with its path."""
    (tmp_path / "state").write_text("a file where a folder must be")
    with pytest.raises(DeadLetterError, match=r"cannot be opened: .*dead\.jsonl"):
        FileDeadLetters(tmp_path / "state" / "dead.jsonl")


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """A letter that does not reach the disk is never taken for written."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    disk, sink._file = sink._file, full.open("wb", buffering=0)
    sink.send(letter(0))
    for _ in range(2):
        with pytest.raises(DeadLetterError, match=r"cannot be flushed: .*No space left"):
            sink.flush()
    sink._file.close()
    sink._file = disk
    sink.send(letter(1))
    sink.flush()
    assert sink.recall(None) == {(ORIGIN, 0), (ORIGIN, 1)}
    sink.close()


def test_a_torn_write_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a letter that found room does not stand before the whole one of the next try."""
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    sink.send(letter(0))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 2]))
        with pytest.raises(DeadLetterError, match="No space left for"):
            sink.flush()
    sink.flush()
    assert sink.recall(None) == {(ORIGIN, 0)}
    sink.close()


def test_a_failed_fsync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one may succeed and mean nothing, so the sink takes nothing for written any more."""
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    mark = sink.mark()
    sink.send(letter(0))

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(DeadLetterError, match="Input/output error"):
            sink.flush()
    with pytest.raises(DeadLetterError, match="Input/output error"):
        sink.flush()
    assert sink.mark() == mark
    sink.close()


def test_what_no_disk_takes_is_bounded(tmp_path: Path) -> None:
    """Letters wait up to a bound, then the error names their number; none is dropped before it."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    sink._file.close()
    sink._file = full.open("wb", buffering=0)
    for offset in range(60):
        sink.send(_mebibyte(offset))
    with pytest.raises(DeadLetterError, match=r"6[0-9] wait \(6[0-9] MiB\)"):  # noqa: PT012 - one of them is too many
        for offset in range(60, 80):
            sink.send(_mebibyte(offset))
    sink.close()


def _mebibyte(offset: int) -> DeadLetter:
    return DeadLetter(Record(ORIGIN, offset, b"x" * (1 << 20)), Reason.NOT_JSON, "no JSON")
