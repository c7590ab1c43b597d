"""The option `--plot` of a bench command."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from streamlearn.errors import UsageError

FORMATS = (".png", ".pdf", ".svg")


def drawing(path: Path, module: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that draws a result to `path`: the `draw` of a module that needs matplotlib, an extra.

    Raises:
        UsageError: the plot cannot be written, or matplotlib is not installed.
    """
    if path.suffix not in FORMATS or not path.absolute().parent.is_dir():
        raise UsageError(f"--plot: expected a file {', '.join(FORMATS)} in an existing folder, found {path}")
    try:
        draw = import_module(module).draw
    except ImportError as error:
        raise UsageError("--plot: needs matplotlib; pip install 'streamlearn[bench]'") from error
    return partial(draw, path=path)
