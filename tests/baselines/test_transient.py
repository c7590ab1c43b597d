"""The transient expert: its initialization, its output, and what it compares."""

from typing import Any, get_args

import pytest
import torch

from streamlearn.adapters.bottleneck import split_heads
from streamlearn.adapters.context import routing_context
from streamlearn.baselines.transient import Coordinates, TransientExpert
from streamlearn.learner.loss import pack, packed_loss
from tests.baselines.test_probe import WARM_UP, trained
from tests.doubles import random_examples
from tests.learners import MakeLearner


@pytest.mark.parametrize("coordinates", get_args(Coordinates))
def test_a_transient_expert_has_no_effect_before_it_is_trained(make_learner: MakeLearner, coordinates: Any) -> None:
    """Section 3.2.1: E(x) = 0 at s = 0, for any A."""
    learner = trained(make_learner)
    packed = pack(WARM_UP, learner.device)
    losses = []
    for parallel_adapter in (None, TransientExpert(learner.banks, coordinates, seed=1)):
        context = packed.context()
        context.parallel_adapter = parallel_adapter
        with torch.no_grad(), routing_context(learner.model, context):
            losses.append(packed_loss(learner.forward, packed).token_L)
    assert torch.equal(*losses)


def test_its_output_is_added_beside_the_frozen_linear(make_learner: MakeLearner) -> None:
    """Eq. (1): y plus alpha / r times the sum over heads and blocks of B A h, for the layer that calls it."""
    learner = make_learner(preset="mh-moe")
    expert = TransientExpert(learner.banks, "random", seed=1)
    bank = learner.banks[1]
    with torch.no_grad():
        expert.B[bank.name].normal_(generator=torch.Generator().manual_seed(2))
        x_TD = torch.randn(5, bank.layer.in_features, generator=torch.Generator().manual_seed(3))
        y_TO = torch.randn(5, bank.layer.out_features, generator=torch.Generator().manual_seed(4))
        found = expert(bank.info, x_TD, y_TO.clone())
        h_HTS = split_heads(x_TD, len(bank.A))
        added = torch.einsum("hts,hkrs,hkro->to", h_HTS, expert.A[bank.name], expert.B[bank.name])
    torch.testing.assert_close(found, y_TO + bank.info.scaling * added, rtol=1e-4, atol=1e-4)


def test_the_coordinates_of_the_bank_are_the_stable_experts_own(make_learner: MakeLearner) -> None:
    """`bank` starts each block from its stable expert's A; `random` starts from another."""
    learner = trained(make_learner)
    own = TransientExpert(learner.banks, "bank", seed=1)
    other = TransientExpert(learner.banks, "random", seed=1)
    for bank in learner.banks:
        assert torch.equal(own.A[bank.name], bank.A)
        assert not torch.equal(other.A[bank.name], bank.A)
        assert other.A[bank.name].abs().max() <= bank.A.shape[-1] ** -0.5


def test_it_compares_only_when_told_to(make_learner: MakeLearner) -> None:
    """Moments for CKA are accumulated in passes with `comparing`; without any the similarity is 0."""
    learner = trained(make_learner)
    expert = TransientExpert(learner.banks, "random", seed=1)
    with torch.no_grad():
        for B in expert.B.values():
            B.normal_(generator=torch.Generator().manual_seed(2))
    packed = pack(random_examples([9, 8], prompt_length=3), learner.device)
    similarities = []
    for comparing in (False, True):
        expert.comparing = comparing
        context = packed.context()
        context.parallel_adapter = expert
        with torch.no_grad(), routing_context(learner.model, context):
            packed_loss(learner.forward, packed)
        similarities.append(torch.cat([each.flatten() for each in expert.similarity().values()]))
    assert not similarities[0].any()
    assert similarities[1].any()
