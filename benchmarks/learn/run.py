"""A single run: a method learns a suite and is evaluated along the way. The result is one JSON object."""

import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.daemon import QuietObserver, without_http
from benchmarks.data import to_lines
from benchmarks.learn.baselines import BaselineContext, batches
from benchmarks.learn.methods import Arm, Method, Profile, own_values, read_arm
from benchmarks.learn.scores import Metric, Reference, normalized_mutual_information, score_answer
from benchmarks.learn.suites import Suite, shortened
from streamlearn.adapters.context import Slot
from streamlearn.adapters.presets import activated_parameters, objective
from streamlearn.backbone.load import Backbone, load, outline
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.daemon.model import Model, adapter_of
from streamlearn.daemon.process import versions
from streamlearn.learner.evaluate import prompt_of, reference_of, run_to_end, score
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner, Step
from streamlearn.regimes.report import ShiftReport
from streamlearn.settings import BackboneSettings, ServeSettings, Settings, StreamSettings, with_defaults
from streamlearn.shift.features import input_of
from streamlearn.shift.monitor import AssignedBatch
from streamlearn.status import Status
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Batch, Example

FORMAT = 3
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
PACK_TOKENS = 4096
MAX_NEW_TOKENS = 96
"""Maximum tokens of a free answer; fewer for a task whose training answers are all shorter."""
CHOICE_TOKENS = 4
"""The same where only the first letter of the answer counts."""
ANSWER_BATCHES: Mapping[str, tuple[int, int]] = {"cpu": (64, 16384), "cuda": (512, 65536)}
"""By type of device: maximum prompts that are answered together, and their tokens with answers and padding.

The cache of SmolLM2-135M takes 23 kB a token in bfloat16: 1.5 GB for 65536.
"""

SlotsOf = Callable[[str, Sequence[Example]], Sequence[Slot] | None]
"""Maps a task's scored records to what adapts them; None: no regime bias."""


@dataclass(frozen=True)
class TaskAnswers:
    """Free answers to a task's scored records."""

    metric: Metric
    scores: tuple[float, ...]
    """Score of each answer, in [0, 1]."""
    texts: tuple[str, ...]


class Evaluator:
    """A suite's scored records, decoded once, and the ways to score a learner on them."""

    def __init__(self, suite: Suite, decoder: Decoder) -> None:
        self._suite = suite
        self._decoder = decoder
        self.tests: Mapping[str, Sequence[Example]] = {
            task: [decoder.decode_value(record) for record in own.scored] for task, own in suite.tasks.items()
        }
        self._limits = {task: self._limit(task) for task in suite.tasks}

    def evaluate(self, learner: Learner, tasks: Iterable[str], slots_of: SlotsOf) -> dict[str, dict[str, Any]]:
        """Return token accuracy, loss in nats per answer token, and answer tokens of each task, teacher-forced.

        On a stream that nobody cut also nats and tokens of each record.
        """
        results: dict[str, dict[str, Any]] = {}
        for task in tasks:
            examples = self.tests[task]
            slots = slots_of(task, examples)
            scores = run_to_end(score(learner.model, examples, learner.device, pack_tokens=PACK_TOKENS, slots=slots))
            tokens = sum(one.tokens for one in scores)
            results[task] = {
                "accuracy": sum(one.correct for one in scores) / tokens,
                "loss": sum(one.loss_sum for one in scores) / tokens,
                "tokens": tokens,
            }
            if self._suite.uncut:
                results[task]["records"] = [[round(one.loss_sum, 4), one.tokens] for one in scores]
        return results

    def answer(self, learner: Learner, tasks: Iterable[str], slots_of: SlotsOf) -> dict[str, TaskAnswers]:
        """Decode and score free answers, in batches across tasks."""
        chosen = list(tasks)
        examples = [example for task in chosen for example in self.tests[task]]
        slots = [slots_of(task, self.tests[task]) for task in chosen]
        assert all(own is None for own in slots) or None not in slots, "all tasks have slots, or none has"
        max_prompts, max_tokens = ANSWER_BATCHES[learner.device.type]
        outputs = run_to_end(
            decode(
                learner.model,
                [prompt_of(example) for example in examples],
                [self._limits[task] for task in chosen for _ in self.tests[task]],
                self._decoder.stop,
                learner.device,
                None if None in slots else [slot for own in slots for slot in own or ()],
                max_prompts=max_prompts,
                max_tokens=max_tokens,
            )
        )
        texts = iter([self._decoder.text(output).strip() for output in outputs])
        return {task: self._scored(task, tuple(islice(texts, len(self.tests[task])))) for task in chosen}

    def _scored(self, task: str, texts: tuple[str, ...]) -> TaskAnswers:
        own = self._suite.tasks[task]
        pairs = zip(texts, own.references, strict=True)
        return TaskAnswers(own.metric, tuple(score_answer(own.metric, *pair) for pair in pairs), texts)

    def _limit(self, task: str) -> int:
        """The tokens of the longest training answer with its end, or the maximum for its metric."""
        own = self._suite.tasks[task]
        longest = max(len(reference_of(self._decoder.decode_value(record))) for record in own.train)
        return min(CHOICE_TOKENS if own.metric == "choice" else MAX_NEW_TOKENS, longest)


