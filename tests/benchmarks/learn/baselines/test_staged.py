"""MoT's stages."""

from benchmarks.learn.baselines.staged import StagedTraining
from streamlearn.baselines.balance_stages import Stage
from streamlearn.settings import Settings
from tests.doubles import random_examples
from tests.learners import MakeLearner, hooks_of


def test_every_segment_passes_through_all_stages(make_learner: MakeLearner) -> None:
    """In shares of the segment's own number of steps."""
    learner = make_learner(preset="mot")
    stages = hooks_of(learner).stages
    assert stages is not None
    settings = Settings(source={"jsonl": {"path": "s"}}, stream={"batch_records": 1})
    staged = StagedTraining(learner, seed=0, settings=settings)
    for number, length in enumerate((6, 3)):
        examples = random_examples([4] * length, seed=number)
        staged.begin(number, examples)
        found = []
        for example in examples:
            found.append(stages.stage)
            staged.step([example])
        expected = [Stage.FFN] + [Stage.ATTENTION] * round(length / 2) + [Stage.FINE_TUNING] * length
        assert found == expected[:length]
