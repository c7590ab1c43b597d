"""A single run: a method learns a suite and is evaluated along the way. The result is one JSON object."""

import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from benchmarks.learn.arms import Arm, own_values, read_arm
from benchmarks.learn.baseline_run import train_baseline
from benchmarks.learn.blind import blind_accuracy, blind_answers
from benchmarks.learn.daemon_run import train_in_daemon
from benchmarks.learn.evaluator import TaskAnswers
from benchmarks.learn.methods import Method
from benchmarks.learn.profile import Profile
from benchmarks.learn.run_cost import cost_of, parameters_of
from benchmarks.learn.shorten import shortened
from benchmarks.learn.suite import Suite
from benchmarks.learn.trained_method import Progress, TrainedMethod
from streamlearn.backbone.load import Backbone, load, outline
from streamlearn.daemon.model import adapter_of, versions
from streamlearn.settings import BackboneSettings, ServeSettings, Settings, StreamSettings, with_defaults
from streamlearn.stream.decode import Decoder

FORMAT = 2
"""Version of the result's layout."""
SHARED = {"holdout.every_records": 0}
"""No hold-out: every method trains on every record."""
NOT_IN_RESULTS: Mapping[str, bool | set[str]] = {
    **dict.fromkeys(("state", "source", "log", "dead_letters"), True),
    "serve": {*ServeSettings.model_fields} - {"unknown", "max_known_rejected"},
    "backbone": {"model"},
}
"""Settings that have no effect on a result, and the backbone's folder, which the result names by `backbone`."""
UNLIMITED = StreamSettings(max_tokens=1 << 20, batch_tokens=1 << 20)
"""Settings of a decoder that does not truncate."""
COMMIT_VARIABLE = "STREAMLEARN_COMMIT"
"""Environment variable with the commit of code that runs outside of a checkout."""


