"""Dead letters in a file: headers, backlog, and what is written and read back."""

import base64
import errno
import os
from pathlib import Path

import orjson
import pytest

from connectors.dead_letters import (
    PREFIX,
    DeadLetterBacklog,
    FileDeadLetters,
    headers_of,
    own_headers,
    read_file,
    record_of,
)
from streamlearn.errors import DeadLetterError, Reason
from streamlearn.stream.position import RecordId, TopicPartition
from streamlearn.stream.record import Record
from streamlearn.stream.source import DeadLetter

ORIGIN = TopicPartition("events", 2)


def dead_letter(offset: int, reason: Reason = Reason.NOT_JSON) -> DeadLetter:
    headers = (("trace", b"\xff"), ("__streamlearn.errors.offset", b"666"))
    record = Record(ORIGIN, offset, b"\x00{", key=b"k", headers=headers, timestamp_ms=17)
    return DeadLetter(record, reason, "no JSON")


def test_a_line_contains_the_record_and_the_reason(tmp_path: Path) -> None:
    """Kafka Connect's header names under our prefix, the record's bytes in base64, no forged headers."""
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    sink.send(dead_letter(5))
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


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    """Records may be private; so is a folder that is made for it."""
    path = tmp_path / "made" / "dead.jsonl"
    FileDeadLetters(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    """After a crash at any byte of the second dead letter, the first one stays and the second is written once."""
    path = tmp_path / "dead.jsonl"
    sink = FileDeadLetters(path)
    sink.send(dead_letter(0))
    sink.flush()
    first = path.stat().st_size
    sink.send(dead_letter(1))
    sink.flush()
    sink.close()
    whole = path.read_bytes()

    for length in (*range(first, len(whole), 23), len(whole) - 1):
        path.write_bytes(whole[:length])
        again = FileDeadLetters(path)
        assert again.recall(None) == {(ORIGIN, 0)}
        again.send(dead_letter(1))
        again.flush()
        again.close()
        assert path.read_bytes() == whole


def test_a_file_with_only_an_incomplete_line_is_emptied(tmp_path: Path) -> None:
    """Even if the line is longer than the buffer that is searched for its start."""
    path = tmp_path / "dead.jsonl"
    path.write_bytes(b"x" * 200_000)
    sink = FileDeadLetters(path)
    assert path.stat().st_size == 0
    assert sink.recall(None) == frozenset()
    sink.close()


def test_a_mark_past_the_end_recalls_everything(tmp_path: Path) -> None:
    """The mark does not belong to a file that was replaced by a shorter one."""
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    sink.send(dead_letter(0))
    sink.flush()
    assert sink.recall({"file": "dead.jsonl", "bytes": 10_000}) == {(ORIGIN, 0)}
    assert sink.recall({"file": "dead.jsonl", "bytes": 7}) == {(ORIGIN, 0)}
    sink.close()


def test_a_line_that_is_no_dead_letter_is_an_error(tmp_path: Path) -> None:
    """The message names the file and the byte."""
    path = tmp_path / "dead.jsonl"
    path.write_bytes(b'{"text": "not a dead letter"}\n')
    sink = FileDeadLetters(path)
    with pytest.raises(DeadLetterError, match=r"dead\.jsonl: expected a dead letter at byte 0, found"):
        sink.recall(None)
    sink.close()


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """A dead letter that does not reach the disk never counts as written."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    disk, sink._file = sink._file, full.open("wb", buffering=0)
    sink.send(dead_letter(0))
    for _ in range(2):
        with pytest.raises(DeadLetterError, match=r"cannot be flushed: .*No space left"):
            sink.flush()
    sink._file.close()
    sink._file = disk
    sink.send(dead_letter(1))
    sink.flush()
    assert sink.recall(None) == {(ORIGIN, 0), (ORIGIN, 1)}
    sink.close()


def test_an_incomplete_write_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line that fitted on the disk is removed before the next attempt."""
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    sink.send(dead_letter(0))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 2]))
        with pytest.raises(DeadLetterError, match="No space left for"):
            sink.flush()
    sink.flush()
    assert sink.recall(None) == {(ORIGIN, 0)}
    sink.close()


def test_a_failed_fsync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second fsync could report a success that is none, so every later flush fails."""
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    mark = sink.mark()
    sink.send(dead_letter(0))

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


def test_the_backlog_of_a_full_disk_is_bounded(tmp_path: Path) -> None:
    """At the limit an error states the number of waiting dead letters; none is dropped."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    sink = FileDeadLetters(tmp_path / "dead.jsonl")
    sink._file.close()
    sink._file = full.open("wb", buffering=0)
    for offset in range(60):
        sink.send(sized(offset, 1 << 20))
    with pytest.raises(DeadLetterError, match=r"found 6[0-9] waiting \(6[0-9] MiB\)"):  # noqa: PT012 - one of them fails
        for offset in range(60, 80):
            sink.send(sized(offset, 1 << 20))
    sink.close()


