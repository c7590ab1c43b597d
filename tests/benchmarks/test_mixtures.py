"""The benchmark of mixed producers counts what its docstring defines."""

from itertools import groupby

import numpy as np

from benchmarks.mixtures import assign, metrics, turns
from benchmarks.streams import Assigned
from tests.shift.streams import stream as synthetic


def test_a_task_in_two_regimes_costs_assignment_and_no_purity() -> None:
    """A regime with two tasks costs both."""
    tasks = [0, 0, 0, 0, 1, 1]
    divided, mixed = (metrics(tasks, Assigned([], slots, 1.0)) for slots in ([0, 0, 0, 1, 2, 2], [0] * 6))
    assert (divided["purity"], divided["assignment"]) == (1.0, 5 / 6)
    assert (mixed["purity"], mixed["assignment"]) == (4 / 6, 4 / 6)


def test_producers_take_turns() -> None:
    """In bursts of the given length, never two of one producer in a row; with length 1 at random."""
    bursts = turns(np.random.default_rng(0), 3, 4, 40)
    assert [len(list(group)) for _, group in groupby(bursts.tolist())] == [4] * 10
    single = turns(np.random.default_rng(0), 3, 1, 300)
    assert set(np.bincount(single) // 60) == {1}
    assert (single[1:] == single[:-1]).any()


def test_the_slots_are_those_of_the_monitor() -> None:
    """Two synthetic producers are told apart from the first record on."""
    order = turns(np.random.default_rng(0), 2, 1, 200)
    found = metrics(order.tolist(), assign(synthetic(order.tolist())))
    assert found["regimes"] == 2
    assert found["purity"] > 0.95
    assert found["us_per_record"] > 0
