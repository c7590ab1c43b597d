"""Algorithm 1: training of experts in three stages.

1. Stage I, t <= T1: each W_i moves by eta along its normalised gradient (eq. 8).
2. Stage II, t <= T2: each W_KQ,i moves by plain gradient descent (eq. 9). Skipped without attention.
3. Stage III: each W_i moves by plain gradient descent (eq. 10).

The router moves by plain gradient descent in every iteration (eq. 6). Theorem 1 is about expected gradients, so every
iteration draws K fresh samples. The test loss is computed without exploration noise.
"""
# Shape suffixes: K samples, L tokens, D dimensions, M experts, N classes.

import torch
from torch import Tensor

from benchmarks.mot.data import Mixture, Samples, draw
from benchmarks.mot.training import ExpertVariant, Hyperparameters, Routing, Schedule, TrainingRun, eval_point
from benchmarks.mot.transformer_experts import TransformerExperts


def train_experts(
    mixture: Mixture,
    schedule: Schedule,
    parameters: Hyperparameters,
    variant: ExpertVariant,
    *,
    step_size: float,
    seed: int,
) -> TrainingRun:
    """Run algorithm 1; `step_size` is that of stage III."""
    generator = torch.Generator().manual_seed(seed)
    test = draw(mixture, schedule.num_test_samples, generator)
    model = TransformerExperts(
        parameters.num_experts, mixture.dim, init=parameters.init, attention=variant.attention, generator=generator
    )
    points, matrices = [], []
    for t in range(1, schedule.iterations + 1):
        samples = draw(mixture, schedule.num_samples, generator)
        h_KM = model.logits(samples.x_KLD)
        noise_KM = parameters.exploration * torch.rand(h_KM.shape, generator=generator)
        expert_K = samples.class_K if variant.class_given else (h_KM + noise_KM).argmax(1)
        f_K = update_experts(model, samples, expert_K, schedule, parameters, t=t, step_size=step_size)
        if not variant.class_given:
            model.theta_MD -= parameters.router * model.router_gradient(samples, f_K, h_KM, expert_K)  # eq. 6
        if schedule.evaluates_after(t):
            points.append(eval_point(t, test, model.output(test.x_KLD, route(model, test, variant))))
        if t in {schedule.stage_1_ends, schedule.iterations}:
            matrices.append(routing_matrix(route(model, test, variant), test.class_K, parameters, mixture))
    specialised_N = torch.bincount(specialities(model, mixture), minlength=mixture.num_classes)
    return TrainingRun(tuple(points), model.num_parameters, Routing(matrices[0], matrices[-1], specialised_N))


def update_experts(
    model: TransformerExperts,
    samples: Samples,
    expert_K: Tensor,
    schedule: Schedule,
    parameters: Hyperparameters,
    *,
    t: int,
    step_size: float,
) -> Tensor:
    """Apply eq. 8, 9 or 10, depending on iteration t, and return the outputs f from before the update."""
    F_KD = model.features(samples.x_KLD, expert_K)
    if t <= schedule.stage_1_ends:
        gradient_MD = model.ffn_gradient(F_KD, samples.y_K, expert_K)
        norm_M1 = gradient_MD.norm(dim=1, keepdim=True).clamp_min(1e-30)  # an expert without samples does not move
        step_MD = parameters.ffn_stage_1 * gradient_MD / norm_M1
    elif model.W_KQ_MDD is not None and t <= schedule.stage_2_ends:
        model.W_KQ_MDD -= parameters.attention * model.attention_gradient(samples, expert_K)
        step_MD = torch.zeros_like(model.W_MD)
    else:
        step_MD = step_size * model.ffn_gradient(F_KD, samples.y_K, expert_K)
    f_K = (F_KD * model.W_MD[expert_K]).sum(1)
    model.W_MD -= step_MD
    return f_K


def route(model: TransformerExperts, samples: Samples, variant: ExpertVariant) -> Tensor:
    """Select an expert per sample by eq. 1 without exploration, as (K,)."""
    return samples.class_K if variant.class_given else model.logits(samples.x_KLD).argmax(1)


def routing_matrix(expert_K: Tensor, class_K: Tensor, parameters: Hyperparameters, mixture: Mixture) -> Tensor:
    """Compute the share of each class that each expert receives, as (M, N)."""
    M, N = parameters.num_experts, mixture.num_classes
    count_MN = torch.bincount(expert_K * N + class_K, minlength=M * N).view(M, N).double()
    return count_MN / count_MN.sum(0).clamp_min(1.0)


def specialities(model: TransformerExperts, mixture: Mixture) -> Tensor:
    """Compute the class that each expert specialises in, n*_i = argmax_n <W_i, v_n> of definition 2, as (M,)."""
    N = mixture.num_classes
    return model.W_MD[:, N : 2 * N].argmax(1)
