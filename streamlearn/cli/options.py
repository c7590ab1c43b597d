"""Options, consoles, tables and loading that several commands share. Nothing here imports anything heavy."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from streamlearn.errors import Reason

if TYPE_CHECKING:
    from streamlearn.settings import Settings


ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="Configuration file (YAML).", show_default=False, metavar="FILE")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Number = TypeVar("Number", int, float)


def number(least: Number, most: Number) -> Callable[[str], Number]:
    """Return the parser of an option: a number of the bounds' type between them. typer's own `min` may accept a NaN."""
    what = "a whole number" if isinstance(least, int) else "a number"

    def parsed(text: str) -> Number:
        with suppress(ValueError):
            value = type(least)(text)
            if least <= value <= most:
                return value
        raise typer.BadParameter(f"expected {what} from {least:,} to {most:,}, found {text[:40]}")

    return parsed


MAX_NUMBER = 2**53
"""Where nothing else bounds a whole number: the largest that JSON carries exactly."""
natural, positive = number(0, MAX_NUMBER), number(1, MAX_NUMBER)

_UNLIMITED = 100_000
for _name, _least in {"COLUMNS": 20, "LINES": 1, "TERMINAL_WIDTH": 20}.items():  # rich and typer obey a width of 0
    if not (_given := os.environ.get(_name, "")).isdecimal() or int(_given) < _least:
        os.environ.pop(_name, None)


class TextConsole(Console):
    """A console that cuts nothing off, and is as wide as its content where it is no terminal.

    COLUMNS overrides the width, as everywhere.
    """

    @property
    def size(self) -> ConsoleDimensions:
        size = super().size
        return size if self.is_terminal or "COLUMNS" in os.environ else size._replace(width=_UNLIMITED)

    @size.setter
    def size(self, size: tuple[int, int]) -> None:
        self.width, self.height = size

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})


out = TextConsole()
err = TextConsole(stderr=True)


def load_settings(config: Path) -> "Settings":
    """Read and check a configuration file.

    Raises:
        ConfigError: the file cannot be used; names every invalid key.
    """
    from streamlearn.settings import load  # noqa: PLC0415 - pydantic and YAML are not needed for --help

    return load(config)


def ignored_counts(ignored: Mapping[str, int]) -> list[str]:
    """Ignored records by reason, in words.

    >>> ignored_counts({"deletion": 1200, "label_false": 2}), ignored_counts({"deletion": 1})
    (['1,200 deletions', '2 with label false'], ['1 deletion'])
    """
    deletions, avoided = ignored.get(Reason.DELETION, 0), ignored.get(Reason.LABEL_FALSE, 0)
    counted = [f"{deletions:,} deletion{'s' if deletions > 1 else ''}"] if deletions else []
    return counted + ([f"{avoided:,} with label false"] if avoided else [])


Row = TypeVar("Row")
Cell = Callable[[Row], str]


def render_table(
    rows: Sequence[Row],
    columns: Mapping[str, Cell[Row]],
    *,
    text: Collection[str] = (),
    title: str = "",
    caption: str = "",
    bold: Callable[[Row], bool] = lambda _: False,
) -> Table:
    """A table with a line for each row.

    Args:
        rows: What the cells are read from.
        columns: The function of each cell, by heading; a heading may have two lines.
        text: Headings of columns that are left-justified, and folded between words where the terminal is narrow.
        title: Above the table.
        caption: Below the table.
        bold: Which rows are emphasized.
    """
    shown = Table(
        title=title or None,
        caption=caption or None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    depth = max(heading.count("\n") for heading in columns)
    for heading, cell in columns.items():
        lowered = Text("\n" * (depth - heading.count("\n")) + heading)
        parts = [part for row in rows for part in (cell(row).split() if heading in text else [cell(row)])]
        width = max(map(cell_len, parts), default=0)
        shown.add_column(lowered, justify="left" if heading in text else "right", overflow="fold", min_width=width)
    for row in rows:
        shown.add_row(*(Text(cell(row)) for cell in columns.values()), style="bold" if bold(row) else "")
    return shown
