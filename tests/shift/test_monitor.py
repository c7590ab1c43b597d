"""The monitor finds regimes without task ids, ahead of training, and resumes exactly from its state."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np
import pytest

from streamlearn.codec import from_arrays, to_arrays
from streamlearn.settings import ShiftSettings
from streamlearn.shift.detector import AssignedRecord, Shift
from streamlearn.shift.features import Featurizer
from streamlearn.shift.monitor import AssignedBatch, KeptAt, Monitor, MonitorState
from streamlearn.stream.record import Batch, Example
from tests.doubles import random_examples
from tests.shift.streams import batches, questions, stream
from tests.variants import variants

SETTINGS = ShiftSettings()
SIZES = (8, 3, 0, 1, 20)


def new_monitor(settings: ShiftSettings = SETTINGS) -> Monitor:
    return Monitor(settings, Featurizer(0))


def read(monitor: Monitor, made: Sequence[Batch], kept_at: KeptAt = lambda _: ()) -> list[AssignedBatch]:
    """Take the batches when they are decided, and all at the end."""
    taken: list[AssignedBatch] = []
    for batch in made:
        monitor.update(batch, kept_at)
        taken += iter(monitor.take, None)
    monitor.flush()
    return [*taken, *iter(monitor.take, None)]


def saved(state: MonitorState) -> dict[str, list[object]]:
    return {name: array.tolist() for name, array in to_arrays(state).items()}


def restarted(state: MonitorState, settings: ShiftSettings = SETTINGS) -> Monitor:
    """A new process, which reads the state from a file."""
    monitor = new_monitor(settings)
    monitor.load(from_arrays(MonitorState, to_arrays(state)))
    return monitor


def assigned_batches(made: Sequence[Batch], settings: ShiftSettings = SETTINGS) -> list[AssignedBatch]:
    return read(new_monitor(settings), made)


def shifts_of(assigned: Sequence[AssignedBatch]) -> list[Shift]:
    return [shift for each in assigned for shift in each.shifts]


def slots_of(assigned: Sequence[AssignedBatch]) -> list[int]:
    return [slot for each in assigned for slot in each.slots]


def runs(*lengths: tuple[int, int]) -> list[int]:
    return [task for task, length in lengths for _ in range(length)]


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


@pytest.mark.parametrize("num_tasks", [2, 5])
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


@pytest.mark.parametrize("length", [16])
def test_producers_that_come_in_bursts_are_told_apart(length: int) -> None:
    """Although no burst is long enough for a test of changes."""
    tasks = np.repeat(np.random.default_rng(1).permutation(4 * list(range(200 // length))) % 4, length).tolist()
    slots = slots_of(assigned_batches(batches(stream(tasks))))
    by_slot = [Counter(task for slot, task in zip(slots, tasks, strict=True) if slot == each) for each in set(slots)]
    assert sum(each.most_common(1)[0][1] for each in by_slot) / len(tasks) > 0.9
    assert len(by_slot) <= 5


@pytest.mark.parametrize("lookahead", [0, 1, 16])
def test_holds_back_the_configured_number_of_records(lookahead: int) -> None:
    """A batch is released as soon as that many records have come after it."""
    monitor = new_monitor(ShiftSettings(lookahead_records=lookahead))
    released = 0
    for batch in batches(stream([0] * 100), (8, 3, 1)):
        monitor.update(batch)
        released += sum(len(each.slots) for each in iter(monitor.take, None))
        held = monitor.records_read - released
        assert lookahead <= held < lookahead + 8 or released == 0 or lookahead == 0 == held


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


def flushed_batches(
    monitor: Monitor, made: Sequence[Batch], flushes: Collection[int], start: int = 0
) -> list[list[AssignedBatch]]:
    """What the monitor returns after each batch from `start` on, flushed after those in `flushes`."""
    by_batch: list[list[AssignedBatch]] = []
    for number, batch in enumerate(made[start:], start):
        monitor.update(batch)
        assigned = [*iter(monitor.take, None)]
        if number in flushes:
            monitor.flush()
            assigned += iter(monitor.take, None)
        by_batch.append(assigned)
    return by_batch


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
    by_batch = flushed_batches(new_monitor(settings), made, flushes)
    expected = [*chain(*by_batch)]
    assert any(shift.dropped or shift.known or shift.parent for shift in shifts_of(expected))
    for died in sorted({*range(0, len(made), 5), *flushes}):
        released = [*chain(*by_batch[: died + 1])]
        life = restarted(released[-1].after if released else MonitorState(), settings)
        assigned = [*released, *chain(*flushed_batches(life, made, flushes, start=len(released)))]
        assert assigned == expected
        assert saved(assigned[-1].after) == saved(expected[-1].after)


@pytest.mark.parametrize("before_quiet", [0, 4], ids=["boundary", "middle"])
def test_a_shift_near_a_flush_is_found(before_quiet: int) -> None:
    """The new task begins right after a quiet spell, or its first records are flushed before the spell.

    The shift is attached to the batch of its first record, or to the first one after the flush if that was decided.
    """
    made = batches(stream(runs((0, 104 - before_quiet), (1, 100))))
    flush = 104 // 8 - 1
    assigned = [*chain(*flushed_batches(new_monitor(), made, [flush, len(made) - 1]))]
    _, shift = shifts_of(assigned)
    assert abs(shift.onset - (105 - before_quiet)) <= 1
    assert shift in assigned[flush + 1].shifts
    slots = slots_of(assigned)
    assert set(slots[:104]) == {0}
    assert set(slots[104:]) == {shift.slot} != {0}


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


@pytest.mark.parametrize("slot", [0, 2, 1], ids=["in turns with it", "the segment's", "absent"])
@pytest.mark.parametrize("is_flushed", [False, True], ids=["reading", "flushed"])
def test_after_a_regime_is_forgotten_a_restart_repeats_everything(slot: int, is_flushed: bool) -> None:
    """What was read ahead is decided as by a monitor that starts from the state of the last batch trained on."""
    tasks = [*runs((0, 80), (2, 80), (1, 80)), *([0, 1] * 30), *runs((1, 20), (2, 60), (0, 60))]
    made = batches(stream(tasks))
    monitor = new_monitor()
    for batch in made[:38]:
        monitor.update(batch)
    done = 0
    while len(monitor._decided) > 2:
        taken, done = monitor.take(), done + 1
    assert taken is not None
    if is_flushed:
        monitor.flush()
    read_before = monitor.records_read
    assert taken.after.detector.segment.slot == 2
    monitor.trained = taken.after
    monitor.forget(slot)
    state = monitor.trained
    assert monitor.records_read == read_before
    assert (state.detector.regimes[slot], state.undecided) == (None, ())
    again = restarted(state)
    for batch in made[done:38]:
        again.update(batch)
    if is_flushed:
        again.flush()
    after = [[*iter(m.take, None), *read(m, made[38:])] for m in (monitor, again)]
    assert after[0] == after[1]
    numbers = {shift.regime for shift in shifts_of(after[0]) if not shift.known}
    assert numbers == {4}, "its task returned, as another regime"
    assert saved(after[0][-1].after) == saved(after[1][-1].after)


def refusing(
    monitor: Monitor, made: Sequence[Batch], *, probe_tokens: int = 0, trained: Sequence[AssignedBatch] = ()
) -> list[AssignedBatch]:
    """Take batches as the daemon does, after those `trained` on. Refuse every return, and every visit in slot 0."""
    taken = [*trained]
    for batch in [*made, None]:
        if batch is None:
            monitor.flush()
        else:
            monitor.update(batch)
        while (each := monitor.take(lambda _: probe_tokens)) is not None:
            before = slots_of(taken)
            last_records = {slot: ordinal for ordinal, slot in enumerate(before, start=1)}
            for shift in each.shifts:
                if shift.known and monitor.examples(shift.slot):
                    monitor.refuse(shift.slot, last_record=last_records[shift.slot])
            moves = [shift.slot for done in (*taken, monitor.taken) for shift in done.shifts if shift.parent is None]
            if 0 in each.slots and moves[-1] != 0 and not each.shifts:
                monitor.refuse(0, last_record=last_records[0], target=moves[-1])
            taken.append(monitor.taken)
    return taken[len(trained) :]


def test_a_refused_return_is_a_new_regime() -> None:
    """Its records move there, also those that wait; so does the next return."""
    made = batches(stream(runs((0, 80), (1, 80), (0, 80), (1, 80))))
    taken = refusing(new_monitor(), made)
    shifts = shifts_of(taken)
    assert [(shift.regime, shift.known) for shift in shifts] == [(1, False), (2, False), (3, False), (4, False)]
    assert [shift.onset for shift in shifts] == [1, 81, 161, 241]
    expected = [0] * 80 + [1] * 80 + [2] * 80 + [3] * 80  # single records may still look like the known regimes'
    assert sum(slot != right for slot, right in zip(slots_of(taken), expected, strict=True)) <= 2
    first, _, third, _ = [profile for profile in taken[-1].after.detector.regimes if profile is not None]
    assert (first.visits, first.records, first.last_record) == (1, 80, 80)
    assert (third.records, third.first_record) == (80, 161)


def test_refused_visits_belong_to_the_segment() -> None:
    """Single records of another regime; those that come later are refused, too."""
    tasks = [*runs((0, 80), (1, 80)), *(0 if i % 4 == 1 else 1 for i in range(80))]
    plain, taken = assigned_batches(batches(stream(tasks))), refusing(new_monitor(), batches(stream(tasks)))
    assert slots_of(plain)[160:].count(0) >= 18
    assert slots_of(taken)[160:].count(0) == 0
    entered = set[int]()
    for each in taken:
        entered |= {shift.slot for shift in each.shifts}
        assert entered >= set(each.slots), "a record of a regime that was never entered"


@pytest.mark.parametrize("probe_tokens", [0, 900], ids=["at once", "after a probe waited"])
@pytest.mark.parametrize(
    "tasks",
    [
        runs((0, 80), (1, 80), (0, 80), (1, 80)),
        [*runs((0, 80), (1, 80)), *(0 if i % 4 == 1 else 1 for i in range(80))],
        [*runs((0, 80), (1, 80), (2, 30)), *([0, 2, 2] * 20), *runs((1, 40))],
    ],
    ids=["returns", "visits", "a new regime and visits"],
)
def test_a_restart_repeats_refusals(tasks: list[int], probe_tokens: int) -> None:
    """From the state after every third batch, before and after what was refused, and before it was declared."""
    made = batches(stream(tasks))
    whole = refusing(new_monitor(), made, probe_tokens=probe_tokens)
    assert any(each.after.detector.refusals for each in whole)
    for done in range(0, len(made), 3):
        state = whole[done - 1].after if done else MonitorState()
        rest = refusing(restarted(state), made[done:], probe_tokens=probe_tokens, trained=whole[:done])
        assert rest == whole[done:]
        assert not rest or saved(rest[-1].after) == saved(whole[-1].after)


def test_a_regime_that_is_kept_is_not_dropped_for_another() -> None:
    """From the record on at which it is kept."""
    made = batches(stream(runs((0, 60), (1, 100), (2, 100))))
    for since, dropped in ((100, {None}), (250, {None, 1})):
        monitor = new_monitor(ShiftSettings(max_regimes=2))
        assigned = read(monitor, made, lambda ordinal, since=since: {1} if ordinal > since else ())  # type: ignore[misc]
        assert {shift.dropped for shift in shifts_of(assigned)} == dropped


def scripted(monkeypatch: pytest.MonkeyPatch, decisions: Sequence[AssignedRecord], **settings: int) -> Monitor:
    """A monitor whose detector decides this about the records."""
    monitor = Monitor(ShiftSettings(**settings), Featurizer(0))
    pending = iter(decisions)

    def update(*_: object) -> AssignedRecord:
        monitor._detector.ordinal += 1
        return next(pending)

    monkeypatch.setattr(monitor._detector, "update", update)
    return monitor


def shift_to(slot: int, onset: int, declared_at: int) -> Shift:
    return Shift("inputs", 2, slot + 1, slot, False, 1, declared_at, onset, 9.0, 5.0)


def of_ten_tokens(*sizes: int) -> list[Batch]:
    return batches(random_examples([10] * sum(sizes)), sizes)


def test_an_undecided_record_is_corrected_and_a_decided_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shift is attached to the batch with its onset, or to the oldest undecided batch."""
    late = AssignedRecord(0, (shift_to(1, 2, 6),), tuple((ordinal, 1) for ordinal in range(2, 6)))
    monitor = scripted(monkeypatch, [*[AssignedRecord(0)] * 5, late], lookahead_records=2)
    taken = read(monitor, of_ten_tokens(2, 2, 2))
    assert [each.slots for each in taken] == [(0, 0), (1, 1), (1, 0)]
    assert [bool(each.shifts) for each in taken] == [False, True, False]


