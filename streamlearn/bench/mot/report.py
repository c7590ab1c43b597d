"""Figures of the comparison, as JSON, as tables, and as a picture."""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import orjson
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from streamlearn.bench.mot.compare import MODELS, Measured, Plan, geometric_mean, measure
from streamlearn.bench.mot.data import attention_free_floor, misrouted
from streamlearn.bench.mot.rates import SMALLEST, Laws
from streamlearn.bench.mot.train import Routing, Run
from streamlearn.errors import UsageError

PICTURES = (".png", ".pdf", ".svg")
USED = 0.01
"""An expert is in use from this share of all test samples on."""


def report(*, num_seeds: int, as_json: bool, plot: Path | None) -> None:
    """Measure everything, draw it where asked to, and print it.

    Raises:
        UsageError: the picture cannot be drawn; said before anything is measured.
    """
    draw = None if plot is None else drawing(plot)
    result = figures(Plan(seeds=range(num_seeds)))
    if draw is not None:
        draw(result)
    if as_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())  # noqa: T201 - JSON goes out as it is
    else:
        show(result, Console())


def drawing(path: Path) -> Callable[[dict[str, Any]], None]:
    """What writes a result's picture to `path`."""
    if path.suffix not in PICTURES or not path.absolute().parent.is_dir():
        raise UsageError(f"--plot: needs a file in an existing folder that ends in {', '.join(PICTURES)}, found {path}")
    try:
        from streamlearn.bench.mot.plot import draw  # noqa: PLC0415 - matplotlib is an extra
    except ImportError as error:
        raise UsageError("--plot: needs matplotlib; pip install 'streamlearn[bench]'") from error
    return partial(draw, path=path)


def figures(plan: Plan) -> dict[str, Any]:
    """The whole comparison as plain numbers."""
    started = time.perf_counter()
    levels = {
        level: {
            "mixture": asdict(mixture),
            "attention_free_floor": attention_free_floor(mixture),
            "misrouted_by_one_direction_a_class": misrouted(mixture),
            "models": {model.name: summary(measure(plan, mixture, model)) for model in MODELS},
        }
        for level, mixture in plan.mixtures.items()
    }
    setting = {
        "seeds": list(plan.seeds),
        "schedule": asdict(plan.schedule),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
    }
    return {"noise": levels, "setting": setting}


def summary(measured: Measured) -> dict[str, Any]:
    """One model on one noise level; means over the seeds are geometric for losses."""
    runs = measured.runs
    finals = [measured.final(run) for run in runs]
    found = {
        "title": measured.model.title,
        "num_parameters": runs[0].num_parameters,
        "step_size": measured.step_size,
        "step_size_at_edge": measured.step_size in (min(measured.tuning), max(measured.tuning)),
        "tuning": {str(size): loss for size, loss in measured.tuning.items()},
        "final_loss": {"mean": geometric_mean(finals), "lowest": min(finals), "highest": max(finals)},
        "final_error": fmean(run.points[-1].error for run in runs),
        "lowest_loss": geometric_mean([min(point.loss for point in run.points) for run in runs]),
        "descent": laws([measured.descent(run) for run in runs]),
        "curve": curve(runs),
    }
    if measured.model.expertise is not None:
        found["choices"] = asdict(measured.model.choices)
        found["stage_1"] = laws([measured.stage_1(run) for run in runs])
        found["routing"] = [routing(run.routing) for run in runs if run.routing is not None]
    return found


def laws(fits: list[Laws]) -> dict[str, Any]:
    """Means over the seeds, and which law the curves follow more closely."""
    means = {name: fmean(asdict(each)[name] for each in fits) for name in asdict(fits[0])}
    return {**means, "better": "power" if means["power_r2"] > means["exponential_r2"] else "exponential"}


def curve(runs: tuple[Run, ...]) -> dict[str, list[float]]:
    """Log10 of the test loss and the error over the iterations: mean, and for the loss the lowest and highest seed."""
    loss = np.log10(np.maximum([[point.loss for point in run.points] for run in runs], SMALLEST))
    return {
        "iteration": [point.iteration for point in runs[0].points],
        "log10_loss": loss.mean(0).tolist(),
        "log10_loss_lowest": loss.min(0).tolist(),
        "log10_loss_highest": loss.max(0).tolist(),
        "error": np.mean([[point.error for point in run.points] for run in runs], axis=0).tolist(),
    }


def routing(found: Routing) -> dict[str, Any]:
    """Who gets which class: the matrix at the end, how pure it is and was, and definition 2's counts."""
    return {
        "matrix": found.final_MN.tolist(),
        "purity": purity(found.final_MN),
        "purity_stage_1": purity(found.stage_1_MN),
        "used": int((found.final_MN.mean(1) >= USED).sum()),
        "specialised": found.specialised_N.tolist(),
    }


def purity(share_MN: Tensor) -> float:
    """Share of all samples whose class is their expert's most frequent one; classes are equally frequent."""
    return (share_MN.max(1).values.sum() / share_MN.shape[1]).item()


def show(result: dict[str, Any], console: Console) -> None:
    """Tables for a person."""
    for level, found in result["noise"].items():
        console.print(table(level, found))
        console.print(
            f"No loss below {found['attention_free_floor']:.1e} without attention. A linear router with one direction "
            f"a class misroutes {found['misrouted_by_one_direction_a_class']:.1%}.",
            highlight=False,
        )
        for seed, each in zip(result["setting"]["seeds"], found["models"]["mot"]["routing"], strict=True):
            console.print(
                f"MoT, seed {seed}: purity {each['purity_stage_1']:.1%} after stage I, {each['purity']:.1%} at the "
                f"end, {each['used']} experts in use, specialised by class {each['specialised']}",
                highlight=False,
            )
        console.print()


def table(level: str, found: dict[str, Any]) -> Table:
    """One noise level; the laws stand with their R^2."""
    columns = ("step", "final loss", "seeds", "error", "lowest", "stage I (normalised)", "plain descent")
    shown = Table(f"{level} noise, {found['mixture']['noise']}", *columns, box=None, pad_edge=False)
    for each in found["models"].values():
        final = each["final_loss"]
        shown.add_row(
            each["title"],
            f"{each['step_size']:g}",
            f"{final['mean']:.1e}",
            f"{final['lowest']:.0e} to {final['highest']:.0e}",
            f"{each['final_error']:.2%}",
            f"{each['lowest_loss']:.1e}",
            law(each["stage_1"]) if "stage_1" in each else "",
            law(each["descent"]),
        )
    return shown


def law(found: dict[str, Any]) -> str:
    """Both fits, for example `exp(-0.009 t) 1.00, t^-1.00 0.62`."""
    exponential = f"exp(-{found['exponential_rate']:.4f} t) {found['exponential_r2']:.2f}"
    return f"{exponential}, t^-{found['power_exponent']:.2f} {found['power_r2']:.2f}".replace("--", "+")
