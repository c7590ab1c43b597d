"""Synthetic data of the paper, its models, and their training.

The class signal determines which of two label signals is the right one.

Definition 1, for class n and labels y, e = +-1: one token is the class signal c_n, one is y v_n, one is the distractor
e v_n' of another class, and the others are noise from N(0, sigma^2 I / d). All positions are random. The signals
c_1..c_N, v_1..v_N are the first axes. This loses no generality, since noise and initial weights are isotropic.

Attainable values, where s^2 = sigma^2 (L - 3) / d is the variance of the summed noise along a signal:

    E log(1 + exp(-2 (1 + s g) / s^2)),  g ~ N(0, 1)       the entropy of y given sum_l X_l and the class     (1)
    1 - E Phi((1 + s g) / s)^(N - 1)                       misrouted by a linear router, one direction a class (2)
"""

# Shape suffixes: K samples, L tokens, D dimensions, M experts, N classes, H heads, J hidden units.

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus


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


@dataclass(frozen=True)
class Schedule:
    """Iterations and sample counts."""

    iterations: int = 1250
    stage_1_ends: int = 600
    stage_2_ends: int = 750
    num_samples: int = 512
    """K; the paper asks for the order of N^2, which is 16."""
    num_test_samples: int = 4096
    test_every: int = 25

    def evaluates_after(self, iteration: int) -> bool:
        """Return whether the model is evaluated after this iteration."""
        return iteration % self.test_every == 0 or iteration in (1, self.iterations)


@dataclass(frozen=True)
class Hyperparameters:
    """What algorithm 1 leaves open, found by random search on other seeds for a low final loss of MoT."""

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
    """r is uniform on [0, exploration]."""


@dataclass(frozen=True)
class ExpertVariant:
    """The kind of experts that algorithm 1 trains."""

    attention: bool
    class_given: bool
    """Expert n receives class n, as with a perfect router, and no router is trained."""


@dataclass(frozen=True)
class EvalPoint:
    """Loss and error on the test set after an iteration."""

    iteration: int
    loss: float
    error: float


@dataclass(frozen=True)
class Routing:
    """Routing of the test samples, without exploration noise."""

    stage_1_MN: Tensor
    """Share of each class that each expert receives at the end of stage I."""
    final_MN: Tensor
    """The same at the end of training."""
    specialized_N: Tensor
    """Number of experts in the set M_n of definition 2 of each class, at the end of training."""


@dataclass(frozen=True)
class TrainingRun:
    """One training run from one seed."""

    points: tuple[EvalPoint, ...]
    num_parameters: int
    routing: Routing | None = None


def eval_point(iteration: int, test: Samples, f_K: Tensor) -> EvalPoint:
    """Compute loss and error of the outputs f on the test set."""
    yf_K = test.y_K * f_K
    return EvalPoint(iteration, softplus(-yf_K).mean().item(), (yf_K <= 0).float().mean().item())


class TransformerExperts:
    """One-layer transformer experts with a linear router, and the same experts without attention.

        h_i = theta_i^T sum_l X_l,   m = argmax_i h_i + r_i,   pi = softmax(h)          eq. 1, 2; r is exploration noise
        f(X) = sum_l W_m^T X softmax(X^T W_KQ,m X_l) = W_m^T F                              eq. 4
        L^e = mean l(y f),   L^r = mean l(y f pi_m),   l(z) = log(1 + exp(-z))              eq. 7, 5

    Without attention F = sum_l X_l, as in the proof of lemma 1. Gradients, lemmas 2 and 3:

        d L^e / d W_i = mean over k with m_k = i of l'(y f) y F                             eq. 13
        d L^r / d theta_i = mean l'(y f pi_m) y f pi_m (1[i = m] - pi_i) sum_l X_l          eq. 12
    """

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


class MultiHeadTransformer:
    """Transformer baseline without a router: every head processes every sample, one ReLU network combines them.

    f(X) = sum_l sum_j a_j relu(sum_h w_jh^T X softmax(X^T W_KQ,h X_l)),   a_j = +-1 / sqrt(J)          figure 1b

    W_QK is W_KQ transposed. The signs a_j are fixed, half of them positive.
    """

    def __init__(self, num_heads: int, num_hidden: int, dim: int, *, generator: torch.Generator) -> None:
        H, J, D = num_heads, num_hidden, dim
        self.W_QK_DHD = (torch.randn(D, H, D, generator=generator) / math.sqrt(D)).requires_grad_()
        self.W_JHD = (torch.randn(J, H, D, generator=generator) / math.sqrt(H * D)).requires_grad_()
        self.a_J = (1 - 2 * (torch.arange(J) % 2)) / math.sqrt(J)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        return self.W_QK_DHD, self.W_JHD

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    def output(self, x_KLD: Tensor) -> Tensor:
        """Compute f of the module's equation, as (K,)."""
        K, L, D = x_KLD.shape
        queries_KXD = (x_KLD @ self.W_QK_DHD.flatten(1)).view(K, -1, D)  # X = L H: the heads of a token are adjacent
        attention_KXL = (queries_KXD @ x_KLD.mT).softmax(-1)
        heads_KLY = (attention_KXL @ x_KLD).view(K, L, -1)  # Y = H D
        return (torch.relu(heads_KLY @ self.W_JHD.flatten(1).T) @ self.a_J).sum(1)


def train_experts(
    mixture: Mixture,
    schedule: Schedule,
    parameters: Hyperparameters,
    variant: ExpertVariant,
    *,
    step_size: float,
    seed: int,
) -> TrainingRun:
    """Algorithm 1: training of experts in three stages.

    1. Stage I, t <= T1: each W_i moves by eta along its normalized gradient (eq. 8).
    2. Stage II, t <= T2: each W_KQ,i moves by plain gradient descent (eq. 9). Skipped without attention.
    3. Stage III: each W_i moves by plain gradient descent (eq. 10).

    The router moves by plain gradient descent in every iteration (eq. 6). Theorem 1 is about expected gradients, so
    every iteration draws K fresh samples. The test loss is computed without exploration noise.

    `step_size` is that of stage III.
    """
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
    specialized_N = torch.bincount(specialities(model, mixture), minlength=mixture.num_classes)
    return TrainingRun(tuple(points), model.num_parameters, Routing(matrices[0], matrices[-1], specialized_N))


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
    """Compute the class that each expert specializes in, n*_i = argmax_n <W_i, v_n> of definition 2, as (M,)."""
    N = mixture.num_classes
    return model.W_MD[:, N : 2 * N].argmax(1)


def train_transformer(
    mixture: Mixture,
    schedule: Schedule,
    build: Callable[[torch.Generator], MultiHeadTransformer],
    *,
    step_size: float,
    seed: int,
) -> TrainingRun:
    """Train all weights at once, on the same distribution and number of samples as the experts."""
    generator = torch.Generator().manual_seed(seed)
    test = draw(mixture, schedule.num_test_samples, generator)
    model = build(generator)
    points = []
    for t in range(1, schedule.iterations + 1):
        samples = draw(mixture, schedule.num_samples, generator)
        loss = softplus(-samples.y_K * model.output(samples.x_KLD)).mean()
        gradients = torch.autograd.grad(loss, model.weights)
        with torch.no_grad():
            torch._foreach_add_(model.weights, gradients, alpha=-step_size)
            if schedule.evaluates_after(t):
                points.append(eval_point(t, test, model.output(test.x_KLD)))
    return TrainingRun(tuple(points), model.num_parameters)
