"""Continual-learning scores, calculated by hand."""

import pytest

from streamlearn.bench.learn.scores import scores


def test_the_scores_are_those_of_their_equations() -> None:
    """The last segment has task c, so a and b can be forgotten; u is never trained on."""
    matrix = [
        {"a": 0.5, "b": 0.25},
        {"a": 0.75, "b": 0.5, "c": 0.5},
        {"a": 0.25, "b": 0.625, "c": 1.0, "u": 0.125},
    ]
    frozen = {"a": 0.0, "b": 0.125, "c": 0.125, "u": 0.0}
    found = scores(matrix, [["a"], ["b"], ["c"]], unseen=["u"], frozen=frozen)
    assert pytest.approx((0.25 + 0.625 + 1.0) / 3) == found.AP
    assert pytest.approx((0.5 + 0.0) / 2) == found.AF
    assert pytest.approx((-0.25 + 0.125) / 2) == found.BWT
    assert pytest.approx(0.125) == found.ZST
    assert pytest.approx((0.125 + 0.375) / 2) == found.FWT


def test_a_score_without_tasks_is_none() -> None:
    """One segment has nothing to forget, and nothing before or after it."""
    found = scores([{"a": 0.5}], [["a"]])
    assert (found.AP, found.AF, found.BWT, found.ZST, found.FWT) == (0.5, None, None, None, None)
