"""Where one regime ends and the next begins, record by record.

1. A record that clearly belongs to another known regime (`words`) gets that one and stays out of the stretch.
2. Every other record is the stretch's own and enters its window. When the window passes a change test, the records
   since the change point are judged: by the words, they are a known regime that returns, or the stretch's regime all
   the same (a burst of like records), or new. Of new ones, those that a known regime explains stay with it. Where a
   single word came or went in nearly all of them (`word_share`), they are not the stretch's, however well they fit.
3. When the stretch's own records stay away for longer than its recent share of the stream explains (a CUSUM on who
   owns each record), the records since then are judged the same way:

    c <- max(0, c + log(q / p)) for another's record, c + log((1 - q) / (1 - p)) for an own one             (1)

   with p the recent share of others and q = 0.97; alarm when c passes -log(level).
"""
# Shape suffixes: B buckets, D features, N records of a window.

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from streamlearn.settings import ShiftSettings
from streamlearn.shift import document_frequency as shares
from streamlearn.shift import fit_drop_test as fit_drop
from streamlearn.shift import mean_embedding_test as mean_embedding
from streamlearn.shift import token_presence_test as word_share
from streamlearn.shift.document_frequency import DocumentFrequency
from streamlearn.shift.featurizer import NUM_FEATURES, Features
from streamlearn.shift.fit_drop_test import FitDropTest, RunningStats
from streamlearn.shift.mean_embedding_test import WINDOWS, MeanEmbeddingTest
from streamlearn.shift.regime_memory import Frozen, Likelihoods, RegimeMemory
from streamlearn.shift.segment_classifier import MARGIN, RecentRecord, SegmentClassifier
from streamlearn.shift.shift import Shift
from streamlearn.shift.token_presence_test import TokenChange, TokenPresenceTest

FITS_ALONE = -2.5
"""Deviations below its usual fit at which a single record no longer looks like a regime's own."""
MATURE = 32
"""Records after which a regime may own others' records."""
GONE = 0.97
"""The q of eq. (1)."""
SHARE_MEMORY = 32
"""Records over which the share of others is taken."""
RIVALRY = 0.25
"""Nats per bucket beyond `MARGIN` that a young stretch's records must speak for the regime it was split from."""
PATIENCE = 4
"""Records after an alarm that meant nothing before the next is looked at."""
MIN_NEW = 5
"""Records that must be left to make a regime."""


@dataclass(frozen=True)
class Assignment:
    """What one record told."""

    slot: int
    shift: Shift | None = None
    moved: tuple[tuple[int, int], ...] = ()
    """Earlier records, by ordinal, and the slot they have now."""


@dataclass(eq=False)
class DetectorState:
    """Everything that decides what the watch says next; `save` hands out copies that nobody writes to."""

    ordinal: int = 0
    slot: int = -1
    num_shifts: int = 0
    own_records: int = 0
    share: float = 0.0
    evidence: float = 0.0
    run_start: int = 0
    rival: int = -1
    patience: int = 0
    running: RunningStats = field(default_factory=RunningStats)
    shares: DocumentFrequency = field(default_factory=DocumentFrequency)
    window: tuple[RecentRecord, ...] = ()
    others: tuple[RecentRecord, ...] = ()
    regimes: Frozen = ()
    next_number: int = 1


@dataclass(frozen=True)
class _Alarm:
    """Why a shift may be declared, and the records that made it ring."""

    statistic: float
    threshold: float
    fresh: tuple[RecentRecord, ...]
    change: TokenChange | None = None
    """The word that came or went: they are not the stretch's then, however well its regime explains them."""


