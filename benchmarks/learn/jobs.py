"""The runs of one command: which, in what order, and each in its own process, several at a time.

A plan's file is a YAML list; what stands first is made first. A run that a later part names again is made once.

    - suites: [superni-1]
      methods: [streamlearn, lora]      # all methods if absent
      seeds: [0, 1, 2]
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import orjson
import yaml
from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from benchmarks.learn.methods import ABLATIONS, METHODS, read_profile
from benchmarks.learn.run import run_method
from benchmarks.learn.suites import SUITES, Draw, Split, Suite, make_suite
from benchmarks.measuring import MeasurementError, in_own_process
from streamlearn.errors import UsageError
from streamlearn.events import configure_logging

Tell = Callable[[str], None]
"""Receives a line for people."""


@dataclass(frozen=True)
class RunConditions:
    """What the runs of one command have in common."""

    data: tuple[str, ...]
    """Folders of task files that named suites draw from."""
    out: str
    profile: str = "nano"
    """A packaged profile's name, or a profile's file."""
    backbone: str | None = None
    """Folder of the backbone; None for the profile's."""
    split: Split = "test"
    """The records that are scored."""
    records: int | None = None
    """Maximum training records per task; None for the profile's."""
    evaluated: int = 50
    """Maximum scored records per task."""
    answered: bool = True
    """Whether free answers are decoded and scored."""
    order: tuple[str, ...] = ()
    """Tasks of a folder, in training order; empty for the order of their names."""

    def check(self, suites: Sequence[str], methods: Sequence[str], known: Sequence[str]) -> None:
        """Check that every suite and method can be run.

        Raises:
            UsageError: a suite, method or order is unknown, the message lists the known ones; or there is no backbone.
        """
        read_profile(self.profile).model(Path(self.backbone) if self.backbone else None)
        for name in methods:
            if name not in known:
                raise UsageError(f"--method {name}: unknown; expected one of {', '.join(known)}")
        for suite in suites:
            if suite not in SUITES and not Path(suite).is_dir():
                raise UsageError(f"--suite {suite}: expected a folder or one of {', '.join(SUITES)}")
            if suite in SUITES and not self.data:
                raise UsageError(f"--suite {suite}: needs the folders of its task files; pass them with --data")
        if self.order and any(suite in SUITES for suite in suites):
            raise UsageError("--order: applies to a folder of task files; a named suite has its own order")


@dataclass(frozen=True)
class RunJob:
    """One run of one method on one suite with one seed."""

    suite: str
    """A suite's name, or a folder of task files."""
    method: str
    seed: int
    conditions: RunConditions
    own: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Changes of this run only, by dotted key: the values that a trial of a search tries."""
    label: str = ""
    """Folder of a trial under `out`; empty for a run that is no trial."""
    only_at_end: bool = False
    """Whether the run is scored at the end of the stream only."""

    @property
    def suite_name(self) -> str:
        """The suite's name in files and tables."""
        return self.suite if self.suite in SUITES else Path(self.suite).resolve().name

    @property
    def title(self) -> str:
        """Suite, method, seed and label, for people."""
        return "  ".join(filter(None, (self.suite_name, self.method, f"seed {self.seed}", self.label)))

    @property
    def file(self) -> Path:
        """The result file."""
        method = self.method.replace(" ", "-").replace(",", "")
        return Path(self.conditions.out) / self.label / self.suite_name / f"{method}.{self.seed}.json"

    @classmethod
    def from_json(cls, text: str) -> "RunJob":
        values: dict[str, Any] = orjson.loads(text)
        given = values.pop("conditions")
        conditions = RunConditions(**{**given, "data": tuple(given["data"]), "order": tuple(given["order"])})
        return cls(conditions=conditions, **values)

    @property
    def records(self) -> int:
        """Maximum training records per task."""
        return self.conditions.records or read_profile(self.conditions.profile).records

    def make_suite(self) -> Suite:
        """Build the suite with this run's records."""
        given = self.conditions
        prompts = read_profile(given.profile).prompts
        draw = Draw(list(map(Path, given.data)), self.records, given.evaluated, self.seed, given.split, prompts)
        suite = replace(make_suite(self.suite, draw, given.order), answered=given.answered)
        return suite.scored_at_end() if self.only_at_end else suite


class Part(BaseModel):
    """All of some methods on all of some suites with all of some seeds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    suites: Annotated[list[str], MinLen(1)]
    methods: Annotated[list[str], MinLen(1)] = list(METHODS)
    seeds: Annotated[list[int], MinLen(1)]


def read_plan(file: Path) -> list[Part]:
    """Read a plan's file.

    Raises:
        UsageError: it is not a plan; the message has the number of the part.
    """
    try:
        return TypeAdapter(list[Part]).validate_python(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise UsageError(f"--plan {file}: expected a YAML list of parts: {error}") from error


def jobs_of(parts: Sequence[Part], conditions: RunConditions) -> list[RunJob]:
    """Return every run once, in the order in which they are made: within a part by suite, seed and method.

    Raises:
        UsageError: see `RunConditions.check`.
    """
    for part in parts:
        conditions.check(part.suites, part.methods, [*METHODS, *ABLATIONS])
    jobs = (
        RunJob(suite, method, seed, conditions)
        for part in parts
        for suite in part.suites
        for seed in part.seeds
        for method in part.methods
    )
    return list({job.file: job for job in jobs}.values())


def make_runs(
    jobs: Sequence[RunJob], *, side_by_side: int, tell: Tell = print, deadline: float = math.inf
) -> list[RunJob]:
    """Make the runs that have no result yet, begun in the given order; return those that failed.

    A failed run does not stop the others, and is told with the end of its output. It is left to the next call, as is
    one that was interrupted or not finished at `deadline`, a time of `time.monotonic`.
    """
    missing = [job for job in jobs if not job.file.exists()]
    tell(f"{len(jobs) - len(missing)} runs found, {len(missing)} to make, {side_by_side} at a time")
    threads = max(1, len(os.sched_getaffinity(0)) // side_by_side)  # more threads than cores slow each other down
    failed: list[RunJob] = []

    def make(job: RunJob) -> dict[str, Any]:
        left = None if math.isinf(deadline) else deadline - time.monotonic()
        return in_own_process("benchmarks.learn.jobs", asdict(job), threads=threads, timeout_s=left)

    with ThreadPoolExecutor(side_by_side) as pool:
        runs = {pool.submit(make, job): job for job in missing}
        try:
            for number, run in enumerate(as_completed(runs), 1):
                job = runs[run]
                try:
                    tell(f"{job.title}  {run.result()['seconds']:.0f} s  ({number} of {len(missing)})")
                except MeasurementError as error:
                    failed.append(job)
                    tell(f"{job.title}  failed: {error}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return failed


def make_run(job: RunJob) -> None:
    """Make the run in this process; its file appears when it is complete."""
    result = run_method(
        job.make_suite(),
        job.method,
        {**METHODS, **ABLATIONS}[job.method],
        job.seed,
        profile=read_profile(job.conditions.profile),
        backbone_folder=Path(job.conditions.backbone) if job.conditions.backbone else None,
        own=job.own,
    )
    job.file.parent.mkdir(parents=True, exist_ok=True)
    partial = job.file.with_suffix(".tmp")
    partial.write_bytes(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))
    partial.replace(job.file)


if __name__ == "__main__":
    configure_logging("error")
    started = time.monotonic()
    make_run(RunJob.from_json(sys.argv[1]))
    print(orjson.dumps({"seconds": time.monotonic() - started}).decode())
