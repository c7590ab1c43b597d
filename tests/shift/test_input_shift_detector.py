"""The detector's decisions on single records. `test_monitor.py` tests them on streams."""

import numpy as np
import pytest

from streamlearn.settings import ShiftSettings
from streamlearn.shift.detector import AssignedRecord, InputShiftDetector
from streamlearn.shift.features import Features
from tests.shift.records import features_of


def run(detector: InputShiftDetector, records: list[Features]) -> list[AssignedRecord]:
    return [detector.update(each, ()) for each in records]


def test_a_shift_reassigns_the_records_since_its_onset() -> None:
    """Their ordinals are the newest ones, and the record that declares it has the new slot itself."""
    assigned = run(InputShiftDetector(ShiftSettings()), [*features_of(0, 100), *features_of(1, 40)])
    declared = next(each for each in assigned[1:] if each.shifts)
    [shift] = declared.shifts
    at = assigned.index(declared) + 1
    assert shift.declared_at == at
    assert declared.reassigned == tuple((ordinal, 1) for ordinal in range(shift.onset, at + 1))
    assert declared.slot == 1
    assert assigned[-1] == AssignedRecord(1)


def test_a_burst_of_similar_records_is_no_shift() -> None:
    """Sixty-four repetitions of one record of the regime: the change test alarms, the classifier does not."""
    records = features_of(0, 200)
    assigned = run(InputShiftDetector(ShiftSettings()), [*records, *[records[0]] * 64])
    assert [shift.number for each in assigned for shift in each.shifts] == [1]


@pytest.mark.parametrize("at", [20, 32])
def test_a_change_before_the_dwell_ends_is_a_shift_and_no_split(at: int) -> None:
    """The change tests wait for `min_dwell_records`; the newest run of a mixture is a change all the same."""
    assigned = run(InputShiftDetector(ShiftSettings()), [*features_of(0, at), *features_of(1, 40)])
    [change] = [shift for each in assigned[1:] for shift in each.shifts]
    assert (change.onset, change.parent, change.known) == (at + 1, None, False)
    assert change.declared_at < ShiftSettings().min_dwell_records
    assert assigned[-1].slot == change.slot


@pytest.mark.parametrize("per_record", [True, False])
def test_interleaved_regimes_are_assigned_record_by_record(per_record: bool) -> None:
    """Only with `per_record`; without it all records get the segment's regime, right or wrong."""
    rng = np.random.default_rng(0)
    tasks = [0] * 100 + [1] * 100 + rng.integers(0, 2, size=200).tolist()
    drawn = {task: iter(features_of(task, 400, seed=task)) for task in (0, 1)}
    detector = InputShiftDetector(ShiftSettings(), per_record=per_record)
    assigned = run(detector, [next(drawn[task]) for task in tasks])
    agreement = np.mean([each.slot == task for each, task in zip(assigned[300:], tasks[300:], strict=True)])
    assert (agreement > 0.95) == per_record


def test_without_a_free_slot_there_is_no_shift() -> None:
    """The segment goes on until a slot is no longer protected."""
    records = [*features_of(0, 100), *features_of(1, 100), *features_of(2, 60)]
    detector = InputShiftDetector(ShiftSettings(max_regimes=2))
    assigned = [detector.update(each, {0, 1} if i < 230 else ()) for i, each in enumerate(records)]
    late = [shift for each in assigned for shift in each.shifts][2]
    assert late.declared_at >= 231
    assert late.dropped == 1
