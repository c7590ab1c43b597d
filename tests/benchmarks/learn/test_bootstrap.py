"""Intervals over test records, on made-up scores."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.learn.bootstrap import Bootstrap
from streamlearn.errors import UsageError
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
    assert {figure: each.value for figure, each in values.items() if each} == pytest.approx(
        {"AP": 0.5, "LA": 0.75, "BWT": -0.5, "ZST": 0.125}
    )
    mean = bootstrap.estimate("y", "ZST")
    assert mean is not None
    assert mean.value == pytest.approx((0.125 + 1) / 2)
    assert mean.seeds == 2
    assert mean.low <= mean.value <= mean.high


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation() -> None:
    """Of 400 records, half of them right: 0.5 +- 1.96 * sqrt(0.25 / 400)."""
    found = Bootstrap([of_scores("x", 0, np.array([[0, 1] * 200]))]).estimate("x", "AP")
    assert found is not None
    assert found.low == pytest.approx(0.451, abs=0.002)
    assert found.high == pytest.approx(0.549, abs=0.002)


def test_no_difference_gives_an_interval_that_contains_zero() -> None:
    """Equal scores differ by exactly zero; scores with equal means differ by zero in the middle of the interval."""
    scores_TN = np.array([[1, 1, 0, 0] * 10])
    bootstrap = Bootstrap(
        [of_scores(name, 0, end) for name, end in (("x", scores_TN), ("y", scores_TN), ("z", 1 - scores_TN))]
    )
    equal, opposite = bootstrap.difference("x", "y", "AP"), bootstrap.difference("x", "z", "AP")
    assert equal == (0.0, 0.0, 0.0, 1)
    assert opposite is not None
    assert opposite.value == 0
    assert opposite.low < 0 < opposite.high


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


def test_differences_are_between_runs_of_one_seed() -> None:
    """Seeds that only one of the methods has are left out; the untrained backbone is compared with every seed."""
    bootstrap = Bootstrap([a_run("x", 0), a_run("x", 1), a_run("y", 1), a_run("z", 2), a_run("frozen", 0)])
    both, frozen = bootstrap.difference("x", "y", "AP"), bootstrap.difference("x", "frozen", "AP")
    assert (both and both.seeds, frozen and frozen.seeds) == (1, 2)
    reverse = bootstrap.difference("frozen", "x", "AP")
    assert reverse is not None
    assert reverse.seeds == 2
    assert bootstrap.difference("x", "z", "AP") is None
    assert bootstrap.difference("x", "absent", "AP") is None


def test_figures_that_do_not_apply_have_no_interval() -> None:
    """Shuffled records have no learning accuracy and no forgetting; without unseen tasks there is no ZST."""
    end = {"a": [1, 0, 0, 0], "b": [1, 1, 1, 0]}
    bootstrap = Bootstrap([a_run("joint", end=end, shuffled=True), a_run("x", end=end)])
    assert bootstrap.estimate("joint", "AP") is not None
    assert bootstrap.estimate("joint", "BWT") is None
    assert bootstrap.difference("joint", "x", "LA") is None
    assert bootstrap.estimate("x", "ZST") is None


def test_one_task_has_its_own_interval() -> None:
    """The mean score on task `a` is 1/4, within an interval between 0 and 1."""
    found = Bootstrap([a_run("x")]).of_task("a", ["x"])["x"]
    assert found.value == 0.25
    assert 0 <= found.low < 0.25 < found.high <= 1


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (
            {"a": [1, 0, 0], "b": [1, 1, 1, 0], "c": [0.5, 0, 0, 0]},
            "y, seed 3, has 3 scores of exact_match for a, and x",
        ),
        ({"a": [1, 0, 0, 0], "b": [1, 1, 1, 0]}, "y, seed 3, has none for c"),
    ],
)
def test_runs_that_score_other_records_are_refused(end: dict[str, list[float]], message: str) -> None:
    """Other tasks, or another number of records: the message names the run and the task."""
    with pytest.raises(UsageError, match=f"two: all runs must score the same test records; {message}"):
        Bootstrap([a_run("x"), a_run("y", 3, end=end)])
