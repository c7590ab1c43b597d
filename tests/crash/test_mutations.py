"""A few dozen mutations in every run of the suite."""

from pathlib import Path

from tests.crash.mutations import MUTATIONS, Stock, mutate


def test_every_mutation_of_the_newest_snapshot_is_found(tmp_path: Path) -> None:
    """And the one before it comes back bit for bit."""
    tally = mutate(6 * len(MUTATIONS), 3, tmp_path)
    assert tally.clean, tally
    assert len(tally.by_kind) == len(MUTATIONS)


def test_a_snapshot_that_nobody_mutated_counts_as_undetected(tmp_path: Path) -> None:
    """The check has teeth."""
    stock = Stock(tmp_path, 1024)
    _, undetected, wrong = stock.fall_back(stock.new)
    assert undetected == "found 00000002"
    assert wrong is None
