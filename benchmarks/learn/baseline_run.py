"""Training a baseline segment by segment, with the task boundaries given."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.learn.arms import Arm
from benchmarks.learn.baselines.baseline import Baseline
from benchmarks.learn.baselines.context import BaselineContext
from benchmarks.learn.evaluator import Evaluator
from benchmarks.learn.methods import Method
from benchmarks.learn.recorder import RunRecorder
from benchmarks.learn.sample_types import with_sample_types
from benchmarks.learn.segments import batches, regime_slots, shuffled
from benchmarks.learn.suite import Suite, TaskSegment
from benchmarks.learn.trained_method import Progress, TrainedMethod
from streamlearn.adapters.presets import objective
from streamlearn.backbone.load import outline
from streamlearn.daemon.model import Model, adapter_of
from streamlearn.settings import StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Example


def train_baseline(suite: Suite, method: Method, arm: Arm, progress: Progress) -> TrainedMethod:
    """Train on one segment after another and evaluate after each; of several passes, in the last one only."""
    assert method.baseline is not None
    settings = arm.settings
    model = Model(settings, outline(settings.backbone), adapter_of(settings), None, settings.state / "offloaded")
    recorder = RunRecorder(
        suite, Evaluator(suite, model.decoder), progress, answer_after=method.trained and not method.shuffled
    )
    slots, slot_of_task = regime_slots(suite)
    records = method.passes * sum(len(segment.records) for segment in suite.segments)
    baseline = method.baseline(BaselineContext(model, settings, slots, records, arm.options))
    stream = with_sample_types(suite, settings.learner) if objective(settings).localized_balance else suite

    def slots_of(task: str, examples: Sequence[Example]) -> list[int] | None:
        return [slot_of_task.get(task, 0)] * len(examples) if method.oracle_regimes else None

    for number in range(method.passes):
        seed = settings.seed if number == 0 else f"{settings.seed} {number}"
        segments = shuffled(stream, seed) if method.shuffled else stream.segments
        for place, segment in enumerate(segments):
            if method.trained:
                _train(baseline, place, _decoded(model.decoder, segment), settings.stream, recorder, first=number == 0)
            if number == method.passes - 1:
                recorder.evaluate(model.learner, slots_of)
    return TrainedMethod(recorder, model, slots_of, None)


def _decoded(decoder: Decoder, segment: TaskSegment) -> list[Example]:
    return [decoder.decode_value(record) for record in segment.records]


def _train(
    baseline: Baseline,
    number: int,
    examples: Sequence[Example],
    settings: StreamSettings,
    recorder: RunRecorder,
    *,
    first: bool,
) -> None:
    """Train on a segment; only losses of the `first` pass are prequential and recorded."""
    baseline.begin(number, examples)
    for batch in batches(examples, settings):
        step = baseline.step(batch)
        recorder.record(step if first else replace(step, record_losses=()))
    baseline.end(number, examples)
