"""Figures of the comparison as plain numbers, ready for JSON."""

import time
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.mot.compare import MODELS, ComparisonSettings, ModelResult, geometric_mean, measure
from benchmarks.mot.data import attention_free_floor, misrouted
from benchmarks.mot.rates import SMALLEST, DecayFits
from benchmarks.mot.training import Routing, TrainingRun

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
    """Summarise one model on one noise level; means of losses over the seeds are geometric."""
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
    means = {name: fmean(asdict(each)[name] for each in fits) for name in asdict(fits[0])}
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
        "specialised": found.specialised_N.tolist(),
    }


def purity(share_MN: Tensor) -> float:
    """Return the share of samples that belong to the main class of their expert; classes are equally frequent."""
    return (share_MN.max(1).values.sum() / share_MN.shape[1]).item()
