"""The cosine schedule."""

import math

import pytest

from benchmarks.learn.baselines.cosine import CosineSchedule
from tests.benchmarks.learn.baselines.tasks import ONE
from tests.learners import MakeLearner


def test_the_rate_falls_along_the_cosine(make_learner: MakeLearner) -> None:
    """From the full rate to nearly zero over all records."""
    learner = make_learner(preset="lora")
    schedule, found = CosineSchedule(learner, seed=0, records=4 * len(ONE)), []
    for _ in range(4):
        schedule.step(ONE)
        found.append([group.lr_scale for group in learner.optimizer.groups])
    for quarter, scales in enumerate(found):
        assert scales == pytest.approx([(1 + math.cos(math.pi * quarter / 4)) / 2] * len(scales))
