"""DER++."""

from statistics import fmean

import pytest
import torch

from benchmarks.learn.baselines.baseline import Baseline
from benchmarks.learn.baselines.dark_replay import DarkReplay
from streamlearn.adapters.context import routing_context
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_logits
from streamlearn.stream.record import Example
from tests.benchmarks.learn.baselines.tasks import ONE, TWO, learn, loss_on
from tests.doubles import random_examples
from tests.learners import MakeLearner, same, snapshot


def logits_of(learner: Learner, example: Example) -> torch.Tensor:
    """The logits of the answer tokens under the current weights."""
    packed = pack([example], learner.device)
    with torch.no_grad(), routing_context(learner.model, packed.context()):
        return packed_logits(learner.forward, packed)


def test_it_remembers_the_largest_logits_from_before_the_update(make_learner: MakeLearner) -> None:
    """Of every answer token, with their vocabulary ids."""
    learner = make_learner(preset="lora")
    before = {id(example): logits_of(learner, example) for example in ONE}
    dark = DarkReplay(learner, seed=0, capacity=80, top=4)
    dark.step(ONE)
    assert dark.memory.items
    for each in dark.memory.items:
        expected = before[id(each.example)].topk(4)
        torch.testing.assert_close(each.logits_LK, expected.values)
        assert each.tokens_LK.tolist() == expected.indices.tolist()


def rise_of(learner: Learner, method: Baseline) -> float:
    """How much the loss on the first task rises while the second one is learned."""
    learn(method, ONE)
    before = loss_on(learner, ONE)
    learn(method, TWO)
    return loss_on(learner, ONE) - before


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.0, 1.0)])
def test_each_term_replays(make_learner: MakeLearner, alpha: float, beta: float) -> None:
    """Alone, each keeps the first task better than plain training does; mean over four draws from the memory."""
    plain = make_learner(preset="lora")
    rises = []
    for seed in range(4):
        learner = make_learner(preset="lora")
        rises.append(rise_of(learner, DarkReplay(learner, seed=seed, capacity=80, alpha=alpha, beta=beta)))
    assert fmean(rises) < 0.6 * rise_of(plain, Baseline(plain, seed=0))


def test_without_strength_it_is_plain_training(make_learner: MakeLearner) -> None:
    """The weights are equal, and the reported loss is that of the batch."""
    one, other = make_learner(preset="lora"), make_learner(preset="lora")
    learn(Baseline(one, seed=0), ONE, TWO, steps=2)
    learn(DarkReplay(other, seed=0, capacity=80, alpha=0.0, beta=0.0), ONE, TWO, steps=2)
    assert same(snapshot(one), snapshot(other))


def test_the_memory_fills_up(make_learner: MakeLearner) -> None:
    """It holds as many records as that of plain replay."""
    dark = DarkReplay(make_learner(preset="lora"), seed=0, capacity=12)
    examples = random_examples([9] * 24, seed=3)
    for start in range(0, len(examples), 4):
        dark.step(examples[start : start + 4])
    assert len(dark.memory.items) == 12
