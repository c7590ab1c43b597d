"""Importance of each weight: how much it lowered the loss, relative to the distance it moved; and what it holds.

    omega_k = sum_s -g_sk (theta_{s+1,k} - theta_sk)                                            (1)
    Omega_k = omega_k / ((theta_Sk - theta_0k)^2 + xi)                                          (2)

CP-MoE (arXiv 2605.20247) eq. 6 and 7, after Zenke et al. 2017. g is the gradient of the task loss and, where the
objective has one, of the balance loss: without that of the anchors, before clipping and before MoT's stage I normalizes
it. theta_{s+1} is the result of the optimizer step. A negative omega means that the loss rose along that weight
(momentum, a large step, another batch's gradient). Nothing was learned there, so (2) is clamped at 0.

Rotating the rank dimension of an expert's A and B leaves its function unchanged, but changes (2). Means over the rank
are invariant:

    Omega_s = mean_r omega_rs / (mean_r (theta_Srs - theta_0rs)^2 + xi),   the same for every r (3)

Noise. The gradient of a batch is g_s = G_s + n_s: that of the expected loss at theta_s, and noise of mean 0 that is
independent from batch to batch. (1) pairs g_s with the displacement d_s = theta_{s+1} - theta_s that g_s itself caused,
so the noise enters squared. With Adam's d_s = -lr m_s / sqrt(v_s) and m_s = (1 - b1) g_s + b1 m_{s-1},

    E[-g_sk d_sk] = -G_sk E[d_sk] + lr (1 - b1) E[n_sk^2] / sqrt(v_sk)                          (4)

The last term is positive in every step, also when nothing is learned (G = 0). The noise of the *next* batch is
independent of d_s, which leaves only the signal:

    omega_s = mean_r sum_t -g_{t+1,rs} d_{t,rs},       E[-g_{t+1} d_t] = -G_{t+1} d_t            (5)

Over the path that is the decrease of the loss, less (1/2) d' H d per step, since the gradient is taken at the end of
each displacement and not along it: half a percent for 200 equal steps. In a regime that goes on long after it has been
learned, these terms add up to the importance of weights that moved less than lr sqrt(steps / 20). Batches that resemble
the batch before them (one author's records in a row) have correlated noise, and keep some of (4).

What is left of the noise has mean 0. Of (5), the part above its standard error counts, as in the positive-part James
and Stein estimator, with x_t the terms of the sum:

    signal_s = max(0, omega_s - q_s / omega_s) if omega_s > 0 else 0,      q_s = sum_t x_ts^2    (6)
    Omega_s = signal_s / (mean_r (theta_Srs - theta_0rs)^2 + xi),          the same for every r (7)

(7) is (3) without noise. The mean over the rank also averages noise, and makes importance 1 / R of a parameter's size,
so that one can be kept for each regime.

Anchors. L_reg penalizes the distance of important weights from their values at the last consolidation (eq. 14):

    L_reg = sum_i <Omega_A^(i), (A_i - A_i^old)^2> + <Omega_B^(i), (B_i - B_i^old)^2>            (8)

Several regimes. As published (eq. 13), every segment adds to one sum, which holds all regimes:

    Omega <- Omega + h Omega_t                                                                  (9)

The sum has no bound: a regime that lasts or returns adds every time, and is held by its own importance when it returns.
A stream without an end needs importance that is kept apart by regime r, and bounded:

    Omega_r <- b max(Omega_r, h Omega_t),    b = min(1, 1 / (xi sum_k Omega_rk))               (10)
    Omega = sum_{r' != r} Omega_r',          r the regime in training                          (11)

The maximum is taken weight by weight: of several segments of one regime, the one that needed a weight most counts. A
segment in which nothing was left to learn measures 0 and takes nothing away; one that learns the same again adds
nothing. b bounds what one regime can contribute, whatever was measured: moving every weight by sqrt(xi) costs at most
lambda x 1 nat per token in L_reg because of it.
"""
# Shape suffixes: H heads, K experts a head, R rank, S slice or O out features, N regime slots.

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from streamlearn.adapters.tuner import Bank, copy_slots
from streamlearn.learner.optimizer import Group, Hold
from streamlearn.settings import Accumulation

RANK_DIM = 2  # of A (H, K, R, S) and B (H, K, R, O)


