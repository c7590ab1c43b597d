"""Tables that fit the terminal: which columns are left out, and that nothing is truncated."""

import io

from rich.console import Console

from streamlearn.cli.status import FittedColumn, FittedTable

TABLE = FittedTable(
    [
        FittedColumn("name", ["a long name that is folded", "b"], 9, is_text=True),
        FittedColumn("rare\nvalue", ["1", "2"], 1),
        FittedColumn("value", ["1,000,000", "2"], 9),
        FittedColumn("also\nrare", ["3", "4"], 2),
    ],
    caption="A caption.",
)


def printed(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(TABLE)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_everything_is_shown_where_there_is_room() -> None:
    """Headings of one line stand on the lower of two lines."""
    lines = [line.split() for line in printed(60).splitlines()]
    assert lines[0] == ["rare", "also"]
    assert lines[1] == ["name", "value", "value", "rare"]
    assert lines[3][-3:] == ["1", "1,000,000", "3"]
    assert "Hidden" not in printed(60)


def test_text_is_folded_before_a_column_is_left_out() -> None:
    text = printed(48)
    assert "Hidden" not in text
    assert "a long name that is folded" not in text


def test_the_least_important_column_is_left_out_first_and_named() -> None:
    assert "A caption. Hidden at this width: rare value." in " ".join(printed(40).split())
    assert "Hidden at this width: rare value, also rare." in " ".join(printed(34).split())


def test_the_most_important_columns_always_stay() -> None:
    """Too narrow a terminal folds them."""
    assert "1,000,000" in printed(32)
    for width in range(12, 61):
        assert "…" not in printed(width)
        assert max(map(len, printed(width).splitlines())) <= width
