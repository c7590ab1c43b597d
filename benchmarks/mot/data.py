"""Synthetic data of the paper: the class signal determines which of two label signals is the right one.

Definition 1, for class n and labels y, e = +-1: one token is the class signal c_n, one is y v_n, one is the distractor
e v_n' of another class, and the others are noise from N(0, sigma^2 I / d). All positions are random. The signals
c_1..c_N, v_1..v_N are the first axes. This loses no generality, since noise and initial weights are isotropic.

Attainable values, where s^2 = sigma^2 (L - 3) / d is the variance of the summed noise along a signal:

    E log(1 + exp(-2 (1 + s g) / s^2)),  g ~ N(0, 1)       the entropy of y given sum_l X_l and the class     (1)
    1 - E Phi((1 + s g) / s)^(N - 1)                       misrouted by a linear router, one direction a class (2)
"""
# Shape suffixes: K samples, L tokens, D dimensions.

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus


@dataclass(frozen=True)
class Mixture:
    """The constants of definition 1."""

    noise: float
    """Sigma: the root mean square norm of a noise token."""
    num_classes: int = 4
    num_tokens: int = 8
    dim: int = 16

    @property
    def summed_noise(self) -> float:
        """Standard deviation s of eq. (1) and (2)."""
        return self.noise * math.sqrt((self.num_tokens - 3) / self.dim)


@dataclass(frozen=True)
class Samples:
    """Independent draws of definition 1."""

    x_KLD: Tensor
    y_K: Tensor
    class_K: Tensor


def draw(mixture: Mixture, num_samples: int, generator: torch.Generator) -> Samples:
    """Draw independent samples."""
    K, L, N = num_samples, mixture.num_tokens, mixture.num_classes
    x_KLD = torch.randn(K, L, mixture.dim, generator=generator) * (mixture.noise / math.sqrt(mixture.dim))
    class_K = torch.randint(N, (K,), generator=generator)
    other_K = (class_K + torch.randint(1, N, (K,), generator=generator)) % N
    y_K, e_K = (2.0 * torch.randint(2, (2, K), generator=generator) - 1.0).unbind()
    axes_DD, sample_K = torch.eye(mixture.dim), torch.arange(K)
    place_K3 = torch.rand(K, L, generator=generator).argsort(1)[:, :3]
    x_KLD[sample_K, place_K3[:, 0]] = axes_DD[class_K]
    x_KLD[sample_K, place_K3[:, 1]] = y_K[:, None] * axes_DD[N + class_K]
    x_KLD[sample_K, place_K3[:, 2]] = e_K[:, None] * axes_DD[N + other_K]
    return Samples(x_KLD, y_K, class_K)


def attention_free_floor(mixture: Mixture) -> float:
    """Compute eq. (1) in nats: the lowest expected loss of any function of the summed tokens, with any router."""
    g, weight = _normal()
    s = mixture.summed_noise
    return float((softplus(-2 * (1 + s * g) / s**2) * weight).sum())


def misrouted(mixture: Mixture) -> float:
    """Compute eq. (2), as a share of all samples."""
    g, weight = _normal()
    s = mixture.summed_noise
    return float(1 - (torch.special.ndtr((1 + s * g) / s) ** (mixture.num_classes - 1) * weight).sum())


def _normal() -> tuple[Tensor, Tensor]:
    """Grid points and weights for an expectation over N(0, 1)."""
    g = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    return g, torch.softmax(-g.square() / 2, 0)
