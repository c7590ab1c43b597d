"""Whole runs on a tiny backbone: every method is evaluated after the right segments on the right tasks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from benchmarks.learn import run as module
from benchmarks.learn.methods import METHODS, Profile
from benchmarks.learn.run import (
    Evaluator,
    SegmentObserver,
    best_answer,
    blind_answers,
    run_method,
)
from benchmarks.learn.scores import stream_scores
from benchmarks.learn.suites import Draw, Json, Suite, TaskSegment, sequential
from streamlearn.learner.evaluate import prompt_of, run_to_end
from streamlearn.learner.generate import decode
from tests.benchmarks.learn.kit import LetterDecoder, record, references, task_of
from tests.learners import MakeLearner

TASKS = ("fox", "dog", "cat")
UNSEEN = "owl"
RECORDS = 12
SCORED = 4
ROWS = [["fox", "dog"], ["dog", "cat"], ["fox", "dog", "cat", "owl"]]


@pytest.fixture
def suite(write_tasks: Callable[..., Path]) -> Suite:
    folder = write_tasks(*TASKS, UNSEEN)
    return sequential("three", Draw([folder], RECORDS, SCORED), TASKS, [UNSEEN])


SHOWN = ("streamlearn", "lora", "joint", "o-lora", "cp-moe", "blind")
"""One of each kind; the others with --run-long, or whatever selects `long`."""


@pytest.mark.parametrize(
    "name", [name if name in SHOWN else pytest.param(name, marks=pytest.mark.long) for name in METHODS]
)
def test_every_method_gives_all_results(suite: Suite, tiny_profile: Profile, name: str) -> None:
    """Tasks are scored where the format says; every record is trained on once; the result is JSON."""
    method = METHODS[name]
    result = run_method(suite, name, method, 0, tiny_profile)
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
    assert set(result["answers"]) == {*TASKS, UNSEEN}


def date(records: Sequence[Json]) -> None:
    """Give them times, one a second."""
    for second, one in enumerate(records):
        one["meta"]["time"] = second


@pytest.mark.parametrize("name", ["streamlearn", "lora-per-task", "er", "joint"])
def test_a_mixture_may_be_scored_by_its_losses_only(suite: Suite, tiny_profile: Profile, name: str) -> None:
    """Tasks are mixed in two segments and scored after each; no answer is decoded."""
    rows = [row for records in zip(*(segment.records for segment in suite.segments), strict=True) for row in records]
    for records in (rows, *(suite.tasks[task].scored for task in TASKS)):
        date(records)
    halves = (tuple(rows[:18]), tuple(rows[18:]))
    segments = tuple(TaskSegment(TASKS, half) for half in halves)
    tasks = {task: suite.tasks[task] for task in TASKS}
    uncut = Suite("uncut", segments, tasks, uncut=True, answered=False)
    result = run_method(uncut, name, METHODS[name], 0, tiny_profile)
    assert [list(row) for row in result["teacher"]] == [list(TASKS)] * 2
    assert result["answers"] == {}
    assert result["last_records"] == {"fox": 34, "dog": 35, "cat": 36}
    assert result["times"] == {"stream": [*range(36)], "scored": {task: [*range(SCORED)] for task in TASKS}}
    for own in result["teacher"][-1].values():
        nats, tokens = map(sum, zip(*own["records"], strict=True))
        assert (len(own["records"]), tokens) == (SCORED, own["tokens"])
        assert nats / tokens == pytest.approx(own["loss"], abs=1e-4)
    found = stream_scores(result)
    assert found["loss"] is not None
    if name == "streamlearn":
        assert len(result["detection"]["regimes"]) == len(rows)
        assert 0 <= result["detection"]["nmi"] <= 1
        assert found["regimes"] == len(set(result["detection"]["regimes"]))


def test_a_batch_across_a_boundary_ends_the_earlier_segment() -> None:
    """The last segment is left to the end of the run; one batch may end two segments."""
    suite = Suite("three", tuple(TaskSegment((task,), ({},) * 4) for task in ("a", "b", "c")), {})
    adaptation = SimpleNamespace(state=SimpleNamespace(records=0))
    components: Any = SimpleNamespace(adaptation=adaptation, learner=None)
    matrix: list[int] = []
    recorder: Any = SimpleNamespace(
        suite=suite, matrix=matrix, record=lambda _: None, evaluate=lambda *_: matrix.append(adaptation.state.records)
    )
    observer = SegmentObserver(recorder, components)
    ignored: Any = None
    for records in (3, 5, 12):
        adaptation.state.records = records
        observer.on_step(ignored, ignored, ignored)
    assert matrix == [5, 12]


LETTERS = Suite(
    "two",
    (),
    {
        "s": task_of([record("$", "!!!"), record("$", "!")], [record(prompt, "!") for prompt in ("%", "$&$&", "&&&")]),
        "t": task_of([record("$", "!" * 200)], [record(prompt, "!!") for prompt in ("&$%%%%%%", "$")], "rouge_l"),
    },
)
"""Letters whose code points are in the tiny backbone's vocabulary."""


@pytest.mark.parametrize("tokens", [10, 10_000])
def test_answers_are_those_decoded_one_by_one(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Batches mix tasks; a task's training answers set its limit."""
    monkeypatch.setitem(module.ANSWER_BATCHES, "cpu", (4, tokens))
    learner = make_learner(preset="streamlearn")
    evaluator = Evaluator(LETTERS, LetterDecoder())
    slots = {"s": [0, 1, 0], "t": [1, 0]}
    answers = evaluator.answer(learner, ["t", "s"], lambda task, _: slots[task])
    limits = {"s": 3, "t": module.MAX_NEW_TOKENS}
    for task, own in answers.items():
        assert len(own.scores) == len(slots[task])
        for text, example, slot in zip(own.texts, evaluator.tests[task], slots[task], strict=True):
            prompts = [prompt_of(example)]
            ids = decode(learner.model, prompts, [limits[task]], LetterDecoder().stop, learner.device, [slot])
            assert text == LetterDecoder().text(run_to_end(ids)[0]).strip()


def test_the_blind_answer_is_the_most_frequent_label_or_the_nearest_text() -> None:
    """By the task's metric; of equally frequent ones the first. It is chosen from training answers only."""
    assert best_answer("exact_match", references("a", "b", "b", "c")) == "b"
    assert best_answer("exact_match", references("a", "b", "b", "a")) == "a"
    assert best_answer("rouge_l", references("x y", "the cat sat", "the cat ran", "the cat sat down")) == "the cat sat"
    train = [record("?", answer) for answer in ("yes", "yes", "yes", "no", "no", "yes")]
    suite = Suite("s", (), {"t": task_of(train, [record("?", answer) for answer in ("no", "no", "yes")])})
    answers = blind_answers(suite)["t"]
    assert (answers.scores, answers.texts) == ((0.0, 0.0, 1.0), ("yes",) * 3)
