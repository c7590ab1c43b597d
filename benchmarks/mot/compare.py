"""Training of every model, and results as plain numbers.

Step sizes are chosen from one grid on separate seeds, then the reported seeds are run.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.mot.models import (
    ExpertVariant,
    Hyperparameters,
    Mixture,
    MultiHeadTransformer,
    Routing,
    Schedule,
    TrainingRun,
    attention_free_floor,
    misrouted,
    train_experts,
    train_transformer,
)

SMALLEST = 1e-38  # float32 underflows to zero below it


@dataclass(frozen=True)
class DecayFits:
    """Fits of a falling loss to an exponential and to a power law.

        loss = a exp(-c t)   epsilon is reached after O(log 1/epsilon) iterations, theorem 1's claim for stage III  (1)
        loss = a t^-p        p = 1 is O(1/epsilon), the rate that the paper quotes for a single transformer         (2)

    In log loss both are straight lines, over t and over log t, so their R^2 are comparable. The proof of theorem 1 uses
    lemma 16's upper bound of the gradient as its size throughout stage III. The slope of the logistic loss shrinks with
    the loss, and plain gradient descent then gives eq. (2). The normalized steps of stage I (eq. 8) do not shrink and
    give eq. (1).
    """

    exponential_rate: float
    """c of eq. (1), per iteration."""
    exponential_r2: float
    power_exponent: float
    """p of eq. (2)."""
    power_r2: float


def fit(iterations: Sequence[int], losses: Sequence[float]) -> DecayFits:
    """Fit eq. (1) and (2) by least squares; iterations count from 1 at the start of the phase."""
    t = np.asarray(iterations, dtype=np.float64)
    log_loss = np.log(np.maximum(np.asarray(losses, dtype=np.float64), SMALLEST))
    rate, exponential_r2 = _line(t, log_loss)
    exponent, power_r2 = _line(np.log(t), log_loss)
    return DecayFits(-rate, exponential_r2, -exponent, power_r2)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and R^2 of a least-squares line; R^2 is 0 when y is constant."""
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx))
    total = float(dy @ dy)
    return slope, 1 - float(((dy - slope * dx) ** 2).sum()) / total if total > 0 else 0.0


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
        """Two seeds where a router is trained: experts specialize on some seeds only, so one would be luck."""
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


def measure(settings: ComparisonSettings, mixture: Mixture, model: ModelSpec) -> dict[str, Any]:
    """Choose the step size, train every seed with it, and summarize; means of losses over the seeds are geometric.

    `descent` fits the test loss under plain gradient descent: stage III, or the transformer's whole training; `stage_1`
    fits it under the normalized steps of stage I.
    """
    schedule = settings.schedule
    sparse = replace(schedule, test_every=math.ceil(schedule.iterations / TUNING_POINTS))

    def tuning_loss(step_size: float) -> float:
        runs = [train(mixture, sparse, model, step_size, seed) for seed in model.tuning_seeds]
        return geometric_mean([final_loss(run, sparse) for run in runs])

    tuning = {step_size: tuning_loss(step_size) for step_size in settings.step_sizes}
    best = min(tuning, key=lambda step_size: tuning[step_size])
    runs = [train(mixture, schedule, model, best, seed) for seed in settings.seeds]
    finals = [final_loss(run, schedule) for run in runs]
    summary = {
        "title": model.title,
        "num_parameters": runs[0].num_parameters,
        "step_size": best,
        "step_size_at_edge": best in (min(tuning), max(tuning)),
        "final_loss": {"mean": geometric_mean(finals), "lowest": min(finals), "highest": max(finals)},
        "final_error": fmean(run.points[-1].error for run in runs),
        "descent": decay(runs, model.plain_descent_from(schedule), schedule.iterations),
    }
    if model.variant is not None:
        summary["stage_1"] = decay(runs, 0, schedule.stage_1_ends)
        summary["routing"] = [routing(run.routing) for run in runs if run.routing is not None]
    return summary


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


def decay(runs: Sequence[TrainingRun], after: int, until: int) -> dict[str, Any]:
    """Fit the points with after < iteration <= until, average over the runs, and name the law with the higher R^2."""
    fits = []
    for run in runs:
        points = [point for point in run.points if after < point.iteration <= until]
        fits.append(asdict(fit([point.iteration - after for point in points], [point.loss for point in points])))
    means = {name: fmean(values[name] for values in fits) for name in fits[0]}
    return {**means, "better": "power" if means["power_r2"] > means["exponential_r2"] else "exponential"}


USED = 0.01
"""Minimum share of all test samples for an expert to count as used."""


def figures(settings: ComparisonSettings) -> dict[str, Any]:
    """Run the whole comparison."""
    started = time.perf_counter()
    levels = {
        level: {
            "mixture": asdict(mixture),
            "attention_free_floor": attention_free_floor(mixture),
            "misrouted_by_one_direction_a_class": misrouted(mixture),
            "models": {model.name: measure(settings, mixture, model) for model in MODELS},
        }
        for level, mixture in settings.mixtures.items()
    }
    setting = {
        "seeds": list(settings.seeds),
        "schedule": asdict(settings.schedule),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
    }
    return {"noise": levels, "setting": setting}


def routing(trained: Routing) -> dict[str, Any]:
    """Return the final routing matrix, its purity at the end of stage I and of training, and definition 2's counts."""
    return {
        "matrix": trained.final_MN.tolist(),
        "purity": purity(trained.final_MN),
        "purity_stage_1": purity(trained.stage_1_MN),
        "used": int((trained.final_MN.mean(1) >= USED).sum()),
        "specialized": trained.specialized_N.tolist(),
    }


def purity(share_MN: Tensor) -> float:
    """Return the share of samples that belong to the main class of their expert; classes are equally frequent."""
    return (share_MN.max(1).values.sum() / share_MN.shape[1]).item()
