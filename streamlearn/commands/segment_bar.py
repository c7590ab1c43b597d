"""Regimes along the stream in one line: a character and a colour for each regime."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_letters, digits

from rich.console import Console, ConsoleOptions
from rich.text import Text

from streamlearn.serve.history_view import SegmentView

SYMBOLS = digits[1:] + ascii_letters
COLOURS = ("blue", "green", "magenta", "yellow", "cyan", "red", "bright_blue", "bright_green", "bright_magenta")
_AXIS = 8  # columns of the terminal left of the bar, as of the chart


def symbol(regime: int) -> str:
    """The character of a regime; it comes again after 61 regimes.

    >>> symbol(1), symbol(10), symbol(62)
    ('1', 'a', '1')
    """
    return SYMBOLS[(regime - 1) % len(SYMBOLS)]


def style(regime: int) -> str:
    """The colour of a regime."""
    return f"reverse {COLOURS[(regime - 1) % len(COLOURS)]}"


@dataclass(frozen=True)
class SegmentBar:
    """The segments over the whole width, and the first and last record below them."""

    segments: Sequence[SegmentView]
    first: int
    """First record at the left edge."""
    last: int
    """Last record at the right edge."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(10, options.max_width - _AXIS)
        line = Text(f"{'regime':>{_AXIS - 2}}  ", style="dim")
        for column in range(width):
            record = self.first + (2 * column + 1) * (self.last - self.first + 1) // (2 * width)
            regime = next((each.regime for each in self.segments if each.first_record <= record <= each.last_record), 0)
            line.append(symbol(regime) if regime else " ", style=style(regime) if regime else "")
        yield line
        ends = f"{self.first:,}", f"{self.last:,}"
        gap = max(1, width - len(ends[0]) - len(ends[1]))
        yield Text(f"{'record':>{_AXIS - 2}}  {ends[0]}{' ' * gap}{ends[1]}", style="dim")
