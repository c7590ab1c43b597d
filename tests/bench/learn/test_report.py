"""Summaries by hand, and the page that is made of them."""

import io
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from streamlearn.bench.learn.methods import ABLATIONS, METHODS
from streamlearn.bench.learn.report import report
from streamlearn.bench.learn.summary import base_of, spread, summarise
from streamlearn.errors import UsageError


def a_run(method: str, seed: int, *, ap: float = 0.5, first: float = 0.5, **changes: Any) -> dict[str, Any]:
    known = {"accuracy": first, "loss": 1.0}
    return {
        "suite": "two",
        "method": method,
        "arm": method,
        "seed": seed,
        "AP": ap,
        "AF": 0.1,
        "BWT": -0.1,
        "ZST": None,
        "FWT": None,
        "loss": 2.0,
        "generated": {"a": {"exact_match": 0.5}, "b": {"rouge_l": 0.25}},
        "experts": {"n_eff": 4.0, "layer": "up", "share": {"0": [[1.0, 0.0]], "1": [[0.5, 0.5]]}},
        "detection": {"found": 1, "false": 0, "mean_delay_records": 5.0, "shifts": []},
        "prequential": {"bin_records": 20, "losses": [3.0, 2.0], "mean": 2.5},
        "tokens_per_s": 100.0,
        "peak_memory_mib": 1000.0,
        "matrix": [{"a": known, "b": known}, {"a": known, "b": known}],
        "stretches": [{"tasks": ["a"], "records": 20}, {"tasks": ["b"], "records": 20}],
        "unseen": [],
        "tests": {"a": 2, "b": 2},
        "activated_parameters": 10,
        "versions": {"commit": "0123456789abcdef", "torch": "2"},
        "dtype": "float32",
        **changes,
    }


def write(folder: Path, *runs: dict[str, Any]) -> Path:
    for run in runs:
        file = folder / run["suite"] / f"{run['method']}.{run['seed']}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(orjson.dumps(run))
    return folder


def test_spread_counts_what_was_measured() -> None:
    """The sample standard deviation; none of one value, nothing of none."""
    assert spread([1.0, 3.0, None]) == {"mean": 2.0, "sd": pytest.approx(2**0.5), "seeds": 2}
    assert spread([1.0]) == {"mean": 1.0, "sd": None, "seeds": 1}
    assert spread([None]) is None


def test_a_summary_is_by_method_and_knows_forward_transfer_from_frozen() -> None:
    """FWT is accuracy before a task's first record less the frozen backbone's."""
    runs = [a_run("lora", 0, ap=0.4, first=0.75), a_run("lora", 1, ap=0.6, first=0.75), a_run("frozen", 0, first=0.25)]
    methods = summarise(runs)["methods"]
    assert methods["lora"]["AP"] == {"mean": 0.5, "sd": pytest.approx(0.02**0.5), "seeds": 2}
    assert methods["lora"]["FWT"]["mean"] == 0.5
    assert (methods["lora"]["exact_match"]["mean"], methods["lora"]["rouge_l"]["mean"]) == (0.5, 0.25)
    assert "FWT" in summarise(runs[:2])["methods"]["lora"]
    assert summarise(runs[:2])["methods"]["lora"]["FWT"] is None


def test_an_ablation_stands_beside_the_method_on_the_same_records() -> None:
    """Differences are of runs of one seed; a seed that the method lacks gives none."""
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
    assert (ablation.baseline, ablation.shuffled, ablation.given) == (base.baseline, base.shuffled, base.given)


def test_the_table_of_ablations_has_signs(tmp_path: Path) -> None:
    """A table and a picture of their own, where there are any."""
    pytest.importorskip("matplotlib")
    runs = [a_run("streamlearn", 0, ap=0.4), a_run("no bias", 0, ap=0.5), a_run("heads 1", 0, ap=0.25)]
    report(write(tmp_path / "runs", *runs), tmp_path / "out", Console(file=io.StringIO()))
    text = (tmp_path / "out" / "two.md").read_text()
    assert "| no bias | streamlearn | 0.500 | 0.100 | +0.100 | +0.000 |" in text
    assert "| heads 1 | streamlearn | 0.250 | 0.100 | -0.150 | +0.000 |" in text
    assert (tmp_path / "out" / "two-ablations.png").exists()
    assert "<td>+0.100</td>" in (tmp_path / "out" / "index.html").read_text()


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    """Others tests, or no runs at all: the message says which suite and what."""
    with pytest.raises(UsageError, match="holds no runs"):
        report(tmp_path, tmp_path, Console(file=io.StringIO()))
    write(tmp_path, a_run("lora", 0), a_run("lora", 1, tests={"a": 3, "b": 2}))
    with pytest.raises(UsageError, match="differ in tests"):
        report(tmp_path, tmp_path, Console(file=io.StringIO()))


def test_the_report_has_tables_pictures_and_a_page(tmp_path: Path) -> None:
    """The figures of the summary stand in all three."""
    pytest.importorskip("matplotlib")
    runs = write(tmp_path / "runs", a_run("streamlearn", 0), a_run("lora", 0, ap=0.25, experts=None, detection=None))
    out = tmp_path / "out"
    report(runs, out, Console(file=io.StringIO()))
    assert orjson.loads((out / "two.json").read_bytes())["methods"]["lora"]["AP"]["mean"] == 0.25
    assert "| lora | 0.250 |" in (out / "two.md").read_text()
    page = (out / "index.html").read_text()
    assert "<td>0.250</td>" in page
    pictures = {file.name for file in out.glob("*.png")}
    assert pictures == {f"two-{name}.png" for name in ("forgetting", "matrices", "stream", "experts")}
    assert all(f'src="{name}"' in page for name in pictures)
