"""Sample types for LoRAMoE's localized balancing constraint: whether a task asks for a label or for a text.

LoRAMoE (arXiv 2312.09979) separates downstream tasks from questions about world knowledge. The suites have no such
parts; label and text are the two kinds of tasks that they do have. The kind is found in the training answers.
"""

from dataclasses import replace

from streamlearn.bench.learn.suite import Json, Suite, TaskSegment
from streamlearn.settings import LearnerSettings

RECORDS_PER_LABEL = 3
"""Minimum training records per distinct answer of a task that asks for a label."""


def with_sample_types(suite: Suite, settings: LearnerSettings) -> Suite:
    """Return the suite with each training record's type: the first of the settings' names for labels, else the second.

    A record without `meta.task` counts as one of its segment's first task.
    """
    answers: dict[str, list[str]] = {}
    for segment in suite.segments:
        for record in segment.records:
            answers.setdefault(_task_of(record, segment), []).append(answer_of(record))
    label, text = settings.sample_types
    types = {
        task: label if len(set(found)) * RECORDS_PER_LABEL <= len(found) else text for task, found in answers.items()
    }
    segments = [
        replace(
            segment,
            records=tuple({**record, "sample_type": types[_task_of(record, segment)]} for record in segment.records),
        )
        for segment in suite.segments
    ]
    return replace(suite, segments=tuple(segments))


def answer_of(record: Json) -> str:
    """Return the answer of a record: its completion or its last message."""
    answer: str = record["completion"] if "completion" in record else record["messages"][-1]["content"]
    return answer


def _task_of(record: Json, segment: TaskSegment) -> str:
    task: str = record.get("meta", {}).get("task", segment.tasks[0])
    return task
