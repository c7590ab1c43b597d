"""Numbered lines of a file."""

import gzip
from pathlib import Path

from connectors.jsonl import LineReader, read_lines


def test_read_lines_skips_blank_lines(tmp_path: Path) -> None:
    """In a gzip file too."""
    path = tmp_path / "events.jsonl.gz"
    path.write_bytes(gzip.compress(b"a\n\nb"))
    assert list(read_lines(path)) == [b"a", b"b"]


def test_the_reader_numbers_the_next_line(tmp_path: Path) -> None:
    """The number is that of the line that `next_line` will return."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"a\nb\nc\n")
    reader = LineReader(path)
    reader.skip_to(2)
    assert (reader.number, reader.next_line(), reader.number) == (2, b"c", 3)
    reader.close()
