"""A suite: a stream cut into segments, and the test records of its tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class TaskSegment:
    """Consecutive records of one task or of a mixture of tasks."""

    tasks: tuple[str, ...]
    records: tuple[Json, ...]


@dataclass(frozen=True)
class Suite:
    """A stream and the test records of its tasks."""

    name: str
    segments: tuple[TaskSegment, ...]
    tests: Mapping[str, tuple[Json, ...]]
    unseen: tuple[str, ...] = ()
    """Tasks with test records but no training records."""
    backbone: str = "builtin:nano"
    """The model that learns the stream."""
    checkpoints: frozenset[int] = field(default_factory=frozenset)
    """Segments after which every task seen so far is evaluated.

    After any other segment only its own tasks and those of the next segment are evaluated.
    """

    @property
    def boundaries(self) -> list[int]:
        """Index of the first record of every segment but the first."""
        ends, total = [], 0
        for segment in self.segments[:-1]:
            total += len(segment.records)
            ends.append(total)
        return ends

    def evaluated_after(self, number: int) -> list[str]:
        """Return the tasks to evaluate after segment `number`, each once."""
        last = number == len(self.segments) - 1
        everything = last or number in self.checkpoints
        segments = self.segments[: number + 1] if everything else self.segments[number : number + 1]
        tasks = [task for segment in segments for task in segment.tasks]
        tasks += self.unseen if last else self.segments[number + 1].tasks
        return list(dict.fromkeys(tasks))
