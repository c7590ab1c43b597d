"""Small models and settings for the tests of the MoT benchmark."""

import torch

from benchmarks.mot.models import Mixture, Schedule, TransformerExperts

NOISY = Mixture(noise=0.8)
SHORT = Schedule(iterations=60, stage_1_ends=30, stage_2_ends=40, num_samples=64, num_test_samples=256, test_every=5)


def generator(seed: int = 0) -> torch.Generator:
    """A generator with its own seed."""
    return torch.Generator().manual_seed(seed)


def experts(*, attention: bool = True) -> TransformerExperts:
    """Five experts with a random router."""
    model = TransformerExperts(num_experts=5, dim=NOISY.dim, init=2.0, attention=attention, generator=generator())
    model.theta_MD = torch.randn(5, NOISY.dim, generator=generator(1))
    return model
