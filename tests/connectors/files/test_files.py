"""Every format has the same rows, again and again, and says where a damaged one is."""

import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from connectors.rows import CsvFile, FileRow, RowError, open_file
from streamlearn.errors import SourceError, UsageError

from .kit import ROWS, values, write_arrow, write_csv, write_jsonl, write_parquet

WRITERS: dict[str, Callable[[Path], Path]] = {
    "rows.jsonl": write_jsonl,
    "rows.csv": write_csv,
    "rows.csv.gz": write_csv,
    "rows.tsv": lambda path: write_csv(path, delimiter="\t"),
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "rows.feather": lambda path: write_arrow(path, stream=False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows_twice(name: str, tmp_path: Path) -> None:
    """With the number of the last one, and the share that was read."""
    file = open_file(WRITERS[name](tmp_path / name))
    assert file.columns in (None, ("question", "answer"))
    assert values(file) == list(ROWS)
    assert values(file) == list(ROWS)
    assert file.fraction == 1.0
    reading = file.rows(["question", "answer"])
    first = next(reading)
    assert isinstance(first, FileRow)
    assert first.place.number == {"rows.jsonl": 1, "rows.parquet": 1, "rows.arrow": 1, "rows.feather": 1}.get(name, 3)
    assert 0.0 <= file.fraction < 1.0 or name.endswith(".gz")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_only_the_columns_asked_for_are_read(name: str, tmp_path: Path) -> None:
    [first, *_] = open_file(WRITERS[name](tmp_path / name)).rows(["answer"])
    assert isinstance(first, FileRow)
    assert first.values == {"answer": "a0"}


@pytest.mark.parametrize("name", ["rows.csv.gz", "rows.parquet", "rows.arrow", "rows.feather"])
def test_a_damaged_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Cut in its middle, before anything or after the rows before that."""
    path = WRITERS[name](tmp_path / name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(SourceError, match=rf"{name} must be"):
        values(open_file(path))


def test_a_row_with_a_cell_too_many_is_reported_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n3,4,5\n\n6,7\n")
    first, broken, last = open_file(path).rows(["a", "b"])
    assert isinstance(broken, RowError)
    assert "line 3 must have 2 cells as the header has, found 3" in str(broken)
    assert isinstance(first, FileRow)
    assert isinstance(last, FileRow)
    assert (first.place.number, last.place.number) == (2, 5)


def test_lines_of_jsonl_that_are_no_objects_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n[1]\n{"a"\n{"a": 2}\n')
    rows = list(open_file(path).rows(["a"]))
    assert [str(row).partition(" must")[0] for row in rows if isinstance(row, RowError)] == [
        f"{path} line 3",
        f"{path} line 4",
    ]
    assert isinstance(rows[-1], FileRow)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "first line with the names of the columns, found none"),
        (b"a,b,a\n", "each column once, found 'a' twice"),
    ],
)
def test_a_header_that_names_no_columns_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        CsvFile(path, ",")


def test_csv_in_another_encoding_is_refused_with_the_line_before_it(tmp_path: Path) -> None:
    """And a byte order mark is not part of the first column's name."""
    path = tmp_path / "rows.csv"
    path.write_bytes("\ufeffa,b\n1,2\n".encode() + b"caf\xe9,3\n" * 2)
    with pytest.raises(SourceError, match=r"rows\.csv must be readable CSV in UTF-8, found after line \d"):
        values(open_file(path))
    path.write_bytes("\ufeffa,b\n1,2\n".encode())
    assert open_file(path).columns == ("a", "b")


def test_class_labels_become_their_names(tmp_path: Path) -> None:
    """As Hugging Face datasets note them in the schema; -1 is a missing label."""
    noted = (
        b'{"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}, "n": {"dtype": "int64"}}}}'
    )
    table = pa.table({"label": [1, 0, -1], "n": [1, 0, 1]}).replace_schema_metadata({"huggingface": noted})
    rows = values(open_file(write_arrow(tmp_path / "rows.arrow", table)))
    assert rows == [{"label": "yes", "n": 1}, {"label": "no", "n": 0}, {"label": None, "n": 1}]


def test_without_pyarrow_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "rows.parquet")
    for module in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=r"pip install 'streamlearn\[parquet\]'"):
        open_file(path)


@pytest.mark.parametrize("name", ["rows.json", "rows.zip", "rows.xlsx"])
def test_a_format_that_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    """Rather than sent line by line."""
    (tmp_path / name).write_text("x")
    with pytest.raises(UsageError, match=r"a file that ends in \.parquet, .*: convert it first"):
        open_file(tmp_path / name)
