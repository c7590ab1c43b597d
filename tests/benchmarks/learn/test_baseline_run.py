"""Whole runs of baselines on the tiny backbone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch

from benchmarks.learn.arms import read_arm
from benchmarks.learn.baseline_run import train_baseline
from benchmarks.learn.daemon_run import train_in_daemon
from benchmarks.learn.methods import METHODS, Method
from benchmarks.learn.profile import Profile
from benchmarks.learn.suite import Metric, Reference, Suite, TaskSegment
from benchmarks.learn.trained_method import TrainedMethod
from streamlearn.backbone.load import outline
from streamlearn.baselines import consolidate
from streamlearn.baselines.balance_stages import LocalizedBalance
from streamlearn.learner.loss import PackedBatch
from streamlearn.settings import BackboneSettings
from tests.learners import hooks_of

TASKS = ("fox", "dog", "fox", "cat")
RECORDS = 9


def suite() -> Suite:
    """Four short segments of three tasks."""
    train = {
        task: tuple(
            {"prompt": f"{task} {i}?", "completion": f" {task}", "meta": {"task": task}} for i in range(RECORDS)
        )
        for task in dict.fromkeys(TASKS)
    }
    references = {task: tuple(Reference((f" {task}",)) for _ in records) for task, records in train.items()}
    segments = tuple(TaskSegment((task,), train[task]) for task in TASKS)
    tests = {task: records[:2] for task, records in train.items()}
    metrics: dict[str, Metric] = dict.fromkeys(train, "exact_match")
    return Suite("tiny", segments, tests, train=train, train_references=references, metrics=metrics)


def run(method: str | Method, profile: Profile, folder: Path) -> TrainedMethod:
    """Train a method on the suite, given the boundaries."""
    method = METHODS[method] if isinstance(method, str) else method
    shared = {"holdout.every_records": 0, "backbone.model": profile.backbone}
    text = method.arm_for(suite(), outline(BackboneSettings(model=profile.backbone)).linears)
    arm = read_arm(text, profile, seed=0, state=folder, stream=folder, shared=shared)
    return train_baseline(suite(), method, arm, lambda _: None)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.baseline])
def test_every_baseline_learns_a_suite(name: str, tiny_profile: Profile, tmp_path: Path) -> None:
    """Each record's loss is recorded once, each segment evaluated once; weights move, if the method is trained."""
    trained = run(name, tiny_profile, tmp_path)
    assert len(trained.recorder.matrix) == len(TASKS)
    assert len(trained.recorder.losses) == (RECORDS * len(TASKS) if METHODS[name].trained else 0)
    moved = any(bool(bank.B.detach().any()) for bank in trained.model.learner.banks)
    assert moved == METHODS[name].trained
    assert all(bool(torch.isfinite(each).all()) for each in trained.model.learner.optimizer.parameters())


def test_three_passes_train_three_times_as_many_tokens(tiny_profile: Profile, tmp_path: Path) -> None:
    """And end at a rate near zero: the schedule spans all passes."""
    one, three = (run(name, tiny_profile, tmp_path) for name in ("joint", "joint-3"))
    assert three.recorder.tokens == 3 * one.recorder.tokens
    assert three.recorder.losses != one.recorder.losses  # the same order of records at a higher rate
    for trained in (one, three):
        assert 0 < trained.model.learner.optimizer.groups[0].lr_scale < 0.1


def test_lora_per_task_gives_each_task_an_adapter_of_its_own(tiny_profile: Profile, tmp_path: Path) -> None:
    """A task that returns has its earlier one; none starts from another's."""
    trained = run("lora-per-task", tiny_profile, tmp_path)
    assert sorted({bank.adapter for bank in trained.model.learner.banks}) == ["regime0", "regime1", "regime2"]
    assert all(bool(bank.B.any()) for bank in trained.model.learner.banks)
    assert all(report.started_from is None for report in trained.model.adaptation.state.reports)


def test_importance_anchors_one_lora_at_shifts(tiny_profile: Profile, tmp_path: Path) -> None:
    """Entering a regime adds a penalty to every parameter of the single expert, without a probe."""
    method = replace(METHODS["importance"], baseline=METHODS["lora-per-task"].baseline)
    learner = run(method, tiny_profile, tmp_path).model.learner
    assert all(bool(omega.any()) for omega in hooks_of(learner).importance().values())
    assert all(set(group.holds) == {"A", "B"} for group in learner.optimizer.groups)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.baseline])
def test_methods_without_boundaries_run_in_the_daemon(name: str, tiny_profile: Profile, tmp_path: Path) -> None:
    """Every record is trained on once, in order."""
    linears = outline(BackboneSettings(model=tiny_profile.backbone)).linears
    stream = tmp_path / "stream.jsonl"
    records = [record for segment in suite().segments for record in segment.records]
    stream.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    shared = {"holdout.every_records": 0, "backbone.model": tiny_profile.backbone}
    text = METHODS[name].arm_for(suite(), linears)
    arm = read_arm(text, tiny_profile, seed=0, state=tmp_path / "state", stream=stream, shared=shared)
    trained = train_in_daemon(suite(), arm.settings, lambda _: None)
    assert len(trained.recorder.losses) == len(records)
    assert any(bool(bank.B.detach().any()) for bank in trained.model.learner.banks)


def test_loramoe_trains_with_both_types(tiny_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples reach the learner with the type of their task."""
    found: set[str | None] = set()

    class Spy(LocalizedBalance):
        def __init__(self, strength: float, packed: PackedBatch, types: Sequence[str | None], names: tuple[str, str]):
            found.update(types)
            super().__init__(strength, packed, types, names)

    monkeypatch.setattr(consolidate, "LocalizedBalance", Spy)
    run("loramoe", tiny_profile, tmp_path)
    assert found == {"label"}  # every task has a single answer
