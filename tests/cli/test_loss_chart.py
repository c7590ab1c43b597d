"""The chart of losses: where a value stands, and what joins it with the next."""

import io

from rich.console import Console

from streamlearn.cli.watch import SYMBOLS, ChartPoint, LossChart, column_means, style, symbol


def drawn(chart: LossChart, width: int = 18, *, ascii_only: bool = False) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8")
    Console(file=file, width=width, color_system=None).print(chart)
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    return file.buffer.getvalue().decode(file.encoding).splitlines()


def test_means_are_weighted() -> None:
    """By learned tokens; a point that spans several columns is in each."""
    points = [ChartPoint(1, 1, 1.0, 3.0), ChartPoint(2, 2, 5.0, 1.0), ChartPoint(3, 8, 7.0, 1.0)]
    assert column_means(points, 1, 8, 4) == [2.0, 7.0, 7.0, 7.0]


def test_a_falling_loss_falls_and_is_joined() -> None:
    """From the top left to the bottom right, without a gap."""
    chart = LossChart([ChartPoint(1, 5, 4.0, 1.0), ChartPoint(6, 10, 1.0, 1.0)], [], 1, 10, 4)
    assert drawn(chart, ascii_only=True) == [
        "  4.00  *****     ",
        "             *    ",
        "             *    ",
        "  1.00       *****",
    ]
    assert drawn(chart) == ["  4.00  ⠉⠉⠉⠉⠉⡆    ", "             ⡇    ", "             ⡇    ", "  1.00       ⣇⣀⣀⣀⣀"]


def test_a_backbone_stands_in_front_of_the_line() -> None:
    """At its record, on the same axis."""
    chart = LossChart([ChartPoint(1, 10, 1.0, 1.0)], [ChartPoint(5, 5, 2.0, 1.0)], 1, 10, 2)
    assert drawn(chart, ascii_only=True) == ["  2.00      o     ", "  1.00  **********"]


def test_equal_and_missing_values_can_be_drawn() -> None:
    """An axis around the value; none without values."""
    assert drawn(LossChart([ChartPoint(1, 10, 2.0, 1.0)], [], 1, 10, 2), ascii_only=True)[0].startswith("  2.50")
    assert drawn(LossChart([], [], 1, 10, 2)) == [" " * 18] * 2


def test_neighbouring_regimes_differ_in_character_and_colour() -> None:
    """Characters come again after all of them were used."""
    assert len({symbol(number) for number in range(1, len(SYMBOLS) + 1)}) == len(SYMBOLS)
    assert all(style(number) != style(number + 1) for number in range(1, 100))