def test_every_part_is_read_back(tmp_path: Path) -> None:
    """Also beside a daemon that has written half a line."""
    path = tmp_path / "dead_letters.jsonl"
    assert list(read_file(path)) == []
    records = [
        Record(TopicPartition("r", 3), 7, b"\xff\x00", b"key", (("h", b"\xfe"),), 17),
        Record(TopicPartition("r", 0), 8, None),
    ]
    sink = FileDeadLetters(path)
    for record in records:
        sink.send(DeadLetter(record, Reason.NOT_UTF8, "must be UTF-8"))
    sink.flush()
    sink.close()
    with path.open("ab") as file:
        file.write(b'{"headers":')
    dead_letters = list(read_file(path))
    assert [dead_letter.record for dead_letter in dead_letters] == records
    assert {(dead_letter.reason, dead_letter.message) for dead_letter in dead_letters} == {
        ("not_utf8", "must be UTF-8")
    }


@pytest.mark.parametrize("line", [b"[]", b"{}", b'{"headers":{},"record_headers":[],"key":null,"value":null}', b"x"])
def test_a_line_that_is_no_dead_letter_is_refused(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "dead_letters.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(DeadLetterError, match="expected a dead letter in line 1"):
        list(read_file(path))


RECORD = Record(TopicPartition("events", 2), 5, b"{", headers=(("trace", b"1"), (f"{PREFIX}offset", b"666")))


def test_headers_identify_their_record() -> None:
    """As text, and as the bytes that Kafka stores."""
    headers = headers_of(DeadLetter(RECORD, Reason.NOT_JSON, "no JSON"))
    assert record_of(headers) == RECORD.id == RecordId(TopicPartition("events", 2), 5)
    assert record_of([(name, value.encode()) for name, value in headers.items()]) == RECORD.id
    assert own_headers(RECORD) == [("trace", b"1")], "a record cannot forge them"


def test_other_headers_identify_no_record() -> None:
    """Without one of the names, or with an offset that is not a number."""
    assert record_of({}) is None
    assert record_of([(f"{PREFIX}topic", b"a"), (f"{PREFIX}partition", b"0"), (f"{PREFIX}offset", b"x")]) is None


def test_a_header_without_a_value_is_absent() -> None:
    """Kafka allows it, and a foreign writer's must not stop a start; headers beside those needed are not read."""
    headers: list[tuple[str, bytes | None]] = [
        (name, value.encode()) for name, value in headers_of(DeadLetter(RECORD, Reason.NOT_JSON, "")).items()
    ]
    assert record_of([*headers, ("trace", None), (f"{PREFIX}stage", None)]) == RECORD.id
    assert record_of([("trace", None)]) is None
    assert record_of([(name, None if name.endswith("offset") else value) for name, value in headers]) is None


def test_an_update_that_was_refused_has_its_own_stage() -> None:
    """Kafka Connect's TASK_PUT; every other reason is a fault of the value."""
    stages = {reason: headers_of(DeadLetter(RECORD, reason, ""))[f"{PREFIX}stage"] for reason in Reason}
    assert [reason for reason, stage in stages.items() if stage == "TASK_PUT"] == [
        Reason.NOT_FINITE_UPDATE,
        Reason.SKIPPED,
    ]
    assert set(stages.values()) == {"TASK_PUT", "VALUE_CONVERTER"}


def sized(offset: int, size: int = 100) -> DeadLetter:
    return DeadLetter(Record(ORIGIN, offset, b"x" * size), Reason.NOT_JSON, "no JSON")


def offsets(backlog: DeadLetterBacklog) -> list[int]:
    return [dead_letter.record.offset for dead_letter in backlog]


def test_dead_letters_keep_their_order_until_they_are_written() -> None:
    """`drop` removes those of the written records, `clear` all of them."""
    backlog = DeadLetterBacklog()
    for offset in range(4):
        backlog.add(sized(offset))
    size = backlog.bytes
    backlog.drop({RecordId(ORIGIN, 1), RecordId(ORIGIN, 2)})
    assert offsets(backlog) == [0, 3]
    assert backlog.bytes == size // 2
    backlog.clear()
    assert (len(backlog), backlog.bytes) == (0, 0)


def test_a_full_backlog_refuses_the_next_dead_letter() -> None:
    """One that alone exceeds the limit is accepted, so that it can be written at all."""
    backlog = DeadLetterBacklog(max_bytes=1000)
    backlog.add(sized(0, size=5000))
    with pytest.raises(DeadLetterError, match="must accept dead letters, found 1 waiting"):
        backlog.add(sized(1))
    assert offsets(backlog) == [0]
