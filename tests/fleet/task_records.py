"""Records of three tasks that a fleet learns: of SuperNI's files, or of the bundled sample.

A folder of SuperNI's files holds NAME.train.jsonl.gz and NAME.test.jsonl.gz for each task (`benchmarks.data`). The
tasks chosen here have short prompts, and a small backbone gains from learning them. Without such a folder the three
tasks of the sample are used.
"""

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from benchmarks.data import Split, read_task

SAMPLE = Path(__file__).parents[2] / "configs" / "sample"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "superni"
OF_SAMPLE = ("task639", "task1729", "task002")
OF_SUPERNI = ("task1510", "task591", "task639")
MAX_PROMPT_CHARS = 2400


@dataclass(frozen=True)
class TaskRecords:
    """Where the records are, and which tasks are learned, in this order."""

    folder: Path | None
    """Of SuperNI's files; None: the sample."""
    tasks: tuple[str, ...]

    @classmethod
    def found(cls, folder: Path | None = None, tasks: Sequence[str] = ()) -> Self:
        """Those of the given folder, of the shared one where there is one, or of the sample; `tasks` name others."""
        folder = folder or (SHARED if SHARED.is_dir() else None)
        return cls(folder, tuple(tasks) or (OF_SAMPLE if folder is None else OF_SUPERNI))

    def read(self, task: str, split: Split, *, max_chars: int = MAX_PROMPT_CHARS) -> list[dict[str, Any]]:
        """The records of one task whose prompts are not too long, in file order."""
        return [row for row in self._rows(task, split) if len(row["prompt"]) <= max_chars]

    def _rows(self, task: str, split: Split) -> Iterator[dict[str, Any]]:
        if self.folder is not None:
            yield from read_task(self.folder, task, split)
            return
        with gzip.open(SAMPLE / f"superni.{split}.jsonl.gz") as lines:
            for row in map(orjson.loads, lines):
                if row["meta"]["task"].startswith(f"{task}_"):
                    yield row
