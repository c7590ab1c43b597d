"""The plain baseline, sequential training."""

from benchmarks.learn.baselines.baseline import Baseline
from tests.benchmarks.learn.baselines.tasks import ONE, TWO, learn
from tests.learners import MakeLearner, same, snapshot


def test_the_plain_baseline_is_the_learner(make_learner: MakeLearner) -> None:
    """Its weights are bit-equal to those of the learner's own steps on the same batches."""
    one, other = make_learner(preset="lora"), make_learner(preset="lora")
    learn(Baseline(one, seed=0), ONE, TWO, steps=2)
    for examples in (ONE, ONE, TWO, TWO):
        other.step(examples)
    assert same(snapshot(one), snapshot(other))
