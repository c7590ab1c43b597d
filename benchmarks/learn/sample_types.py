"""Sample types for LoRAMoE's localized balancing constraint: whether a task asks for a label or for a text.

LoRAMoE (arXiv 2312.09979) separates downstream tasks from questions about world knowledge. The suites have no such
parts; label and text are the two kinds of tasks that they do have. The kind follows from the task's metric.
"""

from dataclasses import replace

from benchmarks.learn.suite import Json, Suite
from streamlearn.settings import LearnerSettings

LABEL_METRICS = ("exact_match", "choice")
"""Metrics of tasks that ask for a label."""


def with_sample_types(suite: Suite, settings: LearnerSettings) -> Suite:
    """Return the suite with the type of each training record in its field `sample_type`.

    The first of the settings' two types is for labels, the second for texts. Records of unknown tasks get none.
    """
    label, text = settings.sample_types
    types: dict[str, str] = {}
    for task, records in suite.train.items():
        types |= dict.fromkeys(map(_task_of, records), label if suite.metrics[task] in LABEL_METRICS else text)
    segments = tuple(
        replace(segment, records=tuple(_typed(record, types.get(_task_of(record))) for record in segment.records))
        for segment in suite.segments
    )
    return replace(suite, segments=segments)


def _task_of(record: Json) -> str:
    task: str = record.get("meta", {}).get("task", "")
    return task


def _typed(record: Json, sample_type: str | None) -> Json:
    return record if sample_type is None else {**record, "sample_type": sample_type}
