"""Anchors: the importance of each weight, and the old value that a penalty keeps it close to.

    L_reg = sum_i <Omega_A^(i), (A_i - A_i^old)^2> + <Omega_B^(i), (B_i - B_i^old)^2>          (1)

CP-MoE (arXiv 2605.20247) eq. 14. The optimizer adds the gradient of (1) itself (`optimizer`, eq. 2). Omega is written
by `consolidate`, which decides how the importance of several regimes adds up. Every consolidation sets the old values
to the current ones, so (1) penalizes the distance from the weights at the last consolidation.
"""
# Shape suffixes: H heads, K experts a head.

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.learner.importance import RANK_DIM
from streamlearn.learner.optimizer import Group, Hold


class Anchors:
    """Importance and old values of every expert's A and B; the optimizer's groups refer to the same tensors."""

    def __init__(self, groups: Sequence[Group], strength: float, *, over_rank: bool = False) -> None:
        """`over_rank`: whether importance is the same for all of the rank, so that it has (H, K, 1, S) values."""
        self.strength = strength
        """lambda of eq. 15."""
        self._groups = tuple(groups) if strength > 0 else ()
        self._omega_and_old: dict[str, tuple[Tensor, Tensor]] = {
            name: (
                torch.zeros_like(parameter.narrow(RANK_DIM, 0, 1) if over_rank else parameter),
                parameter.detach().clone(),
            )
            for name, parameter in self._parameters()
        }

    @torch.no_grad()
    def move(self) -> None:
        """Set the old values to the current ones."""
        for name, parameter in self._parameters():
            self._omega_and_old[name][1].copy_(parameter)

    def hold(self) -> None:
        """Penalize each parameter whose importance is not zero, and no other; call it after importance was written."""
        for group in self._groups:
            for part in group.parameters:
                omega, old = self._omega_and_old[f"{group.name}.{part}"]
                if bool(omega.any()):
                    group.holds[part] = Hold(omega, old, self.strength)
                else:
                    group.holds.pop(part, None)

    @torch.no_grad()
    def penalty(self) -> float:
        """Compute lambda L_reg, eq. (1), for the current weights."""
        terms = []
        for name, parameter in self._parameters():
            omega, old = self._omega_and_old[name]
            terms.append((omega * (parameter - old).square()).sum())
        return self.strength * float(sum(terms)) if terms else 0.0

    def importance(self) -> dict[str, Tensor]:
        """Return Omega by parameter (`BANK.A`, `BANK.B`); the tensors are not copied."""
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
        self.hold()

    def _parameters(self) -> Iterator[tuple[str, Parameter]]:
        for group in self._groups:
            for part, parameter in group.parameters.items():
                yield f"{group.name}.{part}", parameter
