"""Dark experience replay (DER++): replay of records together with the logits that the model had for them.

    L = L(batch) + alpha E_(x, z)~M [ mean (z - h(x))^2 ] + beta E_(x, y)~M [ L(x, y) ]           (1)

Buzzega et al. 2020, eq. 6; both terms draw their own records from the memory M, a reservoir sample, as many as the
batch has. z are the logits under the weights that the record was first trained on.

Simplified: logits are kept for answer tokens only, and of these the `TOP` largest; the square in (1) is averaged over
them. The full logits of one answer token take as many bytes as dozens of records. The memory holds as many records as
that of `replay`, as in the paper's comparison, so their logits come on top of its bytes.
"""
# Shape suffixes: L learned tokens, K logits kept of each.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.learn.baselines.baseline import Baseline
from benchmarks.learn.baselines.reservoir import Reservoir
from streamlearn.adapters.context import routing_context
from streamlearn.learner.learner import Learner, Step
from streamlearn.learner.loss import pack, packed_logits, packed_loss
from streamlearn.stream.record import Example

ALPHA = 0.1
"""alpha of eq. (1)."""
BETA = 0.5
"""beta of eq. (1)."""
TOP = 16
"""Logits kept of each answer token; a token of the vocabulary and its logit take eight bytes."""


@dataclass(frozen=True)
class Remembered:
    """A record of the memory."""

    example: Example
    tokens_LK: Tensor
    """Vocabulary ids of the kept logits, int32."""
    logits_LK: Tensor
    """z of eq. (1), float32."""


class DarkReplay(Baseline):
    """DER++, eq. (1)."""

    def __init__(
        self, learner: Learner, *, seed: int, capacity: int, alpha: float = ALPHA, beta: float = BETA, top: int = TOP
    ) -> None:
        """`capacity`: size of the memory in records."""
        super().__init__(learner, seed=seed)
        self.memory: Reservoir[Remembered] = Reservoir(capacity, seed=seed)
        self._alpha, self._beta, self._top = alpha, beta, top

    def step(self, examples: Sequence[Example]) -> Step:
        """Train on eq. (1), then offer the batch with its logits from before the update to the memory."""
        offered = self._with_logits(examples)
        dark, plain = self.memory.draw(len(examples)), self.memory.draw(len(examples))
        step = self.learner.step(examples, penalty=(lambda: self._replayed(dark, plain)) if dark else None)
        for remembered in offered:
            self.memory.offer(remembered)
        return step

    def _replayed(self, dark: Sequence[Remembered], plain: Sequence[Remembered]) -> Tensor:
        """Compute the second and third term of eq. (1)."""
        packed = pack([each.example for each in dark], self.learner.device)
        with routing_context(self.learner.model, packed.context(explore=True)):
            logits_LV = packed_logits(self.learner.forward, packed)
        tokens_LK = torch.cat([each.tokens_LK for each in dark]).long()
        distance = (logits_LV.gather(1, tokens_LK) - torch.cat([each.logits_LK for each in dark])).square().mean()
        packed = pack([each.example for each in plain], self.learner.device)
        with routing_context(self.learner.model, packed.context(explore=True)):
            loss = packed_loss(self.learner.forward, packed).mean
        return self._alpha * distance + self._beta * loss

    @torch.no_grad()
    def _with_logits(self, examples: Sequence[Example]) -> list[Remembered]:
        packed = pack(examples, self.learner.device)
        with routing_context(self.learner.model, packed.context()):
            kept = packed_logits(self.learner.forward, packed).topk(self._top)
        counts = [example.num_learned for example in examples]
        parts = zip(examples, torch.split(kept.indices.int(), counts), torch.split(kept.values, counts), strict=True)
        return [Remembered(example, tokens_LK.clone(), logits_LK.clone()) for example, tokens_LK, logits_LK in parts]
