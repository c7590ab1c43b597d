"""Training of every model: step sizes are chosen from one grid on separate seeds, then the reported seeds are run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from benchmarks.mot.data import Mixture
from benchmarks.mot.rates import SMALLEST, DecayFits, fit
from benchmarks.mot.train_experts import train_experts
from benchmarks.mot.train_transformer import train_transformer
from benchmarks.mot.training import EvalPoint, ExpertVariant, Hyperparameters, Schedule, TrainingRun
from benchmarks.mot.transformer import MultiHeadTransformer

TUNING_SEEDS = (1000, 1001)
"""Never reported; the reported seeds count from 0."""
TUNING_POINTS = 10
"""Evaluations on the test set per tuning run; only the last ones count."""
HEADS, HIDDEN = 4, 56
"""Same number of weights as 16 experts and their router: 4608 each in 16 dimensions."""


@dataclass(frozen=True)
class ModelSpec:
    """One model of the comparison: experts trained by algorithm 1, or the transformer."""

    name: str
    title: str
    variant: ExpertVariant | None = None
    """None: the transformer."""
    parameters: Hyperparameters = field(default_factory=Hyperparameters)

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """Two seeds where a router is trained: experts specialise on some seeds only, so one would be luck."""
        has_router = self.variant is not None and not self.variant.class_given
        return TUNING_SEEDS if has_router else TUNING_SEEDS[:1]

    def plain_descent_from(self, schedule: Schedule) -> int:
        """Return the iteration after which the FFN moves by plain gradient descent."""
        if self.variant is None:
            return 0
        return schedule.stage_2_ends if self.variant.attention else schedule.stage_1_ends


SMALL_STEPS = Hyperparameters(ffn_stage_1=0.01)
"""With a perfect router, stage I could take the loss below 1e-8; smaller steps leave a loss for stage III to reduce."""
MODELS = (
    ModelSpec("mot", "MoT", ExpertVariant(attention=True, class_given=False)),
    ModelSpec("transformer", "multi-head transformer"),
    ModelSpec("attention_free", "attention-free MoE", ExpertVariant(attention=False, class_given=False)),
    ModelSpec("mot_given", "MoT, class given", ExpertVariant(attention=True, class_given=True), SMALL_STEPS),
    ModelSpec(
        "attention_free_given",
        "attention-free MoE, class given",
        ExpertVariant(attention=False, class_given=True),
        SMALL_STEPS,
    ),
)
"""The three models of the paper, and two controls with a perfect router, which show what routing costs."""


@dataclass(frozen=True)
class ComparisonSettings:
    """Seeds, step sizes, noise levels and schedule of the comparison."""

    seeds: Sequence[int] = (0, 1, 2)
    step_sizes: Sequence[float] = (30.0, 100.0, 300.0)
    """Grid for plain gradient descent: stage III, or the transformer's whole training."""
    mixtures: dict[str, Mixture] = field(default_factory=lambda: {"low": Mixture(0.2), "high": Mixture(0.8)})
    """Two noise levels: rates need one at which the loss can keep falling, the floor one at which it cannot."""
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True)
class ModelResult:
    """The runs of one model on one noise level."""

    model: ModelSpec
    schedule: Schedule
    step_size: float
    tuning: dict[float, float]
    """Step size -> final loss on the tuning seeds."""
    runs: tuple[TrainingRun, ...]

    def final(self, run: TrainingRun) -> float:
        """Return the geometric mean of the test loss over the last fifth."""
        return final_loss(run, self.schedule)

    def descent(self, run: TrainingRun) -> DecayFits:
        """Fit the test loss under plain gradient descent: stage III, or the transformer's whole training."""
        return fit_between(run.points, self.model.plain_descent_from(self.schedule), self.schedule.iterations)

    def stage_1(self, run: TrainingRun) -> DecayFits:
        """Fit the test loss under the normalised steps of stage I."""
        return fit_between(run.points, 0, self.schedule.stage_1_ends)


def measure(settings: ComparisonSettings, mixture: Mixture, model: ModelSpec) -> ModelResult:
    """Choose the step size, then train every seed with it."""
    schedule = settings.schedule
    sparse = replace(schedule, test_every=math.ceil(schedule.iterations / TUNING_POINTS))

    def tuning_loss(step_size: float) -> float:
        runs = [train(mixture, sparse, model, step_size, seed) for seed in model.tuning_seeds]
        return geometric_mean([final_loss(run, sparse) for run in runs])

    tuning = {step_size: tuning_loss(step_size) for step_size in settings.step_sizes}
    best = min(tuning, key=lambda step_size: tuning[step_size])
    runs = tuple(train(mixture, schedule, model, best, seed) for seed in settings.seeds)
    return ModelResult(model, schedule, best, tuning, runs)


def train(mixture: Mixture, schedule: Schedule, model: ModelSpec, step_size: float, seed: int) -> TrainingRun:
    """Train one model from one seed."""
    if model.variant is not None:
        return train_experts(mixture, schedule, model.parameters, model.variant, step_size=step_size, seed=seed)

    def build(generator: torch.Generator) -> MultiHeadTransformer:
        return MultiHeadTransformer(HEADS, HIDDEN, mixture.dim, generator=generator)

    return train_transformer(mixture, schedule, build, step_size=step_size, seed=seed)


def final_loss(run: TrainingRun, schedule: Schedule) -> float:
    """Return the geometric mean of the test loss over the last fifth, so that one spike does not decide."""
    return geometric_mean([point.loss for point in run.points if point.iteration > 0.8 * schedule.iterations])


def geometric_mean(losses: Sequence[float]) -> float:
    """Return the geometric mean; losses below the smallest float32 count as that value."""
    return math.exp(fmean(math.log(max(loss, SMALLEST)) for loss in losses))


def fit_between(points: Sequence[EvalPoint], after: int, until: int) -> DecayFits:
    """Fit the points with after < iteration <= until, counting iterations from `after`."""
    chosen = [point for point in points if after < point.iteration <= until]
    return fit([point.iteration - after for point in chosen], [point.loss for point in chosen])
