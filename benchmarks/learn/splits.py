"""Selection of records: which are scored, which may be trained on, and which a seed draws.

The rows of a training file are shuffled in an order that depends on neither seed nor size. The last `DEVELOPMENT` of
them, or fewer where the draw would not be left enough, are development records: settings are chosen on them, and they
are never trained on. Training records are drawn from the rest by seed. A row whose input also occurs among the
development records is drawn by no seed. Test files are opened only to score the test split.
"""

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from benchmarks.learn.profile import Prompts

T = TypeVar("T")
Split = Literal["development", "test"]
"""Which records of a task are scored."""
DEVELOPMENT = 50
"""Maximum development records per task."""


@dataclass(frozen=True)
class Draw:
    """The selection of records that a suite is built from."""

    folders: Sequence[Path]
    """Folders of task files."""
    records: int = 100
    """Maximum training records per task."""
    evaluated: int = 50
    """Maximum scored records per task, taken from the start of the split."""
    seed: int = 0
    """Seed for the choice and the order of the training records."""
    split: Split = "test"
    prompts: Prompts = "plain"


def divide(rows: Sequence[T], records: int, input_of: Callable[[T], Hashable]) -> tuple[list[T], list[T]]:
    """Return the rows to draw training records from, and the development rows; they have no input in common.

    Args:
        rows: All rows of a training file.
        records: Number of training records; so many rows are left to draw from, if there are as many.
        input_of: Key of a row's input; rows with one key ask the same.
    """
    order = list(rows)
    random.Random("development").shuffle(order)
    size = max(0, min(DEVELOPMENT, len(order) - records))
    rest, development = order[: len(order) - size], order[len(order) - size :]
    reserved = {input_of(row) for row in development}
    return [row for row in rest if input_of(row) not in reserved], development


def choose(rows: Sequence[T], draw: Draw, task: str) -> list[T]:
    """Return at most `draw.records` of the rows, chosen and ordered by the seed."""
    order = list(rows)
    random.Random(f"{draw.seed} {task}").shuffle(order)
    return order[: draw.records]
