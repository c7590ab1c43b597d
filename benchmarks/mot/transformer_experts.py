"""One-layer transformer experts with a linear router, and the same experts without attention.

    h_i = theta_i^T sum_l X_l,   m = argmax_i h_i + r_i,   pi = softmax(h)              eq. 1, 2; r is exploration noise
    f(X) = sum_l W_m^T X softmax(X^T W_KQ,m X_l) = W_m^T F                              eq. 4
    L^e = mean l(y f),   L^r = mean l(y f pi_m),   l(z) = log(1 + exp(-z))              eq. 7, 5

Without attention F = sum_l X_l, as in the proof of lemma 1. Gradients, lemmas 2 and 3:

    d L^e / d W_i = mean over k with m_k = i of l'(y f) y F                             eq. 13
    d L^r / d theta_i = mean l'(y f pi_m) y f pi_m (1[i = m] - pi_i) sum_l X_l          eq. 12
"""
# Shape suffixes: K samples, L tokens, D dimensions, M experts.

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from benchmarks.mot.data import Samples


class TransformerExperts:
    """Weights, outputs and gradients; the caller updates the weights."""

    def __init__(self, num_experts: int, dim: int, *, init: float, attention: bool, generator: torch.Generator) -> None:
        std = init / math.sqrt(dim)
        self.W_MD = torch.randn(num_experts, dim, generator=generator) * std
        self.W_KQ_MDD = torch.randn(num_experts, dim, dim, generator=generator) * std if attention else None
        self.theta_MD = torch.zeros(num_experts, dim)

    @property
    def num_parameters(self) -> int:
        """Number of weights, including those of the router."""
        attention = 0 if self.W_KQ_MDD is None else self.W_KQ_MDD.numel()
        return self.W_MD.numel() + self.theta_MD.numel() + attention

    def logits(self, x_KLD: Tensor) -> Tensor:
        """Compute h of eq. 1, as (K, M)."""
        return x_KLD.sum(1) @ self.theta_MD.T

    def features(self, x_KLD: Tensor, expert_K: Tensor) -> Tensor:
        """Compute F, as (K, D)."""
        return x_KLD.sum(1) if self.W_KQ_MDD is None else attended(x_KLD, self.W_KQ_MDD[expert_K])

    def output(self, x_KLD: Tensor, expert_K: Tensor) -> Tensor:
        """Compute f of eq. 4, as (K,)."""
        return (self.features(x_KLD, expert_K) * self.W_MD[expert_K]).sum(1)

    def ffn_gradient(self, F_KD: Tensor, y_K: Tensor, expert_K: Tensor) -> Tensor:
        """Compute the gradient of eq. 7 with respect to W by eq. 13, as (M, D)."""
        f_K = (F_KD * self.W_MD[expert_K]).sum(1)
        dW_KD = (slope(y_K * f_K) * y_K / len(y_K))[:, None] * F_KD
        return torch.zeros_like(self.W_MD).index_add(0, expert_K, dW_KD)

    def attention_gradient(self, samples: Samples, expert_K: Tensor) -> Tensor:
        """Compute the gradient of eq. 7 with respect to W_KQ (lemma 4), as (M, D, D)."""
        assert self.W_KQ_MDD is not None
        W_KQ_MDD = self.W_KQ_MDD.detach().requires_grad_()
        f_K = (attended(samples.x_KLD, W_KQ_MDD[expert_K]) * self.W_MD[expert_K]).sum(1)
        (dW_KQ_MDD,) = torch.autograd.grad(softplus(-samples.y_K * f_K).mean(), W_KQ_MDD)
        return dW_KQ_MDD

    def router_gradient(self, samples: Samples, f_K: Tensor, h_KM: Tensor, expert_K: Tensor) -> Tensor:
        """Compute the gradient of eq. 5 with respect to theta by eq. 12, as (M, D)."""
        pi_KM = h_KM.softmax(1)
        yf_pi_K = samples.y_K * f_K * pi_KM.gather(1, expert_K[:, None])[:, 0]
        dh_KM = (slope(yf_pi_K) * yf_pi_K / len(f_K))[:, None] * (one_hot(expert_K, h_KM.shape[1]) - pi_KM)
        return dh_KM.T @ samples.x_KLD.sum(1)


def attended(x_KLD: Tensor, W_KQ_KDD: Tensor) -> Tensor:
    """Compute X times the sum over queries of the softmax over keys; each sample has its own W_KQ."""
    score_KLL = x_KLD @ W_KQ_KDD @ x_KLD.mT  # keys by queries
    weight_KL = score_KLL.softmax(1).sum(2)
    return (weight_KL[:, None] @ x_KLD)[:, 0]


def slope(z: Tensor) -> Tensor:
    """Compute the derivative of the logistic loss l."""
    return -torch.sigmoid(-z)
