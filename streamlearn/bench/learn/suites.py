"""Suites: an order of records, where tasks begin and end, and test sets.

| suite | stretches |
|---|---|
| superni-1, superni-2 | the first eight of SuperNI's fifteen tasks in the orders of CP-MoE (arXiv 2605.20247) Table 5; the other seven are never trained on (zero-shot) |
| trace, trace-1 ... trace-3 | TRACE's eight tasks in the standard order and in orders 1 to 3 of MH-MoE (arXiv 2602.12587) A.3.4 |
| long | SuperNI's fifteen and TRACE's eight, one after the other, on one budget |
| recurring | five tasks that come three times each, a third of their records each time |
| interleaved | eight tasks, two or three at a time; with every stretch one arrives, and some leave |
| grouped | eight tasks in groups of two and three, a whole group after the other |
| images | nine kinds of questions about images (`backbone/image_tasks`), on `builtin:nano-vl` |

Any folder of task files is a suite too: its tasks by name, or in a given order, one after the other.
"""  # noqa: E501 - a table's row is one line

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from streamlearn.backbone import image_tasks
from streamlearn.bench.superni import read_task
from streamlearn.errors import UsageError

Json = dict[str, Any]

ORDER_1 = ("task1572", "task363", "task1290", "task181", "task002", "task1510", "task639", "task1729")
UNSEEN_1 = ("task073", "task1590", "task748", "task511", "task591", "task1687", "task875")
ORDER_2 = ("task748", "task073", "task1590", "task639", "task1572", "task1687", "task591", "task363")
UNSEEN_2 = ("task1510", "task1729", "task181", "task511", "task002", "task1290", "task875")
TRACE = ("C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
TRACE_1 = ("FOMC", "C-STANCE", "ScienceQA", "Py150", "MeetingBank", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
TRACE_2 = ("FOMC", "C-STANCE", "ScienceQA", "Py150", "NumGLUE-ds", "NumGLUE-cm", "MeetingBank", "20Minuten")
TRACE_3 = ("FOMC", "C-STANCE", "ScienceQA", "Py150", "MeetingBank", "NumGLUE-ds", "NumGLUE-cm", "20Minuten")
RETURNS = ((0, 1, 2, 3, 4), (2, 0, 1, 4, 3), (1, 3, 0, 2, 4))
"""Visits of `recurring`, by a task's place in ORDER_1; no task follows itself."""
STAYS = (2, 3)
"""Stretches for which tasks of `interleaved` stay, in turn."""


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
    unseen: tuple[str, ...] = ()
    """Tasks that have tests and no records."""
    backbone: str = "builtin:nano"
    """What learns it."""
    checkpoints: frozenset[int] = field(default_factory=frozenset)
    """Stretches after which every task that was seen is examined; after the others their own tasks and the next."""

    @property
    def boundaries(self) -> list[int]:
        """Index of the first record of every stretch but the first."""
        ends, total = [], 0
        for stretch in self.stretches[:-1]:
            total += len(stretch.records)
            ends.append(total)
        return ends

    @property
    def ended(self) -> dict[str, int]:
        """Task -> the last stretch that it was in."""
        return {task: number for number, stretch in enumerate(self.stretches) for task in stretch.tasks}

    def examined(self, number: int) -> list[str]:
        """The tasks to examine after stretch `number`, each once."""
        last = number == len(self.stretches) - 1
        upto = (
            self.stretches[: number + 1] if number in self.checkpoints or last else self.stretches[number : number + 1]
        )
        tasks = [task for stretch in upto for task in stretch.tasks]
        tasks += self.unseen if last else self.stretches[number + 1].tasks
        return list(dict.fromkeys(tasks))


@dataclass(frozen=True)
class Draw:
    """Which records a suite is made of."""

    folders: Sequence[Path]
    """Folders of task files."""
    records: int = 200
    """Training records of each task, at most."""
    tests: int = 50
    """Test records of each task, at most; the first of its file."""
    seed: int = 0
    """Decides which training records, and their order."""


def sequential(name: str, draw: Draw, tasks: Sequence[str], unseen: Sequence[str] = ()) -> Suite:
    """One task after another."""
    stretches = tuple(Stretch((task,), _train(draw, task)) for task in tasks)
    checkpoints = frozenset(range(len(stretches)))
    return Suite(name, stretches, _tests(draw, [*tasks, *unseen]), tuple(unseen), checkpoints=checkpoints)


def recurring(draw: Draw) -> Suite:
    """Tasks that come back."""
    parts = {task: _split(_train(draw, task), len(RETURNS)) for task in ORDER_1[:5]}
    stretches = [Stretch((ORDER_1[i],), parts[ORDER_1[i]][visit]) for visit, each in enumerate(RETURNS) for i in each]
    return _mixed_suite("recurring", draw, stretches)


def interleaved(draw: Draw) -> Suite:
    """Tasks that arrive one by one and leave after two or three stretches."""
    stays = {task: STAYS[number % len(STAYS)] for number, task in enumerate(ORDER_1)}
    active: list[list[str]] = [[] for _ in range(len(ORDER_1) + max(STAYS) - 1)]
    for number, task in enumerate(ORDER_1):
        for later in range(stays[task]):
            active[number + later].append(task)
    # At both ends a task would be alone: no mixture. It comes with its other stretches.
    active = [each for each in active if len(each) > 1]
    parts = {task: _split(_train(draw, task), sum(task in each for each in active)) for task in ORDER_1}
    taken = dict.fromkeys(ORDER_1, 0)
    stretches = []
    for number, tasks in enumerate(active):
        mixed = [record for task in tasks for record in parts[task][taken[task]]]
        for task in tasks:
            taken[task] += 1
        random.Random(f"{draw.seed} {number}").shuffle(mixed)
        stretches.append(Stretch(tuple(tasks), tuple(mixed)))
    return _mixed_suite("interleaved", draw, stretches)


def grouped(draw: Draw, tasks: Sequence[str] = ORDER_1, widths: Sequence[int] = (2, 3)) -> Suite:
    """The tasks in groups of alternately `widths` tasks, each group's records shuffled into each other."""
    groups: list[tuple[str, ...]] = []
    left = list(tasks)
    while left:
        width = widths[len(groups) % len(widths)]
        groups.append(tuple(left[:width]))
        left = left[width:]
    stretches = []
    for number, group in enumerate(groups):
        mixed = [record for task in group for record in _train(draw, task)]
        random.Random(f"{draw.seed} {number}").shuffle(mixed)
        stretches.append(Stretch(group, tuple(mixed)))
    return _mixed_suite("grouped", draw, stretches)


def long(draw: Draw) -> Suite:
    """Twenty-three regimes on one budget; everything seen is examined after 8, 15 and 23 of them."""
    suite = sequential("long", draw, (*ORDER_1, *UNSEEN_1, *TRACE))
    return replace(suite, checkpoints=frozenset({7, 14, 22}))


def images(draw: Draw) -> Suite:
    """Questions about images, one kind after another."""
    home = next((folder for folder in draw.folders if (folder / "cifar10.npz").exists()), None)
    if home is None:
        raise UsageError(
            "suite images needs the folder of image sets among --data; see streamlearn.backbone.image_tasks"
        )
    stretches, tests = [], {}
    for task in image_tasks.TASKS:
        found = list(image_tasks.records(home, task, "train"))
        random.Random(f"{draw.seed} {task}").shuffle(found)
        stretches.append(Stretch((task,), tuple(found[: draw.records])))
        asked = list(image_tasks.records(home, task, "test"))
        random.Random(f"tests {task}").shuffle(asked)  # the files are in order of their classes
        tests[task] = tuple(asked[: draw.tests])
    checkpoints = frozenset(range(len(stretches)))
    return Suite("images", tuple(stretches), tests, checkpoints=checkpoints, backbone="builtin:nano-vl")


SUITES: Mapping[str, Callable[[Draw], Suite]] = {
    "superni-1": lambda draw: sequential("superni-1", draw, ORDER_1, UNSEEN_1),
    "superni-2": lambda draw: sequential("superni-2", draw, ORDER_2, UNSEEN_2),
    "trace": lambda draw: sequential("trace", draw, TRACE),
    "trace-1": lambda draw: sequential("trace-1", draw, TRACE_1),
    "trace-2": lambda draw: sequential("trace-2", draw, TRACE_2),
    "trace-3": lambda draw: sequential("trace-3", draw, TRACE_3),
    "long": long,
    "recurring": recurring,
    "interleaved": interleaved,
    "grouped": grouped,
    "images": images,
}


def of_folder(folder: Path, draw: Draw, order: Sequence[str] = ()) -> Suite:
    """A folder's own suite: its tasks by name, or in the order given.

    Raises:
        UsageError: there are no task files, or none of a name.
    """
    found = sorted(file.name.removesuffix(".train.jsonl.gz") for file in folder.glob("*.train.jsonl.gz"))
    if not found:
        raise UsageError(f"{folder} must hold task files NAME.train.jsonl.gz and NAME.test.jsonl.gz, found none")
    return sequential(folder.resolve().name, replace(draw, folders=[folder]), order or found)


def _train(draw: Draw, task: str) -> tuple[Json, ...]:
    found = list(_read(draw, task, "train"))
    random.Random(f"{draw.seed} {task}").shuffle(found)
    return tuple(found[: draw.records])


def _tests(draw: Draw, tasks: Sequence[str]) -> dict[str, tuple[Json, ...]]:
    return {task: tuple(_read(draw, task, "test", draw.tests)) for task in tasks}


def _read(draw: Draw, task: str, split: Any, limit: int | None = None) -> list[Json]:
    """From the folder that holds the task; the last one when none does, whose message then says so."""
    home = next((f for f in draw.folders if any(f.glob(f"{task}*.{split}.jsonl.gz"))), draw.folders[-1])
    try:
        return list(read_task(home, task, split, limit))
    except FileNotFoundError as error:
        raise UsageError(f"{error}; name every folder that the suite needs with --data") from error


def _split(records: Sequence[Json], parts: int) -> list[tuple[Json, ...]]:
    edges = [len(records) * i // parts for i in range(parts + 1)]
    return [tuple(records[a:b]) for a, b in pairwise(edges)]


def _mixed_suite(name: str, draw: Draw, stretches: Sequence[Stretch]) -> Suite:
    tasks = list(dict.fromkeys(task for stretch in stretches for task in stretch.tasks))
    return Suite(name, tuple(stretches), _tests(draw, tasks), checkpoints=frozenset(range(len(stretches))))
