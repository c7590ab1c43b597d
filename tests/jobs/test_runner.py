"""Jobs between training steps: on whose weights, within which time, and what a failure leaves behind."""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.nn import Parameter

from streamlearn.adaptation.expert_evidence import ExpertEvidence
from streamlearn.adapters.model import attach
from streamlearn.adapters.presets import resolve
from streamlearn.backbone.load import Backbone, load, outline
from streamlearn.errors import Reason, RecordError, SnapshotError
from streamlearn.events import Event
from streamlearn.jobs import runner as job_runner
from streamlearn.jobs.experts import experts
from streamlearn.jobs.queue import EvalJob, ExampleError, ExpertsJob, GenerateJob, Job, JobQueue, SnapshotJob
from streamlearn.jobs.results import EvalResult, ExpertsResult, GenerateResult, SnapshotResult
from streamlearn.jobs.runner import JobRunner
from streamlearn.learner.evaluation import PinnedWeights
from streamlearn.learner.learner import Learner
from streamlearn.settings import AdapterSettings, BackboneSettings, LearnerSettings, StreamSettings
from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Decoder
from tests.doubles import random_examples, tiny_backbone

PIECE_S = 1.0  # what one forward pass takes on the desk's clock
EXAMPLES: tuple[dict[str, Any], ...] = (
    {"prompt": "what is the capital", "completion": " of France?"},
    {"text": "hello world"},
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fox"}]},
)
SCORE = EvalJob(EXAMPLES, generate=False, max_new_tokens=4)
SCORE_AND_WRITE = EvalJob(EXAMPLES, generate=True, max_new_tokens=4)
EXPERTS = ExpertsJob(None)
WRITE = GenerateJob("the quick brown", None, max_new_tokens=5)
BAD = EvalJob(({"text": "fine"}, {"txt": "no such form"}), generate=False, max_new_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("qwen3"))


@dataclass
class Office:
    """A desk, its queue, the learner that it must not disturb, and a clock that forward passes move."""

    backbone: Backbone
    now: float = 0.0
    save: Callable[[], SnapshotResult] = lambda: SnapshotResult(name="none", step=0)

    def __post_init__(self) -> None:
        model = attach(self.backbone.model, resolve(AdapterSettings()), seed=0)
        self.learner = Learner(model, LearnerSettings(lr=3e-2), self.backbone.device, clock=lambda: 0.0)
        self.jobs = JobQueue(8)
        decoder = Decoder(self.backbone.tokenizer, StreamSettings(), self.backbone.vocab_size)
        self.job_runner = JobRunner(
            self.jobs,
            self.learner,
            decoder,
            lambda inputs: None,
            self._experts,
            self._save,
            pack_tokens=1,
            clock=lambda: self.now,
        )
        self.learner.forward.register_forward_hook(self._pass_time)

    def _experts(self, job: ExpertsJob) -> Generator[None, None, ExpertsResult]:
        load = {bank.name: torch.ones(bank.A.shape[:2], dtype=torch.long) for bank in self.learner.banks}
        similarity = {bank.name: torch.zeros(*bank.A.shape[:2], 1) for bank in self.learner.banks}
        evidence = ExpertEvidence({0: 1}, load, similarity, {0: random_examples([5, 7, 4])})
        return experts(job, self.learner, evidence, pack_tokens=1, clock=lambda: self.now)

    def _save(self) -> SnapshotResult:
        return self.save()

    def _pass_time(self, *_: object) -> None:
        self.now += PIECE_S

    def train(self, steps: int = 1) -> list[float]:
        """Training steps, and the time that they take on the same clock."""
        batches = (Batch((), random_examples([6, 4], seed=self.learner.number)) for _ in range(steps))
        return [self.learner.step(batch.examples).loss for batch in batches]

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.learner.optimizer.parameters()]

    def run_to_end(self, job: Job) -> Any:
        """A job's answer, without a step in between."""
        future = self.jobs.submit(job)
        self.job_runner.serve(1e9)
        return future.result(0)

    def spread(self, job: Job) -> Any:
        """A job's answer when each piece is followed by a training step; it takes several."""
        future = self.jobs.submit(job)
        first = self.learner.number
        while not future.done():
            self.job_runner.serve(PIECE_S)
            self.train()
        assert self.learner.number - first > 2
        return future.result(0)


@pytest.fixture
def office(folder: Path) -> Office:
    settings = BackboneSettings(model=str(folder), dtype="float32", device="cpu")
    office = Office(load(settings, outline(settings)))
    office.train(3)
    return office


