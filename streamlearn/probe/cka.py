"""CKA similarity of a transient expert to every stable expert of a bank, accumulated over chunks of tokens.

    Z = U B,  U (T, R) the bottleneck of an expert, centred over the tokens, B (R, O) its up projection   (1)
    CKA = |Z_se^T Z_te|_F^2 / (|Z_te^T Z_te|_F |Z_se^T Z_se|_F)                                           (2)

Eq. (2) is CP-MoE (arXiv 2605.20247) eq. 9. Neither Z nor its O x O products are ever formed: with the second moments
C = U_se^T U_te and S = U^T U, and with G = B B^T,

    |Z_se^T Z_te|_F^2 = tr(G_se C G_te C^T),   |Z^T Z|_F^2 = tr(S G S G)                                  (3)

so memory depends on the ranks only. Two cases that the paper leaves undefined are set to 0: an expert whose activation
does not vary over the tokens, such as a fresh one with B = 0 (0 / 0), and fewer than two tokens.
"""
# Shape suffixes: T tokens, O out features, H heads, K stable experts a head, R rank, N rank of the transient expert,
# X = N + K R + 1 rows per head: the transient expert's, every stable expert's, and a row of ones for counts and sums.

import torch
from torch import Tensor

ROUNDING = 1e-12
"""Minimum variance relative to the uncentred energy; below it, a variance is rounding noise of float32 activations."""


class GramCka:
    """Second moments of the bottlenecks over a stream of tokens, from which `score` computes eq. (2)."""

    def __init__(self) -> None:
        self.moments_HXX: Tensor | None = None
        """Float64, not centred, so that chunks and processes add up. None before the first token."""

    def add(self, te_HNT: Tensor, se_HKRT: Tensor) -> None:
        """Add a chunk of tokens: the bottlenecks of both kinds of experts for the same tokens."""
        ones_H1T = te_HNT.new_ones(len(te_HNT), 1, te_HNT.shape[-1])
        x_HXT = torch.cat([te_HNT, se_HKRT.flatten(1, 2), ones_H1T], dim=1).detach()
        x_HXT = x_HXT.to(torch.float64)  # centring after summation cancels leading digits
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
        centred_HXX = raw_HXX - sums_HX[:, :, None] * sums_HX[:, None, :] / self.num_tokens
        B_te_HNO, B_se_HKRO = B_te_HNO.detach().to(torch.float64), B_se_HKRO.detach().to(torch.float64)
        G_te_HNN, G_se_HKRR = B_te_HNO @ B_te_HNO.mT, B_se_HKRO @ B_se_HKRO.mT
        C_HKRN = centred_HXX[:, N:, :N].reshape(H, K, R, N)
        cross_HK = ((G_se_HKRR @ C_HKRN) * (C_HKRN @ G_te_HNN[:, None])).sum((2, 3))
        te_H = _self_similarity(centred_HXX[:, :N, :N], raw_HXX[:, :N, :N], G_te_HNN)
        se_HK = _self_similarity(_own_blocks(centred_HXX[:, N:, N:], K), _own_blocks(raw_HXX[:, N:, N:], K), G_se_HKRR)
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
