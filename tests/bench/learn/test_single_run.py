"""Whole runs on a tiny backbone: every method is evaluated after the right segments on the right tasks."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from streamlearn.bench.learn.methods import METHODS
from streamlearn.bench.learn.single_run import run_method
from streamlearn.bench.learn.suite import Suite
from streamlearn.bench.learn.suites import Draw, of_folder

TASKS = ("fox", "dog", "cat")
RECORDS = 12

pytestmark = pytest.mark.usefixtures("on_the_tiny_backbone")


@pytest.fixture
def suite(write_tasks: Callable[..., Path]) -> Suite:
    folder = write_tasks(*TASKS)
    return of_folder(folder, Draw([folder], records=RECORDS, tests=4), TASKS)


@pytest.mark.parametrize("name", [*METHODS])
def test_every_method_gives_all_figures(suite: Suite, name: str) -> None:
    """Each segment adds a task to the matrix; every record is trained on once; the result is JSON."""
    result = run_method(suite, name, METHODS[name], seed=0, generate=name == "streamlearn")
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
    """The result with lists in place of tuples."""
    segments = [{**segment, "tasks": list(segment["tasks"])} for segment in result["stretches"]]
    return {"stretches": segments, "unseen": list(result["unseen"])}


def test_joint_is_lora_on_shuffled_records(suite: Suite) -> None:
    """The records come in another order and lead to other weights."""
    lora, joint = (run_method(suite, name, METHODS[name], seed=0, generate=False) for name in ("lora", "joint"))
    assert lora["prequential"]["losses"] != joint["prequential"]["losses"]
    assert lora["matrix"][-1] != joint["matrix"][-1]
    assert lora["generated"] is None


def test_frozen_forgets_and_learns_nothing(suite: Suite) -> None:
    """Every row has the same score of a task, and there is no prequential loss."""
    result = run_method(suite, "frozen", METHODS["frozen"], seed=0, generate=False)
    for row in result["matrix"]:
        assert all(known == result["matrix"][-1][task] for task, known in row.items())
    assert (result["AF"], result["BWT"], result["prequential"]["mean"]) == (0.0, 0.0, None)


def test_a_seed_repeats_itself(suite: Suite) -> None:
    """All figures except time and memory are equal."""
    one, two = (run_method(suite, "streamlearn", METHODS["streamlearn"], seed=3, generate=False) for _ in range(2))
    for name in ("matrix", "AP", "AF", "prequential", "experts"):
        assert one[name] == two[name]
