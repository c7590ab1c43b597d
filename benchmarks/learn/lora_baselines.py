"""Baselines with a LoRA per task, side by side in the rank of one adapter.

The forward pass sums all LoRAs. One ungated expert whose rank is divided into blocks computes the same sum; the blocks
that no task has used yet have B = 0. Each block has the full rank of `lora`: the sum can be merged into the backbone,
so the cost per token is that of one LoRA.
"""
# Shape suffixes: P ranks of the earlier blocks, R rank of a block, N blocks, S or D in, O out features, M basis.

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.learn.baselines import Baseline, BaselineContext, fisher, normalized, only_first
from streamlearn.adapters.context import AdaptedLayer, routing_context
from streamlearn.adapters.tuner import Bank
from streamlearn.learner.learner import Learner, Step
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.stream.record import Example

PACKED = 8
"""Records per forward pass when inputs are collected."""
HARD_RECORDS = 4
"""Records in the hard buffer of Online-LoRA."""


class RankBlocks(Baseline):
    """One block is trained at a time; the others are frozen."""

    def __init__(self, context: BaselineContext, rank: int) -> None:
        super().__init__(context)
        self.rank = rank
        self.block = 0
        """The block in training."""
        self.regularizer: Callable[[], Tensor] | None = None
        """A further term of the objective, a scalar; computed only when there are earlier blocks."""
        for bank in self.learner.banks:
            for parameter in (bank.A, bank.B):
                parameter.register_hook(self.only_own)  # type: ignore[no-untyped-call]

    @property
    def own(self) -> slice:
        """Ranks of the block in training."""
        return slice(self.block * self.rank, (self.block + 1) * self.rank)

    @property
    def earlier(self) -> slice:
        """Ranks of all blocks before it."""
        return slice(0, self.block * self.rank)

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        del examples
        self.open(segment)

    def open(self, block: int) -> None:
        """Train another block from here on and reset the optimizer's moments."""
        self.block = block
        for group in self.learner.optimizer.groups:
            group.restart()

    def step(self, examples: Sequence[Example]) -> Step:
        """Train the block on one batch; the other blocks are restored, since weight decay moves them too."""
        parameters = self.learner.optimizer.parameters()
        before = [parameter.detach().clone() for parameter in parameters]
        step = self.learner.step(examples, penalty=self.regularizer if self.block else None)
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                old[:, :, self.own] = parameter[:, :, self.own]
                parameter.copy_(old)
        return step

    def only_own(self, gradient_11RN: Tensor) -> Tensor:
        """Return a gradient that is zero outside the block in training: clipping must not count the frozen ones."""
        kept_11RN = torch.zeros_like(gradient_11RN)
        kept_11RN[:, :, self.own] = gradient_11RN[:, :, self.own]
        return kept_11RN


class OLora(RankBlocks):
    """O-LoRA: each task trains its own LoRA, kept orthogonal to the earlier ones, which are frozen.

        L = L_task + lambda sum_{i<t} sum_{jk} |A_i A_t^T|_jk                                   (1)

    Wang et al. 2023, eq. 6 to 8; lambda is that of the runs that the authors published.
    """

    def __init__(self, context: BaselineContext, rank: int, strength: float = 0.5) -> None:
        super().__init__(context, rank)
        self._strength = strength
        self.regularizer = self._overlaps

    def _overlaps(self) -> Tensor:
        overlaps = [overlap(bank.A[0, 0, self.earlier].detach(), bank.A[0, 0, self.own]) for bank in self.learner.banks]
        return self._strength * torch.stack(overlaps).sum()


def overlap(earlier_PS: Tensor, own_RS: Tensor) -> Tensor:
    """Compute sum |A_i A_t^T|; the A_i are stacked along the rank."""
    return (earlier_PS @ own_RS.mT).abs().sum()


class SdLora(RankBlocks):
    """SD-LoRA: each task trains its own LoRA and rescales the earlier ones, whose directions are frozen.

        W = W_0 + sum_{k<t} a_k D_k + B_t A_t,  D_k = B_k A_k / |B_k A_k|_F                     (1)

    Wu et al. 2025, "SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental Learning": in task t, the
    magnitudes a_k of all earlier directions and the new LoRA are trained; inference uses the last W for all tasks. B_k
    of the adapter holds a_k B_k / |B_k A_k|_F, so the gradient of a_k is its gradient times the direction:

        dL/da_k = <dL/dB_k, B_k / |B_k A_k|_F>                                                  (2)

    Simplified: the new LoRA has no magnitude of its own while it is trained, since B_t contains it. Magnitudes have
    their own learning rate, a multiple of the weights', which are a hundred times smaller. The paper's variants of
    lower rank are left out.
    """

    def __init__(self, context: BaselineContext, rank: int, magnitude_lr: float = 10.0) -> None:
        self.directions = [Directions(bank, rank) for bank in context.learner.banks]  # hooks need the whole gradient
        super().__init__(context, rank)
        self._magnitude_lr = context.learner.lr * magnitude_lr
        self._optimizer: torch.optim.Optimizer | None = None

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Freeze the direction of the last block and open the segment's."""
        if segment:
            for directions in self.directions:
                directions.freeze(self.own)
            magnitudes = [directions.magnitude_N for directions in self.directions]
            self._optimizer = torch.optim.Adam(magnitudes, lr=self._magnitude_lr)
        super().begin(segment, examples)

    def step(self, examples: Sequence[Example]) -> Step:
        step = super().step(examples)
        if self._optimizer is not None:
            if step.refusal is None:
                self._optimizer.step()
            self._optimizer.zero_grad()
            for directions in self.directions:
                directions.apply()
        return step


