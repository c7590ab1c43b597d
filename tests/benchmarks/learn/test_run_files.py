"""Reading runs, and refusing those that cannot be compared."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.learn.methods import ABLATIONS, METHODS
from benchmarks.learn.run_files import base_of, read_runs
from streamlearn.errors import UsageError
from tests.benchmarks.learn.runs import a_run, write


def test_runs_are_ordered_by_method_and_seed(tmp_path: Path) -> None:
    """The answer that ignores the input and the untrained backbone come first, ablations last."""
    runs = [
        a_run("heads 2"),
        a_run("lora", 1),
        a_run("lora", 0),
        a_run("frozen"),
        a_run("streamlearn"),
        a_run("blind"),
    ]
    found = read_runs(write(tmp_path, *runs))["two"]
    names = [(run["method"], run["seed"]) for run in found]
    trained = [("streamlearn", 0), ("lora", 0), ("lora", 1)]
    assert names == [("blind", 0), ("frozen", 0), *trained, ("heads 2", 0)]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected runs SUITE/METHOD\.SEED\.json, found none"):
        read_runs(tmp_path)


@pytest.mark.parametrize("found", [1, None])
def test_runs_of_another_format_are_refused(tmp_path: Path, found: int | None) -> None:
    """The message names the file and both formats."""
    run = {**a_run("lora"), "format": found}
    with pytest.raises(UsageError, match=rf"lora\.0\.json: expected a run of format 2, found {found}"):
        read_runs(write(tmp_path, run))


def test_runs_without_free_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lora\.0\.json: expected scores of free answers, found none"):
        read_runs(write(tmp_path, a_run("lora", answers={})))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("split", {"split": "development"}),
        ("backbone", {"backbone": {"model": "tiny-model", "digest": "d2"}}),
        ("profile", {"profile": "other"}),
        ("segments", {"segments": [{"tasks": ["a"], "records": 10}, {"tasks": ["b"], "records": 20}]}),
        ("unseen tasks", {"unseen": []}),
        ("dtype", {"dtype": "bfloat16"}),
        ("device", {"device": "cuda: some device"}),
    ],
)
def test_runs_of_one_suite_are_made_under_the_same_conditions(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    """A development run never shares a table with test runs; the message names the condition and two files."""
    write(tmp_path, a_run("lora"), a_run("streamlearn", **changes))
    with pytest.raises(UsageError, match=rf"one suite must be equal in {name}, found .*streamlearn.0.*lora.0.json"):
        read_runs(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"), [("commit", {"versions": {"commit": "fedcba", "torch": "2"}}), ("arm", {"arm": "lora:x=1"})]
)
def test_runs_of_one_method_differ_in_the_seed_only(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """Runs of several commits never share a row; two methods may have different commits."""
    read_runs(write(tmp_path / "methods", a_run("streamlearn"), a_run("lora", **changes)))
    write(tmp_path / "seeds", a_run("lora", 0), a_run("lora", 1, **changes))
    with pytest.raises(UsageError, match=rf"method lora must be equal in {name}, found .*lora\.0\.json.*lora\.1\.json"):
        read_runs(tmp_path / "seeds")


def test_the_answer_that_ignores_the_input_has_no_dtype(tmp_path: Path) -> None:
    """It uses no backbone, hence no device."""
    assert read_runs(write(tmp_path, a_run("blind", dtype=None, device="cpu"), a_run("lora", device="cuda: x")))


def test_a_seed_is_counted_once(tmp_path: Path) -> None:
    write(tmp_path, a_run("lora", 0))
    file = tmp_path / "two" / "lora.0.json"
    (tmp_path / "two" / "lora.copy.json").write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match=r"expected one run of lora with seed 0, found also .*lora\.0\.json"):
        read_runs(tmp_path)


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_is_compared_with_what_it_changes(name: str) -> None:
    """The same preset, trained by the same baseline, on records in the same order."""
    ablation, base = ABLATIONS[name], METHODS[base_of(name)]
    assert ablation.arm.partition(":")[0] == base.arm.partition(":")[0]
    assert (ablation.baseline, ablation.shuffled, ablation.oracle_regimes) == (
        base.baseline,
        base.shuffled,
        base.oracle_regimes,
    )
