"""Online-LoRA: a new LoRA at every plateau of the loss, without task boundaries.

    L = L(batch and hard buffer) + (lambda / 2) sum_i Omega_i (theta_i - theta*_i)^2            (1)

Wei et al., WACV 2025, "Online-LoRA: Task-free Online Continual Learning via Low Rank Adaptation". The loss in a window
of steps first falls to a plateau, then rises to a peak when the data change. When it is on a plateau after a peak, the
LoRA is frozen, a new one is opened, and the importance Omega of the old one's weights is found on the hard buffer: the
few records of the highest loss so far.

Simplified: a plateau is a window whose mean is not lower than that of the window before by more than a fraction, where
the paper compares mean and variance with thresholds chosen per data set; losses of text tasks have no common scale. A
peak is a mean above that of the last plateau by more than its standard deviation (Aljundi et al. 2019, "Task-Free
Continual Learning"). A new LoRA starts from a copy of the A before it and B = 0, so that an element has the same
meaning in both; theta* of (1) is this start, and Omega sums the normalized Fisher information (`fisher`) of all LoRAs
before it. When all blocks of the adapter are used, the last one goes on.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean, pstdev

import torch
from torch import Tensor

from benchmarks.learn.baselines.fisher import fisher, normalised
from benchmarks.learn.baselines.rank_blocks import RankBlocks
from benchmarks.learn.baselines.replay import only_first
from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.record import Example

STRENGTH = 0.1
"""lambda."""
BUFFER = 4
"""Records in the hard buffer."""
WINDOW = 4
"""Steps in a window of the loss."""
FLAT = 0.05
"""Maximum fall from one window to the next on a plateau, as a fraction."""


class OnlineLora(RankBlocks):
    """Online-LoRA, eq. (1); the boundaries that it is called with are ignored."""

    def __init__(
        self,
        learner: Learner,
        *,
        seed: int,
        rank: int,
        strength: float = STRENGTH,
        window: int = WINDOW,
        flat: float = FLAT,
    ) -> None:
        super().__init__(learner, seed=seed, rank=rank)
        self.plateaus = PlateauDetector(window, flat)
        self.buffer: list[tuple[float, Example]] = []
        """The hard buffer: records and their losses, highest first."""
        self._blocks = learner.banks[0].A.shape[2] // rank
        self._strength = strength
        self._importance: list[Tensor] = []
        self._start: list[Tensor] = []
        self.regularizer = self._distance

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Do nothing: there are no boundaries."""

    def step(self, examples: Sequence[Example]) -> Step:
        """Train on the batch and the hard buffer; on a plateau, open a new LoRA."""
        replayed = [*examples, *(example for _, example in self.buffer)]
        step = super().step(replayed)
        ranked = sorted(zip(step.record_losses, replayed, strict=True), key=lambda pair: pair[0], reverse=True)
        self.buffer = ranked[:BUFFER]
        own = only_first(step, len(examples))
        if self.plateaus.update(fmean(own.record_losses)) and self.block + 1 < self._blocks:
            self._expand()
        return own

    @torch.no_grad()
    def _expand(self) -> None:
        """Find the importance of the block in training, freeze it, and open the next."""
        found = normalised([each[:, :, self.own] for each in fisher(self.learner, [e for _, e in self.buffer])])
        earlier = self._importance or [torch.zeros_like(each) for each in found]
        self._importance = [old + new for old, new in zip(earlier, found, strict=True)]
        before = self.own
        self.open(self.block + 1)
        for bank in self.learner.banks:
            bank.A[:, :, self.own] = bank.A[:, :, before]
        self._start = [parameter[:, :, self.own].clone() for parameter in self.learner.optimizer.parameters()]

    def _distance(self) -> Tensor:
        """Compute the second term of eq. (1)."""
        parameters = [parameter[:, :, self.own] for parameter in self.learner.optimizer.parameters()]
        terms = [
            (omega * (theta - start).square()).sum()
            for omega, theta, start in zip(self._importance, parameters, self._start, strict=True)
        ]
        return self._strength / 2 * torch.stack(terms).sum()


class PlateauDetector:
    """Plateaus of the loss, each reported once; after one, the next needs a peak before it."""

    def __init__(self, window: int, flat: float) -> None:
        self._losses: deque[float] = deque(maxlen=2 * window)
        self._window = window
        self._flat = flat
        self._peak: float | None = None
        """Mean loss above which the data have changed; None: they have, or are the first."""

    def update(self, loss: float) -> bool:
        """Add a step's loss; return whether a plateau is reached with it."""
        self._losses.append(loss)
        recent = list(self._losses)[-self._window :]
        if len(recent) == self._window and self._peak is not None and fmean(recent) > self._peak:
            self._peak = None
            self._losses.clear()
        if self._peak is not None or len(self._losses) < 2 * self._window:
            return False
        before = fmean(list(self._losses)[: self._window])
        if fmean(recent) < before * (1 - self._flat):
            return False
        self._peak = fmean(recent) + pstdev(recent)
        return True