def run_method(
    suite: Suite,
    name: str,
    method: Method,
    seed: int,
    profile: Profile,
    backbone_folder: Path | None = None,
    own: Mapping[str, Any] | None = None,
    generate: bool = True,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Train and evaluate a method, and return all figures of the run under the method's `name`.

    Args:
        suite: The stream and the scored records.
        name: Of the method; the profile's settings for it apply.
        method: What to train.
        seed: Seed of the run.
        profile: Settings for the backbone.
        backbone_folder: Folder of the model; None: the suite's own, else the model that the profile names.
        own: Settings that override all others, by dotted key.
        generate: Whether free answers are decoded; without them the run has no `answers`.
        progress: Receives short texts.
    """
    backbone_model = suite.backbone or profile.model(backbone_folder)
    arm_text = method.arm_for(suite, outline(BackboneSettings(model=backbone_model)).linears)
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder) / "stream.jsonl"
        arm = read_arm(
            arm_text,
            profile,
            seed=seed,
            state=Path(folder) / "state",
            stream=stream,
            shared={**SHARED, "backbone.model": backbone_model},
            own={**own_values(method.tuned_as or name, arm_text, profile), **(own or {})},
        )
        arm = replace(arm, settings=_resolved(arm.settings))
        backbone = load(arm.settings.backbone, outline(arm.settings.backbone))
        suite = shortened(suite, _decoder(backbone, UNLIMITED), arm.settings.stream.max_tokens)
        about = {
            "format": FORMAT,
            "suite": suite.name,
            "method": name,
            "seed": seed,
            "split": suite.split,
            "arm": arm_text,
            "backbone": {
                "model": suite.backbone or profile.backbone_name(backbone_folder),
                "digest": backbone.identity["digest"],
            },
            "profile": profile.name,
            "segments": [{"tasks": [*segment.tasks], "records": len(segment.records)} for segment in suite.segments],
            "unseen": [*suite.unseen],
            "shuffled": method.shuffled,
            "config": arm.settings.model_dump(mode="json", exclude=NOT_IN_RESULTS),
            "options": dict(arm.options),
            "versions": {**versions(), "python": platform.python_version(), "commit": _commit()},
        }
        if method.blind:
            return {**about, **_blind(suite, _decoder(backbone, arm.settings.stream), generate=generate)}
        del backbone
        _write_stream(suite, stream)
        return {**about, **_trained(suite if generate else replace(suite, references={}), method, arm, progress)}


def _resolved(settings: Settings) -> Settings:
    """The settings with the values that depend on others, as the daemon fills them in; every method gets them."""
    is_vision = outline(settings.backbone).is_vision
    return with_defaults(settings, is_vision=is_vision, per_regime=adapter_of(settings).per_regime)


def _decoder(backbone: Backbone, settings: StreamSettings) -> Decoder:
    return Decoder(
        backbone.tokenizer, settings, backbone.vocab_size, vision=backbone.vision, template=backbone.template
    )


def _write_stream(suite: Suite, file: Path) -> None:
    records = [record for segment in suite.segments for record in segment.records]
    file.write_bytes(b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records))


def _trained(suite: Suite, method: Method, arm: Arm, progress: Progress) -> dict[str, Any]:
    """Train the method; what it answered, retained, routed, detected and cost."""
    started = time.monotonic()
    if method.baseline is None:
        trained = train_in_daemon(suite, arm.settings, progress)
    else:
        trained = train_baseline(suite, method, arm, progress)
    seconds = time.monotonic() - started - trained.recorder.evaluation_s
    recorder, model = trained.recorder, trained.model
    return {
        "answers": _answers(recorder.answers_end, _answers_after(suite, method, trained)),
        "teacher": [{task: asdict(known) for task, known in row.items()} for row in recorder.matrix],
        "record_losses": [round(loss, 4) for loss in recorder.losses],
        "detection": trained.detection,
        **parameters_of(model, arm.settings),
        **cost_of(model, recorder.tokens, seconds),
        "dtype": model.backbone.arithmetic.name,
    }


def _answers_after(suite: Suite, method: Method, trained: TrainedMethod) -> Mapping[str, TaskAnswers]:
    """Answers right after each task: none where the stream has no tasks in order, the final ones without training."""
    if method.shuffled:
        return {}
    if method.trained:
        return trained.recorder.answers_after
    return {task: found for task, found in trained.recorder.answers_end.items() if task not in suite.unseen}


def _answers(end: Mapping[str, TaskAnswers], after: Mapping[str, TaskAnswers]) -> dict[str, Any]:
    return {
        task: {
            "metric": found.metric,
            "after": [*after[task].scores] if task in after else None,
            "end": [*found.scores],
            "texts": [*found.texts],
        }
        for task, found in end.items()
    }


def _blind(suite: Suite, decoder: Decoder, *, generate: bool) -> dict[str, Any]:
    """The figures of the answers that ignore the input; no model is trained."""
    answers = blind_answers(suite) if generate else {}
    seen = {task: found for task, found in answers.items() if task not in suite.unseen}
    known = {task: {"accuracy": blind_accuracy(suite, decoder, task), "loss": None} for task in suite.tests}
    rows = [suite.evaluated_after(number) for number in range(len(suite.segments))]
    return {
        "answers": _answers(answers, seen),
        "teacher": [{task: known[task] for task in row} for row in rows],
        "record_losses": [],
        "detection": None,
        "activated_parameters": 0,
        "stored_parameters": 0,
        "seconds": 0.0,
        "tokens_per_s": None,
        "peak_memory_mib": None,
        "device": None,
        "dtype": None,
    }


def _commit() -> str | None:
    """The commit of the checkout that this code runs from, or that of `COMMIT_VARIABLE`."""
    git = shutil.which("git")
    if git is not None:
        root = Path(__file__).parents[2]
        head = subprocess.run([git, "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        if head.returncode == 0:
            return head.stdout.strip()
    return os.environ.get(COMMIT_VARIABLE)
