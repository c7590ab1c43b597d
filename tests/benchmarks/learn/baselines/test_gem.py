"""Gradient episodic memory."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.learn.baselines.baseline import Baseline
from benchmarks.learn.baselines.gem import Gem, project
from streamlearn.settings import LearnerSettings
from streamlearn.stream.record import Example
from tests.benchmarks.learn.baselines.tasks import ONE, learn, loss_on
from tests.learners import MakeLearner

NEARLY = 1e-4


def test_one_conflict_is_taken_out() -> None:
    """Only the component along the reference is removed."""
    g, reference = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([[0.0, 2.0, 0.0]])
    torch.testing.assert_close(project(g, reference), torch.tensor([1.0, 0.0, 2.0]), rtol=NEARLY, atol=NEARLY)


def test_without_a_conflict_the_gradient_stays() -> None:
    """The very same tensor is returned."""
    g, references = torch.tensor([1.0, 1.0]), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    assert project(g, references) is g


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_the_projection_is_optimal(seed: int, num: int) -> None:
    """Karush-Kuhn-Tucker: it is feasible, and the change is a non-negative mixture of the active references."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(12, generator=generator, dtype=torch.float64)
    G = torch.randn(num, 12, generator=generator, dtype=torch.float64)
    z = project(g, G)
    assert (G @ z >= -NEARLY).all()
    v = torch.linalg.lstsq(G.T, z - g).solution
    torch.testing.assert_close(G.T @ v, z - g, rtol=NEARLY, atol=NEARLY)
    assert (v >= -NEARLY).all()
    assert ((v * (G @ z)).abs() <= NEARLY * (1 + v.abs())).all()


def test_a_step_against_the_memory_does_not_raise_its_loss(make_learner: MakeLearner) -> None:
    """The second task has other answers to the same prompts; plain training on it unlearns the first."""
    other = tuple(Example(e.input_ids, e.labels[::-1].copy()) for e in ONE)
    rise = {}
    for name in ("plain", "gem"):
        learner = make_learner(preset="lora", lr=1e-3)
        settings = LearnerSettings(lr=1e-3)
        method = Gem(learner, seed=0, settings=settings, records=10) if name == "gem" else Baseline(learner, seed=0)
        learn(method, ONE, steps=8)
        before = loss_on(learner, ONE)
        method.begin(1, other)
        for _ in range(8):
            method.step(other)
        rise[name] = loss_on(learner, ONE) - before
    assert rise["gem"] < 0.5 * abs(rise["plain"])
