"""Suites: the order of records, the task boundaries, and the scored records.

| suite | segments |
|---|---|
| superni-1, superni-2 | the first eight of SuperNI's fifteen tasks, in the orders of CP-MoE (arXiv 2605.20247) Table 5; the other seven are never trained on (zero-shot) |
| superni-1-short | those of superni-1's tasks whose prompts are short on average: for searches, which need many runs |
| related | three sentiment tasks, one after another: what they share can be carried over |
| superni-1-bare, superni-2-bare | the same with the tasks' definitions left out of the prompts |
| trace, trace-1 ... trace-3 | TRACE's eight tasks in the standard order and in orders 1 to 3 of MH-MoE (arXiv 2602.12587) A.3.4 |
| long | SuperNI's fifteen tasks and then TRACE's eight, on one adapter budget |
| recurring | five tasks, each visited three times with a third of its records |
| interleaved | eight tasks, two or three at a time; one joins with each segment, and others leave |
| grouped | eight tasks in groups of two and three, one group after another |
| mixed | eight tasks at random from the first record to the last |
| images | nine kinds of questions about images (`backbone/image_tasks`), on `builtin:nano-vl` |

A folder of task files is a suite as well: its tasks one after another, by name or in a given order.
"""  # noqa: E501 - a table row is one line

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.backbones import image_tasks
from benchmarks.learn.splits import Draw
from benchmarks.learn.suite import Json, Suite, TaskSegment
from benchmarks.learn.task_records import TaskRecords, read_image_task, read_text_task
from streamlearn.errors import UsageError

