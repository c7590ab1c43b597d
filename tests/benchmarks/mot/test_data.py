"""The synthetic data and its closed forms."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import softplus

from benchmarks.mot.models import attention_free_floor, draw, misrouted
from tests.benchmarks.mot.models import NOISY, generator


def test_a_sample_is_of_definition_1() -> None:
    """It has its class signal, its label's signal and one distractor at three positions; the rest is noise."""
    mixture = replace(NOISY, noise=0.0)
    samples = draw(mixture, 2000, generator())
    N = mixture.num_classes
    total_KD = samples.x_KLD.sum(1)  # without noise the sum names the three signals
    sample_K = torch.arange(2000)
    assert torch.equal(total_KD[:, :N].argmax(1), samples.class_K)
    assert torch.equal(total_KD[sample_K, N + samples.class_K], samples.y_K)
    assert (total_KD[:, N : 2 * N].abs().sum(1) == 2).all()
    assert (samples.x_KLD.abs().sum(-1) == 1).sum() == 3 * 2000
    assert torch.bincount(samples.class_K).min() > 400
    assert samples.y_K.mean().abs() < 0.1


def test_noise_has_the_length_that_definition_1_gives_it() -> None:
    """A noise token's squared length is sigma^2 on average."""
    squared_KL = draw(NOISY, 4000, generator()).x_KLD.square().sum(-1)
    noise = squared_KL.sort(1).values[:, : NOISY.num_tokens - 3]  # the signals have length 1, and noise rarely has
    assert noise.mean().item() == pytest.approx(NOISY.noise**2, rel=0.1)


def test_the_floor_is_the_loss_of_a_perfectly_routed_linear_expert() -> None:
    """The best scale along the label's own signal has the loss of the closed form."""
    samples = draw(NOISY, 200_000, generator())
    sample_K = torch.arange(200_000)
    yf_K = samples.y_K * samples.x_KLD.sum(1)[sample_K, NOISY.num_classes + samples.class_K]
    best = min(softplus(-scale * yf_K).mean().item() for scale in range(2, 30))
    assert best == pytest.approx(attention_free_floor(NOISY), rel=0.03)


def test_misrouting_is_that_of_the_class_signals() -> None:
    """The largest projection on a class signal belongs to another class as often as in the closed form."""
    samples = draw(NOISY, 100_000, generator())
    chosen_K = samples.x_KLD.sum(1)[:, : NOISY.num_classes].argmax(1)
    assert (chosen_K != samples.class_K).float().mean().item() == pytest.approx(misrouted(NOISY), rel=0.03)
