"""What is new in one status after another."""

from dataclasses import replace

from streamlearn.status import Scoring
from streamlearn.track import Point, SeriesReader, TrackedSample

from .kit import SHIFT, status


def reader(last_step: int | None = None) -> SeriesReader:
    return SeriesReader(last_step, lambda: 17.0)


def values(sample: TrackedSample | None) -> dict[str, tuple[int, float]]:
    assert sample is not None
    return {point.series: (point.step, point.value) for point in sample.points}


def test_every_figure_of_a_status_is_a_series() -> None:
    """With its step; figures that are not known are left out."""
    sample = reader().read(status(12))
    assert sample is not None
    assert sample.at == 17.0
    assert values(sample) == {
        "loss/batch": (12, 2.0),
        "loss/prequential": (12, 2.5),
        "tokens_per_s": (12, 90.0),
        "learning_rate": (12, 0.003),
        "lag": (12, 7.0),
        "records/trained": (12, 0.0),
        "records/held_out": (12, 0.0),
        "records/dead_lettered": (12, 0.0),
        "regimes/number": (12, 2.0),
        "regimes/current": (12, 2.0),
        "prequential_loss/regime_2": (12, 1.5),
        "forgetting/average_forgetting": (12, 0.25),
    }


def test_a_status_without_news_gives_nothing() -> None:
    """A run that waits for records writes no points."""
    series = reader()
    series.read(status(12))
    assert series.read(status(12)) is None


def test_each_scoring_and_shift_is_read_once_at_its_own_step() -> None:
    """However many were made between two readings."""
    series = reader()
    series.read(status(5))
    first, second = Scoring(6, 3.0, 0.4), Scoring(9, 2.9, 0.5)
    sample = series.read(status(12, first, second, shifts=[SHIFT]))
    assert sample is not None
    assert [point for point in sample.points if point.series == "holdout_loss/regime_1"] == [
        Point("holdout_loss/regime_1", 6, 3.0),
        Point("holdout_loss/regime_1", 9, 2.9),
    ]
    assert values(sample)["shift/inputs"] == (10, 1.0)
    [note] = sample.notes
    assert note.text.startswith("inputs 1: regime 1 to 2 (new), declared at record 40, onset 38, statistic 0.5")
    assert series.read(status(12, first, second, shifts=[SHIFT])) is None
    later = series.read(status(13, first, second, replace(second, step=13), shifts=[SHIFT]))
    assert values(later)["holdout_loss/regime_1"] == (13, 2.9)
    assert "shift/inputs" not in values(later)


def test_a_restart_does_not_repeat_what_was_written() -> None:
    """Neither scorings nor shifts up to the step that was noted."""
    sample = reader(last_step=12).read(status(14, Scoring(9, 3.0, 0.4), Scoring(13, 2.9, 0.5), shifts=[SHIFT]))
    assert sample is not None
    assert sample.rewound_to is None
    assert values(sample)["holdout_loss/regime_1"] == (13, 2.9)
    assert "shift/inputs" not in values(sample)


def test_a_step_that_goes_back_is_marked_and_written_anew() -> None:
    """After a start from an earlier snapshot, and in the running process."""
    scoring = Scoring(9, 3.0, 0.4)
    started = reader(last_step=12).read(status(8))
    assert started is not None
    assert started.rewound_to == 8
    series = reader()
    series.read(status(12, scoring, shifts=[SHIFT]))
    back = series.read(status(8))
    assert back is not None
    assert back.rewound_to == 8
    assert values(back)["loss/batch"] == (8, 2.0)
    again = series.read(status(12, scoring, shifts=[SHIFT]))
    assert {"holdout_loss/regime_1", "shift/inputs"} <= values(again).keys()


def test_a_rewind_between_two_readings_is_marked_too() -> None:
    """Although the step is greater again by then."""
    series = reader()
    series.read(status(12))
    sample = series.read(status(15), rewound_to=8)
    assert sample is not None
    assert sample.rewound_to == 8


def test_what_is_not_finite_is_left_out() -> None:
    assert "loss/batch" not in values(reader().read(replace(status(3), loss=float("nan"))))
