"""A shift as people see it: in the log, on the page, in `/v1/shifts` and in the tables of the command line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from streamlearn.events import Event, get_logger
from streamlearn.regimes.holdout import KeptRecord
from streamlearn.shift.describe import Place, word_at
from streamlearn.shift.detector import Shift
from streamlearn.shift.monitor import Monitor
from streamlearn.status import ShiftStatus

NUM_LISTED = 10  # tokens that came, and that went, at a shift

_log = get_logger("shift")


@dataclass(frozen=True)
class ShiftReport:
    """A shift that was acted on, and what its probe cost and found."""

    shift: Shift
    step: int
    """Steps taken before it."""
    probe_tokens: int = 0
    probe_seconds: float = 0.0
    probe_losses: tuple[float, float] | None = None
    probe_failed: bool = False
    mean_similarity: float | None = None
    similarity_range: tuple[float, float] | None = None
    mean_importance: float | None = None
    """See `Probe`; None without a transient expert."""
    started_from: int | None = None
    """Number of the regime whose adapter was copied; None: the regime starts from nothing, or has no adapter."""
    refused_return: int | None = None
    """Number of the known regime that the inputs look like and the losses contradict; None: there is none."""
    tokens_came: tuple[str, ...] = ()
    tokens_went: tuple[str, ...] = ()
    typical_records: tuple[str, ...] = ()
    typical_records_before: tuple[str, ...] = ()
    """See `ShiftStatus`."""

    @property
    def status(self) -> ShiftStatus:
        """The shift as it is published."""
        own = {name: value for name, value in vars(self).items() if name != "shift"}
        return ShiftStatus(**{name: value for name, value in vars(self.shift).items() if name != "slot"}, **own)

    def log(self) -> None:
        """Log it, or the entry into the first regime."""
        shift = self.shift
        _log.info(
            Event.FIRST_REGIME_ENTERED if shift.previous is None else Event.SHIFT_DETECTED,
            kind=shift.kind,
            regime=shift.regime,
            known=shift.known,
            parent=shift.parent,
            step=self.step,
            declared_at=shift.declared_at,
            onset=shift.onset,
            statistic=round(shift.statistic, 3),
            threshold=round(shift.threshold, 3),
            probe_tokens=self.probe_tokens,
            probe_s=round(self.probe_seconds, 2),
            started_from=self.started_from,
            refused_return=self.refused_return,
            came=self.tokens_came,
            went=self.tokens_went,
            typical=self.typical_records,
            typical_before=self.typical_records_before,
            **self._transient_expert(),
        )

    def _transient_expert(self) -> dict[str, Any]:
        """What a transient expert found, for the log; empty without one."""
        if self.probe_losses is None:
            return {}
        names = ("probe_losses", "mean_similarity", "similarity_range", "mean_importance")
        found = {name: getattr(self, name) for name in names}
        rounded = {name: np.round(value, 4).tolist() for name, value in found.items() if value is not None}
        return {"probe_failed": self.probe_failed, **rounded}


def with_records(
    report: ShiftReport,
    monitor: Monitor,
    before: int | None,
    kept: Sequence[KeptRecord],
    to_text: Callable[[Sequence[int]], str],
) -> ShiftReport:
    """Add what tells the records of a shift's regime from those of the regime before it.

    Args:
        report: The shift.
        monitor: Has the first records of the new regime.
        before: Slot of the regime before it, or that it was split from; None if it is not remembered.
        kept: Records of that regime.
        to_text: Decodes tokens.
    """
    slot = report.shift.slot
    first = monitor.first_records(slot)
    later = [example for _, example in first]
    report = replace(report, typical_records=tuple(str(first[i][0]) for i in monitor.typical_records(later)))
    if before is None or before == slot or not later:  # the benchmarks enter regimes without a detector
        return report
    earlier = [record.example for record in kept]
    typical = [kept[i].id for i in monitor.typical_records(earlier)]
    return replace(
        report,
        typical_records_before=tuple(id_ for id_ in typical if id_),
        tokens_came=_words(monitor.characteristic_tokens(slot, before, later), to_text),
        tokens_went=_words(monitor.characteristic_tokens(before, slot, earlier), to_text),
    )


def _words(places: Sequence[Place], to_text: Callable[[Sequence[int]], str]) -> tuple[str, ...]:
    """The words that the first tokens are part of, each once."""
    words = dict.fromkeys(word for place in places if (word := word_at(place, to_text)))
    return tuple(islice(words, NUM_LISTED))
