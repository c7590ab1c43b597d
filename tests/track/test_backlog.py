"""Samples that wait: bounded, and nothing that must not be lost is."""

from itertools import pairwise

from streamlearn.track import Backlog, Note, Point, TrackedSample


def sample(step: int, rewound_to: int | None = None, note: str = "") -> TrackedSample:
    notes = (Note("shift/inputs", step, note),) if note else ()
    return TrackedSample(step, 0.0, (Point("loss", step, 1.0),), notes, rewound_to)


def test_samples_leave_in_order_once_they_are_written() -> None:
    backlog = Backlog()
    for step in range(3):
        backlog.add(sample(step))
    assert [each.step for each in backlog.first(2)] == [0, 1]
    assert [each.step for each in backlog.first(2)] == [0, 1]  # a failed write takes them again
    backlog.remove_first()
    assert [each.step for each in backlog.first(2)] == [2]


def test_a_full_backlog_becomes_coarser_and_keeps_notes_and_rewinds() -> None:
    """What is being written stays untouched."""
    backlog = Backlog(max_samples=6)
    for step in range(6):
        backlog.add(sample(step, rewound_to=1 if step == 3 else None, note="a" if step == 5 else ""))
    assert [each.step for each in backlog.first(2)] == [0, 1]
    backlog.add(sample(6, note="b"))
    assert len(backlog) == 5
    assert backlog.dropped == 2
    backlog.remove_first()
    rest = backlog.first(9)
    assert [each.step for each in rest] == [2, 4, 6]
    assert [each.rewound_to for each in rest] == [None, 1, None]
    assert [note.text for each in rest for note in each.notes] == ["a", "b"]
    assert all(len(each.points) == 1 for each in rest)


def test_a_month_without_the_server_stays_bounded_and_covered() -> None:
    """From its beginning to its end, with gaps of about the same size."""
    backlog = Backlog(max_samples=50)
    for step in range(10_000):
        backlog.add(sample(step))
    steps = [each.step for each in backlog.first(50)]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert len(backlog) <= 50
    assert (steps[0], set(gaps)) == (0, {256})
    assert len(steps) + backlog.dropped == 10_000


def test_an_empty_backlog_takes_every_sample_again() -> None:
    backlog = Backlog(max_samples=2)
    for step in range(9):
        backlog.add(sample(step))
    backlog.first(9)
    backlog.remove_first()
    before = backlog.dropped
    backlog.add(sample(9))
    backlog.add(sample(10))
    assert [each.step for each in backlog.first(9)] == [9, 10]
    assert backlog.dropped == before
