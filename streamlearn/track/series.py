"""The run's series, from one published status after another."""

import math
from collections.abc import Callable, Iterator

from streamlearn.status.status import AdaptationStatus, ShiftStatus, Status
from streamlearn.track.tracked_sample import Note, Point, TrackedSample


class SeriesReader:
    """Knows what was read. A scoring or a shift is read once, however many statuses name it."""

    def __init__(self, last_step: int | None, wall: Callable[[], float]) -> None:
        """Begin after `last_step`, up to which an earlier process wrote; None if none did."""
        self._wall = wall
        self._step = -1 if last_step is None else last_step
        self._scored: dict[int, int] = {}
        self._since = self._step
        """Scorings and shifts up to this step were written before."""
        self._shifts: set[tuple[str, int]] | None = None

    def read(self, status: Status, rewound_to: int | None = None) -> TrackedSample | None:
        """What is new in a status; None if nothing is.

        Args:
            status: The newest one.
            rewound_to: The smallest step that the run went back to since the last call, if it did.
        """
        if status.step < self._step:
            rewound_to = status.step if rewound_to is None else min(rewound_to, status.step)
        if rewound_to is not None:
            self._rewind(rewound_to)
        points = [*self._scorings(status.adaptation)]
        notes = []
        for shift in self._new_shifts(status.adaptation):
            points.append(Point(f"shift/{shift.kind}", shift.step, shift.number))
            notes.append(Note(f"shift/{shift.kind}", shift.step, described(shift)))
        if status.step > self._step or rewound_to is not None:
            points += [Point(series, status.step, value) for series, value in _figures(status)]
            self._step = status.step
        if not points and not notes and rewound_to is None:
            return None
        finite = tuple(point for point in points if math.isfinite(point.value))
        return TrackedSample(status.step, self._wall(), finite, tuple(notes), rewound_to)

    def _rewind(self, step: int) -> None:
        self._step = self._since = min(step, self._step)
        self._scored = {regime: min(step, scored) for regime, scored in self._scored.items()}
        self._shifts = None

    def _scorings(self, adaptation: AdaptationStatus) -> Iterator[Point]:
        for regime in adaptation.regimes:
            before = self._scored.get(regime.number, self._since)
            for scoring in regime.history:
                if scoring.step > before:
                    yield Point(f"holdout_loss/regime_{regime.number}", scoring.step, scoring.loss)
                    yield Point(f"holdout_accuracy/regime_{regime.number}", scoring.step, scoring.accuracy)
                    self._scored[regime.number] = scoring.step

    def _new_shifts(self, adaptation: AdaptationStatus) -> list[ShiftStatus]:
        """Those that were not read; at the start and after a rewind, those of later steps."""
        if self._shifts is None:
            self._shifts = {(each.kind, each.number) for each in adaptation.shifts if each.step <= self._since}
        new = [each for each in adaptation.shifts if (each.kind, each.number) not in self._shifts]
        self._shifts = {(each.kind, each.number) for each in adaptation.shifts}
        return [each for each in new if each.kind != "inputs" or each.previous is not None]  # not the first regime


def described(shift: ShiftStatus) -> str:
    """A shift in one line."""
    came = f"regime {shift.previous} to {shift.regime}" if shift.previous is not None else f"regime {shift.regime}"
    known = "known" if shift.known else "new"
    return (
        f"{shift.kind} {shift.number}: {came} ({known}), declared at record {shift.declared_at}, onset {shift.onset}, "
        f"statistic {shift.statistic:.4g}, threshold {shift.threshold:.4g}"
    )


def _figures(status: Status) -> Iterator[tuple[str, float]]:
    adaptation = status.adaptation
    current = adaptation.current
    lags = [each.lag for each in status.partitions if each.lag is not None]
    found = {
        "loss/batch": status.loss,
        "loss/prequential": status.loss_smoothed,
        "tokens_per_s": status.tokens_per_s,
        "learning_rate": status.learning_rate,
        "lag": sum(lags) if lags else None,
        "records/trained": status.records_trained,
        "records/held_out": status.records_held_out,
        "records/dead_lettered": status.records_dead_lettered,
        "regimes/number": len(adaptation.regimes),
        "regimes/current": None if current is None else current.number,
        "forgetting/average_forgetting": adaptation.average_forgetting,
        "forgetting/backward_transfer": adaptation.backward_transfer,
    }
    if current is not None:
        found[f"prequential_loss/regime_{current.number}"] = current.prequential_loss
    yield from ((series, float(value)) for series, value in found.items() if value is not None)
