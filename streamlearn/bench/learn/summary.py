"""Runs of one suite put together: mean and spread over seeds of every figure, by method."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import orjson

from streamlearn.bench.learn.methods import ABLATIONS, METHODS
from streamlearn.bench.learn.scores import scores
from streamlearn.errors import UsageError

Run = Mapping[str, Any]

SCORES = ("AP", "AF", "BWT", "ZST", "FWT")
DIFFERENCES = ("AP", "AF", "ZST", "prequential_loss")
"""What an ablation is compared by with the method that it is one of."""
COMPARABLE = ("stretches", "tests", "unseen")
"""What must be the same in all runs of a suite."""

FIGURES: Mapping[str, Callable[[Run], float | None]] = {
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
"""Name -> where it stands in a run; None where it has no meaning."""


def spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Mean, standard deviation (None of one) and how many; None where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": fmean(known), "sd": stdev(known) if len(known) > 1 else None, "seeds": len(known)}


def read_runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs below a folder, by suite, methods in the order in which they are listed.

    Raises:
        UsageError: there are none, or runs of one suite cannot be compared.
    """
    runs = [orjson.loads(file.read_bytes()) for file in sorted(folder.glob("*/*.json"))]
    suites: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        suites.setdefault(run["suite"], []).append(run)
    if not suites:
        raise UsageError(f"{folder} holds no runs SUITE/METHOD.SEED.json; make some with streamlearn bench learn")
    places = {name: place for place, name in enumerate([*METHODS, *ABLATIONS])}
    for suite, group in suites.items():
        group.sort(key=lambda run: (places.get(run["method"], len(places)), run["seed"]))
        for name in COMPARABLE:
            if any(run[name] != group[0][name] for run in group):
                raise UsageError(f"{folder}/{suite}: its runs differ in {name}; keep one kind of run in a folder")
    return suites


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """`{"methods": {NAME: {"AP": {"mean", "sd", "seeds"}, ...}}, "ablations": ...}` of one suite's runs.

    An ablation has what a method has, and `of`, the method that was changed, and `differences` from it.
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


def by_method(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each method, both in the order given."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["method"], []).append(run)
    return groups


def base_of(ablation: str) -> str:
    """The method that an ablation is one of: the one that its name begins with, else the default."""
    method, _, _ = ablation.partition(", ")
    return method if method in METHODS else "streamlearn"


def _figures(group: Sequence[Run]) -> dict[str, Any]:
    return {
        "arm": group[0]["arm"],
        "activated_parameters": group[0]["activated_parameters"],
        **{figure: spread(value(run) for run in group) for figure, value in FIGURES.items()},
    }


def _differences(group: Sequence[Run], groups: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Less the base's run of the same seed, hence on the same records; spread over the seeds that both have."""
    base = {run["seed"]: run for run in groups.get(base_of(group[0]["method"]), ())}
    pairs = [(run, base[run["seed"]]) for run in group if run["seed"] in base]
    return {name: spread(_difference(FIGURES[name], *pair) for pair in pairs) for name in DIFFERENCES}


def _difference(figure: Callable[[Run], float | None], run: Run, base: Run) -> float | None:
    there, here = figure(base), figure(run)
    return None if there is None or here is None else here - there


def _with_forward_transfer(runs: Sequence[Run]) -> list[Run]:
    """FWT needs what the untouched backbone scores: it is there once `frozen` was run, for whatever seed."""
    frozen = next((run for run in runs if run["method"] == "frozen"), None)
    if frozen is None:
        return list(runs)
    base = {task: known["accuracy"] for row in frozen["matrix"] for task, known in row.items()}
    filled: list[Run] = []
    for run in runs:
        matrix = [{task: known["accuracy"] for task, known in row.items()} for row in run["matrix"]]
        stretches = [stretch["tasks"] for stretch in run["stretches"]]
        filled.append({**run, "FWT": scores(matrix, stretches, unseen=run["unseen"], frozen=base).FWT})
    return filled


def _generated(run: Run, metric: str) -> float | None:
    """Mean over the stream's tasks that ask for this metric."""
    found = [
        figures[metric]
        for task, figures in (run["generated"] or {}).items()
        if metric in figures and task not in run["unseen"]
    ]
    return fmean(found) if found else None
