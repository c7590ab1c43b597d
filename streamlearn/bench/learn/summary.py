"""Summary of a suite's runs: mean and spread over seeds of every figure, by method."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import orjson

from streamlearn.bench.learn.methods import ABLATIONS, METHODS
from streamlearn.bench.learn.scores import scores
from streamlearn.errors import UsageError

RunResult = Mapping[str, Any]
"""The JSON object of one run."""

SCORES = ("AP", "AF", "BWT", "ZST", "FWT")
DIFFERENCES = ("AP", "AF", "ZST", "prequential_loss")
"""Figures that are compared between an ablation and the method it changes."""
COMPARABLE = ("stretches", "tests", "unseen")
"""Keys that must be equal in all runs of a suite; `stretches` are the segments."""

FIGURES: Mapping[str, Callable[[RunResult], float | None]] = {
    **{name: itemgetter(name) for name in SCORES},
    "loss": lambda run: run["loss"],
    "prequential_loss": lambda run: run["prequential"]["mean"],
    "exact_match": lambda run: _generated(run, "exact_match"),
    "rouge_l": lambda run: _generated(run, "rouge_l"),
    "n_eff": lambda run: None if run["experts"] is None else run["experts"]["n_eff"],
    "boundaries_found": lambda run: None if run["detection"] is None else run["detection"]["found"],
    "false_shifts": lambda run: None if run["detection"] is None else run["detection"]["false"],
    "detection_delay_records": lambda run: run["detection"] and run["detection"]["mean_delay_records"],
    "tokens_per_s": lambda run: run["tokens_per_s"],
    "peak_memory_mib": lambda run: run["peak_memory_mib"],
}
"""Figure -> its value in a run; None where it does not apply."""


def spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Return mean, sample standard deviation (None for one value) and number of the values; None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": fmean(known), "sd": stdev(known) if len(known) > 1 else None, "seeds": len(known)}


def read_runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the runs below a folder, by suite, with methods in the order of `METHODS` and `ABLATIONS`.

    Raises:
        UsageError: there are no runs, or the runs of one suite are not comparable.
    """
    runs = [orjson.loads(file.read_bytes()) for file in sorted(folder.glob("*/*.json"))]
    suites: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        suites.setdefault(run["suite"], []).append(run)
    if not suites:
        raise UsageError(f"{folder}: expected runs SUITE/METHOD.SEED.json, found none; make some with bench learn")
    places = {name: place for place, name in enumerate([*METHODS, *ABLATIONS])}
    for suite, group in suites.items():
        group.sort(key=lambda run: (places.get(run["method"], len(places)), run["seed"]))
        for name in COMPARABLE:
            if any(run[name] != group[0][name] for run in group):
                raise UsageError(f"{folder}/{suite}: runs of one suite must be equal in {name}, found runs that differ")
    return suites


def summarise(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Return `{"methods": {NAME: {"AP": {"mean", "sd", "seeds"}, ...}}, "ablations": ...}` of one suite's runs.

    An ablation also has `of`, the method that it changes, and `differences` from that method.
    """
    runs = _with_forward_transfer(runs)
    groups = by_method(runs)
    first = runs[0]
    return {
        "suite": first["suite"],
        "setting": {
            "stretches": first["stretches"],
            "unseen": first["unseen"],
            "tests": first["tests"],
            "commits": sorted({str(run["versions"]["commit"])[:12] for run in runs}),
            "torch": first["versions"]["torch"],
            "dtypes": sorted({run["dtype"] for run in runs}),
        },
        "methods": {name: _figures(group) for name, group in groups.items() if name not in ABLATIONS},
        "ablations": {
            name: {**_figures(group), "of": base_of(name), "differences": _differences(group, groups)}
            for name, group in groups.items()
            if name in ABLATIONS
        },
    }


def by_method(runs: Iterable[RunResult]) -> dict[str, list[RunResult]]:
    """Group the runs by method; both keep the given order."""
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(run["method"], []).append(run)
    return groups


def base_of(ablation: str) -> str:
    """Return the method that an ablation changes: the one that its name starts with, else the default."""
    method, _, _ = ablation.partition(", ")
    return method if method in METHODS else "streamlearn"


def _figures(group: Sequence[RunResult]) -> dict[str, Any]:
    return {
        "arm": group[0]["arm"],
        "activated_parameters": group[0]["activated_parameters"],
        **{figure: spread(value(run) for run in group) for figure, value in FIGURES.items()},
    }


def _differences(group: Sequence[RunResult], groups: Mapping[str, Sequence[RunResult]]) -> dict[str, Any]:
    """Differences from the base method's run of the same seed, hence the same records, over the seeds of both."""
    base = {run["seed"]: run for run in groups.get(base_of(group[0]["method"]), ())}
    pairs = [(run, base[run["seed"]]) for run in group if run["seed"] in base]
    return {name: spread(_difference(FIGURES[name], *pair) for pair in pairs) for name in DIFFERENCES}


def _difference(figure: Callable[[RunResult], float | None], run: RunResult, base: RunResult) -> float | None:
    there, here = figure(base), figure(run)
    return None if there is None or here is None else here - there


def _with_forward_transfer(runs: Sequence[RunResult]) -> list[RunResult]:
    """The runs with FWT, which needs the scores of `frozen`; any seed of `frozen` serves all runs."""
    frozen = next((run for run in runs if run["method"] == "frozen"), None)
    if frozen is None:
        return list(runs)
    base = {task: known["accuracy"] for row in frozen["matrix"] for task, known in row.items()}
    filled: list[RunResult] = []
    for run in runs:
        matrix = [{task: known["accuracy"] for task, known in row.items()} for row in run["matrix"]]
        segments = [segment["tasks"] for segment in run["stretches"]]
        filled.append({**run, "FWT": scores(matrix, segments, unseen=run["unseen"], frozen=base).FWT})
    return filled


def _generated(run: RunResult, metric: str) -> float | None:
    """Mean of the metric over the tasks of the stream that it applies to."""
    found = [
        figures[metric]
        for task, figures in (run["generated"] or {}).items()
        if metric in figures and task not in run["unseen"]
    ]
    return fmean(found) if found else None
