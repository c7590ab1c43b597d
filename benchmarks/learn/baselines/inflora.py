"""InfLoRA: each task trains its own LoRA in the part of the input space that earlier tasks do not use.

    W = W_0 + sum_k B_k A_k,  A_t fixed before task t, B_t trained from zero                   (1)
    A_t: the first r principal directions of (I - M M^T) H_t                                   (2)
    M <- M and the fewest further directions U with |M^T H|^2 + |U^T H|^2 >= epsilon |H|^2     (3)

Liang and Li 2024, "InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning". H_t are the inputs of a
linear on the task's records; M is an orthonormal basis of what earlier tasks' inputs span. A_t M = 0, so training B_t
does not change the output for inputs in M. The paper writes A and B the other way round. epsilon of (3) rises linearly
to 1 over the tasks, as in the authors' code.

Simplified: M itself is kept, where DualGPM keeps M or its complement, whichever is smaller; the result is the same.
Directions are eigenvectors of the second moments of H, which equal its singular vectors. Rows of A have the length of
LoRA's initialization, 1 / sqrt(3), as in the authors' code. Records for H are all records of the segment.
"""
# Shape suffixes: D in features, R rank of a block, M dimensions of the basis.

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.learn.baselines.rank_blocks import RankBlocks
from streamlearn.adapters.context import AdaptedLayer, routing_context
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.stream.record import Example

THRESHOLD = 0.95
"""epsilon of eq. (3) for the first task."""
PACKED = 8
"""Records per forward pass when inputs are collected."""


class InfLora(RankBlocks):
    """InfLoRA, eq. (1)."""

    def __init__(self, learner: Learner, *, seed: int, rank: int, segments: int, threshold: float = THRESHOLD) -> None:
        """`segments`: number of segments of the stream."""
        super().__init__(learner, seed=seed, rank=rank)
        self._segments = segments
        self._threshold = threshold
        self.basis = {bank.name: bank.A.new_zeros(bank.A.shape[-1], 0, dtype=torch.float64) for bank in learner.banks}
        """M (D, M) of each linear, in float64."""
        for bank in learner.banks:
            bank.A.requires_grad_(False)

    @torch.no_grad()
    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Open the segment's block and design its A, eq. (2)."""
        super().begin(segment, examples)
        moments = InputMoments.of(self.learner, examples)
        for bank in self.learner.banks:
            outside_DD = without(self.basis[bank.name], moments.by_name[bank.name])
            _, directions_DD = torch.linalg.eigh(outside_DD)  # in ascending order
            bank.A[0, 0, self.own] = directions_DD[:, -self.rank :].flip(1).mT / math.sqrt(3)

    @torch.no_grad()
    def end(self, segment: int, examples: Sequence[Example]) -> None:
        """Extend the bases by the directions of the segment's inputs, eq. (3)."""
        threshold = self._threshold + (1 - self._threshold) * segment / self._segments
        moments = InputMoments.of(self.learner, examples)
        for name, moment_DD in moments.by_name.items():
            self.basis[name] = extended(self.basis[name], moment_DD, threshold)


class InputMoments:
    """A parallel adapter that adds nothing and collects H H^T (D, D) of each linear's inputs."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def __call__(self, layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        """Add a forward pass's inputs; return `y`."""
        x_TD = x_TD.reshape(-1, x_TD.shape[-1]).float()
        moment_DD = x_TD.mT @ x_TD
        before = self.by_name.get(layer.name)
        self.by_name[layer.name] = moment_DD if before is None else before + moment_DD
        return y

    @classmethod
    def of(cls, learner: Learner, examples: Sequence[Example]) -> "InputMoments":
        """Collect over the examples under the current weights."""
        moments = cls()
        for start in range(0, len(examples), PACKED):
            packed = pack(examples[start : start + PACKED], learner.device)
            context = packed.context()
            context.parallel_adapter = moments
            with torch.no_grad(), routing_context(learner.model, context):
                packed_loss(learner.forward, packed)
        return moments


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
