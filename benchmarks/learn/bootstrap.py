"""95 % intervals of scores and of their differences: a paired bootstrap over test records.

    m*_t = 1/N_t sum_n w_tn x_tn,   w_t ~ Multinomial(N_t, 1/N_t)                                   (1)

x_tn is the score of test record n of task t. Figures are means of the m*_t over tasks and then over seeds, and their
interval lies between the 2.5th and the 97.5th percentile (Efron and Tibshirani 1993, chapter 13). All methods score the
same test records, and so do all seeds. A record is therefore drawn once for all of them: the w_t are common to all runs
(Koehn 2004 resamples two systems in this way). Drawing again for each seed would treat repeated scores of one record as
independent, and its intervals would be too narrow.

The intervals cover the choice of test records, for the models as trained. They do not cover other training seeds.
AF has no interval: it has a maximum with zero, which is biased upwards under resampling. BWT is linear and has one.
"""

# Shape suffixes: R runs, N test records of a task, B resamples, the first of which is the sample itself.

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.learn.scores import Run, as_after, last_segments

FROZEN = "frozen"
RESAMPLES = 10_000
PERCENTILES = (2.5, 97.5)
FIGURES = ("AP", "LA", "BWT", "ZST")
OF_ORDERED = frozenset({"LA", "BWT"})
"""Figures that need tasks in an order; runs on shuffled records do not have them."""

DECIMALS = 9
"""Equal scores may differ by a rounding error after a matrix product, which must not decide the side of zero."""

Array = NDArray[np.float64]
T = TypeVar("T")


class Estimate(NamedTuple):
    """A value, its 95 % interval, and the number of seeds over which it is a mean."""

    value: float
    low: float
    high: float
    seeds: int


class Bootstrap:
    """Resampled figures of the runs of one suite."""

    def __init__(self, runs: Sequence[Run], resamples: int = RESAMPLES, seed: int = 0) -> None:
        """Resample the records of every task; all runs score the same ones."""
        self._runs = runs
        self._resamples, self._seed = resamples, seed
        self._rows: dict[str, dict[int, int]] = {}
        for row, run in enumerate(runs):
            self._rows.setdefault(run["method"], {})[run["seed"]] = row
        self._figures = self._resample()

    def estimate(self, method: str, figure: str) -> Estimate | None:
        """Estimate a figure of a method, mean over its seeds; None where the figure does not apply."""
        rows = list(self._rows.get(method, {}).values())
        if not self._applies(figure, rows):
            return None
        return estimate_of(self._figures[figure][rows].mean(0), len(rows))

    def difference(self, method: str, base: str, figure: str) -> Estimate | None:
        """Estimate the figure of `method` minus that of `base`, over the seeds that both have.

        A seed without a run of `frozen` is compared with that of its lowest seed: it depends on the seed only by the
        limit of an answer's tokens. None where a figure does not apply, or without a common seed.
        """
        pairs = self._pairs(method, base)
        if not self._applies(figure, [row for pair in pairs for row in pair]):
            return None
        minuends, subtrahends = (list(rows) for rows in zip(*pairs, strict=True))
        values_RB = self._figures[figure]
        return estimate_of((values_RB[minuends] - values_RB[subtrahends]).mean(0), len(pairs))

    def of_task(self, task: str, methods: Iterable[str]) -> dict[str, Estimate]:
        """Estimate the mean score on one task at the end, by method."""
        weights_BN = self._weights(task)
        estimates = {}
        for method in methods:
            rows = list(self._rows[method].values())
            end_N = np.mean([self._runs[row]["answers"][task]["end"] for row in rows], axis=0)
            estimates[method] = estimate_of(weights_BN @ end_N, len(rows))
        return estimates

    def _resample(self) -> dict[str, Array]:
        """Figure -> its resampled values (R, B); zero where it does not apply."""
        first = self._runs[0]
        past, unseen = self._past_tasks(), list(first["unseen"])
        num_stream = len(first["answers"]) - len(unseen)
        figures_RB = {name: np.zeros((len(self._runs), self._resamples + 1)) for name in FIGURES}
        for task in first["answers"]:
            weights_NB = self._weights(task).T
            answers = [run["answers"][task] for run in self._runs]
            end_RB = np.array([answer["end"] for answer in answers], dtype=float) @ weights_NB
            if task in unseen:
                figures_RB["ZST"] += end_RB / len(unseen)
                continue
            after_RB = np.array([answer["after"] or as_after(answer) for answer in answers], dtype=float) @ weights_NB
            figures_RB["AP"] += end_RB / num_stream
            figures_RB["LA"] += after_RB / num_stream
            if task in past:
                kept_RB = np.array([as_after(answer) for answer in answers], dtype=float) @ weights_NB
                figures_RB["BWT"] += (kept_RB - after_RB) / len(past)
        return figures_RB

    def _weights(self, task: str) -> Array:
        """w_t / N_t of eq. (1), (B, N); the first row is the sample itself."""
        records = len(self._runs[0]["answers"][task]["end"])
        random = np.random.default_rng([self._seed, crc32(task.encode())])
        drawn = random.multinomial(records, np.full(records, 1 / records), size=self._resamples)
        return np.vstack([np.ones((1, records)), drawn]) / records

    def _past_tasks(self) -> list[str]:
        """Tasks that ended before the last segment."""
        segments = [segment["tasks"] for segment in self._runs[0]["segments"]]
        return [task for task, last in last_segments(segments).items() if last < len(segments) - 1]

    def _pairs(self, method: str, base: str) -> list[tuple[int, int]]:
        minuends, subtrahends = self._rows.get(method, {}), self._rows.get(base, {})
        if method == FROZEN and minuends:
            minuends = {seed: of_seed(minuends, seed) for seed in subtrahends}
        elif base == FROZEN and subtrahends:
            subtrahends = {seed: of_seed(subtrahends, seed) for seed in minuends}
        return [(row, subtrahends[seed]) for seed, row in minuends.items() if seed in subtrahends]

    def _applies(self, figure: str, rows: Sequence[int]) -> bool:
        if not rows or (figure == "ZST" and not self._runs[0]["unseen"]):
            return False
        if figure == "BWT" and not self._past_tasks():
            return False
        return figure not in OF_ORDERED or not any(self._runs[row]["shuffled"] for row in rows)


def of_seed(by_seed: Mapping[int, T], seed: int) -> T:
    """The value of a seed, or else that of the lowest one."""
    return by_seed.get(seed, by_seed[min(by_seed)])


def estimate_of(values_B: Array, seeds: int) -> Estimate:
    """The first value, that of the sample itself, with the interval of the others."""
    low, high = np.percentile(values_B[1:], PERCENTILES)
    value, low, high = (round(float(end), DECIMALS) + 0.0 for end in (values_B[0], low, high))  # no -0.0
    return Estimate(value, low, high, seeds)
