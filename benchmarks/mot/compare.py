"""Training of every model, results as plain numbers, and their plot.

Step sizes are chosen from one grid on separate seeds, then the reported seeds are run.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.mot.models import (
    EvalPoint,
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
        """Fit the test loss under the normalized steps of stage I."""
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
            "models": {model.name: summary(measure(settings, mixture, model)) for model in MODELS},
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


def summary(result: ModelResult) -> dict[str, Any]:
    """Summarize one model on one noise level; means of losses over the seeds are geometric."""
    runs = result.runs
    finals = [result.final(run) for run in runs]
    found = {
        "title": result.model.title,
        "num_parameters": runs[0].num_parameters,
        "step_size": result.step_size,
        "step_size_at_edge": result.step_size in (min(result.tuning), max(result.tuning)),
        "tuning": {str(size): loss for size, loss in result.tuning.items()},
        "final_loss": {"mean": geometric_mean(finals), "lowest": min(finals), "highest": max(finals)},
        "final_error": fmean(run.points[-1].error for run in runs),
        "lowest_loss": geometric_mean([min(point.loss for point in run.points) for run in runs]),
        "descent": decay([result.descent(run) for run in runs]),
        "curve": curve(runs),
    }
    if result.model.variant is not None:
        found["choices"] = asdict(result.model.parameters)
        found["stage_1"] = decay([result.stage_1(run) for run in runs])
        found["routing"] = [routing(run.routing) for run in runs if run.routing is not None]
    return found


def decay(fits: list[DecayFits]) -> dict[str, Any]:
    """Average the fits over the seeds and name the law with the higher R^2."""
    means = {name: fmean(asdict(fit)[name] for fit in fits) for name in asdict(fits[0])}
    return {**means, "better": "power" if means["power_r2"] > means["exponential_r2"] else "exponential"}


def curve(runs: tuple[TrainingRun, ...]) -> dict[str, list[float]]:
    """Return log10 of the test loss (mean, lowest and highest seed) and the mean error, by iteration."""
    loss = np.log10(np.maximum([[point.loss for point in run.points] for run in runs], SMALLEST))
    return {
        "iteration": [point.iteration for point in runs[0].points],
        "log10_loss": loss.mean(0).tolist(),
        "log10_loss_lowest": loss.min(0).tolist(),
        "log10_loss_highest": loss.max(0).tolist(),
        "error": np.mean([[point.error for point in run.points] for run in runs], axis=0).tolist(),
    }


def routing(found: Routing) -> dict[str, Any]:
    """Return the final routing matrix, its purity at the end of stage I and of training, and definition 2's counts."""
    return {
        "matrix": found.final_MN.tolist(),
        "purity": purity(found.final_MN),
        "purity_stage_1": purity(found.stage_1_MN),
        "used": int((found.final_MN.mean(1) >= USED).sum()),
        "specialized": found.specialized_N.tolist(),
    }


def purity(share_MN: Tensor) -> float:
    """Return the share of samples that belong to the main class of their expert; classes are equally frequent."""
    return (share_MN.max(1).values.sum() / share_MN.shape[1]).item()


COLORS = {  # Okabe and Ito; the last one is a lighter shade
    "mot": "#0072B2",
    "transformer": "#D55E00",
    "attention_free": "#009E73",
    "mot_given": "#56B4E9",
    "attention_free_given": "#8DD3B5",
}
SHOWN = 0.005
"""Minimum share of a class for an expert to be shown."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the plot; the suffix of `path` selects the format."""
    from matplotlib import pyplot as plt  # noqa: PLC0415 - an extra

    levels = result["noise"]
    figure, axes = plt.subplots(
        1, len(levels) + 1, figsize=(15, 5.2), layout="constrained", width_ratios=[1.25] * len(levels) + [1]
    )
    for axis, (level, found) in zip(axes, levels.items(), strict=False):
        losses(axis, level, found, result["setting"]["schedule"])
    axes[0].set_ylabel("test loss, nats (mean over seeds; band: lowest to highest)")
    level, found = next(iter(levels.items()))
    matrix(axes[-1], level, found["models"]["mot"]["routing"][0])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def losses(axis: Any, level: str, found: dict[str, Any], schedule: dict[str, Any]) -> None:
    """Draw one noise level: one line per model, the stages, and the closed-form floor if it is in range."""
    for name, model in found["models"].items():
        curve = model["curve"]
        given = name.endswith("_given")
        mean, lowest, highest = (
            10 ** np.asarray(curve[key]) for key in ("log10_loss", "log10_loss_lowest", "log10_loss_highest")
        )
        style = "--" if given else "-"
        axis.plot(curve["iteration"], mean, style, color=COLORS[name], lw=1.8, label=model["title"])
        axis.fill_between(curve["iteration"], lowest, highest, color=COLORS[name], alpha=0.15, lw=0)
    axis.set_yscale("log")
    bottom, top = axis.get_ylim()
    floor = found["attention_free_floor"]
    if floor > bottom:
        axis.axhline(floor, color="black", lw=1, ls=":")
        axis.text(0.05 * schedule["iterations"], 0.9 * floor, "floor without attention", va="top", fontsize=9)
    ends = [0, schedule["stage_1_ends"], schedule["stage_2_ends"], schedule["iterations"]]
    for end in ends[1:3]:
        axis.axvline(end, color="gray", lw=0.8, ls=(0, (4, 4)))
    for name, start, end in zip(("I", "II", "III"), ends, ends[1:], strict=False):
        axis.annotate(name, ((start + end) / 2, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top")
    axis.set(xlabel="iteration", xlim=(0, schedule["iterations"]), ylim=(bottom, top * 3))
    axis.set_title(f"{level} noise, sigma = {found['mixture']['noise']}")


def matrix(axis: Any, level: str, routing: dict[str, Any]) -> None:
    """Draw experts by classes, ordered by their main class."""
    share_MN = np.asarray(routing["matrix"])
    experts = [m for m in range(len(share_MN)) if share_MN[m].max() >= SHOWN]
    experts.sort(key=lambda m: (share_MN[m].argmax(), -share_MN[m].max()))
    shown_MN = share_MN[experts]
    image = axis.imshow(shown_MN, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (row, column), share in np.ndenumerate(shown_MN):
        if share >= SHOWN:
            axis.text(column, row, f"{share:.0%}", ha="center", va="center", color="white" if share > 0.5 else "black")
    axis.set_xticks(range(shown_MN.shape[1]), [str(n + 1) for n in range(shown_MN.shape[1])])
    axis.set_yticks(range(len(experts)), [str(m + 1) for m in experts])
    axis.set(xlabel="class", ylabel=f"expert ({len(share_MN) - len(experts)} unused, not shown)")
    purity = f"purity {routing['purity']:.1%} (after stage I: {routing['purity_stage_1']:.1%})"
    axis.set_title(f"MoT routing, {level} noise, first seed\n{purity}")
    axis.figure.colorbar(image, ax=axis, label="share of the test samples of the class")
