"""Reservoir samples."""

from collections import Counter

from benchmarks.learn.baselines.reservoir import Reservoir


def test_the_sample_is_uniform() -> None:
    """Every item is kept with the same probability, early or late."""
    kept: Counter[int] = Counter()
    for seed in range(400):
        sample: Reservoir[int] = Reservoir(5, seed=seed)
        for item in range(20):
            sample.offer(item)
        assert len(set(sample.items)) == 5
        kept.update(sample.items)
    assert all(60 < kept[item] < 140 for item in range(20))  # 100 expected, sd 8.7


def test_a_draw_has_different_items() -> None:
    """As many as there are at most."""
    sample: Reservoir[int] = Reservoir(5, seed=0)
    assert sample.draw(3) == []
    for item in range(4):
        sample.offer(item)
    assert sorted(sample.draw(9)) == [0, 1, 2, 3]
    assert len(set(sample.draw(3))) == 3
