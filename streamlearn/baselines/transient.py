"""The probe of a new regime, run before anything is learned from it.

    1. add a transient expert with zero output to the frozen model;                            CP-MoE section 3.2.1
    2. train it on the first records of the regime, in several small steps;                    eq. 5
    3. compute the importance of each weight from its path;                                    eq. 6, 7
    4. compare its activations with those of every stable expert, on the same tokens;          eq. 9
    5. discard it.

The model does not change; the result is the report. Eq. 5 is plain gradient descent; the steps here are Adam's, because
ten steps of gradient descent from B = 0 make no progress. Eq. 6 holds along any path, Theorem 1 only along that of
eq. 5.
"""
# Shape suffixes: T tokens, D in features, O out features, H heads, S = D / H slice, K experts a head, R rank,
# N rank of the transient expert: K R.

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from streamlearn.adapters.bottleneck import add_experts, split_heads
from streamlearn.adapters.context import AdaptedLayer, routing_context
from streamlearn.adapters.tuner import Bank
from streamlearn.baselines.importance import PATHS
from streamlearn.learner.evaluate import first_tokens, token_groups
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.settings import Accumulation, ConsolidateSettings, LearnerSettings, ProbeSettings
from streamlearn.stream.record import Example

# CKA similarity of a transient expert to every stable expert of a bank, accumulated over chunks of tokens.
#
#     Z = U B,  U (T, R) the bottleneck of an expert, centered over the tokens, B (R, O) its up projection   (1)
#     CKA = |Z_se^T Z_te|_F^2 / (|Z_te^T Z_te|_F |Z_se^T Z_se|_F)                                           (2)
#
# Eq. (2) is CP-MoE (arXiv 2605.20247) eq. 9. Neither Z nor its O x O products are ever formed: with the second moments
# C = U_se^T U_te and S = U^T U, and with G = B B^T,
#
#     |Z_se^T Z_te|_F^2 = tr(G_se C G_te C^T),   |Z^T Z|_F^2 = tr(S G S G)                                  (3)
#
# so memory depends on the ranks only. Two cases that the paper leaves undefined are set to 0: an expert whose
# activation does not vary over the tokens, such as a fresh one with B = 0 (0 / 0), and fewer than two tokens.
#
# X = N + K R + 1 rows per head: the transient expert's, every stable expert's, and a row of ones for counts and sums.

ROUNDING = 1e-12
"""Minimum variance relative to the uncentered energy; below it, a variance is rounding noise of float32 activations."""


class GramCka:
    """Second moments of the bottlenecks over a stream of tokens, from which `score` computes eq. (2)."""

    def __init__(self) -> None:
        self.moments_HXX: Tensor | None = None
        """Float64, not centered, so that chunks and processes add up. None before the first token."""

    def add(self, te_HNT: Tensor, se_HKRT: Tensor) -> None:
        """Add a chunk of tokens: the bottlenecks of both kinds of experts for the same tokens."""
        ones_H1T = te_HNT.new_ones(len(te_HNT), 1, te_HNT.shape[-1])
        x_HXT = torch.cat([te_HNT, se_HKRT.flatten(1, 2), ones_H1T], dim=1).detach()
        x_HXT = x_HXT.to(torch.float64)  # centering after summation cancels leading digits
        moments_HXX = torch.bmm(x_HXT, x_HXT.mT)
        self.moments_HXX = moments_HXX if self.moments_HXX is None else self.moments_HXX.add_(moments_HXX)

    @property
    def num_tokens(self) -> int:
        """Number of tokens added so far."""
        return 0 if self.moments_HXX is None else round(self.moments_HXX[0, -1, -1].item())

    def score(self, B_te_HNO: Tensor, B_se_HKRO: Tensor) -> Tensor:
        """Compute eq. (2) for every stable expert, (H, K) float32 in [0, 1], from the current up projections."""
        H, K, R, _ = B_se_HKRO.shape
        N = B_te_HNO.shape[1]
        if self.moments_HXX is None or self.num_tokens < 2:
            return torch.zeros(H, K, device=B_se_HKRO.device)
        raw_HXX, sums_HX = self.moments_HXX[:, :-1, :-1], self.moments_HXX[:, :-1, -1]
        centered_HXX = raw_HXX - sums_HX[:, :, None] * sums_HX[:, None, :] / self.num_tokens
        B_te_HNO, B_se_HKRO = B_te_HNO.detach().to(torch.float64), B_se_HKRO.detach().to(torch.float64)
        G_te_HNN, G_se_HKRR = B_te_HNO @ B_te_HNO.mT, B_se_HKRO @ B_se_HKRO.mT
        C_HKRN = centered_HXX[:, N:, :N].reshape(H, K, R, N)
        cross_HK = ((G_se_HKRR @ C_HKRN) * (C_HKRN @ G_te_HNN[:, None])).sum((2, 3))
        te_H = _self_similarity(centered_HXX[:, :N, :N], raw_HXX[:, :N, :N], G_te_HNN)
        se_HK = _self_similarity(_own_blocks(centered_HXX[:, N:, N:], K), _own_blocks(raw_HXX[:, N:, N:], K), G_se_HKRR)
        norm_HK = te_H[:, None] * se_HK
        score_HK = torch.where(norm_HK > 0, cross_HK / norm_HK, 0.0)
        return score_HK.clamp(0.0, 1.0).float()  # rounding errors of 1e-15


