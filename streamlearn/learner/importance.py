"""Importance of each weight: how much it lowered the loss, relative to the distance it moved.

    omega_k = sum_s -g_sk (theta_{s+1,k} - theta_sk)                                            (1)
    Omega_k = omega_k / ((theta_Sk - theta_0k)^2 + xi)                                          (2)

CP-MoE (arXiv 2605.20247) eq. 6 and 7, after Zenke et al. 2017. g is the gradient of the task loss and,
where the objective has one, of the balance loss: without that of the anchors, before clipping and before MoT's stage I
normalizes it. theta_{s+1} is the result of the optimizer step. A negative omega means that the loss rose along that
weight (momentum, a large step, another batch's gradient). Nothing was learned there, so (2) is clamped at 0.

Rotating the rank dimension of an expert's A and B leaves its function unchanged, but changes (2). Means over the rank
are invariant:

    Omega_s = mean_r omega_rs / (mean_r (theta_Srs - theta_0rs)^2 + xi),   the same for every r (3)

(1) grows with every step, also where nothing is learned: `signal_integral` says why, and has the form without it.
"""
# Shape suffixes: H heads, K experts a head, R rank, S slice or O out features.

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from streamlearn.learner.training_path import TrainingPath

RANK_DIM, RANKED_NDIM = 2, 4  # A (H, K, R, S) and B (H, K, R, O); a router (H, K, S) has no rank


def normalised(omega: Tensor, displacement: Tensor, xi: float) -> Tensor:
    """Compute eq. (2) element by element."""
    return (omega / displacement.square().add_(xi)).clamp_min_(0.0)


def rank_energy(displacement_HKRS: Tensor, xi: float) -> Tensor:
    """Compute the denominator of eq. (3), (H, K, 1, S)."""
    return displacement_HKRS.square().mean(RANK_DIM, keepdim=True).add_(xi)


def rank_invariant(omega_HKRS: Tensor, displacement_HKRS: Tensor, xi: float) -> Tensor:
    """Compute eq. (3), expanded to the shape of `omega_HKRS`: the same value for every r."""
    energy_HK1S = rank_energy(displacement_HKRS, xi)
    importance_HK1S = (omega_HKRS.mean(RANK_DIM, keepdim=True) / energy_HK1S).clamp_min_(0.0)
    return importance_HK1S.expand_as(omega_HKRS)


class PathIntegral(TrainingPath):
    """Eq. (1) along a training path; neither `before` nor `after` allocates memory."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._omega = [torch.zeros_like(parameter) for parameter in self._parameters]

    def after(self, gradients: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
        """Add a term of eq. (1), see `TrainingPath.after`."""
        moved = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not moved:
            return
        minus_delta = [self._before[i] for i in moved]  # becomes theta_s - theta_{s+1} in place
        torch._foreach_sub_(minus_delta, [self._parameters[i] for i in moved])
        present = [gradient for gradient in gradients if gradient is not None]
        torch._foreach_addcmul_([self._omega[i] for i in moved], present, minus_delta, value=scale)

    def importance(self, xi: float) -> dict[str, Tensor]:
        """Return eq. (2) by parameter name, never negative."""
        return {name: normalised(omega, now - start, xi) for name, omega, now, start in self._paths()}

    def rank_invariant(self, xi: float) -> dict[str, Tensor]:
        """Return eq. (3) for parameters that have a rank dimension, eq. (2) for the others."""
        return {
            name: (rank_invariant if omega.ndim == RANKED_NDIM else normalised)(omega, now - start, xi)
            for name, omega, now, start in self._paths()
        }

    def _sums(self) -> dict[str, list[Tensor]]:
        return {"omega": self._omega}

    def _paths(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        return zip(self._names, self._omega, self._parameters, self._start, strict=True)
