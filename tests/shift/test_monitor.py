"""The monitor finds regimes without task ids, ahead of training, and resumes exactly from its state."""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from streamlearn.settings import ShiftSettings
from streamlearn.shift.input_shift import RefusedRecord, RefusedReturn, Shift
from streamlearn.shift.monitor import AssignedBatch, Monitor
from streamlearn.stream.record import Batch, Example, Record, TopicPartition
from tests.shift.streams import VOCAB_SIZE, batches, questions, stream
from tests.variants import variants

SETTINGS = ShiftSettings()
SIZES = (8, 3, 0, 1, 20)


def new_monitor(settings: ShiftSettings = SETTINGS) -> Monitor:
    return Monitor(settings, VOCAB_SIZE, seed=0)


def assigned_batches(made: Sequence[Batch], settings: ShiftSettings = SETTINGS) -> list[AssignedBatch]:
    whole = new_monitor(settings)
    return [each for batch in made for each in whole.update(batch)] + whole.flush()


def shifts_of(assigned: Sequence[AssignedBatch]) -> list[Shift]:
    return [shift for each in assigned for shift in each.shifts]


def slots_of(assigned: Sequence[AssignedBatch]) -> list[int]:
    return [slot for each in assigned for slot in each.slots]


def runs(*lengths: tuple[int, int]) -> list[int]:
    return [task for task, length in lengths for _ in range(length)]


def test_the_first_batch_carries_the_first_regime() -> None:
    """A stream that never changes has one shift, at its beginning."""
    assigned = assigned_batches(batches(stream([0] * 400)))
    [first] = shifts_of(assigned)
    assert assigned[0].shifts == (first,)
    assert (first.regime, first.slot, first.known, first.previous, first.onset) == (1, 0, False, None, 1)
    assert set(slots_of(assigned)) == {0}


def test_a_new_task_is_a_shift_ahead_of_its_first_record() -> None:
    """The batch with the onset carries the shift, and all records from the onset on have the new slot."""
    assigned = assigned_batches(batches(stream(runs((0, 100), (1, 100)))))
    _, shift = shifts_of(assigned)
    assert not shift.known
    assert shift.previous == 1
    assert abs(shift.onset - 101) <= 1
    assert shift.declared_at <= 116
    slots = slots_of(assigned)
    assert slots[: shift.onset - 1] == [0] * (shift.onset - 1)
    assert set(slots[shift.onset - 1 :]) == {shift.slot}
    [carrier] = [i for i, each in enumerate(assigned) if shift in each.shifts]
    assert 8 * carrier < shift.onset <= 8 * carrier + 8


def test_a_task_that_returns_is_known() -> None:
    """It has the number and slot of its first visit."""
    shifts = shifts_of(assigned_batches(batches(stream(runs((0, 100), (1, 100), (2, 100), (1, 100), (0, 100))))))
    assert [(shift.regime, shift.known) for shift in shifts] == [
        (1, False),
        (2, False),
        (3, False),
        (2, True),
        (1, True),
    ]


def test_each_record_of_two_producers_gets_its_own_regime() -> None:
    """Interleaving known regimes is no shift, and nearly every record is assigned to its own."""
    rng = np.random.default_rng(0)
    tasks = [*runs((0, 100), (1, 100)), *rng.integers(0, 2, size=400).tolist()]
    assigned = assigned_batches(batches(stream(tasks)))
    assert len(shifts_of(assigned)) <= 3
    slots = slots_of(assigned)
    assert np.mean([slot == task for slot, task in zip(slots, tasks, strict=True)]) > 0.97


@pytest.mark.parametrize("num_tasks", [2, 3, 5])
def test_producers_that_are_mixed_from_the_first_record_are_told_apart(num_tasks: int) -> None:
    """Each gets a regime of its own, split from one that goes on, and nearly every record is assigned to it."""
    tasks = np.random.default_rng(0).integers(0, num_tasks, size=800).tolist()
    assigned = assigned_batches(batches(stream(tasks)))
    splits = [shift for shift in shifts_of(assigned) if shift.parent is not None]
    assert len(splits) == num_tasks - 1
    assert not any(shift.known for shift in splits)
    assert {shift.parent for shift in splits} <= {1, *(shift.regime for shift in splits)}
    slots = slots_of(assigned)
    best = [Counter(slot for slot, each in zip(slots, tasks, strict=True) if each == task) for task in range(num_tasks)]
    assert len({each.most_common(1)[0][0] for each in best}) == num_tasks
    assert sum(each.most_common(1)[0][1] for each in best) / len(tasks) > 0.9