def untimed(result: EvalResult | GenerateResult | ExpertsResult) -> dict[str, Any]:
    return result.model_dump(exclude={"seconds"})


@pytest.mark.parametrize(
    "job", [SCORE, SCORE_AND_WRITE, WRITE, EXPERTS], ids=["score", "score and write", "write", "experts"]
)
def test_a_job_spread_over_steps_gives_the_figures_of_its_start(office: Office, job: Job) -> None:
    """Although training goes on behind every piece, all figures, texts and the step are those of the job's start."""
    wanted = office.run_to_end(job)
    assert untimed(office.spread(job)) == untimed(wanted)
    later = office.run_to_end(job)
    assert later.step > wanted.step
    assert untimed(later) != {**untimed(wanted), "step": later.step}  # the live weights did move on


def test_a_job_names_the_step_of_its_weights(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when copying the weights alone spends the budget: the step is the one at which they were copied."""

    class SlowCopy(PinnedWeights):
        def __init__(self, parameters: Sequence[Parameter]) -> None:
            super().__init__(parameters)
            office.now += 10 * PIECE_S

    wanted = office.run_to_end(SCORE)
    monkeypatch.setattr(job_runner, "PinnedWeights", SlowCopy)
    assert untimed(office.spread(SCORE)) == untimed(wanted)


def test_serving_changes_no_bit_of_training(folder: Path, office: Office) -> None:
    """A learner that was asked in between ends where one ends that was left alone."""
    settings = BackboneSettings(model=str(folder), dtype="float32", device="cpu")
    alone = Office(load(settings, outline(settings)))
    alone.train(3)
    office.spread(SCORE_AND_WRITE)
    alone.train(office.learner.number - alone.learner.number)
    assert all(torch.equal(one, other) for one, other in zip(office.weights(), alone.weights(), strict=True))


def test_figures_add_up(office: Office) -> None:
    """Totals of an eval are those of its examples, in the request's order."""
    result = office.run_to_end(SCORE_AND_WRITE)
    assert isinstance(result, EvalResult)
    assert (result.examples, result.step) == (3, 3)
    assert result.tokens == sum(one.tokens for one in result.per_example)
    assert result.loss * result.tokens == pytest.approx(sum(one.loss * one.tokens for one in result.per_example))
    assert [one.output is None for one in result.per_example] == [False] * 3
    assert result.exact_match is not None
    assert result.rouge_l is not None
    plain = office.run_to_end(SCORE)
    assert [one.output for one in plain.per_example] == [None] * 3
    assert (plain.exact_match, plain.rouge_l, plain.loss) == (None, None, result.loss)


def test_a_generation_is_bounded(office: Office) -> None:
    """A prompt is continued by at most the tokens asked for, a conversation is answered likewise."""
    for job in (WRITE, GenerateJob(None, ({"role": "user", "content": "hello"},), max_new_tokens=5)):
        result = office.run_to_end(job)
        assert isinstance(result, GenerateResult)
        assert 0 < result.tokens <= 5
        assert result.text


@pytest.mark.parametrize(("budget_s", "pieces"), [(0.5, 1), (1.0, 1), (2.5, 3), (1e9, 9)])
def test_a_budget_is_overrun_by_one_piece_at_most(office: Office, budget_s: float, pieces: int) -> None:
    """Work ends with the first piece that reaches the budget; the time spent is returned."""
    for job in (SCORE, SCORE, SCORE):
        office.jobs.submit(job)
    assert office.job_runner.serve(budget_s) == pieces * PIECE_S
    assert office.job_runner.busy == (pieces < 9)


def test_no_budget_is_no_work(office: Office) -> None:
    """With nothing to spend nothing is begun."""
    office.jobs.submit(SCORE)
    assert office.job_runner.serve(0.0) == 0.0
    assert office.job_runner.busy


def test_an_idle_desk_spends_nothing(office: Office) -> None:
    """No job, no time."""
    assert not office.job_runner.busy
    assert office.job_runner.serve(1.0) == 0.0


def test_a_job_is_timed_without_the_steps_between_its_pieces(office: Office) -> None:
    """Seconds are those of its own passes, however many training steps came in between."""
    assert office.run_to_end(SCORE).seconds == 3 * PIECE_S
    assert office.spread(SCORE).seconds == 3 * PIECE_S


def test_jobs_are_answered_in_the_order_asked(office: Office) -> None:
    """A short job behind a long one waits for it."""
    futures = [office.jobs.submit(job) for job in (SCORE_AND_WRITE, SnapshotJob(), WRITE)]
    done: list[Future[Any]] = []
    for future in futures:
        future.add_done_callback(done.append)
    while office.job_runner.busy:
        office.job_runner.serve(PIECE_S)
    assert done == futures


def test_a_snapshot_is_written_with_the_live_weights(office: Office) -> None:
    """Also right behind a job that had older weights swapped in."""
    seen: list[list[Tensor]] = []

    def save() -> SnapshotResult:
        seen.append(office.weights())
        return SnapshotResult(name="now", step=office.learner.number)

    office.save = save
    evaluation = office.jobs.submit(SCORE)
    snapshot = office.jobs.submit(SnapshotJob())
    office.job_runner.serve(PIECE_S)
    old = office.weights()
    office.train(2)
    live = office.weights()
    office.job_runner.serve(1e9)
    assert evaluation.result(0).step == 3
    assert snapshot.result(0) == SnapshotResult(name="now", step=5)
    assert all(torch.equal(one, other) for one, other in zip(seen[0], live, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(seen[0], old, strict=True))


def test_an_unusable_example_is_the_clients_error(office: Office) -> None:
    """The answer names the example and the reason."""
    future = office.jobs.submit(BAD)
    office.job_runner.serve(1e9)
    error = future.exception(0)
    assert isinstance(error, ExampleError)
    assert (error.index, error.reason) == (1, Reason.BAD_FORM)


def test_an_unusable_conversation_is_the_clients_error(office: Office) -> None:
    """A prompt that cannot be encoded is answered with why."""
    future = office.jobs.submit(GenerateJob(None, ({"role": "nobody", "content": "x"},), max_new_tokens=2))
    office.job_runner.serve(1e9)
    assert isinstance(future.exception(0), RecordError)


@contextmanager
def failing_in_the_middle(office: Office) -> Iterator[None]:
    """The second pass of the model raises, as when memory runs out."""
    passes = iter([None, MemoryError("no room")])

    def hook(*_: object) -> None:
        if (error := next(passes, None)) is not None:
            raise error

    with office.learner.forward.register_forward_hook(hook):
        yield


def test_a_failing_job_leaves_everything_as_it_was(office: Office) -> None:
    """Its client is answered, the event is logged, live weights are back in place, and the next job is served."""
    before = office.weights()
    addresses = [parameter.data_ptr() for parameter in office.learner.optimizer.parameters()]
    wanted = office.run_to_end(SCORE)
    with capture_logs() as events, failing_in_the_middle(office):
        future = office.jobs.submit(SCORE)
        office.job_runner.serve(1e9)
    assert isinstance(future.exception(0), MemoryError)
    assert [event["event"] for event in events] == [Event.JOB_FAILED]
    assert [parameter.data_ptr() for parameter in office.learner.optimizer.parameters()] == addresses
    assert all(torch.equal(one, other) for one, other in zip(before, office.weights(), strict=True))
    assert not office.job_runner.busy
    assert untimed(office.run_to_end(SCORE)) == untimed(wanted)


def test_a_failed_snapshot_is_answered(office: Office) -> None:
    """The client hears of the full disk; the loop does not."""

    def save() -> SnapshotResult:
        raise SnapshotError("the disk is full")

    office.save = save
    future = office.jobs.submit(SnapshotJob())
    office.job_runner.serve(1e9)
    assert isinstance(future.exception(0), SnapshotError)
    assert office.run_to_end(WRITE).tokens > 0


def test_a_cancelled_job_is_dropped(office: Office) -> None:
    """Nobody waits any more: a job in hand ends without another pass, a waiting one never begins, nothing is logged."""
    crash_guard, waiting = office.jobs.submit(SCORE), office.jobs.submit(SCORE)
    office.job_runner.serve(PIECE_S)
    crash_guard.cancel()
    waiting.cancel()
    before = office.now
    with capture_logs() as events:
        office.job_runner.serve(1e9)
    assert office.now == before
    assert events == []
    assert not office.job_runner.busy


def test_a_finished_job_is_logged(office: Office) -> None:
    """With its kind and the learner's step."""
    with capture_logs() as events:
        office.run_to_end(SCORE)
    assert [(e["event"], e["job"], e["step"]) for e in events] == [(Event.JOB_FINISHED, "EvalJob", 3)]
