"""Outputs and gradients of the experts."""

import pytest
import torch
from torch.nn.functional import softplus

from benchmarks.mot.models import attended, draw
from tests.benchmarks.mot.models import NOISY, experts, generator


def test_attention_equals_equation_4() -> None:
    """It is the sum over queries, each with the softmax over all keys."""
    x_KLD = draw(NOISY, 3, generator()).x_KLD
    W_KQ_KDD = torch.randn(3, NOISY.dim, NOISY.dim, generator=generator(1))
    for k, found_D in enumerate(attended(x_KLD, W_KQ_KDD)):
        expected_D = torch.zeros(NOISY.dim)
        for x_D in x_KLD[k]:
            expected_D += x_KLD[k].T @ (x_KLD[k] @ W_KQ_KDD[k] @ x_D).softmax(0)
        torch.testing.assert_close(found_D, expected_D)


@pytest.mark.parametrize("attention", [True, False])
def test_gradients_are_those_of_the_two_losses(attention: bool) -> None:
    """Eq. 12 and 13 agree with automatic differentiation of eq. 5 and 7; for the router, f is a constant."""
    model, samples = experts(attention=attention), draw(NOISY, 40, generator(2))
    h_KM = model.logits(samples.x_KLD)
    expert_K = h_KM.argmax(1)
    W_MD, theta_MD = model.W_MD.clone().requires_grad_(), model.theta_MD.clone().requires_grad_()
    F_KD = model.features(samples.x_KLD, expert_K)
    f_K = (F_KD * W_MD[expert_K]).sum(1)
    (expected_MD,) = torch.autograd.grad(softplus(-samples.y_K * f_K).mean(), W_MD)
    torch.testing.assert_close(model.ffn_gradient(F_KD, samples.y_K, expert_K), expected_MD)
    pi_K = (samples.x_KLD.sum(1) @ theta_MD.T).softmax(1)[torch.arange(40), expert_K]
    (expected_MD,) = torch.autograd.grad(softplus(-samples.y_K * f_K.detach() * pi_K).mean(), theta_MD)
    torch.testing.assert_close(model.router_gradient(samples, f_K.detach(), h_KM, expert_K), expected_MD)
