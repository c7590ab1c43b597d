"""What keeps a router from sending everything to one expert.

    L_aux = sum_i f_i P_i,   f_i share of the tokens routed to expert i,   P_i = mean_t softmax(a_t)_i      (1)

CP-MoE (arXiv 2605.20247) eq. 12. P takes the native logits a, without the CP bias, so that the bias steers the choice
and never the balance; f is a count and has no gradient. A mean over the heads, each with its own router.

    Q_nm = sum_j G(x_j)_n             the gates of expert n over the tokens j of sample m                   (2)
    I_nm = 1 + delta where the types of expert n and sample m agree, else 1 - delta                         (3)
    L_lbc = var(Z) / mean(Z),  Z = I * Q,  over all experts and samples                                     (4)
    L = L_task + beta L_lbc                                                                                 (5)

LoRAMoE (arXiv 2312.09979) eq. 6-9. Expert types are the first and the second half of the bank. `var` is sigma^2, the
mean squared deviation. (2) is a sum, so a longer sample weighs more and (4) grows with the samples' length.

The paper wants (4) to give a sample to the experts of its own type. As printed it does the opposite: (4) is least where
Z is even, that is where the gates go as 1 / I, smaller for the own type. A negative delta does what the text says.
"""
# Shape suffixes: T tokens, H heads, K experts a head, M samples.

import torch
from torch import Tensor

NO_TYPE = -1
"""A sample of unknown type: it takes no part in eq. (4)."""


def load_balance(a_HKT: Tensor, selected_HKT: Tensor) -> Tensor:
    """Eq. (1) from the native logits and the choice, however that was biased; k / K when balanced under top-k."""
    f_HK = selected_HKT.mean(-1, dtype=a_HKT.dtype)
    P_HK = a_HKT.softmax(1).mean(-1)
    return (f_HK * P_HK).sum(1).mean()


def localized_balance(gate_HKT: Tensor, sample_T: Tensor, type_M: Tensor, *, delta: float = 0.1) -> Tensor:
    """Eq. (4), a mean over the heads; `sample_T` says whose token each is, `type_M` holds 0, 1 or `NO_TYPE`.

    Samples without a token count as well, with Q = 0. Zero when no sample has a type.
    """
    H, K, _ = gate_HKT.shape
    typed_M = type_M != NO_TYPE
    if not typed_M.any():
        return gate_HKT.new_zeros(())
    Q_HKM = gate_HKT.new_zeros(H, K, len(type_M)).index_add(2, sample_T, gate_HKT)[:, :, typed_M]
    Z_HKM = coefficients(K, type_M[typed_M], delta).to(Q_HKM.dtype) * Q_HKM
    return (Z_HKM.var((1, 2), correction=0) / Z_HKM.mean((1, 2))).mean()


def coefficients(num_experts: int, type_M: Tensor, delta: float) -> Tensor:
    """Eq. (3) as (K, M)."""
    expert_type_K = (torch.arange(num_experts, device=type_M.device) >= num_experts // 2).to(type_M.dtype)
    return torch.where(expert_type_K[:, None] == type_M, 1 + delta, 1 - delta)
