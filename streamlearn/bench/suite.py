"""Streams made of task files: an order of records, where the tasks begin and end, and test sets.

A stream is cut into stretches. In `sequential` each stretch is one task; in `interleaved` each holds two or three tasks
whose records are shuffled into each other, and from one stretch to the next one task leaves and one arrives.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamlearn.bench.superni import read_task

Json = dict[str, Any]

ORDER_1 = ("task1572", "task363", "task1290", "task181", "task002", "task1510", "task639", "task1729")
"""The eight tasks that CP-MoE trains on, order 1 of its Table 5."""
UNSEEN = ("task073", "task1590", "task748", "task511", "task591", "task1687", "task875")
"""The other seven of the fifteen."""
TRACE = ("C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
"""TRACE's eight tasks in its standard order."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive records of one task, or of several that are mixed."""

    tasks: tuple[str, ...]
    records: tuple[Json, ...]


@dataclass(frozen=True)
class Suite:
    """A stream and the test records of its tasks."""

    name: str
    stretches: tuple[Stretch, ...]
    tests: Mapping[str, tuple[Json, ...]]

    @property
    def boundaries(self) -> list[int]:
        """Index of the first record of every stretch but the first."""
        ends, total = [], 0
        for stretch in self.stretches[:-1]:
            total += len(stretch.records)
            ends.append(total)
        return ends


def sequential(folders: Sequence[Path], tasks: Sequence[str], *, records: int, tests: int, seed: int) -> Suite:
    """One task after another, at most `records` of each, drawn by the seed."""
    stretches = [Stretch((task,), tuple(_draw(folders, task, records, seed))) for task in tasks]
    return Suite("sequential", tuple(stretches), _tests(folders, tasks, tests))


def interleaved(
    folders: Sequence[Path],
    tasks: Sequence[str],
    *,
    records: int,
    tests: int,
    seed: int,
    widths: Sequence[int] = (2, 3),
) -> Suite:
    """The tasks in groups of alternately `widths` tasks, each group's records shuffled into each other."""
    groups: list[tuple[str, ...]] = []
    left = list(tasks)
    while left:
        width = widths[len(groups) % len(widths)]
        groups.append(tuple(left[:width]))
        left = left[width:]
    stretches = []
    for number, group in enumerate(groups):
        mixed = [record for task in group for record in _draw(folders, task, records, seed)]
        random.Random(f"{seed} {number}").shuffle(mixed)
        stretches.append(Stretch(group, tuple(mixed)))
    return Suite("interleaved", tuple(stretches), _tests(folders, tasks, tests))


def _draw(folders: Sequence[Path], task: str, records: int, seed: int) -> list[Json]:
    found = list(read_task(_home(folders, task), task, "train"))
    random.Random(f"{seed} {task}").shuffle(found)
    return found[:records]


def _tests(folders: Sequence[Path], tasks: Sequence[str], tests: int) -> dict[str, tuple[Json, ...]]:
    return {task: tuple(read_task(_home(folders, task), task, "test", tests)) for task in tasks}


def _home(folders: Sequence[Path], task: str) -> Path:
    """The folder that holds the task; the last one when none does, whose message then says so."""
    return next((folder for folder in folders if any(folder.glob(f"{task}*.train.jsonl.gz"))), folders[-1])
