"""The search for a profile: the same trials for every method, on development records only.

Each trial is a run of its own, so that a search that is interrupted goes on where it stopped. The values of the trial
with the highest AP of free answers at the end are chosen; ties are decided by the token loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import orjson

from benchmarks.learn.job import RunConditions, RunJob
from benchmarks.learn.methods import METHODS
from benchmarks.learn.plan import check_methods, check_suite
from benchmarks.learn.processes import Outcome, RunFailedError
from benchmarks.learn.profile import Profile, Prompts, read_profile
from benchmarks.learn.search_trials import (
    BEYOND,
    FACTORS,
    LITTLE,
    LR,
    RATES,
    SETUP_METHODS,
    SETUP_RATE,
    Setup,
    Trial,
    best,
    beyond,
    label,
    rates,
    read_trial,
    strengths,
)
from streamlearn.backbone.load import outline
from streamlearn.errors import UsageError
from streamlearn.settings import BackboneSettings

SEED = 100
"""Seed of the trials; no result uses it."""
PROMPTS: tuple[Prompts, ...] = ("plain", "chat")
SEARCHED = tuple(name for name, method in METHODS.items() if method.trained and method.tuned_as is None)
"""Methods with something to search: all but those that train nothing, or use another's values."""

MakeRuns = Callable[[Sequence[RunJob]], Outcome]


@dataclass(frozen=True)
class Found:
    """The trials of a search, and what they led to."""

    profile: Profile
    setup: Setup
    """The chosen one."""
    setups: Mapping[Setup, Sequence[Trial]]
    """Stage 0: setup -> a trial of each of `SETUP_METHODS`."""
    trials: Mapping[str, Sequence[Trial]]
    """Stages 1 to 3: method -> its trials; three where all of stage 1 failed."""
    failed: Sequence[RunJob]


