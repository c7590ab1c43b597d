"""Scoring, and which regime is scored next. The equations are in test_regime_statistics."""

import math
from typing import Any

import pytest

from streamlearn.learner.evaluate import ExampleScore
from streamlearn.regimes import holdout as forgetting_module
from streamlearn.regimes.holdout import MAX_POINTS, Forgetting, ScoreHistory
from streamlearn.status import Scoring
from tests.doubles import random_examples
from tests.learners import MakeLearner


def forgetting(learner: Any) -> Forgetting:
    return Forgetting(learner, pack_tokens=64)


def test_the_regime_scored_longest_ago_is_next(make_learner: MakeLearner) -> None:
    """One that was never scored first; none while every score is of the present weights."""
    learner = make_learner()
    scores, examples = forgetting(learner), random_examples([6])
    learner.step(random_examples([8]))
    scores.measure(0, examples)
    assert scores.stalest([0, 1]) == 1
    learner.step(random_examples([8]))
    scores.measure(1, examples)
    assert scores.stalest([0, 1]) == 0
    scores.measure(0, examples)
    assert scores.stalest([0, 1]) is None
    scores.forget(1)
    assert scores.stalest([0, 1]) == 1


def test_a_score_holds_while_the_adapter_of_its_regime_rests(make_learner: MakeLearner) -> None:
    """With an adapter per regime: only what was trained since is scored again."""
    learner = make_learner(preset="streamlearn")
    scores, examples = forgetting(learner), random_examples([6])
    for slot in (0, 1):
        scores.measure(slot, examples)
    assert scores.stalest([0, 1]) is None
    learner.step(random_examples([8]), (1,))
    scores.trained({1})
    assert scores.stalest([0, 1]) == 1
    before = scores.histories[0].now
    again = scores.measure(0, examples)
    assert before is not None
    assert again is not None
    assert (again.loss, again.accuracy) == (before.loss, before.accuracy)


def test_the_score_at_the_end_of_a_segment_comes_first(make_learner: MakeLearner) -> None:
    """Forgetting is measured from it on, and is 0 until the regime is trained on again."""
    learner = make_learner(preset="streamlearn")
    scores, examples = forgetting(learner), random_examples([6])
    for slot in (1, 0):
        learner.step(random_examples([8]), (slot,))
        scores.trained({slot})
        scores.measure(slot, examples)
    learner.step(random_examples([8]), (1,))
    scores.trained({1})
    scores.end(0)
    assert scores.stalest([0, 1]) == 0
    assert scores.average_forgetting([0]) is None
    scores.measure(0, examples, at_end=scores.has_ended(0))
    assert scores.stalest([0, 1]) == 1
    assert scores.average_forgetting([0]) == scores.backward_transfer([0]) == 0.0


def test_scoring_changes_no_weight_and_repeats_exactly(make_learner: MakeLearner) -> None:
    """Two scores of one regime in a row are equal."""
    scores, examples = forgetting(make_learner()), random_examples([6, 9, 12])
    assert scores.measure(0, examples) == scores.measure(0, examples)


def test_a_record_without_a_finite_loss_is_left_out(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any other there is no score, it is not tried again before an update, and a snapshot can be written."""
    learner = make_learner()
    scores, good, bad = forgetting(learner), ExampleScore(6.0, 1, 3), ExampleScore(math.nan, 0, 5)
    found = [good, bad]
    monkeypatch.setattr(forgetting_module, "run_to_end", lambda work: found)
    assert scores.measure(0, random_examples([6, 9])) == Scoring(0, 2.0, 1 / 3)
    found = [bad]
    learner.step(random_examples([8]))
    scores.end(0)
    assert scores.measure(0, random_examples([9]), at_end=True) is None
    assert scores.stalest([0]) is None
    assert not scores.has_ended(0)
    assert [point.loss for point in scores.histories[0].points] == [2.0]
    assert "nan" not in str(scores.to_json())
    learner.step(random_examples([8]))
    assert scores.stalest([0]) == 0


def test_a_long_history_is_thinned_and_keeps_its_ends() -> None:
    """The first and the newest score stay."""
    history = ScoreHistory()
    for step in range(3 * MAX_POINTS):
        history.add(Scoring(step, 1.0, 0.5), at_end=False)
    assert len(history.points) <= MAX_POINTS
    assert (history.points[0].step, history.points[-1].step) == (0, 3 * MAX_POINTS - 1)
    steps = [point.step for point in history.points]
    assert steps == sorted(steps)


def test_a_history_survives_json(make_learner: MakeLearner) -> None:
    """As the manifest keeps it."""
    one, other = forgetting(make_learner()), forgetting(make_learner())
    one.measure(0, random_examples([6]), at_end=True)
    one.measure(2, random_examples([9]))
    one.trained({2})
    one.end(2)
    other.load_json(one.to_json())
    assert other.histories == one.histories