@pytest.mark.parametrize("length", [4, 8, 16])
def test_producers_that_come_in_bursts_are_told_apart(length: int) -> None:
    """Although no burst is long enough for a test of changes."""
    tasks = np.repeat(np.random.default_rng(1).permutation(4 * list(range(200 // length))) % 4, length).tolist()
    slots = slots_of(assigned_batches(batches(stream(tasks))))
    by_slot = [Counter(task for slot, task in zip(slots, tasks, strict=True) if slot == each) for each in set(slots)]
    assert sum(each.most_common(1)[0][1] for each in by_slot) / len(tasks) > 0.9
    assert len(by_slot) <= 5


def test_a_split_precedes_the_records_of_its_regime() -> None:
    """No released batch has a slot whose shift comes with a later batch."""
    entered: set[int] = set()
    assigned = assigned_batches(batches(stream([i * 7 % 4 for i in range(400)])))
    for each in assigned:
        entered |= {shift.slot for shift in each.shifts}
        assert set(each.slots) <= entered
    assert sum(shift.parent is not None for shift in shifts_of(assigned)) == 3


def test_a_producer_that_joins_makes_a_regime_of_its_own_records() -> None:
    """Records that the old regime explains stay with it."""
    rng = np.random.default_rng(0)
    tasks = [*runs((0, 150)), *rng.integers(0, 2, size=400).tolist()]
    assigned = assigned_batches(batches(stream(tasks)))
    slots = slots_of(assigned)
    assert {shift.regime for shift in shifts_of(assigned)} == {1, 2}
    assert np.mean([slot == task for slot, task in zip(slots, tasks, strict=True)]) > 0.97


def test_batches_are_released_in_order() -> None:
    """None is lost, not even one without records, and each record has a slot."""
    made = batches(stream(runs((0, 100), (1, 100))), SIZES)
    assigned = assigned_batches(made)
    assert [each.batch for each in assigned] == made
    assert [len(each.slots) for each in assigned] == [len(batch.records) for batch in made]


@pytest.mark.parametrize("lookahead", [0, 1, 16])
def test_holds_back_the_configured_number_of_records(lookahead: int) -> None:
    """A batch is released as soon as that many records have come after it."""
    monitor = new_monitor(ShiftSettings(lookahead_records=lookahead))
    read = released = 0
    for batch in batches(stream([0] * 100), (8, 3, 1)):
        read += len(batch.records)
        released += sum(len(each.slots) for each in monitor.update(batch))
        assert lookahead <= read - released < lookahead + 8 or released == 0 or lookahead == 0 == read - released


def test_one_token_makes_a_regime() -> None:
    """It appears in most records and disappears again: the old regime is known. Released records keep their slots."""
    made = batches(questions([True] * 150 + [False] * 150 + [True] * 100))
    assigned = assigned_batches(made)
    _, appeared, disappeared = shifts_of(assigned)
    assert (appeared.known, disappeared.known) == (False, True)
    assert appeared.onset - 151 in range(4)
    assert appeared.declared_at <= 151 + 32
    assert disappeared.onset - 301 in range(-2, 4)
    assert disappeared.declared_at <= 301 + 32
    slots = np.array(slots_of(assigned))
    assert [np.mean(slots[a:b] == slot) > 0.85 for a, b, slot in ((0, 150, 0), (150, 300, 1), (300, 400, 0))] == [
        True
    ] * 3


def test_tokens_that_come_and_go_are_no_shift() -> None:
    """Neither a token in half of the records, nor one shared by 16 of 32 neighbours, makes a regime."""
    rng = np.random.default_rng(5)
    examples = questions((rng.random(400) < 0.5).tolist())
    for start in (150, 230, 300):
        for i in range(start, start + 32, 2):
            examples[i].input_ids[12] = 1000 + start
    assert len(shifts_of(assigned_batches(batches(examples)))) == 1


def flushed_batches(
    monitor: Monitor, made: Sequence[Batch], flushes: Collection[int], start: int = 0
) -> list[AssignedBatch]:
    """What the monitor returns for the batches from `start` on, flushed after those in `flushes`."""
    assigned = []
    for number, batch in enumerate(made[start:], start):
        assigned += monitor.update(batch)
        assigned += monitor.flush() if number in flushes else []
        while monitor.lookahead.take() is not None:
            pass
    return assigned


@pytest.mark.parametrize("lookahead", variants([0, 16], short=["16"]))
@pytest.mark.parametrize("flushes", [(), (2, 11, 14, 15, 27)], ids=["steady", "flushed"])
@pytest.mark.parametrize(
    ("examples", "max_regimes"),
    [
        (stream(runs((0, 70), (1, 60), (2, 60), (0, 60), (3, 60))), 3),
        (questions([True] * 110 + [False] * 110 + [True] * 60), 2),
        (stream([i * 7 % 3 for i in range(200)]), 3),
    ],
    ids=["tasks", "tokens", "mixed"],
)
def test_a_killed_monitor_repeats_itself(
    examples: list[Example], max_regimes: int, flushes: tuple[int, ...], lookahead: int
) -> None:
    """Restored at any batch and given the batches that were not released, it makes the same decisions to the end."""
    made = batches(examples, SIZES)
    flushes = (*flushes, len(made) - 1)
    settings = ShiftSettings(max_regimes=max_regimes, lookahead_records=lookahead)
    whole = new_monitor(settings)
    expected = flushed_batches(whole, made, flushes)
    assert any(shift.dropped or shift.known or shift.parent for shift in shifts_of(expected))
    for died in sorted({*range(0, len(made), 3), *flushes}):
        life = new_monitor(settings)
        assigned = flushed_batches(life, made[: died + 1], flushes)
        state = life.state()
        life = new_monitor(settings)
        life.load_state(state)
        assigned += flushed_batches(life, made, flushes, start=len(assigned))
        assert assigned == expected
        assert {name: array.tolist() for name, array in life.state().items()} == {
            name: array.tolist() for name, array in whole.state().items()
        }


@pytest.mark.parametrize("before_quiet", [0, 4], ids=["boundary", "middle"])
def test_a_shift_near_a_flush_is_found(before_quiet: int) -> None:
    """The new task begins right after a quiet spell, or its first records are flushed before the spell.

    The shift is attached to the batch of its first record, or to the first one after the flush if that was decided.
    """
    made = batches(stream(runs((0, 104 - before_quiet), (1, 100))))
    flush = 104 // 8 - 1
    assigned = flushed_batches(new_monitor(), made, [flush, len(made) - 1])
    _, shift = shifts_of(assigned)
    assert abs(shift.onset - (105 - before_quiet)) <= 1
    assert shift in assigned[flush + 1].shifts
    slots = slots_of(assigned)
    assert set(slots[:104]) == {0}
    assert set(slots[104:]) == {shift.slot} != {0}


def test_state_is_plain_arrays() -> None:
    """Nothing in it needs pickle."""
    monitor = new_monitor()
    for batch in batches(stream([0] * 100)):
        monitor.update(batch)
    assert all(array.dtype.kind in "if" for array in monitor.state().values())


def test_no_regime_is_dropped_while_its_records_are_held_back() -> None:
    """With one spare slot and short visits, no slot has two regimes among the records held back."""
    rng = np.random.default_rng(3)
    tasks = runs(*((int(task), 40) for task in rng.permutation(12)))
    assigned = assigned_batches(batches(stream(tasks)), ShiftSettings(max_regimes=3, min_dwell_records=20))
    assert any(shift.dropped for shift in shifts_of(assigned))
    slots = slots_of(assigned)
    for shift in shifts_of(assigned):
        if shift.dropped is not None:
            held = slots[max(0, shift.declared_at - 1 - 16) : shift.onset - 1]
            assert shift.slot not in held


def test_assign_finds_the_regime_of_a_single_request() -> None:
    """Each input is classified by itself, without a segment."""
    monitor = new_monitor()
    for batch in batches(stream(runs((0, 100), (1, 100), (2, 100)))):
        monitor.update(batch)
    tasks = [0, 1, 2] * 30
    requests = [each.input_ids[:-2] for each in stream(tasks, seed=9)]
    assert np.mean(np.array([each.slot for each in monitor.assign(requests)]) == tasks) > 0.97


def test_answers_are_not_read() -> None:
    """Streams that differ only in their label tokens get the same slots and shifts."""
    examples = stream(runs((0, 100), (1, 100)))
    others = []
    for each in examples:
        ids, labels = each.input_ids.copy(), each.labels.copy()
        ids[-2:] = labels[-2:] = 9
        others.append(Example(ids, labels))
    one, other = assigned_batches(batches(examples)), assigned_batches(batches(others))
    assert [each.slots for each in one] == [each.slots for each in other]
    assert shifts_of(one) == shifts_of(other)


def test_meta_is_not_read() -> None:
    """A record's value, key and headers change nothing."""
    made = batches(stream(runs((0, 100), (1, 100))))
    scrambled = [
        Batch(
            tuple(
                Record(TopicPartition("other", 3), record.offset + 5, b'{"meta":1}', key=b"k")
                for record in each.records
            ),
            each.examples,
        )
        for each in made
    ]
    one, other = assigned_batches(made), assigned_batches(scrambled)
    assert [(each.slots, each.shifts) for each in one] == [(each.slots, each.shifts) for each in other]


def test_switched_off_the_whole_stream_is_one_regime() -> None:
    """In slot 0, with no shift except the first."""
    assigned = assigned_batches(batches(stream(runs((0, 100), (1, 100)))), ShiftSettings(enabled=False))
    assert len(shifts_of(assigned)) == 1
    assert set(slots_of(assigned)) == {0}


def test_every_record_is_counted_in_one_regime() -> None:
    """A return counts as a visit."""
    monitor = new_monitor()
    for batch in batches(stream(runs((0, 100), (1, 100), (0, 100)))):
        monitor.update(batch)
    monitor.flush()
    first, second = [each for each in monitor.released.detector.regimes if each is not None]
    assert (first.number, first.visits) == (1, 2)
    assert first.records + second.records == 300
    assert abs(second.records - 100) <= 2


@pytest.mark.parametrize("slot", [0, 2, 1], ids=["in turns with it", "the segment's", "absent"])
@pytest.mark.parametrize("is_flushed", [False, True], ids=["reading", "flushed"])
def test_after_a_regime_is_forgotten_a_restart_repeats_everything(slot: int, is_flushed: bool) -> None:
    """What was read ahead is decided as by a monitor that starts from the state of the last batch trained on."""
    tasks = [*runs((0, 80), (2, 80), (1, 80)), *([0, 1] * 30), *runs((1, 20), (2, 60), (0, 60))]
    made = batches(stream(tasks))
    monitor = new_monitor()
    before = [each for batch in made[:38] for each in monitor.update(batch)]
    taken = monitor.lookahead.take()
    while len(monitor.lookahead) > 2:
        taken = monitor.lookahead.take()
    assert taken is not None
    assert taken.after is not None
    done = before.index(taken) + 1
    if is_flushed:
        monitor.flush()
    read = monitor.records_read
    assert taken.after.detector.segment.slot == 2
    state = monitor.forget(slot, taken.after)
    assert monitor.records_read == read
    assert (state.detector.regimes[slot], state.undecided) == (None, ())
    restarted = new_monitor()
    restarted.load_state(monitor.state(state))
    for batch in made[done:38]:
        restarted.update(batch)
    if is_flushed:
        restarted.flush()
    found = [taken_from(each) for each in (monitor, restarted)]
    rest = [[each for batch in made[38:] for each in m.update(batch)] + m.flush() for m in (monitor, restarted)]
    assert found[0] + rest[0] == found[1] + rest[1]
    numbers = {shift.regime for shift in shifts_of(found[0] + rest[0]) if not shift.known}
    assert numbers == {4}, "its task returned, as another regime"
    assert {name: array.tolist() for name, array in monitor.state().items()} == {
        name: array.tolist() for name, array in restarted.state().items()
    }


def test_a_refused_return_is_a_new_regime() -> None:
    """So is the next one, and a restart right after its first records, before it is declared, decides the same."""
    made = batches(stream(runs((0, 80), (1, 80), (0, 80), (1, 80))))
    monitor = new_monitor()
    taken: list[AssignedBatch] = []
    for batch in made:
        monitor.update(batch)
        while (each := monitor.lookahead.take()) is not None:
            if any(shift.known for shift in each.shifts):
                before = taken[-1].after
                assert before is not None
                monitor.refuse([RefusedReturn(s.declared_at, s.slot) for s in each.shifts], (), each.batch, before)
            else:
                taken.append(each)
    shifts = shifts_of(taken)
    assert [(shift.regime, shift.known) for shift in shifts] == [(1, False), (2, False), (3, False), (4, False)]
    assert [shift.onset for shift in shifts] == [1, 81, 161, 241]
    third, first_batch = shifts[2], 160 // 8
    state = taken[first_batch].after
    assert state is not None
    assert state.detector.ordinal < third.declared_at
    restarted = new_monitor()
    restarted.load_state(monitor.state(state))
    rest = [each for batch in made[first_batch + 1 : 28] for each in restarted.update(batch)]
    assert rest == taken[first_batch + 1 : first_batch + 1 + len(rest)]
    assert (len(rest), shifts_of(rest)) == (5, [])


def test_a_refused_record_is_the_segments() -> None:
    """It stays so over a restart between the batch it was refused with and its own."""
    made = batches(stream([*runs((0, 80), (1, 80)), *(0 if i % 4 == 1 else 1 for i in range(40))]))
    visit = 160 + 2  # ordinal of the first record of regime 1 among those of regime 2
    plain, monitor = new_monitor(), new_monitor()
    for batch in made:
        plain.update(batch)
    plain.flush()
    before = [slot for each in taken_from(plain) for slot in each.slots]
    assert before[visit - 1] == 0
    taken: list[AssignedBatch] = []
    for batch in made:
        monitor.update(batch)
        while (each := monitor.lookahead.take()) is not None:
            first = sum(len(done.slots) for done in taken) + 1
            if len(taken) == 19 and each.slots and first == 153 and monitor.state().get("refused.records") is None:
                after = taken[-1].after
                assert after is not None
                monitor.refuse((), [RefusedRecord(visit, 0)], each.batch, after)
                continue
            taken.append(each)
    state = taken[19].after
    assert state is not None
    restarted = new_monitor()
    restarted.load_state(monitor.state(state))
    rest = [each for batch in made[20:] for each in restarted.update(batch)] + restarted.flush()
    taken += monitor.flush()
    slots = [slot for each in taken for slot in each.slots]
    assert slots[visit - 1] == 1
    assert [slot for i, slot in enumerate(slots) if i != visit - 1] == [
        slot for i, slot in enumerate(before) if i != visit - 1
    ]
    assert rest[-len(taken) + 20 :] == taken[20:]


@pytest.mark.parametrize("lengths", [(84, 2, 9), (81, 4, 9)])
def test_a_shift_that_a_refusal_moves_forward_is_entered(lengths: tuple[int, int, int]) -> None:
    """Records taken for a known regime's hid the beginning of a new one; the batch it begins in was trained on.

    A restart from the state after the batch that the shift was attached to enters it no second time.
    """
    old, before, hidden = lengths
    made = batches(stream(runs((0, 80), (1, old), (2, before), (0, hidden), (2, 40))))
    monitor = new_monitor()
    taken: list[AssignedBatch] = []
    refused: set[int] = set()
    for batch in made:
        monitor.update(batch)
        while (each := monitor.lookahead.take()) is not None:
            first = sum(len(done.slots) for done in taken) + 1
            strays = {first + i for i, slot in enumerate(each.slots) if slot == 0 and first > 160} - refused
            strays = {ordinal for ordinal in strays if ordinal > monitor.lookahead.entered_until}
            if strays and not each.shifts:
                after = taken[-1].after
                assert after is not None
                refused |= strays
                monitor.refuse((), [RefusedRecord(ordinal, 0) for ordinal in strays], each.batch, after)
                continue
            taken.append(each)
    taken += monitor.flush()
    assert refused
    entered = set[int]()
    for each in taken:
        entered |= {shift.slot for shift in each.shifts}
        assert entered >= set(each.slots), "a record of a regime that was never entered"
    late = max(place for place, each in enumerate(taken) if each.shifts)
    state = taken[late].after
    assert state is not None
    assert state.detector.ordinal < taken[late].shifts[0].declared_at, "a restart finds it again"
    restarted = new_monitor()
    restarted.load_state(monitor.state(state))
    rest = [each for batch in made[late + 1 :] for each in restarted.update(batch)] + restarted.flush()
    assert rest == taken[late + 1 :]


def taken_from(monitor: Monitor) -> list[AssignedBatch]:
    """The batches that wait to be trained on."""
    found = []
    while (taken := monitor.lookahead.take()) is not None:
        found.append(taken)
    return found


def test_a_regime_that_is_kept_is_not_dropped_for_another() -> None:
    """From the record on at which it is kept."""
    made = batches(stream(runs((0, 60), (1, 100), (2, 100))))
    monitor = new_monitor(ShiftSettings(max_regimes=2))
    kept = [each for batch in made for each in monitor.update(batch, lambda ordinal: {1} if ordinal > 100 else ())]
    assert {shift.dropped for shift in shifts_of(kept)} == {None}
    later = new_monitor(ShiftSettings(max_regimes=2))
    dropped = [each for batch in made for each in later.update(batch, lambda ordinal: {1} if ordinal > 250 else ())]
    assert {shift.dropped for shift in shifts_of(dropped)} == {None, 1}
