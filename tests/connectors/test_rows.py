"""Rows of every format, and which columns become which field of a record."""

import os
import sys
import threading
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from connectors.columns import ColumnMapping, ColumnText, Records
from connectors.rows import FileRow, JsonlFile, Place, RowError, open_file
from streamlearn.errors import SourceError, UsageError
from streamlearn.settings import StreamSettings
from streamlearn.stream.parse import parse
from tests.connectors.row_files import (
    ROWS,
    save_to_disk,
    values,
    write_arrow,
    write_csv,
    write_jsonl,
    write_parquet,
)

pytestmark = pytest.mark.filterwarnings(  # `datasets` leaves a CSV file that was not read to its end open
    "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
)

HERE = Place(Path("rows.csv"), "line", 3)
PAIR = {"prompt": "question", "completion": "answer"}


def record(fields: dict[str, str], values: dict[str, Any], *meta: str) -> Any:
    """The record of a row, which the daemon's own parser must accept."""
    return parse(ColumnMapping(fields, meta).record(FileRow(HERE, values)), StreamSettings())


def test_columns_become_fields_and_others_are_left_out() -> None:
    row = {"question": "why?", "answer": 3, "id": 7}
    assert record(PAIR, row) == {"prompt": "why?", "completion": "3"}
    assert record(PAIR, row, "id", "answer") == {"prompt": "why?", "completion": "3", "meta": {"id": 7, "answer": 3}}


def test_a_template_joins_columns() -> None:
    """Values are inserted as they stand, braces included."""
    fields = {"prompt": "{title}:\n{{{body}}}", "completion": "ok"}
    assert record(fields, {"title": "{body}", "body": 1.5, "ok": True}) == {
        "prompt": "{body}:\n{1.5}",
        "completion": "true",
    }


@pytest.mark.parametrize("template", ["{a", "a}", "{}", "{{}}", "{a!r}", "{a:>9}", ""])
def test_a_template_that_is_none_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="--text"):
        ColumnText("--text", template)


def test_a_template_reaches_no_attribute_of_a_value() -> None:
    """What is in braces is the name of a column, whatever it looks like."""
    assert ColumnText("--text", "{a.__class__}").columns == ("a.__class__",)


@pytest.mark.parametrize("fields", [{}, {"prompt": "a"}, {"text": "a", "messages": "b"}, {"text": "a", "image": "b"}])
def test_fields_that_make_no_record_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(
        UsageError, match="expected columns for --text, for --prompt and --completion, or for --messages"
    ):
        ColumnMapping(fields)


def test_an_unknown_column_is_refused_with_the_nearest_and_all_others() -> None:
    with pytest.raises(UsageError, match=r"rows.csv has no column 'answer', did you mean 'answers'\? Its columns are "):
        ColumnMapping(PAIR).check(["question", "answers", "id"], Path("rows.csv"))


def test_one_column_that_holds_separators_suggests_the_delimiter() -> None:
    with pytest.raises(UsageError, match="add --delimiter"):
        ColumnMapping(PAIR).check(["question;answer"], Path("rows.csv"))


@pytest.mark.parametrize(
    ("fields", "values", "message"),
    [
        (PAIR, {"question": None, "answer": "a"}, "column 'question' must be text or a number, found null"),
        (PAIR, {"question": ["a"], "answer": "a"}, "column 'question' must be text or a number, found list"),
        (PAIR, {"question": "a"}, "has no column 'answer'"),
        (PAIR, {"question": "\ud800", "answer": "a"}, "surrogates"),
        ({"messages": "m"}, {"m": "[{"}, "column 'm' must hold JSON for messages"),
        ({"messages": "m"}, {"m": '{"a":' * 900 + "1" + "}" * 900}, "must hold a list"),
        ({"messages": "m"}, {"m": '[{"a":' + "[" * 900 + "]" * 900 + "}]"}, "recursion"),
        ({"messages": "m"}, {"m": {"role": "user"}}, "column 'm' must hold a list for messages, found dict"),
        ({**PAIR, "image": "i"}, {"question": "a", "answer": "b", "i": {"bytes": None, "path": "x"}}, "found a path"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_row(
    fields: dict[str, str], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RowError, match=rf"rows\.csv line 3.*{message}"):
        ColumnMapping(fields).record(FileRow(HERE, values))


def test_messages_are_lists_or_json_and_lose_the_nulls_that_arrow_adds() -> None:
    said = [{"role": "user", "content": "hi", "name": None}, {"role": "assistant", "content": "yes", "name": None}]
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert record({"messages": "m"}, {"m": said}) == {"messages": plain}
    assert record({"messages": "m"}, {"m": orjson.dumps(plain).decode()}) == {"messages": plain}


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "?"}], "tool_calls": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}],
    },
]


