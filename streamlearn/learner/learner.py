"""The training step.

    1. test: the batch's loss under the weights before the update (prequential loss);
    2. guard: a non-finite loss or gradient ends the step here, weights and optimizer untouched;
    3. train: one MaskedAdamW update.

One forward and one backward pass serve 1 and 3: the loss that is differentiated is the loss that is reported, plus

    L = L_task + lambda L_reg + gamma L_aux                                                    (1)

what the preset's objective adds (CP-MoE, arXiv 2605.20247, eq. 15; L_lbc in LoRAMoE's).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from streamlearn.adapters.model import Bank, banks, reset_load
from streamlearn.adapters.presets import ATTENTION_LINEARS, Objective
from streamlearn.adapters.routing_context import routing_context
from streamlearn.learner.anchor import Anchors
from streamlearn.learner.balance_hooks import LoadBalance, LocalizedBalance
from streamlearn.learner.importance import PathIntegral
from streamlearn.learner.loss import PackedLoss, packed_loss
from streamlearn.learner.oom_retry import in_parts, shares
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.learner.packing import PackedBatch, pack
from streamlearn.learner.stages import Stages
from streamlearn.settings import LearnerSettings
from streamlearn.stream.decode import Example


@dataclass
class PassTotals:
    """What the forward passes over a batch's parts showed."""

    loss: float = 0.0
    losses: list[float] = field(default_factory=list)
    correct: list[bool] = field(default_factory=list)
    tokens: int = 0
    learned_tokens: int = 0

    def add(self, packed: PackedBatch, loss: PackedLoss, weight: float) -> None:
        """One more part, of this share of the batch's loss."""
        sums, counts = loss.per_record(packed)
        correct = torch.bincount(packed.segment_ids_L[loss.correct_L], minlength=packed.num_records)
        self.loss += weight * float(loss.mean.detach())
        self.losses += (sums / counts).tolist()
        self.correct += (correct == counts).tolist()
        self.tokens += packed.input_ids.shape[1]
        self.learned_tokens += len(packed.target_L)


PLAIN = Objective()
"""The task loss and nothing else."""


@dataclass(frozen=True)
class Step:
    """What one step measured."""

    number: int
    """1 for the first; refused steps have a number too."""
    loss: float
    """Prequential loss, mean over the batch's learned tokens, nats per token."""
    record_losses: tuple[float, ...]
    """The same per record, in batch order."""
    tokens: int
    """Tokens read."""
    learned_tokens: int
    """Tokens with a label."""
    grad_norm: float
    """Before clipping."""
    seconds: float
    refusal: str | None = None
    """Why the update was not made; None when it was."""
    record_correct: tuple[bool, ...] = ()
    """Whether every learned token of each record was the most probable one, before the update."""


