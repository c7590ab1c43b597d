"""Whole runs on a tiny backbone: every method, told or not, is examined at the right moments on the right records."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from streamlearn.bench.learn.methods import METHODS
from streamlearn.bench.learn.run import run
from streamlearn.bench.learn.suites import Draw, Suite, of_folder

TASKS = ("fox", "dog", "cat")
RECORDS = 12

pytestmark = pytest.mark.usefixtures("on_the_tiny_backbone")


@pytest.fixture
def suite(write_tasks: Callable[..., Path]) -> Suite:
    folder = write_tasks(*TASKS)
    return of_folder(folder, Draw([folder], records=RECORDS, tests=4), TASKS)


@pytest.mark.parametrize("name", [*METHODS])
def test_every_method_gives_all_figures(suite: Suite, name: str) -> None:
    """The matrix grows by a task a stretch; every record was seen once; the result is JSON."""
    result = run(suite, name, METHODS[name], seed=0, generate=name == "streamlearn")
    assert [list(row) for row in result["matrix"]] == [["fox", "dog"], ["fox", "dog", "cat"], ["fox", "dog", "cat"]]
    trained = 0 if name == "frozen" else len(TASKS) * RECORDS
    bins = result["prequential"]
    assert len(bins["losses"]) == math.ceil(trained / bins["bin_records"])
    assert 0 <= result["AP"] <= 1
    assert (result["detection"] is None) == (name != "streamlearn")
    assert orjson.loads(orjson.dumps(result)) == {**result, **jsonable(result)}
    if name == "streamlearn":
        assert set(result["generated"]) == set(TASKS)


def jsonable(result: dict[str, Any]) -> dict[str, Any]:
    """What JSON makes of tuples."""
    stretches = [{**stretch, "tasks": list(stretch["tasks"])} for stretch in result["stretches"]]
    return {"stretches": stretches, "unseen": list(result["unseen"])}


def test_joint_is_what_shuffling_makes_of_lora(suite: Suite) -> None:
    """The same records in another order: other weights, the same number of records."""
    lora, joint = (run(suite, name, METHODS[name], seed=0, generate=False) for name in ("lora", "joint"))
    assert lora["prequential"]["losses"] != joint["prequential"]["losses"]
    assert lora["matrix"][-1] != joint["matrix"][-1]
    assert lora["generated"] is None


def test_frozen_forgets_and_learns_nothing(suite: Suite) -> None:
    """Every row says the same of a task, and no prequential loss was measured."""
    result = run(suite, "frozen", METHODS["frozen"], seed=0, generate=False)
    for row in result["matrix"]:
        assert all(known == result["matrix"][-1][task] for task, known in row.items())
    assert (result["AF"], result["BWT"], result["prequential"]["mean"]) == (0.0, 0.0, None)


def test_a_seed_repeats_itself(suite: Suite) -> None:
    """Every figure that is not a time or a memory."""
    one, two = (run(suite, "streamlearn", METHODS["streamlearn"], seed=3, generate=False) for _ in range(2))
    for name in ("matrix", "AP", "AF", "prequential", "experts"):
        assert one[name] == two[name]
