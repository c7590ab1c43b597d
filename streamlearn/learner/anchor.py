"""Anchors: the importance of each weight, and the old value that a penalty keeps it close to.

    L_reg = sum_i <Omega_A^(i), (A_i - A_i^old)^2> + <Omega_B^(i), (B_i - B_i^old)^2>          (1)
    Omega^(i) <- Omega^(i) + h_i Omega_t                                                       (2)

CP-MoE (arXiv 2605.20247) eq. 14 and 13. The optimizer adds the gradient of (1) itself (`optimizer`, eq. 2). Every
consolidation sets the old values to the current ones, so (1) penalizes the distance from the weights at the last
consolidation.
"""
# Shape suffixes: H heads, K experts a head.

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.learner.optimizer import Group, Hold


class Anchors:
    """Importance and old values of every expert's A and B; the optimizer's groups refer to the same tensors."""

    def __init__(self, groups: Sequence[Group], strength: float) -> None:
        self.strength = strength
        """lambda of eq. 15."""
        self._groups = tuple(groups) if strength > 0 else ()
        self._omega_and_old: dict[str, tuple[Tensor, Tensor]] = {
            name: (torch.zeros_like(parameter), parameter.detach().clone()) for name, parameter in self._parameters()
        }

    @torch.no_grad()
    def consolidate(self, importance: Mapping[str, Tensor], weight: Mapping[str, Tensor] | None = None) -> None:
        """Apply eq. (2), then set the old values to the current ones.

        Args:
            importance: Omega_t by parameter (`BANK.A`, `BANK.B`), of the parameter's shape.
            weight: h by bank, (H, K); None: 1 for all experts.
        """
        for name, parameter in self._parameters():
            omega, old = self._omega_and_old[name]
            if weight is None:
                omega.add_(importance[name])
            else:
                omega.addcmul_(importance[name], _broadcast(weight[name.rpartition(".")[0]], parameter.ndim))
            old.copy_(parameter)
        self._update_groups()

    @torch.no_grad()
    def release(self, fraction: Mapping[str, Tensor]) -> None:
        """Reduce every expert's importance by a fraction in [0, 1], given by bank as (H, K)."""
        for name, parameter in self._parameters():
            self._omega_and_old[name][0].mul_(1 - _broadcast(fraction[name.rpartition(".")[0]], parameter.ndim))

    @torch.no_grad()
    def penalty(self) -> float:
        """Compute lambda L_reg, eq. (1), for the current weights."""
        terms = []
        for name, parameter in self._parameters():
            omega, old = self._omega_and_old[name]
            terms.append((omega * (parameter - old).square()).sum())
        return self.strength * float(sum(terms)) if terms else 0.0

    def importance(self) -> dict[str, Tensor]:
        """Return Omega by parameter; the tensors are not copied."""
        return {name: omega for name, (omega, _) in self._omega_and_old.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of a snapshot, not copied."""
        return {
            f"{name}.{part}": tensor
            for name, tensors in self._omega_and_old.items()
            for part, tensor in zip(("importance", "old"), tensors, strict=True)
        }

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, in place."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(tensors[name])
        self._update_groups()

    def _update_groups(self) -> None:
        """Add a penalty to each group as soon as its importance is not zero."""
        for group in self._groups:
            for part in group.parameters:
                omega, old = self._omega_and_old[f"{group.name}.{part}"]
                if part not in group.holds and bool(omega.any()):
                    group.holds[part] = Hold(omega, old, self.strength)

    def _parameters(self) -> Iterator[tuple[str, Parameter]]:
        for group in self._groups:
            for part, parameter in group.parameters.items():
                yield f"{group.name}.{part}", parameter


def _broadcast(weight_HK: Tensor, ndim: int) -> Tensor:
    return weight_HK.view(*weight_HK.shape, *[1] * (ndim - 2))
