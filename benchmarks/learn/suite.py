"""A suite: a stream cut into segments, and the records on which its tasks are scored."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from benchmarks.learn.splits import Split

_T = TypeVar("_T")
Json = dict[str, Any]


@dataclass(frozen=True)
class TaskSegment:
    """Consecutive records of one task or of a mixture of tasks."""

    tasks: tuple[str, ...]
    records: tuple[Json, ...]


Metric = Literal["exact_match", "choice", "rouge_l", "sari", "edit_similarity"]
"""What scores a free answer, see `task_metrics`."""


@dataclass(frozen=True)
class Reference:
    """What a free answer is compared with; no learner receives it."""

    answers: tuple[str, ...]
    """All correct answers; the first is the one in the record."""
    source: str = ""
    """The text that is to be rewritten, for SARI; empty for other tasks."""


@dataclass(frozen=True)
class Suite:
    """A stream and the scored records of its tasks."""

    name: str
    segments: tuple[TaskSegment, ...]
    tests: Mapping[str, tuple[Json, ...]]
    """The scored records of each task, in stream order and then `unseen`."""
    unseen: tuple[str, ...] = ()
    """Tasks with scored records that are not in the stream."""
    backbone: str | None = None
    """The model that this suite needs; None: any text model."""
    checkpoints: frozenset[int] = field(default_factory=frozenset)
    """Segments after which every task seen so far is evaluated.

    After any other segment only its own tasks and those of the next segment are evaluated.
    """
    references: Mapping[str, tuple[Reference, ...]] = field(default_factory=dict)
    """What the answers to `tests` are compared with; of a task without references no answers are decoded."""
    train: Mapping[str, tuple[Json, ...]] = field(default_factory=dict)
    """Training records of each task. Those of unseen tasks are not in the stream: they only tell how answers look."""
    train_references: Mapping[str, tuple[Reference, ...]] = field(default_factory=dict)
    """The answers to `train`."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What scores the answers of each task with references; the same for every seed."""
    split: Split = "test"
    """Where the scored records come from."""
    only_at_end: bool = False
    """Whether nothing is evaluated before the end of the stream."""

    @property
    def boundaries(self) -> list[int]:
        """Index of the first record of every segment but the first."""
        ends, total = [], 0
        for segment in self.segments[:-1]:
            total += len(segment.records)
            ends.append(total)
        return ends

    @property
    def ends(self) -> dict[str, int]:
        """The last segment of each task of the stream."""
        return {task: number for number, segment in enumerate(self.segments) for task in segment.tasks}

    def evaluated_after(self, number: int) -> list[str]:
        """Return the tasks to evaluate after segment `number`, each once."""
        last = number == len(self.segments) - 1
        if self.only_at_end and not last:
            return []
        everything = last or number in self.checkpoints
        segments = self.segments[: number + 1] if everything else self.segments[number : number + 1]
        tasks = [task for segment in segments for task in segment.tasks]
        tasks += self.unseen if last else self.segments[number + 1].tasks
        return list(dict.fromkeys(tasks))

    def scored_at_end(self) -> "Suite":
        """Return the suite without evaluation before the end of the stream, and without unseen tasks."""

        def seen(by_task: Mapping[str, _T]) -> dict[str, _T]:
            return {task: values for task, values in by_task.items() if task not in self.unseen}

        return replace(
            self,
            tests=seen(self.tests),
            references=seen(self.references),
            train=seen(self.train),
            train_references=seen(self.train_references),
            metrics=seen(self.metrics),
            unseen=(),
            only_at_end=True,
        )
