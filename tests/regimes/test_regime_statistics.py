"""What is told about regimes: parts that did not change are not built again, and forgetting follows its equations."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from streamlearn.regimes.holdout import Forgetting, HoldoutReservoirs, ScoreHistory
from streamlearn.regimes.statistics import MAX_SHIFTS, RegimeControls, RegimeStatistics, ShiftReport
from streamlearn.settings import HoldoutSettings
from streamlearn.shift.detector import Shift
from streamlearn.status import Scoring
from tests.doubles import example
from tests.serve.doubles import FIRST_SHIFT


class Bank:
    """As much of one as is counted."""

    def __init__(self) -> None:
        self.name = "up_proj"
        self.load_HK = torch.tensor([[2, 0], [1, 1]])


class Learner:
    """Has one bank, which all regimes share; nothing is scored here but by hand."""

    per_regime = False

    active_banks = (Bank(),)
    device = torch.device("cpu")


def forgetting() -> Forgetting:
    learner: Any = Learner()
    return Forgetting(learner, pack_tokens=8)


def statistics(scores: Forgetting | None = None) -> tuple[RegimeStatistics, HoldoutReservoirs]:
    holdouts = HoldoutReservoirs(HoldoutSettings(every_records=2), regimes=4, seed=0)
    learner: Any = Learner()
    controls = RegimeControls()
    return RegimeStatistics(learner, holdouts, scores or forgetting(), controls, lambda _: None), holdouts


def shift(regime: int, slot: int, *, known: bool = False) -> Shift:
    return Shift("inputs", 1, regime, slot, known, None, 1, 1, 0.0, 0.0)


def test_a_step_rebuilds_only_the_status_of_its_own_regimes() -> None:
    """The others are the same objects as in the previous status."""
    told, holdouts = statistics()
    for slot in range(3):
        told.entered(ShiftReport(shift(10 - slot, slot), 0), left=slot - 1 if slot else None)
    told.count([0, 0, 1, 2, 2], first=1)
    before = told.status(2)
    assert [regime.number for regime in before.regimes] == [8, 9, 10]
    holdouts.take(0, example([8, 9]))
    assert holdouts.take(0, example([8, 9]))
    told.count([0], first=6)
    after = told.status(2)
    assert [one is other for one, other in zip(before.regimes, after.regimes, strict=True)] == [True, True, False]
    changed = after.regimes[2]
    assert (changed.records, changed.first_record, changed.last_record, changed.holdout_records) == (3, 1, 6, 1)
    assert [regime.current for regime in after.regimes] == [True, False, False]


def test_a_slot_that_is_used_again_begins_anew() -> None:
    """Counts and number are the new regime's; a return adds a visit."""
    told, _ = statistics()
    told.entered(ShiftReport(shift(1, 0), 0), left=None)
    told.count([0, 0], first=1)
    told.entered(ShiftReport(shift(2, 0), 0), left=0)
    told.count([0], first=3)
    told.entered(ShiftReport(shift(2, 0, known=True), 0), left=1)
    (regime,) = told.status(0).regimes
    assert (regime.number, regime.visits, regime.records, regime.first_record) == (2, 2, 1, 3)


def test_records_of_a_slot_that_was_never_entered_are_not_counted() -> None:
    """No regime has the slot yet."""
    told, _ = statistics()
    told.count([3], first=1)
    assert told.status(None).regimes == ()


def test_load_is_summed_over_updates() -> None:
    """The layers hold the load of one step only."""
    told, _ = statistics()
    told.trained()
    told.trained()
    assert told.load["up_proj"].tolist() == [[4, 0], [2, 2]]


def test_of_very_many_shifts_the_newest_are_published_and_all_counted() -> None:
    """The totals are those of the whole run; the entry into the first regime is no shift."""
    told, _ = statistics()
    for number in range(MAX_SHIFTS + 5):
        kind = "inputs" if number < MAX_SHIFTS else "answers"
        told.declared(replace(FIRST_SHIFT, kind=kind, previous=number or None))
    status = told.status(None)
    assert (len(status.shifts), status.shifts[-1].kind, status.num_shifts) == (
        MAX_SHIFTS,
        "answers",
        {"inputs": MAX_SHIFTS - 1, "answers": 5},
    )


def test_forgetting_and_transfer_follow_their_equations() -> None:
    """Over past regimes only; one that was not scored after its segment ended is left out."""
    scores = forgetting()
    told, _ = statistics(scores)
    for slot in range(4):
        told.entered(ShiftReport(shift(slot + 1, slot), 0), left=None)
    scores.histories = {
        0: traced([0.5, 0.75, 0.25], end=1),
        1: traced([0.25, 0.5], end=0),
        2: traced([0.5, 0.25], end=1),  # not scored since its end
        3: traced([1.0, 0.0], end=None),  # the current one
    }
    status = told.status(3)
    assert status.average_forgetting == pytest.approx(((0.75 - 0.25) + 0) / 2)
    assert status.backward_transfer == pytest.approx(((0.25 - 0.75) + (0.5 - 0.25)) / 2)
    scores.histories[0].add(Scoring(9, 1.0, 0.75), at_end=False)
    assert told.status(3).average_forgetting == status.average_forgetting  # `changed` was not called
    told.changed(0)
    assert told.status(3).average_forgetting == 0.0


def test_a_lucky_draw_of_the_first_hold_out_records_is_no_best() -> None:
    """The sample grows during a segment; forgetting is measured from its end on."""
    scores = forgetting()
    scores.histories = {0: traced([1.0, 0.5, 0.4], end=1)}
    assert scores.average_forgetting([0]) == pytest.approx(0.5 - 0.4)


def traced(accuracies: list[float], *, end: int | None) -> ScoreHistory:
    trace = ScoreHistory()
    for step, accuracy in enumerate(accuracies):
        trace.add(Scoring(step, 1.0, accuracy), at_end=step == end)
    return trace
