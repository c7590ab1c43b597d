"""AdamW that updates routed experts only.

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    theta <- theta (1 - lr w) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)           (1)

Loshchilov and Hutter 2019, algorithm 2. Plain AdamW moves an expert that got no token too, through momentum and weight
decay, which is a form of forgetting. Here (1) is applied to an expert only in steps in which at least one token was
routed to it, and t counts those steps; otherwise its weights, its moments and its t stay bit-equal. Routers, and
anything else that is not an expert, are updated in every step. lr falls with t where it is set to:

    lr <- lr * max(1 / 10, min(1, sqrt(T / t)))        T: learner.lr_decay_updates            (2)

An expert of one regime has its own t, so an old regime is refined while a new one learns quickly, and the lower bound
lets an old one follow when its targets change.

    g <- g + 2 lambda Omega (theta - anchor)                                                  (3)

adds the gradient of CP-MoE's L_reg (arXiv 2605.20247, eq. 14 and 15). It is added here so that `grad` is without it:
the gradient of the task loss and, where the objective has one, of the balance loss, which reaches the experts of the
layers below a router.
"""
# Shape suffixes: H heads, K experts a head.

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.settings import LearnerSettings

MIN_DECAY = 0.1


class Hold(NamedTuple):
    """A penalty on one parameter: strength * sum importance * (theta - anchor)^2."""

    importance: Tensor
    anchor: Tensor
    strength: float


@dataclass
class Group:
    """Parameters of one bank that are updated together, and the experts to update."""

    name: str
    parameters: Mapping[str, Parameter]
    """Each with leading dimensions (H, K)."""
    load_HK: Tensor | None
    """Tokens routed to each expert in this step, counted by the layer; None: update all experts in every step."""
    lr_scale: float = 1.0
    """Factor on the optimizer's learning rate; 0 freezes the group."""
    holds: dict[str, Hold] = field(default_factory=dict)
    """Eq. (3) by parameter; a parameter that is not in it has no penalty."""
    moments: dict[str, Tensor] = field(default_factory=dict)
    steps_HK: Tensor | None = None
    """t of each expert; None where all are updated in every step."""
    steps: int = 0
    """t where all are updated in every step."""

    def __post_init__(self) -> None:
        for name, parameter in self.parameters.items():
            self.moments[f"{name}.exp_avg"] = torch.zeros_like(parameter)
            self.moments[f"{name}.exp_avg_sq"] = torch.zeros_like(parameter)
        if self.load_HK is not None:
            self.steps_HK = torch.zeros_like(self.load_HK, dtype=torch.float32)

    @torch.no_grad()
    def restart(self) -> None:
        """Go back to t = 0, without moments."""
        self.steps = 0
        for tensor in (*self.moments.values(), *([] if self.steps_HK is None else [self.steps_HK])):
            tensor.zero_()

    def counts(self) -> Tensor:
        """T as snapshots have it, with two dimensions; not to be changed."""
        return torch.tensor([[float(self.steps)]]) if self.steps_HK is None else self.steps_HK

    def set_counts(self, counts: Tensor) -> None:
        """Restore what `counts` returned."""
        if self.steps_HK is None:
            self.steps = int(counts)
        else:
            self.steps_HK.copy_(counts)


