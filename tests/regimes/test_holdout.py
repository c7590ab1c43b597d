"""Hold-out samples, what is scored on them and when, and the time that scoring may take."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from streamlearn.learner.evaluate import ExampleScore
from streamlearn.regimes import holdout as forgetting_module
from streamlearn.regimes.holdout import Forgetting, Reservoir, ScoreHistory, TimeBudget
from streamlearn.status import Scoring
from streamlearn.stream.record import Example
from tests.doubles import example, random_examples
from tests.learners import MakeLearner


class Reservoirs:
    """Samples of regimes in slots."""

    def __init__(self, every: int = 4, size: int = 3, seed: int = 0) -> None:
        self.every, self.size, self.seed = every, size, seed
        self.by_slot = defaultdict[int, Reservoir](Reservoir)

    def take(self, slot: int, count: int) -> list[int]:
        """Indices of the records held out."""
        sample, seed = self.by_slot[slot], (self.seed, slot)
        taken = (sample.take(example([8, i + 9]), seed, size=self.size, every=self.every) for i in range(count))
        return [i for i, is_sampled in enumerate(taken) if is_sampled]

    def kept(self, slot: int) -> list[int]:
        return [int(record.input_ids[1]) - 9 for record in self.by_slot[slot].examples]


def test_every_nth_record_of_a_regime_is_held_out() -> None:
    """Counted per regime; zero holds out none."""
    held = Reservoirs(every=4)
    assert held.take(0, 12) == [3, 7, 11]
    assert held.take(1, 5) == [3]
    assert Reservoirs(every=0).take(0, 100) == []


def test_the_sample_is_uniform() -> None:
    """Each of 10 held-out records is in 3 of 10 samples, within four standard deviations of 2,000 seeds."""
    seen: Counter[int] = Counter()
    for seed in range(2000):
        held = Reservoirs(every=1, size=3, seed=seed)
        held.take(0, 10)
        seen.update(held.kept(0))
    assert [seen[i] / 2000 for i in range(10)] == pytest.approx([0.3] * 10, abs=4 * (0.3 * 0.7 / 2000) ** 0.5)


def test_records_that_move_take_their_part_of_the_count_along() -> None:
    """A third of the sample moves, and with it a third of the records that were counted."""
    held = Reservoirs(every=4, size=3)
    held.take(0, 12)
    one, other, third = held.kept(0)
    held.by_slot[0].move(held.by_slot[1], [False, True, False], size=3)
    assert (held.kept(0), held.kept(1)) == ([one, third], [other])
    assert [held.by_slot[slot].seen for slot in (0, 1)] == [8, 4]
    held.by_slot[0].move(held.by_slot[1], [False, False], size=3)
    assert [held.by_slot[slot].seen for slot in (0, 1)] == [8, 4]


@pytest.mark.parametrize("sizes", [[1] * 60, [12] * 5, [7, 1, 4, 12, 6] * 2])
def test_the_share_of_drawn_records_does_not_depend_on_the_batches(sizes: list[int]) -> None:
    """At a quarter, one for every three new records; none before there is one, none twice in a draw."""
    sample, numbers = Reservoir(), list[int]()
    for new in sizes:
        drawn = sample.draw(0.25, new, (0, 1))
        assert len({int(record.input_ids[1]) for record in drawn}) == len(drawn)
        numbers.append(len(drawn))
        for number in range(new):
            sample.take(example([8, 9 + sample.seen + number]), (0, 1), size=8)
    assert numbers[0] == 0
    assert sum(numbers[1:]) == sum(sizes) // 3 - sizes[0] // 3


def test_every_kept_record_is_drawn_as_often() -> None:
    """Within four standard deviations; the same seed draws the same."""
    sample, numbers = Reservoir(), 2000
    for number in range(8):
        sample.take(example([8, 9 + number]), (0, 1), size=8)
    counts = Counter(int(one.input_ids[1]) for i in range(numbers) for one in sample.draw(0.25, 6, (0, 1, i)))
    assert [counts[9 + i] / numbers for i in range(8)] == pytest.approx([0.25] * 8, abs=4 * (0.1875 / numbers) ** 0.5)
    assert sample.draw(0.25, 6, (0, 1, 5)) == sample.draw(0.25, 6, (0, 1, 5))


class Scores:
    """Forgetting with a history for each slot."""

    def __init__(self, learner: Any) -> None:
        self.forgetting = Forgetting(learner, pack_tokens=64)
        self.histories = defaultdict[int, ScoreHistory](ScoreHistory)

    def measure(self, slot: int, examples: Sequence[Example], *, at_end: bool = False) -> Scoring | None:
        return self.forgetting.measure(self.histories[slot], slot, examples, at_end=at_end)

    def stale(self, slots: Sequence[int]) -> list[int]:
        return [slot for slot in slots if not self.forgetting.holds(self.histories[slot])]


def traced(accuracies: list[float], *, end: int | None) -> ScoreHistory:
    history = ScoreHistory()
    for step, accuracy in enumerate(accuracies):
        history.add(Scoring(step, 1.0, accuracy), at_end=step == end)
    return history


def test_forgetting_and_transfer_follow_their_equations() -> None:
    """Over past regimes only; one that was not scored after its segment ended is left out."""
    learner: Any = SimpleNamespace(per_regime=False)
    forgetting = Forgetting(learner, pack_tokens=8)
    past = [
        traced([0.5, 0.75, 0.25], end=1),
        traced([0.25, 0.5], end=0),
        traced([0.5, 0.25], end=1),  # not scored since its end
    ]
    assert forgetting.average_forgetting(past) == pytest.approx(((0.75 - 0.25) + 0) / 2)
    assert forgetting.backward_transfer(past) == pytest.approx(((0.25 - 0.75) + (0.5 - 0.25)) / 2)
    lucky = traced([1.0, 0.5, 0.4], end=1)  # the sample grows during a segment: forgetting begins at its end
    assert forgetting.average_forgetting([lucky]) == pytest.approx(0.5 - 0.4)
    assert forgetting.average_forgetting([]) is None


def test_a_score_holds_while_the_adapter_of_its_regime_is_unchanged(make_learner: MakeLearner) -> None:
    """With an adapter per regime: only what was trained since is scored again."""
    learner = make_learner(preset="streamlearn")
    scores, examples = Scores(learner), random_examples([6])
    for slot in (0, 1):
        scores.measure(slot, examples)
    assert scores.stale([0, 1]) == []
    learner.step(random_examples([8]), (1,))
    scores.histories[1].trained_at = learner.number
    assert scores.stale([0, 1]) == [1]
    before = scores.histories[0].now
    again = scores.measure(0, examples)
    assert before is not None
    assert again is not None
    assert (again.loss, again.accuracy) == (before.loss, before.accuracy)


def test_the_score_at_the_end_of_a_segment_comes_first(make_learner: MakeLearner) -> None:
    """Forgetting is measured from it on, and is 0 until the regime is trained on again."""
    learner = make_learner(preset="streamlearn")
    scores, examples = Scores(learner), random_examples([6])
    for slot in (1, 0):
        learner.step(random_examples([8]), (slot,))
        scores.histories[slot].trained_at = learner.number
        scores.measure(slot, examples)
    learner.step(random_examples([8]), (1,))
    scores.histories[1].trained_at = learner.number
    scores.histories[0].end()
    assert scores.stale([0, 1]) == [0, 1]
    assert scores.forgetting.average_forgetting([scores.histories[0]]) is None
    scores.measure(0, examples, at_end=scores.histories[0].ended)
    assert scores.stale([0, 1]) == [1]
    assert (
        scores.forgetting.average_forgetting([scores.histories[0]])
        == scores.forgetting.backward_transfer([scores.histories[0]])
        == 0.0
    )


def test_a_record_without_a_finite_loss_is_left_out(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any other there is no score, it is not tried again before an update, and a snapshot can be written."""
    learner = make_learner()
    scores, good, bad = Scores(learner), ExampleScore(6.0, 1, 3), ExampleScore(math.nan, 0, 5)
    result = [good, bad]
    monkeypatch.setattr(forgetting_module, "run_to_end", lambda work: result)
    assert scores.measure(0, random_examples([6, 9])) == Scoring(0, 2.0, 1 / 3)
    result = [bad]
    learner.step(random_examples([8]))
    scores.histories[0].end()
    assert scores.measure(0, random_examples([9]), at_end=True) is None
    assert scores.stale([0]) == []
    assert not scores.histories[0].ended
    assert [point.loss for point in scores.histories[0].points] == [2.0]
    learner.step(random_examples([8]))
    assert scores.stale([0]) == [0]


class SteppingClock:
    """One second later at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_spending_stays_within_its_share_of_the_training_time() -> None:
    """Idle time is free."""
    budget = TimeBudget(0.5, SteppingClock())
    assert not budget.affordable
    budget.trained(4.0)
    assert budget.affordable
    with budget.spending(idle=True):
        pass
    assert budget.spent_s == 0.0
    for _ in range(2):
        with budget.spending():
            pass
    assert budget.spent_s == 2.0
    assert not budget.affordable