ORDER_1 = ("task1572", "task363", "task1290", "task181", "task002", "task1510", "task639", "task1729")
SHORT_1 = ("task1572", "task363", "task181", "task1510", "task639", "task1729")
UNSEEN_1 = ("task073", "task1590", "task748", "task511", "task591", "task1687", "task875")
ORDER_2 = ("task748", "task073", "task1590", "task639", "task1572", "task1687", "task591", "task363")
UNSEEN_2 = ("task1510", "task1729", "task181", "task511", "task002", "task1290", "task875")
RELATED = ("task1687", "task363", "task875")
TRACE = ("C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
TRACE_1 = ("FOMC", "C-STANCE", "ScienceQA", "Py150", "MeetingBank", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
TRACE_2 = ("FOMC", "C-STANCE", "ScienceQA", "Py150", "NumGLUE-ds", "NumGLUE-cm", "MeetingBank", "20Minuten")
TRACE_3 = ("FOMC", "C-STANCE", "ScienceQA", "Py150", "MeetingBank", "NumGLUE-ds", "NumGLUE-cm", "20Minuten")
VISITS = ((0, 1, 2, 3, 4), (2, 0, 1, 4, 3), (1, 3, 0, 2, 4))
"""Visits of `recurring`, as positions in ORDER_1; no task follows itself."""
DURATIONS = (2, 3)
"""Number of segments that a task of `interleaved` stays for, alternating between tasks."""


def sequential(name: str, draw: Draw, tasks: Sequence[str], unseen: Sequence[str] = (), *, bare: bool = False) -> Suite:
    """Build a suite of one task after another; `bare` leaves the tasks' definitions out of the prompts."""
    records = _read(draw, [*tasks, *unseen], bare=bare)
    return _suite(name, draw, [TaskSegment((task,), records[task].train) for task in tasks], records, unseen)


def recurring(draw: Draw) -> Suite:
    """Build a suite of tasks that come back."""
    records = _read(draw, ORDER_1[:5])
    parts = {task: _split(each.train, len(VISITS)) for task, each in records.items()}
    segments = [TaskSegment((ORDER_1[i],), parts[ORDER_1[i]][visit]) for visit, each in enumerate(VISITS) for i in each]
    return _suite("recurring", draw, segments, records)


def interleaved(draw: Draw) -> Suite:
    """Build a suite of tasks that join one by one and leave after two or three segments."""
    durations = {task: DURATIONS[number % len(DURATIONS)] for number, task in enumerate(ORDER_1)}
    active: list[list[str]] = [[] for _ in range(len(ORDER_1) + max(DURATIONS) - 1)]
    for number, task in enumerate(ORDER_1):
        for later in range(durations[task]):
            active[number + later].append(task)
    # A segment with one task is no mixture: it is dropped, and the task's records go to its other segments.
    active = [each for each in active if len(each) > 1]
    records = _read(draw, ORDER_1)
    parts = {task: iter(_split(records[task].train, sum(task in each for each in active))) for task in ORDER_1}
    segments = [
        _mixture(draw, number, tasks, [record for task in tasks for record in next(parts[task])])
        for number, tasks in enumerate(active)
    ]
    return _suite("interleaved", draw, segments, records)


def grouped(draw: Draw, tasks: Sequence[str] = ORDER_1, widths: Sequence[int] = (2, 3)) -> Suite:
    """Build a suite of task groups whose sizes alternate between `widths`; each group's records are shuffled."""
    groups: list[tuple[str, ...]] = []
    remaining = list(tasks)
    while remaining:
        width = widths[len(groups) % len(widths)]
        groups.append(tuple(remaining[:width]))
        remaining = remaining[width:]
    records = _read(draw, tasks)
    segments = [
        _mixture(draw, number, group, [record for task in group for record in records[task].train])
        for number, group in enumerate(groups)
    ]
    return _suite("grouped", draw, segments, records)


def mixed(draw: Draw, tasks: Sequence[str] = ORDER_1) -> Suite:
    """Build a suite of one segment, in which every record is of a random task."""
    records = _read(draw, tasks)
    segment = _mixture(draw, 0, tasks, [record for task in tasks for record in records[task].train])
    return _suite("mixed", draw, [segment], records)


def long(draw: Draw) -> Suite:
    """Build a suite of 23 tasks on one adapter budget; all tasks seen are evaluated after 8, 15 and 23 of them."""
    suite = sequential("long", draw, (*ORDER_1, *UNSEEN_1, *TRACE))
    return replace(suite, checkpoints=frozenset({7, 14, 22}))


def images(draw: Draw) -> Suite:
    """Build a suite of questions about images, one kind after another; prompts are always plain."""
    home = next((folder for folder in draw.folders if (folder / "cifar10.npz").exists()), None)
    if home is None:
        raise UsageError(
            "--data: suite images needs the folder of image sets that streamlearn.backbone.image_tasks describes, "
            f"found no cifar10.npz in {', '.join(map(str, draw.folders))}"
        )
    records = {task: read_image_task(draw, home, task) for task in image_tasks.TASKS}
    segments = [TaskSegment((task,), each.train) for task, each in records.items()]
    return replace(_suite("images", draw, segments, records), backbone="builtin:nano-vl")


SUITES: Mapping[str, Callable[[Draw], Suite]] = {
    "superni-1": lambda draw: sequential("superni-1", draw, ORDER_1, UNSEEN_1),
    "superni-2": lambda draw: sequential("superni-2", draw, ORDER_2, UNSEEN_2),
    "superni-1-short": lambda draw: sequential("superni-1-short", draw, SHORT_1),
    "related": lambda draw: sequential("related", draw, RELATED),
    "superni-1-bare": lambda draw: sequential("superni-1-bare", draw, ORDER_1, UNSEEN_1, bare=True),
    "superni-2-bare": lambda draw: sequential("superni-2-bare", draw, ORDER_2, UNSEEN_2, bare=True),
    "trace": lambda draw: sequential("trace", draw, TRACE),
    "trace-1": lambda draw: sequential("trace-1", draw, TRACE_1),
    "trace-2": lambda draw: sequential("trace-2", draw, TRACE_2),
    "trace-3": lambda draw: sequential("trace-3", draw, TRACE_3),
    "long": long,
    "recurring": recurring,
    "interleaved": interleaved,
    "grouped": grouped,
    "mixed": mixed,
    "images": images,
}
"""Suite name -> its builder."""


def of_folder(folder: Path, draw: Draw, order: Sequence[str] = ()) -> Suite:
    """Build a suite from a folder of task files: its tasks by name, or in the given order.

    Raises:
        UsageError: the folder holds no task files, or not those of a task in `order`.
    """
    found = sorted(file.name.removesuffix(".train.jsonl.gz") for file in folder.glob("*.train.jsonl.gz"))
    if not found:
        raise UsageError(f"{folder} must hold task files NAME.train.jsonl.gz and NAME.test.jsonl.gz, found none")
    return sequential(folder.resolve().name, replace(draw, folders=[folder]), order or found)


def _read(draw: Draw, tasks: Iterable[str], *, bare: bool = False) -> dict[str, TaskRecords]:
    return {task: read_text_task(draw, task, bare=bare) for task in tasks}


def _suite(
    name: str,
    draw: Draw,
    segments: Sequence[TaskSegment],
    records: Mapping[str, TaskRecords],
    unseen: Sequence[str] = (),
) -> Suite:
    return Suite(
        name,
        tuple(segments),
        {task: each.scored for task, each in records.items()},
        tuple(unseen),
        references={task: each.references for task, each in records.items()},
        train={task: each.train for task, each in records.items()},
        train_references={task: each.train_references for task, each in records.items()},
        metrics={task: each.metric for task, each in records.items()},
        split=draw.split,
    )


def _split(records: Sequence[Json], parts: int) -> list[tuple[Json, ...]]:
    edges = [len(records) * i // parts for i in range(parts + 1)]
    return [tuple(records[a:b]) for a, b in pairwise(edges)]


def _mixture(draw: Draw, number: int, tasks: Sequence[str], records: list[Json]) -> TaskSegment:
    random.Random(f"{draw.seed} {number}").shuffle(records)
    return TaskSegment(tuple(tasks), tuple(records))
