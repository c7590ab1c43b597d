"""Experience replay."""

from collections import Counter
from collections.abc import Sequence

import pytest

from streamlearn.bench.learn.baselines.replay import Replay
from streamlearn.learner.learner import Step
from streamlearn.stream.decode import Example
from tests.bench.learn.baselines.tasks import ONE, TWO
from tests.doubles import random_examples
from tests.learners import MakeLearner


def test_the_memory_is_a_uniform_sample(make_learner: MakeLearner) -> None:
    """Every record is kept with the same probability, early or late."""
    learner = make_learner(preset="lora")
    examples = random_examples([4] * 20, seed=3)
    kept: Counter[int] = Counter()
    for seed in range(400):
        replay = Replay(learner, seed=seed, capacity=5)
        for example in examples:
            replay._remember(example)
        kept.update(id(example) for example in replay.memory)
    assert all(60 < kept[id(example)] < 140 for example in examples)  # 100 expected, sd 8.7


def test_a_step_trains_on_as_many_old_records_and_reports_the_new(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is empty at first; losses and hits are those of the batch."""
    learner = make_learner(preset="lora")
    seen: list[int] = []
    plain = learner.step

    def step(examples: Sequence[Example]) -> Step:
        seen.append(len(examples))
        return plain(examples)

    monkeypatch.setattr(learner, "step", step)
    replay = Replay(learner, seed=0)
    steps = [replay.step(ONE), replay.step(TWO)]
    assert seen == [3, 6]
    assert [len(step.record_losses) for step in steps] == [3, 3]
    assert {id(example) for example in replay.memory} == {id(example) for example in (*ONE, *TWO)}