def test_a_new_regime_waits_for_the_tokens_of_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its own records from the shift on count, and the probe gets exactly those."""
    decisions = [AssignedRecord(0), AssignedRecord(1, (shift_to(1, 2, 2),))]
    decisions += [AssignedRecord(slot) for slot in (1, 0, 1, 1)]
    monitor = scripted(monkeypatch, decisions, lookahead_records=0)
    taken: list[AssignedBatch] = []
    for batch in (made := of_ten_tokens(2, 3, 1)):
        assert not taken
        monitor.update(batch)
        taken = [each for each in [monitor.take(lambda _: 35)] if each is not None]
    assert len(monitor._decided) == 2
    examples = monitor.examples(1)
    assert [len(each) for each in examples] == [10] * 4
    assert examples[0] is made[0].examples[1]


def test_a_probe_does_not_wait_past_the_next_shift_or_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more records of its regime will follow; records after the next shift are not used."""
    decisions = [AssignedRecord(1, (shift_to(1, 1, 1),)), AssignedRecord(1), AssignedRecord(2, (shift_to(2, 3, 3),))]
    monitor = scripted(monkeypatch, [*decisions, AssignedRecord(1), AssignedRecord(2)], lookahead_records=0)
    first, second, third = of_ten_tokens(2, 2, 1)
    monitor.update(first)
    assert monitor.take(lambda _: 1000) is None
    monitor.update(second)
    assert monitor.take(lambda _: 1000) is not None
    assert len(monitor.examples(1)) == 2
    assert monitor.take(lambda _: 1000) is None
    assert monitor.waiting == [second]
    monitor.flush()
    assert monitor.take(lambda _: 1000) is not None
    monitor.update(third)
    assert monitor.take() is not None


def test_a_shift_that_begins_in_a_trained_batch_is_late() -> None:
    """After a restart other records may follow: the regime must be entered, though its first batch was trained on."""
    made = batches(stream(runs((0, 109), (1, 64))))
    cut = 112 // len(made[0].examples)
    read = new_monitor(ShiftSettings(lookahead_records=16))
    for batch in made[:cut]:
        read.update(batch)
    assert read.state.undecided
    assert read.state.detector.num_shifts == 1
    restarted = new_monitor(ShiftSettings(lookahead_records=16))
    restarted.load(read.state)
    first, *others = chain(*flushed_batches(restarted, made[cut:], [len(made) - cut - 1]))
    assert [(shift.slot, shift.known) for shift in first.late] == [(1, False)]
    assert not any((*batch.late, *batch.shifts) for batch in others)
