"""Measurements taken during a run."""

import time
from collections.abc import Callable, Iterable

from benchmarks.learn.evaluator import Evaluator, SlotsOf, TaskAnswers, TaskScore
from benchmarks.learn.suite import Suite
from streamlearn.learner.learner import Learner, Step


class RunRecorder:
    """Losses and tokens of every step, scores after every segment, and free answers after a task's last segment."""

    def __init__(
        self, suite: Suite, evaluator: Evaluator, progress: Callable[[str], None], *, answer_after: bool = True
    ) -> None:
        """Build a recorder; without `answer_after` answers are decoded only at the end of the stream."""
        self.suite = suite
        self.evaluator = evaluator
        self._progress = progress
        self._answer_after = answer_after and not suite.only_at_end
        self.matrix: list[dict[str, TaskScore]] = []
        """Teacher-forced scores by task, one row per segment."""
        self.answers_after: dict[str, TaskAnswers] = {}
        """Free answers to the tasks of the stream, each after its last segment; empty without `answer_after`."""
        self.answers_end: dict[str, TaskAnswers] = {}
        """Free answers to all tasks at the end of the stream."""
        self.losses: list[float] = []
        """Prequential loss of each record, nats per answer token."""
        self.tokens = 0
        self.evaluation_s = 0.0

    def record(self, step: Step) -> None:
        """Record a training step."""
        self.losses += step.record_losses
        self.tokens += step.tokens
        self._report(f"trained on {self.tokens:,} tokens")

    def evaluate(self, learner: Learner, slots_of: SlotsOf) -> None:
        """Evaluate the learner at the end of the next segment."""
        started = time.monotonic()
        number = len(self.matrix)
        tasks = self.suite.evaluated_after(number)
        self._report("scoring")
        self.matrix.append(self.evaluator.evaluate(learner, tasks, slots_of))
        ended = [task for task, end in self.suite.ends.items() if end == number]
        if number == len(self.suite.segments) - 1:
            self.answers_end = self.evaluator.answer(learner, self.suite.tests, slots_of)
            self._keep(ended, self.answers_end)
        elif self._answer_after:
            self._keep(ended, self.evaluator.answer(learner, ended, slots_of))
        self.evaluation_s += time.monotonic() - started

    def _report(self, doing: str) -> None:
        self._progress(f"segment {len(self.matrix) + 1} of {len(self.suite.segments)}: {doing}")

    def _keep(self, ended: Iterable[str], answers: dict[str, TaskAnswers]) -> None:
        if self._answer_after:
            self.answers_after |= {task: answers[task] for task in ended if task in answers}
