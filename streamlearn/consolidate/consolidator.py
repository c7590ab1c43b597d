"""What happens to the learner at a shift, beside the probe.

    close    Omega += h Omega_t for every expert, anchors to where the weights are now          CP-MoE eq. 13, 14
    open     the new regime's CP bias: soft, alpha h (eq. 10), or claims                        `claims`
    release  the answers of a regime changed: take away its part of the importance

Omega_t is measured along the training of the stable experts themselves (`importance: path`, Zenke et al. 2017; h is 1,
since every expert is measured in place), or along the transient expert's path before it (`transient`, eq. 6 and 7).
The question of coordinates. Element by element, the importance of a transient expert with an A of its own says nothing
about a stable expert with another A. Three ways out are options (`coordinates`): start it from the bank's own A, keep
its own A and carry over what no rotation of the rank changes, or ignore it as the paper does. Measured on eight SuperNI
tasks in a row (CP-MoE's order 1, 200 records each, one pass, nano backbone, routing unbiased so that all tasks share
experts, one seed; accuracy on test tokens, forgetting):

    | importance               | lambda 1        | lambda 10       |
    |--------------------------|-----------------|-----------------|
    | path                     | AP .356 AF .018 | AP .312 AF .006 |
    | transient, bank's A      | AP .357 AF .020 | AP .307 AF .005 |
    | transient, A of its own  | AP .366 AF .019 | AP .318 AF .010 |
    | none (lambda 0)          | AP .350 AF .034 |                 |

All lie on one frontier: lambda decides, and one seed tells no two of them apart. So the plainest is the default: `path`
is measured where it is used, costs no warm-up, and there is no question of coordinates in it.

Omega is a sum over regimes; how much of an expert's total came from which regime is kept as one number an expert and
slot, so `release` scales the expert's Omega by the others' share.
"""
# Shape suffixes: H heads, K experts a head, N regime slots.

from collections.abc import Mapping

import torch
from torch import Tensor

from streamlearn.adapters.model import Bank
from streamlearn.consolidate.claims import as_bias, claim, claimed
from streamlearn.learner.learner import Learner
from streamlearn.probe.probe import ProbeReport
from streamlearn.settings import ConsolidateSettings


class Consolidator:
    """Changes biases, importance and anchors of one learner; a snapshot holds its state."""

    def __init__(
        self, learner: Learner, settings: ConsolidateSettings, *, experts_claimed: int, regimes: int, seed: int
    ) -> None:
        self._learner = learner
        self._settings = settings
        self._experts_claimed = experts_claimed
        self._seed = seed
        device = learner.device
        shapes = {bank.name: bank.A.shape[:2] for bank in learner.banks}
        self.mass: dict[str, Tensor] = {
            name: torch.zeros(*shape, regimes, device=device) for name, shape in shapes.items()
        }
        """Importance that each slot has added to each expert, summed over the expert's weights, (H, K, N) by bank."""
        self.similarity: dict[str, Tensor] = {
            name: torch.zeros(*shape, regimes, device=device) for name, shape in shapes.items()
        }
        """CKA that each slot's probe found, (H, K, N) by bank."""
        transient = settings.importance == "transient" and learner.objective.anchor_strength > 0
        self._prospect: dict[str, Tensor] = {
            f"{bank.name}.{part}": torch.zeros_like(parameter)
            for bank in learner.banks
            for part, parameter in (("A", bank.A), ("B", bank.B))
            if transient
        }
        """Omega_t of the regime under way, which `close` will add."""

    @torch.no_grad()
    def close(self, slot: int) -> None:
        """The stretch of the regime in `slot` is over: hold on to what it taught."""
        learner = self._learner
        if learner.anchors.strength == 0:
            return
        if learner.path is not None:
            importance: Mapping[str, Tensor] = learner.path.importance(self._settings.damping)
            weight = None
            learner.path.restart()
        else:
            importance = self._prospect
            weight = {name: similarity[:, :, slot] for name, similarity in self.similarity.items()}
        learner.anchors.consolidate(importance, weight)
        for bank in learner.banks:
            added_HK = _sums(importance[f"{bank.name}.A"]) + _sums(importance[f"{bank.name}.B"])
            self.mass[bank.name][:, :, slot] += added_HK if weight is None else added_HK * weight[bank.name]
        for omega in self._prospect.values():
            omega.zero_()

    @torch.no_grad()
    def open(self, slot: int, number: int, report: ProbeReport | None) -> None:
        """A regime that was never seen gets `slot` and its bias; `number` is its own, for draws."""
        self.forget(slot)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        for bank in self._learner.banks:
            if report is not None:
                self.similarity[bank.name][:, :, slot] = report.similarity[bank.name]
            if bank.bias_HKN is not None:
                bank.bias_HKN[:, :, slot] = self._bias(bank, bank.bias_HKN, slot, generator)
        if report is not None:
            for name, omega in self._prospect.items():
                omega.copy_(report.importance[name])

    @torch.no_grad()
    def release(self, slot: int) -> None:
        """Let the experts of the regime in `slot` go: its answers changed, and the newest are right."""
        if self._learner.anchors.strength == 0:
            return
        share = {}
        for name, mass_HKN in self.mass.items():
            total_HK = mass_HKN.sum(2)
            share[name] = torch.where(total_HK > 0, mass_HKN[:, :, slot] / total_HK, 0.0)
            mass_HKN[:, :, slot] = 0.0
        self._learner.anchors.release(share)
        if self._learner.path is not None:
            self._learner.path.restart()  # what it measured led to the old answers

    def forget(self, slot: int) -> None:
        """The regime in `slot` is no longer remembered: its claims and its part of the importance go with it."""
        self.release(slot)
        for bank in self._learner.banks:
            self.similarity[bank.name][:, :, slot] = 0.0
            if bank.bias_HKN is not None:
                bank.bias_HKN[:, :, slot] = 0.0

    def _bias(self, bank: Bank, bias_HKN: Tensor, slot: int, generator: torch.Generator) -> Tensor:
        objective, similarity_HK = self._learner.objective, self.similarity[bank.name][:, :, slot]
        if objective.bias == "soft":
            return objective.bias_strength * similarity_HK
        if objective.bias == "claims":
            claims_HK = claimed(bias_HKN).sum(2)
            return as_bias(claim(claims_HK, similarity_HK, self._experts_claimed, generator))
        return torch.zeros_like(similarity_HK)

    def state(self) -> dict[str, Tensor]:
        """For a snapshot; live tensors."""
        parts = {"mass": self.mass, "similarity": self.similarity, "prospect": self._prospect}
        return {f"consolidate.{part}.{name}": tensor for part, held in parts.items() for name, tensor in held.items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state`, in place."""
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])


def _sums(parameter: Tensor) -> Tensor:
    """Over everything but heads and experts."""
    return parameter.flatten(2).sum(2)
