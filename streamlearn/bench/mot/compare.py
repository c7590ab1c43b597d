"""Every model on every noise level: step sizes from one grid, chosen on seeds of their own, then the seeds reported."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from streamlearn.bench.mot.data import Mixture
from streamlearn.bench.mot.rates import SMALLEST, Laws, fit
from streamlearn.bench.mot.train import Choices, Expertise, Point, Run, Schedule, train_experts, train_transformer
from streamlearn.bench.mot.transformer import MultiHead

TUNING_SEEDS = (1000, 1001)
"""Never among the seeds reported, which count from 0."""
TUNING_LOOKS = 10
"""Looks at the test set while tuning: the end alone decides."""
HEADS, HIDDEN = 4, 56
"""As many weights as 16 experts and their router have: 4608 each in 16 dimensions."""


@dataclass(frozen=True)
class Model:
    """One line of the comparison: experts trained by algorithm 1, or the transformer."""

    name: str
    title: str
    expertise: Expertise | None = None
    choices: Choices = field(default_factory=Choices)

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """Whether experts specialise depends on the seed, so one would choose their step size by luck."""
        learned = self.expertise is not None and not self.expertise.class_given
        return TUNING_SEEDS if learned else TUNING_SEEDS[:1]

    def descends_from(self, schedule: Schedule) -> int:
        """The iteration after which the FFN moves by plain gradient descent."""
        if self.expertise is None:
            return 0
        return schedule.stage_2_ends if self.expertise.attention else schedule.stage_1_ends


GENTLE = Choices(ffn_stage_1=0.01)
"""With a perfect router stage I could take the loss below 1e-8; these steps leave something for stage III to do."""
MODELS = (
    Model("mot", "MoT", Expertise(attention=True, class_given=False)),
    Model("transformer", "multi-head transformer"),
    Model("attention_free", "attention-free MoE", Expertise(attention=False, class_given=False)),
    Model("mot_given", "MoT, class given", Expertise(attention=True, class_given=True), GENTLE),
    Model(
        "attention_free_given", "attention-free MoE, class given", Expertise(attention=False, class_given=True), GENTLE
    ),
)
"""The paper's three, and two controls that a perfect router serves: what they do better is lost by routing."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    seeds: Sequence[int] = (0, 1, 2)
    step_sizes: Sequence[float] = (30.0, 100.0, 300.0)
    """Of plain gradient descent: stage III, or the transformer's whole training."""
    mixtures: dict[str, Mixture] = field(default_factory=lambda: {"low": Mixture(0.2), "high": Mixture(0.8)})
    """Two noise levels: rates need one at which the loss can fall, a floor one at which it cannot."""
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True)
class Measured:
    """One model on one noise level."""

    model: Model
    schedule: Schedule
    step_size: float
    tuning: dict[float, float]
    """Step size -> final loss on the tuning seeds."""
    runs: tuple[Run, ...]

    def final(self, run: Run) -> float:
        """Geometric mean of the test loss over the last fifth."""
        return final(run, self.schedule)

    def descent(self, run: Run) -> Laws:
        """Laws of the test loss under plain gradient descent: stage III, or the transformer's whole training."""
        return laws(run.points, self.model.descends_from(self.schedule), self.schedule.iterations)

    def stage_1(self, run: Run) -> Laws:
        """Laws of the test loss under the normalised steps of stage I."""
        return laws(run.points, 0, self.schedule.stage_1_ends)


def measure(plan: Plan, mixture: Mixture, model: Model) -> Measured:
    """Choose the step size, then train every seed with it."""
    schedule = plan.schedule
    sparse = replace(schedule, test_every=math.ceil(schedule.iterations / TUNING_LOOKS))

    def tuned(step_size: float) -> float:
        runs = [train(mixture, sparse, model, step_size, seed) for seed in model.tuning_seeds]
        return geometric_mean([final(run, sparse) for run in runs])

    tuning = {step_size: tuned(step_size) for step_size in plan.step_sizes}
    best = min(tuning, key=lambda step_size: tuning[step_size])
    runs = tuple(train(mixture, schedule, model, best, seed) for seed in plan.seeds)
    return Measured(model, schedule, best, tuning, runs)


def train(mixture: Mixture, schedule: Schedule, model: Model, step_size: float, seed: int) -> Run:
    """One run of one model."""
    if model.expertise is not None:
        return train_experts(mixture, schedule, model.choices, model.expertise, step_size=step_size, seed=seed)

    def build(generator: torch.Generator) -> MultiHead:
        return MultiHead(HEADS, HIDDEN, mixture.dim, generator=generator)

    return train_transformer(mixture, schedule, build, step_size=step_size, seed=seed)


def final(run: Run, schedule: Schedule) -> float:
    """Geometric mean of the test loss over the last fifth: one spike does not decide."""
    return geometric_mean([point.loss for point in run.points if point.iteration > 0.8 * schedule.iterations])


def geometric_mean(losses: Sequence[float]) -> float:
    """Exp of the mean log."""
    return math.exp(fmean(math.log(max(loss, SMALLEST)) for loss in losses))


def laws(points: Sequence[Point], after: int, until: int) -> Laws:
    """Fits over the iterations after `after`, counted from it, and up to `until`."""
    chosen = [point for point in points if after < point.iteration <= until]
    return fit([point.iteration - after for point in chosen], [point.loss for point in chosen])
