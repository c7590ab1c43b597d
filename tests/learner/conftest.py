"""A learner whose adapter has an effect."""

import pytest

from streamlearn.learner.learner import Learner
from tests.learner.reference import train
from tests.learners import MakeLearner


@pytest.fixture
def learner(make_learner: MakeLearner) -> Learner:
    """Trained for a few steps, so that the adapter has an effect."""
    learner = make_learner(lr=3e-2)
    train(learner, range(4))
    return learner