def test_nulls_of_arrow_are_left_out_at_every_depth() -> None:
    """But a message without content says so."""
    plain = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    ]
    tools = [{"function": {"name": "f", "description": None}}]
    fields = {"messages": "m", "tools": "t"}
    assert record(fields, {"m": MESSAGES, "t": tools}) == {"messages": plain, "tools": [{"function": {"name": "f"}}]}
    assert record({"messages": "m", "tools": "t"}, {"m": MESSAGES, "t": None}) == {"messages": plain}
    assert record({"prompt": "p", "completion": "c"}, {"p": MESSAGES[:1], "c": MESSAGES[1:]}) == {
        "prompt": plain[:1],
        "completion": plain[1:],
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (12.0, "12.0"),
        (10**30, str(10**30)),
        (Decimal("12.50"), "12.50"),
        (Decimal("1E+3"), "1000"),
        (date(2024, 5, 1), "2024-05-01"),
        (datetime(2024, 5, 1, 12, 30), "2024-05-01T12:30:00"),
        (time(12, 30), "12:30:00"),
        (float("nan"), None),
        (float("inf"), None),
        (Decimal("NaN"), None),
        (b"bytes", None),
        (None, None),
    ],
)
def test_a_value_is_written_as_a_person_would(value: object, text: str | None) -> None:
    """NaN and infinities are missing values: an error in a text, left out in meta."""
    column = ColumnText("--text", "{a}!")
    if text is None:
        with pytest.raises(TypeError, match="column 'a' must "):
            column.fill({"a": value})
    else:
        assert column.fill({"a": value}) == f"{text}!"
    if isinstance(value, float | Decimal) and text is not None:
        assert record({"text": "t"}, {"t": "a", "a": value}, "a")["meta"]["a"] in (value, text)
    if isinstance(value, float) and text is None:
        assert record({"text": "t"}, {"t": "a", "a": value, "b": [value, {"c": value}]}, "a", "b")["meta"] == {
            "b": [None, {}]
        }


def test_images_are_encoded() -> None:
    """Those of Hugging Face datasets, of binary columns, several, and none; text is base64 already."""
    fields = {**PAIR, "image": "i"}
    for given, expected in (
        ({"bytes": b"png", "path": None}, "cG5n"),
        (b"png", "cG5n"),
        ([b"png", "cG5n"], ["cG5n", "cG5n"]),
        ("cG5n", "cG5n"),
    ):
        assert record(fields, {"question": "a", "answer": "b", "i": given})["image"] == expected
    absent: list[object] = [None, "", []]
    for nothing in absent:
        assert "image" not in record(fields, {"question": "a", "answer": "b", "i": nothing})
    assert ColumnMapping.by_name(["messages", "images"], HERE.path).columns == {"messages", "images"}


def test_columns_named_like_fields_need_no_mapping() -> None:
    """The first form that they make, with image and meta."""
    path = Path("rows.parquet")
    found = ColumnMapping.by_name(["id", "completion", "prompt", "text", "meta", "image"], path)
    assert found.columns == {"prompt", "completion", "meta", "image"}
    assert ColumnMapping.by_name(["text", "image"], path).columns == {"text"}
    assert ColumnMapping.by_name(["input_ids", "labels"], path).columns == {"input_ids", "labels"}
    with pytest.raises(UsageError, match=r"found 'a', 'b'. Name them, for example --prompt COLUMN"):
        ColumnMapping.by_name(["a", "b"], path)


def test_token_ids_stay_integers() -> None:
    assert record({"input_ids": "input_ids", "labels": "labels"}, {"input_ids": [1, 2], "labels": None}) == {
        "input_ids": [1, 2]
    }


