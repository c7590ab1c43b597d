"""Presets whose regimes share experts, as hooks of the learner: CP routing bias, consolidation, balance, stages.

At a shift the importance Omega_t of the regime that ends is added, and the current weights become the anchors (CP-MoE
eq. 13, 14). A new regime gets its CP bias alpha h from the similarity h that its probe measured (eq. 10). Where the
answers of a regime change, its part of the importance is removed.

Omega_t is computed along the training path of the stable experts (`importance: path`, Zenke et al. 2017; h is 1,
because every expert is measured itself), or along the path of the transient expert (`transient`, eq. 6 and 7).

Coordinates. The importance of the elements of a transient expert with its own A does not apply to the elements of a
stable expert with another A. Either the transient expert starts with the bank's A, or the problem is ignored, as the
paper does (`coordinates`).
Measured on a sequence of eight SuperNI tasks (CP-MoE's order 1, 200 records each, one pass, nano backbone, no routing
bias so that all tasks share experts, one seed; accuracy on test tokens, forgetting):

    | importance               | lambda 1        | lambda 10       |
    |--------------------------|-----------------|-----------------|
    | path                     | AP .356 AF .018 | AP .312 AF .006 |
    | transient, bank's A      | AP .357 AF .020 | AP .307 AF .005 |
    | transient, A of its own  | AP .366 AF .019 | AP .318 AF .010 |
    | none (lambda 0)          | AP .350 AF .034 |                 |

All lie on one frontier: lambda determines the trade-off, and one seed does not separate them. `path` is the default: it
measures the weights that it protects, and needs no warm-up. The table is of importance that adds up as published
(`accumulation: sum`, preset `cp-moe`); with `per_regime`, the default elsewhere, regimes are kept apart.
"""
# Shape suffixes: H heads, K experts a head, N regime slots.

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from streamlearn.adapters.presets import Objective
from streamlearn.adapters.tuner import copy_slots
from streamlearn.baselines.balance_stages import LoadBalance, LocalizedBalance, Stages
from streamlearn.baselines.importance import PATHS, RANK_DIM, Anchors, RegimeImportance, SummedImportance
from streamlearn.baselines.transient import ProbeReport, probe
from streamlearn.learner.learner import AuxiliaryLoss, Hooks, Learner, Probe
from streamlearn.learner.loss import PackedBatch
from streamlearn.settings import Settings
from streamlearn.stream.record import Example

NO_SLOT = -1


