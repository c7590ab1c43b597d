"""MaskedAdamW against torch's AdamW."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.learner.optimizer import Group, MaskedAdamW, load_state_dict, state_dict
from streamlearn.settings import LearnerSettings

# Shape suffixes: H heads, K experts a head, R rank, S slice, O out features.
H, K, R, S, O = 2, 3, 2, 4, 5  # noqa: E741 - as in the shape suffixes
LR = 1e-2
SETTINGS = LearnerSettings(lr=LR, weight_decay=0.1)


class Bank:
    """Parameters of one bank with a MaskedAdamW."""

    def __init__(self, *, masked: bool = True, settings: LearnerSettings = SETTINGS) -> None:
        draw = torch.Generator().manual_seed(1)
        self.A = Parameter(torch.randn(H, K, R, S, generator=draw))
        self.B = Parameter(torch.randn(H, K, R, O, generator=draw))
        self.routed_HK = torch.ones(H, K, dtype=torch.bool) if masked else None
        self.group = Group("bank", {"A": self.A, "B": self.B}, self.routed_HK)
        self.optimizer = MaskedAdamW([self.group], settings)

    def step(self, gradients: Sequence[Tensor], routed: Tensor | None = None, lr: float = 1e-2) -> None:
        for parameter, gradient in zip((self.A, self.B), gradients, strict=True):
            parameter.grad = gradient.clone()
        if routed is not None and self.routed_HK is not None:
            self.routed_HK.copy_(routed)
        self.optimizer.step(lr)
        self.optimizer.zero_grad()

    def expert(self, h: int, k: int) -> dict[str, Tensor]:
        """Copies of all tensors of one expert."""
        tensors = {"A": self.A, "B": self.B, "steps": self.group.counts(), **self.group.moments}
        return {name: tensor[h, k].detach().clone() for name, tensor in tensors.items()}


def gradients_for(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return torch.randn(H, K, R, S, generator=draw), torch.randn(H, K, R, O, generator=draw)


def routed_for(step: int) -> Tensor:
    return torch.rand(H, K, generator=torch.Generator().manual_seed(step)) < 0.5


def adamw(parameters: Sequence[Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters, lr=LR, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay
    )


@pytest.mark.parametrize("masked", [True, False])
def test_with_everything_routed_it_is_adamw(masked: bool) -> None:
    """Weights equal those of torch.optim.AdamW after every step, with a full mask and without a mask."""
    bank = Bank(masked=masked)
    twins = [Parameter(p.detach().clone()) for p in (bank.A, bank.B)]
    reference = adamw(twins)
    for step in range(20):
        lr = LR * (1 + step % 3)  # a rate that varies, as in a warm-up
        bank.step(gradients_for(step), lr=lr)
        for twin, gradient in zip(twins, gradients_for(step), strict=True):
            twin.grad = gradient
        reference.param_groups[0]["lr"] = lr
        reference.step()
        for result, expected in zip((bank.A, bank.B), twins, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_the_rate_of_each_expert_falls_with_its_own_updates() -> None:
    """As an AdamW of its own whose rate is constant, then falls with the square root, to a tenth at the lowest."""
    bank = Bank(settings=SETTINGS.model_copy(update={"lr_decay_updates": 2}))
    expected = [[Parameter(bank.expert(h, k)[name]) for name in "AB"] for h in range(H) for k in range(K)]
    references, ages = [adamw(each) for each in expected], [0] * (H * K)
    for step in range(450):
        routed = routed_for(step)
        bank.step(gradients_for(step), routed)
        for index, each in enumerate(expected):
            h, k = divmod(index, K)
            if not routed[h, k]:
                continue
            ages[index] += 1
            references[index].param_groups[0]["lr"] = LR * max(0.1, min(1.0, (2 / ages[index]) ** 0.5))
            for parameter, gradient in zip(each, gradients_for(step), strict=True):
                parameter.grad = gradient[h, k].clone()
            references[index].step()
    assert min(ages) > 200, "each reached the lower bound"
    for index, each in enumerate(expected):
        result = bank.expert(*divmod(index, K))
        for name, parameter in zip("AB", each, strict=True):
            torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("garbage", [1.0, torch.nan])
def test_an_unrouted_expert_keeps_every_bit(garbage: float) -> None:
    """Weights, moments and step count of an expert without tokens stay, for any gradient; others change."""
    bank = Bank()
    for step in range(3):  # so that there is momentum
        bank.step(gradients_for(step))
    kept, moved = bank.expert(1, 2), bank.expert(0, 1)
    routed = torch.ones(H, K, dtype=torch.bool)
    routed[1, 2] = False
    for step in range(3, 8):
        gradients = gradients_for(step)
        for gradient in gradients:
            gradient[1, 2] = garbage
        bank.step(gradients, routed)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in bank.expert(1, 2).items())
    assert not any(torch.equal(tensor, moved[name]) for name, tensor in bank.expert(0, 1).items())


def test_each_expert_is_an_adamw_of_the_steps_that_routed_to_it() -> None:
    """After any sequence of masks, an expert equals one trained by AdamW in its own steps only."""
    bank = Bank()
    twins = {
        (h, k): [Parameter(p[h, k].detach().clone()) for p in (bank.A, bank.B)] for h in range(H) for k in range(K)
    }
    references = {hk: adamw(parameters) for hk, parameters in twins.items()}
    counts = torch.zeros(H, K)
    for step in range(30):
        routed, gradients = routed_for(step), gradients_for(step)
        bank.step(gradients, routed)
        counts += routed
        for (h, k), reference in references.items():
            if routed[h, k]:
                for twin, gradient in zip(twins[h, k], gradients, strict=True):
                    twin.grad = gradient[h, k].clone()
                reference.step()
            for result, expected in zip((bank.A, bank.B), twins[h, k], strict=True):
                torch.testing.assert_close(result[h, k], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(bank.group.counts(), counts)
    assert len(set(counts.flatten().tolist())) > 1  # the experts were updated in different numbers of steps


def test_it_goes_on_from_its_state_bit_for_bit() -> None:
    """An optimizer with the weights and state of another one continues bit-equal."""
    first, second = Bank(), Bank()
    for step in range(5):
        first.step(gradients_for(step), routed_for(step))
    with torch.no_grad():
        second.A.copy_(first.A)
        second.B.copy_(first.B)
    moments = {name: tensor.clone() for name, tensor in state_dict(first.optimizer.groups).items()}
    load_state_dict(second.optimizer.groups, moments)
    for step in range(5, 10):
        for bank in (first, second):
            bank.step(gradients_for(step), routed_for(step))
    for h in range(H):
        for k in range(K):
            other = second.expert(h, k)
            assert all(torch.equal(tensor, other[name]) for name, tensor in first.expert(h, k).items())
