"""Development and training records are apart, whatever the seed."""

import pytest

from benchmarks.learn.splits import DEVELOPMENT, Draw, choose, divide

ROWS = [f"row {i}" for i in range(200)]


@pytest.mark.parametrize(
    ("rows", "records", "expected"), [(200, 100, DEVELOPMENT), (120, 100, 20), (100, 100, 0), (60, 100, 0)]
)
def test_training_records_go_before_development_records(rows: int, records: int, expected: int) -> None:
    """A small file keeps enough to draw from."""
    pool, development = divide(ROWS[:rows], records, str)
    assert len(development) == expected
    assert sorted([*pool, *development]) == sorted(ROWS[:rows])


def test_development_records_are_the_same_for_every_size_and_seed() -> None:
    """A larger draw leaves fewer of the same records; no seed draws one of them."""
    development = divide(ROWS, 100, str)[1]
    assert divide(ROWS, 180, str)[1] == development[-20:]
    pool = divide(ROWS, 100, str)[0]
    draws = [choose(pool, Draw([], 100, seed=seed), "t") for seed in range(20)]
    assert {len(draw) for draw in draws} == {100}
    assert not {row for draw in draws for row in draw} & {*development}
    assert draws[0] != draws[1]


def test_an_input_of_a_development_record_is_not_trained_on() -> None:
    """Two rows with one input are never on both sides."""
    rows = [(f"input {i % 150}", i) for i in range(200)]
    pool, development = divide(rows, 100, lambda row: row[0])
    assert len(development) == DEVELOPMENT
    assert not {text for text, _ in pool} & {text for text, _ in development}
