"""Auxiliary losses that keep a router from sending everything to one expert.

    L_aux = sum_i f_i P_i,   f_i fraction of the tokens routed to expert i,  P_i = mean_t softmax(a_t)_i    (1)

CP-MoE (arXiv 2605.20247) eq. 12. P is computed from the native logits a, without the CP bias: the bias steers the
selection and leaves the balancing gradient alone. f is a count and has no gradient. Each head has its own router; the
loss is the mean over the heads.

    Q_nm = sum_j G(x_j)_n             the gates of expert n over the tokens j of sample m                   (2)
    I_nm = 1 + delta if expert n and sample m have the same type, else 1 - delta                            (3)
    L_lbc = var(Z) / mean(Z),  Z = I * Q,  over all experts and samples                                     (4)
    L = L_task + beta L_lbc                                                                                 (5)

LoRAMoE (arXiv 2312.09979) eq. 6-9. The first half of the bank has type 0, the second half type 1. `var` is sigma^2,
the mean squared deviation. (2) is a sum, so longer samples weigh more and (4) grows with the length of the samples.

The paper intends (4) to route a sample to the experts of its own type. As printed it does the opposite: (4) is smallest
when Z is uniform, that is when the gates are proportional to 1 / I, and 1 / I is smaller for the sample's own type. A
negative delta gives the intended behaviour.
"""
# Shape suffixes: T tokens, H heads, K experts a head, M samples.

import torch
from torch import Tensor

NO_TYPE = -1
"""The type of a sample without one; eq. (4) leaves it out."""


def load_balance(a_HKT: Tensor, selected_HKT: Tensor) -> Tensor:
    """Compute eq. (1), a scalar.

    Args:
        a_HKT: Native logits, without the CP bias.
        selected_HKT: Bool mask of the selected experts, from biased or unbiased logits.

    Returns:
        k / K under top-k when load and probabilities are uniform; 1 when one expert gets everything.
    """
    f_HK = selected_HKT.mean(-1, dtype=a_HKT.dtype)
    P_HK = a_HKT.softmax(1).mean(-1)
    return (f_HK * P_HK).sum(1).mean()


def localized_balance(gate_HKT: Tensor, sample_T: Tensor, type_M: Tensor, *, delta: float = 0.1) -> Tensor:
    """Compute eq. (4), averaged over the heads: a scalar.

    Args:
        gate_HKT: Gates, zero where an expert is not selected.
        sample_T: Index of the sample that each token belongs to.
        type_M: 0, 1 or `NO_TYPE` for each sample. A typed sample without tokens counts with Q = 0; if all are, so is
            the loss.
        delta: Strength of the type match in eq. (3).

    Returns:
        The loss; zero if no sample has a type.
    """
    H, K, _ = gate_HKT.shape
    typed_M = type_M != NO_TYPE
    if not typed_M.any():
        return gate_HKT.new_zeros(())
    Q_HKM = gate_HKT.new_zeros(H, K, len(type_M)).index_add(2, sample_T, gate_HKT)[:, :, typed_M]
    Z_HKM = coefficients(K, type_M[typed_M], delta).to(Q_HKM.dtype) * Q_HKM
    mean_H = Z_HKM.mean((1, 2)).clamp_min(torch.finfo(Z_HKM.dtype).tiny)
    return (Z_HKM.var((1, 2), correction=0) / mean_H).mean()


def coefficients(num_experts: int, type_M: Tensor, delta: float) -> Tensor:
    """Compute eq. (3) as (K, M), for samples of type 0 or 1."""
    expert_type_K = (torch.arange(num_experts, device=type_M.device) >= num_experts // 2).to(type_M.dtype)
    return torch.where(expert_type_K[:, None] == type_M, 1 + delta, 1 - delta)
