"""Where one regime ends and the next begins, record by record.

1. A record that clearly belongs to another known regime (`words.scores`) gets that one and stays out of the stretch.
2. Every other record is the stretch's own and enters its window; when the window passes the change test, the records
   since the change point are looked at: those that the old regime explains stay with it, the rest are a regime that
   returns, if one is near enough, or a new one.
3. When the stretch's own records stay away for longer than its recent share of the stream explains (a CUSUM on who
   owns each record), the stretch has ended and the regime that owns most of the others is entered:

    c <- max(0, c + log(q / p)) for another's record, c + log((1 - q) / (1 - p)) for an own one             (1)

   with p the recent share of others and q = 0.97; alarm when c passes -log(level).
"""
# Shape suffixes: D features, N records of a window.

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from streamlearn.settings import ShiftSettings
from streamlearn.shift import words
from streamlearn.shift.mean_embedding import WINDOWS, Alarm, MeanEmbedding
from streamlearn.shift.reference import Reference
from streamlearn.shift.regimes import Frozen, Regimes
from streamlearn.shift.shift import Shift
from streamlearn.shift.signature import NUM_BUCKETS, NUM_FEATURES, Signature

MARGIN = 8.0
"""Nats by which another regime must explain a record better than the stretch's."""
TYPICAL = -3.0
"""Deviations below its mean fit at which a record no longer looks like a regime's own."""
MATURE = 32
"""Records after which a regime may own others' records."""
ACCEPT = 2.0
"""Statistic below which records are taken for a remembered regime's."""
GONE = 0.97
"""q of eq. (1)."""
SHARE_MEMORY = 32
"""Records over which the share of others is taken."""
MIN_NEW = 3
"""Records that must be left to make a regime."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A record that may still change its regime."""

    record: Signature
    ordinal: int
    slot: int


@dataclass(frozen=True)
class Verdict:
    """What one record told."""

    slot: int
    shift: Shift | None = None
    moved: tuple[tuple[int, int], ...] = ()
    """Earlier records, by ordinal, and the slot they have now."""


@dataclass(frozen=True, eq=False)
class WatchState:
    """Everything that decides what the watch says next; nobody writes to it."""

    ordinal: int = 0
    slot: int = -1
    num_shifts: int = 0
    own_records: int = 0
    share: float = 0.0
    evidence: float = 0.0
    run_start: int = 0
    window: tuple[Entry, ...] = ()
    others: tuple[Entry, ...] = ()
    regimes: Frozen = ()
    next_number: int = 1


@dataclass(frozen=True)
class _Evidence:
    """Why a shift is declared."""

    statistic: float
    threshold: float
    onset: int