class Learner:
    """Owns model and optimizer. One thread calls it; nothing else touches what it owns."""

    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        *,
        objective: Objective = PLAIN,
        integrate: bool = False,
    ) -> None:
        self.model = model
        """The PEFT model, for what concerns its adapter."""
        self.forward = model.get_base_model()
        """The same backbone and adapter without PEFT's wrapper, for forward passes."""
        self.banks: tuple[Bank, ...] = tuple(banks(model))
        self.device = device
        self.objective = objective
        self.number = 0
        self.updates = 0
        self._settings = settings
        self._clock = clock
        experts = [Group(bank.name, {"A": bank.A, "B": bank.B}, bank.load_HK) for bank in self.banks]
        self.optimizer = MaskedAdamW([*experts, *_routers(self.banks, objective.router_lr)], settings)
        self.anchors = Anchors(experts, objective.anchor_strength)
        self.path = PathIntegral(_by_name(experts)) if integrate else None
        """Importance along the training of the experts themselves; None where nobody asks for it."""
        attention = frozenset(b.name for b in self.banks if b.name.rpartition(".")[2] in ATTENTION_LINEARS)
        self.stages = Stages(settings, attention) if objective.staged else None
        self._experts = frozenset(group.name for group in experts)

    def step(
        self,
        examples: Sequence[Example],
        slots: Sequence[int] | None = None,
        *,
        parts: int = 1,
        on_record: Callable[[int], None] = lambda _: None,
    ) -> Step:
        """Test, guard, train on at least one example; `slots` are their regimes.

        The batch passes in so many `parts`, more when memory does not suffice; `on_record` hears the index of a part's
        first example before it.

        Raises:
            RuntimeError or MemoryError: no memory even for the smallest parts; weights and optimizer are untouched.
        """
        started = self._clock()
        self.number += 1

        def work(parts: int) -> PassTotals:
            return self._pass(examples, slots, parts, on_record)

        # 1.
        passed = in_parts(work, parts, len(examples), self.optimizer.zero_grad)
        refusal, norm = (None, math.nan) if math.isfinite(passed.loss) else (f"loss is {passed.loss}", math.nan)
        # 2.
        if refusal is None:
            norm = self._clip()
            refusal = None if math.isfinite(norm) else f"gradient norm is {norm}"
        # 3.
        if refusal is None:
            self._update(clipped=max(1.0, norm / self._settings.max_grad_norm))
        self.optimizer.zero_grad()
        return Step(
            number=self.number,
            loss=passed.loss,
            record_losses=tuple(passed.losses),
            record_correct=tuple(passed.correct),
            tokens=passed.tokens,
            learned_tokens=passed.learned_tokens,
            grad_norm=norm,
            seconds=self._clock() - started,
            refusal=refusal,
        )

    def _pass(
        self, examples: Sequence[Example], slots: Sequence[int] | None, parts: int, on_record: Callable[[int], None]
    ) -> PassTotals:
        """Forward and backward, memory.py's eq. (1); no gradients are to be used when the loss is not finite."""
        reset_load(self.model)
        learned = sum(each.num_learned for each in examples)
        passed = PassTotals()
        for share in shares(len(examples), parts):
            on_record(share.start)
            packed = pack(examples[share], self.device, None if slots is None else slots[share])
            balances = self._balances(packed, examples[share])
            with routing_context(self.model, packed.context(explore=True, hooks=balances)):
                loss = packed_loss(self.forward, packed)
            weight = len(packed.target_L) / learned
            passed.add(packed, loss, weight)
            if math.isfinite(passed.loss):
                torch.autograd.backward(weight * sum((balance.loss() for balance in balances), start=loss.mean))
        return passed

    def skip_step(self) -> None:
        """Count a batch whose every record was set aside, so that its snapshot has a number of its own."""
        self.number += 1

    def served(self) -> list[Tensor]:
        """All that an answer depends on beside the backbone: weights and CP biases."""
        biases = [bank.bias_HKN for bank in self.banks if bank.bias_HKN is not None]
        return [*self.optimizer.parameters(), *biases]

    def _balances(self, packed: PackedBatch, examples: Sequence[Example]) -> tuple[LoadBalance | LocalizedBalance, ...]:
        balances: list[LoadBalance | LocalizedBalance] = []
        if self.objective.balance_strength:
            balances.append(LoadBalance(self.objective.balance_strength))
        types = [example.sample_type for example in examples]
        if self.objective.localized_balance and any(types):
            known = self._settings.sample_types
            balances.append(LocalizedBalance(self.objective.localized_balance, packed, types, known))
        return tuple(balances)

    def _clip(self) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.optimizer.parameters(), self._settings.max_grad_norm))

    def _update(self, clipped: float) -> None:
        """`clipped`: by how much gradients were scaled down."""
        self.updates += 1
        if self.stages is not None:
            self.stages.apply(self.optimizer.groups, self._experts)
        if self.path is not None:
            self.path.before()
        self.optimizer.step(self._learning_rate())
        if self.path is not None:
            self.path.after([p.grad for bank in self.banks for p in (bank.A, bank.B)], scale=clipped)

    def _learning_rate(self) -> float:
        warmup = self._settings.warmup_steps
        return self._settings.lr * min(1.0, self.updates / warmup if warmup else 1.0)

    def state(self) -> dict[str, Tensor]:
        """Everything beside the adapter that the next step depends on."""
        parts = {"optimizer": self.optimizer.state_dict(), "anchors": self.anchors.state_dict()}
        if self.path is not None:
            parts["path"] = self.path.state_dict()
        parts["bias"] = {bank.name: bank.bias_HKN for bank in self.banks if bank.bias_HKN is not None}
        tensors = {f"{part}.{name}": tensor for part, held in parts.items() for name, tensor in held.items()}
        if self.stages is not None:
            tensors["learner.stages"] = torch.tensor(self.stages.steps)
        return {**tensors, "learner.counts": torch.tensor([self.number, self.updates])}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state`, in place."""
        self.number, self.updates = (int(count) for count in tensors["learner.counts"])
        if self.stages is not None:
            self.stages.steps = int(tensors["learner.stages"])
        self.optimizer.load_state_dict(_part(tensors, "optimizer."))
        self.anchors.load_state_dict(_part(tensors, "anchors."))
        if self.path is not None:
            self.path.load_state_dict(_part(tensors, "path."))
        for bank in self.banks:
            if bank.bias_HKN is not None:
                bank.bias_HKN.copy_(tensors[f"bias.{bank.name}"])


def _routers(all_banks: Sequence[Bank], lr_scale: float) -> list[Group]:
    """Every router that there is: each step moves them all."""
    return [
        Group(f"{bank.name}.router", {"weight": bank.router}, None, lr_scale=lr_scale)
        for bank in all_banks
        if bank.router is not None
    ]


def _by_name(groups: Sequence[Group]) -> dict[str, Tensor]:
    return {f"{group.name}.{name}": p for group in groups for name, p in group.parameters.items()}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
