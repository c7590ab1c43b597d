"""`python -m benchmarks.mot`: JSON on standard output, and a plot."""

from pathlib import Path

from benchmarks import mot
from benchmarks.measuring import check_plot, command, parser, show
from benchmarks.mot.compare import ComparisonSettings, draw, figures


def main() -> None:
    options = parser(mot.__doc__ or "")
    options.add_argument("--seeds", type=int, default=3, help="runs per model; step sizes are tuned on other seeds")
    options.add_argument("--plot", type=Path, help="also plot to this file")
    given = options.parse_args()
    plot = check_plot(given.plot) if given.plot else None
    result = figures(ComparisonSettings(seeds=range(given.seeds)))
    if plot is not None:
        draw(result, plot)
    show(result, as_json=True)


if __name__ == "__main__":
    command(main)
