"""Which experts the tokens of each regime were given."""

import pytest
import torch
from torch import Tensor

from streamlearn.learner.learner import Learner
from tests.doubles import random_examples
from tests.learners import MakeLearner, make_learner, tiny

__all__ = ["make_learner", "tiny"]  # fixtures

BATCH = random_examples([12, 9], prompt_length=4, seed=5)


def expected(learner: Learner, adapter: str) -> list[float]:
    """Shares of the newest update, from what the routers counted."""
    loads = [bank.load_HK for bank in learner.banks if bank.adapter == adapter and bank.load_HK is not None]
    return means(torch.stack(loads))


def means(tokens_LHK: Tensor) -> list[float]:
    busiest_first = tokens_LHK.sort(2, descending=True).values
    return (busiest_first / busiest_first.sum(2, keepdim=True)).mean(0).flatten().tolist()


def shares(learner: Learner, slot: int) -> list[float] | None:
    read = learner.usage.read(slot, () if learner.per_regime else learner.banks)
    return None if read is None else [share for head in read[0] for share in head]


def test_shared_experts_are_counted_by_the_regime_of_the_batch(make_learner: MakeLearner) -> None:
    learner = make_learner(preset="mh-cp-moe")
    for bank in learner.banks:
        assert bank.bias_HKN is not None
        bank.bias_HKN[:, 1, 1] = 8.0  # regime 1 chooses its second expert
    learner.step(BATCH, [0, 0])
    assert shares(learner, 0) == pytest.approx(expected(learner, "default"), abs=1e-4)
    learner.step(BATCH, [1, 1])
    read = learner.usage.read(1, learner.banks)
    assert read is not None
    table, bias = read
    assert bias is not None
    assert all(row[0] == pytest.approx(1.0) and sum(row) == pytest.approx(1.0, abs=1e-3) for row in table)
    assert all(row[:2] == (8.0, 0.0) for row in bias)


def test_a_batch_of_several_regimes_is_counted_where_each_has_its_own(make_learner: MakeLearner) -> None:
    """Experts that regimes share count both together, so neither gets it."""
    shared, own = make_learner(preset="mh-cp-moe"), make_learner(preset="streamlearn-routed")
    for learner in (shared, own):
        learner.step(BATCH, [0, 1])
    assert (shares(shared, 0), shares(shared, 1)) == (None, None)
    assert shares(own, 0) == pytest.approx(expected(own, "regime0"), abs=1e-4)
    assert shares(own, 1) == pytest.approx(expected(own, "regime1"), abs=1e-4)


def test_updates_add_up_until_the_regime_is_dropped(make_learner: MakeLearner) -> None:
    learner = make_learner(preset="mh-cp-moe")
    totals = []
    for seed in (1, 2):
        learner.step(random_examples([9], prompt_length=3, seed=seed), [2])
        totals.append(torch.stack([bank.load_HK.clone() for bank in learner.banks if bank.load_HK is not None]))
        shares(learner, 2)  # what was read before does not stay
    assert shares(learner, 2) == pytest.approx(means(torch.stack(totals).sum(0)), abs=1e-4)
    learner.usage.drop(2)
    assert shares(learner, 2) is None


def test_the_effective_number_of_regimes_tells_specialists_from_generalists(make_learner: MakeLearner) -> None:
    """MH-MoE's Lemma 2.1: between 1, each regime with experts of its own, and the number of regimes."""
    alike, apart = make_learner(preset="mh-cp-moe"), make_learner(preset="mh-cp-moe")
    assert alike.usage.effective_regimes() is None
    for bank in apart.banks:
        assert bank.bias_HKN is not None
        bank.bias_HKN[:, 0, 0] = bank.bias_HKN[:, 1, 1] = 9.0
    for learner in (alike, apart):
        for slot in (0, 1):
            learner.activate([slot])
            learner.gradients(BATCH, [slot, slot], 1, lambda _: None)
            learner.usage.add(learner.active_banks, [slot, slot])
    assert alike.usage.effective_regimes() == pytest.approx(2.0)  # the same records, the same weights
    assert apart.usage.effective_regimes() == pytest.approx(1.0)


def test_a_preset_without_a_router_counts_nothing(make_learner: MakeLearner) -> None:
    learner = make_learner(preset="streamlearn")
    learner.step(BATCH, [0, 0])
    assert shares(learner, 0) is None
