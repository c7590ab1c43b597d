"""The look-ahead buffer: when a batch is decided, and when it may be taken."""

from dataclasses import replace

import numpy as np

from streamlearn.shift.input_shift import DetectorState, Shift
from streamlearn.shift.monitor import HeldBatch, Lookahead
from streamlearn.stream.record import Batch, Record, TopicPartition
from tests.doubles import random_examples

ORIGIN = TopicPartition("t", 0)
STATE = DetectorState()


def held(first: int, slots: list[int]) -> HeldBatch:
    """A batch of records of 10 tokens each."""
    records = tuple(Record(ORIGIN, first + i, b"{}") for i in range(len(slots)))
    return HeldBatch(Batch(records, random_examples([10] * len(slots), seed=first)), first, slots)


def shift(onset: int, slot: int) -> Shift:
    return Shift("inputs", 2, slot + 1, slot, False, 1, onset + 3, onset, 9.0, 5.0)


def test_a_batch_is_decided_by_the_records_after_it() -> None:
    """Not before enough of them have been read."""
    buffer = Lookahead(num_records=4)
    buffer.append(held(1, [0, 0]))
    buffer.append(held(3, [0, 0, 0]))
    assert buffer.decide(STATE) == []
    assert buffer.take() is None
    buffer.append(held(6, [0]))
    [decided] = buffer.decide(STATE)
    assert decided.slots == (0, 0)
    assert buffer.take() is decided
    assert buffer.take() is None


def test_an_undecided_record_is_corrected_and_a_decided_one_is_not() -> None:
    """A shift is attached to the batch with its onset, or to the oldest undecided batch."""
    buffer = Lookahead(num_records=2)
    for first in (1, 3, 5):
        buffer.append(held(first, [0, 0]))
    buffer.decide(STATE)
    for ordinal in range(2, 6):
        buffer.correct(ordinal, 1)
    buffer.attach(shift(onset=2, slot=1))
    buffer.flush(STATE)
    taken = [buffer.take(), buffer.take(), buffer.take()]
    assert [each and each.slots for each in taken] == [(0, 0), (0, 0), (1, 0)]
    assert [bool(each and each.shifts) for each in taken] == [False, False, True]


def test_a_new_regime_waits_for_the_tokens_of_its_probe() -> None:
    """Only its own records from the shift on count, and the probe gets exactly those."""
    buffer = Lookahead(num_records=0)
    buffer.append(held(1, [0, 1]))
    buffer.attach(shift(onset=2, slot=1))
    buffer.decide(STATE)
    assert buffer.take(lambda _: 35) is None
    buffer.append(held(3, [1, 0, 1]))
    buffer.decide(STATE)
    assert buffer.take(lambda _: 35) is None
    buffer.append(held(6, [1]))
    buffer.decide(STATE)
    taken = buffer.take(lambda _: 35)
    assert taken is not None
    assert len(buffer) == 2
    examples = buffer.examples(1)
    assert [len(each) for each in examples] == [10] * 4
    assert np.array_equal(examples[0].input_ids, taken.batch.examples[1].input_ids)


def test_a_probe_does_not_wait_past_the_next_shift_or_the_end() -> None:
    """No more records of its regime will follow; records after the next shift are not used."""
    buffer = Lookahead(num_records=0)
    buffer.append(held(1, [1, 1]))
    buffer.attach(shift(onset=1, slot=1))
    buffer.decide(STATE)
    assert buffer.take(lambda _: 1000) is None
    buffer.append(held(3, [2, 1]))
    buffer.attach(shift(onset=3, slot=2))
    buffer.decide(STATE)
    assert buffer.take(lambda _: 1000) is not None
    assert len(buffer.examples(1)) == 2
    assert buffer.take(lambda _: 1000) is None
    buffer.flush(STATE)
    assert buffer.take(lambda _: 1000) is not None


def test_a_flush_decides_all_and_holds_nothing_back() -> None:
    """What was read is taken without its probe's tokens; the next batch waits for the records after it as before."""
    buffer = Lookahead(num_records=4)
    for first in (1, 3):
        buffer.append(held(first, [1, 1]))
    buffer.attach(shift(onset=1, slot=1))
    buffer.decide(STATE)
    assert [len(batch.records) for batch in buffer.waiting] == [2, 2]
    assert buffer.take(lambda _: 1000) is None
    buffer.flush(STATE)
    assert [batch.records[0].offset for batch in buffer.waiting] == [1, 3]
    assert buffer.take(lambda _: 1000) is not None
    assert len(buffer.examples(1)) == 4
    assert buffer.take(lambda _: 1000) is not None
    assert buffer.waiting == []
    buffer.append(held(5, [2, 2]))
    buffer.attach(shift(onset=4, slot=2))
    assert buffer.decide(STATE) == []
    buffer.append(held(7, [2, 2, 2, 2]))
    [late] = buffer.decide(STATE)
    assert [found.onset for found in late.shifts] == [4]
    assert buffer.take(lambda _: 1000) is None


