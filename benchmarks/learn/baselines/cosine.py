"""Training with a cosine schedule, which needs the length of the stream.

    lr(n) = lr (1 + cos(pi n / N)) / 2                                                         (1)

Loshchilov and Hutter 2017 without restarts; n of N records have been trained on before the step.
"""

import math
from collections.abc import Sequence

from benchmarks.learn.baselines.baseline import Baseline
from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.record import Example


class CosineSchedule(Baseline):
    """Plain training under eq. (1)."""

    def __init__(self, learner: Learner, *, seed: int, records: int) -> None:
        """`records` is N, over all passes."""
        super().__init__(learner, seed=seed)
        self._records = records
        self._done = 0

    def step(self, examples: Sequence[Example]) -> Step:
        """Set the rate of this step, then train on the batch."""
        scale = (1 + math.cos(math.pi * self._done / self._records)) / 2
        for group in self.learner.optimizer.groups:
            group.lr_scale = scale
        self._done += len(examples)
        return self.learner.step(examples)
