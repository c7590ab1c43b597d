"""What holds old knowledge in place: how important each weight is, and the value it is held to.

    L_reg = sum_i <Omega_A^(i), (A_i - A_i^old)^2> + <Omega_B^(i), (B_i - B_i^old)^2>          (1)
    Omega^(i) <- Omega^(i) + h_i Omega_t                                                       (2)

CP-MoE (arXiv 2605.20247) eq. 14 and 13. The optimizer takes (1)'s gradient itself (`optimizer`, eq. 2). The old values
are moved to the present ones at each shift, so that (1) resists leaving what the last consolidation stood for, never
what was reached since.
"""
# Shape suffixes: H heads, K experts a head.

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.learner.optimizer import Group, Hold


class Anchors:
    """Importance and old values of every expert's A and B, which the optimizer's groups refer to."""

    def __init__(self, groups: Sequence[Group], strength: float) -> None:
        self.strength = strength
        """lambda of eq. 15."""
        self._groups = tuple(groups) if strength > 0 else ()
        self._held: dict[str, tuple[Tensor, Tensor]] = {
            name: (torch.zeros_like(parameter), parameter.detach().clone()) for name, parameter in self._parameters()
        }

    @torch.no_grad()
    def consolidate(self, importance: Mapping[str, Tensor], weight: Mapping[str, Tensor] | None = None) -> None:
        """Eq. (2), then move the old values to the present ones.

        `importance` is keyed by parameter (`BANK.A`, `BANK.B`), `weight` holds h by bank as (H, K); None: 1 for all.
        """
        for name, parameter in self._parameters():
            omega, old = self._held[name]
            if weight is None:
                omega.add_(importance[name])
            else:
                omega.addcmul_(importance[name], _spread(weight[name.rpartition(".")[0]], parameter.ndim))
            old.copy_(parameter)
        self._engage()

    @torch.no_grad()
    def release(self, share: Mapping[str, Tensor]) -> None:
        """Take away a part of every expert's importance, by bank as (H, K) in [0, 1]."""
        for name, parameter in self._parameters():
            self._held[name][0].mul_(1 - _spread(share[name.rpartition(".")[0]], parameter.ndim))

    @torch.no_grad()
    def penalty(self) -> float:
        """Lambda L_reg, eq. (1), as the weights stand."""
        terms = [(self._held[name][0] * (p - self._held[name][1]).square()).sum() for name, p in self._parameters()]
        return self.strength * float(sum(terms)) if terms else 0.0

    def importance(self) -> dict[str, Tensor]:
        """Omega of every parameter; live tensors."""
        return {name: omega for name, (omega, _) in self._held.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """For a snapshot; live tensors."""
        return {
            f"{name}.{part}": tensor
            for name, held in self._held.items()
            for part, tensor in zip(("importance", "old"), held, strict=True)
        }

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`, in place."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(tensors[name])
        self._engage()

    def _engage(self) -> None:
        """Tell the optimizer, from the first importance on: before it there is nothing to add to a gradient."""
        for group in self._groups:
            for part in group.parameters:
                omega, old = self._held[f"{group.name}.{part}"]
                if part not in group.holds and bool(omega.any()):
                    group.holds[part] = Hold(omega, old, self.strength)

    def _parameters(self) -> Iterator[tuple[str, Parameter]]:
        for group in self._groups:
            for part, parameter in group.parameters.items():
                yield f"{group.name}.{part}", parameter


def _spread(weight_HK: Tensor, ndim: int) -> Tensor:
    return weight_HK.view(*weight_HK.shape, *[1] * (ndim - 2))
