"""A probe on a model: its report, and that the learner does not change."""

from typing import Any

import pytest
import torch
from torch import Tensor

from streamlearn.baselines.transient import ProbeReport, probe
from streamlearn.learner.learner import Learner
from streamlearn.settings import ConsolidateSettings, ProbeSettings
from tests.doubles import random_examples
from tests.learners import MakeLearner, make_learner, snapshot, tiny

__all__ = ["make_learner", "tiny"]  # fixtures

WARM_UP = random_examples([12, 9, 14, 11, 10, 13], prompt_length=4, seed=5)
SETTINGS = ProbeSettings(warmup_tokens=200, similarity_tokens=40)


def trained(make_learner: MakeLearner, preset: str = "mh-moe", **changes: Any) -> Learner:
    learner = make_learner(preset=preset, changes=changes)
    for seed in range(4):
        learner.step(random_examples([9, 8, 7], prompt_length=3, seed=seed), [0, 0, 0])
    return learner


def probed(learner: Learner, seed: int = 3, **consolidate: Any) -> ProbeReport:
    return probe(learner, WARM_UP, SETTINGS, ConsolidateSettings(**consolidate), seed=seed)


@pytest.mark.parametrize("importance", ["path", "transient"])
def test_a_probe_leaves_the_learner_as_it_was(make_learner: MakeLearner, importance: str) -> None:
    """Weights, optimizer, biases, counts, loads and random state are bit-equal; the same parameters are trainable."""
    learner = trained(make_learner)
    before, rng = snapshot(learner), torch.get_rng_state()
    loads = [bank.load_HK.clone() for bank in learner.banks if bank.load_HK is not None]
    probed(learner, importance=importance)
    after = snapshot(learner)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.requires_grad and p.grad is None for p in learner.optimizer.parameters())
    assert all(torch.equal(a, b.load_HK) for a, b in zip(loads, learner.banks, strict=True) if b.load_HK is not None)


def test_a_probe_is_a_function_of_its_arguments(make_learner: MakeLearner) -> None:
    """The same seed gives the same report, so a probe can be repeated after a restart; another seed does not."""
    learner = trained(make_learner)
    one, two = (probed(learner, importance="transient", coordinates="random") for _ in range(2))
    other = probed(learner, seed=4, importance="transient", coordinates="random")

    def flat(values: Any) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in values.values()])

    assert torch.equal(flat(one.similarity), flat(two.similarity))
    assert torch.equal(flat(one.importance), flat(two.importance))
    assert not torch.equal(flat(one.importance), flat(other.importance))


def test_the_transient_expert_learns(make_learner: MakeLearner) -> None:
    """Its loss on the warm-up falls when the warm-up is repeated."""
    learner = trained(make_learner)
    report = probe(learner, WARM_UP * 4, SETTINGS, ConsolidateSettings(), seed=0)
    assert report.losses[-1] < report.losses[0] - 0.1
    assert report.tokens == 4 * sum(map(len, WARM_UP))


def test_fresh_experts_have_no_similarity_and_trained_ones_have_some(make_learner: MakeLearner) -> None:
    """CKA is 0 for B = 0 and in (0, 1] for trained experts."""
    learner = trained(make_learner)
    for bank in learner.banks:
        bank.B.data[1, 2] = 0.0
    report = probed(learner)
    for bank in learner.banks:
        fresh_HK = ~bank.B.detach().flatten(2).any(2)
        assert fresh_HK[1, 2]
        assert (report.similarity[bank.name][fresh_HK] == 0).all()
        assert (report.similarity[bank.name][~fresh_HK] > 0).all()
        assert (report.similarity[bank.name] <= 1).all()


@pytest.mark.parametrize("accumulation", ["sum", "per_regime"])
def test_importance_is_optional(make_learner: MakeLearner, accumulation: str) -> None:
    """Computed for `importance: transient` only; never negative, in the shapes of the anchors' importance."""
    learner = trained(make_learner, accumulation=accumulation, anchor_strength=1.0)
    assert probed(learner, importance="path").importance == {}
    found = probed(learner, importance="transient").importance
    for bank in learner.banks:
        for name in (f"{bank.name}.A", f"{bank.name}.B"):
            assert found[name].shape == learner.anchors.importance()[name].shape
    assert all((omega >= 0).all() for omega in found.values())
    assert any(omega.any() for omega in found.values())
