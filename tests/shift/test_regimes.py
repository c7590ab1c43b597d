"""The memory is bounded; what is given up is what is missed least."""

import numpy as np

from streamlearn.shift.regimes import Regimes, from_arrays, to_arrays
from streamlearn.shift.signature import Signature, Signer, input_of
from tests.shift.streams import stream


def signatures(task: int, number: int, *, seed: int = 0) -> list[Signature]:
    signer = Signer(0)
    return [signer.sign(input_of(each)) for each in stream([task] * number, seed=seed)]


def fill(regimes: Regimes, slot: int, records: list[Signature], start: int) -> None:
    """Give records to a slot, settled at once."""
    for i, record in enumerate(records):
        regimes.add(slot, record, start + i)
        regimes.settle(slot, record, np.array([each.phi_D for each in records[i + 1 :]]).reshape(-1, 256))


def memory(*tasks: tuple[int, int], max_regimes: int) -> Regimes:
    """A memory of visits (task, records), one after the other."""
    regimes, ordinal = Regimes(max_regimes), 1
    for seed, (task, number) in enumerate(tasks):
        created = regimes.create(ordinal, ())
        assert created is not None
        fill(regimes, created[0], signatures(task, number, seed=seed), ordinal)
        ordinal += number
    return regimes


def test_two_sketches_of_one_regime_are_merged_first() -> None:
    """The older keeps its number and counts the records of both."""
    regimes = memory((0, 100), (1, 10), (0, 100), max_regimes=3)
    assert regimes.create(211, ()) == (2, 3)
    assert [view.number for view in regimes.views()] == [1, 2, 4]
    assert regimes[0].records == 200
    assert regimes[2].records == 0


def test_else_the_one_with_few_records_long_ago_is_dropped() -> None:
    """Its number is never used again, its slot is."""
    regimes = memory((0, 100), (1, 10), (2, 100), max_regimes=3)
    assert regimes.create(211, ()) == (1, 2)
    assert [view.number for view in regimes.views()] == [1, 4, 3]


def test_protected_regimes_stay() -> None:
    """Also when that leaves no room."""
    regimes = memory((0, 100), (1, 10), (2, 100), max_regimes=3)
    assert regimes.create(211, {0, 1, 2}) is None
    assert regimes.create(211, {1}) == (0, 1)


def test_taking_a_record_back_leaves_no_trace() -> None:
    """In the counts of its first regime; the second has it."""
    regimes = memory((0, 50), (1, 50), max_regimes=3)
    before = regimes[0].counts_B.copy()
    record = signatures(1, 1, seed=9)[0]
    regimes.add(0, record, 101)
    assert not np.array_equal(regimes[0].counts_B, before)
    regimes.move(record, 101, 0, 1)
    assert np.array_equal(regimes[0].counts_B, before)
    assert (regimes[0].records, regimes[1].records) == (50, 51)


def test_a_frozen_memory_does_not_change() -> None:
    """And shares with the next one what did not change between them."""
    regimes = memory((0, 50), (1, 50), max_regimes=3)
    first = regimes.freeze()
    counts = first[0].counts_B.copy()
    fill(regimes, 0, signatures(0, 5, seed=7), 101)
    second = regimes.freeze()
    assert np.array_equal(first[0].counts_B, counts)
    assert second[0].records == first[0].records + 5
    assert second[1] is first[1]


def test_a_memory_survives_its_arrays() -> None:
    """Thawed from plain arrays it weighs every record as before, bit for bit."""
    regimes = memory((0, 50), (1, 50), (2, 50), max_regimes=4)
    regimes.calibrate()
    again = Regimes(4)
    again.thaw(from_arrays(to_arrays(regimes.freeze())), regimes.next_number)
    assert again.views() == regimes.views()
    for record in signatures(1, 20, seed=5):
        one, other = regimes.weigh(record), again.weigh(record)
        assert np.array_equal(one.scores_R, other.scores_R)
        assert regimes[1].fit(float(one.log_ratios_R[1]), record) == again[1].fit(float(one.log_ratios_R[1]), record)


def test_a_regimes_own_records_fit_it() -> None:
    """Unseen ones lie around its usual fit, those of others far below."""
    regimes = memory((0, 100), (1, 100), max_regimes=3)
    regimes.calibrate()
    fits = [
        np.mean(
            [regimes[0].fit(float(regimes.weigh(each).log_ratios_R[0]), each) for each in signatures(task, 30, seed=8)]
        )
        for task in (0, 2)
    ]
    assert abs(fits[0]) < 1
    assert fits[1] < -3
