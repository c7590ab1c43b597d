"""Algorithm 1, and gradient descent for the baseline.

1. Stage I, t <= T1: each W_i moves by eta along its normalised gradient (eq. 8).
2. Stage II, t <= T2: each W_KQ,i moves by plain gradient descent (eq. 9). Skipped without attention.
3. Stage III: each W_i moves by plain gradient descent (eq. 10).

The router moves by plain gradient descent in every iteration (eq. 6). Theorem 1 is about expected gradients, so every
iteration draws K fresh samples. Test loss is noted without exploration noise.
"""
# Shape suffixes: K samples, L tokens, D dimensions, M experts, N classes.

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from streamlearn.bench.mot.data import Mixture, Samples, draw
from streamlearn.bench.mot.experts import Experts
from streamlearn.bench.mot.transformer import MultiHead


@dataclass(frozen=True)
class Schedule:
    """How long, on how much."""

    iterations: int = 1250
    stage_1_ends: int = 600
    stage_2_ends: int = 750
    num_samples: int = 512
    """K; the paper wants the order of N^2, which is 16."""
    num_test_samples: int = 4096
    test_every: int = 25


@dataclass(frozen=True)
class Choices:
    """What algorithm 1 leaves open; found by random search on other seeds for a low final loss of MoT."""

    num_experts: int = 16
    """M, more than N ln N = 5.5."""
    init: float = 0.1
    """Sigma_0."""
    ffn_stage_1: float = 0.035
    """Eta of eq. 8."""
    attention: float = 30.0
    router: float = 9000.0
    """Large because eq. 12 carries 1 / (M^2 N) and the small f of stage I."""
    exploration: float = 18.0
    """r is uniform on [0, this]."""


@dataclass(frozen=True)
class Point:
    """The test set after an iteration."""

    iteration: int
    loss: float
    error: float


@dataclass(frozen=True)
class Run:
    """One training from one seed."""

    points: tuple[Point, ...]
    num_parameters: int
    routing: "Routing | None" = None


@dataclass(frozen=True)
class Routing:
    """Where test samples go, without exploration."""

    stage_1_MN: Tensor
    """Share of each class that each expert gets at the end of stage I."""
    final_MN: Tensor
    """The same at the end."""
    specialised_N: Tensor
    """Experts in each class's M_n of definition 2, at the end."""


@dataclass(frozen=True)
class Expertise:
    """Which kind of experts algorithm 1 trains."""

    attention: bool
    class_given: bool
    """Expert n gets class n, as a perfect router would have it, and no router learns."""


def train_experts(  # what is measured, and how
    mixture: Mixture, schedule: Schedule, choices: Choices, expertise: Expertise, *, step_size: float, seed: int
) -> Run:
    """Algorithm 1."""
    generator = torch.Generator().manual_seed(seed)
    test = draw(mixture, schedule.num_test_samples, generator)
    model = Experts(
        choices.num_experts, mixture.dim, init=choices.init, attention=expertise.attention, generator=generator
    )
    points, matrices = [], []
    for t in range(1, schedule.iterations + 1):
        samples = draw(mixture, schedule.num_samples, generator)
        h_KM = model.logits(samples.x_KLD)
        noise_KM = choices.exploration * torch.rand(h_KM.shape, generator=generator)
        expert_K = samples.class_K if expertise.class_given else (h_KM + noise_KM).argmax(1)
        f_K = update_experts(model, samples, expert_K, schedule, choices, t=t, step_size=step_size)
        if not expertise.class_given:
            model.theta_MD -= choices.router * model.router_gradient(samples, f_K, h_KM, expert_K)  # eq. 6
        if noted(t, schedule):
            points.append(point(t, test, model.output(test.x_KLD, route(model, test, expertise))))
        if t in {schedule.stage_1_ends, schedule.iterations}:
            matrices.append(routing_matrix(route(model, test, expertise), test.class_K, choices, mixture))
    specialised_N = torch.bincount(specialities(model, mixture), minlength=mixture.num_classes)
    return Run(tuple(points), model.num_parameters, Routing(matrices[0], matrices[-1], specialised_N))


def update_experts(
    model: Experts,
    samples: Samples,
    expert_K: Tensor,
    schedule: Schedule,
    choices: Choices,
    *,
    t: int,
    step_size: float,
) -> Tensor:
    """Eq. 8, 9 or 10, as iteration t has it; returns the outputs f from before the update, for the router's."""
    F_KD = model.features(samples.x_KLD, expert_K)
    if t <= schedule.stage_1_ends:
        gradient_MD = model.ffn_gradient(F_KD, samples.y_K, expert_K)
        norm_M1 = gradient_MD.norm(dim=1, keepdim=True).clamp_min(1e-30)  # an expert without samples stays
        step_MD = choices.ffn_stage_1 * gradient_MD / norm_M1
    elif model.W_KQ_MDD is not None and t <= schedule.stage_2_ends:
        model.W_KQ_MDD -= choices.attention * model.attention_gradient(samples, expert_K)
        step_MD = torch.zeros_like(model.W_MD)
    else:
        step_MD = step_size * model.ffn_gradient(F_KD, samples.y_K, expert_K)
    f_K = (F_KD * model.W_MD[expert_K]).sum(1)
    model.W_MD -= step_MD
    return f_K


def train_transformer(
    mixture: Mixture,
    schedule: Schedule,
    model_of: Callable[[torch.Generator], MultiHead],
    *,
    step_size: float,
    seed: int,
) -> Run:
    """Gradient descent on all weights at once, on the same kind and number of samples."""
    generator = torch.Generator().manual_seed(seed)
    test = draw(mixture, schedule.num_test_samples, generator)
    model = model_of(generator)
    points = []
    for t in range(1, schedule.iterations + 1):
        samples = draw(mixture, schedule.num_samples, generator)
        loss = softplus(-samples.y_K * model.output(samples.x_KLD)).mean()
        gradients = torch.autograd.grad(loss, model.weights)
        with torch.no_grad():
            torch._foreach_add_(model.weights, gradients, alpha=-step_size)
            if noted(t, schedule):
                points.append(point(t, test, model.output(test.x_KLD)))
    return Run(tuple(points), model.num_parameters)


def noted(iteration: int, schedule: Schedule) -> bool:
    """Whether the test set is looked at after this iteration."""
    return iteration % schedule.test_every == 0 or iteration in (1, schedule.iterations)


def point(iteration: int, test: Samples, f_K: Tensor) -> Point:
    """Loss and error of the outputs f on the test set."""
    yf_K = test.y_K * f_K
    return Point(iteration, softplus(-yf_K).mean().item(), (yf_K <= 0).float().mean().item())


def route(model: Experts, samples: Samples, expertise: Expertise) -> Tensor:
    """Eq. 1 without exploration."""
    return samples.class_K if expertise.class_given else model.logits(samples.x_KLD).argmax(1)


def routing_matrix(expert_K: Tensor, class_K: Tensor, choices: Choices, mixture: Mixture) -> Tensor:
    """Share of each class that each expert gets, as (M, N)."""
    M, N = choices.num_experts, mixture.num_classes
    count_MN = torch.bincount(expert_K * N + class_K, minlength=M * N).view(M, N).double()
    return count_MN / count_MN.sum(0).clamp_min(1.0)


def specialities(model: Experts, mixture: Mixture) -> Tensor:
    """Definition 2: n*_i = argmax_n <W_i, v_n>, as (M,)."""
    N = mixture.num_classes
    return model.W_MD[:, N : 2 * N].argmax(1)
