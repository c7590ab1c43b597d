"""The JSONL source and its lines."""

import gzip
import os
from pathlib import Path

import pytest

from connectors.jsonl import JsonlSource
from streamlearn.errors import OffsetGapError, SourceError
from streamlearn.settings import JsonlSettings
from streamlearn.stream.position import Position, TopicPartition
from streamlearn.stream.record import Record
from tests.connectors.kafka.doubles import SteppingClock


def opened(path: Path, at: int = 0, *, follow: bool = False, max_line_bytes: int = 1 << 20) -> JsonlSource:
    source = JsonlSource(JsonlSettings(path=path, follow=follow), max_line_bytes=max_line_bytes)
    source.seek(Position({TopicPartition(path.name, 0): at}))
    return source


def lines(records: object) -> list[tuple[int, bytes | None]]:
    assert isinstance(records, list)
    return [(record.offset, record.value) for record in records if isinstance(record, Record)]


def test_line_numbers_are_offsets_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    """Blank lines are counted, so an offset is always the line's number in the file."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"a\n\n  \r\nb\r\n\nc\n\n")
    source = opened(path)
    assert lines(source.poll(max_records=9, timeout_s=0)) == [(0, b"a"), (3, b"b\r"), (5, b"c")]
    assert source.exhausted
    source.close()


def test_the_last_line_of_a_file_that_is_read_once_needs_no_newline(tmp_path: Path) -> None:
    """A complete file may end without a newline."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"a\nb")
    source = opened(path)
    assert lines(source.poll(max_records=9, timeout_s=0)) == [(0, b"a"), (1, b"b")]
    source.close()

    rest = opened(path, at=2)
    assert rest.exhausted
    assert rest.lag(Position({TopicPartition("events.jsonl", 0): 1})) == {TopicPartition("events.jsonl", 0): 1}
    rest.close()


def test_following_waits_for_the_newline(tmp_path: Path) -> None:
    """An incomplete line is not a record until its newline is written."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"a\nhal")
    source = opened(path, follow=True)
    assert lines(source.poll(max_records=9, timeout_s=0)) == [(0, b"a")]
    assert lines(source.poll(max_records=9, timeout_s=0)) == []
    append(path, b"f")
    assert lines(source.poll(max_records=9, timeout_s=0)) == []
    append(path, b"\nnext\n")
    assert lines(source.poll(max_records=9, timeout_s=0)) == [(1, b"half"), (2, b"next")]
    assert not source.exhausted
    source.close()


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_following_returns_as_soon_as_there_is_a_line(tmp_path: Path) -> None:
    """A poll sleeps between reads, never beyond its timeout, and returns with the first line."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"")
    grown = iter([b"", b"", b"late\n"])
    clock = SteppingClock(lambda: append(path, next(grown)))
    settings = JsonlSettings(path=path, follow=True, poll_interval_s=0.25)
    source = JsonlSource(settings, clock=clock, sleep=clock.sleep)
    source.seek(Position())

    assert lines(source.poll(max_records=9, timeout_s=0.3)) == []
    assert clock.now == pytest.approx(0.3)
    assert lines(source.poll(max_records=9, timeout_s=10.0)) == [(0, b"late")]
    assert clock.now == pytest.approx(0.55)
    source.close()


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("length", [7, 8, 9, 30, 3 << 20])
def test_a_line_over_the_limit_is_truncated_and_the_next_one_is_not(tmp_path: Path, length: int, follow: bool) -> None:
    """A longer line keeps one byte more than the limit; the rest is skipped."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * length + b"\nnext\n")
    source = opened(path, follow=follow, max_line_bytes=8)
    assert lines(source.poll(max_records=9, timeout_s=0)) == [(0, b"x" * min(length, 9)), (1, b"next")]
    source.close()

    resumed = opened(path, at=1, follow=follow, max_line_bytes=8)
    assert lines(resumed.poll(max_records=9, timeout_s=0)) == [(1, b"next")]
    resumed.close()


def test_a_growing_line_over_the_limit_is_skipped_to_its_end(tmp_path: Path) -> None:
    """What is appended to it later is not a separate line."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 20)
    source = opened(path, follow=True, max_line_bytes=8)
    assert lines(source.poll(max_records=9, timeout_s=0)) == [(0, b"x" * 9)]
    append(path, b"y" * 20)
    assert lines(source.poll(max_records=9, timeout_s=0)) == []
    append(path, b"z\nnext\n")
    assert lines(source.poll(max_records=9, timeout_s=0)) == [(1, b"next")]
    source.close()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_position_past_the_end_is_a_gap(tmp_path: Path, suffix: str) -> None:
    """A file with fewer lines than were trained was truncated or replaced; the message states both numbers."""
    path = tmp_path / f"events.jsonl{suffix}"
    path.write_bytes(gzip.compress(b"a\nb\n") if suffix else b"a\nb\n")
    with pytest.raises(OffsetGapError, match=r"events\.jsonl.* must have the 3 lines .* found 2: .* --fresh"):
        opened(path, at=3)


