"""Whole runs on a tiny backbone: every method is evaluated after the right segments on the right tasks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from benchmarks.learn import single_run
from benchmarks.learn.methods import METHODS
from benchmarks.learn.profile import Profile
from benchmarks.learn.scores import scores
from benchmarks.learn.single_run import run_method
from benchmarks.learn.splits import Draw
from benchmarks.learn.suite import Suite
from benchmarks.learn.suites import sequential

TASKS = ("fox", "dog", "cat")
UNSEEN = "owl"
RECORDS = 12
SCORED = 4
ROWS = [["fox", "dog"], ["dog", "cat"], ["fox", "dog", "cat", "owl"]]


@pytest.fixture
def suite(write_tasks: Callable[..., Path]) -> Suite:
    folder = write_tasks(*TASKS, UNSEEN)
    return sequential("three", Draw([folder], RECORDS, SCORED), TASKS, [UNSEEN])


@pytest.mark.parametrize("name", [*METHODS])
def test_every_method_gives_all_figures(suite: Suite, tiny_profile: Profile, name: str) -> None:
    """Tasks are scored where the format says; every record is trained on once; the result is JSON."""
    method = METHODS[name]
    result = run_method(
        suite, name, method, 0, tiny_profile, generate=name in ("streamlearn", "joint", "frozen", "blind")
    )
    assert [list(row) for row in result["teacher"]] == ROWS
    if method.trained and name != "joint-3":
        assert len(result["record_losses"]) == len(TASKS) * RECORDS
    assert (result["detection"] is None) == (method.baseline is not None)
    assert result["stored_parameters"] >= result["activated_parameters"]
    assert orjson.loads(orjson.dumps(result)) == result
    assert "model" not in result["config"]["backbone"], "a folder is this machine's"
    for task, answers in result["answers"].items():
        assert len(answers["end"]) == len(answers["texts"]) == SCORED
        assert (answers["after"] is None) == (task == UNSEEN or method.shuffled)
        assert answers["metric"] == "exact_match"
    assert set(result["answers"]) in (set(), {*TASKS, UNSEEN})


def test_settings_come_from_profile_and_search(suite: Suite, tiny_profile: Profile) -> None:
    """The search's settings override the profile's; the result says what was used."""
    changed = replace(tiny_profile, name="mine", methods={"lora": {"learner.lr": 0.25}})
    one = run_method(suite, "lora", METHODS["lora"], 0, changed, generate=False)
    two = run_method(suite, "lora", METHODS["lora"], 0, changed, own={"learner.lr": 0.5}, generate=False)
    assert (one["config"]["learner"]["lr"], two["config"]["learner"]["lr"]) == (0.25, 0.5)
    assert (one["profile"], one["split"], one["device"]) == ("mine", "test", "cpu")
    assert one["answers"] == {}
    told = replace(tiny_profile, methods={"joint": {"learner.lr": 0.125}, "lora": {"learner.lr": 0.25}})
    three = run_method(suite, "joint-3", METHODS["joint-3"], 0, told, generate=False)
    assert three["config"]["learner"]["lr"] == 0.125


def test_frozen_forgets_and_learns_nothing(suite: Suite, tiny_profile: Profile) -> None:
    """Answers after a task are those of the end, and there is no prequential loss."""
    result = run_method(suite, "frozen", METHODS["frozen"], 0, tiny_profile)
    for task in TASKS:
        assert result["answers"][task]["after"] == result["answers"][task]["end"]
    found = scores(result, result)
    assert (found.AF, found.BWT, found.FWT, found.prequential_loss) == (0.0, 0.0, 0.0, None)


def test_blind_knows_a_task_with_one_answer(suite: Suite, tiny_profile: Profile) -> None:
    """It has every answer right, token by token too."""
    result = run_method(suite, "blind", METHODS["blind"], 0, tiny_profile)
    found = scores(result)
    assert (found.AP, found.LA, found.ZST, found.token_AP, found.token_loss) == (1.0, 1.0, 1.0, 1.0, None)


def test_a_seed_repeats_itself(suite: Suite, tiny_profile: Profile) -> None:
    """All figures except time and memory are equal."""
    one, two = (run_method(suite, "streamlearn", METHODS["streamlearn"], 3, tiny_profile) for _ in range(2))
    for name in ("teacher", "answers", "record_losses"):
        assert one[name] == two[name]


def test_the_commit_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git the environment variable names it."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.delenv(single_run.COMMIT_VARIABLE, raising=False)
    assert single_run._commit() is None
    monkeypatch.setenv(single_run.COMMIT_VARIABLE, "abc")
    assert single_run._commit() == "abc"
