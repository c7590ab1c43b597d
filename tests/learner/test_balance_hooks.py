"""The auxiliary losses of the presets, on a model."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamlearn.adapters.balance import load_balance, localized_balance
from streamlearn.adapters.context import AdaptedLayer, RoutingDecision
from streamlearn.adapters.tuner import SHARED
from streamlearn.learner.balance import LoadBalance, LocalizedBalance
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack
from tests.doubles import random_examples
from tests.learners import MakeLearner

EXAMPLES = random_examples([9, 7, 8], prompt_length=4)
LAYER = AdaptedLayer("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", False, "tokens", 2.0, SHARED)


def decision(tokens: int, seed: int) -> RoutingDecision:
    """A dense decision of one head and four experts."""
    native_HKT = torch.randn(1, 4, tokens, generator=torch.Generator().manual_seed(seed))
    return RoutingDecision(native_HKT, torch.ones(1, 4, tokens, dtype=torch.bool), native_HKT.softmax(1))


def test_losses_are_means_over_the_layers() -> None:
    """The strength times the mean of the layers' terms."""
    packed = pack(EXAMPLES, torch.device("cpu"))
    tokens = packed.input_ids.shape[1]
    layers = [decision(tokens, seed) for seed in range(3)]
    load = LoadBalance(0.5)
    localized = LocalizedBalance(0.5, packed, ["a", None, "b"], ("a", "b"))
    for each in layers:
        load(LAYER, each)
        localized(LAYER, each)
    types = torch.tensor([0, -1, 1])
    segment_ids_T = packed.sequences.segment_ids(packed.input_ids.shape[1])
    expected = [
        sum(load_balance(each.native_HKT, each.selected_HKT) for each in layers) / 3,
        sum(localized_balance(each.gate_HKT, segment_ids_T, types) for each in layers) / 3,
    ]
    torch.testing.assert_close([load.loss(), localized.loss()], [0.5 * each for each in expected])


def test_a_vision_layers_tokens_belong_to_the_records_with_images() -> None:
    """In the vision tower, tokens are assigned to samples by their images, not by the packed tokens."""
    packed = pack(EXAMPLES, torch.device("cpu"))
    packed = replace(packed, sequences=replace(packed.sequences, vision_units=(1, 0, 2)))
    hook, vision = LocalizedBalance(1.0, packed, ["a", "b", "b"], ("a", "b")), decision(6, seed=0)
    hook(replace(LAYER, is_vision=True), vision)
    expected = localized_balance(vision.gate_HKT, torch.tensor([0, 0, 2, 2, 2, 2]), torch.tensor([0, 1, 1]))
    torch.testing.assert_close(hook.loss(), expected)


def test_a_decision_about_some_tokens_balances_their_records() -> None:
    """Those of one regime: the term is that of a pass with these records only."""
    packed, some = pack(EXAMPLES, torch.device("cpu")), pack(EXAMPLES[1:], torch.device("cpu"))
    made = decision(some.input_ids.shape[1], seed=0)
    hook = LocalizedBalance(1.0, packed, ["a", "b", "a"], ("a", "b"))
    hook(LAYER, replace(made, tokens_T=torch.arange(9, 24), num=packed.input_ids.shape[1]))
    alone = LocalizedBalance(1.0, some, ["b", "a"], ("a", "b"))
    alone(LAYER, made)
    assert torch.equal(hook.loss(), alone.loss())


@pytest.mark.parametrize("slots", [[0, 0, 0], [0, 1, 0], [2, 1, 0]])
def test_a_batch_of_several_regimes_is_balanced(make_learner: MakeLearner, slots: list[int]) -> None:
    """Where each regime routes its own tokens, both losses change the update of each regime's routers."""
    typed = [replace(example, sample_type="downstream") for example in EXAMPLES]
    changes = {"balance_strength": 0.5, "localized_balance": 0.5}
    balanced = make_learner(preset="streamlearn-routed", changes=changes)
    plain = make_learner(preset="streamlearn-routed")
    for learner in (balanced, plain):
        assert learner.step(typed, slots).refusal is None
    for slot in set(slots):
        routers = [
            torch.cat([b.router.flatten() for b in each.banks if b.router is not None and b.adapter == f"regime{slot}"])
            for each in (balanced, plain)
        ]
        assert not torch.equal(*routers)


def router_gradients(learner: Learner) -> dict[str, Tensor]:
    """Gradients of the routers in one step, before clipping."""
    found: dict[str, Tensor] = {}
    apply = learner.optimizer.step

    def keep(lr: float) -> None:
        found.update({b.name: b.router.grad.clone() for b in learner.banks if b.router is not None})  # type: ignore[union-attr]
        apply(lr)

    learner.optimizer.step = keep  # type: ignore[method-assign]
    learner.step(EXAMPLES, [0] * len(EXAMPLES))
    return found


def test_balance_is_added_to_the_objective_and_not_to_the_reported_loss(make_learner: MakeLearner) -> None:
    """Gamma L_aux changes the routers' gradients; the reported loss is the task loss."""
    with_aux = make_learner(preset="cp-moe", changes={"balance_strength": 5.0}, max_grad_norm=1e9)
    without = make_learner(preset="cp-moe", changes={"balance_strength": 0.0}, max_grad_norm=1e9)
    ones, others = router_gradients(with_aux), router_gradients(without)
    assert any(not torch.equal(ones[name], others[name]) for name in ones)
    losses = [
        make_learner(preset="cp-moe", changes={"balance_strength": gamma}).step(EXAMPLES, [0, 0, 0]).loss
        for gamma in (0.0, 5.0)
    ]
    assert losses[0] == losses[1]


def test_localized_balance_needs_a_sample_type(make_learner: MakeLearner) -> None:
    """Typed samples change the update of `loramoe`; without types the update is the one without the constraint."""
    typed = [
        replace(example, sample_type=name)
        for example, name in zip(EXAMPLES, ("downstream", None, "world_knowledge"), strict=True)
    ]
    plain, constrained, off = (
        make_learner(preset="loramoe", changes={"localized_balance": beta}) for beta in (0.1, 0.1, 0.0)
    )
    plain.step(EXAMPLES)
    off.step(typed)
    constrained.step(typed)
    routers = [
        torch.cat([b.router.flatten() for b in each.banks if b.router is not None])
        for each in (plain, off, constrained)
    ]
    assert torch.equal(routers[0], routers[1])
    assert not torch.equal(routers[0], routers[2])