class Directions:
    """Frozen directions of one linear, and their magnitudes."""

    def __init__(self, bank: Bank, rank: int) -> None:
        self._bank = bank
        self._rank = rank
        self.B_PO = bank.B.detach()[0, 0, :0].clone()
        """B_k / |B_k A_k|_F of the frozen blocks."""
        self.magnitude_N = Parameter(self.B_PO.new_zeros(0))
        """a_k."""
        bank.B.register_hook(self._backward)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def freeze(self, block: slice) -> None:
        """Add a block: its direction, and its norm as magnitude, so that the function stays the same."""
        A_RS, B_RO = self._bank.A[0, 0, block], self._bank.B[0, 0, block]
        norm = ((A_RS @ A_RS.mT) * (B_RO @ B_RO.mT)).sum().clamp_min(torch.finfo(B_RO.dtype).tiny).sqrt()
        self.B_PO = torch.cat([self.B_PO, B_RO / norm])
        self.magnitude_N = Parameter(torch.cat([self.magnitude_N, norm[None]]))

    @torch.no_grad()
    def apply(self) -> None:
        scaled_PO = self.magnitude_N.repeat_interleave(self._rank)[:, None] * self.B_PO
        self._bank.B[0, 0, : len(scaled_PO)] = scaled_PO

    def _backward(self, gradient_11RO: Tensor) -> None:
        """Add eq. (2)."""
        frozen = len(self.B_PO)
        product_N = (gradient_11RO[0, 0, :frozen] * self.B_PO).view(-1, self._rank * self.B_PO.shape[1]).sum(1)
        before = self.magnitude_N.grad
        self.magnitude_N.grad = product_N if before is None else before + product_N


class InfLora(RankBlocks):
    """InfLoRA: each task trains its own LoRA in the part of the input space that earlier tasks do not use.

        W = W_0 + sum_k B_k A_k,  A_t fixed before task t, B_t trained from zero               (1)
        A_t: the first r principal directions of (I - M M^T) H_t                               (2)
        M <- M and the fewest further directions U with |M^T H|^2 + |U^T H|^2 >= epsilon |H|^2 (3)

    Liang and Li 2024, "InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning". H_t are the inputs of a
    linear on the task's records; M is an orthonormal basis of what earlier tasks' inputs span. A_t M = 0, so training
    B_t does not change the output for inputs in M. The paper writes A and B the other way round. epsilon of (3) rises
    linearly from `threshold` to 1 over the tasks, as in the authors' code.

    Simplified: M itself is kept, where DualGPM keeps M or its complement, whichever is smaller; the result is the same.
    Directions are eigenvectors of the second moments of H, which equal its singular vectors. Rows of A have the length
    of LoRA's initialization, 1 / sqrt(3), as in the authors' code. Records for H are all records of the segment.
    """

    def __init__(self, context: BaselineContext, rank: int, threshold: float = 0.95) -> None:
        super().__init__(context, rank)
        self._threshold = threshold
        self.basis = {
            bank.name: bank.A.new_zeros(bank.A.shape[-1], 0, dtype=torch.float64) for bank in self.learner.banks
        }
        """M (D, M) of each linear, in float64."""
        for bank in self.learner.banks:
            bank.A.requires_grad_(False)

    @torch.no_grad()
    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Open the segment's block and design its A, eq. (2)."""
        super().begin(segment, examples)
        moments = input_moments(self.learner, examples)
        for bank in self.learner.banks:
            outside_DD = without(self.basis[bank.name], moments[bank.name])
            _, directions_DD = torch.linalg.eigh(outside_DD)  # in ascending order
            bank.A[0, 0, self.own] = directions_DD[:, -self.rank :].flip(1).mT / math.sqrt(3)

    @torch.no_grad()
    def end(self, segment: int, examples: Sequence[Example]) -> None:
        """Extend the bases by the directions of the segment's inputs, eq. (3)."""
        threshold = self._threshold + (1 - self._threshold) * segment / len(self.context.slots)
        moments = input_moments(self.learner, examples)
        for name, moment_DD in moments.items():
            self.basis[name] = extended(self.basis[name], moment_DD, threshold)


