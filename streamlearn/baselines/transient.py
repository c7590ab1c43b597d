"""The probe of a new regime, run before anything is learned from it.

    1. add a transient expert with zero output to the frozen model;                            CP-MoE section 3.2.1
    2. train it on the first records of the regime, in several small steps;                    eq. 5
    3. compute the importance of each weight from its path;                                    eq. 6, 7
    4. compare its activations with those of every stable expert, on the same tokens.          eq. 9

The model does not change. If the records of the last third of step 2 have no lower loss with the transient expert than
without it, the probe failed, and nothing of it is used. (Losses of the first third are of other records, and these
differ by more than a few small steps earn.) Eq. 5 is plain gradient descent; the steps here are Adam's, because ten
steps of gradient descent from B = 0 make no progress. Eq. 6 holds along any path, Theorem 1 only along that of eq. 5.
"""
# Shape suffixes: T tokens, D in features, O out features, H heads, S = D / H slice, K experts a head, R rank of an
# expert, also of the transient one.

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from streamlearn.adapters.bottleneck import add_experts, split_heads
from streamlearn.adapters.context import AdaptedLayer, routing_context
from streamlearn.adapters.tuner import Bank
from streamlearn.baselines.importance import TrainingPath
from streamlearn.learner.evaluate import first_tokens, token_groups
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.settings import LearnerSettings, ProbeSettings
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
# X = R + K R + 1 rows per head: the transient expert's, every stable expert's, and a row of ones for counts and sums.

ROUNDING = 1e-12
"""Minimum variance relative to the uncentered energy; below it, a variance is rounding noise of float32 activations."""


class GramCka:
    """Second moments of the bottlenecks over a stream of tokens, from which `score` computes eq. (2)."""

    def __init__(self) -> None:
        self.moments_HXX: Tensor | None = None
        """Float64, not centered, so that chunks and processes add up. None before the first token."""

    def add(self, te_HRT: Tensor, se_HKRT: Tensor) -> None:
        """Add a chunk of tokens: the bottlenecks of both kinds of experts for the same tokens."""
        ones_H1T = te_HRT.new_ones(len(te_HRT), 1, te_HRT.shape[-1])
        x_HXT = torch.cat([te_HRT, se_HKRT.flatten(1, 2), ones_H1T], dim=1).detach()
        x_HXT = x_HXT.to(torch.float64)  # centering after summation cancels leading digits
        moments_HXX = torch.bmm(x_HXT, x_HXT.mT)
        self.moments_HXX = moments_HXX if self.moments_HXX is None else self.moments_HXX.add_(moments_HXX)

    @property
    def num_tokens(self) -> int:
        """Number of tokens added so far."""
        return 0 if self.moments_HXX is None else round(self.moments_HXX[0, -1, -1].item())

    def score(self, B_te_HRO: Tensor, B_se_HKRO: Tensor) -> Tensor:
        """Compute eq. (2) for every stable expert, (H, K) float32 in [0, 1], from the current up projections."""
        H, K, R, _ = B_se_HKRO.shape
        if self.moments_HXX is None or self.num_tokens < 2:
            return torch.zeros(H, K, device=B_se_HKRO.device)
        raw_HXX, sums_HX = self.moments_HXX[:, :-1, :-1], self.moments_HXX[:, :-1, -1]
        centered_HXX = raw_HXX - sums_HX[:, :, None] * sums_HX[:, None, :] / self.num_tokens
        B_te_HRO, B_se_HKRO = B_te_HRO.detach().to(torch.float64), B_se_HKRO.detach().to(torch.float64)
        G_te_HRR, G_se_HKRR = B_te_HRO @ B_te_HRO.mT, B_se_HKRO @ B_se_HKRO.mT
        C_HKRR = centered_HXX[:, R:, :R].reshape(H, K, R, R)
        cross_HK = ((G_se_HKRR @ C_HKRR) * (C_HKRR @ G_te_HRR[:, None])).sum((2, 3))
        te_H = _self_similarity(centered_HXX[:, :R, :R], raw_HXX[:, :R, :R], G_te_HRR)
        se_HK = _self_similarity(_own_blocks(centered_HXX[:, R:, R:], K), _own_blocks(raw_HXX[:, R:, R:], K), G_se_HKRR)
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


# The transient expert: one expert per head beside all stable ones, with zero output until it is trained.
#
#     y = W x + experts(x) + (alpha / r) sum_m B~_m A~_m h_m,   B~ = 0 at the start             (4)
#
# CP-MoE (arXiv 2605.20247) section 3.2.1 and eq. 17: of one expert's size, E(x) = 0 at first, trained with backbone and
# stable experts frozen (eq. 5). There is no router: every token passes through it.


