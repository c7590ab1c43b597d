"""What a shift changes in the learner, apart from the probe.

    close    take in the regime's importance Omega_t; the current weights become the anchors       CP-MoE eq. 13, 14
    open     give the new regime an adapter of its own, or where experts are shared its CP bias alpha h     eq. 10
    enter    train a regime, new or returning: hold what the others need
    release  the regime's targets changed: remove its part of the importance

An adapter of one regime is trained on the records of that regime only, so it needs no importance and has none.

Omega_t is computed along the training path of the stable experts (`importance: path`, Zenke et al. 2017; h is 1,
because every expert is measured itself), or along the path of the transient expert (`transient`, eq. 6 and 7).

Coordinates. The importance of the elements of a transient expert with its own A does not apply to the elements of a
stable expert with another A. There are three options (`coordinates`): initialize the transient expert with the bank's
A; use its own A and carry over what is invariant to rotations of the rank; or ignore the problem, as the paper does.
Measured on a sequence of eight SuperNI tasks (CP-MoE's order 1, 200 records each, one pass, nano backbone, no routing
bias so that all tasks share experts, one seed; accuracy on test tokens, forgetting):

    | importance               | lambda 1        | lambda 10       |
    |--------------------------|-----------------|-----------------|
    | path                     | AP .356 AF .018 | AP .312 AF .006 |
    | transient, bank's A      | AP .357 AF .020 | AP .307 AF .005 |
    | transient, A of its own  | AP .366 AF .019 | AP .318 AF .010 |
    | none (lambda 0)          | AP .350 AF .034 |                 |

All lie on one frontier: lambda determines the trade-off, and one seed does not separate them. The simplest is the
default: `path` measures the weights that it protects, needs no warm-up, and has no problem of coordinates.

The table is of importance that adds up as published (`accumulation: sum`, `summed_importance`). `per_regime`, the
default of all presets but `cp-moe`, measures the path without gradient noise (`signal_integral`) and keeps regimes
apart (`regime_importance`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from streamlearn.adapters.tuner import Bank, copy_slots
from streamlearn.baselines.importance import ImportanceStore, RegimeImportance, SummedImportance
from streamlearn.baselines.transient import ProbeReport
from streamlearn.learner.importance import RANK_DIM
from streamlearn.learner.learner import Learner
from streamlearn.settings import ConsolidateSettings

# Shape suffixes: H heads, K experts a head, N regime slots.


_SIMILARITY, _PENDING = "consolidate.similarity.", "consolidate.prospect."
"""Prefixes of names in snapshots."""


class Consolidator:
    """Updates biases, importance and anchors of one learner at a shift."""

    def __init__(self, learner: Learner, settings: ConsolidateSettings, *, regimes: int, seed: int) -> None:
        self._learner = learner
        self._settings = settings
        self._seed = seed
        device = learner.device
        self._shared: tuple[Bank, ...] = () if learner.per_regime else learner.banks
        shapes = {bank.name: bank.A.shape[:2] for bank in self._shared}
        held = learner.anchors.importance()
        self.store: ImportanceStore = (
            SummedImportance(held, self._shared, regimes)
            if learner.objective.accumulation == "sum"
            else RegimeImportance(held, {bank.name: bank.A.shape[RANK_DIM] for bank in self._shared}, settings.damping)
        )
        """Importance by regime."""
        self.similarity: dict[str, Tensor] = {
            name: torch.zeros(*shape, regimes, device=device) for name, shape in shapes.items()
        }
        """CKA from the probe of each slot's regime, (H, K, N) by bank."""
        transient = settings.importance == "transient" and learner.objective.anchor_strength > 0
        self._pending: dict[str, Tensor] = (
            {name: torch.zeros_like(omega) for name, omega in held.items()} if transient else {}
        )
        """Omega_t of the current regime, to be added by `close`; empty unless it comes from the transient expert."""
        self._current: int | None = None
        """Slot of the regime whose segment is under way, which the training path is of."""

    @torch.no_grad()
    def close(self, slot: int) -> None:
        """End the segment of the regime in `slot`: take in its importance and move the anchors."""
        learner = self._learner
        if learner.anchors.strength == 0:
            return
        if learner.path is not None:
            importance: Mapping[str, Tensor] = learner.path.importance(self._settings.damping)
            weight = None
            learner.path.restart()
        else:
            importance = self._pending
            weight = {name: similarity[:, :, slot] for name, similarity in self.similarity.items()}
        self.store.add(slot, importance, weight)
        learner.anchors.move()
        learner.anchors.hold()
        for omega in self._pending.values():
            omega.zero_()

    @torch.no_grad()
    def open(self, slot: int, number: int, report: ProbeReport | None, *, start: int | None = None) -> None:
        """Give a new regime its adapter or its bias.

        Args:
            slot: The regime's slot; what it had before is forgotten.
            number: The regime's number, which seeds the weights of its adapter.
            report: Its probe; None without one.
            start: Slot of the regime whose adapter or bias it starts from; None: from nothing.
        """
        self.forget(slot)
        if self._learner.per_regime:
            self._learner.add_regime(slot, self._seed * 1_000_003 + number, start=start)
        for bank in self._shared:
            similarity_HKN = self.similarity[bank.name]
            if report is not None:
                similarity_HKN[:, :, slot] = report.similarity[bank.name]
            elif start is not None:
                similarity_HKN[:, :, slot] = similarity_HKN[:, :, start]
            if bank.bias_HKN is not None:
                bank.bias_HKN[:, :, slot] = self._learner.objective.bias_strength * similarity_HKN[:, :, slot]
        if report is not None:
            for name, omega in self._pending.items():
                omega.copy_(report.importance[name])

    def enter(self, slot: int) -> None:
        """Begin a segment of the regime in `slot`, and after `load_state` go on with it."""
        self._current = slot
        self.store.enter(slot)
        self._learner.anchors.hold()

    @torch.no_grad()
    def release(self, slot: int) -> None:
        """Remove the importance of the regime in `slot`: its targets changed, and the newest are correct.

        The training path goes on where it is another regime's.
        """
        if self._learner.anchors.strength == 0:
            return
        self.store.release(slot)
        self._learner.anchors.hold()
        if self._learner.path is not None and slot == self._current:
            self._learner.path.restart()  # it measured the way to the old targets

    @torch.no_grad()
    def drop(self, slot: int) -> None:
        """Remove what the regime in `slot` has in the learner; experts that regimes share keep their weights."""
        self.forget(slot)
        if slot == self._current:
            for omega in self._pending.values():
                omega.zero_()
            self._current = None
        if self._learner.per_regime:
            self._learner.remove_regime(slot)

    def forget(self, slot: int) -> None:
        """Free the slot of a regime that is no longer remembered: remove its bias and its part of the importance."""
        self.release(slot)
        self._clear_bias(slot)

    def _clear_bias(self, slot: int) -> None:
        for bank in self._shared:
            self.similarity[bank.name][:, :, slot] = 0.0
            if bank.bias_HKN is not None:
                bank.bias_HKN[:, :, slot] = 0.0

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a snapshot, not copied."""
        similarity = {f"{_SIMILARITY}{name}": tensor for name, tensor in self.similarity.items()}
        pending = {f"{_PENDING}{name}": tensor for name, tensor in self._pending.items()}
        return {**similarity, **pending, **self.store.state()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; `enter` must follow if a segment is under way."""
        self._current = None
        for name, similarity_HKN in self.similarity.items():
            copy_slots(similarity_HKN, tensors[f"{_SIMILARITY}{name}"])
        for name, omega in self._pending.items():
            omega.copy_(tensors[f"{_PENDING}{name}"])
        self.store.load_state(tensors)
