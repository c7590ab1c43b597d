"""The runs that `bench learn` makes, in their order: from the command line, or from a plan's file.

A plan's file is a YAML list; what stands first is made first. A run that a later part names again is made once.

    - suites: [superni-1]
      methods: [streamlearn, lora]      # all methods if absent
      seeds: [0, 1, 2]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.learn.job import RunConditions, RunJob
from benchmarks.learn.methods import ABLATIONS, METHODS
from benchmarks.learn.processes import RunFailedError, make_runs
from benchmarks.learn.suites import SUITES
from streamlearn.errors import UsageError


@dataclass(frozen=True)
class Part:
    """All of some methods on all of some suites with all of some seeds."""

    suites: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The runs that a `bench learn` command asks for."""

    parts: Sequence[Part]
    conditions: RunConditions

    def check(self) -> None:
        """Check that every suite and method can be run.

        Raises:
            UsageError: a suite, method or order is unknown, the message lists the known ones; or there is no backbone.
        """
        self.conditions.check()
        for part in self.parts:
            check_methods(part.methods, [*METHODS, *ABLATIONS])
            for suite in part.suites:
                check_suite(suite, self.conditions.data)
        if self.conditions.order and any(suite in SUITES for part in self.parts for suite in part.suites):
            raise UsageError("--order: applies to a folder of task files; a named suite has its own order")

    def jobs(self) -> list[RunJob]:
        """Return every run once, in the order in which they are made: within a part by suite, seed and method."""
        jobs = (
            self.conditions.job(suite, method, seed)
            for part in self.parts
            for suite in part.suites
            for seed in part.seeds
            for method in part.methods
        )
        return list({job.file: job for job in jobs}.values())


def check_methods(names: Sequence[str], known: Sequence[str]) -> None:
    """Check that methods are known.

    Raises:
        UsageError: one is not; the message lists the known ones.
    """
    for name in names:
        if name not in known:
            raise UsageError(f"--method {name}: unknown; expected one of {', '.join(known)}")


def check_suite(suite: str, data: Sequence[Path]) -> None:
    """Check that a suite is known or a folder, and that a known one has folders for its task files.

    Raises:
        UsageError: it is neither, the message lists the known ones; or there are no folders for it.
    """
    if suite not in SUITES and not Path(suite).is_dir():
        raise UsageError(f"--suite {suite}: expected a folder or one of {', '.join(SUITES)}")
    if suite in SUITES and not data:
        raise UsageError(f"--suite {suite}: needs the folders of its task files; pass each with --data")


def read_plan(file: Path) -> list[Part]:
    """Read a plan's file.

    Raises:
        UsageError: it is not a plan; the message has the number of the part.
    """
    try:
        parts = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--plan {file}: expected a YAML file: {error}") from error
    if not isinstance(parts, list) or not parts:
        raise UsageError(f"--plan {file}: expected a list of parts, found {type(parts).__name__}")
    return [_part(values, f"--plan {file}: part {number}") for number, values in enumerate(parts, 1)]


def _part(values: Any, where: str) -> Part:
    if not isinstance(values, dict):
        raise UsageError(f"{where}: expected suites, methods and seeds, found {values!r}")
    if unknown := set(values) - {"suites", "methods", "seeds"}:
        raise UsageError(f"{where}: expected suites, methods and seeds, found {', '.join(map(str, sorted(unknown)))}")
    methods = values.get("methods", list(METHODS))
    kinds = {"suites": (values.get("suites"), str), "methods": (methods, str), "seeds": (values.get("seeds"), int)}
    for key, (found, kind) in kinds.items():
        if not isinstance(found, list) or not found or not all(type(each) is kind for each in found):
            raise UsageError(f"{where}: {key} must be a list of {kind.__name__}, found {found!r}")
    return Part(tuple(values["suites"]), tuple(methods), tuple(values["seeds"]))


def carry_out(plan: Plan, *, side_by_side: int, console: Console) -> int:
    """Make the missing runs and return how many were made; a run that is interrupted is made by the next call.

    Raises:
        UsageError: see `Plan.check`.
        RunFailedError: runs failed; all others were made.
    """
    plan.check()
    outcome = make_runs(plan.jobs(), side_by_side=side_by_side, console=console)
    if outcome.failed:
        raise RunFailedError.of(outcome.failed)
    return len(outcome.made)
