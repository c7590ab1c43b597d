"""Segments of a suite as a baseline trains on them: batches, regime slots and the shuffled order."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.learn.suite import Json, Suite, TaskSegment
from streamlearn.settings import StreamSettings
from streamlearn.stream.intake import Batcher
from streamlearn.stream.record import Example, Record, TopicPartition


def batches(examples: Sequence[Example], settings: StreamSettings) -> Iterator[Sequence[Example]]:
    """Yield the batches that the daemon would make of the examples."""
    batcher, origin = Batcher(settings), TopicPartition("segment", 0)
    for offset, example in enumerate(examples):
        for batch in batcher.add(Record(origin, offset, None), example):
            yield batch.examples
    for batch in batcher.flush():
        yield batch.examples


def regime_slots(suite: Suite) -> tuple[list[int], dict[str, int]]:
    """Return the slot of each segment, equal for equal tasks, and the last slot of each task."""
    known: dict[tuple[str, ...], int] = {}
    slots = [known.setdefault(segment.tasks, len(known)) for segment in suite.segments]
    by_task = {task: slot for segment, slot in zip(suite.segments, slots, strict=True) for task in segment.tasks}
    return slots, by_task


def shuffled(suite: Suite, seed: int | str) -> list[TaskSegment]:
    """Return as many segments of the same lengths, each with records of all tasks."""
    records: list[Json] = [record for segment in suite.segments for record in segment.records]
    random.Random(f"joint {seed}").shuffle(records)
    remaining = iter(records)
    return [replace(segment, records=tuple(next(remaining) for _ in segment.records)) for segment in suite.segments]
