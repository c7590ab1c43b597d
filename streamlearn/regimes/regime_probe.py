"""What the first records of a new regime tell before anything is learned from them.

Where each regime has an adapter of its own, they are scored under those of known regimes (`probe/head_start`). Where
all share one, a transient expert is trained on them (`probe/probe`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from streamlearn.learner.evaluate import first_tokens
from streamlearn.learner.learner import Learner
from streamlearn.regimes.route import RequestRouter
from streamlearn.regimes.start import MAX_CANDIDATES, Fallback, HeadStart, measure_head_start
from streamlearn.regimes.statistics import ShiftReport
from streamlearn.settings import Settings
from streamlearn.shift.detector import Shift
from streamlearn.shift.features import input_of
from streamlearn.shift.monitor import Monitor, MonitorState
from streamlearn.stream.record import Example


class Probed(NamedTuple):
    """What a probe found."""

    report: ShiftReport
    start: int | None = None
    """Slot of the regime whose adapter is copied; None: the new one starts from nothing."""


class RegimeProbe:
    """Compares new regimes with the known ones."""

    def __init__(
        self, learner: Learner, settings: Settings, monitor: Monitor, router: RequestRouter, fallback: Fallback
    ) -> None:
        """`fallback` takes in what it found."""
        self.seconds = 0.0
        """Time spent by this process."""
        self._learner = learner
        self._settings = settings
        self._monitor = monitor
        self._router = router
        self._fallback = fallback

    def applies(self, shift: Shift) -> bool:
        """Whether this shift's regime is compared with what is known; the first of all has nothing to compare with."""
        if shift.known or shift.parent is not None or not self._settings.probe.enabled:
            return False
        if self._learner.per_regime:
            return shift.previous is not None
        return self._learner.hooks.probe_tokens(is_first=shift.previous is None) > 0

    @property
    def tokens_needed(self) -> int:
        """Tokens of a regime's first records that a probe, or the check of a return, waits for."""
        if self._learner.per_regime:
            return self._settings.probe.similarity_tokens
        return self._learner.hooks.probe_tokens(is_first=False)

    def measure(
        self,
        report: ShiftReport,
        examples: Sequence[Example],
        numbers: Mapping[int, int],
        trained: MonitorState | None,
    ) -> Probed:
        """Compare a new regime with those that were entered.

        Args:
            report: What is known of the shift.
            examples: The regime's first records, at least one.
            numbers: Those of the entered regimes, by slot.
            trained: The monitor's state as of the last trained batch. What was read since may differ after a restart.
        """
        began, start = time.monotonic(), None
        if numbers and self._learner.routes_by_regime:
            found = self._head_start(report.shift.slot, examples, numbers, trained)
            self._fallback.add(found)
            if self._learner.per_regime:
                start = found.slot
                started_from = None if start is None else numbers[start]
                report = replace(report, probe_tokens=found.tokens, started_from=started_from)
        if not self._learner.per_regime:
            probed = self._learner.hooks.probe(examples, report.shift.regime)
            report = replace(report, probe_tokens=probed.tokens, mean_similarity=probed.mean_similarity)
        seconds = time.monotonic() - began
        self.seconds += seconds
        return Probed(replace(report, probe_seconds=seconds), start)

    def _head_start(
        self, slot: int, examples: Sequence[Example], numbers: Mapping[int, int], trained: MonitorState | None
    ) -> HeadStart:
        """Compare what answers the first records of the regime that takes `slot`."""
        assert trained is not None, "a regime is under way"
        records = first_tokens(examples, self._settings.probe.similarity_tokens)
        likely = self._monitor.rank([input_of(example) for example in records], trained)
        known = [other for other in dict.fromkeys([*likely, *numbers]) if other in numbers and other != slot]
        per_regime = self._learner.per_regime
        return measure_head_start(
            self._learner,
            records,
            known[: MAX_CANDIDATES if per_regime else 1],
            self._router.averaged(without=slot) if per_regime else (),
            pack_tokens=self._settings.stream.batch_tokens,
        )
