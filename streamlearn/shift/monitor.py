"""The monitor: it assigns every record to a regime, once and in order, before the record is trained on.

Batches go in (`update`), decided batches come out (`take`). In between a batch is in one of two states:

    undecided   fewer than `lookahead_records` records follow. The slots of its records may still be corrected, and a
                shift may still be attached to it.
    decided     its slots and shifts are final. It is the next to be trained on, or waits until the regime that begins
                in it has the tokens needed for its probe.

A shift is thus declared before its first record is trained on. A flush decides every batch, and none waits for its
probe. A shift that is found later, although it begins in a flushed batch, is attached to the first batch after it.

A snapshot keeps the state right after the last taken batch was read (`MonitorState`). A restart reads the later batches
again, as far as they had been read, and makes the same decisions. Some batches were still undecided at that time and
have been trained on since: their slots are part of the state. Shifts and corrections that concern these batches are
attached to them again, and not to later batches, and then dropped.

Losses may contradict an assignment (`refuse`). The records that wait then move to another regime, in the batches and in
the detector. States of waiting batches are older, so they hold the refusal, and a restart repeats it at the same place.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.change_tests import WINDOW_TESTS, WindowTest
from streamlearn.shift.describe import Place, characteristic_tokens, typical_records
from streamlearn.shift.detector import DetectorState, InputShiftDetector, Refusal, Shift
from streamlearn.shift.features import Featurizer, input_of
from streamlearn.shift.memory import RegimeMemory
from streamlearn.shift.routing import Assignment, RequestClassifier
from streamlearn.stream.position import RecordId
from streamlearn.stream.record import Batch, Example

if TYPE_CHECKING:
    from streamlearn.settings import ShiftSettings


@dataclass(frozen=True, eq=False)
class MonitorState:
    """The monitor right after it read one batch and decided what it could."""

    detector: DetectorState = field(default_factory=DetectorState)
    undecided: tuple[tuple[int, ...], ...] = ()
    """Slots of each batch that was undecided then."""
    read: int = 0
    """Ordinal of the newest record that had been read when the batch was taken. A restart reads as far before it takes
    the next, so that checks see the same records."""


@dataclass(frozen=True)
class AssignedBatch:
    """A batch whose records are assigned to regimes."""

    batch: Batch
    slots: tuple[int, ...]
    """The slot of the regime of each of `batch.records`."""
    shifts: tuple[Shift, ...] = ()
    """Shifts to enter, in this order, before training on the batch."""
    late: tuple[Shift, ...] = field(default=(), compare=False)
    """Shifts that begin in batches trained on before a restart, to enter first. They were entered then, unless the
    records after the restart come in another order, as those of several partitions may."""
    after: MonitorState = field(default_factory=MonitorState, compare=False, repr=False)
    """The monitor's state for a snapshot after the batch."""

    def without(self, indices: Collection[int]) -> tuple[Batch, tuple[int, ...]]:
        """Return the batch without the records at `indices`, and the slots of the remaining records."""
        kept = [i for i in range(len(self.slots)) if i not in indices]
        batch = replace(
            self.batch,
            records=tuple(self.batch.records[i] for i in kept),
            examples=tuple(self.batch.examples[i] for i in kept),
        )
        return batch, tuple(self.slots[i] for i in kept)


@dataclass
class _ReadBatch:
    """A batch that was read, as long as the monitor may change it."""

    batch: Batch | None
    """None for a batch that was trained on before the restart."""
    first: int
    """Ordinal of its first record."""
    slots: list[int] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)
    late: list[Shift] = field(default_factory=list)
    after: MonitorState = field(default_factory=MonitorState)

    @property
    def end(self) -> int:
        """Ordinal after its last record."""
        return self.first + len(self.slots)

    @property
    def moves_on(self) -> bool:
        """Whether the stream moves to another regime in the batch. A regime that is split continues."""
        return any(shift.parent is None for shift in self.shifts)

    def records_of(self, slot: int) -> list[tuple[int, Example]]:
        """Records of the regime in `slot`, with their ordinals."""
        examples = () if self.batch is None else self.batch.examples
        pairs = zip(examples, self.slots, strict=False)
        return [(self.first + i, example) for i, (example, own) in enumerate(pairs) if own == slot]


