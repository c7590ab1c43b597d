"""Replay and penalties: each does what its equation says."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.learn.baselines import (
    Baseline,
    DarkReplay,
    Ewc,
    OnlineEwc,
    OracleRegimes,
    Replay,
    Reservoir,
    fisher,
    normalized,
    project,
)
from streamlearn.adapters.context import routing_context
from streamlearn.learner.learner import Learner, Step
from streamlearn.learner.loss import pack, packed_logits, packed_loss
from streamlearn.settings import Settings
from streamlearn.shift.detector import Shift
from streamlearn.stream.record import Example
from tests.benchmarks.learn.kit import ONE, TWO, context_of, learn
from tests.learners import MakeLearner, same, snapshot

NEARLY = 1e-4


def test_the_plain_baseline_is_the_learner(make_learner: MakeLearner) -> None:
    """Its weights are bit-equal to those of the learner's own steps on the same batches."""
    one, other = make_learner(preset="lora"), make_learner(preset="lora")
    learn(Baseline(context_of(one)), ONE, TWO, steps=2)
    for examples in (ONE, ONE, TWO, TWO):
        other.step(examples)
    assert same(snapshot(one), snapshot(other))


def test_each_segment_enters_its_regime(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A regime that returns is known; a new one is probed with the first records up to the warm-up tokens."""
    entered: list[tuple[Shift, int]] = []
    adaptation: Any = SimpleNamespace(enter=lambda shift, examples: entered.append((shift, len(examples))))
    learner = make_learner(preset="streamlearn")
    settings = Settings(source={"jsonl": {"path": "s"}}, probe={"warmup_tokens": len(ONE[0]) + 1})
    oracle = OracleRegimes(
        context_of(learner, adaptation=adaptation, settings=settings, slots=[[0] * 3, [1] * 3, [0] * 3])
    )
    slots: list[list[int]] = []
    monkeypatch.setattr(learner, "step", lambda examples, chosen: slots.append(chosen))
    for segment, examples in enumerate((ONE, TWO, ONE)):
        oracle.begin(segment, examples)
        oracle.step(examples)
    assert [(s.slot, s.regime, s.previous, s.known) for s, _ in entered] == [
        (0, 1, None, False),
        (1, 2, 1, False),
        (0, 1, 2, True),
    ]
    assert [number for _, number in entered] == [2, 2, 2]
    assert slots == [[0] * 3, [1] * 3, [0] * 3]


def test_records_of_a_mixture_are_trained_in_their_own_regimes(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A regime is entered once, and probed with its own records."""
    entered: list[tuple[Shift, list[Example]]] = []
    adaptation: Any = SimpleNamespace(enter=lambda shift, examples: entered.append((shift, examples)))
    learner = make_learner(preset="lora")
    settings = Settings(source={"jsonl": {"path": "s"}}, probe={"warmup_tokens": 100})
    regimes = [[1, 0, 1], [0, 1, 2]]
    oracle = OracleRegimes(context_of(learner, adaptation=adaptation, settings=settings, slots=regimes))
    slots: list[list[int]] = []
    monkeypatch.setattr(learner, "step", lambda examples, chosen: slots.append(chosen))
    for segment, examples in enumerate((ONE, TWO)):
        oracle.begin(segment, examples)
        oracle.step(examples[:2])
        oracle.step(examples[2:])
    assert [(shift.slot, shift.known) for shift, _ in entered] == [(1, False), (0, False), (2, False)]
    assert [examples for _, examples in entered] == [[ONE[0], ONE[2]], [ONE[1]], [TWO[2]]]
    assert slots == [[1, 0], [1], [0, 1], [2]]


def test_the_sample_is_uniform() -> None:
    """Every item is kept with the same probability, early or late."""
    kept: Counter[int] = Counter()
    for seed in range(400):
        sample: Reservoir[int] = Reservoir(5, seed=seed)
        for item in range(20):
            sample.offer(item)
        assert len(set(sample.items)) == 5
        kept.update(sample.items)
    assert all(60 < kept[item] < 140 for item in range(20))  # 100 expected, sd 8.7


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
    replay = Replay(context_of(learner))
    steps = [replay.step(ONE), replay.step(TWO)]
    assert seen == [3, 6]
    assert [len(step.record_losses) for step in steps] == [3, 3]
    assert {id(example) for example in replay.memory.items} == {id(example) for example in (*ONE, *TWO)}


def logits_of(learner: Learner, example: Example) -> torch.Tensor:
    """The logits of the answer tokens under the current weights."""
    packed = pack([example], learner.device)
    with torch.no_grad(), routing_context(learner.model, packed.context()):
        return packed_logits(learner.forward, packed)


def test_it_remembers_the_largest_logits_from_before_the_update(make_learner: MakeLearner) -> None:
    """Of every answer token, with their vocabulary ids."""
    learner = make_learner(preset="lora")
    before = {id(example): logits_of(learner, example) for example in ONE}
    dark = DarkReplay(context_of(learner), top=4)
    dark.step(ONE)
    assert dark.memory.items
    for remembered in dark.memory.items:
        expected = before[id(remembered.example)].topk(4)
        torch.testing.assert_close(remembered.logits_LK, expected.values)
        assert remembered.tokens_LK.tolist() == expected.indices.tolist()


def test_fisher_is_the_mean_of_squared_gradients_of_single_records(make_learner: MakeLearner) -> None:
    """It is not the square of their mean; the log-likelihood is a sum over the answer tokens."""
    learner = make_learner(preset="lora")
    learn(Baseline(context_of(learner)), ONE, steps=3)
    parameters = learner.optimizer.parameters()
    expected = [torch.zeros_like(p) for p in parameters]
    for example in ONE:
        packed = pack([example], learner.device)
        with routing_context(learner.model, packed.context()):
            torch.autograd.backward(packed_loss(learner.forward, packed).mean * len(packed.target_L))
        for square, parameter in zip(expected, parameters, strict=True):
            assert parameter.grad is not None
            square.add_(parameter.grad**2 / len(ONE))
        learner.optimizer.zero_grad()
    found = fisher(learner, ONE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert all(parameter.grad is None for parameter in parameters)


def test_information_is_normalized_over_all_parameters() -> None:
    """The mean is 1 whatever the scale; ratios stay; nothing stays nothing."""
    raw = [torch.tensor([1.0, 2.0]), torch.tensor([[9.0]])]
    for scale in (1.0, 1e6):
        one, other = normalized([scale * part for part in raw])
        torch.testing.assert_close(one, torch.tensor([0.25, 0.5]))
        torch.testing.assert_close(other, torch.tensor([[2.25]]))
    assert normalized([torch.zeros(2)])[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", [Ewc, OnlineEwc])
def test_the_penaltys_gradient_is_that_of_the_equation(make_learner: MakeLearner, kind: Any) -> None:
    """EWC sums the tasks' quadratics, eq. (1); online EWC lets the older fade and pulls to the newest, eq. (2)."""
    learner = make_learner(preset="lora")
    ewc = kind(context_of(learner), strength=6.0)
    tasks = []
    for number, examples in enumerate((ONE, TWO)):
        learn(Baseline(context_of(learner)), examples, steps=4)
        information = normalized(fisher(learner, examples))
        tasks.append((information, [p.detach().clone() for p in learner.optimizer.parameters()]))
        ewc.end(number, examples)
    learn(Baseline(context_of(learner)), ONE, steps=2)
    (first, at_first), (second, at_second) = tasks
    holds = [hold for group in learner.optimizer.groups for hold in group.holds.values()]
    for place, (theta, hold) in enumerate(zip(learner.optimizer.parameters(), holds, strict=True)):
        if kind is Ewc:
            expected = first[place] * (theta - at_first[place]) + second[place] * (theta - at_second[place])
        else:
            expected = (0.95 * first[place] + second[place]) * (theta - at_second[place])
        held = 2 * hold.strength * hold.importance * (theta - hold.anchor)
        torch.testing.assert_close(held, 6.0 * expected, rtol=1e-3, atol=1e-4)


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
