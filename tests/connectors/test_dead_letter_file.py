"""Dead letters are read back from their file as they were written."""

from pathlib import Path

import pytest

from connectors.dead_letters import FileDeadLetters
from connectors.jsonl import read_file
from streamlearn.errors import DeadLetterError, Reason
from streamlearn.stream.record import Record, TopicPartition
from streamlearn.stream.source import DeadLetter


def test_every_part_is_read_back(tmp_path: Path) -> None:
    """Also beside a daemon that has written half a line."""
    path = tmp_path / "dead_letters.jsonl"
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
    found = list(read_file(path))
    assert [each.record for each in found] == records
    assert {(each.reason, each.stage, each.message) for each in found} == {
        ("not_utf8", "VALUE_CONVERTER", "must be UTF-8")
    }
    assert found[0].where == "r:3:7"


def test_no_file_holds_no_dead_letters(tmp_path: Path) -> None:
    assert list(read_file(tmp_path / "absent.jsonl")) == []


@pytest.mark.parametrize("line", [b"[]", b"{}", b'{"headers":{},"record_headers":[],"key":null,"value":null}', b"x"])
def test_a_line_that_is_no_dead_letter_is_refused(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "dead_letters.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(DeadLetterError, match="expected a dead letter in line 1"):
        list(read_file(path))
