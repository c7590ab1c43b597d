"""Whole runs on a tiny backbone: every method is evaluated after the right segments on the right tasks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch

from benchmarks.learn import run as module
from benchmarks.learn.methods import METHODS, Method, Profile, read_arm
from benchmarks.learn.run import (
    Evaluator,
    SegmentObserver,
    Trained,
    best_answer,
    blind_accuracy,
    blind_answers,
    run_method,
    train_baseline,
)
from benchmarks.learn.scores import scores
from benchmarks.learn.suites import Draw, Suite, TaskSegment, sequential
from streamlearn.backbone.load import outline
from streamlearn.learner.evaluate import prompt_of, run_to_end
from streamlearn.learner.generate import decode
from streamlearn.settings import BackboneSettings
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


@pytest.mark.parametrize("name", [*METHODS])
def test_every_method_gives_all_results(suite: Suite, tiny_profile: Profile, name: str) -> None:
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
    """All results except time and memory are equal."""
    one, two = (run_method(suite, "streamlearn", METHODS["streamlearn"], 3, tiny_profile) for _ in range(2))
    for name in ("teacher", "answers", "record_losses"):
        assert one[name] == two[name]


def train(method: str | Method, profile: Profile, folder: Path) -> Trained:
    """Train a method on four short segments of three tasks, given the boundaries."""
    method = METHODS[method] if isinstance(method, str) else method
    rows = {task: tuple(record(f"{task} {i}?", f" {task}") for i in range(6)) for task in ("a", "b", "c")}
    segments = tuple(TaskSegment((task,), rows[task]) for task in ("a", "b", "a", "c"))
    suite = Suite("tiny", segments, {task: task_of(own, own[:2]) for task, own in rows.items()})
    shared = {"holdout.every_records": 0, "backbone.model": profile.backbone}
    text = method.arm_for(suite, outline(BackboneSettings(model=profile.backbone)).linears)
    arm = read_arm(text, profile, seed=0, state=folder, stream=folder, shared=shared)
    return train_baseline(suite, method, arm, lambda _: None, generate=False)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.baseline])
def test_every_baseline_learns_a_suite(name: str, tiny_profile: Profile, tmp_path: Path) -> None:
    """Each record's loss is recorded once, each segment evaluated once; weights move, if the method is trained."""
    trained = train(name, tiny_profile, tmp_path)
    assert len(trained.recorder.matrix) == 4
    assert len(trained.recorder.losses) == (24 if METHODS[name].trained else 0)
    assert any(bool(bank.B.detach().any()) for bank in trained.model.learner.banks) == METHODS[name].trained
    assert all(bool(torch.isfinite(part).all()) for part in trained.model.learner.optimizer.parameters())


def test_three_passes_train_three_times_as_many_tokens(tiny_profile: Profile, tmp_path: Path) -> None:
    """And end at a rate near zero: the schedule spans all passes."""
    one, three = (train(name, tiny_profile, tmp_path) for name in ("joint", "joint-3"))
    assert three.recorder.tokens == 3 * one.recorder.tokens
    assert three.recorder.losses != one.recorder.losses  # the same order of records at a higher rate
    for trained in (one, three):
        assert 0 < trained.model.learner.optimizer.groups[0].lr_scale < 0.1


def test_lora_per_task_gives_each_task_its_own_adapter(tiny_profile: Profile, tmp_path: Path) -> None:
    """A task that returns has its earlier one; none starts from another's."""
    trained = train("lora-per-task", tiny_profile, tmp_path)
    assert sorted({bank.adapter for bank in trained.model.learner.banks}) == ["regime0", "regime1", "regime2"]
    assert all(bool(bank.B.any()) for bank in trained.model.learner.banks)


def test_importance_anchors_one_lora_at_shifts(tiny_profile: Profile, tmp_path: Path) -> None:
    """Entering a regime adds a penalty to every parameter of the single expert, without a probe."""
    method = replace(METHODS["importance"], baseline=METHODS["lora-per-task"].baseline)
    learner = train(method, tiny_profile, tmp_path).model.learner
    assert all(set(group.holds) == {"A", "B"} for group in learner.optimizer.groups)


def test_a_batch_across_a_boundary_ends_the_earlier_segment() -> None:
    """The last segment is left to the end of the run; one batch may end two segments."""
    suite = Suite("three", tuple(TaskSegment((task,), ({},) * 4) for task in ("a", "b", "c")), {})
    adaptation = SimpleNamespace(records=0)
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
    evaluator = Evaluator(LETTERS, LetterDecoder(), generate=True)
    slots = {"s": [0, 1, 0], "t": [1, 0]}
    answers = evaluator.answer(learner, ["t", "s"], lambda task, _: slots[task])
    limits = {"s": 3, "t": module.MAX_NEW_TOKENS}
    for task, own in answers.items():
        assert len(own.scores) == len(slots[task])
        for text, example, slot in zip(own.texts, evaluator.tests[task], slots[task], strict=True):
            prompts = [prompt_of(example)]
            ids = decode(learner.model, prompts, [limits[task]], LetterDecoder().stop, learner.device, [slot])
            assert text == LetterDecoder().text(run_to_end(ids)[0]).strip()


def test_teacher_forced_scores_are_means_over_answer_tokens(make_learner: MakeLearner) -> None:
    """Accuracy is a share, loss is near that of a uniform guess."""
    evaluator = Evaluator(LETTERS, LetterDecoder(), generate=False)
    found = evaluator.evaluate(make_learner(preset="lora"), ["s"], lambda *_: None)["s"]
    assert 0 <= found["accuracy"] <= 1
    assert found["loss"] > 1


def test_the_blind_answer_is_the_most_frequent_label_or_the_nearest_text() -> None:
    """By the task's metric; of equally frequent ones the first. It is chosen from training answers only."""
    assert best_answer("exact_match", references("a", "b", "b", "c")) == "b"
    assert best_answer("exact_match", references("a", "b", "b", "a")) == "a"
    assert best_answer("rouge_l", references("x y", "the cat sat", "the cat ran", "the cat sat down")) == "the cat sat"
    train = [record("?", answer) for answer in ("yes", "yes", "yes", "no", "no", "yes")]
    suite = Suite("s", (), {"t": task_of(train, [record("?", answer) for answer in ("no", "no", "yes")])})
    answers = blind_answers(suite)["t"]
    assert (answers.scores, answers.texts) == ((0.0, 0.0, 1.0), ("yes",) * 3)


def test_the_table_of_tokens_knows_position_and_previous_token() -> None:
    """ab, ab and cd give a first, b after a, d after c; after an unknown e the second letter is b."""
    own = task_of([record("?", a) for a in ("ab", "ab", "cd")], [record("?", a) for a in ("ab", "cd", "eb")])
    assert blind_accuracy(Suite("s", (), {"t": own}), LetterDecoder(), "t") == pytest.approx((2 + 1 + 1) / 6)
