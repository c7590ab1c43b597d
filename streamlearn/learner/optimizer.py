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

adds the gradient of CP-MoE's L_reg (arXiv 2605.20247, eq. 14 and 15). It is added here so that `grad` is the gradient
of the task loss only.
"""
# Shape suffixes: H heads, K experts a head.

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


class _Factors(NamedTuple):
    """Of each expert of a group in one update; they broadcast to its parameters."""

    kept: Tensor | float
    """1 - lr w."""
    step_size: Tensor
    """lr / (1 - b1^t)."""
    correction: Tensor
    """1 - b2^t."""


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
        """Experts to update in this step, bool (H, K); None: all."""
        return None if self.load_HK is None else self.load_HK > 0


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
        for group in self.active:
            if group.lr_scale == 0 or all(parameter.grad is None for parameter in group.parameters.values()):
                continue
            routed = None if group.routed_HK is None else group.routed_HK.nonzero(as_tuple=True)
            if routed is not None and len(routed[0]) == group.steps_HK.numel():
                routed = None  # all experts: no need to take them out and put them back
            if routed is not None and len(routed[0]) == 0:
                continue
            group.steps_HK[... if routed is None else routed] += 1.0
            steps = group.steps_HK if routed is None else group.steps_HK[routed]
            inner = next(iter(group.parameters.values())).ndim - group.steps_HK.ndim
            factors = self._factors(steps.view(*steps.shape, *[1] * inner), lr * group.lr_scale)
            for name, parameter in group.parameters.items():
                if parameter.grad is not None:
                    self._update(group, name, parameter, routed, factors)

    def _factors(self, steps: Tensor, lr: float) -> "_Factors":
        """The factors of eq. (1) and (2) for the experts of a group, from the t of each."""
        settings = self._settings
        beta1, beta2 = settings.betas
        rate: Tensor | float = lr
        if settings.lr_decay_updates:
            rate = lr * (settings.lr_decay_updates / steps).sqrt_().clamp_(MIN_DECAY, 1.0)
        return _Factors(1 - rate * settings.weight_decay, rate / (1 - beta1**steps), 1 - beta2**steps)

    def _update(
        self, group: Group, name: str, parameter: Parameter, routed: tuple[Tensor, ...] | None, factors: "_Factors"
    ) -> None:
        """Update the experts with the indices `routed`, all for None; the others keep every bit."""
        live = (group.moments[f"{name}.exp_avg"], group.moments[f"{name}.exp_avg_sq"], parameter)
        part = live if routed is None else tuple(tensor[routed] for tensor in live)
        grad = self._gradient(group, name, parameter, routed)
        self._apply(part, grad, factors)
        if routed is not None:
            for target, value in zip(live, part, strict=True):
                target[routed] = value

    def _gradient(self, group: Group, name: str, parameter: Parameter, routed: tuple[Tensor, ...] | None) -> Tensor:
        """Return the gradient with eq. (3)."""

        def of_routed(tensor: Tensor) -> Tensor:
            return tensor if routed is None else tensor[routed]

        assert parameter.grad is not None
        grad = of_routed(parameter.grad)
        hold = group.holds.get(name)
        if hold is not None:
            away = of_routed(parameter) - of_routed(hold.anchor)
            grad = torch.addcmul(grad, of_routed(hold.importance), away, value=2 * hold.strength)
        return grad

    def _apply(self, part: Sequence[Tensor], grad: Tensor, factors: "_Factors") -> None:
        """Compute eq. (1) in place on m, v and theta."""
        exp_avg, exp_avg_sq, theta = part
        beta1, beta2 = self._settings.betas
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (exp_avg_sq / factors.correction).sqrt_().add_(self._settings.eps)
        step = torch.div(exp_avg, denominator, out=denominator).mul_(factors.step_size)
        theta.mul_(factors.kept).sub_(step)


def parameters_of(groups: Iterable[Group]) -> list[Parameter]:
    """List the parameters of some groups, in their order."""
    return [parameter for group in groups for parameter in group.parameters.values()]


def state_dict(groups: Iterable[Group]) -> dict[str, Tensor]:
    """Return moments and step counts by name, for a snapshot; the tensors are not copied."""
    tensors: dict[str, Tensor] = {}
    for group in groups:
        tensors |= {f"{group.name}.{name}": moment for name, moment in group.moments.items()}
        tensors[f"{group.name}.steps"] = group.steps_HK
    return tensors


@torch.no_grad()
def load_state_dict(groups: Iterable[Group], tensors: Mapping[str, Tensor]) -> None:
    """Restore what `state_dict` returned, in place.

    Raises:
        AssertionError: the names are not those of these groups.
    """
    own = state_dict(groups)
    assert own.keys() == tensors.keys(), "the snapshot's manifest was checked against this adapter before"
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