class TrainingPath(ABC):
    """The path of some parameters through weight space. Call `before` and `after` each update."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = tuple(parameters)
        self._parameters = [parameter.detach() for parameter in parameters.values()]  # views, which follow the updates
        self._start = [parameter.clone() for parameter in self._parameters]
        self._before = [torch.empty_like(parameter) for parameter in self._parameters]
        self._sums: dict[str, list[Tensor]] = {}
        """Zero at the start of a path, by name in snapshots, in the order of the parameters."""

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

    def restart(self) -> None:
        """Start a new path at the current weights."""
        for tensors in self._sums.values():
            torch._foreach_zero_(tensors)
        torch._foreach_copy_(self._start, self._parameters)

    def state(self) -> dict[str, Tensor]:
        """Return sums and starting points by name, for a snapshot between two updates; the tensors are not copied."""
        parts = {**self._sums, "start": self._start}
        return {
            f"{name}.{part}": tensor
            for part, tensors in parts.items()
            for name, tensor in zip(self._names, tensors, strict=True)
        }


class PathIntegral(TrainingPath):
    """Eq. (1) along a training path."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._omega = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._sums = {"omega": self._omega}

    def after(self, gradients: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
        for omega, before, now, gradient in zip(self._omega, self._before, self._parameters, gradients, strict=True):
            if gradient is not None:
                omega.addcmul_(gradient, before - now, value=scale)

    def importance(self, xi: float) -> dict[str, Tensor]:
        """Return eq. (2)."""
        paths = zip(self._names, self._omega, self._parameters, self._start, strict=True)
        return {name: (omega / (now - start).square().add_(xi)).clamp_min_(0.0) for name, omega, now, start in paths}


class SignalIntegral(TrainingPath):
    """Eq. (5) along a training path of parameters (H, K, R, S).

    An expert that no token was routed to has neither a gradient nor a displacement: its last displacement waits for its
    next gradient. The displacement of the last step of a path is dropped.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._displacement = [torch.zeros_like(parameter) for parameter in self._parameters]
        """d of each expert's last update, which its next gradient is paired with."""
        self._omega = [torch.zeros_like(p.narrow(RANK_DIM, 0, 1)) for p in self._parameters]
        self._square = [torch.zeros_like(omega) for omega in self._omega]
        self._sums = {"omega": self._omega, "square": self._square, "displacement": self._displacement}

    def after(self, gradients: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
        for i, gradient_HKRS in enumerate(gradients):
            if gradient_HKRS is None:
                continue
            displacement_HKRS = self._displacement[i]
            term_HK1S = (gradient_HKRS * displacement_HKRS).mean(RANK_DIM, keepdim=True).mul_(-scale)
            self._omega[i].add_(term_HK1S)
            self._square[i].addcmul_(term_HK1S, term_HK1S)
            is_updated_HK11 = gradient_HKRS.flatten(2).any(2)[:, :, None, None]
            update_HKRS = self._parameters[i] - self._before[i]
            torch.where(is_updated_HK11, update_HKRS, displacement_HKRS, out=displacement_HKRS)

    def importance(self, xi: float) -> dict[str, Tensor]:
        """Return eq. (7), (H, K, 1, S)."""
        sums = zip(self._names, self._omega, self._square, self._parameters, self._start, strict=True)
        found = {}
        for name, omega, square, now, start in sums:
            signal = torch.where(omega > 0, omega - square / omega, 0.0).clamp_min_(0.0)  # (6)
            found[name] = signal / (now - start).square().mean(RANK_DIM, keepdim=True).add_(xi)
        return found


PATHS: Mapping[Accumulation, type[TrainingPath]] = {"sum": PathIntegral, "per_regime": SignalIntegral}
"""What importance is computed from, by how that of several regimes adds up."""


class Anchors:
    """Importance and old values of every expert's A and B; the optimizer's groups refer to the same tensors.

    The optimizer adds the gradient of (8) itself (`optimizer`, eq. 3).
    """

    def __init__(self, groups: Sequence[Group], strength: float, *, over_rank: bool) -> None:
        """`strength`: lambda of eq. 15. `over_rank`: importance is the same for all of the rank, (H, K, 1, S)."""
        self._strength = strength
        self._groups = tuple(groups)
        parameters = {f"{group.name}.{part}": p for group in groups for part, p in group.parameters.items()}
        self._parameters = parameters
        self.importance = {
            name: torch.zeros_like(p.narrow(RANK_DIM, 0, 1) if over_rank else p) for name, p in parameters.items()
        }
        """Omega by parameter (`BANK.A`, `BANK.B`), written in place."""
        self._old = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def move(self) -> None:
        """Set the old values to the current ones."""
        for name, parameter in self._parameters.items():
            self._old[name].copy_(parameter)

    def hold(self) -> None:
        """Penalize each parameter whose importance is not zero, and no other; call it after importance was written."""
        for group in self._groups:
            for part in group.parameters:
                name = f"{group.name}.{part}"
                if bool(self.importance[name].any()):
                    group.holds[part] = Hold(self.importance[name], self._old[name], self._strength)
                else:
                    group.holds.pop(part, None)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a snapshot, not copied; call `hold` after they were restored."""
        parts = {"importance": self.importance, "old": self._old}
        return {f"{name}.{part}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


class SummedImportance:
    """Eq. (9).

    The contribution of each regime to an expert's total is kept as one number per expert and slot, so `release`
    multiplies the expert's Omega by the other regimes' fraction.
    """

    def __init__(self, held: Mapping[str, Tensor], banks: Sequence[Bank], regimes: int) -> None:
        """`held`: `Anchors.importance`."""
        self._held = held
        self.mass = {bank.name: torch.zeros(*bank.A.shape[:2], regimes, device=bank.A.device) for bank in banks}
        """Importance added by each slot to each expert, summed over the expert's weights, (H, K, N) by bank."""

    @torch.no_grad()
    def add(self, slot: int, importance: Mapping[str, Tensor], h: Mapping[str, Tensor] | None = None) -> None:
        """Take in Omega_t of the regime in `slot` at the end of its segment; `h` by bank, (H, K); None: 1.

        With `h`, Omega_t may be one for all experts of a head, (H, 1, ...).
        """
        for name, omega in self._held.items():
            if h is None:
                omega.add_(importance[name])
            else:
                omega.addcmul_(importance[name], _broadcast(h[_bank_of(name)], omega))
        for bank, mass_HKN in self.mass.items():
            added_HK = importance[f"{bank}.A"].flatten(2).sum(2) + importance[f"{bank}.B"].flatten(2).sum(2)
            mass_HKN[:, :, slot] += added_HK if h is None else added_HK * h[bank]

    def enter(self, slot: int) -> None:
        """Do nothing: the sum holds every regime, also the one that made it."""

    @torch.no_grad()
    def release(self, slot: int) -> None:
        """Reduce every expert's importance by the fraction that the regime in `slot` added."""
        fraction = {}
        for bank, mass_HKN in self.mass.items():
            total_HK = mass_HKN.sum(2)
            fraction[bank] = torch.where(total_HK > 0, mass_HKN[:, :, slot] / total_HK, 0.0)
            mass_HKN[:, :, slot] = 0.0
        for name, omega in self._held.items():
            omega.mul_(1 - _broadcast(fraction[_bank_of(name)], omega))

    def state(self) -> dict[str, Tensor]:
        return {f"baseline.mass.{bank}": mass_HKN for bank, mass_HKN in self.mass.items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            copy_slots(tensor, tensors[name])


class RegimeImportance:
    """Eq. (10) and (11), over tensors (H, K, 1, S). Each regime takes 1 / R of the adapter's size."""

    _PREFIX = "baseline.importance."

    def __init__(self, held: Mapping[str, Tensor], ranks: Mapping[str, int], damping: float) -> None:
        """`held`: `Anchors.importance`. `ranks`: by bank. `damping`: xi."""
        self._held = held
        self._ranks = ranks
        self._max_sum = 1 / damping
        self._by_slot: dict[int, dict[str, Tensor]] = {}
        self._current: int | None = None

    @torch.no_grad()
    def add(self, slot: int, importance: Mapping[str, Tensor], h: Mapping[str, Tensor] | None = None) -> None:
        """Apply eq. (10), see `SummedImportance.add`."""
        measured = dict(importance)
        if h is not None:
            measured = {name: omega * _broadcast(h[_bank_of(name)], omega) for name, omega in measured.items()}
        before = self._by_slot.get(slot)
        if before is not None:
            measured = {name: torch.maximum(omega, before[name]) for name, omega in measured.items()}
        total = torch.stack([omega.sum() * self._ranks[_bank_of(name)] for name, omega in measured.items()]).sum()
        scale = (self._max_sum / total).clamp_max(1.0)  # infinite for a sum of 0, then 1
        self._by_slot[slot] = {name: omega * scale for name, omega in measured.items()}

    @torch.no_grad()
    def enter(self, slot: int) -> None:
        """Apply eq. (11): the regime in `slot` is in training."""
        self._current = slot
        for name, held in self._held.items():
            held.zero_()
            for other in sorted(self._by_slot.keys() - {slot}):  # in one order: sums are bit-equal after a restart
                held.add_(self._by_slot[other][name])

    def release(self, slot: int) -> None:
        """Remove the importance of the regime in `slot`."""
        self._by_slot.pop(slot, None)
        if self._current is not None:
            self.enter(self._current)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{self._PREFIX}{slot}.{name}": omega
            for slot, importance in self._by_slot.items()
            for name, omega in importance.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; `enter` must follow."""
        self._by_slot, self._current = {}, None
        for key, tensor in tensors.items():
            if key.startswith(self._PREFIX):
                slot, _, name = key.removeprefix(self._PREFIX).partition(".")
                self._by_slot.setdefault(int(slot), {})[name] = tensor.to(self._held[name].device, copy=True)


def _broadcast(weight_HK: Tensor, like: Tensor) -> Tensor:
    """Reshape (H, K) to (H, K, 1, ...) so that it broadcasts against `like`."""
    return weight_HK.view(*weight_HK.shape, *[1] * (like.ndim - 2))


def _bank_of(name: str) -> str:
    return name.rpartition(".")[0]
