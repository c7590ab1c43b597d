"""The search for the values of each method: the same trials for all, on development records only.

1. Three learning rates, the method's strength as in its arm.
2. Four strengths at the best rate; for a method without a strength, four rates around the best.
3. The next value beyond the grid, up to three times, while the best value is the first or the last tried.

A search around a profile, for another length of the stream, has half, once and twice the profile's own rate in place of
stages 1 and 2, at its strength; methods that are not searched keep their values.

A trial is its own run, scored at the end of the stream only, so that an interrupted search continues where it stopped.
The values of the trial with the highest AP are chosen; ties are decided by the token loss. Prompts and adapter layers
are those of the profile that the search starts from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from benchmarks.learn.jobs import RunConditions, RunJob
from benchmarks.learn.methods import METHODS, Profile, read_profile
from streamlearn.errors import UsageError

SEED = 100
"""Seed of the trials; no result uses it."""
SEARCHED = tuple(name for name, method in METHODS.items() if method.trained and method.tuned_as is None)
"""Methods with something to search: all but those that train nothing, or use another's values."""
LR = "learner.lr"
RATES = (3e-4, 1e-3, 3e-3)
FACTORS = (0.5, 0.7, 1.4, 2.0)
"""Rates of stage 2 as multiples of the best rate of stage 1, for a method without a strength."""
AROUND = (0.5, 1.0, 2.0)
"""Rates of a search around a profile, as multiples of its own."""
BEYOND = 3
"""Maximum rounds of stage 3."""

Own = Mapping[str, Any]
"""Dotted key -> value: what a trial tries."""


@dataclass(frozen=True)
class Trial:
    """A method at certain values, and its result."""

    method: str
    own: Own
    ap: float | None = None
    """AP of free answers at the end on development records; None: the run failed."""
    loss: float = field(default=float("inf"))
    """Nats per answer token at the end, mean over the tasks."""

    @property
    def rank(self) -> tuple[float, float, int]:
        """Sort key: the best trial has the smallest.

        Of the arm's own strength and the same strength as a value of the grid, the latter is taken.
        """
        return (-self.ap if self.ap is not None else float("inf"), self.loss, -len(self.own))


def read_trial(job: RunJob) -> Trial:
    """Read the result of a trial's run; without a result its scores are empty."""
    if not job.file.exists():
        return Trial(job.method, job.own)
    run = orjson.loads(job.file.read_bytes())
    tasks = dict.fromkeys(task for segment in run["segments"] for task in segment["tasks"])
    return Trial(
        job.method,
        job.own,
        ap=fmean(fmean(run["answers"][task]["end"]) for task in tasks),
        loss=fmean(run["teacher"][-1][task]["loss"] for task in tasks),
    )


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the highest AP, of equal ones the one with the lowest loss; None: all failed."""
    first = min(trials, key=lambda trial: trial.rank)
    return first if first.ap is not None else None


def refine(trials: Sequence[Trial]) -> list[Own]:
    """Return the values of stage 2, given the trials of stage 1."""
    chosen = best(trials)
    if chosen is None:
        return []
    rate, strength = chosen.own[LR], METHODS[chosen.method].search
    if strength is None:
        return [{LR: float(f"{rate * factor:.3g}")} for factor in FACTORS]
    key, values = strength
    return [{LR: rate, key: value} for value in values]


def around(own: Own) -> list[Own]:
    """Return the values to try in place of stages 1 and 2, given a method's values in the profile."""
    return [{**own, LR: float(f"{own[LR] * factor:.3g}")} for factor in AROUND]


def beyond(trials: Sequence[Trial]) -> list[Own]:
    """Return the values of a round of stage 3; empty if the best ones lie between others that were tried.

    A grid continues by the ratio of its last two values.
    """
    chosen = best(trials)
    if chosen is None:
        return []
    further: list[Own] = []
    for key, value in chosen.own.items():
        tried = sorted({trial.own[key] for trial in trials if key in trial.own})
        outer = [(tried[0], tried[1]), (tried[-1], tried[-2])] if len(tried) > 1 else []
        further += [{**chosen.own, key: float(f"{edge**2 / inner:.3g}")} for edge, inner in outer if value == edge]
    return further


