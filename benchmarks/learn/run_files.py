"""Run files SUITE/METHOD.SEED.json, and the conditions under which they may share a table or a row."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.learn.methods import ABLATIONS, METHODS
from benchmarks.learn.single_run import FORMAT
from streamlearn.errors import UsageError

RunResult = Mapping[str, Any]
"""The JSON object of one run."""
RunOfFile = tuple[Path, RunResult]
Condition = Callable[[RunResult], Any]

BLIND, FROZEN = "blind", "frozen"
"""The best answer that ignores the input, and the backbone without training: the first two rows of every table."""
ORDER = tuple(dict.fromkeys((BLIND, FROZEN, *METHODS, *ABLATIONS)))
"""Methods in the order of their rows."""

OF_A_SUITE: Mapping[str, Condition] = {
    "split": lambda run: run["split"],
    "backbone": lambda run: f"{run['backbone']['model']} {run['backbone']['digest']}",
    "profile": lambda run: run["profile"],
    "segments": lambda run: [(segment["tasks"], segment["records"]) for segment in run["segments"]],
    "unseen tasks": lambda run: list(run["unseen"]),
}
"""What all runs of a suite have in common."""
OF_TRAINED: Mapping[str, Condition] = {"dtype": lambda run: run["dtype"], "device": lambda run: run["device"]}
"""What all runs of a suite that use the backbone have in common; `blind` does not use it."""
OF_A_ROW: Mapping[str, Condition] = {"arm": lambda run: run["arm"], "commit": lambda run: run["versions"]["commit"]}
"""What the runs of one method have in common; they differ in the seed."""


def read_runs(folder: Path) -> dict[str, list[RunResult]]:
    """Read the runs below a folder, by suite, in the order of `ORDER` and of their seeds.

    Raises:
        UsageError: there are no runs, one has another format, or the runs of a suite or of a method are not comparable.
    """
    suites: dict[str, list[RunOfFile]] = {}
    for file in sorted(folder.glob("*/*.json")):
        run = orjson.loads(file.read_bytes())
        found = run.get("format")
        if found != FORMAT:
            raise UsageError(f"{file}: expected a run of format {FORMAT}, found {found}; run bench learn again")
        if not run["answers"]:
            raise UsageError(f"{file}: expected scores of free answers, found none; run bench learn again with them")
        suites.setdefault(run["suite"], []).append((file, run))
    if not suites:
        raise UsageError(f"{folder}: expected runs SUITE/METHOD.SEED.json, found none; make some with bench learn")
    places = {name: place for place, name in enumerate(ORDER)}
    for group in suites.values():
        group.sort(key=lambda each: (places.get(each[1]["method"], len(places)), each[1]["method"], each[1]["seed"]))
        _check(group)
    return {suite: [run for _, run in group] for suite, group in suites.items()}


def by_method(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Group the runs by method; both keep the given order."""
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(run["method"], []).append(run)
    return groups


def base_of(ablation: str) -> str:
    """Return the method that an ablation changes: the one that its name starts with, else the default."""
    method, _, _ = ablation.partition(", ")
    return method if method in METHODS else "streamlearn"


def _check(group: Sequence[RunOfFile]) -> None:
    _check_equal("one suite", OF_A_SUITE, group)
    _check_equal("one suite", OF_TRAINED, [each for each in group if each[1]["method"] != BLIND])
    rows: dict[str, list[RunOfFile]] = {}
    for file, run in group:
        rows.setdefault(run["method"], []).append((file, run))
    for method, row in rows.items():
        _check_equal(f"method {method}", OF_A_ROW, row)
        seeds: dict[int, Path] = {}
        for file, run in row:
            other = seeds.setdefault(run["seed"], file)
            if other is not file:
                raise UsageError(f"{file}: expected one run of {method} with seed {run['seed']}, found also {other}")


def _check_equal(of: str, conditions: Mapping[str, Condition], group: Sequence[RunOfFile]) -> None:
    for name, condition in conditions.items():
        for file, run in group:
            first_file, first = group[0]
            if condition(run) != condition(first):
                raise UsageError(
                    f"runs of {of} must be equal in {name}, found {condition(first)} in {first_file} and "
                    f"{condition(run)} in {file}; make one of them again, or report on them from separate folders"
                )