@dataclass
class InputsWatch:
    """Sees signatures in order and says where regimes change."""

    settings: ShiftSettings
    windows: tuple[int, ...] = WINDOWS
    serial: bool = True
    """See `MeanEmbedding`."""
    single: bool = True
    """Whether a single record may belong to another regime than the stretch's; without it a mixture is a regime."""
    _regimes: Regimes = field(init=False)
    _now: WatchState = field(default_factory=WatchState)
    _window_ND: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        self._regimes = Regimes(self.settings.max_regimes)
        self._level = self.settings.false_alarms_per_million * 1e-6 / len(self.windows)
        self._test = MeanEmbedding(self._level, self.windows, self.serial)
        self.load(WatchState())

    @property
    def ordinal(self) -> int:
        """Records seen."""
        return self._now.ordinal

    @property
    def regimes(self) -> Regimes:
        """The memory."""
        return self._regimes

    def save(self) -> WatchState:
        """The state as it is now; cheap, since only sketches that changed since the last call are copied."""
        return replace(self._now, regimes=self._regimes.freeze(), next_number=self._regimes.next_number)

    def load(self, state: WatchState) -> None:
        """Go on from a saved state."""
        self._regimes.thaw(state.regimes, state.next_number)
        self._now = state
        self._stack()

    def see(self, record: Signature, protected: Collection[int]) -> Verdict:
        """Decide on the next record; slots in `protected` are not taken for a new regime."""
        self._now = now = replace(self._now, ordinal=self._now.ordinal + 1)
        if now.slot < 0:
            return self._begin(record)
        scores = self._regimes.scores(record)
        owner = self._owner(record, scores) if self.settings.enabled and self.single else now.slot
        entry = Entry(record, now.ordinal, owner)
        self._regimes.learn_fit(owner, float(scores[owner]), record)
        self._regimes.add(owner, record, now.ordinal)
        verdict = Verdict(owner)
        if owner != now.slot:
            self._take_other(entry)
            if self._now.evidence > -math.log(self._level):
                verdict = self._stay_away(entry, protected)
        else:
            self._take_own(entry)
            if self.settings.enabled and now.own_records >= self.settings.min_dwell_records:
                alarm = self._test.look(self._window_ND, self._regimes[now.slot].reference)
                verdict = self._changed(entry, alarm, protected) if alarm else verdict
        return verdict

    def _begin(self, record: Signature) -> Verdict:
        created = self._regimes.create(1, ())
        assert created is not None
        self._regimes.add(0, record, 1)
        self._now = replace(self._now, slot=0, num_shifts=1)
        self._take_own(Entry(record, 1, 0))
        return Verdict(0, Shift("inputs", 1, 1, 0, False, None, 1, 1, 0.0, 0.0))

    def _owner(self, record: Signature, scores: NDArray[np.float32]) -> int:
        """The stretch's slot, or that of a known regime to which the record clearly belongs."""
        slot = self._now.slot
        best = int(scores.argmax())
        sketch = self._regimes[best]
        clear = scores[best] - scores[slot] > MARGIN and sketch.records >= MATURE
        return best if clear and sketch.fit(float(scores[best]), record) > TYPICAL else slot

    def _take_own(self, entry: Entry) -> None:
        now = self._now
        window = (*now.window, entry)
        self._window_ND = np.concatenate([self._window_ND, entry.record.phi_D[None]])
        if len(window) > max(WINDOWS):
            self._regimes.settle(entry.slot, window[0].record.phi_D, self._window_ND[1:])
            window, self._window_ND = window[1:], self._window_ND[1:]
        p = self._others_share()
        self._now = replace(
            now,
            window=window,
            own_records=now.own_records + 1,
            share=now.share * (1 - 1 / SHARE_MEMORY),
            evidence=max(0.0, now.evidence + math.log((1 - GONE) / (1 - p))),
        )

    def _take_other(self, entry: Entry) -> None:
        now = self._now
        others = (*now.others, entry)
        if len(others) > max(WINDOWS):
            self._settle_other(others)
            others = others[1:]
        p = self._others_share()
        self._now = replace(
            now,
            others=others,
            run_start=entry.ordinal if now.evidence == 0.0 else now.run_start,
            share=now.share + (1 - now.share) / SHARE_MEMORY,
            evidence=now.evidence + math.log(GONE / p),
        )

    def _others_share(self) -> float:
        """The p of eq. (1), never so small or large that one record decides."""
        return min(max(self._now.share, 0.03), 0.95)

    def _settle_other(self, others: Sequence[Entry]) -> None:
        oldest = others[0]
        following = [each.record.phi_D for each in others[1:] if each.slot == oldest.slot]
        self._regimes.settle(oldest.slot, oldest.record.phi_D, _stacked(following))

    def _changed(self, entry: Entry, alarm: Alarm, protected: Collection[int]) -> Verdict:
        """The window does not look like the stretch any more."""
        now = self._now
        start = change_point(self._window_ND, self._regimes[now.slot].reference)
        fresh = self._unexplained(now.window, start)
        if len(fresh) < MIN_NEW:
            return Verdict(entry.slot)
        kept = tuple(each for each in now.window if each not in fresh)
        evidence = _Evidence(alarm.statistic, alarm.threshold, fresh[0].ordinal)
        return self._enter(fresh, kept, evidence, protected)

    def _stay_away(self, entry: Entry, protected: Collection[int]) -> Verdict:
        """The stretch's own records do not come any more."""
        now = self._now
        run = [each for each in now.others if each.ordinal >= now.run_start]
        [(slot, _)] = Counter(each.slot for each in run).most_common(1)
        fresh = tuple(each for each in run if each.slot == slot)
        if len(fresh) < MIN_NEW:
            return Verdict(entry.slot)
        evidence = _Evidence(now.evidence, -math.log(self._level), fresh[0].ordinal)
        return self._enter(fresh, now.window, evidence, protected)

    def _enter(
        self, fresh: tuple[Entry, ...], kept: tuple[Entry, ...], evidence: _Evidence, protected: Collection[int]
    ) -> Verdict:
        """Leave the stretch's regime for the one that `fresh` belongs to."""
        now = self._now
        previous = self._regimes[now.slot].number
        slot = self._match(fresh)
        known, dropped = slot is not None, None
        if slot is None:
            held = {now.slot, *(each.slot for each in now.others), *protected}
            created = self._regimes.create(fresh[0].ordinal, held)
            if created is None:
                return Verdict(now.window[-1].slot if now.window else now.slot)
            slot, dropped = created
        else:
            self._regimes.revisit(slot)
        moved = self._move(fresh, slot)
        self._settle_all(kept)
        others = tuple(each for each in now.others if each not in fresh)
        self._now = replace(
            now,
            slot=slot,
            num_shifts=now.num_shifts + 1,
            own_records=len(moved),
            share=1 - min(sum(each.ordinal > now.ordinal - SHARE_MEMORY for each in moved) / SHARE_MEMORY, 1.0),
            evidence=0.0,
            window=moved,
            others=others,
        )
        self._stack()
        shift = Shift(
            kind="inputs",
            number=self._now.num_shifts,
            regime=self._regimes[slot].number,
            slot=slot,
            known=known,
            previous=previous,
            declared_at=now.ordinal,
            onset=evidence.onset,
            statistic=evidence.statistic,
            threshold=evidence.threshold,
            dropped=dropped,
        )
        last = next((each.slot for each in reversed(moved) if each.ordinal == now.ordinal), now.slot)
        return Verdict(last, shift, tuple((each.ordinal, slot) for each in moved))

    def _move(self, fresh: tuple[Entry, ...], slot: int) -> tuple[Entry, ...]:
        for each in fresh:
            self._regimes.move(each.record, each.ordinal, each.slot, slot)
        return tuple(replace(each, slot=slot) for each in fresh)

    def _settle_all(self, entries: tuple[Entry, ...]) -> None:
        phi_ND = _stacked([each.record.phi_D for each in entries])
        for i, each in enumerate(entries):
            self._regimes.settle(each.slot, each.record.phi_D, phi_ND[i + 1 :])

    def _unexplained(self, window: tuple[Entry, ...], start: int) -> tuple[Entry, ...]:
        """The window from `start` on, less what the old regime clearly explains, plus what clearly belongs to it."""
        old_B = self._regimes[self._now.slot].counts_B
        fresh = window[start:]
        for _ in range(3):
            new_B = np.zeros(NUM_BUCKETS, dtype=np.float32)
            for each in fresh:
                new_B += words.count(each.record)
            found = tuple(
                each
                for i, each in enumerate(window)
                if _ratio(each, old_B, new_B, in_new=each in fresh) > (MARGIN if i < start else -MARGIN)
            )
            if found == fresh or len(found) < MIN_NEW:
                break
            fresh = found
        return fresh

    def _match(self, fresh: tuple[Entry, ...]) -> int | None:
        """The slot of the remembered regime that `fresh` comes from."""
        scores = np.array([self._regimes.scores(each.record) for each in fresh])
        mean_D = _stacked([each.record.phi_D for each in fresh]).mean(axis=0)
        for slot in np.argsort(-scores.sum(axis=0)).tolist():
            sketch = self._regimes[slot]
            if slot == self._now.slot or sketch.reference.num_records < 2:
                continue
            near = self._test.distance(mean_D, len(fresh), sketch.reference) < ACCEPT
            fits = np.mean([sketch.fit(float(scores[i, slot]), each.record) for i, each in enumerate(fresh)])
            return slot if near and fits > TYPICAL / 2 else None
        return None

    def _stack(self) -> None:
        self._window_ND = _stacked([each.record.phi_D for each in self._now.window])


