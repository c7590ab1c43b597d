"""Tables that fit the terminal: headings are never truncated; the least important columns are left out first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

_GAP = 2
"""Columns of the terminal between two columns of a table: padding and separator."""
_MIN_TEXT = 20
"""Columns of the terminal that a column of text keeps at least; longer text is folded."""


@dataclass(frozen=True)
class FittedColumn:
    """A heading of one or two lines and the cells below it."""

    heading: str
    cells: Sequence[str]
    importance: int = 0
    """Columns of the lowest importance are left out first; those of the highest importance never."""
    is_text: bool = False
    """Left-justified and folded where it is too long; numbers are right-justified and never folded."""

    @property
    def width(self) -> int:
        """Columns of the terminal that it needs at least."""
        return min(self._widest, _MIN_TEXT) if self.is_text else self._widest

    @property
    def folds(self) -> bool:
        """Whether its cells may take several lines."""
        return self.is_text and self._widest > _MIN_TEXT

    @property
    def _widest(self) -> int:
        return max(map(cell_len, [*self.heading.split("\n"), *self.cells]))

    @property
    def name(self) -> str:
        """The heading on one line."""
        return " ".join(self.heading.split())


@dataclass(frozen=True)
class FittedTable:
    """A table that is laid out for the width at which it is printed."""

    columns: Sequence[FittedColumn]
    title: str | None = None
    caption: str = ""
    bold_rows: frozenset[int] = field(default_factory=frozenset)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        shown = self._fitting(options.max_width)
        hidden = [column.name for column in self.columns if column not in shown and column.name]
        captions = [self.caption, f"Hidden at this width: {', '.join(hidden)}." if hidden else ""]
        caption = " ".join(text for text in captions if text)
        table = Table(
            title=self.title,
            caption=caption or None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, _GAP - 1, 0, 0),
            pad_edge=False,
            show_edge=False,
        )
        depth = max(column.heading.count("\n") for column in shown)
        for column in shown:
            heading = "\n" * (depth - column.heading.count("\n")) + column.heading
            justify = "left" if column.is_text else "right"
            table.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=not column.folds)  # type: ignore[arg-type]
        for number, row in enumerate(zip_longest(*(column.cells for column in shown), fillvalue="")):
            table.add_row(*map(Text, row), style="bold" if number in self.bold_rows else "")
        yield table

    def _fitting(self, width: int) -> list[FittedColumn]:
        """The columns that fit, in order."""
        shown = list(self.columns)
        highest = max(column.importance for column in shown)
        while sum(column.width + _GAP for column in shown) - _GAP > width:
            droppable = [column for column in shown if column.importance < highest]
            if not droppable:
                break
            shown.remove(min(reversed(droppable), key=lambda column: column.importance))
        return shown
