"""One run: a method learns a suite's stream and is examined on the way. The result is one JSON object."""

import platform
import random
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from streamlearn.adaptation.adaptation import Adaptation, ShiftReport
from streamlearn.adapters.check import activated_parameters
from streamlearn.backbone.load import outline
from streamlearn.bench.learn.arms import settings_of
from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.bench.learn.detection import detection
from streamlearn.bench.learn.examine import Examiner, Known, SlotsOf
from streamlearn.bench.learn.methods import Method, Setting
from streamlearn.bench.learn.scores import scores
from streamlearn.bench.learn.suites import Json, Stretch, Suite
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.learner import Learner, Step
from streamlearn.runtime.components import Components
from streamlearn.runtime.daemon import Daemon
from streamlearn.runtime.model import Model, adapter_of, versions
from streamlearn.settings import Settings, StreamSettings
from streamlearn.shift.featurizer import input_of
from streamlearn.snapshot.snapshot import SnapshotInfo
from streamlearn.status.board import Board, Clock
from streamlearn.status.status import Phase, Status
from streamlearn.stream.batch import Batch, Batcher
from streamlearn.stream.decode import Example
from streamlearn.stream.record import Record, TopicPartition

SHARED = {"holdout.every_records": 0}
"""Every method trains on every record."""


class Notes:
    """What is measured during a run."""

    def __init__(self, suite: Suite, examiner: Examiner, progress: Callable[[str], None]) -> None:
        self.suite = suite
        self._progress = progress
        self.matrix: list[dict[str, Known]] = []
        self.losses: list[float] = []
        """Prequential, nats per token of the answer, record by record."""
        self.correct: list[bool] = []
        self.tokens = 0
        self.examining_s = 0.0
        self._examiner = examiner

    def took(self, step: Step) -> None:
        """A step was made."""
        self.losses += step.record_losses
        self.correct += step.record_correct
        self.tokens += step.tokens

    def examine(self, learner: Learner, slots_of: SlotsOf) -> None:
        """The next stretch is over."""
        started = time.monotonic()
        tasks = self.suite.examined(len(self.matrix))
        self.matrix.append(self._examiner.examine(learner, tasks, slots_of))
        self._progress(f"stretch {len(self.matrix)} of {len(self.suite.stretches)} done")
        self.examining_s += time.monotonic() - started


