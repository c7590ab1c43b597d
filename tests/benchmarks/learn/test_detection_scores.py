"""Detection of the true boundaries, from a run's JSON object."""

from typing import Any

import pytest

from benchmarks.learn.detection_scores import WITHIN, DetectionScores, detection_scores


def run(declared: list[int], records: list[int], known: tuple[int, ...] = ()) -> dict[str, Any]:
    """A run with input shifts declared at these records, and one of the answers."""
    shifts = [{"kind": "inputs", "declared_at": at, "known": at in known} for at in declared]
    shifts.append({"kind": "answers", "declared_at": 7, "known": False})
    return {
        "segments": [{"records": each} for each in records],
        "detection": {"shifts": [{"shift": shift} for shift in shifts]},
    }


def test_a_shift_within_reach_detects_one_boundary() -> None:
    """The declaration at record 1 does not count; a second shift after a boundary is false."""
    assert detection_scores(run([1, 205, 210, 300], [200, 200, 50])) == DetectionScores(found=1, false=2, returns=0)


@pytest.mark.parametrize(("at", "found"), [(201, 1), (200 + WITHIN, 1), (201 + WITHIN, 0), (200, 0)])
def test_a_shift_counts_from_the_boundary_on_while_it_is_in_reach(at: int, found: int) -> None:
    assert detection_scores(run([1, at], [200, 100])) == DetectionScores(found, 1 - found, returns=0)


def test_a_shift_after_the_next_boundary_detects_that_one() -> None:
    """Segments may be shorter than the reach."""
    assert detection_scores(run([1, 65, 70], [30, 30, 30])) == DetectionScores(found=1, false=1, returns=0)


def test_returns_are_counted() -> None:
    assert detection_scores(run([1, 31, 61], [30, 30, 30], known=(61,))) == DetectionScores(2, 0, returns=1)


def test_without_boundaries_or_detection_there_is_no_score() -> None:
    """A mixed stream is one segment; a baseline is given the boundaries."""
    assert detection_scores(run([1, 31], [90])) is None
    assert detection_scores({"segments": [{"records": 5}, {"records": 5}], "detection": None}) is None
