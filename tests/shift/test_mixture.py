"""Records of two regimes are divided; those of one are not, whatever their topics."""

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.shift import mixture
from streamlearn.shift.mixture import LIKELY, MIN_RUNS, MIN_TESTED, SAME_INSTRUCTION, SMOOTHING, distinctness, separate
from tests.shift.records import features_of

Buckets = NDArray[np.uint16]


def records(tasks: list[int]) -> list[Buckets]:
    drawn = {task: iter(features_of(task, len(tasks), seed=task)) for task in set(tasks)}
    return [next(drawn[task]).buckets for task in tasks]


@pytest.mark.parametrize("number", [24, 32, 64])
def test_two_tasks_are_divided(number: int) -> None:
    """Every record into the part of its task; the smaller part is marked."""
    tasks = [int(i % 5 < 2) for i in range(number)]
    result = separate(records(tasks))
    assert result is not None
    assert result.statistic > 1.0
    assert list(result.is_smaller) == [bool(task) for task in tasks]


def test_records_of_two_tasks_are_distinct_and_those_of_one_are_not() -> None:
    """Whatever their order, and also if one part is small."""
    one, other = records([0] * 32), records([1] * 8)
    assert distinctness(one, other) > LIKELY
    assert distinctness(other, one) == pytest.approx(distinctness(one, other))
    assert distinctness(one[:8], one[8:]) < LIKELY


def test_one_task_is_not_divided() -> None:
    """Nor are too few records of two."""
    assert all(separate(records([task] * 64)) is None for task in range(5))
    assert separate(records([0, 1] * (MIN_TESTED // 2))[:-1]) is None


def test_copies_count_once() -> None:
    """Two records that occur 32 times each are two records, and do not vouch for each other."""
    one, other = records([0, 1])
    assert separate([one, other] * 32) is None


def test_a_part_that_is_one_run_of_the_stream_is_no_mixture() -> None:
    """It may be a change; only a young regime's is divided, for which the tests of changes have too few records."""
    once, thrice = records([0] * 40 + [1] * 20), records(([0] * 8 + [1] * 4) * MIN_RUNS)
    assert separate(once) is None
    assert separate(once, is_young=True) is not None
    assert separate(thrice) is not None


def test_questions_on_one_text_after_the_same_instruction_are_no_regime() -> None:
    """As in a file in the order of its texts; two producers with one system prompt are still told apart."""
    instruction = np.arange(SAME_INSTRUCTION, dtype=np.uint16)

    def instructed(tasks: list[int], length: int) -> list[Buckets]:
        return [np.concatenate([instruction[:length], each]) for each in records(tasks)]

    texts, producers = [0] * 20 + [1] * 12, [0, 1] * 16
    assert separate(instructed(texts, SAME_INSTRUCTION), is_young=True) is None
    assert separate(instructed(texts, SAME_INSTRUCTION - 1), is_young=True) is not None
    assert separate(instructed(producers, SAME_INSTRUCTION), is_young=True) is not None


def test_common_tokens_divide_long_and_varied_records() -> None:
    """Two instructions of twenty tokens before two hundred of any text; two of three tokens are too short."""
    rng = np.random.default_rng(0)

    def instructed(length: int) -> list[Buckets]:
        starts = (np.arange(length), 100 + np.arange(length))
        texts = [200 + rng.integers(0, 3000, size=200) for _ in range(64)]
        return [np.append(starts[i % 2], text).astype(np.uint16) for i, text in enumerate(texts)]

    result = separate(instructed(20))
    assert result is not None
    assert list(result.is_smaller) == [False, True] * 32
    assert separate(instructed(3)) is None


def test_margins_are_those_of_the_equations() -> None:
    """Eq. (1), spelled out: each record is scored without itself."""
    made = records([0, 1] * 8)
    tokens = mixture._Tokens.of(made)
    division_N = np.arange(16) % 3 == 0
    pooled = np.concatenate(made)
    expected = []
    for i, own in enumerate(made):
        scores = []
        for part in (False, True):
            others = [each for j, each in enumerate(made) if division_N[j] == part and j != i]
            counted = np.concatenate(others).tolist()
            score = 0.0
            for bucket in own.tolist():
                p = ((pooled == bucket).mean() + 1 / 4096) / 2
                score += np.log((counted.count(bucket) + SMOOTHING * p) / (len(counted) + SMOOTHING)) - np.log(p)
            scores.append(score)
        expected.append(scores[1] - scores[0])
    np.testing.assert_allclose(mixture._lead(tokens, division_N), expected, rtol=1e-9)
