"""The search for a profile, over runs whose scores are known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import log10
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.learn import search as searching
from benchmarks.learn.job import RunConditions, RunJob
from benchmarks.learn.methods import METHODS
from benchmarks.learn.processes import Outcome, RunFailedError
from benchmarks.learn.profile import read_profile
from benchmarks.learn.search import SEARCHED, SEED, Search, upper_half
from benchmarks.learn.search_table import optima, to_json, to_markdown, write_search
from benchmarks.learn.search_trials import FIRST_LAYER, LITTLE, LR, RATES
from streamlearn.errors import UsageError

Score = Callable[[RunJob], tuple[float, float] | None]
"""AP and loss of a trial; None: its run fails."""
STRENGTH = "baseline.strength"


class FakeRuns:
    """Stands in for `make_runs`: writes what `score` says and collects the runs that it made."""

    def __init__(self, score: Score) -> None:
        self.score = score
        self.made: list[RunJob] = []

    def __call__(self, jobs: Sequence[RunJob]) -> Outcome:
        outcome = Outcome([], [], [])
        for job in jobs:
            if job.file.exists():
                continue
            known = self.score(job)
            if known is None:
                outcome.failed.append(job)
                continue
            self.made.append(job)
            job.file.parent.mkdir(parents=True, exist_ok=True)
            job.file.write_bytes(orjson.dumps(run_of(*known)))
        return outcome


def run_of(ap: float, loss: float) -> dict[str, Any]:
    """A run of two tasks and an unseen one."""
    end = {"a": [ap - 0.1, ap + 0.1], "b": [ap], "unseen": [0.0]}
    return {
        "segments": [{"tasks": ["a"], "records": 2}, {"tasks": ["b"], "records": 2}],
        "answers": {task: {"end": scores} for task, scores in end.items()},
        "teacher": [{}, {"a": {"loss": loss - 1}, "b": {"loss": loss + 1}, "unseen": {"loss": 9.0}}],
        "arm": "lora",
        "versions": {"commit": "c0ffee"},
    }


def near(job: RunJob, wanted: Mapping[str, float]) -> tuple[float, float]:
    """Higher the nearer the values are to the wanted ones, by the logarithm of the ratio, and with a strength."""
    misses = [abs(log10(job.own[key] / value)) for key, value in wanted.items() if key in job.own]
    return 0.6 - 0.005 * sum(misses) + (0.05 if STRENGTH in job.own else 0.0), 2.0


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Search]:
    """Build a search of `lora`, which has no strength, and of `er`, which here has one."""
    methods = {**METHODS, "lora": replace(METHODS["lora"], search=None)}
    methods["er"] = replace(METHODS["er"], search=(STRENGTH, (0.1, 1.0, 10.0, 100.0)))
    monkeypatch.setattr(searching, "METHODS", methods)
    monkeypatch.setattr(Search, "_arm", lambda self, job: "lora")

    def build(runs: Callable[[Sequence[RunJob]], Outcome], **changes: Any) -> Search:
        conditions = RunConditions((tmp_path,), tmp_path / "out", records=40, evaluated=20)
        return Search(
            **{"suite": "trace", "methods": ("lora", "er"), "conditions": conditions, **changes}, make_runs=runs
        )

    return build


def test_every_method_gets_seven_trials_on_development_records(search: Callable[..., Search]) -> None:
    """All have the seed that no result uses, and are scored at the end."""
    runs = FakeRuns(lambda job: near(job, {LR: 1e-3, STRENGTH: 1.0}))
    found = search(runs).run()
    assert {method: len(trials) for method, trials in found.trials.items()} == {"lora": 7, "er": 7}
    conditions = {(job.split, job.seed, job.records, job.evaluated, job.only_at_end) for job in runs.made}
    assert conditions == {("development", SEED, 40, 20, True)}
    assert [trial.own[LR] for trial in found.trials["lora"]] == [*RATES, 5e-4, 7e-4, 1.4e-3, 2e-3]
    assert [trial.own for trial in found.trials["er"][3:]] == [{LR: 1e-3, STRENGTH: s} for s in (0.1, 1, 10, 100)]


def test_the_best_trial_of_each_method_is_chosen(search: Callable[..., Search]) -> None:
    """The profile has its values, and what they were chosen from."""
    runs = FakeRuns(lambda job: near(job, {LR: 1e-3 if job.method == "er" else 1.3e-3, STRENGTH: 100.0}))
    found = search(runs).run()
    assert found.profile.methods == {"lora": {LR: 1.4e-3}, "er": {LR: 1e-3, STRENGTH: 100.0}}
    assert optima(found.trials["lora"]) == {LR: "interior"}
    assert optima(found.trials["er"]) == {LR: "interior", STRENGTH: "interior"}, "a value beyond the grid was tried"
    source = found.profile.source
    expected = ("trace", "development", SEED, 40, 7, ["c0ffee"])
    assert (
        source["suite"],
        source["split"],
        source["seed"],
        source["records_per_task"],
        source["trials_per_method"],
        source["commits"],
    ) == expected


@pytest.mark.parametrize(
    ("wanted", "rates", "strengths", "places"),
    [
        ({LR: 3e-4, STRENGTH: 1.0}, [9e-5], [], ("interior", "interior")),
        ({LR: 1e-3, STRENGTH: 1e-2}, [], [1e-2, 1e-3], ("interior", "interior")),
        ({LR: 1e-3, STRENGTH: 1e9}, [], [1e3, 1e4, 1e5], ("interior", "edge")),
        ({LR: 1e-2, STRENGTH: 1e-1}, [9e-3, 2.7e-2], [1e-2], ("interior", "interior")),
    ],
)
def test_a_search_goes_on_beyond_the_edge_of_a_grid(
    search: Callable[..., Search],
    wanted: dict[str, float],
    rates: list[float],
    strengths: list[float],
    places: tuple[str, str],
) -> None:
    """Until the best value lies between others, or three times."""
    found = search(FakeRuns(lambda job: near(job, wanted))).run()
    further = [trial.own for trial in found.trials["er"][7:]]
    assert sorted({own[LR] for own in further} - {*RATES}) == rates
    assert sorted({own[STRENGTH] for own in further} - {0.1, 1.0, 10.0, 100.0}) == sorted(strengths)
    assert tuple(optima(found.trials["er"]).values()) == places


def test_a_tie_is_decided_by_the_loss(search: Callable[..., Search]) -> None:
    """Free answers may be equal where losses are not."""
    found = search(FakeRuns(lambda job: (0.5, 3.0 if job.own != {LR: 1e-3} else 2.0))).run()
    assert found.profile.methods == {"lora": {LR: 1e-3}, "er": {LR: 1e-3}}
    assert optima(found.trials["er"]) == {LR: "interior", STRENGTH: "default"}


def test_the_default_strength_is_named_by_its_value_if_the_grid_has_it(search: Callable[..., Search]) -> None:
    """Both trials are the same run."""
    found = search(FakeRuns(lambda job: (0.5, 1.0 if job.own.get(STRENGTH, 10.0) == 10.0 else 2.0))).run()
    assert found.profile.methods["er"] == {LR: RATES[0], STRENGTH: 10.0}


def test_the_setup_is_chosen_by_two_methods_for_all(search: Callable[..., Search]) -> None:
    """Its prompts and layers are in the profile and in all trials that follow."""

    def score(job: RunJob) -> tuple[float, float]:
        profile = read_profile(job.profile)
        chat, upper = profile.prompts == "chat", FIRST_LAYER in profile.settings
        return near(job, {LR: 1e-3, STRENGTH: 1.0})[0] - 0.1 * (not chat) - 0.1 * (not upper), 1.0

    runs = FakeRuns(score)
    found = search(runs).run()
    assert (found.profile.prompts, found.profile.settings[FIRST_LAYER]) == ("chat", upper_half("builtin:nano"))
    assert [(job.method, job.label.partition("/")[0]) for job in runs.made[:4]] == [
        ("lora", "plain-all-layers"),
        ("streamlearn", "plain-all-layers"),
        ("lora", f"plain-from-layer-{found.setup.first_layer}"),
        ("streamlearn", f"plain-from-layer-{found.setup.first_layer}"),
    ]
    assert {job.label.partition("/")[0] for job in runs.made[8:]} == {found.setup.name}
    assert len(runs.made) == 8 + 2 * 7 - 1, "lora at the rate of stage 0 is a trial of stage 1"


@pytest.mark.parametrize(("cost", "layer"), [(LITTLE / 2, True), (2 * LITTLE, False)])
def test_adapters_in_the_upper_half_may_cost_a_little(search: Callable[..., Search], cost: float, layer: bool) -> None:
    """They are chosen although all layers are better, unless by more than that."""

    def score(job: RunJob) -> tuple[float, float]:
        return 0.5 - cost * (FIRST_LAYER in read_profile(job.profile).settings), 1.0

    assert (search(FakeRuns(score)).run().setup.first_layer is not None) == layer


def test_a_search_goes_on_where_it_stopped(search: Callable[..., Search]) -> None:
    """A second call makes no run and finds the same."""
    first = search(FakeRuns(lambda job: near(job, {LR: 5e-4}))).run()
    runs = FakeRuns(lambda job: None)
    assert search(runs).run() == first
    assert runs.made == []


def test_trials_from_another_start_are_not_taken(search: Callable[..., Search], tmp_path: Path) -> None:
    """Their folder is refused."""
    search(FakeRuns(lambda job: (0.5, 1.0))).run()
    other = RunConditions((tmp_path,), tmp_path / "out", records=41, evaluated=20)
    with pytest.raises(UsageError, match="holds a search from another start"):
        search(FakeRuns(lambda job: (0.5, 1.0)), conditions=other).run()


def test_trials_of_another_arm_are_not_taken(search: Callable[..., Search], monkeypatch: pytest.MonkeyPatch) -> None:
    """The method was changed since; the message names the files."""
    search(FakeRuns(lambda job: (0.5, 1.0))).run()
    monkeypatch.setattr(Search, "_arm", lambda self, job: "er:rank=2" if job.method == "er" else "lora")
    with pytest.raises(UsageError, match=r"delete the trials of other arms .*\n  .*er\.100\.json: lora, now er:rank=2"):
        search(FakeRuns(lambda job: (0.5, 1.0))).run()


def test_a_failed_trial_is_named_and_never_chosen(search: Callable[..., Search], tmp_path: Path) -> None:
    """The others are made, and the table has the failure."""
    found = search(FakeRuns(lambda job: None if job.own[LR] == 3e-3 else (0.5, 1.0 / job.own[LR]))).run()
    assert {job.method for job in found.failed} == {"lora", "er"}
    assert found.profile.methods["er"][LR] == 1e-3
    write_search(found, tmp_path / "docs/search.md")
    assert "0.003: failed" in (tmp_path / "docs/search.md").read_text()
    written = orjson.loads((tmp_path / "docs/search.json").read_bytes())
    assert written == orjson.loads(orjson.dumps(to_json(found)))
    failed = [trial for trial in written["methods"]["lora"]["trials"] if trial["ap"] is None]
    assert failed == [{"method": "lora", "own": {LR: 3e-3}, "ap": None, "loss": None}]


def test_a_method_whose_trials_all_fail_has_no_values(search: Callable[..., Search]) -> None:
    """The other methods keep theirs."""
    found = search(FakeRuns(lambda job: None if job.method == "er" else (0.5, 1.0))).run()
    assert list(found.profile.methods) == ["lora"]
    assert "| `er` |" in to_markdown(found)


def test_a_search_without_a_setup_ends(search: Callable[..., Search]) -> None:
    """The error lists the failed runs."""
    with pytest.raises(RunFailedError, match="8 of the runs failed"):
        search(FakeRuns(lambda job: None)).run()


def test_trials_of_another_command_end_the_search(search: Callable[..., Search]) -> None:
    """Nothing is chosen from some of the trials."""
    with pytest.raises(UsageError, match="are being made by another command"):
        search(lambda jobs: Outcome([], [], list(jobs))).run()


def test_what_trains_nothing_is_not_searched(search: Callable[..., Search]) -> None:
    """Naming it is an error. Nor is what uses another method's values."""
    assert {"frozen", "blind", "joint-3", "streamlearn-told"}.isdisjoint(SEARCHED)
    assert {METHODS[name].tuned_as for name in ("joint-3", "streamlearn-told")} <= {*SEARCHED}
    with pytest.raises(UsageError, match="--method frozen: unknown"):
        search(FakeRuns(lambda job: (0.5, 1.0)), methods=("frozen",)).run()


def test_the_table_has_a_row_per_method(search: Callable[..., Search]) -> None:
    """Grids, scores, the chosen values in bold, and where the optimum lies."""
    page = to_markdown(search(FakeRuns(lambda job: near(job, {LR: 3e-4, STRENGTH: 1.0}))).run())
    row = next(line for line in page.splitlines() if line.startswith("| `er`"))
    assert "**.650**" in row
    assert "`baseline.strength` 0.1: " in row
    assert "0.003: .595, learner.lr 9e-05, baseline.strength 1: .647 |" in row, "the rate tried beyond the grid"
    assert row.endswith("learner.lr 0.0003, baseline.strength 1 | learner.lr: interior, baseline.strength: interior |")
    assert "on at most 20 development records per task" in page
