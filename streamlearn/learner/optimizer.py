"""AdamW that leaves unrouted experts alone.

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    theta <- theta (1 - lr w) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)           (1)

Loshchilov and Hutter 2019, algorithm 2. Plain AdamW moves an expert that got no token all the same, through momentum
and weight decay, and so forgets what it knew. Here (1) is applied to an expert only in steps in which at least one
token was routed to it, and t counts those steps; otherwise its weights, its moments and its t stay bit-equal. Routers
and anything else that is not an expert see every step.

    g <- g + 2 lambda Omega (theta - anchor)                                                  (2)

is the gradient of CP-MoE's L_reg (arXiv 2605.20247, eq. 14 and 15), taken here so that `grad` stays the task's own.
"""
# Shape suffixes: H heads, K experts a head.

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.settings import LearnerSettings


class Hold(NamedTuple):
    """What holds a parameter back: lambda * sum importance * (theta - anchor)^2."""

    importance: Tensor
    anchor: Tensor
    strength: float


@dataclass
class Group:
    """Parameters of one bank that are updated together, and which of their experts may move."""

    name: str
    parameters: Mapping[str, Parameter]
    """Each with leading dimensions (H, K)."""
    load_HK: Tensor | None
    """Tokens that each expert got in this step, kept up to date by the layer; None when every step moves everything."""
    lr_scale: float = 1.0
    """The group's learning rate, as a part of the optimizer's; 0 leaves it alone."""
    holds: dict[str, Hold] = field(default_factory=dict)
    """What (2) adds to a parameter's gradient."""
    moments: dict[str, Tensor] = field(default_factory=dict)
    steps_HK: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        for name, parameter in self.parameters.items():
            self.moments[f"{name}.exp_avg"] = torch.zeros_like(parameter)
            self.moments[f"{name}.exp_avg_sq"] = torch.zeros_like(parameter)
        first = next(iter(self.parameters.values()))
        shape = (1, 1) if self.load_HK is None else self.load_HK.shape
        self.steps_HK = torch.zeros(shape, dtype=torch.float32, device=first.device)

    @property
    def routed_HK(self) -> Tensor | None:  # noqa: N802  # a shape suffix
        """Which experts may move."""
        return None if self.load_HK is None else self.load_HK > 0


class MaskedAdamW:
    """Equation (1) over groups; `step(lr)` reads each group's mask and the parameters' gradients."""

    def __init__(self, groups: Iterable[Group], settings: LearnerSettings) -> None:
        self.groups: Sequence[Group] = tuple(groups)
        self._settings = settings

    def parameters(self) -> list[Parameter]:
        """Everything that is trained, in a fixed order."""
        return [parameter for group in self.groups for parameter in group.parameters.values()]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply (1) once to every expert that was routed to."""
        for group in self.groups:
            if group.lr_scale == 0:
                continue
            mask = group.routed_HK
            routed = group.steps_HK.numel() if mask is None else int(mask.sum())
            if routed == 0:
                continue
            group.steps_HK += 1.0 if mask is None else mask.float()
            if routed == group.steps_HK.numel():
                mask = None  # everyone moves: no choice to make element by element
            for name, parameter in group.parameters.items():
                if parameter.grad is not None:
                    self._update(group, name, parameter, mask, lr * group.lr_scale)

    def _update(self, group: Group, name: str, parameter: Parameter, mask_HK: Tensor | None, lr: float) -> None:
        beta1, beta2 = self._settings.betas
        grad = parameter.grad
        assert grad is not None
        hold = group.holds.get(name)
        if hold is not None:
            grad = torch.addcmul(grad, hold.importance, parameter - hold.anchor, value=2 * hold.strength)
        exp_avg, exp_avg_sq = group.moments[f"{name}.exp_avg"], group.moments[f"{name}.exp_avg_sq"]
        spread = (*group.steps_HK.shape, *[1] * (parameter.ndim - 2))
        live = (exp_avg, exp_avg_sq, parameter)
        new_avg, new_sq, new = live if mask_HK is None else [tensor.clone() for tensor in live]
        steps = group.steps_HK.clamp_min(1).view(spread)
        new_avg.lerp_(grad, 1 - beta1)
        new_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (new_sq / (1 - beta2**steps)).sqrt_().add_(self._settings.eps)
        step = torch.div(new_avg, denominator, out=denominator).mul_(lr / (1 - beta1**steps))
        new.mul_(1 - lr * self._settings.weight_decay).sub_(step)
        if mask_HK is not None:
            for target, value in zip(live, (new_avg, new_sq, new), strict=True):
                # torch.where, not a multiplication by the mask: what is not selected keeps its very bits
                target.copy_(torch.where(mask_HK.view(spread), value, target))

    def state_dict(self) -> dict[str, Tensor]:
        """Moments and step counts by name, for a snapshot."""
        tensors: dict[str, Tensor] = {}
        for group in self.groups:
            tensors |= {f"{group.name}.{name}": moment for name, moment in group.moments.items()}
            tensors[f"{group.name}.steps"] = group.steps_HK
        return tensors

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`, in place."""
        own = self.state_dict()
        assert own.keys() == tensors.keys(), "a snapshot's manifest was checked against this adapter before"
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
