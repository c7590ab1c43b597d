"""Every baseline on problems whose answer is known."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamlearn.adapters.routing_context import routing_context
from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.bench.learn.baselines.ewc import Ewc
from streamlearn.bench.learn.baselines.gem import Gem, project
from streamlearn.bench.learn.baselines.o_lora import OLora, overlap_gradient
from streamlearn.bench.learn.baselines.replay import Replay
from streamlearn.learner.learner import Learner, Step
from streamlearn.learner.loss import packed_loss
from streamlearn.learner.packing import pack
from streamlearn.settings import LearnerSettings
from streamlearn.stream.decode import Example
from tests.doubles import random_examples
from tests.learners import MakeLearner, same, snapshot

ONE, TWO = random_examples((9, 7, 8), seed=1), random_examples((8, 8, 6), seed=2)
NEARLY = 1e-4


def loss_on(learner: Learner, examples: tuple[Example, ...]) -> float:
    row = pack(examples, learner.device)
    with torch.no_grad(), routing_context(learner.model, row.context()):
        return float(packed_loss(learner.forward, row).mean)


def learn(baseline: Baseline, *tasks: tuple[Example, ...], steps: int = 12) -> None:
    for number, examples in enumerate(tasks):
        baseline.begin(number, examples)
        for _ in range(steps):
            baseline.step(examples)
        baseline.end(number, examples)


def weights(learner: Learner) -> Tensor:
    return torch.cat([p.detach().flatten() for p in learner.optimizer.parameters()])


class TestEwc:
    """Elastic weight consolidation."""

    def test_fisher_is_the_mean_of_squared_gradients_of_single_records(self, make_learner: MakeLearner) -> None:
        """Not the square of their mean; the log-likelihood is a sum over the answer's tokens."""
        learner = make_learner(preset="lora")
        learn(Baseline(learner, seed=0), ONE, steps=3)
        parameters = learner.optimizer.parameters()
        wanted = [torch.zeros_like(p) for p in parameters]
        for example in ONE:
            row = pack([example], learner.device)
            with routing_context(learner.model, row.context()):
                torch.autograd.backward(packed_loss(learner.forward, row).mean * len(row.target_L))
            for square, parameter in zip(wanted, parameters, strict=True):
                assert parameter.grad is not None
                square.add_(parameter.grad**2 / len(ONE))
            learner.optimizer.zero_grad()
        found = Ewc(learner, seed=0).fisher(ONE)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
        assert all(parameter.grad is None for parameter in parameters)

    def test_the_hold_is_the_sum_of_every_earlier_tasks_quadratic(self, make_learner: MakeLearner) -> None:
        """Its gradient at any point equals that of eq. (1), task by task."""
        learner = make_learner(preset="lora")
        ewc = Ewc(learner, seed=0, strength=6.0)
        tasks = []
        for number, examples in enumerate((ONE, TWO)):
            learn(Baseline(learner, seed=0), examples, steps=4)
            tasks.append((ewc.fisher(examples), [p.detach().clone() for p in learner.optimizer.parameters()]))
            ewc.end(number, examples)
        learn(Baseline(learner, seed=0), ONE, steps=2)
        holds = [hold for group in learner.optimizer.groups for hold in group.holds.values()]
        for place, (theta, hold) in enumerate(zip(learner.optimizer.parameters(), holds, strict=True)):
            wanted = sum((6.0 * fisher[place] * (theta - old[place]) for fisher, old in tasks), torch.zeros(()))
            held = 2 * hold.strength * hold.importance * (theta - hold.anchor)
            torch.testing.assert_close(held, wanted, rtol=1e-3, atol=1e-6)

    def test_it_keeps_what_a_plain_learner_forgets(self, make_learner: MakeLearner) -> None:
        """The first task's loss after the second: strongly held it stays, without strength it is the plain one's."""
        after = {}
        for strength in (None, 0.0, 1e5):
            learner = make_learner(preset="lora")
            method = Baseline(learner, seed=0) if strength is None else Ewc(learner, seed=0, strength=strength)
            learn(method, ONE)
            before = loss_on(learner, ONE)
            learn(method, TWO)
            after[strength] = loss_on(learner, ONE) - before
        assert after[0.0] == after[None]
        assert after[None] > 0.5
        assert after[1e5] < 0.1 * after[None]


