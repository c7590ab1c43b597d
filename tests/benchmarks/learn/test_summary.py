"""Summaries of runs, calculated by hand."""

import pytest

from benchmarks.learn.summary import spread, summarise
from tests.benchmarks.learn.runs import AFTER, a_run

RIGHT = {"a": [1, 1, 1, 1], "b": [1, 1, 1, 1], "c": [1, 1, 0, 0]}
WRONG = {"a": [0] * 4, "b": [0] * 4, "c": [0] * 4}


def test_spread_counts_what_was_measured() -> None:
    """It has the sample standard deviation, None for one value; without values there is no spread."""
    assert spread([1.0, 3.0, None]) == {"mean": 2.0, "sd": pytest.approx(2**0.5), "seeds": 2}
    assert spread([1.0]) == {"mean": 1.0, "sd": None, "seeds": 1}
    assert spread([None]) is None


def test_a_summary_has_figures_intervals_and_differences_by_method() -> None:
    """Means over seeds; differences from streamlearn on common seeds; skill between blind and the ceiling."""
    runs = [
        a_run("blind", end=WRONG),
        a_run("frozen"),
        a_run("streamlearn", 0),
        a_run("streamlearn", 1, end=RIGHT),
        a_run("lora", 1, end=WRONG),
        a_run("joint", end=RIGHT, shuffled=True),
    ]
    summary = summarise(runs)
    methods = summary["methods"]
    default = methods["streamlearn"]
    assert default["figures"]["AP"] == {"mean": 0.75, "sd": pytest.approx(0.125**0.5), "seeds": 2}
    assert default["intervals"]["AP"]["value"] == 0.75
    assert summary["skill_scale"] == {"ceiling": "joint", "undefined": None}
    assert default["skill"] == pytest.approx(0.75)
    assert default["zero_shot_gain"]["value"] == pytest.approx((0.0 + 0.375) / 2)
    assert default["differences"]["AP"] is None
    assert (methods["lora"]["differences"]["AP"]["value"], methods["lora"]["differences"]["AP"]["seeds"]) == (-1.0, 1)
    assert methods["joint"]["figures"]["BWT"] is None
    assert methods["joint"]["differences"]["BWT"] is None


def test_forward_transfer_needs_the_untrained_backbone() -> None:
    """It is token accuracy before a task's first record, less that of `frozen`."""
    teacher = [{task: {"accuracy": 0.75, "loss": 1.0} for task in "abc"}] * 2
    runs = [a_run("lora", teacher=teacher), a_run("frozen")]
    assert summarise(runs)["methods"]["lora"]["figures"]["FWT"]["mean"] == 0.25
    assert summarise(runs[:1])["methods"]["lora"]["figures"]["FWT"] is None


def test_an_ablation_is_compared_with_the_method_that_it_changes() -> None:
    """On the seeds that both have."""
    runs = [a_run("streamlearn", 0), a_run("streamlearn", 1, end=WRONG), a_run("heads 2", 1, end=RIGHT)]
    summary = summarise(runs)
    assert list(summary["methods"]) == ["streamlearn"]
    changed = summary["ablations"]["heads 2"]
    assert changed["of"] == "streamlearn"
    assert (changed["differences"]["AP"]["value"], changed["differences"]["AP"]["seeds"]) == (1.0, 1)
    alone = summarise(runs[2:])["ablations"]["heads 2"]
    assert alone["differences"]["AP"] is None


def test_scores_by_task_are_of_selected_methods() -> None:
    """Right after the segment and at the end, with the interval of the latter; no course for untrained methods."""
    runs = [a_run("blind"), a_run("streamlearn"), a_run("ewc"), a_run("joint", shuffled=True)]
    tasks = summarise(runs)["tasks"]
    assert list(tasks) == ["a", "b", "c"]
    assert [tasks[task]["unseen"] for task in tasks] == [False, False, True]
    a = tasks["a"]
    assert (a["metric"], a["records"], list(a["methods"])) == ("exact_match", 4, ["blind", "joint", "streamlearn"])
    assert {name: scores["after"] for name, scores in a["methods"].items()} == {
        "blind": None, "joint": None, "streamlearn": sum(AFTER["a"]) / 4,
    }  # fmt: skip
    assert a["methods"]["streamlearn"]["end"] == 0.25
    assert tasks["c"]["methods"]["streamlearn"]["after"] is None