@dataclass
class Search:
    """A search on one suite."""

    suite: str
    methods: Sequence[str]
    conditions: RunConditions
    """The profile in it is the one that the search starts from."""
    make_runs: MakeRuns

    def __post_init__(self) -> None:
        self.start = read_profile(self.conditions.profile)
        self.first_layers = (None, upper_half(self.start.model(self.conditions.backbone)))
        self.failed: list[RunJob] = []
        self._arms: dict[str, str] = {}

    def run(self) -> Found:
        """Make the missing trials of all stages and choose.

        Raises:
            UsageError: a method or the suite is unknown, the folder holds a search from another start or trials of
                other arms, or its trials are being made by another command.
            RunFailedError: a trial of every setup failed.
        """
        check_methods(self.methods, SEARCHED)
        check_suite(self.suite, self.conditions.data)
        self._check_start()
        setups = self._choose_setup()
        setup = _cheap_and_good(setups)
        if any(trial.ap is None for trial in setups[setup]):
            raise RunFailedError.of(self.failed)
        tried = self._stage(setup, {method: rates() for method in self.methods})
        leading = {method: best(trials) for method, trials in tried.items()}
        second = {
            method: strengths(trial.own[LR], METHODS[method].search)
            for method, trial in leading.items()
            if trial is not None
        }
        refined = self._stage(setup, second)
        trials = {method: [*tried[method], *refined.get(method, [])] for method in self.methods}
        for _ in range(BEYOND):
            outer = {method: grid for method, each in trials.items() if (grid := beyond(each))}
            if not outer:
                break
            made = self._stage(setup, outer)
            trials = {method: [*each, *made.get(method, [])] for method, each in trials.items()}
        return self._found(setup, setups, trials)

    def _choose_setup(self) -> dict[Setup, list[Trial]]:
        """Stage 0."""
        own = {LR: SETUP_RATE}
        setups = [Setup(prompts, layer) for prompts in PROMPTS for layer in self.first_layers]
        jobs = {setup: [self._job(setup, method, own) for method in SETUP_METHODS] for setup in setups}
        self._make([job for each in jobs.values() for job in each])
        return {setup: [read_trial(job) for job in each] for setup, each in jobs.items()}

    def _stage(self, setup: Setup, values: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[Trial]]:
        jobs = {method: [self._job(setup, method, own) for own in grid] for method, grid in values.items()}
        self._make([job for each in jobs.values() for job in each])
        return {method: [read_trial(job) for job in each] for method, each in jobs.items()}

    def _job(self, setup: Setup, method: str, own: Mapping[str, Any]) -> RunJob:
        file = self.conditions.out / "setups" / f"{setup.name}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(setup.profile(self.start).to_json())
        conditions = replace(self.conditions, profile=str(file), split="development")
        return conditions.job(self.suite, method, SEED, own=own, label=label(setup, own), only_at_end=True)

    def _make(self, jobs: Sequence[RunJob]) -> None:
        self._check_arms([job for job in jobs if job.file.exists()])
        outcome = self.make_runs(jobs)
        self.failed += outcome.failed
        if outcome.busy:
            raise UsageError("bench search: trials are being made by another command; start again when it has ended")

    def _check_arms(self, jobs: Sequence[RunJob]) -> None:
        """Refuse trials made before their method's arm was changed: what was best for it then may not be now."""
        made = {job: orjson.loads(job.file.read_bytes())["arm"] for job in jobs}
        stale = [job for job, arm in made.items() if arm != self._arm(job)]
        if stale:
            files = "".join(f"\n  {job.file}: {made[job]}, now {self._arm(job)}" for job in stale)
            raise UsageError(f"--out {self.conditions.out}: delete the trials of other arms to make them again:{files}")

    def _arm(self, job: RunJob) -> str:
        """The arm of a trial that is made now."""
        if job.method not in self._arms:
            model = self.start.model(self.conditions.backbone)
            linears = outline(BackboneSettings(model=model)).linears
            self._arms[job.method] = METHODS[job.method].arm_for(job.make_suite(), linears)
        return self._arms[job.method]

    def _check_start(self) -> None:
        """Refuse a folder with trials from another start: they would be taken for this search's."""
        keep = self.conditions.out / "start.json"
        begun = orjson.dumps(
            {**self._source(), "layers": self.first_layers, "profile": orjson.loads(self.start.to_json())},
            option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
        )
        keep.parent.mkdir(parents=True, exist_ok=True)
        if keep.exists() and keep.read_bytes() != begun:
            raise UsageError(f"--out {keep.parent}: holds a search from another start, see {keep}; name another folder")
        keep.write_bytes(begun)

    def _found(
        self, setup: Setup, setups: Mapping[Setup, Sequence[Trial]], trials: Mapping[str, Sequence[Trial]]
    ) -> Found:
        every = [trial for each in [*setups.values(), *trials.values()] for trial in each]
        source = {
            **self._source(),
            "trials_per_method": len(RATES) + len(FACTORS),
            "commits": sorted({trial.commit for trial in every if trial.commit}),
        }
        chosen = {method: best(each) for method, each in trials.items()}
        profile = replace(
            setup.profile(self.start),
            name=self.start.name,
            records=source["records_per_task"],
            methods={method: dict(trial.own) for method, trial in chosen.items() if trial is not None},
            source=source,
        )
        return Found(profile, setup, setups, trials, self.failed)

    def _source(self) -> dict[str, Any]:
        job = self.conditions.job(self.suite, SETUP_METHODS[0], SEED)
        return {
            "command": "bench search",
            "suite": job.suite_name,
            "split": "development",
            "seed": SEED,
            "records_per_task": job.records,
            "evaluated_per_task": job.evaluated,
            "backbone": self.start.backbone_name(self.conditions.backbone),
        }


def _cheap_and_good(setups: Mapping[Setup, Sequence[Trial]]) -> Setup:
    """The best setup with adapters in the upper half; the best of all where that one costs more than `LITTLE`."""
    leading = min(setups, key=lambda each: _mean_rank(setups[each]))
    cheaper = [each for each in setups if each.first_layer is not None]
    cheap = min(cheaper, key=lambda each: _mean_rank(setups[each]), default=leading)
    return cheap if _mean_rank(setups[cheap])[0] <= _mean_rank(setups[leading])[0] + LITTLE else leading


def upper_half(model: str) -> int | None:
    """Return the first layer of the upper half of a backbone's decoder; None for a decoder of one layer."""
    config = outline(BackboneSettings(model=model)).config
    return config.get_text_config().num_hidden_layers // 2 or None


def _mean_rank(trials: Sequence[Trial]) -> tuple[float, float]:
    """Sort key of a setup: that of a trial with the mean scores; a setup with a failed trial comes last."""
    return fmean(trial.rank[0] for trial in trials), fmean(trial.rank[1] for trial in trials)
