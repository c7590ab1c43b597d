"""Records of three tasks that a fleet learns: of SuperNI's files, or of the bundled sample where there are none.

A folder of SuperNI's files holds NAME.train.jsonl.gz and NAME.test.jsonl.gz for each task (`benchmarks.data`). The
tasks chosen here have short prompts, and a small backbone gains from learning them.
"""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from benchmarks.data import Split, read_task
from benchmarks.measuring import SAMPLE

SHARED = Path(__file__).parents[3] / "shared" / "data" / "superni"
TASKS = ("task1510", "task591", "task639") if SHARED.is_dir() else ("task639", "task1729", "task002")
"""In the order in which they are learned."""


def read_records(task: str, split: Split, *, max_chars: int = 2400) -> list[dict[str, Any]]:
    """The records of one task whose prompts are not too long, in file order."""
    rows: Iterable[dict[str, Any]] = read_task(SHARED, task, split) if SHARED.is_dir() else _sample(task, split)
    return [row for row in rows if len(row["prompt"]) <= max_chars]


def _sample(task: str, split: Split) -> list[dict[str, Any]]:
    with gzip.open(SAMPLE.with_name(f"superni.{split}.jsonl.gz")) as lines:
        return [row for row in map(orjson.loads, lines) if row["meta"]["task"].startswith(f"{task}_")]
