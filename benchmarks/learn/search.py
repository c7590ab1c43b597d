"""The search for a profile: the same trials for every method, on development records only.

| stage | trials | of |
|---|---|---|
| 0 | prompts plain or chat, by adapters in all layers or in the upper half | `lora` and `streamlearn`, at the rate 1e-3 |
| 1 | three learning rates | every method, its strength as in its arm |
| 2 | four strengths at the best rate; four rates around the best for a method without a strength | every method |
| 3 | the next value beyond the grid, up to three times | every method whose best value is the first or the last tried |

A trial is its own run, scored at the end of the stream only, so that an interrupted search continues where it stopped.
The values of the trial with the highest AP are chosen; ties are decided by the token loss.
"""  # noqa: E501 - a table row is one line

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from benchmarks.learn.jobs import RunConditions, RunFailedError, RunJob
from benchmarks.learn.methods import METHODS, Profile, read_profile
from benchmarks.learn.suites import Prompts
from streamlearn.backbone.load import outline
from streamlearn.errors import UsageError
from streamlearn.settings import BackboneSettings

SEED = 100
"""Seed of the trials; no result uses it."""
PROMPTS: tuple[Prompts, ...] = ("plain", "chat")
SEARCHED = tuple(name for name, method in METHODS.items() if method.trained and method.tuned_as is None)
"""Methods with something to search: all but those that train nothing, or use another's values."""
LR = "learner.lr"
FIRST_LAYER = "adapter.first_layer"
RATES = (3e-4, 1e-3, 3e-3)
SETUP_RATE = 1e-3
"""Rate of stage 0; among `RATES`, so that two of its runs are trials of stage 1 too."""
FACTORS = (0.5, 0.7, 1.4, 2.0)
"""Rates of stage 2 as multiples of the best rate of stage 1, for a method without a strength."""
BEYOND = 3
"""Maximum rounds of stage 3."""
SETUP_METHODS = ("lora", "streamlearn")
"""Methods of stage 0: their mean score decides the setup of all methods."""
LITTLE = 0.02
"""Mean AP that adapters in the upper half alone may cost, since a run with them takes half the time."""
HEAD = """# What the values of each method were chosen from

`python -m benchmarks.learn search` made this table and the profile. Every method has the same 7 trials, each a run on
`{suite}` with {records} records per task and seed {seed}, which no result uses, on {backbone}. Where the best value is
the first or the last of those tried, the next one beyond is tried too, up to {beyond} times. Scores are AP: the mean
over the tasks of the metric of free answers after the last task, on at most {evaluated} development records per task.
No test record was read. The trial with the highest AP (bold) is chosen, of equal ones the one with the lower loss.

| method | trials: AP |
|---|---|
"""

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


