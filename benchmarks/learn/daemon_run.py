"""Training a method in the daemon, in this process, without task boundaries."""

from dataclasses import asdict

from benchmarks.learn.evaluator import Evaluator, SlotsOf
from benchmarks.learn.recorder import RunRecorder
from benchmarks.learn.suite import Suite
from benchmarks.learn.trained_method import Progress, TrainedMethod
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.jobs.queue import JobQueue
from streamlearn.learner.learner import Step
from streamlearn.regimes.regime import ShiftReport
from streamlearn.regimes.regimes import Regimes
from streamlearn.settings import Settings
from streamlearn.shift.features import input_of
from streamlearn.snapshot.parts import SnapshotInfo
from streamlearn.status import Board, Clock, Phase, Status
from streamlearn.stream.record import Batch


def train_in_daemon(suite: Suite, settings: Settings, progress: Progress) -> TrainedMethod:
    """Run the daemon over the suite's stream and evaluate it at the end of each segment."""
    components = Components(settings)
    slots_of = slots_by_input(components.adaptation)
    recorder = RunRecorder(suite, Evaluator(suite, components.decoder), progress)
    observer = SegmentObserver(recorder, components, slots_of)
    Daemon(components, Board(Status(Phase.STARTING), Clock()), JobQueue(1), observer=observer).run()
    while len(recorder.matrix) < len(suite.segments):
        recorder.evaluate(components.learner, slots_of)
    components.close()
    detection = {
        "shifts": [asdict(report) for report in observer.reports],
        "probe_seconds": components.adaptation.probe_seconds,
    }
    return TrainedMethod(recorder, components.model, slots_of, detection)


def slots_by_input(adaptation: Regimes) -> SlotsOf:
    """Assign each test record the regime nearest to its input, as the daemon does for HTTP requests."""
    return lambda _, examples: adaptation.slots_of([input_of(example) for example in examples])


class SegmentObserver:
    """Observer of the daemon that evaluates the learner after the last record of each segment."""

    def __init__(self, recorder: RunRecorder, components: Components, slots_of: SlotsOf) -> None:
        self.reports: list[ShiftReport] = []
        self._recorder = recorder
        self._components = components
        self._slots_of = slots_of
        suite = recorder.suite
        self._ends = [*suite.boundaries, sum(len(segment.records) for segment in suite.segments)]

    def on_start(self, status: Status) -> None:
        """Ignore the start."""

    def on_shift(self, entry: ShiftReport) -> None:
        """Collect the report."""
        self.reports.append(entry)

    def on_snapshot(self, info: SnapshotInfo) -> None:
        """Ignore the snapshot."""

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Record the step; a batch across a boundary counts towards the earlier segment.

        The last segment is evaluated after the run, when the final batches have been trained on.
        """
        del batch, status
        recorder = self._recorder
        recorder.record(step)
        done = self._components.adaptation.state.records
        while len(recorder.matrix) < len(self._ends) - 1 and done >= self._ends[len(recorder.matrix)]:
            recorder.evaluate(self._components.learner, self._slots_of)
