"""Summaries of runs, calculated by hand."""

import pytest

from streamlearn.bench.learn.methods import ABLATIONS, METHODS
from streamlearn.bench.learn.summary import base_of, spread, summarise
from tests.bench.learn.runs import a_run


def test_spread_counts_what_was_measured() -> None:
    """It has the sample standard deviation, None for one value; without values there is no spread."""
    assert spread([1.0, 3.0, None]) == {"mean": 2.0, "sd": pytest.approx(2**0.5), "seeds": 2}
    assert spread([1.0]) == {"mean": 1.0, "sd": None, "seeds": 1}
    assert spread([None]) is None


def test_a_summary_is_by_method_and_has_forward_transfer_from_frozen() -> None:
    """FWT is accuracy before a task's first record less the frozen backbone's."""
    runs = [a_run("lora", 0, ap=0.4, first=0.75), a_run("lora", 1, ap=0.6, first=0.75), a_run("frozen", 0, first=0.25)]
    methods = summarise(runs)["methods"]
    assert methods["lora"]["AP"] == {"mean": 0.5, "sd": pytest.approx(0.02**0.5), "seeds": 2}
    assert methods["lora"]["FWT"]["mean"] == 0.5
    assert (methods["lora"]["exact_match"]["mean"], methods["lora"]["rouge_l"]["mean"]) == (0.5, 0.25)
    assert "FWT" in summarise(runs[:2])["methods"]["lora"]
    assert summarise(runs[:2])["methods"]["lora"]["FWT"] is None


def test_an_ablation_is_compared_on_the_same_records() -> None:
    """Differences are between runs of one seed; seeds without a run of the method are left out."""
    base = [a_run("mh-moe", 0, ap=0.4), a_run("mh-moe", 1, ap=0.6)]
    changed = [a_run("mh-moe, native gate", 1, ap=0.5), a_run("mh-moe, native gate", 2, ap=0.9)]
    summary = summarise([*base, *changed])
    assert list(summary["methods"]) == ["mh-moe"]
    native = summary["ablations"]["mh-moe, native gate"]
    assert native["of"] == "mh-moe"
    assert native["AP"]["seeds"] == 2
    assert native["differences"]["AP"] == {"mean": pytest.approx(-0.1), "sd": None, "seeds": 1}
    assert native["differences"]["ZST"] is None
    assert summarise(changed)["ablations"]["mh-moe, native gate"]["differences"]["AP"] is None


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