class InputMoments:
    """A parallel adapter that collects H H^T of each linear's inputs and adds nothing."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def __call__(self, layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        x_TD = x_TD.reshape(-1, x_TD.shape[-1]).float()
        moment_DD = x_TD.mT @ x_TD
        before = self.by_name.get(layer.name)
        self.by_name[layer.name] = moment_DD if before is None else before + moment_DD
        return y


def input_moments(learner: Learner, examples: Sequence[Example]) -> dict[str, Tensor]:
    """Return H H^T (D, D) of each linear's inputs on the examples, under the current weights."""
    moments = InputMoments()
    for start in range(0, len(examples), PACKED):
        packed = pack(examples[start : start + PACKED], learner.device)
        context = packed.context()
        context.parallel_adapter = moments
        with torch.no_grad(), routing_context(learner.model, context):
            packed_loss(learner.forward, packed)
    return moments.by_name


def without(basis_DM: Tensor, moment_DD: Tensor) -> Tensor:
    """Return (I - M M^T) H H^T (I - M M^T) in float64: inputs have a few dimensions that are far larger than others."""
    rest_DD = torch.eye(len(basis_DM), device=basis_DM.device, dtype=basis_DM.dtype) - basis_DM @ basis_DM.mT
    return rest_DD @ moment_DD.to(basis_DM.dtype) @ rest_DD


def extended(basis_DM: Tensor, moment_DD: Tensor, threshold: float) -> Tensor:
    """Return the basis after eq. (3)."""
    outside_DD = without(basis_DM, moment_DD)
    energy_D, directions_DD = torch.linalg.eigh(outside_DD)
    energy_D, directions_DD = energy_D.flip(0).clamp_min(0), directions_DD.flip(1)
    total = moment_DD.to(outside_DD.dtype).trace()
    missing = threshold * total - (total - outside_DD.trace())
    if missing <= 0:
        return basis_DM
    added = int((energy_D.cumsum(0) < missing).sum()) + 1
    remaining = len(basis_DM) - basis_DM.shape[1]
    larger_DM: Tensor = torch.linalg.qr(torch.cat([basis_DM, directions_DD[:, : min(added, remaining)]], dim=1)).Q
    return larger_DM


class OnlineLora(RankBlocks):
    """Online-LoRA: a new LoRA at every plateau of the loss; the boundaries that it is called with are ignored.

        L = L(batch and hard buffer) + (lambda / 2) sum_i Omega_i (theta_i - theta*_i)^2        (1)

    Wei et al., WACV 2025, "Online-LoRA: Task-free Online Continual Learning via Low Rank Adaptation". The loss in a
    window of steps first falls to a plateau, then rises to a peak when the data change. When it is on a plateau after a
    peak, the LoRA is frozen, a new one is opened, and the importance Omega of the old one's weights is computed on the
    hard buffer: the few records of the highest loss so far.

    Simplified: a plateau is a window whose mean is not lower than that of the window before by more than the fraction
    `flat`, where the paper compares mean and variance with thresholds chosen per data set; losses of text tasks have no
    common scale. A peak is a mean above that of the last plateau by more than its standard deviation (Aljundi et al.
    2019, "Task-Free Continual Learning"). A new LoRA starts from a copy of the A before it and B = 0, so that an
    element has the same meaning in both; theta* of (1) is this start, and Omega sums the normalized Fisher information
    of all LoRAs before it. When all blocks of the adapter are used, the last one goes on.
    """

    def __init__(
        self, context: BaselineContext, rank: int, strength: float = 0.1, window: int = 4, flat: float = 0.05
    ) -> None:
        super().__init__(context, rank)
        self.plateaus = PlateauDetector(window, flat)
        self.buffer: list[tuple[float, Example]] = []
        """The hard buffer: records and their losses, highest first."""
        self._blocks = self.learner.banks[0].A.shape[2] // rank
        self._strength = strength
        self._importance: list[Tensor] = []
        self._start: list[Tensor] = []
        self.regularizer = self._distance

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Ignore the boundary."""

    def step(self, examples: Sequence[Example]) -> Step:
        """Train on the batch and the hard buffer; on a plateau, open a new LoRA."""
        replayed = [*examples, *(example for _, example in self.buffer)]
        step = super().step(replayed)
        ranked = sorted(zip(step.record_losses, replayed, strict=True), key=lambda pair: pair[0], reverse=True)
        self.buffer = ranked[:HARD_RECORDS]
        own = only_first(step, len(examples))
        if self.plateaus.update(fmean(own.record_losses)) and self.block + 1 < self._blocks:
            self._expand()
        return own

    @torch.no_grad()
    def _expand(self) -> None:
        """Compute the importance of the block in training, freeze it, and open the next."""
        information = fisher(self.learner, [example for _, example in self.buffer])
        own = normalized([part[:, :, self.own] for part in information])
        earlier = self._importance or [torch.zeros_like(part) for part in own]
        self._importance = [old + new for old, new in zip(earlier, own, strict=True)]
        before = self.own
        self.open(self.block + 1)
        for bank in self.learner.banks:
            bank.A[:, :, self.own] = bank.A[:, :, before]
        self._start = [parameter[:, :, self.own].clone() for parameter in self.learner.optimizer.parameters()]

    def _distance(self) -> Tensor:
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
