"""The records of one task: those to train on, and those to score with their references."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.backbones import image_tasks
from benchmarks.learn.splits import Draw, choose, divide
from benchmarks.learn.suite import Json, Metric, Reference
from benchmarks.learn.task_metrics import metric_of
from benchmarks.superni import Split as FileSplit
from benchmarks.superni import answer_of, read_rows, to_chat, to_record
from streamlearn.errors import UsageError

_PARAGRAPH = re.compile(r"Paragraph:\n(.*)\n\nSimplification:$", re.DOTALL)
"""The text to simplify in a prompt of TRACE's 20Minuten."""


@dataclass(frozen=True)
class TaskRecords:
    """The records of one task, each with its reference."""

    train: tuple[Json, ...]
    scored: tuple[Json, ...]
    train_references: tuple[Reference, ...]
    references: tuple[Reference, ...]
    metric: Metric


def read_text_task(draw: Draw, task: str, *, bare: bool = False) -> TaskRecords:
    """Read a task's files; `bare` leaves its definition out of the prompts.

    Raises:
        UsageError: no folder holds the task's file, or it has no records left to score.
    """
    pool, development = divide(_rows(draw, task, "train"), draw.records, _input_of)
    scored = development if draw.split == "development" else _rows(draw, task, "test")
    convert = to_chat if draw.prompts == "chat" else to_record
    return _task_records(draw, task, pool, scored, lambda row: convert(row, bare=bare), _reference)


def read_image_task(draw: Draw, home: Path, task: str) -> TaskRecords:
    """Read questions about images; they have prompts and completions, whatever the draw says."""
    pool, development = divide(list(image_tasks.records(home, task, "train")), draw.records, _image_input_of)
    scored = development
    if draw.split == "test":
        scored = list(image_tasks.records(home, task, "test"))
        random.Random(f"tests {task}").shuffle(scored)  # the files are sorted by class
    return _task_records(draw, task, pool, scored, dict, lambda record: Reference((record["meta"]["answer"],)))


def _task_records(
    draw: Draw,
    task: str,
    pool: Sequence[Json],
    scored: Sequence[Json],
    convert: Callable[[Json], Json],
    reference: Callable[[Json], Reference],
) -> TaskRecords:
    train, scored = choose(pool, draw, task), scored[: draw.evaluated]
    if not scored:
        raise UsageError(
            f"{task}: no {draw.split} records are left beside {len(train)} training records: lower --records-per-task"
        )
    return TaskRecords(
        tuple(map(convert, train)),
        tuple(map(convert, scored)),
        tuple(map(reference, train)),
        tuple(map(reference, scored)),
        metric_of(task, [reference(row).answers[0] for row in pool]),
    )


def _rows(draw: Draw, task: str, split: FileSplit) -> list[dict[str, Any]]:
    """Read from the folder that holds the task, or fail with the message of the last folder."""
    home = next((f for f in draw.folders if any(f.glob(f"{task}*.{split}.jsonl.gz"))), draw.folders[-1])
    try:
        return list(read_rows(home, task, split))
    except FileNotFoundError as error:
        raise UsageError(f"{error}; pass every folder that the suite needs with --data") from error


def _input_of(row: Mapping[str, Any]) -> str:
    return str(row["prompt"] if "prompt" in row else row["input"]).casefold()


def _image_input_of(record: Json) -> tuple[str, str]:
    return record["prompt"], record["image"]


def _reference(row: Mapping[str, Any]) -> Reference:
    answers = [answer_of(row), *(str(each).strip() for each in row.get("references", ()))]
    paragraph = _PARAGRAPH.search(row.get("prompt", ""))
    return Reference(tuple(dict.fromkeys(answers)), paragraph[1] if paragraph else "")