class Search:
    """A search on one suite; the profile in `conditions` is the one that it starts from."""

    def __init__(
        self,
        suite: str,
        methods: Sequence[str],
        conditions: RunConditions,
        make_runs: Callable[[Sequence[RunJob]], list[RunJob]],
        *,
        is_around: bool = False,
    ) -> None:
        """Check the search; `is_around`: whether it is one around the profile that it starts from.

        Raises:
            UsageError: a method or the suite is unknown, the profile has no rate for a method to search around, or the
                folder holds a search from another start.
        """
        conditions.check([suite], methods, SEARCHED)
        self._suite, self._methods, self._make_runs, self._is_around = suite, methods, make_runs, is_around
        self._conditions = replace(conditions, split="development")
        self._start = read_profile(conditions.profile)
        without = [method for method in methods if is_around and LR not in self._start.methods.get(method, {})]
        if without:
            raise UsageError(f"--around: expected a profile with a rate for {', '.join(without)}, found none")
        self.failed: list[RunJob] = []
        self.trials: dict[str, list[Trial]] = {method: [] for method in methods}
        self.source: dict[str, Any] = {
            "suite": self._job(methods[0], {}).suite_name,
            "split": "development",
            "seed": SEED,
            "records_per_task": self._job(methods[0], {}).records,
            "evaluated_per_task": conditions.evaluated,
            "backbone": self._start.backbone_name(Path(conditions.backbone) if conditions.backbone else None),
        }
        self._check_start()

    def run(self) -> Profile:
        """Make the missing trials of all stages and return the chosen profile."""
        if self._is_around:
            self._try({method: around(self._start.methods[method]) for method in self._methods})
        else:
            self._try({method: [{LR: rate} for rate in RATES] for method in self._methods})
            self._try({method: refine(own) for method, own in self.trials.items()})
        for _ in range(BEYOND):
            self._try({method: beyond(own) for method, own in self.trials.items()})
        chosen = {method: best(own) for method, own in self.trials.items()}
        values = {method: dict(trial.own) for method, trial in chosen.items() if trial is not None}
        kept = self._start.methods if self._is_around else {}
        source = {**self.source, "searched": [*values]}
        return replace(self._start, records=self.source["records_per_task"], methods={**kept, **values}, source=source)

    def _try(self, grids: Mapping[str, Sequence[Own]]) -> None:
        jobs = [self._job(method, own) for method, grid in grids.items() for own in grid]
        self.failed += self._make_runs(jobs)
        for job in jobs:
            self.trials[job.method].append(read_trial(job))

    def _job(self, method: str, own: Own) -> RunJob:
        label = ",".join(f"{key}={value:g}" for key, value in own.items())
        return RunJob(self._suite, method, SEED, self._conditions, own, label, only_at_end=True)

    def _check_start(self) -> None:
        """Refuse a folder with trials from another start: they would be taken for this search's."""
        file = Path(self._conditions.out) / "start.json"
        start = {**self.source, "profile": orjson.loads(self._start.to_json())}
        content = orjson.dumps(start, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and file.read_bytes() != content:
            raise UsageError(f"--out {file.parent}: holds a search from another start, see {file}; name another folder")
        file.write_bytes(content)

    def write_record(self, table: Path) -> None:
        """Write every trial as a table, the chosen ones bold, and as the JSON file of the same name."""
        source = self.source
        lines = [
            f"# Trials of each method: AP on development records of `{source['suite']}`",
            "",
            f"Records per task: {source['records_per_task']} for training, at most {source['evaluated_per_task']} "
            f"scored; seed {SEED}; {source['backbone']}.",
            "",
            "| method | trials: AP |",
            "|---|---|",
            *(f"| `{name}` | {', '.join(_cell(one, best(own)) for one in own)} |" for name, own in self.trials.items()),
        ]
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("\n".join(lines) + "\n", encoding="utf-8")
        everything = orjson.dumps({"source": source, "methods": self.trials}, option=orjson.OPT_INDENT_2)
        table.with_suffix(".json").write_bytes(everything)


def _cell(trial: Trial, chosen: Trial | None) -> str:
    values = ", ".join(f"{key.partition('.')[2]} {value:g}" for key, value in trial.own.items())
    score = "failed" if trial.ap is None else f"{trial.ap:.3f}"
    return f"{values}: {f'**{score}**' if trial == chosen else score}"
