"""Measurements taken during a run."""

import time
from collections.abc import Callable

from streamlearn.bench.learn.evaluator import Evaluator, SlotsOf, TaskScore
from streamlearn.bench.learn.suite import Suite
from streamlearn.learner.learner import Learner, Step


class RunRecorder:
    """Losses and tokens of every step, and the task scores after every segment."""

    def __init__(self, suite: Suite, evaluator: Evaluator, progress: Callable[[str], None]) -> None:
        self.suite = suite
        self.evaluator = evaluator
        self._progress = progress
        self.matrix: list[dict[str, TaskScore]] = []
        """Scores by task, one row per segment."""
        self.losses: list[float] = []
        """Prequential loss of each record, nats per answer token."""
        self.tokens = 0
        self.evaluation_s = 0.0

    def record(self, step: Step) -> None:
        """Record a training step."""
        self.losses += step.record_losses
        self.tokens += step.tokens

    def evaluate(self, learner: Learner, slots_of: SlotsOf) -> None:
        """Evaluate the learner at the end of the next segment."""
        started = time.monotonic()
        tasks = self.suite.evaluated_after(len(self.matrix))
        self.matrix.append(self.evaluator.evaluate(learner, tasks, slots_of))
        self._progress(f"segment {len(self.matrix)} of {len(self.suite.segments)} done")
        self.evaluation_s += time.monotonic() - started
