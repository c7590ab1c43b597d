import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.learner.importance import Anchors
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.settings import LearnerSettings

H, K, R, S, O = 2, 3, 2, 4, 5  # noqa: E741
STRENGTH = 0.7


def group(seed: int = 0) -> Group:
    draw = torch.Generator().manual_seed(seed)
    parameters = {
        "A": Parameter(torch.randn(H, K, R, S, generator=draw)),
        "B": Parameter(torch.randn(H, K, R, O, generator=draw)),
    }
    return Group("bank", parameters, torch.ones(H, K, dtype=torch.long))


def importance(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"bank.A": torch.rand(H, K, R, S, generator=draw), "bank.B": torch.rand(H, K, R, O, generator=draw)}


def moved(made: Group, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=draw))


def loop_over_eq_14(made: Group, omega: dict[str, Tensor], old: dict[str, Tensor]) -> float:
    """L_reg as a loop over experts and elements."""
    total = 0.0
    for name, parameter in made.parameters.items():
        for h in range(H):
            for i in range(K):
                for r in range(R):
                    for s in range(parameter.shape[-1]):
                        drift = float(parameter.detach()[h, i, r, s] - old[name][h, i, r, s])
                        total += float(omega[f"bank.{name}"][h, i, r, s]) * drift**2
    return total


def hold(anchors: Anchors, omega: dict[str, Tensor]) -> None:
    """Write importance, as `consolidate` does, and hold it at the current weights."""
    for name, held in anchors.importance().items():
        held.copy_(omega[name])
    anchors.move()
    anchors.hold()


def test_the_penalty_is_eq_14() -> None:
    """The anchors are the weights when they were last moved, and 0 is the penalty there."""
    made = group()
    anchors = Anchors([made], STRENGTH)
    hold(anchors, importance(1))
    moved(made, 2)
    anchors.move()
    old = {name: parameter.detach().clone() for name, parameter in made.parameters.items()}
    assert anchors.penalty() == 0.0
    moved(made, 4)
    assert anchors.penalty() == pytest.approx(STRENGTH * loop_over_eq_14(made, importance(1), old), rel=1e-5)


def test_the_optimizer_adds_the_penaltys_own_gradient() -> None:
    """A step equals one with autograd's gradient of task plus lambda L_reg; `grad` is the gradient of the task only."""
    settings = LearnerSettings(lr=1e-2)
    anchored, plain = group(), group()
    anchors = Anchors([anchored], STRENGTH)
    hold(anchors, importance(1))
    for made in (anchored, plain):
        moved(made, 2)
    old = group()
    task = [torch.randn_like(p) for p in anchored.parameters.values()]
    for made in (anchored, plain):
        for parameter, gradient in zip(made.parameters.values(), task, strict=True):
            parameter.grad = gradient.clone()
    terms = [
        (importance(1)[f"bank.{name}"] * (p - old.parameters[name].detach()).square()).sum()
        for name, p in plain.parameters.items()
    ]
    (STRENGTH * sum(terms)).backward()  # type: ignore[union-attr]
    MaskedAdamW([anchored], settings).step(1e-2)
    MaskedAdamW([plain], settings).step(1e-2)
    for name in anchored.parameters:
        torch.testing.assert_close(anchored.parameters[name], plain.parameters[name])
    for parameter, gradient in zip(anchored.parameters.values(), task, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def test_importance_over_the_rank_holds_every_weight_of_it() -> None:
    """One value for all of the rank has the penalty, and the step, of that value repeated."""
    one, repeated = group(), group()
    omega = {name: value.mean(2, keepdim=True) for name, value in importance(1).items()}
    narrow, wide = Anchors([one], STRENGTH, over_rank=True), Anchors([repeated], STRENGTH)
    hold(narrow, omega)
    hold(wide, {name: value.expand(H, K, R, -1) for name, value in omega.items()})
    for made in (one, repeated):
        moved(made, 2)
        for parameter in made.parameters.values():
            parameter.grad = torch.ones_like(parameter)
    assert narrow.penalty() == pytest.approx(wide.penalty())
    made_load = torch.tensor([[1, 0, 1], [0, 0, 1]])  # some experts only: their importance is selected too
    for made in (one, repeated):
        made.load_HK = made_load
        MaskedAdamW([made], LearnerSettings(lr=1e-2)).step(1e-2)
    for name in one.parameters:
        assert torch.equal(one.parameters[name], repeated.parameters[name])


def test_without_importance_nothing_is_held() -> None:
    """The penalty goes when the last importance does, and the optimizer computes none."""
    made = group()
    anchors = Anchors([made], STRENGTH)
    hold(anchors, importance(1))
    assert set(made.holds) == {"A", "B"}
    hold(anchors, {name: torch.zeros_like(value) for name, value in importance(1).items()})
    assert made.holds == {}


def test_it_goes_on_from_a_saved_state() -> None:
    """Importance, anchors and the optimizer's penalties are restored."""
    first, second = group(), group()
    anchors, restored = Anchors([first], STRENGTH), Anchors([second], STRENGTH)
    hold(anchors, importance(1))
    restored.load_state_dict({name: tensor.clone() for name, tensor in anchors.state_dict().items()})
    moved(first, 2)
    moved(second, 2)
    assert restored.penalty() == anchors.penalty() > 0
    assert set(second.holds) == {"A", "B"}


def test_without_a_strength_nothing_is_kept() -> None:
    """Lambda 0 uses no memory and adds no penalty."""
    made = group()
    anchors = Anchors([made], 0.0)
    anchors.move()
    anchors.hold()
    assert anchors.state_dict() == {}
    assert made.holds == {}
