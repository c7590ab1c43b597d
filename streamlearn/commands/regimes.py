"""The regimes commands: list the regimes of the running daemon, and change them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from streamlearn.commands.options import ConfigOption, JsonOption, load_settings, out

if TYPE_CHECKING:
    from streamlearn.controls.control import Control

app = typer.Typer(
    help="List the regimes of the running daemon, and change them. Every change is durable and in the audit log.",
    no_args_is_help=True,
)
NumberArgument = Annotated[int, typer.Argument(help="Number of the regime, as in `regimes list`.", metavar="N", min=1)]


@app.command("list")
def list_regimes(config: ConfigOption, as_json: JsonOption = False) -> None:
    """List the remembered regimes and what is forgotten of them."""
    from streamlearn.commands import status  # noqa: PLC0415 - not needed for --help

    answer = status.fetch_regimes(load_settings(config))
    if as_json:
        print(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())  # noqa: T201
    else:
        out.print(status.regimes_table(answer))


@app.command()
def freeze(number: NumberArgument, config: ConfigOption) -> None:
    """Train no more on a regime's records. It still answers."""
    from streamlearn.controls.control import FreezeRegime  # noqa: PLC0415

    _change(config, FreezeRegime(number), f"regime {number} is frozen")


@app.command()
def unfreeze(number: NumberArgument, config: ConfigOption) -> None:
    """Train on a regime's records again."""
    from streamlearn.controls.control import UnfreezeRegime  # noqa: PLC0415

    _change(config, UnfreezeRegime(number), f"regime {number} is trained on again")


@app.command()
def rename(
    number: NumberArgument,
    name: Annotated[str, typer.Argument(help="The new name.", metavar="NAME")],
    config: ConfigOption,
) -> None:
    """Give a regime a name."""
    from streamlearn.controls.control import RenameRegime  # noqa: PLC0415

    _change(config, RenameRegime(number, name), f"regime {number} is named {name}")


@app.command()
def approve(number: NumberArgument, config: ConfigOption) -> None:
    """Publish what a regime learned although its answers changed."""
    from streamlearn.controls.control import ApproveRegime  # noqa: PLC0415

    _change(config, ApproveRegime(number), f"regime {number} is published if it is no worse than the backbone")


@app.command()
def drop(number: NumberArgument, config: ConfigOption) -> None:
    """Forget a regime and its adapter. Snapshots written before keep it."""
    from streamlearn.controls.control import DropRegime  # noqa: PLC0415

    _change(config, DropRegime(number), f"regime {number} is forgotten")


def _change(config: Path, control: "Control", done: str) -> None:
    from streamlearn.commands.controls import carry_out  # noqa: PLC0415

    result = carry_out(load_settings(config), control)
    out.print(f"{done}; snapshot {result.snapshot} holds it", markup=False, highlight=False, soft_wrap=True)