class Recorder:
    """Losses and tokens of every step, scores after every segment, and free answers after a task's last segment."""

    def __init__(self, suite: Suite, evaluator: Evaluator, *, answer_after: bool = True) -> None:
        """Build a recorder; without `answer_after` answers are decoded only at the end of the stream."""
        self.suite = suite
        self.evaluator = evaluator
        self._answer_after = answer_after and suite.answered and not suite.only_at_end
        self.matrix: list[dict[str, dict[str, Any]]] = []
        """Teacher-forced scores by task, one row per segment."""
        self.answers_after: dict[str, TaskAnswers] = {}
        """Free answers to the tasks of the stream, each after its last segment; empty without `answer_after`."""
        self.answers_end: dict[str, TaskAnswers] = {}
        """Free answers to all tasks at the end of the stream; empty for a suite that is not answered."""
        self.losses: list[float] = []
        """Prequential loss of each record, nats per answer token."""
        self.tokens = 0
        self.evaluation_s = 0.0

    def record(self, step: Step) -> None:
        """Record a training step."""
        self.losses += step.record_losses
        self.tokens += step.tokens

    def evaluate(self, learner: Learner, slots_of: SlotsOf) -> None:
        """Evaluate the learner at the end of the next segment."""
        started = time.monotonic()
        number = len(self.matrix)
        self.matrix.append(self.evaluator.evaluate(learner, self.suite.evaluated_after(number), slots_of))
        ended = [task for task, end in self.suite.ends.items() if end == number]
        if number == len(self.suite.segments) - 1 and self.suite.answered:
            self.answers_end = self.evaluator.answer(learner, self.suite.tasks, slots_of)
            self._keep(ended, self.answers_end)
        elif self._answer_after:
            self._keep(ended, self.evaluator.answer(learner, ended, slots_of))
        self.evaluation_s += time.monotonic() - started

    def _keep(self, ended: Iterable[str], answers: dict[str, TaskAnswers]) -> None:
        if self._answer_after:
            self.answers_after |= {task: answers[task] for task in ended if task in answers}


@dataclass(frozen=True)
class Trained:
    """A trained model and the measurements taken while it was trained."""

    recorder: Recorder
    model: Model
    detection: dict[str, Any] | None = None
    """Detected boundaries; None for a method that is given them."""


def train_in_daemon(suite: Suite, settings: Settings) -> Trained:
    """Run the daemon, which is given no boundaries, and evaluate it at the end of each segment."""
    components = Components(settings)
    recorder = Recorder(suite, Evaluator(suite, components.decoder))
    observer = SegmentObserver(recorder, components)
    daemon = RegimeRecorder(components, *without_http(), observer=observer)
    daemon.run()
    while len(recorder.matrix) < len(suite.segments):
        recorder.evaluate(components.learner, observer.slots_of)
    components.close()
    shifts = [
        {"shift": {key: getattr(report.shift, key) for key in ("kind", "known", "declared_at", "onset")}}
        for report in observer.reports
    ]
    detection = {
        "shifts": shifts,
        "probe_seconds": components.adaptation.probe_seconds,
        "regimes": daemon.regimes,
        "nmi": normalized_mutual_information(daemon.regimes, suite.record_tasks),
    }
    return Trained(recorder, components.model, detection)


class RegimeRecorder(Daemon):
    """Daemon that keeps the number of the regime in which each record was trained on, in stream order."""

    regimes: list[int]

    def run(self) -> None:
        self.regimes = []
        super().run()

    def learn(self, assigned: AssignedBatch) -> Step | None:
        self.regimes += [self.adaptation.by_slot[slot].number for slot in assigned.slots]
        return super().learn(assigned)


