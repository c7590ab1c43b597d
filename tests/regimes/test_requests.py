"""Requests to a daemon that learned two tasks of the bundled sample: of one of them, and of the third."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from streamlearn import codec
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.jobs.queue import EvalJob, EvalResult, GenerateJob, GenerateResult, Job, PromptInput, RouteJob
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.regimes.regime import RegimesState
from streamlearn.settings import Settings
from streamlearn.shift.features import input_of
from streamlearn.status import Requested, UnknownRegimeError
from tests.daemon.test_daemon import daemon_of, opened

SAMPLE = Path(__file__).parents[2] / "configs" / "sample"
TRAINED = ("task639", "task1729")
UNKNOWN = "task002"
PER_TASK = 72
MAX_LINE = 1000
"""Of a record in the stream, characters: short records are learned faster."""


def lines(split: str, task: str) -> list[bytes]:
    """Those of the unknown task are longer."""
    with gzip.open(SAMPLE / f"superni.{split}.jsonl.gz") as file:
        found = [line for line in file if orjson.loads(line)["meta"]["task"].startswith(f"{task}_")]
    return [line for line in found if len(line) < MAX_LINE or task == UNKNOWN]


def requests(task: str, number: int) -> tuple[dict[str, Any], ...]:
    """Test records."""
    return tuple(orjson.loads(line) for line in lines("test", task)[:number])


@dataclass
class Trained:
    """A daemon at the end of its stream, and the settings to open it again."""

    settings: Settings
    daemon: Daemon
    components: Components

    def result(self, job: Job) -> Any:
        """Of a job, as the loop serves it."""
        future = self.daemon.job_runner._jobs.submit(job)
        self.daemon.job_runner.serve(1e9)
        return future.result(0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("requests")
    (folder / "stream.jsonl").write_bytes(
        b"".join(line for task in TRAINED for line in lines("train", task)[:PER_TASK])
    )
    settings = Settings.model_validate(
        {
            "state": folder / "state",
            "source": {"jsonl": {"path": folder / "stream.jsonl"}},
            "stream": {"max_tokens": 1024, "batch_tokens": 1024, "batch_records": 8},
            "backbone": {"dtype": "float32", "device": "cpu"},
            "learner": {"lr": 1e-3},
            "probe": {"warmup_tokens": 512, "similarity_tokens": 256},
            "holdout": {"every_records": 10},
        }
    )
    with opened(settings) as components:
        daemon = daemon_of(components)
        daemon.run()
        daemon.score_all()
        yield Trained(settings, daemon, components)


def test_a_learned_task_is_known_and_another_is_not(trained: Trained) -> None:
    """By the prompts alone."""
    prompts = {
        task: tuple(PromptInput(value["prompt"], None) for value in requests(task, 18)) for task in (*TRAINED, UNKNOWN)
    }
    for number, task in enumerate(TRAINED, start=1):
        routes = trained.result(RouteJob(prompts[task])).routes
        assert sum(route.known and route.regime == number for route in routes) >= len(routes) - 1
        assert {route.answered_by for route in routes if route.known} == {"regime"}
    routes = trained.result(RouteJob(prompts[UNKNOWN])).routes
    assert sum(not route.known for route in routes) >= len(routes) - 1
    assert max(route.score for route in routes if not route.known) < trained.settings.serve.max_known_rejected


@pytest.mark.parametrize("setting", ["mean", "nearest", "backbone"])
def test_the_unknown_is_answered_as_set(trained: Trained, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The untouched backbone's loss and text, bit for bit; or those of the nearest regime, or of the mean of all."""
    monkeypatch.setattr(trained.components.adaptation.fallback, "_setting", setting)
    [value] = requests(UNKNOWN, 1)
    job = EvalJob((value,), generate=True, max_new_tokens=4)
    result: EvalResult = trained.result(job)
    [row] = result.per_example
    assert (result.num_known, result.num_unknown) == (0, 1)
    with trained.components.learner.model.disable_adapter():
        frozen: EvalResult = trained.result(job)
    if setting == "backbone":
        assert result.answered_by == {"backbone": 1}
        assert (result.loss, row.output) == (frozen.loss, frozen.per_example[0].output)
    else:
        assert result.answered_by == {"regime" if setting == "nearest" else "mean": 1}
        assert result.loss != frozen.loss
    if setting == "mean":
        learner, example = trained.components.learner, trained.components.decoder.decode_value(value)
        [scored] = run_to_end(score(learner.model, [example], learner.device, pack_tokens=1024, slots=[(0, 1)]))
        assert result.loss == pytest.approx(scored.loss_sum / scored.tokens)


def test_known_and_unknown_are_answered_in_one_request(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as it would be alone."""
    monkeypatch.setattr(trained.components.adaptation.fallback, "_setting", "backbone")
    known = [requests(task, 2)[1] for task in TRAINED]
    values = (known[0], *requests(UNKNOWN, 1), known[1])
    together: EvalResult = trained.result(EvalJob(values, generate=True, max_new_tokens=4))
    assert together.answered_by == {"regime": 2, "backbone": 1}
    for value, row in zip(values, together.per_example, strict=True):
        [alone] = trained.result(EvalJob((value,), generate=True, max_new_tokens=4)).per_example
        assert (row.route, row.output) == (alone.route, alone.output)
        assert row.loss == pytest.approx(alone.loss, rel=1e-4)


def test_a_request_chooses_what_answers(trained: Trained) -> None:
    """A regime by its number, with its own score; or the backbone, whose text is bit-equal to the frozen one."""
    value = requests(TRAINED[1], 2)[1]

    def ask(requested: Requested) -> GenerateResult:
        result = trained.result(GenerateJob(value["prompt"], None, max_new_tokens=24, requested=requested))
        assert isinstance(result, GenerateResult)
        return result

    routed, own, other, backbone = (ask(requested) for requested in ("routed", 2, 1, "backbone"))
    assert (routed.route.regime, routed.route.answered_by) == (2, "regime")
    assert (own.route, own.text) == (routed.route, routed.text)
    assert (other.route.regime, other.route.answered_by, other.route.known) == (1, "regime", False)
    assert other.route.score < own.route.score
    assert backbone.route == replace(routed.route, answered_by="backbone")
    with trained.components.learner.model.disable_adapter():
        assert ask("routed").text == backbone.text
    assert len({routed.text, other.text, backbone.text}) == 3
    with pytest.raises(UnknownRegimeError, match=r"regime 7 cannot answer, expected one of 1, 2"):
        ask(7)


def test_a_restarted_daemon_answers_alike(trained: Trained) -> None:
    """Profiles, exemplars and the measured losses are part of the state."""
    components = trained.components
    adaptation = components.adaptation
    values = (*requests(UNKNOWN, 4), *requests(TRAINED[0], 4))
    inputs = [input_of(components.decoder.decode_value(value)) for value in values]
    expected, status = adaptation.route(inputs), adaptation.fallback.status
    saved = codec.dump(adaptation.save())
    adaptation.restore(RegimesState())
    assert adaptation.fallback.status.regimes == 0
    adaptation.restore(codec.load(RegimesState, *saved))
    assert (adaptation.route(inputs), adaptation.fallback.status) == (expected, status)
