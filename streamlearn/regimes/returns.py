"""Records that look like a known regime's, checked by their losses before they are trained on.

A regime returns in two ways: the stream moves to it (a shift), or single records of other producers are assigned to it
while the stream stays where it is (visits). Visits are checked where they begin: after `ABSENT` records without one of
the regime's, by all of its records that have been read. What is refused moves to another regime (`Monitor.refuse`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from streamlearn.events import Event, get_logger
from streamlearn.learner.evaluate import first_tokens, run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.regimes.regime import Regime, slot_of
from streamlearn.settings import Settings
from streamlearn.shift.detector import Shift
from streamlearn.shift.monitor import AssignedBatch, KeptAt, Monitor
from streamlearn.stream.record import Example


@dataclass(frozen=True)
class ReturnCheck:
    """What the first records of a supposed return cost under the regime's adapter."""

    losses: tuple[float, ...]
    """Of each record, nats per learned token."""
    own_losses: tuple[float, ...]
    """Of the regime's last records."""

    @property
    def p_value(self) -> float:
        """Probability of losses at least as high, if the records are the regime's; 1 where none can be compared.

        >>> ReturnCheck((3.0, 4.0, 5.0), (0.5, 0.6, 0.7, 0.8)).p_value < 0.05 < ReturnCheck((0.6,), (0.5, 0.7)).p_value
        True
        """
        if not (self.losses and self.own_losses):
            return 1.0
        from scipy.stats import mannwhitneyu  # noqa: PLC0415 - every start would wait for it, and few records ask

        return float(mannwhitneyu(self.losses, self.own_losses, alternative="greater").pvalue)


ABSENT = 64
"""Records without one of a regime after which its next ones are checked. While a regime's records keep coming, a change
of their answers is the drift detector's to find."""

_log = get_logger("shift")


@dataclass(frozen=True)
class Upcoming:
    """What is known of the batch taken last, before it is trained on."""

    assigned: AssignedBatch
    first: int
    """Ordinal of its first record."""
    current: int | None
    """Slot of the regime under way before it."""
    regimes: Mapping[int, Regime]
    """Those that were entered, by slot."""
    last_records: Mapping[int, int]
    """Ordinal of each regime's last record before it, by slot."""
    kept_at: KeptAt
    """Numbers of the regimes that keep their slots."""


class ReturnChecks:
    """Checks the returns and visits in the next batch to train on. The monitor moves what they refuse."""

    def __init__(self, learner: Learner, settings: Settings, monitor: Monitor) -> None:
        self._learner = learner
        self._settings = settings
        self._monitor = monitor
        self._returns: list[Shift] = []

    def applies(self, shift: Shift, regimes: Mapping[int, Regime]) -> bool:
        """Whether the losses of its first records decide about this shift; `regimes` are those entered, by slot."""
        return self._enabled and shift.known and slot_of(regimes, shift.regime) == shift.slot

    def refuse(self, upcoming: Upcoming) -> bool:
        """Check a batch that is not trained on yet; return whether records of it were moved to other regimes."""
        returns = [self._refuse_return(shift, upcoming) for shift in upcoming.assigned.shifts]
        visits = [self._refuse_visits(slot, upcoming) for slot in self._visited(upcoming)]
        return any(returns) or any(visits)

    def refused_at(self, declared_at: int) -> int | None:
        """Number of the regime whose return was refused that was declared at this record; None: there is none."""
        return next((shift.regime for shift in self._returns if shift.declared_at == declared_at), None)

    def clear(self) -> None:
        """The batch is trained on, or is decided again."""
        self._returns.clear()

    @property
    def _enabled(self) -> bool:
        return self._learner.per_regime and self._settings.probe.max_returns_refused > 0

    def _visited(self, upcoming: Upcoming) -> list[int]:
        """Slots of known regimes that the batch has records of after a while without, and that no shift is to."""
        if not self._enabled:
            return []
        present = {upcoming.current, *(shift.slot for shift in upcoming.assigned.shifts)}
        others = [slot for slot in dict.fromkeys(upcoming.assigned.slots) if slot not in present]
        return [
            slot
            for slot in others
            if slot in upcoming.regimes and upcoming.first - upcoming.last_records.get(slot, upcoming.first) > ABSENT
        ]

    def _refuse_return(self, shift: Shift, upcoming: Upcoming) -> bool:
        """Check a return: its records, up to where the stream moves on, are the regime's or a new one's."""
        examples = self._monitor.examples(shift.slot) if self.applies(shift, upcoming.regimes) else ()
        # A shift that was found after a flush may come with a batch that has none of its records: it is believed.
        check = self._check(upcoming.regimes[shift.slot], examples) if examples else None
        if check is None or not self._move(shift.slot, None, upcoming):
            return False
        self._returns.append(shift)
        _log_refused(Event.RETURN_REFUSED, shift.regime, check, declared_at=shift.declared_at, onset=shift.onset)
        return True

    def _refuse_visits(self, slot: int, upcoming: Upcoming) -> bool:
        """Check the visits to a regime: all of its records that were read belong to it, or to the one under way."""
        moved_on = [shift.slot for shift in self._monitor.taken.shifts if shift.parent is None]
        target = moved_on[-1] if moved_on else upcoming.current
        visits = self._monitor.records_of(slot)
        if target is None or not visits:
            return False
        check = self._check(upcoming.regimes[slot], [example for _, example in visits])
        if check is None or not self._move(slot, target, upcoming):
            return False
        _log_refused(Event.VISIT_REFUSED, upcoming.regimes[slot].number, check, first_record=visits[0][0])
        return True

    def _move(self, slot: int, target: int | None, upcoming: Upcoming) -> bool:
        last_record = upcoming.last_records.get(slot, 0)
        return self._monitor.refuse(slot, last_record=last_record, target=target, kept_at=upcoming.kept_at)

    def _check(self, regime: Regime, examples: Sequence[Example]) -> ReturnCheck | None:
        """The losses of the first records, if the test rejects the regime."""
        records = first_tokens(examples, self._settings.probe.similarity_tokens)
        pack_tokens = self._settings.stream.batch_tokens
        work = self._learner.score(records, [regime.slot] * len(records), pack_tokens=pack_tokens)
        losses = tuple(result.loss_sum / result.tokens for result in run_to_end(work))
        check = ReturnCheck(losses, tuple(regime.losses))
        return check if check.p_value < self._settings.probe.max_returns_refused else None


def _log_refused(event: Event, regime: int, check: ReturnCheck, **found: int) -> None:
    _log.info(
        event,
        regime=regime,
        **found,
        records=len(check.losses),
        loss=round(fmean(check.losses), 4),
        own_loss=round(fmean(check.own_losses), 4),
        p_value=check.p_value,
    )
