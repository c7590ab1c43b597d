from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.learner.balance import Stage, Stages
from streamlearn.learner.optimizer import Group
from streamlearn.settings import LearnerSettings
from tests.doubles import random_examples
from tests.learners import MakeLearner

SETTINGS = LearnerSettings(ffn_steps=2, attention_steps=3)
EXPERTS = frozenset({"q_proj", "up_proj"})


def groups() -> list[Group]:
    made = []
    for seed, name in enumerate(("q_proj", "up_proj", "q_proj.router")):
        torch.manual_seed(seed)
        parameter = Parameter(torch.zeros(1, 2, 3, 4))
        parameter.grad = torch.randn(1, 2, 3, 4)
        parameter.grad[0, 1] = 0.0  # an expert without a token
        made.append(Group(name, {"A": parameter}, None))
    return made


def stages_after(steps: int) -> Stages:
    return Stages(SETTINGS, frozenset({"q_proj"}), steps)


def test_stages_follow_each_other_and_restart_at_a_shift() -> None:
    """T1 steps of MLP experts, then T2 - T1 of attention experts, then MLP experts."""
    stages = stages_after(0)
    found = []
    for _ in range(7):
        found.append(stages.stage)
        stages.apply([], EXPERTS)
    assert found == [Stage.FFN] * 2 + [Stage.ATTENTION] * 3 + [Stage.FINE_TUNING] * 2
    stages.restart()
    assert stages.stage is Stage.FFN


@pytest.mark.parametrize(("steps", "frozen"), [(0, "q_proj"), (2, "up_proj"), (5, "q_proj")])
def test_a_stage_trains_its_own_experts_and_every_router(steps: int, frozen: str) -> None:
    """Frozen experts have no gradient; routers keep theirs in every stage."""
    made = groups()
    stages_after(steps).apply(made, EXPERTS)
    assert [group.name for group in made if group.parameters["A"].grad is None] == [frozen]


def test_stage_one_normalises_each_expert() -> None:
    """Eq. 8: each expert's gradient is divided by its Frobenius norm; a gradient of zero stays zero."""
    _, made, router = groups()
    assert made.parameters["A"].grad is not None
    before = made.parameters["A"].grad.clone()
    stages_after(0).apply([made, router], EXPERTS)
    torch.testing.assert_close(made.parameters["A"].grad[0, 0], before[0, 0] / before[0, 0].norm())
    assert not made.parameters["A"].grad[0, 1].any()
    assert router.parameters["A"].grad is not None
    assert router.parameters["A"].grad.norm() != pytest.approx(1.0)


def test_later_stages_leave_gradients_as_they_are() -> None:
    """Eq. 9 and 10 use the plain gradient."""
    _, made, _ = groups()
    assert made.parameters["A"].grad is not None
    before = made.parameters["A"].grad.clone()
    stages_after(5).apply([made], EXPERTS)
    assert torch.equal(made.parameters["A"].grad, before)


def test_the_preset_trains_attention_in_stage_two_only(make_learner: MakeLearner) -> None:
    """`mot` on a model: the experts that change in a step of each stage."""
    learner = make_learner(preset="mot", ffn_steps=1, attention_steps=1)
    assert learner.stages is not None
    moved = []
    for step in range(3):
        before = {bank.name: bank.B.detach().clone() for bank in learner.banks}
        learner.step(random_examples([8, 6, 9, 7], prompt_length=3, seed=step))
        different = {
            bank.name.rpartition(".")[2] for bank in learner.banks if not torch.equal(bank.B, before[bank.name])
        }
        moved.append(different)
    assert moved == [{"gate_proj", "up_proj", "down_proj"}, {"q_proj", "k_proj", "v_proj", "o_proj"}, moved[0]]


@pytest.mark.parametrize("accumulation", ["sum", "per_regime"])
def test_importance_is_of_the_gradients_before_a_stage_normalises_them(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch, accumulation: str
) -> None:
    """Stage I changes the update and not what importance is computed from; experts that it freezes have none."""
    changes = {"anchor_strength": 1.0, "accumulation": accumulation}
    learner = make_learner(preset="mot", changes=changes, ffn_steps=1, attention_steps=1, max_grad_norm=1e-3)
    assert learner.path is not None
    assert learner.stages is not None
    plain: dict[str, Tensor] = {}
    apply, after = learner.stages.apply, learner.path.after

    def keep(given: Sequence[Group], experts: frozenset[str]) -> None:
        plain.update({g.name: g.parameters["B"].grad.clone() for g in given if g.name in experts})  # type: ignore[union-attr]
        apply(given, experts)

    found: dict[str, Tensor | None] = {}

    def receive(gradients: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
        found.update(zip([bank.name for bank in learner.banks], gradients[1::2], strict=True))
        after(gradients, scale=scale)

    monkeypatch.setattr(learner.stages, "apply", keep)
    monkeypatch.setattr(learner.path, "after", receive)
    for frozen in (True, False, True):  # the attention experts
        learner.step(random_examples([8, 6, 9, 7], prompt_length=3))
        for name, gradient in found.items():
            if (name in learner.stages.attention) == frozen:
                assert gradient is None
            else:
                assert gradient is not None
                assert torch.equal(gradient, plain[name])
