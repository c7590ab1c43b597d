"""Types that both training procedures share: schedule, hyperparameters, and the record of a run."""
# Shape suffixes: K samples, M experts, N classes.

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.mot.data import Samples


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
    specialised_N: Tensor
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
