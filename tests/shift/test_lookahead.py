"""The line between reader and learner: who waits, for what, and who leaves."""

import numpy as np

from streamlearn.shift.lookahead import HeldBatch, Lookahead
from streamlearn.shift.shift import Shift
from streamlearn.stream.batch import Batch
from streamlearn.stream.record import Record, TopicPartition
from tests.doubles import random_examples

ORIGIN = TopicPartition("t", 0)


def held(first: int, slots: list[int]) -> HeldBatch:
    """A batch of records of 10 tokens each."""
    records = tuple(Record(ORIGIN, first + i, b"{}") for i in range(len(slots)))
    return HeldBatch(Batch(records, random_examples([10] * len(slots), seed=first)), first, slots)


def shift(onset: int, slot: int) -> Shift:
    return Shift("inputs", 2, slot + 1, slot, False, 1, onset + 3, onset, 9.0, 5.0)


def test_a_batch_is_decided_by_the_records_after_it() -> None:
    """And not before them."""
    line = Lookahead(num_records=4)
    line.append(held(1, [0, 0]))
    line.append(held(3, [0, 0, 0]))
    assert line.decide() == []
    assert line.take() is None
    line.append(held(6, [0]))
    [decided] = line.decide()
    assert decided.slots == (0, 0)
    assert line.take() is decided
    assert line.take() is None


def test_an_undecided_record_is_corrected_and_a_decided_one_is_not() -> None:
    """A shift goes to the batch with its onset, or to the oldest one still undecided."""
    line = Lookahead(num_records=2)
    for first in (1, 3, 5):
        line.append(held(first, [0, 0]))
    line.decide()
    for ordinal in range(2, 6):
        line.correct(ordinal, 1)
    line.attach(shift(onset=2, slot=1))
    line.finish()
    taken = [line.take(), line.take(), line.take()]
    assert [each and each.slots for each in taken] == [(0, 0), (0, 0), (1, 0)]
    assert [bool(each and each.shifts) for each in taken] == [False, False, True]


def test_a_new_regime_waits_for_the_tokens_of_its_probe() -> None:
    """Counted over its own records from the shift on; then the probe is given just those."""
    line = Lookahead(num_records=0)
    line.append(held(1, [0, 1]))
    line.attach(shift(onset=2, slot=1))
    line.decide()
    assert line.take(lambda _: 35) is None
    line.append(held(3, [1, 0, 1]))
    line.decide()
    assert line.take(lambda _: 35) is None
    line.append(held(6, [1]))
    line.decide()
    taken = line.take(lambda _: 35)
    assert taken is not None
    assert len(line) == 2
    examples = line.examples(1)
    assert [len(each) for each in examples] == [10] * 4
    assert np.array_equal(examples[0].input_ids, taken.batch.examples[1].input_ids)


def test_a_probe_does_not_wait_past_the_next_shift_or_the_end() -> None:
    """No more records of its regime will come; those after the next shift are not its own."""
    line = Lookahead(num_records=0)
    line.append(held(1, [1, 1]))
    line.attach(shift(onset=1, slot=1))
    line.decide()
    assert line.take(lambda _: 1000) is None
    line.append(held(3, [2, 1]))
    line.attach(shift(onset=3, slot=2))
    line.decide()
    assert line.take(lambda _: 1000) is not None
    assert len(line.examples(1)) == 2
    assert line.take(lambda _: 1000) is None
    line.finish()
    assert line.take(lambda _: 1000) is not None


def test_a_restart_drops_what_was_held_and_what_was_decided() -> None:
    """Batches that left before it are decided again without being returned."""
    line = Lookahead(num_records=2)
    for first in (1, 3, 5):
        line.append(held(first, [0, 0]))
    line.decide()
    line.finish()
    line.restart([HeldBatch(None, 3, [0, 1])])
    assert len(line) == 0
    assert line.protected == {0, 1}
    line.append(held(5, [1, 1]))
    assert line.decide() == []
    line.append(held(7, [1, 1]))
    assert [each.slots for each in line.decide()] == [(1, 1)]
