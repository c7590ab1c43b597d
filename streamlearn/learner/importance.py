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

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from streamlearn.learner.optimizer import Group, Hold


class TrainingPath(ABC):
    """The path of some parameters through weight space. Call `before` and `after` each update."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = tuple(parameters)
        self._parameters = [parameter.detach() for parameter in parameters.values()]  # views, which follow the updates
        self._start = [parameter.clone() for parameter in self._parameters]
        self._before = [torch.empty_like(parameter) for parameter in self._parameters]

    def before(self) -> None:
        """Store the weights that the next update starts from."""
        torch._foreach_copy_(self._before, self._parameters)

    @abstractmethod
    def after(self, gradients: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
        """Add the update made since `before`.

        Args:
            gradients: Those of the loss, in the order of the parameters; None for a parameter that was not trained.
            scale: Factor that undoes clipping: norm before clipping over norm after it.
        """

    @abstractmethod
    def importance(self, xi: float) -> dict[str, Tensor]:
        """Return the importance of each weight by parameter name, never negative; `xi` damps it."""

    def rank_invariant(self, xi: float) -> dict[str, Tensor]:
        """Return an importance that does not depend on rotations of the rank dimension."""
        return self.importance(xi)

    def restart(self) -> None:
        """Start a new path at the current weights."""
        for tensors in self._sums().values():
            torch._foreach_zero_(tensors)
        torch._foreach_copy_(self._start, self._parameters)

    def state_dict(self) -> dict[str, Tensor]:
        """Return sums and starting points by name, for a snapshot between two updates; the tensors are not copied."""
        parts = {**self._sums(), "start": self._start}
        return {
            f"{name}.{part}": tensor
            for part, tensors in parts.items()
            for name, tensor in zip(self._names, tensors, strict=True)
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, in place."""
        own = self.state_dict()
        assert own.keys() == tensors.keys(), "the snapshot's manifest was checked against this adapter before"
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    @abstractmethod
    def _sums(self) -> dict[str, list[Tensor]]:
        """What is zero at the start of a path, by its name in snapshots, in the order of the parameters."""


# Shape suffixes: H heads, K experts a head, R rank, S slice or O out features.


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


# Importance without what gradient noise adds: each displacement is paired with the next gradient.
#
# The gradient of a batch is g_s = G_s + n_s: that of the expected loss at theta_s, and noise of mean 0 that is
# independent from batch to batch. CP-MoE's path integral (arXiv 2605.20247, eq. 6; `importance`, eq. 1) pairs g_s with
# the displacement d_s = theta_{s+1} - theta_s that g_s itself caused, so the noise enters squared. With Adam's
# d_s = -lr m_s / sqrt(v_s) and m_s = (1 - b1) g_s + b1 m_{s-1},
#
#     E[-g_sk d_sk] = -G_sk E[d_sk] + lr (1 - b1) E[n_sk^2] / sqrt(v_sk)                          (1)
#
# The last term is positive in every step, also when nothing is learned (G = 0). The noise of the *next* batch is
# independent of d_s, which leaves only the signal:
#
#     omega_s = mean_r sum_t -g_{t+1,rs} d_{t,rs},       E[-g_{t+1} d_t] = -G_{t+1} d_t            (2)
#
# Over the path that is the decrease of the loss, less (1/2) d' H d per step, since the gradient is taken at the end of
# each displacement and not along it: half a percent for 200 equal steps. In a regime that goes on long after it has
# been learned, these terms add up to the importance of weights that moved less than lr sqrt(steps / 20). Batches
# that resemble the batch before them (one author's records in a row) have correlated noise, and keep some of (1).
#
# What is left of the noise has mean 0. Of (2), the part above its standard error counts, as in the positive-part James
# and Stein estimator, with x_t the terms of the sum:
#
#     signal_s = max(0, omega_s - q_s / omega_s) if omega_s > 0 else 0,      q_s = sum_t x_ts^2    (3)
#     Omega_s = signal_s / (mean_r (theta_Srs - theta_0rs)^2 + xi),          the same for every r (4)
#
# (4) is CP-MoE's eq. 7 in the form that rotations of the rank leave unchanged (`importance`, eq. 3). The mean over the
# rank also averages noise, and makes importance 1 / R of a parameter's size, so that one can be kept for each regime.
#
# An expert that no token was routed to has neither a gradient nor a displacement: its last displacement waits for its
# next gradient. That of the last step of a path is dropped.


# Shape suffixes: H heads, K experts a head, R rank, S slice or O out features.


class SignalIntegral(TrainingPath):
    """Eq. (2) along a training path of parameters (H, K, R, S)."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._displacement = [torch.zeros_like(parameter) for parameter in self._parameters]
        """d of each expert's last update, which its next gradient is paired with."""
        self._omega = [torch.zeros_like(p.narrow(RANK_DIM, 0, 1)) for p in self._parameters]
        self._square = [torch.zeros_like(omega) for omega in self._omega]

    def after(self, gradients: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
        """Pair the gradients with the displacements before this update, see `TrainingPath.after`."""
        for i, gradient_HKRS in enumerate(gradients):
            if gradient_HKRS is None:
                continue
            displacement_HKRS = self._displacement[i]
            term_HK1S = (gradient_HKRS * displacement_HKRS).mean(RANK_DIM, keepdim=True).mul_(-scale)
            self._omega[i].add_(term_HK1S)
            self._square[i].addcmul_(term_HK1S, term_HK1S)
            updated_HK11 = gradient_HKRS.flatten(2).any(2)[:, :, None, None]
            update_HKRS = self._parameters[i] - self._before[i]
            torch.where(updated_HK11, update_HKRS, displacement_HKRS, out=displacement_HKRS)

    def importance(self, xi: float) -> dict[str, Tensor]:
        """Return eq. (4) by parameter name, (H, K, 1, S)."""
        sums = zip(self._names, self._omega, self._square, self._parameters, self._start, strict=True)
        return {name: signal(omega, square) / rank_energy(now - start, xi) for name, omega, square, now, start in sums}

    def _sums(self) -> dict[str, list[Tensor]]:
        return {"omega": self._omega, "square": self._square, "displacement": self._displacement}


def signal(omega: Tensor, square: Tensor) -> Tensor:
    """Compute eq. (3) element by element."""
    return torch.where(omega > 0, omega - square / omega, 0.0).clamp_min_(0.0)


# Anchors: the importance of each weight, and the old value that a penalty keeps it close to.
#
#     L_reg = sum_i <Omega_A^(i), (A_i - A_i^old)^2> + <Omega_B^(i), (B_i - B_i^old)^2>          (1)
#
# CP-MoE (arXiv 2605.20247) eq. 14. The optimizer adds the gradient of (1) itself (`optimizer`, eq. 2). Omega is written
# by `consolidate`, which decides how the importance of several regimes adds up. Every consolidation sets the old values
# to the current ones, so (1) penalizes the distance from the weights at the last consolidation.


# Shape suffixes: H heads, K experts a head.


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