def setups(start: Profile, model: str) -> dict[str, Profile]:
    """Return the profiles of stage 0 by name: prompts, by the first decoder layer with an adapter."""
    layers = outline(BackboneSettings(model=model)).config.get_text_config().num_hidden_layers
    profiles = {}
    for prompts in PROMPTS:
        for layer in dict.fromkeys((None, layers // 2 or None)):
            name = f"{prompts}-{'all-layers' if layer is None else f'from-layer-{layer}'}"
            settings = {key: value for key, value in start.settings.items() if key != FIRST_LAYER}
            settings |= {} if layer is None else {FIRST_LAYER: layer}
            profiles[name] = replace(start, name=name, prompts=prompts, settings=settings, methods={}, source={})
    return profiles


class Search:
    """A search on one suite; the profile in `conditions` is the one that it starts from."""

    def __init__(
        self,
        suite: str,
        methods: Sequence[str],
        conditions: RunConditions,
        make_runs: Callable[[Sequence[RunJob]], list[RunJob]],
    ) -> None:
        """Check the search.

        Raises:
            UsageError: a method or the suite is unknown, or the folder holds a search from another start.
        """
        conditions.check([suite], methods, SEARCHED)
        self._suite, self._methods, self._make_runs = suite, methods, make_runs
        self._conditions = replace(conditions, split="development")
        self._start = read_profile(conditions.profile)
        self._model = self._start.model(Path(conditions.backbone) if conditions.backbone else None)
        self.failed: list[RunJob] = []
        self.setups: dict[str, list[Trial]] = {}
        """Stage 0: setup -> a trial of each of `SETUP_METHODS`."""
        self.trials: dict[str, list[Trial]] = {}
        """Stages 1 to 3: method -> its trials."""
        self._check_start()

    def run(self) -> Profile:
        """Make the missing trials of all stages and return the chosen profile.

        Raises:
            UsageError: the folder has trials of other arms, or its trials are being made by another command.
            RunFailedError: a trial of every setup failed.
        """
        profiles = setups(self._start, self._model)
        for name in profiles:
            trials = self._try(profiles[name], {method: [{LR: SETUP_RATE}] for method in SETUP_METHODS})
            self.setups[name] = [trial for own in trials.values() for trial in own]
        setup = profiles[self._cheap_and_good(profiles)]
        if any(trial.ap is None for trial in self.setups[setup.name]):
            raise RunFailedError.from_jobs(self.failed)
        trials = self._try(setup, {method: [{LR: rate} for rate in RATES] for method in self._methods})
        for stage in range(1 + BEYOND):
            grids = {method: beyond(own) if stage else refine(own) for method, own in trials.items()}
            made = self._try(setup, {method: grid for method, grid in grids.items() if grid})
            trials = {method: [*own, *made.get(method, [])] for method, own in trials.items()}
        self.trials = trials
        chosen = {method: best(own) for method, own in trials.items()}
        values = {method: dict(trial.own) for method, trial in chosen.items() if trial is not None}
        source = self._source()
        return replace(setup, name=self._start.name, records=source["records_per_task"], methods=values, source=source)

    def _cheap_and_good(self, profiles: Mapping[str, Profile]) -> str:
        """The best setup with adapters in the upper half; the best of all where that one costs more than `LITTLE`."""

        def mean_rank(name: str) -> tuple[float, float]:
            return fmean(trial.rank[0] for trial in self.setups[name]), fmean(t.rank[1] for t in self.setups[name])

        leading = min(profiles, key=mean_rank)
        cheaper = [name for name in profiles if FIRST_LAYER in profiles[name].settings]
        cheap = min(cheaper, key=mean_rank, default=leading)
        return cheap if mean_rank(cheap)[0] <= mean_rank(leading)[0] + LITTLE else leading

    def _try(self, setup: Profile, grids: Mapping[str, Sequence[Own]]) -> dict[str, list[Trial]]:
        jobs = {method: [self._job(setup, method, own) for own in grid] for method, grid in grids.items()}
        every = [job for own in jobs.values() for job in own]
        self._check_arms([job for job in every if job.file.exists()])
        failed = self._make_runs(every)
        self.failed += failed
        if any(not job.file.exists() and job not in failed for job in every):
            raise UsageError("search: trials are being made by another command; start again when it has ended")
        return {method: [read_trial(job) for job in own] for method, own in jobs.items()}

    def _job(self, setup: Profile, method: str, own: Own) -> RunJob:
        file = Path(self._conditions.out) / "setups" / f"{setup.name}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(setup.to_json())
        label = f"{setup.name}/" + ",".join(f"{key}={value:g}" for key, value in own.items())
        conditions = replace(self._conditions, profile=str(file))
        return RunJob(self._suite, method, SEED, conditions, own, label, only_at_end=True)

    def _check_arms(self, jobs: Sequence[RunJob]) -> None:
        """Refuse trials made before their method's arm was changed: what was best for it then may not be now."""
        linears = outline(BackboneSettings(model=self._model)).linears
        suite = jobs[0].make_suite() if jobs else None
        for job in jobs:
            assert suite is not None
            made, now = orjson.loads(job.file.read_bytes())["arm"], METHODS[job.method].arm_for(suite, linears)
            if made != now:
                raise UsageError(f"{job.file}: a trial of another arm, {made}, now {now}; delete it to make it again")

    def _check_start(self) -> None:
        """Refuse a folder with trials from another start: they would be taken for this search's."""
        file = Path(self._conditions.out) / "start.json"
        start = {**self._source(), "profile": orjson.loads(self._start.to_json())}
        begun = orjson.dumps(start, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and file.read_bytes() != begun:
            raise UsageError(f"--out {file.parent}: holds a search from another start, see {file}; name another folder")
        file.write_bytes(begun)

    def _source(self) -> dict[str, Any]:
        job = RunJob(self._suite, SETUP_METHODS[0], SEED, self._conditions)
        return {
            "suite": job.suite_name,
            "split": "development",
            "seed": SEED,
            "records_per_task": job.records,
            "evaluated_per_task": self._conditions.evaluated,
            "backbone": self._start.backbone_name(
                Path(self._conditions.backbone) if self._conditions.backbone else None
            ),
        }

    def write_record(self, table: Path) -> None:
        """Write every trial as a table, and as the JSON file of the same name."""
        source = self._source()
        names = {"records": source["records_per_task"], "evaluated": source["evaluated_per_task"], "beyond": BEYOND}
        rows = [
            f"| `{method}` | {', '.join(map(_cell, own, [best(own)] * len(own)))} |"
            for method, own in self.trials.items()
        ]
        rows += [f"| setup {name} | {', '.join(map(_cell, own))} |" for name, own in self.setups.items()]
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(HEAD.format(**source, **names) + "\n".join(rows) + "\n", encoding="utf-8")
        everything = {"source": source, "setups": self.setups, "methods": self.trials}
        table.with_suffix(".json").write_bytes(
            orjson.dumps(everything, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )


def _cell(trial: Trial, chosen: Trial | None = None) -> str:
    values = ", ".join(f"{key.partition('.')[2]} {value:g}" for key, value in trial.own.items())
    score = "failed" if trial.ap is None else f"{trial.ap:.3f}"
    return f"{values}: {f'**{score}**' if trial == chosen else score}"
