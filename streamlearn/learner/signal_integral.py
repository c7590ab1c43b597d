"""Importance without what gradient noise adds: each displacement is paired with the next gradient.

The gradient of a batch is g_s = G_s + n_s: that of the expected loss at theta_s, and noise of mean 0 that is
independent from batch to batch. CP-MoE's path integral (arXiv 2605.20247, eq. 6; `importance`, eq. 1) pairs g_s with
the displacement d_s = theta_{s+1} - theta_s that g_s itself caused, so the noise enters squared. With Adam's
d_s = -lr m_s / sqrt(v_s) and m_s = (1 - b1) g_s + b1 m_{s-1},

    E[-g_sk d_sk] = -G_sk E[d_sk] + lr (1 - b1) E[n_sk^2] / sqrt(v_sk)                          (1)

The last term is positive in every step, also when nothing is learned (G = 0). The noise of the *next* batch is
independent of d_s, which leaves only the signal:

    omega_s = mean_r sum_t -g_{t+1,rs} d_{t,rs},       E[-g_{t+1} d_t] = -G_{t+1} d_t            (2)

Over the path that is the decrease of the loss, less (1/2) d' H d per step, since the gradient is taken at the end of
each displacement and not along it: half a percent for 200 equal steps. In a regime that goes on long after it has been
learned, these terms add up to the importance of weights that moved less than lr sqrt(steps / 20). Batches
that resemble the batch before them (one author's records in a row) have correlated noise, and keep some of (1).

What is left of the noise has mean 0. Of (2), the part above its standard error counts, as in the positive-part James
and Stein estimator, with x_t the terms of the sum:

    signal_s = max(0, omega_s - q_s / omega_s) if omega_s > 0 else 0,      q_s = sum_t x_ts^2    (3)
    Omega_s = signal_s / (mean_r (theta_Srs - theta_0rs)^2 + xi),          the same for every r (4)

(4) is CP-MoE's eq. 7 in the form that rotations of the rank leave unchanged (`importance`, eq. 3). The mean over the
rank also averages noise, and makes importance 1 / R of a parameter's size, so that one can be kept for each regime.

An expert that no token was routed to has neither a gradient nor a displacement: its last displacement waits for its
next gradient. That of the last step of a path is dropped.
"""
# Shape suffixes: H heads, K experts a head, R rank, S slice or O out features.

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from streamlearn.learner.importance import RANK_DIM, rank_energy
from streamlearn.learner.training_path import TrainingPath


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
