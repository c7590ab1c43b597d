"""Experience replay."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.learn.baselines.replay import Replay
from streamlearn.learner.learner import Step
from streamlearn.stream.record import Example
from tests.benchmarks.learn.baselines.tasks import ONE, TWO
from tests.learners import MakeLearner


def test_a_step_trains_on_as_many_old_records_and_reports_the_new(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is empty at first; losses and hits are those of the batch."""
    learner = make_learner(preset="lora")
    seen: list[int] = []
    plain = learner.step

    def step(examples: Sequence[Example], *others: Any) -> Step:
        seen.append(len(examples))
        return plain(examples, *others)

    monkeypatch.setattr(learner, "step", step)
    replay = Replay(learner, seed=0, capacity=80)
    steps = [replay.step(ONE), replay.step(TWO)]
    assert seen == [3, 6]
    assert [len(step.record_losses) for step in steps] == [3, 3]
    assert {id(example) for example in replay.memory.items} == {id(example) for example in (*ONE, *TWO)}
