"""What a search tries: setups of prompts and adapter layers, learning rates, and strengths.

| stage | trials | of |
|---|---|---|
| 0 | prompts plain or chat, by adapters in all layers or in the upper half | `lora` and `streamlearn`, at the rate 1e-3 |
| 1 | three learning rates | every method, its strength as in its arm |
| 2 | four strengths at the best rate; four rates around the best for a method without a strength | every method |
| 3 | the next value beyond the grid, up to three times | every method whose best value is the first or the last tried |

Every method gets the same seven trials of stages 1 and 2. A trial is scored at the end of the stream only.
"""  # noqa: E501 - a table row is one line

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import orjson

from benchmarks.learn.job import RunJob
from benchmarks.learn.profile import Profile, Prompts

LR = "learner.lr"
RATES = (3e-4, 1e-3, 3e-3)
SETUP_RATE = 1e-3
"""Rate of stage 0; among `RATES`, so that two of its runs are trials of stage 1 too."""
FACTORS = (0.5, 0.7, 1.4, 2.0)
"""Rates of stage 2 as multiples of the best rate of stage 1, for a method without a strength."""
BEYOND = 3
"""Maximum rounds of stage 3."""
FIRST_LAYER = "adapter.first_layer"
SETUP_METHODS = ("lora", "streamlearn")
"""Methods of stage 0: their mean score decides the setup of all methods."""
LITTLE = 0.02
"""Mean AP that adapters in the upper half alone may cost, since a run with them takes half the time."""


@dataclass(frozen=True)
class Setup:
    """What all methods share and stage 0 chooses."""

    prompts: Prompts
    first_layer: int | None
    """First decoder layer with an adapter; None: all layers have one."""

    @property
    def name(self) -> str:
        """Name of the setup's profile and of the folder of its trials."""
        return f"{self.prompts}-{'all-layers' if self.first_layer is None else f'from-layer-{self.first_layer}'}"

    def profile(self, start: Profile) -> Profile:
        """Return the start profile with this setup and without values of single methods."""
        settings = {key: value for key, value in start.settings.items() if key != FIRST_LAYER}
        if self.first_layer is not None:
            settings[FIRST_LAYER] = self.first_layer
        return replace(start, name=self.name, prompts=self.prompts, settings=settings, methods={}, source={})


@dataclass(frozen=True)
class Trial:
    """A method at certain values, and what came of it."""

    method: str
    own: Mapping[str, Any]
    """Dotted key -> value."""
    ap: float | None = None
    """AP of free answers at the end on development records; None: the run failed."""
    loss: float = field(default=float("inf"))
    """Nats per answer token at the end, mean over the tasks."""
    commit: str | None = None
    """Commit that made the run."""

    @property
    def rank(self) -> tuple[float, float, int]:
        """Sort key: the best trial has the smallest; ties in AP are decided by the loss.

        Of the arm's own strength and the same strength as a value of the grid, the latter is taken.
        """
        return (-self.ap if self.ap is not None else float("inf"), self.loss, -len(self.own))


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the highest AP, of equal ones the one with the lowest loss; None: all failed."""
    first = min(trials, key=lambda trial: trial.rank)
    return first if first.ap is not None else None


def label(setup: Setup, own: Mapping[str, Any]) -> str:
    """Return the folder of a trial: the setup, and the values."""
    return f"{setup.name}/" + ",".join(f"{key}={value:g}" for key, value in own.items())


def rates() -> list[dict[str, float]]:
    """Return the values of stage 1."""
    return [{LR: rate} for rate in RATES]


def strengths(best: float, strength: tuple[str, tuple[float, ...]] | None) -> list[dict[str, float]]:
    """Return the values of stage 2 for a method whose best rate is `best`."""
    if strength is None:
        return [{LR: float(f"{best * factor:.3g}")} for factor in FACTORS]
    key, values = strength
    return [{LR: best, key: value} for value in values]


def beyond(trials: Sequence[Trial]) -> list[dict[str, float]]:
    """Return the values of a round of stage 3; empty if the best ones lie between others that were tried.

    A grid goes on by the ratio of its last two values.
    """
    chosen = best(trials)
    if chosen is None:
        return []
    further = []
    for key, value in chosen.own.items():
        tried = sorted({trial.own[key] for trial in trials if key in trial.own})
        outer = [(tried[0], tried[1]), (tried[-1], tried[-2])] if len(tried) > 1 else []
        further += [{**chosen.own, key: float(f"{edge**2 / inner:.3g}")} for edge, inner in outer if value == edge]
    return further


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
        commit=run["versions"]["commit"],
    )