KeptAt = Callable[[int], Collection[int]]
"""Numbers of the regimes that keep their slots when the record with this ordinal is read."""


class Monitor:
    """Reads batches ahead of the learner and assigns their records to regimes."""

    def __init__(
        self, settings: "ShiftSettings", featurizer: Featurizer, *, tests: Sequence[WindowTest] = WINDOW_TESTS
    ) -> None:
        self._settings = settings
        self._featurizer = featurizer
        self._detector = InputShiftDetector(settings, tests=tests)
        self._classifier: tuple[DetectorState, RequestClassifier] | None = None
        self.load(MonitorState())

    def load(self, state: MonitorState) -> None:
        """Continue after the batch of this state. All batches that wait are dropped: they will be read again."""
        self.trained = state
        """As of the last trained batch: what requests and probes use. The monitor itself has read further ahead, where
        a restart might read other records."""
        self._detector.load(state.detector)
        self._late: list[Shift] = []
        self._undecided: deque[_ReadBatch] = deque()
        self._decided: deque[_ReadBatch] = deque()
        self._taken: _ReadBatch | None = None
        self._is_flushed, self._read_first = False, state.read
        first = state.detector.ordinal + 1 - sum(map(len, state.undecided))
        for slots in state.undecided:
            self._undecided.append(_ReadBatch(None, first, list(slots)))
            first += len(slots)

    @property
    def records_read(self) -> int:
        """Ordinal of the newest record that was read, ahead of training."""
        return self._detector.ordinal

    @property
    def waiting(self) -> list[Batch]:
        """The batches that were read and not yet taken, in order."""
        return [read.batch for read in (*self._decided, *self._undecided) if read.batch is not None]

    def update(self, batch: Batch, kept_at: KeptAt = lambda _: ()) -> None:
        """Read the next batch. After a flush, every batch must have been taken."""
        assert not (self._is_flushed and self._decided), "a probe would see later records than its replay does"
        self._is_flushed = False
        newest = _ReadBatch(batch, self.records_read + 1)
        self._undecided.append(newest)
        for example in batch.examples:
            protected = {slot for read in self._undecided for slot in read.slots}
            protected |= self._slots_of(kept_at(self.records_read + 1))
            assigned = self._detector.update(self._featurizer.featurize(input_of(example)), protected)
            newest.slots.append(assigned.slot)
            for ordinal, slot in assigned.reassigned:
                self._correct(ordinal, slot)
            for shift in assigned.shifts:
                # To the batch with its onset, or the oldest undecided one if that batch is decided.
                reads = (read for read in self._undecided if read.end > shift.onset)
                next(reads, self._undecided[-1]).shifts.append(shift)
        for refusal in self._detector.refusals_due():
            self._apply(refusal)
        self._decide(self._settings.lookahead_records)

    def flush(self) -> None:
        """Decide all batches without waiting for more records. Until the next batch is read, none waits for a probe."""
        self._is_flushed = True
        self._decide(0)

    def take(self, probe_tokens: Callable[[Shift], int] = lambda _: 0) -> AssignedBatch | None:
        """Take the oldest decided batch; None if there is none, or if the regime that begins in it lacks tokens.

        `probe_tokens` returns the number of tokens that the probe of a shift needs, 0 for no probe.
        """
        is_ready = self._is_flushed or (self.records_read >= self._read_first and self._can_probe(probe_tokens))
        if not self._decided or not is_ready:
            return None
        self._taken = self._decided.popleft()
        return self.taken

    @property
    def taken(self) -> AssignedBatch:
        """The batch taken last, with what was refused since."""
        read = self._taken
        assert read is not None, "a batch was taken"
        assert read.batch is not None, "a batch that was trained on is not taken again"
        after = replace(read.after, read=self.records_read)
        return AssignedBatch(read.batch, tuple(read.slots), tuple(read.shifts), tuple(read.late), after)

    def examples(self, slot: int) -> list[Example]:
        """Records of the regime in `slot` from the batch taken last until the stream moves on, for its probe."""
        return [example for _, example in self.first_records(slot)]

    def first_records(self, slot: int) -> list[tuple[RecordId, Example]]:
        """The same records with their ids."""
        taken = () if self._taken is None else (self._taken,)
        reads = chain(taken, takewhile(lambda read: not read.moves_on, self._decided))
        return [
            (read.batch.records[ordinal - read.first].id, example)
            for read in reads
            if read.batch is not None
            for ordinal, example in read.records_of(slot)
        ]

    def characteristic_tokens(self, slot: int, other: int, examples: Sequence[Example]) -> list[Place]:
        """Tokens that the regime in `slot` has more often than another, as read so far; `examples` are some of its."""
        own, others = (self._detector.regimes[one].token_frequency for one in (slot, other))
        return characteristic_tokens(own, others, [input_of(example) for example in examples])

    def typical_records(self, examples: Sequence[Example]) -> list[int]:
        """Indices of the examples nearest to the mean of all."""
        return typical_records([input_of(example) for example in examples], self._featurizer)

    def records_of(self, slot: int) -> list[tuple[int, Example]]:
        """All records of the regime in `slot` from the batch taken last on, with their ordinals."""
        return [record for read in self._untrained for record in read.records_of(slot)]

    def refuse(self, slot: int, *, last_record: int, target: int | None = None, kept_at: KeptAt = lambda _: ()) -> bool:
        """Move the records of the regime in `slot`, from the batch taken last on, to another regime.

        Their inputs look like the regime's, their losses do not. `taken` has the changed batch.

        Args:
            slot: The regime's slot; without a target, the batch has a shift to it.
            last_record: Ordinal of the regime's last record before the batch.
            target: The slot of the regime that gets the records, which was entered. None: a new regime, because the
                stream does not return to this one but moves on to another that looks alike.
            kept_at: As for `update`.

        Returns:
            Whether they were moved. Otherwise nothing changes: no slot is free, one of the regimes has been dropped, or
            so many records have been read since that these are committed to the regime.
        """
        taken = self._taken
        assert taken is not None, "a batch was taken"
        returns = next((shift for shift in taken.shifts if shift.slot == slot), None)
        assert target is not None or returns is not None, "only a shift is refused in favor of a new regime"
        for shift in (shift for read in self._untrained if read is not taken for shift in read.shifts):
            if shift.slot == target and not shift.known:
                return False  # its slot was freed for another regime
            if shift.slot == slot and (target is not None or not shift.known):
                return False  # so was the regime's, or the stream returns to it later, which is checked then
        protected = {used for read in self._untrained for used in read.slots} | self._detector.segment.slots
        protected |= self._slots_of(kept_at(self.records_read))
        first = taken.first if target is not None or returns is None else returns.onset
        refusal = Refusal(self.records_read, slot, first, last_record, target, tuple(sorted(protected)))
        if not self._apply(refusal):
            return False
        *earlier, newest = self._untrained
        for read in earlier:  # their states were taken before the refusal
            detector = read.after.detector
            read.after = replace(read.after, detector=replace(detector, refusals=(*detector.refusals, refusal)))
        newest.after = self.state
        return True

    def forget(self, slot: int, kept_at: KeptAt = lambda _: ()) -> None:
        """Forget the regime in `slot` as of `trained`, which has every shift that was entered.

        The waiting batches are read again and decided as after a restart. None refers to the regime any more. Batches
        that `trained` lists as undecided count as decided: a shift that begins in one of them and is found later is
        attached to the first batch after them.
        """
        waiting, is_flushed, read = self.waiting, self._is_flushed, self.records_read
        self._detector.load(self.trained.detector)
        self._detector.forget(slot)
        self.load(MonitorState(self._detector.state, read=read))
        for batch in waiting:
            self.update(batch, kept_at)
        if is_flushed:
            self.flush()

    def assign(self, inputs: Sequence[NDArray[np.int32]], slot: int | None = None) -> list[Assignment]:
        """The likeliest regime of each input as of `trained`, classified by itself; slot 0 before the first record.

        With a `slot`, how well the regime in it explains each.
        """
        state = self.trained.detector
        if not any(state.regimes):
            return [Assignment(0, 1.0)] * len(inputs)
        if self._classifier is None or self._classifier[0] is not state:  # kept for requests between two batches
            self._classifier = (
                state,
                RequestClassifier.from_state(state),
            )
        classifier = self._classifier[1]
        return [classifier.assign(self._featurizer.featurize(ids), slot) for ids in inputs]

    def rank(self, inputs: Sequence[NDArray[np.int32]]) -> list[int]:
        """Slots of all regimes by how well they explain the inputs together, as of `trained`, best first."""
        regimes = RegimeMemory(self._settings.max_regimes, self.trained.detector.regimes)
        return regimes.rank([self._featurizer.featurize(ids) for ids in inputs])

    @property
    def _reads(self) -> list[_ReadBatch]:
        """The batches from the one taken last on."""
        taken = () if self._taken is None else (self._taken,)
        return [*taken, *self._decided, *self._undecided]

    @property
    def _untrained(self) -> list[_ReadBatch]:
        return [read for read in self._reads if read.batch is not None]

    def _correct(self, ordinal: int, slot: int) -> None:
        """Change the slot of a record, if its batch is undecided."""
        for read in self._undecided:
            if read.first <= ordinal < read.end:
                read.slots[ordinal - read.first] = slot

    def _decide(self, records_after: int) -> None:
        """Decide every batch that is followed by enough records."""
        if not self._undecided:
            return
        newest = self._undecided[-1]
        while self._undecided and newest.end - self._undecided[0].end >= records_after:
            read = self._undecided.popleft()
            if read.batch is None:
                self._late += read.shifts
            else:
                read.late, self._late = self._late, []
                self._decided.append(read)
        newest.after = self.state

    @property
    def state(self) -> MonitorState:
        """The state after everything that was read."""
        return MonitorState(self._detector.state, tuple(tuple(read.slots) for read in self._undecided))

    def _apply(self, refusal: Refusal) -> bool:
        """Move records in the detector and in the batches, and change the shifts to and from their regime."""
        regimes, first = self._detector.regimes, refusal.first
        old = regimes[refusal.slot].number
        result = self._detector.refuse(refusal)
        if result is None:
            return False
        new, dropped = result
        number = regimes[new].number
        for read in self._reads:
            for i, slot in enumerate(read.slots):
                if slot == refusal.slot and read.first + i >= first:
                    read.slots[i] = new
            for i, shift in enumerate(read.shifts if refusal.target is None else ()):
                if shift.onset < first:
                    continue
                if shift.regime == old:
                    opens = read is self._taken and shift.onset == first
                    known, freed = (False, dropped) if opens else (shift.known, shift.dropped)
                    shift = replace(shift, regime=number, slot=new, known=known, dropped=freed)  # noqa: PLW2901
                previous = number if shift.previous == old else shift.previous
                parent = number if shift.parent == old else shift.parent
                read.shifts[i] = replace(shift, previous=previous, parent=parent)
        return True

    def _can_probe(self, probe_tokens: Callable[[Shift], int]) -> bool:
        probed = [shift for shift in self._decided[0].shifts if probe_tokens(shift) > 0] if self._decided else []
        if not probed or any(read.moves_on for read in islice(self._decided, 1, None)):
            return True  # no more records of this regime will follow in this segment
        tokens = sum(map(len, _examples(self._decided, probed[-1].slot)))
        return tokens >= probe_tokens(probed[-1])

    def _slots_of(self, numbers: Collection[int]) -> set[int]:
        regimes = self._detector.regimes
        return {slot for slot in regimes.occupied if regimes[slot].number in numbers} if numbers else set()


def _examples(reads: Iterable[_ReadBatch], slot: int) -> list[Example]:
    return [example for read in reads for _, example in read.records_of(slot)]