WRITERS: dict[str, Callable[[Path], Path]] = {
    "rows.jsonl": write_jsonl,
    "rows.csv": write_csv,
    "rows.csv.gz": write_csv,
    "rows.tsv": lambda path: write_csv(path, delimiter="\t"),
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "saved": save_to_disk,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows_twice(name: str, tmp_path: Path) -> None:
    """In order, with the number of each; only JSONL knows how much was read."""
    file = open_file(WRITERS[name](tmp_path / name))
    assert file.columns in (None, ("question", "answer"))
    assert values(file) == list(ROWS)
    assert values(file) == list(ROWS)
    assert file.fraction == (1.0 if name == "rows.jsonl" else None)
    assert [row.place.number for row in file.rows(["answer"]) if isinstance(row, FileRow)] == list(range(1, 601))


def test_cells_of_csv_are_text_as_it_stands(tmp_path: Path) -> None:
    """007 is no number; an empty cell is a missing value; a byte order mark is not part of the first name."""
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufeffa;b\n007;1.50\n;NA\n"";  \n a;b \n'.encode())
    file = open_file(path, delimiter=";")
    assert file.columns == ("a", "b")
    assert values(file) == [
        {"a": "007", "b": "1.50"},
        {"a": None, "b": "NA"},
        {"a": None, "b": None},
        {"a": " a", "b": "b "},
    ]


def test_floats_of_32_bits_keep_their_digits(tmp_path: Path) -> None:
    """Also inside of lists and structs."""
    number = pa.float32()
    table = pa.table(
        {
            "a": pa.array([0.1, None], number),
            "b": pa.array([[0.1, 2.5], None], pa.list_(number)),
            "c": pa.array([{"d": 0.3, "e": "x"}, None], pa.struct([("d", number), ("e", pa.string())])),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    assert values(open_file(tmp_path / "rows.parquet")) == [
        {"a": 0.1, "b": [0.1, 2.5], "c": {"d": 0.3, "e": "x"}},
        {"a": None, "b": None, "c": None},
    ]


def test_lines_with_nan_are_rows(tmp_path: Path) -> None:
    """As Python's json writes a missing value; only a column that is needed must not be one."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x", "b": NaN}\n{"a": NaN, "b": 1}\n')
    rows = Records(open_file(path), ColumnMapping({"text": "a"}), skip_bad_rows=True)
    assert [orjson.loads(row.value) for row in rows] == [{"text": "x"}]
    assert rows.refused == {"bad_row": 1}
    assert "line 2: column 'a' must have a value, found nan" in rows.first_refused["bad_row"]


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    """Cut in its middle."""
    path = write_parquet(tmp_path / "rows.parquet")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(SourceError, match=r"rows\.parquet must be readable"):
        values(open_file(path))


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n3,4,5\n"], ids=["empty", "a cell too many"])
def test_csv_that_cannot_be_read_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"rows\.csv must be readable"):
        values(open_file(path))


def test_lines_of_jsonl_that_are_no_objects_are_reported(tmp_path: Path) -> None:
    """And the rows after them are read."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n[1]\n{"a"\n{"a": 2}\n')
    rows = list(open_file(path).rows(["a"]))
    assert [str(row).partition(" must")[0] for row in rows if isinstance(row, RowError)] == [
        f"{path} line 3",
        f"{path} line 4",
    ]
    assert isinstance(rows[-1], FileRow)


def test_class_labels_become_their_names(tmp_path: Path) -> None:
    """-1 is a missing label."""
    features = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"]), "n": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({"label": [1, 0, -1], "n": [1, 0, 1]}, features=features)
    data.save_to_disk(str(tmp_path / "saved"))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("saved", "rows.parquet"):
        assert values(open_file(tmp_path / name)) == [
            {"label": "yes", "n": 1},
            {"label": "no", "n": 0},
            {"label": None, "n": 1},
        ]


def test_images_of_a_data_set_stay_bytes(tmp_path: Path) -> None:
    """They are sent as they were stored, not decoded and encoded again."""
    png = b"\x89PNG\r\n\x1a\n not really"
    table = pa.table({"image": [{"bytes": png, "path": None}]})
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset(table).cast(features).save_to_disk(str(tmp_path / "saved"))
    ((row,),) = [values(open_file(tmp_path / "saved"))]
    assert row["image"]["bytes"] == png


def test_several_splits_need_a_choice(tmp_path: Path) -> None:
    """Of a saved dictionary, and of a copy of a hub repository."""
    data = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict(train=data, test=data).save_to_disk(str(tmp_path / "saved"))
    for name in ("train", "test"):
        write_parquet(tmp_path / "hub" / "data" / f"{name}-00000-of-00001.parquet", [{"text": "a"}])
    for folder in (tmp_path / "saved", tmp_path / "hub"):
        with pytest.raises(UsageError, match=r"several splits: choose one with --split \(train, test\)"):
            open_file(folder)
        with pytest.raises(UsageError, match=r"no split 'dev': expected one of train, test"):
            open_file(folder, split="dev")
        assert values(open_file(folder, split="test")) == [{"text": "a"}]


def test_splits_and_subsets_follow_the_hubs_rules(tmp_path: Path) -> None:
    """Names of split files, README's configurations, keywords; several subsets ask."""
    for name in ("train_sft", "train_gen", "test_sft"):
        write_parquet(tmp_path / "ultra" / "data" / f"{name}-00000-of-00001.parquet", [{"text": name}])
    for name in ("training", "dev", "testing"):
        write_parquet(tmp_path / "words" / f"{name}.parquet", [{"text": name}])
    for subset in ("main", "socratic"):
        write_parquet(tmp_path / "gsm" / subset / "train-00000-of-00001.parquet", [{"text": subset}])
    configs = "".join(
        f"- config_name: {subset}\n  data_files:\n  - split: train\n    path: {subset}/train-*\n"
        for subset in ("main", "socratic")
    )
    (tmp_path / "gsm" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert values(open_file(tmp_path / "ultra", split="train_sft")) == [{"text": "train_sft"}]
    with pytest.raises(UsageError, match="no split 'train': expected one of test_sft, train_gen, train_sft"):
        open_file(tmp_path / "ultra", split="train")
    for split, word in (("train", "training"), ("validation", "dev"), ("test", "testing")):
        assert values(open_file(tmp_path / "words", split=split)) == [{"text": word}]
    with pytest.raises(UsageError, match=r"several subsets: choose one with --subset \(main, socratic\)"):
        open_file(tmp_path / "gsm", split="train")
    with pytest.raises(UsageError, match="no subset 'mian': expected one of main, socratic"):
        open_file(tmp_path / "gsm", subset="mian")
    assert values(open_file(tmp_path / "gsm", subset="socratic")) == [{"text": "socratic"}]


def written(lines: bytes, file: int) -> None:
    with os.fdopen(file, "wb") as pipe:
        pipe.write(lines)


@pytest.mark.parametrize("number", [1, 5, 3000])
def test_every_line_of_a_pipe_is_read_once(number: int) -> None:
    expected = [b'{"text": "record %d"}' % i for i in range(number)]
    read, write = os.pipe()
    writer = threading.Thread(target=written, args=(b"\n".join(expected), write))
    writer.start()
    file = open_file(Path(f"/dev/fd/{read}"))
    records = Records(file, None)
    assert (records.is_pipe, file.fraction) == (True, None)
    assert [row.value for row in records] == expected
    assert list(records) == []
    writer.join()
    os.close(read)


def test_a_silent_pipe_ends_when_asked_to(tmp_path: Path) -> None:
    """A stop is noticed although no line comes; the beginning of a line is not a row."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)
    os.write(held, b'{"a": 1}\n')
    stop = threading.Event()
    file = open_file(path, stopped=stop.is_set)
    assert isinstance(file, JsonlFile)
    lines = file.lines()
    assert next(lines).value == b'{"a": 1}'
    threading.Timer(0.1, stop.set).start()
    assert list(lines) == []
    os.close(held)


def test_only_jsonl_is_read_from_a_pipe(tmp_path: Path) -> None:
    """Another format would be opened twice, and wait for ever."""
    os.mkfifo(tmp_path / "rows.csv")
    with pytest.raises(UsageError, match=r"rows\.csv is a pipe, and only JSONL is read from one"):
        open_file(tmp_path / "rows.csv")


def test_without_datasets_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSONL needs none."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'streamlearn\[datasets\]'"):
        open_file(write_csv(tmp_path / "rows.csv"))
    assert values(open_file(write_jsonl(tmp_path / "rows.jsonl"))) == list(ROWS)


@pytest.mark.parametrize("name", ["rows.json", "rows.zip", "rows.xlsx"])
def test_a_format_that_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    """Rather than sent line by line."""
    (tmp_path / name).write_text("x")
    with pytest.raises(UsageError, match=r"a file that ends in \.csv, .*: convert it"):
        open_file(tmp_path / name)
