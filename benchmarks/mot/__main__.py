"""`python -m benchmarks.mot`: JSON on standard output."""

from benchmarks import mot
from benchmarks.measuring import command, parser, positive, show
from benchmarks.mot.compare import ComparisonSettings, figures


def main() -> None:
    options = parser(mot.__doc__ or "")
    options.add_argument(
        "--seeds", type=positive, default=3, help="runs per model; step sizes are tuned on other seeds"
    )
    given = options.parse_args()
    result = figures(ComparisonSettings(seeds=range(given.seeds)))
    show(result, as_json=True)


if __name__ == "__main__":
    command(main)
