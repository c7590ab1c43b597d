"""Returns of known regimes that their losses speak against (`probe/return_check`)."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from streamlearn.adaptation.recent_losses import RecentLosses
from streamlearn.events import Event, get_logger
from streamlearn.learner.learner import Learner
from streamlearn.probe.probe import first_tokens
from streamlearn.probe.return_check import ReturnCheck, check_return
from streamlearn.settings import Settings
from streamlearn.shift.shift import Shift
from streamlearn.stream.decode import Example

_log = get_logger("shift")


class ReturnChecks:
    """Checks the returns in the next batch to train on. What it refused is decided again by the monitor."""

    def __init__(self, learner: Learner, settings: Settings) -> None:
        self.losses = RecentLosses()
        """What the regimes' own records cost."""
        self._learner = learner
        self._settings = settings
        self._refused: list[Shift] = []

    def applies(self, shift: Shift, numbers: Mapping[int, int]) -> bool:
        """Whether the losses of its first records decide about this shift; `numbers` are those of regimes by slot."""
        known = shift.known and numbers.get(shift.slot) == shift.regime
        return known and self._learner.per_regime and self._settings.probe.max_returns_refused > 0

    def refuse(
        self, shifts: Sequence[Shift], numbers: Mapping[int, int], records_of: Callable[[int], Sequence[Example]]
    ) -> Sequence[Shift]:
        """Check the returns among the shifts of a batch that is not trained on yet.

        Args:
            shifts: Of the batch.
            numbers: Of the regimes that were entered, by slot.
            records_of: Returns the first records of the regime in a slot, from the batch on.

        Returns:
            Empty if all are returns; else everything that was refused since the batch before.
        """
        refused = next((each for each in shifts if self._is_refused(each, numbers, records_of)), None)
        if refused is None:
            return ()
        self._refused.append(refused)
        return tuple(self._refused)

    def refused_at(self, declared_at: int) -> int | None:
        """Number of the regime whose return was refused that was declared at this record; None: there is none."""
        return next((each.regime for each in self._refused if each.declared_at == declared_at), None)

    def clear(self) -> None:
        """The batch is trained on, or will be decided again without what was refused."""
        self._refused.clear()

    def _is_refused(
        self, shift: Shift, numbers: Mapping[int, int], records_of: Callable[[int], Sequence[Example]]
    ) -> bool:
        examples = records_of(shift.slot) if self.applies(shift, numbers) else ()
        if not examples:  # a shift that was found after a flush may come with a batch that has none of its records
            return False
        records = first_tokens(examples, self._settings.probe.similarity_tokens)
        own, pack_tokens = self.losses.of(shift.slot), self._settings.stream.batch_tokens
        check = check_return(self._learner, records, shift.slot, own, pack_tokens=pack_tokens)
        if check.p_value >= self._settings.probe.max_returns_refused:
            return False
        _log_refused(shift, check)
        return True


def _log_refused(shift: Shift, check: ReturnCheck) -> None:
    _log.info(
        Event.RETURN_REFUSED,
        regime=shift.regime,
        declared_at=shift.declared_at,
        onset=shift.onset,
        records=len(check.losses),
        loss=round(fmean(check.losses), 4),
        own_loss=round(fmean(check.own_losses), 4),
        p_value=check.p_value,
    )
