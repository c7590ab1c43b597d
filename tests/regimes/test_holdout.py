"""The hold-out sample: every Nth record, bounded, uniform, and a function of the stream only."""

from collections import Counter

import numpy as np
import pytest

from streamlearn.regimes.holdout import HoldoutReservoirs
from streamlearn.settings import HoldoutSettings
from tests.doubles import example


def reservoirs(every: int = 4, size: int = 3, seed: int = 0) -> HoldoutReservoirs:
    return HoldoutReservoirs(HoldoutSettings(every_records=every, records_per_regime=size), regimes=2, seed=seed)


def take(held: HoldoutReservoirs, slot: int, count: int) -> list[int]:
    """Indices of the records held out."""
    return [i for i in range(count) if held.take(slot, example([8, i + 9]))]


def kept(held: HoldoutReservoirs, slot: int) -> list[int]:
    return [int(each.input_ids[1]) - 9 for each in held.examples(slot)]


def test_every_nth_record_of_a_regime_is_held_out() -> None:
    """Counted per regime; zero holds out none."""
    held = reservoirs(every=4)
    assert take(held, 0, 12) == [3, 7, 11]
    assert take(held, 1, 5) == [3]
    assert take(reservoirs(every=0), 0, 100) == []


def test_the_sample_is_bounded_and_of_held_out_records() -> None:
    """A record that leaves it was held out all the same."""
    held = reservoirs(every=2, size=3)
    out = take(held, 0, 40)
    assert len(out) == 20
    assert len(kept(held, 0)) == 3
    assert set(kept(held, 0)) <= set(out)


def test_the_sample_is_uniform() -> None:
    """Each of 10 held-out records is in 3 of 10 samples, within four standard deviations of 2,000 seeds."""
    seen: Counter[int] = Counter()
    for seed in range(2000):
        held = reservoirs(every=1, size=3, seed=seed)
        take(held, 0, 10)
        seen.update(kept(held, 0))
    assert [seen[i] / 2000 for i in range(10)] == pytest.approx([0.3] * 10, abs=4 * (0.3 * 0.7 / 2000) ** 0.5)


def test_a_restored_sample_goes_on_as_the_original() -> None:
    """Through plain arrays, as a snapshot keeps them."""
    one, other = reservoirs(every=2), reservoirs(every=2)
    take(one, 0, 15)
    take(one, 1, 4)
    other.load_state({name: np.array(array) for name, array in one.state().items()})
    for held in (one, other):
        take(held, 0, 30)
    assert kept(one, 0) == kept(other, 0)
    assert kept(one, 1) == kept(other, 1)


def test_a_cleared_slot_starts_over() -> None:
    """Its count too: the slot has another regime."""
    held = reservoirs(every=4)
    take(held, 0, 7)
    held.clear(0)
    assert held.examples(0) == ()
    assert take(held, 0, 4) == [3]


def test_records_that_move_take_their_part_of_the_count_along() -> None:
    """A third of the sample moves, and with it a third of the records that were counted."""
    held = reservoirs(every=4, size=3)
    take(held, 0, 12)
    one, other, third = kept(held, 0)
    held.move(0, 1, [False, True, False])
    assert (kept(held, 0), kept(held, 1)) == ([one, third], [other])
    assert held.state()["seen"].tolist() == [8, 4]
    held.move(0, 1, [False, False])
    assert held.state()["seen"].tolist() == [8, 4]
