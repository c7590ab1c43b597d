"""Online-LoRA."""

import torch

from benchmarks.learn.baselines.online_lora import OnlineLora, PlateauDetector
from tests.benchmarks.learn.baselines.tasks import ONE, TWO, learn
from tests.learners import MakeLearner

RANK = 5


def plateaus(losses: list[float]) -> list[int]:
    """Steps at which a plateau is reported."""
    detector = PlateauDetector(window=3, flat=0.05)
    return [step for step, loss in enumerate(losses) if detector.update(loss)]


def test_a_plateau_is_reported_once_and_needs_a_peak_before_it() -> None:
    """A falling loss has none; the next one comes after the loss rose and settled again."""
    falling = [15.0 * 0.8**step for step in range(12)]
    assert plateaus(falling) == []
    flat = [1.0] * 12
    assert plateaus(falling + flat) == [17]
    assert plateaus(falling + flat + [5.0, 4.5, 4.0, 3.0, 2.0, 1.5] + flat) == [17, 35]


def test_a_plateau_opens_a_new_block(make_learner: MakeLearner) -> None:
    """The first block stays bit-equal; the new one starts with its A; boundaries change nothing."""
    learner = make_learner(preset="lora", lr=1e-4)
    method = OnlineLora(learner, seed=0, rank=RANK, window=2, flat=0.5)
    for number in range(3):
        method.begin(number, ONE)
        method.step(ONE)
        method.end(number, ONE)
    assert method.block == 0
    method.step(ONE)
    assert method.block == 1
    first, second = slice(0, RANK), slice(RANK, 2 * RANK)
    frozen = [p.detach()[:, :, first].clone() for p in learner.optimizer.parameters()]
    assert all(torch.equal(bank.A[:, :, first], bank.A[:, :, second]) for bank in learner.banks)
    method.step(TWO)
    for parameter, old in zip(learner.optimizer.parameters(), frozen, strict=True):
        assert torch.equal(parameter[:, :, first], old)
        assert not torch.equal(parameter[:, :, second], old)


def test_importance_holds_the_new_block_at_its_start(make_learner: MakeLearner) -> None:
    """The stronger the penalty, the less it moves."""
    moved = {}
    for strength in (0.0, 1e3):
        learner = make_learner(preset="lora")
        method = OnlineLora(learner, seed=0, rank=RANK, strength=strength, window=2, flat=1.0)
        learn(method, ONE, steps=4)
        assert method.block == 1
        start = learner.banks[0].B.detach().clone()
        learn(method, TWO, steps=3)
        moved[strength] = float((learner.banks[0].B.detach() - start).norm())
    assert moved[1e3] < 0.7 * moved[0.0]


def test_the_buffer_keeps_the_records_of_the_highest_loss(make_learner: MakeLearner) -> None:
    """They are trained on again with each batch; their losses are not reported."""
    learner = make_learner(preset="lora", lr=1e-4)
    method = OnlineLora(learner, seed=0, rank=RANK)
    first, second = method.step(ONE), method.step(TWO)
    assert (len(first.record_losses), len(second.record_losses)) == (3, 3)
    assert second.learned_tokens > sum(example.num_learned for example in TWO)
    losses = [loss for loss, _ in method.buffer]
    assert losses == sorted(losses, reverse=True)
    assert max(second.record_losses) <= losses[0]