def run(
    suite: Suite,
    name: str,
    method: Method,
    seed: int,
    generate: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Learn, examine, and put the figures together; `progress` hears where it is."""
    arm = method.arm_for(suite)
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder) / "stream.jsonl"
        rows = [record for stretch in suite.stretches for record in stretch.records]
        stream.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
        shared = {**SHARED, **({} if suite.backbone == "builtin:nano" else {"backbone.model": suite.backbone})}
        settings = settings_of(arm, seed=seed, state=Path(folder) / "state", stream=stream, shared=shared)
        started = time.monotonic()
        through = _through_the_daemon if method.baseline is None else _told
        notes, model, slots_of, found = through(suite, method, settings, progress)
        seconds = time.monotonic() - started - notes.examining_s
    examiner = Examiner(suite, model.decoder)
    matrix = [{task: known.accuracy for task, known in row.items()} for row in notes.matrix]
    figures = scores(matrix, [stretch.tasks for stretch in suite.stretches], unseen=suite.unseen)
    trained = [task for task in suite.tests if task not in suite.unseen]
    return {
        "suite": suite.name,
        "method": name,
        "arm": arm,
        "seed": seed,
        **asdict(figures),
        "loss": sum(notes.matrix[-1][task].loss for task in trained) / len(trained),
        "generated": examiner.generate(model.learner, trained, slots_of) if generate else None,
        "experts": examiner.use_of_experts(model.learner, model.adaptation.consolidator.similarity, slots_of),
        "detection": found,
        "prequential": _binned(notes.losses),
        "tokens_per_s": notes.tokens / seconds if notes.tokens else None,
        "seconds": seconds,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "matrix": [{task: asdict(known) for task, known in row.items()} for row in notes.matrix],
        "stretches": [{"tasks": stretch.tasks, "records": len(stretch.records)} for stretch in suite.stretches],
        "unseen": suite.unseen,
        "tests": {task: len(tests) for task, tests in suite.tests.items()},
        "activated_parameters": activated_parameters(adapter_of(settings), outline(settings.backbone).linears),
        "config": settings.model_dump(mode="json", exclude={"state", "source", "serve", "log", "dead_letters"}),
        "versions": {**versions(), "python": platform.python_version(), "commit": _commit()},
        "dtype": model.backbone.arithmetic.name,
    }


_Outcome = tuple[Notes, Model, SlotsOf, dict[str, Any] | None]


def _through_the_daemon(suite: Suite, method: Method, settings: Settings, progress: Callable[[str], None]) -> _Outcome:
    """The daemon itself, in this process."""
    components = Components(settings)
    if method.variant is not None:
        method.variant(components)
    slots_of = nearest(components.adaptation) if method.steered_eval else _no_slots
    watch = _Watch(Notes(suite, Examiner(suite, components.decoder), progress), components, slots_of)
    Daemon(components, Board(Status(Phase.STARTING), Clock()), JobQueue(1), observer=watch).run()
    while len(watch.notes.matrix) < len(suite.stretches):
        watch.notes.examine(components.learner, slots_of)
    components.close()
    declared = [entry.shift.declared_at for entry in watch.entries if entry.shift.kind == "inputs"]
    found = {
        **detection(declared, suite.boundaries),
        "shifts": [entry.to_json() for entry in watch.entries],
        "probe_seconds": components.adaptation.probe_seconds,
    }
    return watch.notes, components.model, slots_of, found


def _told(suite: Suite, method: Method, settings: Settings, progress: Callable[[str], None]) -> _Outcome:
    """Stretch by stretch."""
    assert method.baseline is not None
    model = Model(settings, outline(settings.backbone), adapter_of(settings), None)
    notes = Notes(suite, Examiner(suite, model.decoder), progress)
    slots, slot_of_task = _regimes(suite)
    baseline = method.baseline(Setting(model, settings, slots))

    def slots_of(task: str, examples: Sequence[Example]) -> list[int] | None:
        return [slot_of_task.get(task, 0)] * len(examples) if method.given else None

    for number, stretch in enumerate(_shuffled(suite, settings.seed) if method.shuffled else suite.stretches):
        examples = [model.decoder.decode_value(record) for record in stretch.records]
        if method.trained:
            _learn(baseline, number, examples, settings.stream, notes)
        notes.examine(model.learner, slots_of)
    return notes, model, slots_of, None


def _learn(
    baseline: Baseline, number: int, examples: Sequence[Example], settings: StreamSettings, notes: Notes
) -> None:
    baseline.begin(number, examples)
    for batch in batches(examples, settings):
        notes.took(baseline.step(batch))
    baseline.end(number, examples)


def nearest(adaptation: Adaptation) -> SlotsOf:
    """Each record's own nearest regime: what a request to the daemon gets."""
    return lambda _, examples: adaptation.slots_of([input_of(example) for example in examples])


def _no_slots(task: str, examples: Sequence[Example]) -> None:
    del task, examples


def batches(examples: Sequence[Example], settings: StreamSettings) -> Iterator[Sequence[Example]]:
    """The batches that the daemon would make of them."""
    batcher, origin = Batcher(settings), TopicPartition("stretch", 0)
    for offset, example in enumerate(examples):
        for batch in batcher.add(Record(origin, offset, None), example):
            yield batch.examples
    for batch in batcher.flush():
        yield batch.examples


def _regimes(suite: Suite) -> tuple[list[int], dict[str, int]]:
    """A slot for each stretch, the same for the same tasks, and each task's newest slot."""
    known: dict[tuple[str, ...], int] = {}
    slots = [known.setdefault(stretch.tasks, len(known)) for stretch in suite.stretches]
    by_task = {task: slot for stretch, slot in zip(suite.stretches, slots, strict=True) for task in stretch.tasks}
    return slots, by_task


def _shuffled(suite: Suite, seed: int) -> Iterator[Stretch]:
    """The same number of stretches, each of records of all tasks."""
    rows: list[Json] = [record for stretch in suite.stretches for record in stretch.records]
    random.Random(f"joint {seed}").shuffle(rows)
    for stretch in suite.stretches:
        share, rows = rows[: len(stretch.records)], rows[len(stretch.records) :]
        yield replace(stretch, records=tuple(share))


class _Watch:
    """Observes the daemon and, when the last record of a stretch is done with, examines what it knows."""

    def __init__(self, notes: Notes, components: Components, slots_of: SlotsOf) -> None:
        self.notes = notes
        self.entries: list[ShiftReport] = []
        self._rooms = components
        self._slots_of = slots_of
        self._ends = [*notes.suite.boundaries, sum(len(s.records) for s in notes.suite.stretches)]

    def on_start(self, status: Status) -> None:
        """Nothing yet."""

    def on_shift(self, report: ShiftReport) -> None:
        """Note it."""
        self.entries.append(report)

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """Nothing."""

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Note it, and examine at the end of a stretch; a batch over the border counts to the earlier one."""
        del batch, status
        notes = self.notes
        notes.took(step)
        done = self._rooms.adaptation.records
        while len(notes.matrix) < len(self._ends) - 1 and done >= self._ends[len(notes.matrix)]:
            notes.examine(self._rooms.learner, self._slots_of)


BIN = 20


def _binned(losses: Sequence[float]) -> dict[str, Any]:
    """Mean loss of every `BIN` records, and of all; what was never trained on has none."""
    bins = [losses[i : i + BIN] for i in range(0, len(losses), BIN)]
    means = [round(sum(each) / len(each), 4) for each in bins]
    return {"bin_records": BIN, "losses": means, "mean": sum(losses) / len(losses) if losses else None}


def _commit() -> str | None:
    """Of the checkout that this runs from; None outside of one."""
    root = Path(__file__).parents[3]
    told = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S603, S607
    return told.stdout.strip() or None
