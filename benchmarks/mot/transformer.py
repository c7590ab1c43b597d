"""Transformer baseline without a router: every head processes every sample, and one ReLU network combines the heads.

f(X) = sum_l sum_j a_j relu(sum_h w_jh^T X softmax(X^T W_KQ,h X_l)),   a_j = +-1 / sqrt(J)          figure 1b
"""
# Shape suffixes: K samples, L tokens, D dimensions, H heads, J hidden units.

import math

import torch
from torch import Tensor


class MultiHeadTransformer:
    """Weights with gradients; W_QK is W_KQ transposed. The signs a_j are fixed, half of them positive."""

    def __init__(self, num_heads: int, num_hidden: int, dim: int, *, generator: torch.Generator) -> None:
        H, J, D = num_heads, num_hidden, dim
        self.W_QK_DHD = (torch.randn(D, H, D, generator=generator) / math.sqrt(D)).requires_grad_()
        self.W_JHD = (torch.randn(J, H, D, generator=generator) / math.sqrt(H * D)).requires_grad_()
        self.a_J = (1 - 2 * (torch.arange(J) % 2)) / math.sqrt(J)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The trained weights."""
        return self.W_QK_DHD, self.W_JHD

    @property
    def num_parameters(self) -> int:
        """Number of trained weights."""
        return sum(weight.numel() for weight in self.weights)

    def output(self, x_KLD: Tensor) -> Tensor:
        """Compute f of the module's equation, as (K,)."""
        K, L, D = x_KLD.shape
        queries_KXD = (x_KLD @ self.W_QK_DHD.flatten(1)).view(K, -1, D)  # X = L H: the heads of a token are adjacent
        attention_KXL = (queries_KXD @ x_KLD.mT).softmax(-1)
        heads_KLY = (attention_KXL @ x_KLD).view(K, L, -1)  # Y = H D
        return (torch.relu(heads_KLY @ self.W_JHD.flatten(1).T) @ self.a_J).sum(1)
