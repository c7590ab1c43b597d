"""A single run: a method learns a suite and is evaluated along the way. The result is one JSON object."""

import platform
import resource
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from streamlearn.adapters.check import activated_parameters
from streamlearn.backbone.load import outline
from streamlearn.bench.learn.arms import read_arm
from streamlearn.bench.learn.baseline_run import train_baseline
from streamlearn.bench.learn.daemon_run import train_in_daemon
from streamlearn.bench.learn.methods import Method
from streamlearn.bench.learn.profile import read_profile
from streamlearn.bench.learn.recorder import RunRecorder
from streamlearn.bench.learn.scores import Scores, scores
from streamlearn.bench.learn.suite import Suite
from streamlearn.bench.learn.trained_method import Progress, TrainedMethod
from streamlearn.runtime.model import adapter_of, versions
from streamlearn.settings import Settings

SHARED = {"holdout.every_records": 0}
"""No hold-out: every method trains on every record."""
BIN = 20
"""Records per point of the prequential loss."""


def run_method(
    suite: Suite,
    name: str,
    method: Method,
    seed: int,
    generate: bool = True,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Train and evaluate a method, and return all figures of the run under the method's `name`.

    `generate` adds the scores of generated answers, which are slow to compute.
    """
    arm = method.arm_for(suite)
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(suite, arm, seed, Path(folder))
        started = time.monotonic()
        train = train_in_daemon if method.baseline is None else train_baseline
        trained = train(suite, method, settings, progress)
        seconds = time.monotonic() - started - trained.recorder.evaluation_s
    return {
        "suite": suite.name,
        "method": name,
        "arm": arm,
        "seed": seed,
        **_quality(suite, trained, generate=generate),
        **_cost(trained.recorder, seconds),
        **_conditions(suite, trained, settings),
    }


def _settings(suite: Suite, arm: str, seed: int, folder: Path) -> Settings:
    """Write the stream to the folder and return the settings that read it."""
    stream = folder / "stream.jsonl"
    records = [record for segment in suite.segments for record in segment.records]
    stream.write_bytes(b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records))
    shared = {**SHARED, **({} if suite.backbone == "builtin:nano" else {"backbone.model": suite.backbone})}
    return read_arm(arm, read_profile("nano"), seed=seed, state=folder / "state", stream=stream, shared=shared).settings


def _quality(suite: Suite, trained: TrainedMethod, *, generate: bool) -> dict[str, Any]:
    """What the method retained, generated, routed and detected."""
    recorder, model, slots_of = trained.recorder, trained.model, trained.slots_of
    tasks = [task for task in suite.tests if task not in suite.unseen]
    similarity = model.adaptation.consolidator.similarity
    return {
        **asdict(_scores(suite, recorder)),
        "loss": sum(recorder.matrix[-1][task].loss for task in tasks) / len(tasks),
        "generated": recorder.evaluator.generate(model.learner, tasks, slots_of) if generate else None,
        "experts": recorder.evaluator.expert_usage(model.learner, similarity, slots_of),
        "detection": trained.detection,
        "prequential": binned(recorder.losses),
    }


def _scores(suite: Suite, recorder: RunRecorder) -> Scores:
    matrix = [{task: known.accuracy for task, known in row.items()} for row in recorder.matrix]
    return scores(matrix, [segment.tasks for segment in suite.segments], unseen=suite.unseen)


def _cost(recorder: RunRecorder, seconds: float) -> dict[str, Any]:
    return {
        "tokens_per_s": recorder.tokens / seconds if recorder.tokens else None,
        "seconds": seconds,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _conditions(suite: Suite, trained: TrainedMethod, settings: Settings) -> dict[str, Any]:
    """The accuracy matrix, the stream, and the versions and settings; `stretches` is the key of the segments."""
    return {
        "matrix": [{task: asdict(known) for task, known in row.items()} for row in trained.recorder.matrix],
        "stretches": [{"tasks": segment.tasks, "records": len(segment.records)} for segment in suite.segments],
        "unseen": suite.unseen,
        "tests": {task: len(tests) for task, tests in suite.tests.items()},
        "activated_parameters": activated_parameters(adapter_of(settings), outline(settings.backbone).linears),
        "config": settings.model_dump(mode="json", exclude={"state", "source", "serve", "log", "dead_letters"}),
        "versions": {**versions(), "python": platform.python_version(), "commit": _commit()},
        "dtype": trained.model.backbone.arithmetic.name,
    }


def binned(losses: Sequence[float]) -> dict[str, Any]:
    """Return the mean loss of every `BIN` records and of all; the mean is None when nothing was trained on."""
    bins = [losses[i : i + BIN] for i in range(0, len(losses), BIN)]
    means = [round(sum(each) / len(each), 4) for each in bins]
    return {"bin_records": BIN, "losses": means, "mean": sum(losses) / len(losses) if losses else None}


def _commit() -> str | None:
    """The commit of the checkout that this code runs from; None outside of a checkout."""
    root = Path(__file__).parents[3]
    git = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S603, S607
    return git.stdout.strip() or None
