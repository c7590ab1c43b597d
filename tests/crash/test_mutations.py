"""A few dozen mutations of the newest snapshot."""

from pathlib import Path

from tests.crash.mutations import MUTATIONS, SnapshotPair, mutate


def test_every_mutation_of_the_newest_snapshot_is_detected(tmp_path: Path) -> None:
    """The older snapshot is returned bit for bit."""
    tally = mutate(6 * len(MUTATIONS), 3, tmp_path)
    assert tally.clean, tally
    assert len(tally.by_kind) == len(MUTATIONS)


def test_an_unchanged_snapshot_counts_as_undetected(tmp_path: Path) -> None:
    """The check itself works."""
    pair = SnapshotPair(tmp_path, 1024)
    _, undetected, wrong = pair.fall_back(pair.new)
    assert undetected == "found 00000002"
    assert wrong is None
