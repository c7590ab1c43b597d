"""The training step.

    1. test: the batch's loss under the weights before the update (prequential loss);
    2. guard: a non-finite loss or gradient ends the step here, weights and optimizer untouched;
    3. train: one MaskedAdamW update.

One forward and one backward pass serve 1 and 3: the loss that is differentiated is the loss that is reported.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamlearn.adapters.model import banks, reset_routed
from streamlearn.learner.loss import row_loss
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.learner.row import pack
from streamlearn.settings import LearnerSettings
from streamlearn.stream.batch import Batch


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


class Learner:
    """Owns model and optimizer. One thread calls it; nothing else touches what it owns."""

    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        """The PEFT model, for what concerns its adapter."""
        self.forward = model.get_base_model()
        """The same backbone and adapter without PEFT's wrapper, for forward passes."""
        self.device = device
        self.number = 0
        self.updates = 0
        self._settings = settings
        self._clock = clock
        self.optimizer = MaskedAdamW(_groups(model), settings)

    def step(self, batch: Batch) -> Step:
        """Test, guard, train. A batch without examples is no step: do not pass one."""
        started = self._clock()
        self.number += 1
        row = pack(batch.examples, self.device)
        reset_routed(self.model)
        # 1.
        loss = row_loss(self.forward, row)
        mean = float(loss.mean.detach())
        refusal, norm = (None, math.nan) if math.isfinite(mean) else (f"loss is {mean}", math.nan)
        # 2.
        if refusal is None:
            torch.autograd.backward(loss.mean)
            norm = float(torch.nn.utils.clip_grad_norm_(self.optimizer.parameters(), self._settings.max_grad_norm))
            refusal = None if math.isfinite(norm) else f"gradient norm is {norm}"
        # 3.
        if refusal is None:
            self.updates += 1
            self.optimizer.step(self._learning_rate())
        self.optimizer.zero_grad()
        sums, counts = loss.per_record(row)
        return Step(
            number=self.number,
            loss=mean,
            record_losses=tuple((sums / counts).tolist()),
            tokens=batch.num_tokens,
            learned_tokens=len(row.target_L),
            grad_norm=norm,
            seconds=self._clock() - started,
            refusal=refusal,
        )

    def pass_over(self) -> None:
        """Count a batch whose every record was set aside, so that its snapshot has a number of its own."""
        self.number += 1

    def _learning_rate(self) -> float:
        warmup = self._settings.warmup_steps
        return self._settings.lr * min(1.0, self.updates / warmup if warmup else 1.0)

    def state(self) -> dict[str, Tensor]:
        """Everything beside the adapter that the next step depends on."""
        return {
            **{f"optimizer.{name}": tensor for name, tensor in self.optimizer.state_dict().items()},
            "learner.counts": torch.tensor([self.number, self.updates]),
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state`, in place."""
        self.number, self.updates = (int(count) for count in tensors["learner.counts"])
        prefix = "optimizer."
        self.optimizer.load_state_dict(
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        )


def _groups(model: Any) -> list[Group]:
    """For each bank its experts, masked by routing, and its router, which every step moves."""
    groups = []
    for bank in banks(model):
        groups.append(Group(bank.name, {"A": bank.A, "B": bank.B}, bank.routed_HK))
        if bank.router is not None:
            groups.append(Group(f"{bank.name}.router", {"weight": bank.router}, None))
    return groups
