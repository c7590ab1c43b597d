"""Training a baseline segment by segment, with the task boundaries given."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from streamlearn.backbone.load import outline
from streamlearn.bench.learn.arms import Arm
from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.bench.learn.evaluator import Evaluator
from streamlearn.bench.learn.methods import BaselineContext, Method
from streamlearn.bench.learn.recorder import RunRecorder
from streamlearn.bench.learn.suite import Json, Suite, TaskSegment
from streamlearn.bench.learn.trained_method import Progress, TrainedMethod
from streamlearn.runtime.model import Model, adapter_of
from streamlearn.settings import StreamSettings
from streamlearn.stream.batch import Batcher
from streamlearn.stream.decode import Example
from streamlearn.stream.record import Record, TopicPartition


def train_baseline(suite: Suite, method: Method, arm: Arm, progress: Progress) -> TrainedMethod:
    """Train on one segment after another and evaluate after each."""
    assert method.baseline is not None
    settings = arm.settings
    model = Model(settings, outline(settings.backbone), adapter_of(settings), None)
    recorder = RunRecorder(
        suite, Evaluator(suite, model.decoder), progress, answer_after=method.trained and not method.shuffled
    )
    slots, slot_of_task = regime_slots(suite)
    baseline = method.baseline(BaselineContext(model, settings, slots))

    def slots_of(task: str, examples: Sequence[Example]) -> list[int] | None:
        return [slot_of_task.get(task, 0)] * len(examples) if method.oracle_regimes else None

    for number, segment in enumerate(shuffled(suite, settings.seed) if method.shuffled else suite.segments):
        examples = [model.decoder.decode_value(record) for record in segment.records]
        if method.trained:
            _train(baseline, number, examples, settings.stream, recorder)
        recorder.evaluate(model.learner, slots_of)
    return TrainedMethod(recorder, model, slots_of, None)


def _train(
    baseline: Baseline, number: int, examples: Sequence[Example], settings: StreamSettings, recorder: RunRecorder
) -> None:
    baseline.begin(number, examples)
    for batch in batches(examples, settings):
        recorder.record(baseline.step(batch))
    baseline.end(number, examples)


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


def shuffled(suite: Suite, seed: int) -> Iterator[TaskSegment]:
    """Yield as many segments of the same lengths, each with records of all tasks."""
    remaining: list[Json] = [record for segment in suite.segments for record in segment.records]
    random.Random(f"joint {seed}").shuffle(remaining)
    for segment in suite.segments:
        part, remaining = remaining[: len(segment.records)], remaining[len(segment.records) :]
        yield replace(segment, records=tuple(part))
