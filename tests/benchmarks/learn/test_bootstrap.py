"""Intervals over test records, on made-up scores."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.learn.bootstrap import Bootstrap
from tests.benchmarks.learn.kit import a_run, scored

TASKS = ("a", "b", "c", "d")


def of_scores(method: str, seed: int, end_TN: NDArray[Any]) -> dict[str, Any]:
    """A run with these scores at the end, and the same after each segment."""
    scores = {task: end_N.tolist() for task, end_N in zip(TASKS, end_TN, strict=False)}
    return scored(method, seed, after=scores, end=scores, tasks=list(scores))


def test_estimates_are_means_over_records_tasks_and_seeds() -> None:
    """By hand: the figures of the made-up run; a second seed with other answers halves the change."""
    bootstrap = Bootstrap([a_run("x"), a_run("y"), a_run("y", 1, end={"a": [1] * 4, "b": [0] * 4, "c": [1] * 4})])
    values = {figure: bootstrap.estimate("x", figure) for figure in ("AP", "LA", "BWT", "ZST")}
    assert {figure: value.value for figure, value in values.items() if value} == pytest.approx(
        {"AP": 0.5, "LA": 0.75, "BWT": -0.5, "ZST": 0.125}
    )
    mean = bootstrap.estimate("y", "ZST")
    assert mean is not None
    assert mean.value == pytest.approx((0.125 + 1) / 2)
    assert mean.seeds == 2
    assert mean.low <= mean.value <= mean.high


def test_intervals_of_differences_cover_the_true_difference() -> None:
    """On scores redrawn 300 times, with two seeds that score the same records, 95 % of intervals cover it.

    Records have a difficulty that is common to methods and seeds: resampling each seed apart would cover less.
    """
    random, true, covered = np.random.default_rng(0), 0.1, 0
    for _ in range(300):
        gain_TN = random.normal(true, 0.3, (2, 40))
        runs = []
        for seed in (0, 1):
            base_TN = random.normal(0.5, 0.3, (2, 40))
            runs += [of_scores("x", seed, base_TN + gain_TN), of_scores("y", seed, base_TN)]
        found = Bootstrap(runs, resamples=400).difference("x", "y", "AP")
        assert found is not None
        covered += found.low <= true <= found.high
    assert 0.91 <= covered / 300 <= 0.98


def test_differences_from_frozen_are_taken_within_a_seed() -> None:
    """A seed that `frozen` lacks is compared with its lowest one."""
    scores = {("x", 0): 0.5, ("x", 1): 0.5, ("x", 2): 0.5, ("frozen", 0): 0.0, ("frozen", 1): 0.3}
    bootstrap = Bootstrap([of_scores(method, seed, np.full((2, 4), ap)) for (method, seed), ap in scores.items()])
    for pair, sign in ((("x", "frozen"), 1), (("frozen", "x"), -1)):
        found = bootstrap.difference(*pair, "AP")
        assert found is not None
        assert found.value == pytest.approx(sign * (0.5 + 0.2 + 0.5) / 3)
        assert found.seeds == 3
