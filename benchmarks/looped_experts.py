"""Experts computed one by one in a loop: gather an expert's tokens, apply the expert, add the result.

    for m in heads, j in experts:  y[t] += (alpha / r) g_tmj B_mj A_mj h_tm   for the tokens t that chose j      (1)

The public MixLoRA and LoRAMoE code runs its experts this way. The result equals that of `HeadLoraLinear` up to
rounding. The speed benchmark uses it in the arm `mh_moe_loop`.
"""
# Shape suffixes: T tokens, N tokens of one expert, D in features, H heads, S = D / H slice, K experts a head, R rank.

from torch import Tensor, nn

from streamlearn.adapters import HeadLoraLinear


class LoopedHeadLoraLinear(HeadLoraLinear):
    """`HeadLoraLinear` with a loop over heads and experts instead of batched products."""

    def experts(self, name: str, x: Tensor, y: Tensor, tokens_P: Tensor | None, weight: float = 1.0) -> Tensor:
        """Add the output of all experts to `y` by eq. (1)."""
        assert (tokens_P, weight) == (None, 1.0), "the loop is measured with experts that all regimes share"
        x_TD, y_TO = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        A_HKRS, B_HKRO = self.head_lora_A[name].to(y_TO.dtype), self.head_lora_B[name].to(y_TO.dtype)
        H, K, _, S = A_HKRS.shape
        gate_HKT = self.route(name, x_TD).to(y_TO.dtype)
        for m in range(H):
            h_TS = x_TD[:, m * S : (m + 1) * S]
            for j in range(K):
                t_N = gate_HKT[m, j].nonzero().squeeze(-1)
                z_NR = gate_HKT[m, j, t_N, None] * (h_TS[t_N] @ A_HKRS[m, j].T)
                y_TO = y_TO.index_add(0, t_N, z_NR @ B_HKRO[m, j], alpha=self.head_lora_config[name].scaling)
        return y_TO.view_as(y)


def loop_over_experts(model: nn.Module) -> None:
    """Switch every adapter layer of `model` to the loop; parameters and their names do not change."""
    for layer in model.modules():
        if type(layer) is HeadLoraLinear:
            layer.__class__ = LoopedHeadLoraLinear
