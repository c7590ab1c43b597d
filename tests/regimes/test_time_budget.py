"""Work beside training stays within its share of the training time."""

import pytest

from streamlearn.regimes.holdout import TimeBudget


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


def test_work_that_fails_is_paid_for() -> None:
    """Otherwise it would be tried again between all steps."""
    budget = TimeBudget(0.5, SteppingClock())
    with pytest.raises(KeyError), budget.spending():
        raise KeyError
    assert budget.spent_s == 1.0