def _own_blocks(S_HXX: Tensor, K: int) -> Tensor:
    """The diagonal blocks, (H, K, R, R): each stable expert with itself."""
    H, X, _ = S_HXX.shape
    return S_HXX.reshape(H, K, X // K, K, X // K).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _self_similarity(S: Tensor, raw: Tensor, G: Tensor) -> Tensor:
    """Compute |Z^T Z|_F by eq. (3) over the last two dimensions; zero where Z is constant up to rounding."""
    varies = (S * G).sum((-2, -1)) > ROUNDING * (raw * G).sum((-2, -1))  # tr(S G) = |Z|_F^2
    SG = S @ G
    return torch.where(varies, (SG * SG.mT).sum((-2, -1)).clamp_min(0.0).sqrt(), 0.0)


# The transient expert: a parallel adapter of the same shape as the experts, with zero output until it is trained.
#
#     y = W x + experts(x) + (alpha / r) sum_m sum_j B~_mj A~_mj h_m,   B~ = 0 at the start             (1)
#
# CP-MoE (arXiv 2605.20247) section 3.2.1: E(x) = 0 at first, trained with backbone and stable experts frozen (eq. 5).
# There is no router: every token passes through all blocks. There are H x K blocks of the bank's rank, one for each
# stable expert, so that importance can be carried over block by block; the blocks of a head are its transient expert.


class TransientExpert:
    """Transient experts of all banks of a model; a `ParallelAdapter`."""

    def __init__(self, banks: Sequence[Bank], coordinates: Literal["bank", "random"], seed: int) -> None:
        """`coordinates`: A is a copy of the bank's, or random."""
        generator = torch.Generator().manual_seed(seed)
        self._banks = {bank.name: bank for bank in banks}
        self.A = {bank.name: nn.Parameter(_first_A(bank, coordinates, generator)) for bank in banks}
        self.B = {bank.name: nn.Parameter(torch.zeros_like(bank.B)) for bank in banks}
        self._cka = {bank.name: GramCka() for bank in banks}
        self.comparing = False
        """Whether forward passes also accumulate the moments for CKA."""

    def __call__(self, layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        """Add the last term of eq. (1) to `y` (..., O) in place."""
        A_HKRS, B_HKRO = self.A[layer.name], self.B[layer.name]
        if self.comparing:
            self._compare(self._banks[layer.name], x_TD.reshape(-1, x_TD.shape[-1]), A_HKRS)
        return add_experts(y, x_TD, A_HKRS, B_HKRO, None, scaling=layer.scaling)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name: `BANK.A` and `BANK.B`."""
        by_name: dict[str, nn.Parameter] = {}
        for name in self.A:
            by_name |= {f"{name}.A": self.A[name], f"{name}.B": self.B[name]}
        return by_name

    def similarity(self) -> Mapping[str, Tensor]:
        """Compute CKA (eq. 9) of each head's transient expert with each stable expert, (H, K) by bank."""
        return {
            bank.name: self._cka[bank.name].score(self.B[bank.name].flatten(1, 2), bank.B)
            for bank in self._banks.values()
        }

    def _compare(self, bank: Bank, x_TD: Tensor, A_HKRS: Tensor) -> None:
        H = len(A_HKRS)
        h_HST = split_heads(x_TD.float(), H).mT
        te_HNT = torch.bmm(A_HKRS.flatten(1, 2), h_HST)
        se_HKRT = torch.bmm(bank.A.flatten(1, 2), h_HST).view(*bank.A.shape[:3], -1)
        self._cka[bank.name].add(te_HNT, se_HKRT)


def _first_A(bank: Bank, coordinates: str, generator: torch.Generator) -> Tensor:  # noqa: N802
    if coordinates == "bank":
        return bank.A.detach().clone()
    bound = 1 / math.sqrt(bank.A.shape[-1])  # as for a new expert
    return torch.empty(bank.A.shape).uniform_(-bound, bound, generator=generator).to(bank.A.device)


STEPS = 10
"""Maximum number of warm-up steps; long records make it fewer."""


@dataclass(frozen=True)
class ProbeReport:
    """Result of a probe."""

    similarity: Mapping[str, Tensor]
    """CKA of each stable expert by bank, (H, K) in [0, 1]."""
    importance: Mapping[str, Tensor]
    """Omega by parameter (`BANK.A`, `BANK.B`), of the shapes of `Anchors.importance`; empty unless
    `consolidate.importance` is `transient`."""
    losses: tuple[float, ...]
    """Loss of each warm-up step, nats per learned token."""
    tokens: int
    """Warm-up tokens."""


def probe(
    learner: Learner,
    examples: Sequence[Example],
    settings: ProbeSettings,
    consolidate: ConsolidateSettings,
    accumulation: Accumulation,
    *,
    seed: int,
) -> ProbeReport:
    """Probe the regime of `examples`.

    The result depends only on the arguments and the current weights.

    Args:
        learner: Its weights, optimizer state and expert loads are the same afterwards.
        examples: First examples of the regime, at least one.
        settings: Warm-up and comparison sizes, learning rate; `warmup_tokens` must be set.
        consolidate: Kind of importance and coordinates of the transient expert.
        accumulation: How importance adds up, which decides what it is computed from.
        seed: Seed of the transient expert.
    """
    # 1.
    expert = TransientExpert(learner.banks, consolidate.coordinates, seed)
    parameters = expert.parameters()
    optimizer = MaskedAdamW(
        [Group(bank.name, {"A": expert.A[bank.name], "B": expert.B[bank.name]}, None) for bank in learner.banks],
        LearnerSettings(lr=settings.lr, weight_decay=0.0),
    )
    path = PATHS[accumulation](parameters) if consolidate.importance == "transient" else None
    # 2.
    assert settings.warmup_tokens is not None, "set from the backbone's default at start-up"
    groups = list(token_groups(examples, settings.warmup_tokens // STEPS))
    losses = []
    with _frozen(learner):
        for group in groups:
            packed = pack(group, learner.device)
            context = packed.context()
            context.parallel_adapter = expert
            with routing_context(learner.model, context):
                loss = packed_loss(learner.forward, packed)
            torch.autograd.backward(loss.mean)
            losses.append(float(loss.mean.detach()))
            if path is not None:
                path.before()
            optimizer.step(settings.lr)
            if path is not None:
                path.after([p.grad for p in parameters.values()])
            optimizer.zero_grad()
    # 3.
    importance = {} if path is None else path.importance(consolidate.damping)
    # 4.
    _compare(learner, expert, examples, settings.similarity_tokens)
    # 5.
    return ProbeReport(
        similarity=expert.similarity(),
        importance=importance,
        losses=tuple(losses),
        tokens=sum(len(example) for group in groups for example in group),
    )


def _compare(learner: Learner, expert: TransientExpert, examples: Sequence[Example], tokens: int) -> None:
    packed = pack(first_tokens(examples, tokens), learner.device)
    context = packed.context()
    expert.comparing, context.parallel_adapter = True, expert
    with torch.no_grad(), routing_context(learner.model, context):
        packed_loss(learner.forward, packed)


@contextmanager
def _frozen(learner: Learner) -> Iterator[None]:
    """Disable gradients of the learner's parameters inside the block and restore the expert loads after it."""
    parameters = [p for p in learner.optimizer.parameters() if p.requires_grad]
    loads = [bank.load_HK.clone() if bank.load_HK is not None else None for bank in learner.banks]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for bank, load in zip(learner.banks, loads, strict=True):
            if bank.load_HK is not None and load is not None:
                bank.load_HK.copy_(load)