class MaskedAdamW:
    """Eq. (1) for each group, masked by the experts that were routed to."""

    def __init__(self, groups: Iterable[Group], settings: LearnerSettings) -> None:
        self.groups: list[Group] = list(groups)
        self.active: Sequence[Group] = self.groups
        """The groups that the gradients of the step in progress can reach. The others cost it nothing, however many."""
        self._settings = settings

    def parameters(self) -> list[Parameter]:
        """List all parameters in a fixed order."""
        return parameters_of(self.groups)

    def zero_grad(self) -> None:
        """Set the gradients of the active groups to None; the others have none."""
        for parameter in parameters_of(self.active):
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply eq. (1) once to every expert that was routed to; parameters without a gradient stay."""
        live = [
            group
            for group in self.active
            if group.lr_scale != 0 and any(parameter.grad is not None for parameter in group.parameters.values())
        ]
        self._step_whole([group for group in live if group.load_HK is None], lr)
        self._step_masked([group for group in live if group.load_HK is not None], lr)

    def _step_whole(self, groups: Sequence[Group], lr: float) -> None:
        """Apply eq. (1) to groups that are updated as a whole: t is known without asking the device."""
        if not groups:
            return
        beta1, beta2 = self._settings.betas
        kept, sizes, corrections = [], [], []
        for group in groups:
            group.steps += 1
            rate = lr * group.lr_scale
            if self._settings.lr_decay_updates:
                rate *= max(MIN_DECAY, min(1.0, math.sqrt(self._settings.lr_decay_updates / group.steps)))
            count = sum(parameter.grad is not None for parameter in group.parameters.values())
            kept += [1 - rate * self._settings.weight_decay] * count
            sizes += [-rate / (1 - beta1**group.steps)] * count
            corrections += [1 - beta2**group.steps] * count
        update = _Update(groups)
        torch._foreach_lerp_(update.exp_avg, update.grad, 1 - beta1)
        torch._foreach_mul_(update.exp_avg_sq, beta2)
        torch._foreach_addcmul_(update.exp_avg_sq, update.grad, update.grad, value=1 - beta2)
        denominator = torch._foreach_div(update.exp_avg_sq, corrections)
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, self._settings.eps)
        torch._foreach_mul_(update.theta, kept)
        torch._foreach_addcdiv_(update.theta, update.exp_avg, denominator, sizes)

    def _step_masked(self, groups: Sequence[Group], lr: float) -> None:
        """Apply eq. (1) to the experts that were routed to.

        The mask stays on the device. For the others it makes every factor 1 and every term 0, which keeps all values.
        """
        if not groups:
            return
        settings = self._settings
        beta1, beta2 = settings.betas
        routed_NHK = torch.stack([group.load_HK for group in groups if group.load_HK is not None]) > 0
        counts = [group.counts() for group in groups]
        torch._foreach_add_(counts, list(routed_NHK.float().unbind()))
        steps_NHK = torch.stack(counts)
        scales = torch.tensor([lr * group.lr_scale for group in groups], dtype=torch.float32)
        rate_NHK = scales.to(steps_NHK.device, non_blocking=True)[:, None, None].expand_as(steps_NHK)
        if settings.lr_decay_updates:
            rate_NHK = rate_NHK * (settings.lr_decay_updates / steps_NHK).sqrt_().clamp_(MIN_DECAY, 1.0)
        update = _Update(groups)

        def of_parameters(value_NHK: Tensor, otherwise: float) -> list[Tensor]:
            """A factor for each parameter, (H, K, 1, ...), with another value where no token was routed to."""
            values = torch.where(routed_NHK, value_NHK, otherwise).unbind()
            return [values[n].view(*values[n].shape, *[1] * inner) for n, inner in update.groups]

        ones_NHK = torch.ones_like(steps_NHK)
        masks = [routed_NHK[n].view(*routed_NHK.shape[1:], *[1] * inner) for n, inner in update.groups]
        grad = [torch.where(mask, each, 0.0) for mask, each in zip(masks, update.grad, strict=True)]  # also of a NaN
        torch._foreach_lerp_(update.exp_avg, grad, of_parameters((1 - beta1) * ones_NHK, 0.0))
        torch._foreach_mul_(update.exp_avg_sq, of_parameters(beta2 * ones_NHK, 1.0))
        torch._foreach_addcmul_(update.exp_avg_sq, grad, grad, value=1 - beta2)
        denominator = torch._foreach_div(update.exp_avg_sq, of_parameters(1 - beta2**steps_NHK, 1.0))
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, settings.eps)
        step = torch._foreach_div(update.exp_avg, denominator)
        torch._foreach_mul_(step, of_parameters(rate_NHK / (1 - beta1**steps_NHK), 0.0))
        torch._foreach_mul_(update.theta, of_parameters(1 - rate_NHK * settings.weight_decay, 1.0))
        torch._foreach_sub_(update.theta, step)


class _Update:
    """The tensors of eq. (1) of some groups, for each parameter that has a gradient."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.theta: list[Tensor] = []
        self.exp_avg: list[Tensor] = []
        self.exp_avg_sq: list[Tensor] = []
        self.grad: list[Tensor] = []
        """With eq. (3)."""
        self.groups: list[tuple[int, int]] = []
        """Index of the parameter's group, and the number of its dimensions behind (H, K)."""
        for index, group in enumerate(groups):
            for name, parameter in group.parameters.items():
                if parameter.grad is None:
                    continue
                self.theta.append(parameter)
                self.exp_avg.append(group.moments[f"{name}.exp_avg"])
                self.exp_avg_sq.append(group.moments[f"{name}.exp_avg_sq"])
                self.grad.append(_held(parameter, parameter.grad, group.holds.get(name)))
                self.groups.append((index, parameter.ndim - 2))


def _held(parameter: Parameter, grad: Tensor, hold: Hold | None) -> Tensor:
    """The gradient with eq. (3)."""
    if hold is None:
        return grad
    return torch.addcmul(grad, hold.importance, parameter - hold.anchor, value=2 * hold.strength)


def parameters_of(groups: Iterable[Group]) -> list[Parameter]:
    """List the parameters of some groups, in their order."""
    return [parameter for group in groups for parameter in group.parameters.values()]


def state_dict(groups: Iterable[Group]) -> dict[str, Tensor]:
    """Return moments and step counts by name, for a snapshot; the tensors are not copied."""
    tensors: dict[str, Tensor] = {}
    for group in groups:
        tensors |= {f"{group.name}.{name}": moment for name, moment in group.moments.items()}
        tensors[f"{group.name}.steps"] = group.counts()
    return tensors


@torch.no_grad()
def load_state_dict(groups: Iterable[Group], tensors: Mapping[str, Tensor]) -> None:
    """Restore what `state_dict` returned, in place.

    Raises:
        AssertionError: the names are not those of these groups.
    """
    groups = list(groups)
    assert state_dict(groups).keys() == tensors.keys(), (
        "the snapshot's manifest was checked against this adapter before"
    )
    for group in groups:
        group.set_counts(tensors[f"{group.name}.steps"])
        for name, moment in group.moments.items():
            moment.copy_(tensors[f"{group.name}.{name}"])