def test_what_a_batch_leaves_undecided_is_its_state() -> None:
    """A restart after it must put back exactly the batches that a shift could still have been attached to."""
    buffer = Lookahead(num_records=2)
    for first in (1, 3, 5):
        buffer.append(held(first, [0, 0]))
        buffer.decide(STATE)
    buffer.flush(STATE)
    states = [each.after for each in (buffer.take(), buffer.take(), buffer.take()) if each is not None]
    assert [state and state.undecided for state in states] == [((0, 0),), ((0, 0),), ()]


def test_a_restart_drops_undecided_and_decided_batches() -> None:
    """Batches that were trained on before it are decided again and not returned."""
    buffer = Lookahead(num_records=2)
    for first in (1, 3, 5):
        buffer.append(held(first, [0, 0]))
    buffer.decide(STATE)
    buffer.flush(STATE)
    buffer.restart([HeldBatch(None, 3, [0, 1])])
    assert len(buffer) == 0
    assert buffer.protected == {0, 1}
    buffer.append(held(5, [1, 1]))
    assert buffer.decide(STATE) == []
    buffer.append(held(7, [1, 1]))
    assert [each.slots for each in buffer.decide(STATE)] == [(1, 1)]


def test_a_shift_found_again_is_dropped_and_one_found_earlier_after_a_refusal_is_not() -> None:
    """What begins in a batch that was trained on without it is entered with the next one."""
    for entered, again in ((True, False), (True, True), (False, True)):
        buffer = Lookahead(num_records=4)
        for batch in (held(1, [0, 0]), held(3, [1, 1])):
            buffer.append(batch)
            buffer.decide(STATE)
        if entered:
            buffer.attach(shift(onset=2, slot=1))  # declared by record 5
        buffer.flush(STATE)
        first, second = buffer.take(), buffer.take()
        assert first is not None
        assert second is not None
        buffer.restart([HeldBatch(None, 1, [0, 0])], after_refusal=again)
        buffer.append(held(3, [1, 1]))
        buffer.attach(shift(onset=2, slot=1))
        buffer.flush(STATE)
        taken = buffer.take()
        assert taken is not None
        assert len(first.shifts) + len(taken.shifts) == 1, "it is entered once"


def test_what_was_entered_before_a_restart_is_not_entered_again_after_a_refusal() -> None:
    """A restart finds it again in what it reads, and so does the reading after the refusal."""
    buffer = Lookahead(num_records=2)
    for refused in (False, True):
        buffer.restart([HeldBatch(None, 1, [0, 0])], after_refusal=refused)
        buffer.append(held(3, [1, 1]))
        buffer.attach(shift(onset=2, slot=1))
        buffer.flush(STATE)
        taken = buffer.take()
        assert taken is not None
        assert taken.shifts == ()


def test_what_was_entered_says_up_to_where_nothing_may_be_refused() -> None:
    """While its declaration lies after the batch taken last; a shift that is found later is another one."""
    buffer = Lookahead(num_records=2)
    entered = shift(onset=2, slot=1)  # declared by record 5
    for first in (1, 3, 5, 7):
        buffer.append(held(first, [0, 0] if first == 1 else [1, 1]))
        if first == 3:
            buffer.attach(entered)
        buffer.decide(DetectorState(ordinal=first + 1))
    until = []
    while buffer.take() is not None:
        until.append(buffer.entered_until)
    assert until == [0, 5, 5]
    buffer.restart([HeldBatch(None, 1, [0, 0])], after_refusal=True)
    buffer.append(held(3, [1, 1]))
    buffer.attach(entered)
    later = replace(entered, number=3, declared_at=1000)
    buffer.attach(later)
    buffer.flush(STATE)
    taken = buffer.take()
    assert taken is not None
    assert taken.shifts == (later,)


def test_records_that_follow_are_those_that_were_read_when_the_batch_was_decided() -> None:
    """With the slots that they had then: what is read later, or corrected, must not matter to a replay."""
    buffer = Lookahead(num_records=2)
    for first, slots in ((1, [0, 0]), (3, [1, 0]), (5, [1, 1])):
        buffer.append(held(first, slots))
        buffer.decide(STATE)
    buffer.correct(6, 0)
    taken = buffer.take()
    assert taken is not None
    assert [ordinal for ordinal, _ in taken.records_of(1, first=1)] == [3]
    assert [ordinal for ordinal, _ in taken.records_of(0, first=1)] == [1, 2, 4]
