"""Which columns become which field of a record."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from connectors.rows import ColumnMapping, ColumnText, FileRow, Place, RowError
from streamlearn.errors import UsageError
from streamlearn.settings import StreamSettings
from streamlearn.stream.parse import parse

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