class BaselineHooks(Hooks):
    """The terms and mechanisms of one preset, as its objective says."""

    def __init__(self, learner: Learner, wanted: Objective, settings: Settings) -> None:
        self._learner = learner
        self._objective = wanted
        self._settings = settings
        self._probed: ProbeReport | None = None
        """Of the regime that `open` comes for next."""
        self._current: int | None = None
        """Slot of the regime whose segment is under way, which the training path is of."""
        self.stages = Stages(settings.learner) if wanted.staged else None
        banks = learner.banks
        self._experts = [parameter for bank in banks for parameter in (bank.A, bank.B)]
        experts = [group for group in learner.optimizer.groups if group.name in {bank.name for bank in banks}]
        is_summed, regimes = wanted.accumulation == "sum", settings.shift.max_regimes
        self.anchors: Anchors | None = None
        self.path = None
        """Path of the experts' own training; None unless importance is computed from it."""
        self.pending: dict[str, Tensor] = {}
        """Omega_t of the regime under way, to be added when it ends; empty unless a transient expert measures it."""
        if wanted.anchor_strength > 0:
            self.anchors = Anchors(experts, wanted.anchor_strength, over_rank=not is_summed)
            held = self.anchors.importance
            ranks = {bank.name: bank.A.shape[RANK_DIM] for bank in banks}
            self.store: SummedImportance | RegimeImportance = (
                SummedImportance(held, banks, regimes)
                if is_summed
                else RegimeImportance(held, ranks, settings.consolidate.damping)
            )
            if settings.consolidate.importance == "transient":
                self.pending = {name: torch.zeros_like(omega) for name, omega in held.items()}
            else:
                parameters = {f"{group.name}.{part}": p for group in experts for part, p in group.parameters.items()}
                self.path = PATHS[wanted.accumulation](parameters)
        shapes = {bank.name: bank.A.shape[:2] for bank in banks if wanted.compares}
        self._similarity = {name: torch.zeros(*shape, regimes, device=learner.device) for name, shape in shapes.items()}

    def auxiliary_losses(self, packed: PackedBatch, examples: Sequence[Example]) -> Sequence[AuxiliaryLoss]:
        terms: list[AuxiliaryLoss] = []
        if self._objective.balance_strength:
            terms.append(LoadBalance(self._objective.balance_strength))
        types = [example.sample_type for example in examples]
        if self._objective.localized_balance and any(types):
            names = self._settings.learner.sample_types
            terms.append(LocalizedBalance(self._objective.localized_balance, packed, types, names))
        return terms

    def before_update(self) -> None:
        if self.path is not None:
            self._plain = [parameter.grad for parameter in self._experts]  # not normalized by a stage
            self.path.before()
        if self.stages is not None:
            self.stages.apply(self._learner.optimizer.active, frozenset(bank.name for bank in self._learner.banks))

    def after_update(self, clipped: float) -> None:
        if self.path is not None:
            pairs = zip(self._experts, self._plain, strict=True)
            self.path.after([None if p.grad is None else plain for p, plain in pairs], scale=clipped)
            del self._plain

    def probe_tokens(self, *, is_first: bool) -> int:
        if not self._objective.compares or (is_first and not self.pending):
            return 0
        return self._settings.probe.warmup_tokens or 0

    def probe(self, examples: Sequence[Example], number: int) -> Probe:
        """Train a transient expert on the records and discard it."""
        settings = self._settings
        seed = settings.seed * 1_000_003 + number
        accumulation = self._objective.accumulation
        report = probe(self._learner, examples, settings.probe, settings.consolidate, accumulation, seed=seed)
        self._probed = report
        means = [similarity_HK.mean() for similarity_HK in report.similarity.values()]
        return Probe(report.tokens, float(torch.stack(means).mean()))

    @torch.no_grad()
    def leave(self, slot: int) -> None:
        """Add the regime's importance and move the anchors."""
        if self.anchors is None:
            return
        if self.path is not None:
            self.store.add(slot, self.path.importance(self._settings.consolidate.damping))
            self.path.restart()
        else:
            h = {name: similarity_HKN[:, :, slot] for name, similarity_HKN in self._similarity.items()}
            self.store.add(slot, self.pending, h)
        self.anchors.move()
        self.anchors.hold()
        self._clear_pending()

    @torch.no_grad()
    def open(self, slot: int, *, start: int | None = None) -> None:
        """Set the regime's CP bias, and what its importance will be when it ends."""
        self._forget(slot)
        report, self._probed = self._probed, None
        for name, similarity_HKN in self._similarity.items():
            if report is not None:
                similarity_HKN[:, :, slot] = report.similarity[name]
            elif start is not None:
                similarity_HKN[:, :, slot] = similarity_HKN[:, :, start]
        self._set_bias(slot)
        if report is not None:
            for name, omega in self.pending.items():
                omega.copy_(report.importance[name])

    def enter(self, slot: int) -> None:
        """Train a regime, new or returning: hold what the others need."""
        self._hold_for(slot)
        if self.stages is not None:
            self.stages.steps = 0

    @torch.no_grad()
    def release(self, slot: int) -> None:
        """Remove the regime's importance. The training path goes on where it is another regime's."""
        if self.anchors is None:
            return
        self.store.release(slot)
        self.anchors.hold()
        if self.path is not None and slot == self._current:
            self.path.restart()  # it measured the way to the old targets

    @torch.no_grad()
    def drop(self, slot: int) -> None:
        """Remove the regime's bias and importance; experts that regimes share keep their weights."""
        self._forget(slot)
        if slot == self._current:
            self._clear_pending()
            self._current = None

    def _forget(self, slot: int) -> None:
        self.release(slot)
        for similarity_HKN in self._similarity.values():
            similarity_HKN[:, :, slot] = 0.0
        self._set_bias(slot)

    def _set_bias(self, slot: int) -> None:
        for bank in self._learner.banks:
            if bank.bias_HKN is not None:
                bank.bias_HKN[:, :, slot] = self._objective.bias_strength * self._similarity[bank.name][:, :, slot]

    def _hold_for(self, slot: int) -> None:
        self._current = slot
        if self.anchors is not None:
            self.store.enter(slot)
            self.anchors.hold()

    def _clear_pending(self) -> None:
        for omega in self.pending.values():
            omega.zero_()

    def importance(self) -> Mapping[str, Tensor]:
        return {} if self.anchors is None else self.anchors.importance

    def state(self) -> dict[str, Tensor]:
        parts = {**self._fixed(), "similarity": self._similarity}
        tensors = {f"baseline.{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
        counts = [NO_SLOT if self._current is None else self._current, 0 if self.stages is None else self.stages.steps]
        stored = {} if self.anchors is None else self.store.state()
        return {**tensors, **stored, "baseline.counts": torch.tensor(counts)}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for part, named in self._fixed().items():
            for name, tensor in named.items():
                tensor.copy_(tensors[f"baseline.{part}.{name}"])
        for name, similarity_HKN in self._similarity.items():
            copy_slots(similarity_HKN, tensors[f"baseline.similarity.{name}"])
        current, steps = (int(count) for count in tensors["baseline.counts"])
        if self.stages is not None:
            self.stages.steps = steps
        if self.anchors is not None:
            self.store.load_state(tensors)
            self.anchors.hold()
        self._current = None
        if current != NO_SLOT:
            self._hold_for(current)

    def _fixed(self) -> dict[str, dict[str, Tensor]]:
        """The tensors whose shapes do not depend on the number of regimes."""
        parts = {"pending_importance": self.pending}
        if self.anchors is not None:
            parts["anchors"] = self.anchors.state()
        if self.path is not None:
            parts["path"] = self.path.state()
        return parts