@dataclass
class InputShiftDetector:
    """Sees signatures in order and says where regimes change."""

    settings: ShiftSettings
    windows: tuple[int, ...] = WINDOWS
    serial: bool = True
    """See `MeanEmbeddingTest`."""
    single: bool = True
    """Whether a single record may belong to another regime than the stretch's; without it a mixture is a regime."""
    _regimes: RegimeMemory = field(init=False)
    _now: DetectorState = field(default_factory=DetectorState)
    _window_ND: NDArray[np.float32] = field(init=False)
    _fits: list[float] = field(init=False)
    _word_records_B: NDArray[np.float32] = field(init=False)
    """How many of the window's records have each word."""

    def __post_init__(self) -> None:
        self._regimes = RegimeMemory(self.settings.max_regimes)
        self._level = self.settings.false_alarms_per_million * 1e-6 / len(self.windows)
        self._test = MeanEmbeddingTest(self._level, self.windows, self.serial)
        self._judge = SegmentClassifier(self._regimes, self._test)
        self._fit_test = FitDropTest(self._level, self.windows)
        self._word_test = TokenPresenceTest(self._level)
        self.load(DetectorState())

    @property
    def ordinal(self) -> int:
        """Records seen."""
        return self._now.ordinal

    @property
    def regimes(self) -> RegimeMemory:
        """The memory."""
        return self._regimes

    def save(self) -> DetectorState:
        """The state as it is now; cheap, since only sketches that changed since the last call are copied."""
        return replace(self._now, regimes=self._regimes.freeze(), next_number=self._regimes.next_number)

    def load(self, state: DetectorState) -> None:
        """Go on from a saved state."""
        self._regimes.thaw(state.regimes, state.next_number)
        self._now = replace(state)
        self._stack()

    def update(self, record: Features, protected: Collection[int]) -> Assignment:
        """Decide on the next record; slots in `protected` are not taken for a new regime."""
        now = self._now
        now.ordinal += 1
        if now.slot < 0:
            return self._begin(record)
        weights = self._regimes.weigh(record)
        owner = self._owner(record, weights) if self.settings.enabled and self.single else now.slot
        self._regimes.add(owner, record, now.ordinal)
        recent = RecentRecord(record, now.ordinal, owner, float(weights.log_ratios_R[owner]))
        if owner == now.slot:
            self._take_own(recent)
            alarm = self._window_alarm()
        else:
            self._take_other(recent)
            alarm = self._absence_alarm()
        verdict = self._decide(alarm, protected) if alarm else None
        return verdict or Assignment(owner)

    def _begin(self, record: Features) -> Assignment:
        created = self._regimes.create(1, ())
        assert created is not None
        self._regimes.add(0, record, 1)
        self._now.slot, self._now.num_shifts = 0, 1
        self._take_own(RecentRecord(record, 1, 0, 0.0))
        return Assignment(0, Shift("inputs", 1, 1, 0, False, None, 1, 1, 0.0, 0.0))

    def _owner(self, record: Features, weights: Likelihoods) -> int:
        """The stretch's slot, or that of a known regime to which the record clearly belongs."""
        slot = self._now.slot
        best = int(weights.scores_R.argmax())
        profile = self._regimes[best]
        own = self._regimes[slot].records
        margin = MARGIN * min(own / MATURE, 1.0)  # a young stretch has no claim to what nobody owns clearly
        if best == self._now.rival and own < 2 * MATURE:
            margin = MARGIN + RIVALRY * len(record.buckets)
        clear = weights.scores_R[best] - weights.scores_R[slot] > margin and profile.records >= MATURE
        return best if clear and profile.fit(float(weights.log_ratios_R[best]), record) > FITS_ALONE else slot

    def _take_own(self, recent: RecentRecord) -> None:
        now = self._now
        now.window = (*now.window, recent)
        self._fits.append(recent.fit)
        self._window_ND = np.concatenate([self._window_ND, recent.record.phi_D[None]])
        shares.count(self._word_records_B, recent.record.buckets)
        if len(now.window) > max(WINDOWS):
            self._window_ND = self._window_ND[1:]
            self._regimes.settle(recent.slot, now.window[0].record, self._window_ND)
            now.shares = now.shares.after(now.window[0].record.buckets)
            shares.count(self._word_records_B, now.window[0].record.buckets, by=-1.0)
            now.window = now.window[1:]
            fit = self._fits.pop(0)
            if self._regimes[recent.slot].records >= 2 * MATURE:  # while a regime is young its fit still rises
                now.running = now.running.after(fit)
        now.own_records += 1
        now.patience = max(now.patience - 1, 0)
        now.evidence = max(0.0, now.evidence + math.log((1 - GONE) / (1 - self._others_share())))
        now.share *= 1 - 1 / SHARE_MEMORY

    def _take_other(self, recent: RecentRecord) -> None:
        now = self._now
        now.others = (*now.others, recent)
        if len(now.others) > max(WINDOWS):
            oldest, *others = now.others
            following = [each.record.phi_D for each in others if each.slot == oldest.slot]
            self._regimes.settle(oldest.slot, oldest.record, _stacked(following))
            now.others = tuple(others)
        if now.evidence == 0.0:
            now.run_start = recent.ordinal
        now.evidence += math.log(GONE / self._others_share())
        now.share += (1 - now.share) / SHARE_MEMORY

    def _others_share(self) -> float:
        """The p of eq. (1), never so small or large that one record decides."""
        return min(max(self._now.share, 0.03), 0.95)

    def _window_alarm(self) -> _Alarm | None:
        """The window does not look like the stretch any more."""
        now = self._now
        if not self.settings.enabled or now.patience or now.own_records < self.settings.min_dwell_records:
            return None
        reference = self._regimes[now.slot].reference
        if alarm := self._test.test(self._window_ND, reference):
            start = mean_embedding.change_point(self._window_ND, reference)
        elif alarm := self._fit_test.test(self._fits, now.running):
            start = fit_drop.change_point(self._fits, now.running)
        elif change := self._word_test.test(self._word_records_B, len(now.window), now.shares):
            start = word_share.change_point([each.record.buckets for each in now.window], change)
            return _Alarm(change.statistic, change.threshold, now.window[start:], change)
        else:
            return None
        return _Alarm(alarm.statistic, alarm.threshold, now.window[start:])

    def _absence_alarm(self) -> _Alarm | None:
        """The stretch's own records do not come any more; those of the regime that owns most of the others."""
        now = self._now
        threshold = -math.log(self._level)
        if now.evidence <= threshold:
            return None
        run = [each for each in now.others if each.ordinal >= now.run_start]
        [(slot, _)] = Counter(each.slot for each in run).most_common(1)
        return _Alarm(now.evidence, threshold, tuple(each for each in run if each.slot == slot))

    def _decide(self, alarm: _Alarm, protected: Collection[int]) -> Assignment | None:
        """What the records behind an alarm are; None when they are nothing new."""
        if len(alarm.fresh) < MIN_NEW:
            return None
        here = self._now.slot
        if alarm.change:
            likeliest, known = self._judge.with_token_change(alarm.fresh, alarm.change, here)
            return self._enter(likeliest, alarm, protected, known=known)
        likeliest, fits = self._judge.likeliest(alarm.fresh, here)
        if alarm.fresh[0].slot == here and (not fits or likeliest == here):
            alarm = replace(alarm, fresh=self._judge.unexplained(alarm.fresh, self._recent(), here))
            likeliest, fits = self._judge.likeliest(alarm.fresh, here) if len(alarm.fresh) >= MIN_NEW else (here, True)
        if fits and likeliest == here:
            self._now.patience = PATIENCE
            return None
        return self._enter(likeliest, alarm, protected, known=fits)

    def _recent(self) -> tuple[RecentRecord, ...]:
        return tuple(sorted((*self._now.window, *self._now.others), key=lambda each: each.ordinal))

    def _enter(self, slot: int, alarm: _Alarm, protected: Collection[int], *, known: bool) -> Assignment | None:
        """Leave the stretch's regime for the one in `slot`, or a new one beside it; None while there is no room."""
        now = self._now
        last = next(each for each in self._recent() if each.ordinal == now.ordinal)
        previous, dropped, rival = self._regimes[now.slot].number, None, -1
        if not known:
            rival = slot if slot != now.slot or alarm.change else -1
            held = {now.slot, *(each.slot for each in now.others), *protected}
            created = self._regimes.create(alarm.fresh[0].ordinal, held)
            if created is None:
                return None
            slot, dropped = created
        else:
            self._regimes.revisit(slot)
        for each in alarm.fresh:
            self._regimes.move(each.record, each.ordinal, each.slot, slot)
        window = tuple(replace(each, slot=slot) for each in alarm.fresh)
        self._settle(tuple(each for each in now.window if each not in alarm.fresh))
        self._regimes.calibrate()
        newest = sum(each.ordinal > now.ordinal - SHARE_MEMORY for each in window)
        now.slot, now.rival = slot, rival
        now.num_shifts += 1
        now.own_records, now.patience, now.evidence, now.running = len(window), 0, 0.0, RunningStats()
        now.shares = DocumentFrequency()
        now.share = 1 - min(newest / SHARE_MEMORY, 1.0)
        now.others = tuple(each for each in now.others if each not in alarm.fresh)
        now.window = window
        self._stack()
        shift = Shift(
            kind="inputs",
            number=self._now.num_shifts,
            regime=self._regimes[slot].number,
            slot=slot,
            known=known,
            previous=previous,
            declared_at=now.ordinal,
            onset=window[0].ordinal,
            statistic=alarm.statistic,
            threshold=alarm.threshold,
            dropped=dropped,
        )
        return Assignment(
            slot if last in alarm.fresh else last.slot, shift, tuple((each.ordinal, slot) for each in window)
        )

    def _settle(self, entries: tuple[RecentRecord, ...]) -> None:
        phi_ND = _stacked([each.record.phi_D for each in entries])
        for i, each in enumerate(entries):
            self._regimes.settle(each.slot, each.record, phi_ND[i + 1 :])

    def _stack(self) -> None:
        self._window_ND = _stacked([each.record.phi_D for each in self._now.window])
        self._fits = [each.fit for each in self._now.window]
        self._word_records_B = shares.window_counts(each.record.buckets for each in self._now.window)


def _stacked(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.array(rows, dtype=np.float32).reshape(len(rows), NUM_FEATURES)
