"""The `bench mot` command: figures as JSON, as tables, and as a plot."""

from importlib import import_module
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import check_plot, parser
from benchmarks.mot.compare import ComparisonSettings
from benchmarks.mot.figures import figures


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--seeds", type=int, default=3, help="runs per model; step sizes are tuned on other seeds")
    options.add_argument("--plot", type=Path, help="also plot to this file")
    given = options.parse_args()
    path = check_plot(given.plot) if given.plot else None
    result = figures(ComparisonSettings(seeds=range(given.seeds)))
    if path is not None:
        import_module("benchmarks.mot.plot").draw(result, path=path)
    if given.json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        show(result, Console())


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables and the routing of MoT."""
    for level, found in result["noise"].items():
        console.print(table(level, found))
        console.print(
            f"Lowest possible loss without attention: {found['attention_free_floor']:.1e}. Share misrouted by a linear "
            f"router with one direction per class: {found['misrouted_by_one_direction_a_class']:.1%}.",
            highlight=False,
        )
        for seed, each in zip(result["setting"]["seeds"], found["models"]["mot"]["routing"], strict=True):
            console.print(
                f"MoT, seed {seed}: purity {each['purity_stage_1']:.1%} after stage I and {each['purity']:.1%} at the "
                f"end, {each['used']} experts used, experts specialised in each class {each['specialised']}",
                highlight=False,
            )
        console.print()


def table(level: str, found: dict[str, Any]) -> Table:
    """Build the table of one noise level; each fit is followed by its R^2."""
    columns = ("step size", "final loss", "range", "error", "lowest loss", "stage I (normalised)", "plain descent")
    shown = Table(f"{level} noise, {found['mixture']['noise']}", *columns, box=None, pad_edge=False)
    for each in found["models"].values():
        final = each["final_loss"]
        shown.add_row(
            each["title"],
            f"{each['step_size']:g}",
            f"{final['mean']:.1e}",
            f"{final['lowest']:.0e} to {final['highest']:.0e}",
            f"{each['final_error']:.2%}",
            f"{each['lowest_loss']:.1e}",
            both_fits(each["stage_1"]) if "stage_1" in each else "",
            both_fits(each["descent"]),
        )
    return shown


def both_fits(found: dict[str, Any]) -> str:
    """Format both fits, for example `exp(-0.009 t) 1.00, t^-1.00 0.62`."""
    exponential = f"exp(-{found['exponential_rate']:.4f} t) {found['exponential_r2']:.2f}"
    return f"{exponential}, t^-{found['power_exponent']:.2f} {found['power_r2']:.2f}".replace("--", "+")