def change_point(window_ND: NDArray[np.float32], reference: Reference) -> int:
    """Where in the window the other distribution begins: the split with the largest likelihood ratio.

    argmax over s of k |mean(window[s:]) - m|^2 with k = N - s, for spherical noise
    """
    centred_ND = window_ND - reference.mean.astype(np.float32)
    tails_ND = np.cumsum(centred_ND[::-1], axis=0)[::-1]
    sizes = np.arange(len(window_ND), 0, -1)
    return int(((tails_ND**2).sum(axis=1) / sizes).argmax())


def _ratio(each: Entry, old_B: NDArray[np.float32], new_B: NDArray[np.float32], *, in_new: bool) -> float:
    """Nats by which a record's words speak for the new records against the old regime, its own not counted."""
    own_B = words.count(each.record)
    old_B = old_B - new_B if in_new else old_B - new_B - own_B  # the old regime has counted all of them
    new_B = new_B - own_B if in_new else new_B
    buckets = each.record.buckets
    old, new = max(float(old_B.sum()), 1.0), max(float(new_B.sum()), 1.0)
    p_T = (old_B[buckets] / old + new_B[buckets] / new) / 2 + words.FLOOR
    a = words.SMOOTHING
    ratio_T = np.log((new_B[buckets] + a * p_T) / (new + a)) - np.log((old_B[buckets] + a * p_T) / (old + a))
    return float(ratio_T.sum())


def _stacked(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.array(rows, dtype=np.float32).reshape(len(rows), NUM_FEATURES)
