"""Presets whose regimes share experts, as hooks of the learner: CP routing bias, consolidation, balance, stages.

At a shift the importance Omega_t of the regime that ends is added, and the current weights become the anchors (CP-MoE
eq. 13, 14). A new regime gets its CP bias alpha h from the similarity h that its probe measured (eq. 10). Where the
answers of a regime change, its part of the importance is removed.

Omega_t is computed along the path of the transient expert (`importance: transient`, eq. 6 and 7), the same for all
experts, which h weighs: their similarity to the transient expert, on the same records, as the regime leaves them. The
paper measures h before training, when the experts of a first regime are untrained and h is 0 for all: it would never be
protected. Or Omega_t is computed along the path of the experts themselves (`path`, Zenke et al. 2017), and h is 1.
"""
# Shape suffixes: H heads, K experts a head, N regime slots.

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from streamlearn.adapters.presets import Objective
from streamlearn.baselines.balance_stages import LoadBalance, LocalizedBalance, Stages
from streamlearn.baselines.importance import PATHS, RANK_DIM, Anchors, RegimeImportance, SummedImportance
from streamlearn.baselines.transient import ProbeReport, TransientExpert, probe
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
        self.transient: TransientExpert | None = None
        """That of the regime under way; None unless importance is computed from its path."""
        self.pending: dict[str, Tensor] = {}
        """Omega_t of the regime under way, to be added when it ends."""
        if wanted.anchor_strength > 0:
            self.anchors = Anchors(experts, wanted.anchor_strength, over_rank=not is_summed)
            held = self.anchors.importance
            ranks = {bank.name: bank.A.shape[RANK_DIM] for bank in banks}
            self.store: SummedImportance | RegimeImportance = (
                SummedImportance(held, banks, regimes)
                if is_summed
                else RegimeImportance(held, ranks, settings.consolidate.damping)
            )
            if wanted.importance == "transient":
                self.transient = TransientExpert(banks, seed=0)  # replaced by a probe
                self.pending = {name: torch.zeros_like(omega[:, :1]) for name, omega in held.items()}
            else:
                parameters = {f"{group.name}.{part}": p for group in experts for part, p in group.parameters.items()}
                self.path = PATHS[wanted.accumulation](parameters)

    def auxiliary_losses(self, packed: PackedBatch, examples: Sequence[Example]) -> Sequence[AuxiliaryLoss]:
        terms: list[AuxiliaryLoss] = []
        if self._objective.balance_strength:
            terms.append(LoadBalance(self._objective.balance_strength))
        types = [example.sample_type for example in examples]
        if self._objective.localized_balance and any(types):
            terms.append(LocalizedBalance(self._objective.localized_balance, packed, types, self._settings.learner))
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
        is_needed = self.transient is not None or (self._objective.bias != "none" and not is_first)
        return (self._settings.probe.warmup_tokens or 0) if is_needed else 0

    def probe(self, examples: Sequence[Example], number: int) -> Probe:
        """Train a transient expert on the records; nothing of one that did not learn is used."""
        settings = self._settings
        report = probe(
            self._learner,
            examples,
            settings.probe,
            seed=(settings.seed * 1_000_003 + number) % 2**63,  # what torch takes
            measure=None if self.transient is None else PATHS[self._objective.accumulation],
            damping=settings.consolidate.damping,
        )
        self._probed = None if report.failed else report
        heads = torch.cat([similarity_HK.mean(1) for similarity_HK in report.similarity.values()])
        omegas = [omega.flatten() for omega in report.importance.values()]
        return Probe(
            probe_tokens=report.tokens,
            probe_losses=report.losses,
            probe_failed=report.failed,
            mean_similarity=float(heads.mean()),
            similarity_range=(float(heads.min()), float(heads.max())),
            mean_importance=float(torch.cat(omegas).mean()) if omegas else None,
        )

    @torch.no_grad()
    def leave(self, slot: int, probed: Sequence[Example] = ()) -> None:
        """Add the regime's importance and move the anchors."""
        if self.anchors is None:
            return
        if self.path is not None:
            self.store.add(slot, self.path.importance(self._settings.consolidate.damping))
            self.path.restart()
        elif self.transient is not None and probed:
            similarity = self.transient.similarity(self._learner, probed)
            if not self._settings.consolidate.similarity_mask:
                similarity = {name: torch.ones_like(h_HK) for name, h_HK in similarity.items()}
            self.store.add(slot, self.pending, similarity)
        self.anchors.move()
        self.anchors.hold()

    @torch.no_grad()
    def open(self, slot: int, *, start: int | None = None) -> None:
        """Set the regime's CP bias, and what its importance will be when it ends."""
        self.release(slot)
        report, self._probed = self._probed, None
        for bank in self._learner.banks:
            if bank.bias_HKN is not None and report is not None:
                bank.bias_HKN[:, :, slot] = self._objective.bias_strength * report.similarity[bank.name]
            elif bank.bias_HKN is not None:
                bank.bias_HKN[:, :, slot] = 0.0 if start is None else bank.bias_HKN[:, :, start]
        if report is not None and self.transient is not None:
            self.transient = report.expert
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
        self.open(slot)
        if slot == self._current:
            self._current = None

    def _hold_for(self, slot: int) -> None:
        self._current = slot
        if self.anchors is not None:
            self.store.enter(slot)
            self.anchors.hold()

    def importance(self) -> Mapping[str, Tensor]:
        return {} if self.anchors is None else self.anchors.importance

    def state(self) -> dict[str, Tensor]:
        parts = self._fixed()
        tensors = {f"baseline.{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
        counts = [NO_SLOT if self._current is None else self._current, 0 if self.stages is None else self.stages.steps]
        stored = {} if self.anchors is None else self.store.state()
        return {**tensors, **stored, "baseline.counts": torch.tensor(counts)}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for part, named in self._fixed().items():
            for name, tensor in named.items():
                tensor.copy_(tensors[f"baseline.{part}.{name}"])
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
        parts: dict[str, dict[str, Tensor]] = {"pending_importance": self.pending}
        if self.transient is not None:
            parts["transient"] = dict(self.transient.parameters())
        if self.anchors is not None:
            parts["anchors"] = self.anchors.state()
        if self.path is not None:
            parts["path"] = self.path.state()
        return parts
