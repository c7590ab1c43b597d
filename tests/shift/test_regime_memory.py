"""The memory is bounded; what is given up is what is missed least."""

import numpy as np
import pytest

from streamlearn.shift.document_frequency import DocumentFrequency
from streamlearn.shift.featurizer import Features, Featurizer, input_of
from streamlearn.shift.regime_memory import RegimeMemory, from_arrays, to_arrays
from tests.shift.streams import stream


def signatures(task: int, number: int, *, seed: int = 0) -> list[Features]:
    featurizer = Featurizer(0)
    return [featurizer.featurize(input_of(each)) for each in stream([task] * number, seed=seed)]


def fill(regimes: RegimeMemory, slot: int, records: list[Features], start: int) -> None:
    """Give records to a slot, settled at once."""
    for i, record in enumerate(records):
        regimes.add(slot, record, start + i)
        regimes.settle(slot, record, np.array([each.phi_D for each in records[i + 1 :]]).reshape(-1, 256))


def memory(*tasks: tuple[int, int], max_regimes: int) -> RegimeMemory:
    """A memory of visits (task, records), one after the other."""
    regimes, ordinal = RegimeMemory(max_regimes), 1
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


def planted(word: list[int], seed: int) -> list[Features]:
    """A hundred records of ten words out of forty, with one that all of them have, or without."""
    rng, featurizer = np.random.default_rng(seed), Featurizer(0)
    rows = [[1, 2, *rng.integers(100, 140, size=10), *word, 3, 4, 5] for _ in range(100)]
    return [featurizer.featurize(np.array(row, dtype=np.int32)) for row in rows]


def test_a_word_that_is_missing_tells_regimes_apart() -> None:
    """As "is there" and "is there not": only the second regime has a word of its own."""
    regimes = RegimeMemory(2)
    for slot, word in enumerate(([], [900])):
        assert regimes.create(1, ()) == (slot, None)
        fill(regimes, slot, planted(word, seed=slot), 1)
    bare, full = planted([], seed=7), planted([900], seed=8)
    assert np.mean(np.array(regimes.assign(bare)) == 0) > 0.95
    assert np.mean(np.array(regimes.assign(full)) == 1) > 0.95
    assert np.mean([regimes.weigh(each).scores_R.argmax() == 0 for each in bare]) < 0.9  # by what is there alone


def test_shares_count_each_word_once_a_record() -> None:
    """And taking a record back is the inverse."""
    one, other = np.array([5, 5, 7], dtype=np.uint16), np.array([7], dtype=np.uint16)
    shares = DocumentFrequency().after(one).after(other)
    assert (shares.records_B[[5, 7]].tolist(), shares.number) == ([1.0, 2.0], 2.0)
    assert shares.expected[[5, 7, 8]].tolist() == pytest.approx([0.5, 2.5 / 3, 0.5 / 3])
    back = shares.without(one)
    assert (back.records_B[[5, 7]].tolist(), back.number) == ([0.0, 1.0], 1.0)
    both = shares.joined(back)
    assert (both.records_B[[5, 7]].tolist(), both.number) == ([1.0, 3.0], 3.0)


def test_arrays_of_before_shares_were_counted_are_read() -> None:
    """The exemplars stand for all records then."""
    regimes = memory((0, 50), max_regimes=4)
    arrays = to_arrays(regimes.freeze())
    old = {name: array for name, array in arrays.items() if not name.startswith("regimes.shares")}
    (profile,) = from_arrays(old)
    assert profile.shares.number == len(profile.exemplars) == 16
    assert profile.shares.records_B.max() <= 16
    assert profile.shares.records_B.max() > 8
    (whole,) = from_arrays(arrays)
    assert whole.shares.number == 50


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
    again = RegimeMemory(4)
    again.thaw(from_arrays(to_arrays(regimes.freeze())), regimes.next_number)
    assert again.views() == regimes.views()
    for record in signatures(1, 20, seed=5):
        one, other = regimes.weigh(record), again.weigh(record)
        assert np.array_equal(one.scores_R, other.scores_R)
        assert regimes.assign([record]) == again.assign([record]) == [1]
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