class SegmentObserver(QuietObserver):
    """Observer of the daemon that evaluates the learner after the last record of each segment."""

    def __init__(self, recorder: Recorder, components: Components) -> None:
        self.reports: list[ShiftReport] = []
        self._recorder = recorder
        self._components = components
        suite = recorder.suite
        self._ends = [*suite.boundaries, sum(len(segment.records) for segment in suite.segments)]

    def slots_of(self, task: str, examples: Sequence[Example]) -> Sequence[Slot]:
        """Assign each test record the regime nearest to its input, as the daemon does for HTTP requests."""
        del task
        return self._components.adaptation.slots_of([input_of(example) for example in examples])

    def on_shift(self, report: ShiftReport) -> None:
        self.reports.append(report)

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Record the step; a batch across a boundary counts towards the earlier segment.

        The last segment is evaluated after the run, when the final batches have been trained on.
        """
        del batch, status
        recorder = self._recorder
        recorder.record(step)
        done = self._components.adaptation.state.records
        while len(recorder.matrix) < len(self._ends) - 1 and done >= self._ends[len(recorder.matrix)]:
            recorder.evaluate(self._components.learner, self.slots_of)


def train_baseline(suite: Suite, method: Method, arm: Arm) -> Trained:
    """Train on one segment after another and evaluate after each; of several passes, in the last one only."""
    settings = arm.settings
    model = Model(settings, outline(settings.backbone), adapter_of(settings), None, settings.state / "offloaded")
    recorder = Recorder(suite, Evaluator(suite, model.decoder), answer_after=method.trained and not method.shuffled)
    slots, slot_of_task = suite.regime_slots()
    records = method.passes * sum(len(segment.records) for segment in suite.segments)
    baseline = method.build(BaselineContext(model.learner, settings, slots, records, model.adaptation, arm.options))
    stream = suite.with_sample_types(settings.learner) if objective(settings).localized_balance else suite

    def slots_of(task: str, examples: Sequence[Example]) -> list[int] | None:
        return [slot_of_task.get(task, 0)] * len(examples) if method.oracle_regimes else None

    for number in range(method.passes):
        seed = settings.seed if number == 0 else f"{settings.seed} {number}"
        segments = stream.shuffled(seed) if method.shuffled else stream.segments
        for place, segment in enumerate(segments):
            if method.trained:
                examples = [model.decoder.decode_value(record) for record in segment.records]
                baseline.begin(place, examples)
                for batch in batches(examples, settings.stream):
                    step = baseline.step(batch)
                    recorder.record(step if number == 0 else replace(step, record_losses=()))  # first: prequential
                baseline.end(place, examples)
            if number == method.passes - 1:
                recorder.evaluate(model.learner, slots_of)
    return Trained(recorder, model)


def run_method(
    suite: Suite,
    name: str,
    method: Method,
    seed: int,
    profile: Profile,
    backbone_folder: Path | None = None,
    own: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train and evaluate a method, and return all results of the run under the method's `name`.

    Args:
        suite: The stream and the scored records.
        name: Of the method; the profile's settings for it apply.
        method: What to train.
        seed: Seed of the run.
        profile: Settings for the backbone.
        backbone_folder: Folder of the model; None: the suite's own, else the model that the profile names.
        own: Settings that override all others, by dotted key.
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
            "last_records": {task: number for number, task in enumerate(suite.record_tasks, 1)},
            "times": _times(suite) if suite.uncut else None,
            "shuffled": method.shuffled,
            "config": arm.settings.model_dump(mode="json", exclude=NOT_IN_RESULTS),
            "options": dict(arm.options),
            "versions": {**versions(), "python": platform.python_version(), "commit": code_commit()},
        }
        if method.blind:
            return {**about, **_blind(suite, _decoder(backbone, arm.settings.stream))}
        del backbone
        stream.write_bytes(to_lines(record for segment in suite.segments for record in segment.records))
        return {**about, **_trained(suite, method, arm)}


def _times(suite: Suite) -> dict[str, Any]:
    """Unix times of the records of the stream, and of the scored ones of each task."""

    def of(records: Iterable[Mapping[str, Any]]) -> list[int]:
        return [record["meta"]["time"] for record in records]

    stream = (record for segment in suite.segments for record in segment.records)
    return {"stream": of(stream), "scored": {task: of(own.scored) for task, own in suite.tasks.items()}}


def _resolved(settings: Settings) -> Settings:
    """The settings with the values that depend on others, as the daemon fills them in; every method gets them."""
    is_vision = outline(settings.backbone).is_vision
    return with_defaults(settings, is_vision=is_vision, per_regime=adapter_of(settings).per_regime)


def _decoder(backbone: Backbone, settings: StreamSettings) -> Decoder:
    return Decoder(
        backbone.tokenizer, settings, backbone.vocab_size, vision=backbone.vision, template=backbone.template
    )


def _trained(suite: Suite, method: Method, arm: Arm) -> dict[str, Any]:
    started = time.monotonic()
    in_daemon = method.baseline is None
    trained = train_in_daemon(suite, arm.settings) if in_daemon else train_baseline(suite, method, arm)
    recorder, model = trained.recorder, trained.model
    seconds = time.monotonic() - started - recorder.evaluation_s
    after = recorder.answers_after
    if not method.trained:  # nothing has changed since
        after = {task: answers for task, answers in recorder.answers_end.items() if task not in suite.unseen}
    linears = outline(arm.settings.backbone).linears
    stored = [part for bank in model.learner.banks for part in (bank.A, bank.B, bank.router) if part is not None]
    device = model.learner.device
    on_gpu = device.type == "cuda"
    peak = (
        torch.cuda.max_memory_allocated(device) if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    )
    return {
        "answers": _answers(recorder.answers_end, {} if method.shuffled else after),
        "teacher": recorder.matrix,
        "record_losses": [round(loss, 4) for loss in recorder.losses],
        "detection": trained.detection,
        "activated_parameters": activated_parameters(adapter_of(arm.settings), linears),
        "stored_parameters": sum(part.numel() for part in stored),
        "seconds": seconds,
        "tokens_per_s": recorder.tokens / seconds if recorder.tokens else None,
        "peak_memory_mib": peak / 2**20,
        "device": f"cuda: {torch.cuda.get_device_name(device)}" if on_gpu else device.type,
        "dtype": model.backbone.arithmetic.name,
    }


def _answers(end: Mapping[str, TaskAnswers], after: Mapping[str, TaskAnswers]) -> dict[str, Any]:
    return {
        task: {
            "metric": answers.metric,
            "after": [*after[task].scores] if task in after else None,
            "end": [*answers.scores],
            "texts_after": [*after[task].texts] if task in after else None,
            "texts": [*answers.texts],
        }
        for task, answers in end.items()
    }


def _blind(suite: Suite, decoder: Decoder) -> dict[str, Any]:
    """The best that can be done without reading the input, a floor under every score: see below."""
    answers = blind_answers(suite)
    seen = {task: own for task, own in answers.items() if task not in suite.unseen}
    known = {task: {"accuracy": blind_accuracy(suite, decoder, task), "loss": None} for task in suite.tasks}
    rows = [suite.evaluated_after(number) for number in range(len(suite.segments))]
    return {
        "answers": _answers(answers, seen),
        "teacher": [{task: known[task] for task in row} for row in rows],
        "record_losses": [],
        "detection": None,
        "activated_parameters": 0,
        "stored_parameters": 0,
        "seconds": 0.0,
        **dict.fromkeys(("tokens_per_s", "peak_memory_mib", "device", "dtype")),
    }


def blind_answers(suite: Suite) -> dict[str, TaskAnswers]:
    """Answer each task with the one training answer that has the highest mean score against the other ones.

    For labels this is the most frequent one. An unseen task is answered from its own training records, which no learner
    receives.
    """
    answers = {}
    for task, own in suite.tasks.items():
        best = best_answer(own.metric, own.train_references)
        scores = tuple(score_answer(own.metric, best, reference) for reference in own.references)
        answers[task] = TaskAnswers(own.metric, scores, (best,) * len(scores))
    return answers


def best_answer(metric: Metric, train: Sequence[Reference]) -> str:
    """Return the training answer with the highest mean score against the other ones; of equal ones the first."""
    if len(train) == 1:
        return train[0].answers[0]

    def mean_score(i: int) -> float:
        return fmean(score_answer(metric, train[i].answers[0], other) for j, other in enumerate(train) if j != i)

    first = {reference.answers[0]: i for i, reference in reversed(list(enumerate(train)))}
    return train[max(sorted(first.values()), key=mean_score)].answers[0]


def blind_accuracy(suite: Suite, decoder: Decoder, task: str) -> float:
    """Return the share of answer tokens of a task's scored records that a table of its training answers predicts.

    The table maps answer position and previous answer token to the most frequent next token; after a token that it
    lacks, it predicts the most frequent one at that position.
    """
    table: dict[tuple[int, int | None], Counter[int]] = defaultdict(Counter)
    for record in suite.tasks[task].train:
        for position, previous, token in _steps(reference_of(decoder.decode_value(record))):
            table[position, previous][token] += 1
            table[position, None][token] += 1
    hits = []
    for record in suite.tasks[task].scored:
        for position, previous, token in _steps(reference_of(decoder.decode_value(record))):
            counts = table.get((position, previous)) or table.get((position, None))
            hits.append(counts is not None and counts.most_common(1)[0][0] == token)
    return fmean(hits)


def _steps(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Position, previous token (-1 before the first) and token."""
    return zip(range(len(ids)), [-1, *ids], ids, strict=False)


def code_commit() -> str | None:
    """The commit of the checkout that this code runs from, or that of `COMMIT_VARIABLE`."""
    git = shutil.which("git")
    if git is not None:
        root = Path(__file__).parents[2]
        head = subprocess.run([git, "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        if head.returncode == 0:
            return head.stdout.strip()
    return os.environ.get(COMMIT_VARIABLE)
