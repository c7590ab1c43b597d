"""Options, consoles and loading that several commands share. Nothing here imports anything heavy."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from streamlearn.settings import Settings


ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="Configuration file (YAML).", show_default=False, metavar="FILE")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

out = Console()
err = Console(stderr=True)


def load_settings(config: Path) -> "Settings":
    """Read and check a configuration file.

    Raises:
        ConfigError: the file cannot be used; names every invalid key.
    """
    from streamlearn.settings import load  # noqa: PLC0415 - pydantic and YAML are not needed for --help

    return load(config)
