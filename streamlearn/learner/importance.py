"""Which weights lowered the loss, and how much for the way they went.

    omega_k = sum_s -g_sk (theta_{s+1,k} - theta_sk)                                            (1)
    Omega_k = omega_k / ((theta_Sk - theta_0k)^2 + xi)                                          (2)

CP-MoE (arXiv 2605.20247) eq. 6 and 7, after Zenke et al. 2017. g is the gradient of the task loss alone, before
clipping; theta_{s+1} is whatever the optimizer made of it. A negative omega means that the steps went uphill along that
weight (momentum, a large step, another batch's gradient): nothing was learned there, so (2) is clamped at 0.

A and B of one expert name the same function in every rotation of the rank, and (2) changes with it. Its mean over the
rank does not, neither do the products with it:

    Omega_s = mean_r omega_rs / (mean_r (theta_Srs - theta_0rs)^2 + xi),   the same for every r (3)
"""
# Shape suffixes: H heads, K experts a head, R rank, S slice or O out features.

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

RANK_DIM, RANKED_NDIM = 2, 4  # A (H, K, R, S) and B (H, K, R, O); a router (H, K, S) has no rank


def normalised(omega: Tensor, displacement: Tensor, xi: float) -> Tensor:
    """Eq. (2), element by element."""
    return (omega / displacement.square().add_(xi)).clamp_min_(0.0)


def rank_invariant(omega_HKRS: Tensor, displacement_HKRS: Tensor, xi: float) -> Tensor:
    """Eq. (3) as a view of the first argument's shape: one number over the whole rank."""
    energy_HK1S = displacement_HKRS.square().mean(RANK_DIM, keepdim=True).add_(xi)
    importance_HK1S = (omega_HKRS.mean(RANK_DIM, keepdim=True) / energy_HK1S).clamp_min_(0.0)
    return importance_HK1S.expand_as(omega_HKRS)


class PathIntegral:
    """Eq. (1) along a training path: `before` each update, `after` it; no memory is allocated in either."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = tuple(parameters)
        self._parameters = [parameter.detach() for parameter in parameters.values()]  # views: they follow the updates
        self._omega = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._start = [parameter.clone() for parameter in self._parameters]
        self._before = [torch.empty_like(parameter) for parameter in self._parameters]

    def before(self) -> None:
        """Remember the values that the next update starts from."""
        torch._foreach_copy_(self._before, self._parameters)

    def after(self, gradients: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
        """Add the update since `before`, made with these gradients; None is a parameter that had none.

        `scale` undoes what clipping did to them.
        """
        moved = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not moved:
            return
        minus_delta = [self._before[i] for i in moved]  # becomes theta_s - theta_{s+1} in place
        torch._foreach_sub_(minus_delta, [self._parameters[i] for i in moved])
        present = [gradient for gradient in gradients if gradient is not None]
        torch._foreach_addcmul_([self._omega[i] for i in moved], present, minus_delta, value=scale)

    def importance(self, xi: float) -> dict[str, Tensor]:
        """Eq. (2) by parameter name, never negative."""
        return {name: normalised(omega, now - start, xi) for name, omega, now, start in self._paths()}

    def rank_invariant(self, xi: float) -> dict[str, Tensor]:
        """Eq. (3) for parameters that have a rank, eq. (2) for the others."""
        return {
            name: (rank_invariant if omega.ndim == RANKED_NDIM else normalised)(omega, now - start, xi)
            for name, omega, now, start in self._paths()
        }

    def restart(self) -> None:
        """Begin a new path here."""
        torch._foreach_zero_(self._omega)
        torch._foreach_copy_(self._start, self._parameters)

    def state_dict(self) -> dict[str, Tensor]:
        """Sums and starts by name, for a snapshot between two updates; live tensors, not copies."""
        tensors: dict[str, Tensor] = {}
        for name, omega, _, start in self._paths():
            tensors |= {f"{name}.omega": omega, f"{name}.start": start}
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`, in place."""
        own = self.state_dict()
        assert own.keys() == tensors.keys(), "a snapshot's manifest was checked against this adapter before"
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def _paths(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        return zip(self._names, self._omega, self._parameters, self._start, strict=True)
