"""Summary of a suite's runs: every figure by method, with its interval and its difference from the default method."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any

from benchmarks.learn.bootstrap import FIGURES as RESAMPLED
from benchmarks.learn.bootstrap import Bootstrap, Estimate
from benchmarks.learn.detection_scores import detection_scores
from benchmarks.learn.methods import ABLATIONS
from benchmarks.learn.run_files import FROZEN, RunResult, base_of, by_method
from benchmarks.learn.scores import scores
from benchmarks.learn.skill import SkillScale, skill_scale
from benchmarks.learn.task_summary import summarise_tasks

DEFAULT = "streamlearn"
"""The method that all others are compared with."""
OTHER_FIGURES: Mapping[str, Callable[[RunResult], float | None]] = {
    name: itemgetter(name) for name in ("activated_parameters", "stored_parameters", "tokens_per_s", "peak_memory_mib")
}
"""Figure that a run states itself -> its value; None where it does not apply."""
DETECTED = {"boundaries_found": "found", "false_shifts": "false", "returns_declared": "returns"}
"""Figure of detection -> its field of `DetectionScores`."""


def spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Return mean, sample standard deviation (None for one value) and number of the values; None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": fmean(known), "sd": stdev(known) if len(known) > 1 else None, "seeds": len(known)}


def summarise(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Return the summary of one suite's runs, as it is written to SUITE.json.

    Keys: `suite`, `setting`, `skill_scale`, `methods`, `ablations` (by name: figures, intervals, differences)
    and `tasks` (by name: scores of selected methods).

    Raises:
        UsageError: the runs do not score the same test records.
    """
    bootstrap = Bootstrap(runs)
    groups = by_method(runs)
    frozen = groups.get(FROZEN, [None])[0]
    spreads = {name: _spreads(group, frozen) for name, group in groups.items()}
    scale = skill_scale({name: each["AP"]["mean"] for name, each in spreads.items()})
    rows = {name: _row(name, groups[name], spreads[name], bootstrap, scale) for name in groups}
    return {
        "suite": runs[0]["suite"],
        "setting": _setting(runs),
        "skill_scale": {"ceiling": scale.ceiling, "undefined": scale.undefined},
        "methods": {name: row for name, row in rows.items() if name not in ABLATIONS},
        "ablations": {name: {"of": base_of(name), **row} for name, row in rows.items() if name in ABLATIONS},
        "tasks": summarise_tasks(groups, bootstrap, [scale.ceiling] if scale.ceiling else []),
    }


def _setting(runs: Sequence[RunResult]) -> dict[str, Any]:
    first = next((run for run in runs if run["dtype"] is not None), runs[0])
    return {
        **{key: first[key] for key in ("split", "backbone", "profile", "segments", "unseen", "dtype", "device")},
        "records_scored": {task: len(each["end"]) for task, each in first["answers"].items()},
        "torch": sorted({str(run["versions"]["torch"]) for run in runs if run["versions"].get("torch")}),
        "commits": sorted({_commit(run) for run in runs}),
    }


def _spreads(group: Sequence[RunResult], frozen: RunResult | None) -> dict[str, Any]:
    """Figure -> its mean and spread over the seeds."""
    by_seed = [asdict(scores(run, frozen)) for run in group]
    detected = [detection_scores(run) for run in group]
    return {
        **{name: spread(each[name] for each in by_seed) for name in by_seed[0]},
        **{name: spread(getattr(each, key, None) for each in detected) for name, key in DETECTED.items()},
        **{name: spread(value(run) for run in group) for name, value in OTHER_FIGURES.items()},
    }


def _row(
    name: str, group: Sequence[RunResult], spreads: Mapping[str, Any], bootstrap: Bootstrap, scale: SkillScale
) -> dict[str, Any]:
    base = base_of(name) if name in ABLATIONS else DEFAULT
    return {
        "arm": group[0]["arm"],
        "commit": _commit(group[0]),
        "seeds": [run["seed"] for run in group],
        "figures": spreads,
        "skill": scale.skill(spreads["AP"]["mean"]),
        "intervals": {figure: as_json(bootstrap.estimate(name, figure)) for figure in RESAMPLED},
        "zero_shot_gain": as_json(None if name == FROZEN else bootstrap.difference(name, FROZEN, "ZST")),
        "differences": {
            figure: as_json(None if name == base else bootstrap.difference(name, base, figure)) for figure in RESAMPLED
        },
    }


def as_json(estimate: Estimate | None) -> dict[str, Any] | None:
    """Return an estimate as a JSON object."""
    return None if estimate is None else estimate._asdict()


def _commit(run: RunResult) -> str:
    return str(run["versions"]["commit"])[:12]