class TestGem:
    """Gradient episodic memory."""

    def test_one_conflict_is_taken_out(self) -> None:
        """The component along the reference goes, nothing else."""
        g, reference = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([[0.0, 2.0, 0.0]])
        torch.testing.assert_close(project(g, reference), torch.tensor([1.0, 0.0, 2.0]), rtol=NEARLY, atol=NEARLY)

    def test_without_a_conflict_the_gradient_stays(self) -> None:
        """Every bit of it."""
        g, references = torch.tensor([1.0, 1.0]), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        assert project(g, references) is g

    @given(st.integers(0, 10_000), st.integers(1, 6))
    def test_the_projection_is_optimal(self, seed: int, num: int) -> None:
        """Karush, Kuhn and Tucker: feasible, and the change is a non-negative mixture of the active references."""
        generator = torch.Generator().manual_seed(seed)
        g = torch.randn(12, generator=generator, dtype=torch.float64)
        G = torch.randn(num, 12, generator=generator, dtype=torch.float64)
        z = project(g, G)
        assert (G @ z >= -NEARLY).all()
        v = torch.linalg.lstsq(G.T, z - g).solution
        torch.testing.assert_close(G.T @ v, z - g, rtol=NEARLY, atol=NEARLY)
        assert (v >= -NEARLY).all()
        assert ((v * (G @ z)).abs() <= NEARLY * (1 + v.abs())).all()

    def test_a_step_against_the_memory_does_not_raise_its_loss(self, make_learner: MakeLearner) -> None:
        """The second task asks for other answers to the very same prompts: plainly learned, the first is unlearned."""
        other = tuple(Example(e.input_ids, e.labels[::-1].copy()) for e in ONE)
        rise = {}
        for name in ("plain", "gem"):
            learner = make_learner(preset="lora", lr=1e-3)
            settings = LearnerSettings(lr=1e-3)
            method = Gem(learner, seed=0, settings=settings) if name == "gem" else Baseline(learner, seed=0)
            learn(method, ONE, steps=8)
            before = loss_on(learner, ONE)
            method.begin(1, other)
            for _ in range(8):
                method.step(other)
            rise[name] = loss_on(learner, ONE) - before
        assert rise["gem"] < 0.5 * abs(rise["plain"])


class TestReplay:
    """Experience replay."""

    def test_the_memory_is_a_uniform_sample(self, make_learner: MakeLearner) -> None:
        """Every record is kept with the same chance, early or late."""
        learner = make_learner(preset="lora")
        examples = random_examples([4] * 20, seed=3)
        kept: Counter[int] = Counter()
        for seed in range(400):
            replay = Replay(learner, seed=seed, capacity=5)
            for example in examples:
                replay._take(example)
            kept.update(id(example) for example in replay.memory)
        assert all(60 < kept[id(example)] < 140 for example in examples)  # 100 expected, sd 8.7

    def test_a_step_trains_on_as_many_old_records_and_tells_of_the_new(
        self, make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing to replay at first; losses and hits are those of the batch."""
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


class TestOLora:
    """A LoRA for each task."""

    RANK = 5

    def test_a_task_moves_its_own_block_alone(self, make_learner: MakeLearner) -> None:
        """Earlier blocks and those of later tasks keep their very bits, weight decay or not."""
        learner = make_learner(preset="lora", weight_decay=0.1)
        olora = OLora(learner, seed=0, rank=self.RANK)
        learn(olora, ONE)
        before = [p.detach().clone() for p in learner.optimizer.parameters()]
        olora.begin(1, TWO)
        olora.step(TWO)
        for parameter, old in zip(learner.optimizer.parameters(), before, strict=True):
            own = slice(self.RANK, 2 * self.RANK)
            assert not torch.equal(parameter[:, :, own], old[:, :, own])
            rest = [i for i in range(parameter.shape[2]) if not self.RANK <= i < 2 * self.RANK]
            assert torch.equal(parameter[:, :, rest], old[:, :, rest])

    def test_the_penaltys_gradient_is_autograds(self) -> None:
        """Of the sum of absolute products."""
        earlier, own = torch.randn(6, 8), torch.randn(3, 8, requires_grad=True)
        (wanted,) = torch.autograd.grad((earlier @ own.T).abs().sum(), own)
        torch.testing.assert_close(overlap_gradient(earlier, own.detach()), wanted)

    def test_blocks_become_orthogonal(self, make_learner: MakeLearner) -> None:
        """With a strong penalty the second task's A hardly overlaps the first's."""
        overlap = {}
        for strength in (0.0, 50.0):
            learner = make_learner(preset="lora")
            learn(OLora(learner, seed=0, rank=self.RANK, strength=strength), ONE, TWO, steps=40)
            A_PS = learner.banks[0].A.detach()[0, 0]
            overlap[strength] = float((A_PS[: self.RANK] @ A_PS[self.RANK : 2 * self.RANK].T).abs().sum())
        assert overlap[50.0] < 0.5 * overlap[0.0]


def test_the_plain_baseline_is_the_learner(make_learner: MakeLearner) -> None:
    """Bit for bit what the learner's own steps make of the same batches."""
    one, other = make_learner(preset="lora"), make_learner(preset="lora")
    learn(Baseline(one, seed=0), ONE, TWO, steps=2)
    for examples in (ONE, ONE, TWO, TWO):
        other.step(examples)
    assert same(snapshot(one), snapshot(other))