def test_a_truncated_followed_file_is_a_gap(tmp_path: Path) -> None:
    """A writer that truncates its file has destroyed unread lines."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"a\nb\n")
    source = opened(path, follow=True)
    source.poll(max_records=9, timeout_s=0)
    path.write_bytes(b"c\n")
    with pytest.raises(OffsetGapError, match="truncated to 2 bytes after 4 had been read"):
        source.poll(max_records=9, timeout_s=0)
    source.close()


def test_a_replaced_followed_file_is_a_gap_after_its_last_line(tmp_path: Path) -> None:
    """Rotation is detected after every line of the old file was returned."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"a\n")
    source = opened(path, follow=True)
    source.poll(max_records=9, timeout_s=0)
    append(path, b"b\n")
    path.rename(tmp_path / "events.jsonl.1")
    assert lines(source.poll(max_records=9, timeout_s=0)) == [(1, b"b")]
    assert lines(source.poll(max_records=9, timeout_s=0)) == []
    path.write_bytes(b"new file\n")
    with pytest.raises(OffsetGapError, match="replaced by another file"):
        source.poll(max_records=9, timeout_s=0)
    source.close()


@pytest.mark.parametrize("follow", [False, True])
def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path, follow: bool) -> None:
    """Once, and only at the beginning of the file."""
    mark = "\ufeff".encode()
    path = tmp_path / "events.jsonl"
    path.write_bytes(mark + b"a\r\n" + mark + b"b\n")
    source = opened(path, follow=follow)
    assert lines(source.poll(max_records=9, timeout_s=0)) == [(0, b"a\r"), (1, mark + b"b")]
    source.close()
    if not follow:
        packed = tmp_path / "events.jsonl.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        source = opened(packed)
        assert lines(source.poll(max_records=1, timeout_s=0)) == [(0, b"a\r")]
        source.close()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_another_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    """Rather than every line being a dead letter."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"text": "a"}\n' * 3, encoding=encoding)
    source = opened(path)
    with pytest.raises(SourceError, match=rf"in UTF-8, found {encoding[:6].upper()}: convert it, .*`iconv -f UTF-"):
        source.poll(max_records=9, timeout_s=0)
    source.close()


def test_a_first_line_of_odd_bytes_is_a_line(tmp_path: Path) -> None:
    """It becomes a dead letter; the lines after it are read."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\xff\xfe\xfd\nb\n")
    source = opened(path)
    assert lines(source.poll(max_records=9, timeout_s=0)) == [(0, b"\xff\xfe\xfd"), (1, b"b")]
    source.close()


def test_gzip_under_another_name_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(gzip.compress(b"a\n"))
    source = opened(path)
    with pytest.raises(SourceError, match=r"found gzip, but a name without \.gz: rename it"):
        source.poll(max_records=9, timeout_s=0)
    source.close()


DAMAGED_AT = {"truncated": 900, "flipped": 900, "not gzip": 0}


def read_on(source: JsonlSource) -> None:
    while not source.exhausted:
        source.poll(max_records=100, timeout_s=0)


@pytest.mark.parametrize("damage", DAMAGED_AT)
def test_a_damaged_gzip_file_returns_its_valid_lines_and_then_fails(tmp_path: Path, damage: str) -> None:
    """Every line before the damage is returned, then an error states the place."""
    text = b"".join(b"%d %s\n" % (number, os.urandom(64).hex().encode()) for number in range(2000))
    packed = bytearray(gzip.compress(text))
    if damage == "truncated":
        del packed[len(packed) // 2 :]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    else:
        packed = bytearray(text)
    path = tmp_path / "events.jsonl.gz"
    path.write_bytes(packed)
    source = opened(path)

    valid = text.splitlines()[: DAMAGED_AT[damage]]
    returned: list[bytes | None] = []
    while len(returned) < len(valid):
        returned += [record.value for record in source.poll(max_records=1, timeout_s=0)]
    assert returned == valid
    with pytest.raises(SourceError, match="Repair or replace"):
        read_on(source)
    assert not source.exhausted
    assert source.lag(Position()) == {}
    source.close()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message contains the path."""
    with pytest.raises(SourceError, match=r"nowhere\.jsonl must be a readable file, found: No such file"):
        opened(tmp_path / "nowhere.jsonl")


def test_the_position_of_another_file_is_ignored(tmp_path: Path) -> None:
    """A configuration that names another file begins at its first line."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"a\n")
    source = JsonlSource(JsonlSettings(path=path))
    start = source.seek(Position({TopicPartition("yesterday.jsonl", 0): 1000}))
    assert start == Position({TopicPartition("events.jsonl", 0): 0})
    source.close()


def test_lag_grows_with_a_followed_file(tmp_path: Path) -> None:
    """Lag counts complete lines, and each call reads only what was appended."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"a\nb\nhal")
    origin = TopicPartition("events.jsonl", 0)
    source = opened(path, follow=True)
    assert source.lag(Position({origin: 1})) == {origin: 1}
    append(path, b"f\nc\n")
    assert source.lag(Position({origin: 1})) == {origin: 3}
    source.close()