class TransientExpert:
    """The transient expert of every bank of a model; a `ParallelAdapter`."""

    def __init__(self, banks: Sequence[Bank], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._banks = {bank.name: bank for bank in banks}
        self.A = {bank.name: nn.Parameter(_first_A(bank, generator)) for bank in banks}
        self.B = {bank.name: nn.Parameter(torch.zeros_like(bank.B[:, :1])) for bank in banks}
        """A (H, 1, R, S) and B (H, 1, R, O), by bank."""
        self._cka: dict[str, GramCka] = {}
        """Moments by bank while experts are compared; empty while this one is trained."""

    def __call__(self, layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        """Add the last term of eq. (4) to `y` (..., O) in place, or, in a comparison, leave `y` the stable model's."""
        A_H1RS, B_H1RO = self.A[layer.name], self.B[layer.name]
        if not self._cka:
            return add_experts(y, x_TD, A_H1RS, B_H1RO, None, scaling=layer.scaling)
        bank = self._banks[layer.name]
        h_HST = split_heads(x_TD.reshape(-1, x_TD.shape[-1]).float(), len(A_H1RS)).mT
        se_HKRT = torch.bmm(bank.A.flatten(1, 2), h_HST).view(*bank.A.shape[:3], -1)
        self._cka[layer.name].add(torch.bmm(A_H1RS[:, 0], h_HST), se_HKRT)
        return y

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name: `BANK.A` and `BANK.B`."""
        by_name: dict[str, nn.Parameter] = {}
        for name in self.A:
            by_name |= {f"{name}.A": self.A[name], f"{name}.B": self.B[name]}
        return by_name

    @torch.no_grad()
    def similarity(self, learner: Learner, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Compute CKA (eq. 9) with each stable expert as it is now, (H, K) by bank; zero for an untrained expert.

        Both see the layers' inputs in the stable model, which computes as if there were no transient expert.
        """
        self._cka = {name: GramCka() for name in self._banks}
        _loss(learner, examples, self)
        cka, self._cka = self._cka, {}
        return {name: cka[name].score(self.B[name][:, 0], bank.B) for name, bank in self._banks.items()}


def _first_A(bank: Bank, generator: torch.Generator) -> Tensor:  # noqa: N802
    bound = 1 / math.sqrt(bank.A.shape[-1])  # as for a new expert
    return torch.empty(bank.A[:, :1].shape).uniform_(-bound, bound, generator=generator).to(bank.A.device)


STEPS = 10
"""Maximum number of warm-up steps; long records make it fewer."""


@dataclass(frozen=True)
class ProbeReport:
    """Result of a probe."""

    expert: TransientExpert
    """Trained."""
    similarity: Mapping[str, Tensor]
    """CKA of each stable expert by bank, (H, K) in [0, 1]."""
    importance: Mapping[str, Tensor]
    """Omega_t by parameter (`BANK.A`, `BANK.B`): for all experts of a head one, (H, 1, R, S); empty if not measured."""
    losses: tuple[float, float]
    """Mean loss of the records of the last third of the steps, without the transient expert and with it, before each
    step; nats per learned token."""
    tokens: int
    """Warm-up tokens."""

    @property
    def failed(self) -> bool:
        """Whether the loss is not lower with the transient expert, or not finite."""
        without, with_it = self.losses
        return not with_it < without


def probe(
    learner: Learner,
    examples: Sequence[Example],
    settings: ProbeSettings,
    *,
    seed: int,
    measure: type[TrainingPath] | None = None,
    damping: float = 1e-3,
) -> ProbeReport:
    """Probe the regime of `examples`.

    The result depends only on the arguments and the current weights.

    Args:
        learner: Its weights, optimizer state and expert loads are the same afterwards.
        examples: First examples of the regime, at least one.
        settings: Warm-up and comparison sizes, learning rate; `warmup_tokens` must be set.
        seed: Seed of the transient expert.
        measure: Measures importance along the path of the transient expert; None: nothing does.
        damping: xi of eq. 7.
    """
    # 1.
    expert = TransientExpert(learner.banks, seed)
    parameters = expert.parameters()
    lr = learner.lr if settings.lr is None else settings.lr
    optimizer = MaskedAdamW(
        [Group(bank.name, {"A": expert.A[bank.name], "B": expert.B[bank.name]}, None) for bank in learner.banks],
        LearnerSettings(lr=lr, weight_decay=0.0),
    )
    path = None if measure is None else measure(parameters)
    # 2.
    assert settings.warmup_tokens is not None, "set from the backbone's default at start-up"
    groups = list(token_groups(examples, settings.warmup_tokens // STEPS))
    last = groups[-max(1, len(groups) // 3) :]
    losses = []
    with _frozen(learner):
        for group in groups:
            loss = _loss(learner, group, expert)
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
            if path is not None:
                path.before()
            optimizer.step(lr)
            if path is not None:
                path.after([p.grad for p in parameters.values()])
            optimizer.zero_grad()
    with torch.no_grad():
        without = fmean(float(_loss(learner, group)) for group in last)
    return ProbeReport(
        expert,
        importance={} if path is None else path.importance(damping),  # 3.
        similarity=expert.similarity(learner, first_tokens(examples, settings.similarity_tokens)),  # 4.
        losses=(without, fmean(losses[-len(last) :])),
        tokens=sum(len(example) for group in groups for example in group),
    )


def _loss(learner: Learner, examples: Sequence[Example], expert: TransientExpert | None = None) -> Tensor:
    """The mean loss of the examples under the stable model and, beside it, a transient expert."""
    packed = pack(examples, learner.device)
    context = packed.context()
    context.parallel_adapter = expert
    with routing_context(learner.model, context):
        return packed_loss(learner.forward, packed).mean


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
