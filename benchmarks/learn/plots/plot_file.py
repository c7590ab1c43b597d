"""A plot on disk, with what a page says of it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PlotFile:
    """A PNG file, its title and its alternative text."""

    file: Path
    title: str
    alt: str
