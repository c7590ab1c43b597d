"""What an operator does to regimes, between two steps.

Only regimes that are remembered have a number here; every other number is refused. What is decided is part of the
state, and durable with the next snapshot.
"""

from streamlearn.adaptation.adaptation import Adaptation
from streamlearn.errors import RegimeBusyError, RegimeError
from streamlearn.events import Event, get_logger
from streamlearn.learner.learner import Learner
from streamlearn.settings import Settings

_log = get_logger("shift")


class OperatedRegimes:
    """The regimes of a run, as an operator may change them. Only the thread that owns the model calls it."""

    def __init__(self, adaptation: Adaptation, learner: Learner, settings: Settings) -> None:
        self._adaptation, self._learner, self._settings = adaptation, learner, settings

    def rename(self, number: int, name: str) -> None:
        """Give a regime a name for people; an empty one removes it.

        Raises:
            RegimeError: no regime has this number, or the name cannot be its name.
        """
        slot = self._slot_of(number)
        self._adaptation.controls.rename(number, name)
        self._adaptation.statistics.changed(slot)
        _log.info(Event.REGIME_RENAMED, regime=number, name=name)

    def freeze(self, number: int) -> None:
        """Keep every bit of a regime's adapter and optimizer state. Its records are measured and not trained on.

        Raises:
            RegimeError: no regime has this number, or regimes share their experts.
        """
        slot = self._slot_of(number)
        if not self._learner.per_regime:
            raise RegimeError(
                f"regime {number} must have an adapter of its own to be frozen, found preset "
                f"{self._settings.adapter.preset}, whose experts all regimes share; start a new run with "
                "adapter.per_regime: true, or stop feeding the regime's records"
            )
        self._set_frozen(number, slot, True)

    def unfreeze(self, number: int) -> None:
        """Train on a regime's records again.

        Raises:
            RegimeError: no regime has this number.
        """
        self._set_frozen(number, self._slot_of(number), False)

    def approve(self, number: int) -> None:
        """Let a regime be published although its answers changed: the next version need not be as good as the last.

        Raises:
            RegimeError: no regime has this number, or nothing is published.
        """
        self._slot_of(number)
        if self._settings.publish is None:
            raise RegimeError(f"regime {number} cannot be approved: nothing is published; add a section publish")
        self._adaptation.controls.approve(number, self._learner.number)
        _log.info(Event.REGIME_APPROVED, regime=number, step=self._learner.number)

    def drop(self, number: int) -> None:
        """Forget a regime: its profile, adapter, optimizer state, hold-out records, scores, name.

        Experts that regimes share keep their weights. If its records come again, they begin a new regime, or belong to
        another that explains them. If it is the regime of the present segment, the next record begins a new one.

        Raises:
            RegimeError: no regime has this number.
            RegimeBusyError: the stream is entering a regime; it can be dropped a few batches later.
        """
        slot = self._slot_of(number)
        if not self._adaptation.is_settled:
            linger_s = self._settings.stream.linger_s
            raise RegimeBusyError(
                f"regime {number} cannot be dropped while the stream enters another regime, which lasts up to "
                f"shift.lookahead_records ({self._settings.shift.lookahead_records}) records"
                + (f" or stream.linger_s ({linger_s:g} s)" if linger_s is not None else "")
                + "; try again then"
            )
        self._adaptation.forget(slot)
        _log.info(Event.REGIME_DROPPED, regime=number, left=sorted(self._adaptation.numbers.values()))

    def _set_frozen(self, number: int, slot: int, is_frozen: bool) -> None:
        read, trained = self._adaptation.monitor.records_read, self._adaptation.records
        self._adaptation.controls.set_frozen(number, is_frozen, read=read, trained=trained)
        self._adaptation.statistics.changed(slot)
        _log.info(Event.REGIME_FROZEN if is_frozen else Event.REGIME_UNFROZEN, regime=number)

    def _slot_of(self, number: int) -> int:
        numbers = self._adaptation.numbers
        slot = next((slot for slot, own in numbers.items() if own == number), None)
        if slot is None:
            known = ", ".join(map(str, sorted(numbers.values()))) or "none yet"
            raise RegimeError(f"regime: must be the number of a remembered regime, which are {known}, found {number}")
        return slot
